"""``softstair train``: a recipe becomes a run."""

import contextlib
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Annotated, Any, cast

import tyro

from softstair.cli._arguments import given
from softstair.cli._arguments import parse as parse_flags
from softstair.train.interrupt import Interrupted
from softstair.train.presets import PresetName, preset
from softstair.train.recipe import Recipe
from softstair.train.run import recipe_of, summary_of

__all__ = ["Command", "parse"]


@dataclass(frozen=True)
class Command:
    """Trains a quantised network by additive noise annealing.

    Without flags: a ternary network on the embedded digits. A preset sets every flag that is not
    given, and --epochs stretches its schedule and its learning-rate drop in proportion; --help
    after a --preset shows that preset's values. Leaves a run directory with config.json,
    metrics.jsonl (a line an epoch), checkpoint/, picture.png and summary.json.
    Exit code 0: done; 2: an error; 130 or 143: stopped by a signal, and kept for --resume.
    """

    preset: PresetName = "digits"
    """Recipe whose values stand where no flag is given."""
    out: Path | None = None
    """Run directory; None: the next free one below runs/."""
    resume: bool = False
    """Go on with the run in --out, as it was begun; if there is none, begin it."""
    every_fold: bool = False
    """Train every fold in turn, in --out/fold-0, --out/fold-1, …, and give mean and spread."""
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
        if self.threads is not None and not 1 <= self.threads <= 1024:
            raise ValueError(f"--threads must be from 1 to 1024, but {self.threads} was given.")
        if self.resume and self.out is None:
            raise ValueError("--resume goes on with a run, but --out does not say which: name it.")
        if self.every_fold and self.recipe.fold:
            raise ValueError(
                f"--every-fold trains them all, but --fold {self.recipe.fold} was given: leave out "
                "one of the two."
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
        out = self.out or next_free(Path("runs"), self.recipe.data.rpartition(":")[2])
        try:
            summaries = [self._train(recipe, path) for recipe, path in self._runs(out)]
        except ValueError:
            if self.out is None:
                with contextlib.suppress(OSError):
                    out.rmdir()  # if it is empty: nobody asked for it
            raise
        from softstair.cli import _train_picture, _train_tables

        runs = [path for _, path in self._runs(out)]
        title = _train_tables.conclusion(summaries)
        picture = _train_picture.draw(runs, title, out / "picture.png")
        _train_tables.show(runs, summaries, picture)
        return 0

    def _runs(self, out: Path) -> list[tuple[Recipe, Path]]:
        if not self.every_fold:
            return [(self.recipe, out)]
        folds = range(self.recipe.folds)
        return [(replace(self.recipe, fold=fold), out / f"fold-{fold}") for fold in folds]

    def _train(self, recipe: Recipe, out: Path) -> dict[str, Any]:
        from softstair.cli._train_progress import Progress
        from softstair.train.events import Events
        from softstair.train.job import train

        with contextlib.ExitStack() as watching:
            label = f"fold {recipe.fold}" if self.every_fold else ""
            progress = watching.enter_context(Progress(label, self.resume))
            watchers: list[Any] = [progress]
            if self.tensorboard:
                watchers.append(watching.enter_context(Events(out / "events")))
            try:
                return train(
                    recipe,
                    out,
                    data_dir=self.data_dir,
                    device=self.device,
                    resume=self.resume,
                    watchers=watchers,
                    threads=self.threads,
                    loading=progress.loading,
                )
            except Interrupted as stop:
                watching.close()
                raise SystemExit(self._farewell(str(stop), stop.number, out)) from None
            except KeyboardInterrupt:
                # At once: while it got ready, or by a second signal.
                watching.close()
                if recipe_of(out) is None:
                    raise
                raise SystemExit(self._farewell("SIGINT", 2, out)) from None

    def _farewell(self, stop: str, number: int, out: Path) -> int:
        words = ["softstair", "train", "--resume", "--out"]
        words += [str(out.parent), "--every-fold"] if self.every_fold else [str(out)]
        # A run directory does not decide which code runs: the user says it again.
        own = (("--model", self.recipe.model), ("--data", self.recipe.data))
        words += [word for pair in own if ":" in pair[1] for word in pair]
        for flag, value in (("--data-dir", str(self.data_dir)), ("--device", self.device)):
            if value != str(getattr(Command, flag[2:].replace("-", "_"))):
                words += [flag, value]
        words += ["--tensorboard"] if self.tensorboard else []
        said = f"softstair train: stopped by {stop}, and kept: go on with {shlex.join(words)}"
        print(said, file=sys.stderr)
        return 128 + number


def parse(words: Sequence[str], prog: str) -> Command:
    """The command that the words describe, on top of the preset, or else the run, that they name.

    A run that goes on is told apart from one that was asked for anew when it is opened: a recipe
    that differs is refused there.
    """
    base = Command()
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


def _begun(words: Sequence[str]) -> Recipe | None:
    """The recipe of the run that is to go on, if there is one."""
    directory = _directory(words)
    return None if directory is None else recipe_of(directory)


def is_done(words: Sequence[str]) -> bool:
    """Whether the run that is to go on has nothing left to do."""
    directory = _directory(words)
    return directory is not None and summary_of(directory) is not None


def _directory(words: Sequence[str]) -> Path | None:
    """Where the run is that is to go on; of folds, the first."""
    out = given("--out", words)
    if "--resume" not in words or not out:
        return None
    folds = {"--every-fold", "--every_fold"} & set(words)
    return Path(out) / "fold-0" if folds else Path(out)


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
