"""``softstair train``: a recipe becomes a run."""

import contextlib
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import tyro

from softstair.cli._arguments import given
from softstair.cli._arguments import parse as parse_flags
from softstair.train import parallel
from softstair.train.interrupt import Interrupted
from softstair.train.recipe import PresetName, Recipe, preset
from softstair.train.records import MAX_THREADS, recipe_of, refuse_other_data, summary_of

if TYPE_CHECKING:
    from softstair.cli._train_progress import Progress

__all__ = ["Command", "parse"]


@dataclass(frozen=True)
class Command:
    """Trains a quantised network by additive noise annealing.

    Without flags: a ternary network on the embedded digits. A preset sets every flag that is not
    given, and --epochs stretches its schedule and its learning-rate drop in proportion; --help
    after a --preset shows that preset's values. Leaves a run directory with config.json,
    metrics.jsonl (a line an epoch), checkpoint/, picture.png and summary.json.
    Exit code 0: done; 2: an error; 130 or 143: stopped by a signal, and kept for --resume.
    Under torchrun, its processes train one run together, each its part of --batch.
    """

    preset: PresetName = "digits"
    """Recipe whose values stand where no flag is given."""
    out: Path | None = None
    """Run directory; None: the next free one below runs/."""
    resume: bool = False
    """Go on with the run in --out, as it was begun; if there is none, begin it."""
    every_fold: bool = False
    """Train every fold, in --out/fold-0, --out/fold-1, …, and give mean and spread."""
    together: Literal["auto"] | int = "auto"
    """Folds of --every-fold that train at a time, in processes of their own; 1: one after another
    in this one; auto: on a CPU as many as it has cores for, on a GPU up to five."""
    data_dir: Path = Path("data")
    """Folder with the data sets; softstair data status says what is there."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto: a GPU if there is one."""
    threads: int | None = None
    """Threads of the CPU; None: one for a small network, else as many as torch takes."""
    tensorboard: bool = False
    """Write TensorBoard events to --out/events as well."""
    recipe: Annotated[Recipe, tyro.conf.arg(name="")] = field(default_factory=Recipe)

    def run(self) -> int:
        with parallel.rank_zero_output():
            self._refuse()
        with parallel.joined(self.device) as team:
            if not team.is_rank_zero:
                return self._follow(team)
            out = self.out or next_free(Path("runs"), self.recipe.data.rpartition(":")[2])
            self._lead(out, team)
        from softstair.cli import _train_picture, _train_tables

        runs = [path for _, path in self._runs(out)]
        summaries = [summary for path in runs if (summary := summary_of(path)) is not None]
        title = _train_tables.conclusion(summaries)
        picture = _train_picture.draw(runs, title, out / "picture.png")
        _train_tables.show(runs, summaries, picture)
        return 0

    def _refuse(self) -> None:
        """Flags that do not go together, or not with what is there."""
        refuse_threads(self.threads)
        if self.resume and self.out is None:
            raise ValueError("--resume goes on with a run, but --out does not say which: name it.")
        if self.every_fold and self.recipe.fold:
            raise ValueError(
                f"--every-fold trains them all, but --fold {self.recipe.fold} was given: leave out "
                "one of the two."
            )
        if self.every_fold and (processes := parallel.torchrun_ranks()[1]) > 1:
            raise ValueError(
                f"--every-fold trains each fold in one process, but torchrun started {processes}, "
                "which train one run together: leave out torchrun, or name one --fold."
            )
        if self.every_fold and not self.resume and self.out and _is_taken(self.out):
            raise ValueError(
                f"--out must be new or empty, but {str(self.out)!r} is not: go on with what is "
                "there by --resume, or give another --out."
            )
        if self.every_fold and self.out and (self.out / "config.json").exists():
            raise ValueError(
                f"{str(self.out)!r} holds one run and no folds: leave out --every-fold to go on "
                "with it, or give another --out."
            )
        if self.together != "auto" and not self.every_fold:
            raise ValueError(
                f"--together is for the folds of --every-fold, but {self.together} was given "
                "without it: leave it out, or give both."
            )

    def _lead(self, out: Path, team: parallel.Team) -> None:
        """Trains, and says how to go on if that is not all."""
        try:
            failed = self._train_all(out, team)
        except ValueError:
            if self.out is None:
                with contextlib.suppress(OSError):
                    out.rmdir()  # if it is empty: nobody asked for it
            raise
        except (Interrupted, KeyboardInterrupt) as stop:
            # The latter at once: while it got ready, or by a second signal.
            number = stop.number if isinstance(stop, Interrupted) else signal.SIGINT
            raise SystemExit(self._farewell(number, out)) from None
        if failed:
            which = f"{failed} of {self.recipe.folds} folds failed, as told above"
            raise ValueError(f"{which}: once that is mended, go on with {self._again(out)}")

    def _follow(self, team: parallel.Team) -> int:
        """Trains along with the first process of the team, which says all that there is to say."""
        try:
            runs: list[tuple[Recipe, Path]] = team.broadcast(list)
            for recipe, path in runs:
                self._train(recipe, path, team)
        except parallel.NotRankZero:
            return 2
        except (Interrupted, KeyboardInterrupt) as stop:
            return 128 + (stop.number if isinstance(stop, Interrupted) else signal.SIGINT)
        return 0

    def _runs(self, out: Path) -> Iterator[tuple[Recipe, Path]]:
        if not self.every_fold:
            yield self.recipe, out
            return
        for fold in range(self.recipe.folds):
            yield replace(self.recipe, fold=fold), out / f"fold-{fold}"

    def _train_all(self, out: Path, team: parallel.Team) -> int:
        """Trains what is not done yet; returns how many folds failed, each of which was told of."""
        from softstair.cli._train_progress import Progress
        from softstair.train.pool import worker_count

        number = worker_count(self.together, self.device, self.recipe.folds, self.threads or 1)
        left = self._unfinished(out)
        first = team.broadcast(lambda: list(islice(left, number if self.every_fold else 1)))
        if first and self.every_fold:
            refuse_other_data(
                (path for _, path in self._runs(out)), {self.recipe.data}, self.data_dir
            )
        with Progress(self.resume) as progress:
            if len(first) > 1:
                return self._train_together(chain(first, left), len(first), progress)
            for recipe, path in chain(first, left):
                self._watch(recipe, path, progress, team)
        return 0

    def _unfinished(self, out: Path) -> Iterator[tuple[Recipe, Path]]:
        """The runs that are not done yet; those that are must be of this recipe."""
        from softstair.train.records import check_same_recipe

        for recipe, path in self._runs(out):
            begun = recipe_of(path) if self.resume else None
            if begun is None or summary_of(path) is None:
                yield recipe, path
            else:
                check_same_recipe(recipe, begun, path)

    def _train_together(
        self, runs: Iterator[tuple[Recipe, Path]], number: int, progress: "Progress"
    ) -> int:
        from softstair.train.interrupt import StopRequest
        from softstair.train.pool import ProcessPool, Task, worker_count

        settings = {
            "data_dir": str(self.data_dir),
            "device": self.device,
            "resume": self.resume,
            "threads": self.threads,
            "tensorboard": self.tensorboard,
        }
        tasks = (Task(f"fold {recipe.fold}", recipe, path) for recipe, path in runs)
        count = lambda threads: worker_count(
            self.together, self.device, number, threads or self.threads
        )
        again = "use `resume`"
        with (
            StopRequest() as stop,
            ProcessPool(tasks, progress.told, count, settings, alike=True, again=again) as pool,
        ):
            return pool.run(stop)

    def _watch(self, recipe: Recipe, out: Path, progress: "Progress", team: parallel.Team) -> None:
        from softstair.train.progress import EventSender, TensorBoardEvents

        label = f"fold {recipe.fold}" if self.every_fold else ""
        progress.told(label, {"kind": "start"})
        sender = EventSender(lambda news: progress.told(label, news))
        with contextlib.ExitStack() as watching:
            watchers: list[Any] = [sender]
            if self.tensorboard:
                watchers.append(watching.enter_context(TensorBoardEvents(out / "events")))
            self._train(recipe, out, team, watchers=watchers, loading=sender.loading)
        progress.told(label, {"kind": "done"})

    def _train(self, recipe: Recipe, out: Path, team: parallel.Team, **watching: Any) -> None:
        from softstair.train.loop import train

        train(
            recipe,
            out,
            data_dir=self.data_dir,
            device=self.device,
            resume=self.resume,
            threads=self.threads,
            team=team,
            **watching,
        )

    def _farewell(self, number: int, out: Path) -> int:
        """Says how to go on after a signal; returns the exit code."""
        if not any(recipe_of(path) for _, path in self._runs(out)):
            again = "interrupted before anything was kept: give the same command again."
            print(f"softstair train: {again}", file=sys.stderr)
            return 128 + number
        stop = signal.Signals(number).name
        said = f"softstair train: stopped by {stop}, and kept: go on with {self._again(out)}"
        print(said, file=sys.stderr)
        return 128 + number

    def _again(self, out: Path) -> str:
        """The command that goes on with what is there."""
        words = [*parallel.launch_command(), "softstair", "train", "--resume", "--out"]
        words += [str(out), "--every-fold"] if self.every_fold else [str(out)]
        # A run directory does not decide which code runs: the user says it again.
        own = (("--model", self.recipe.model), ("--data", self.recipe.data))
        words += [word for pair in own if ":" in pair[1] for word in pair]
        names = ["data_dir", "device", "together"]
        names += ["threads"] if self.every_fold else []  # those that have not begun need it
        for name in names:
            if (value := getattr(self, name)) != getattr(Command, name):
                words += [f"--{name.replace('_', '-')}", str(value)]
        words += ["--tensorboard"] if self.tensorboard else []
        return shlex.join(words)


def parse(words: Sequence[str], prog: str) -> Command:
    """The command that the words describe, on top of the preset, or else the run, that they name.

    A run that goes on is told apart from one that was asked for anew when it is opened: a recipe
    that differs is refused there.
    """
    with parallel.rank_zero_output():
        return _parse(words, prog)


def _parse(words: Sequence[str], prog: str) -> Command:
    base = Command()
    refuse_no_number(given("--together", words))
    if (name := given("--preset", words)) is not None:
        base = replace(base, preset=cast(PresetName, name), recipe=preset(name))
    elif (begun := _begun(words)) is not None:
        if not is_done(words):
            for flag, function in (("--model", begun.model), ("--data", begun.data)):
                refuse_strange_code(function, flag, given(flag, words))
        return parse_flags(Command, words, prog, default=replace(base, recipe=begun))
    with contextlib.suppress(ValueError):  # what is no number is refused as a flag below
        if (epochs := given("--epochs", words)) is not None:
            base = replace(base, recipe=base.recipe.rescaled(int(epochs)))
    return parse_flags(Command, words, prog, default=base)


def refuse_strange_code(function: str, flag: str, repeated: str | None) -> None:
    """A run directory may come from anybody: code that it names runs only if the user names it."""
    if ":" in function and repeated != function:
        raise ValueError(
            f"the run was begun with {flag} {function}, which is code of its own, and is not "
            f"called because a file says so: give {flag} {function} again if you trust it."
        )


def refuse_threads(threads: int | None) -> None:
    """Refuses a number of threads that cannot be."""
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise ValueError(f"--threads must be from 1 to {MAX_THREADS}, but {threads} was given.")


def refuse_no_number(together: str | None) -> None:
    """``--together`` is a number or a word: tyro's complaint would name one of them alone."""
    if together in (None, "auto"):
        return
    if not (together.isdecimal() and 1 <= int(together[:9]) <= 1024):
        raise ValueError(f"--together must be auto or from 1 to 1024, but {together!r} was given.")


def _begun(words: Sequence[str]) -> Recipe | None:
    """The recipe of the run that is to go on, if there is one; of folds, the first that began."""
    found = (recipe_of(directory) for directory in _directories(words))
    begun = next((recipe for recipe in found if recipe is not None), None)
    return replace(begun, fold=0) if begun and _are_folds(words) else begun


def is_done(words: Sequence[str]) -> bool:
    """Whether the run that is to go on, or every fold of it, has nothing left to do."""
    begun = _begun(words)
    if begun is None:
        return False
    out = Path(given("--out", words) or "")
    names = (f"fold-{fold}" for fold in range(begun.folds)) if _are_folds(words) else iter([""])
    return all(summary_of(out / name) is not None for name in names)


def _directories(words: Sequence[str]) -> list[Path]:
    """Where there may be a run that is to go on."""
    out = given("--out", words)
    if "--resume" not in words or not out:
        return []
    if not _are_folds(words):
        return [Path(out)]
    folds = [path for path in Path(out).glob("fold-*") if path.name[5:].isdecimal()]
    return sorted(folds, key=lambda path: int(path.name[5:]))


def _are_folds(words: Sequence[str]) -> bool:
    return not {"--every-fold", "--every_fold"}.isdisjoint(words)


def _is_taken(out: Path) -> bool:
    return out.is_file() or (out.is_dir() and any(out.iterdir()))


def next_free(folder: Path, name: str) -> Path:
    """A new directory, for this process alone: folder/name-1, or with the next number."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = folder / f"{name}-{number}"
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError
