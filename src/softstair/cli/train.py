"""``softstair train``: train one network, or one per fold, in run directories."""

import contextlib
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

from softstair._check import integer
from softstair._errors import SoftstairError
from softstair._files import output_file
from softstair.cli._args import flag, words_of
from softstair.cli._output import (
    FEWEST,
    Progress,
    Stoppable,
    bars,
    in_percent,
    plural,
    print_line,
    print_table,
    same_command,
)
from softstair.train import parallel, records
from softstair.train.network import levels_of
from softstair.train.parallel import StopRequest
from softstair.train.pool import ProcessPool, Task, worker_count
from softstair.train.progress import train_with_events
from softstair.train.recipe import OPTIONS, PRESETS, PresetName, Recipe, preset

MAX_FOLDS = 10_000
"""Folds that one command trains."""
CURVE = 40
"""Characters of a curve: with its name and range it fits into 80 columns."""


@contextlib.contextmanager
def rank_zero_output() -> Iterator[None]:
    """Discard output inside in all processes but rank 0; an error ends it."""
    if not parallel.torchrun_ranks()[0]:
        yield
        return
    with open(os.devnull, "w") as null, contextlib.ExitStack() as silent:
        silent.enter_context(contextlib.redirect_stdout(null))
        silent.enter_context(contextlib.redirect_stderr(null))
        try:
            yield
        except parallel.ConnectionLost:  # the process that ended has said why
            raise SystemExit(2) from None


parsing = rank_zero_output
"""Of the processes that torchrun starts, only the first prints help and errors."""


@dataclass(frozen=True)
class Command:
    """Train a quantised network by additive noise annealing.

    Without flags: a ternary network on the embedded digits. A preset sets every flag that is not
    given; --preset NAME --help shows its values. --epochs scales the schedule and the epoch of the
    learning-rate drop in proportion. Writes a run directory with config.json, metrics.jsonl (one
    line per epoch), checkpoint/, picture.png and summary.json. Started by torchrun, the processes
    train one run together and share each batch.

    Exit code 0: done; 2: an error; 130 or 143: stopped by a signal, continue with --resume.
    """

    preset: PresetName = flag("digits", "Preset to start from; other flags override it.")
    out: Path | None = flag(None, "Run directory (default: the next free one in runs/).")
    resume: bool = flag(
        False, "Continue the run in --out; with flags of a recipe, start it if there is none."
    )
    every_fold: bool = flag(False, "Train every fold, in --out/fold-0, --out/fold-1, ….")
    jobs: Literal["auto"] | int = flag(
        "auto", "Folds to train in parallel (auto: one per core, or up to 5 on a GPU)."
    )
    data_dir: Path = flag(Path("data"), "Folder of the data sets; see softstair data status.")
    device: str = flag("auto", "cpu, cuda or cuda:N (auto: a GPU if there is one).")
    threads: int | None = flag(
        None,
        "CPU threads (default: 1 for a small network, otherwise torch's choice; folds that share a "
        "GPU share the cores).",
    )
    recipe: Recipe = PRESETS["digits"]

    @classmethod
    def defaults(cls, given: Mapping[str, Any]) -> "Command":
        """Return the values of the preset, or of the run to continue, that the flags name.

        A flag that differs from the run to continue is an error when the run is opened.
        """
        base = cls()
        if "preset" in given:
            base = replace(base, recipe=preset(given["preset"]))
        elif (recipe := _begun(given)) is not None:
            return replace(base, recipe=recipe, resume=True)
        elif given.get("resume") and not given.keys() & {*OPTIONS} and "out" in given:
            _check_begun(given["out"])
        recipe = base.recipe
        recipe = replace(recipe, network=recipe.network.for_changes(given))
        if given.get("static_std") and given.get("static_mean", recipe.noise.static_mean):
            recipe = recipe.replace(anneal_from=0.0)  # that of the preset has no effect
        return replace(base, recipe=recipe.rescaled(given.get("epochs", recipe.run.epochs)))

    def run(self) -> int:
        with rank_zero_output():
            self._check()
            with parallel.joined(self.device):
                name = self.recipe.data.name.rpartition(":")[2]
                out = parallel.from_rank_zero(lambda: self.out or next_free(Path("runs"), name))
                failed = 0
                with Stoppable("train", lambda: self._again(out)) as stop:
                    failed = self._train_all(out)
            if stop.exit_code:
                return stop.exit_code
            if failed:
                raise SoftstairError(
                    f"{failed} of {self.recipe.data.folds} folds failed; when that is corrected, "
                    f"continue with {self._again(out)}"
                )
        with Stoppable("train", lambda: self._again(out)) as stop:
            if not parallel.torchrun_ranks()[0]:
                _show([path for _, path in self._runs(out)], out / "picture.png")
        return stop.exit_code or 0

    def _check(self) -> None:
        """Raise an error if flags exclude each other, or do not fit what is in --out."""
        check_workers(self.jobs, self.threads)
        if self.resume and self.out is None:
            raise SoftstairError("--resume needs --out, the run to continue.")
        if not self.every_fold:
            if self.jobs != "auto":
                raise SoftstairError(f"--jobs {self.jobs} needs --every-fold.")
            return
        integer("folds", self.recipe.data.folds, 2, MAX_FOLDS)
        if self.recipe.data.fold:
            raise SoftstairError(
                f"--every-fold and --fold {self.recipe.data.fold} exclude each other."
            )
        if (processes := parallel.torchrun_ranks()[1]) > 1:
            raise SoftstairError(
                f"--every-fold trains each fold in one process, but torchrun started {processes}: "
                "leave out torchrun, or give one --fold."
            )
        if self.out and (self.out / "config.json").exists():
            raise SoftstairError(
                f"{str(self.out)!r} holds one run and no folds: leave out --every-fold to continue "
                "it, or give another --out."
            )
        is_used = self.out and (
            self.out.is_file() or (self.out.is_dir() and any(self.out.iterdir()))
        )
        if is_used and not self.resume:
            raise SoftstairError(
                f"--out must be new or empty, but {str(self.out)!r} is not: continue what is there "
                "with --resume, or give another --out."
            )

    def _runs(self, out: Path) -> list[tuple[Recipe, Path]]:
        if not self.every_fold:
            return [(self.recipe, out)]
        folds = range(self.recipe.data.folds)
        return [(self.recipe.replace(fold=fold), out / f"fold-{fold}") for fold in folds]

    def _train_all(self, out: Path) -> int:
        """Train what is not finished; return how many folds failed."""
        try:
            left = parallel.from_rank_zero(lambda: list(self._unfinished(out)))
            if left and self.every_fold:
                paths = (path for _, path in self._runs(out))
                records.refuse_other_data(paths, {self.recipe.data.name}, self.data_dir)
            count = lambda threads: worker_count(
                self.jobs, self.device, len(left), threads or self.threads
            )
            with Progress("train", self.resume) as progress:
                if len(left) < 2 or count(None) == 1:
                    for recipe, path in left:
                        self._train_here(recipe, path, progress)
                    return 0
                tasks = (Task(f"fold {recipe.data.fold}", recipe, path) for recipe, path in left)
                pool = ProcessPool(
                    tasks,
                    progress.show,
                    count,
                    self._settings(),
                    most=count(None),
                    again="use `resume`",
                )
                with StopRequest() as stop, pool:
                    return pool.run(stop)
        except (ValueError, KeyboardInterrupt):
            if self.out is None:
                with contextlib.suppress(OSError):
                    out.rmdir()  # if it is empty: nobody asked for it
            raise

    def _unfinished(self, out: Path) -> Iterator[tuple[Recipe, Path]]:
        """Yield the runs that are not finished; finished ones must have this recipe."""
        for recipe, path in self._runs(out):
            begun = records.recipe_of(path) if self.resume else None
            if begun is not None and records.summary_of(path) is not None:
                records.check_same_recipe(recipe, begun, path)
                continue
            yield recipe, path

    def _train_here(self, recipe: Recipe, out: Path, progress: Progress) -> None:
        label = f"fold {recipe.data.fold}" if self.every_fold else ""
        progress.show(label, {"kind": "start"})
        send = lambda event: progress.show(label, event)
        train_with_events(send, recipe, out, **self._settings())
        progress.show(label, {"kind": "done"})

    def _settings(self) -> dict[str, Any]:
        names = ("data_dir", "device", "resume", "threads")
        return {name: getattr(self, name) for name in names}

    def _again(self, out: Path) -> str:
        """Return the command that continues what is in a directory, if it holds a run."""
        if not any(records.recipe_of(path) for _, path in self._runs(out)):
            is_first = any(out.glob("**/start")) or any(out.glob("**/teacher"))
            same = same_command("train")
            return f"{same} --resume --out {shlex.quote(str(out))}" if is_first else ""
        words = ["softstair", "train", "--resume", "--out", str(out)]
        names = ["every_fold", "data_dir", "device", "jobs"]
        # A run keeps its threads; folds that are not begun need the flag.
        names += ["threads"] if self.every_fold else []
        return shlex.join([*words, *words_of(self, *names)])


def check_workers(jobs: Literal["auto"] | int, threads: int | None) -> None:
    if jobs != "auto":
        integer("jobs", jobs, 1, 1024)
    if threads is not None:
        integer("threads", threads, 1, records.MAX_THREADS)


def next_free(folder: Path, name: str) -> Path:
    """Make and return folder/name-1, or the next number that is free."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = folder / f"{name}-{number}"
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError


def _begun(given: Mapping[str, Any]) -> Recipe | None:
    """Return the recipe of the run to continue, if there is one; of folds, the first begun."""
    out = given.get("out")
    if not given.get("resume") or out is None:
        return None
    if not given.get("every_fold"):
        return records.recipe_of(out)
    recipes = (records.recipe_of(path) for path in sorted(out.glob("fold-*")) if path.is_dir())
    recipe = next(filter(None, recipes), None)
    return recipe and recipe.replace(fold=0)


def _check_begun(out: Path) -> None:
    """Raise SoftstairError if a directory holds no run: no flag says which one to start."""
    if not [*out.glob("config.json"), *out.glob("fold-*/config.json")]:
        raise SoftstairError(
            f"--resume needs a run to continue, but {str(out)!r} holds none (no config.json): "
            "check --out, or give the flags of the run to start it, such as --preset."
        )


def _show(runs: list[Path], picture: Path) -> None:
    """Print the accuracy of every fold, the course of the last, and where everything is."""
    summaries = [summary for run in runs if (summary := records.summary_of(run)) is not None]
    accuracies = {
        "valid_accuracy": "validation",
        "best_valid_accuracy": "best epoch's",
        "test_accuracy": "test",
    }
    if summaries[0]["valid_accuracy"] is None:  # trained on all examples
        accuracies = {"test_accuracy": "test"}
    rows = (
        (
            summary["config"]["recipe"]["fold"],
            *("none" if summary[name] is None else f"{summary[name]:.2%}" for name in accuracies),
            f"{summary['images_per_second']:,.0f}",
            f"{summary['seconds']:.1f}",
        )
        for summary in summaries
    )
    names = ("fold", *accuracies.values(), "examples/s", "seconds")
    print_table("accuracy of the network without noise", (), names, rows)
    metrics = [records.metrics_of(run) for run in runs]
    result = _result(summaries)
    print_line("\n".join([*_courses(metrics[-1]), result, summaries[-1]["frozen"]]))
    _draw(metrics, result, picture)
    print_line(f"picture: {picture}")
    print_line(f"runs: {runs[0]} to {runs[-1].name}" if len(runs) > 1 else f"run: {runs[0]}")


def _result(summaries: list[dict[str, Any]]) -> str:
    """Return the result in one line."""
    recipe = Recipe.from_flat(summaries[0]["config"]["recipe"])
    data, epochs = summaries[0]["config"]["data"]["name"], plural(recipe.run.epochs, "epoch")
    subject = f"{levels_of(recipe)} network on {data}, {epochs}"
    if summaries[0]["valid_accuracy"] is None:
        return f"{subject}: {in_percent([summaries[0]['test_accuracy']])} test accuracy"
    scores = [summary["valid_accuracy"] for summary in summaries]
    spread = "95 % interval" if len(scores) >= FEWEST else "range"
    folds = f" (mean and {spread} of {len(scores)} folds)" if len(scores) > 1 else ""
    return f"{subject}: {in_percent(scores)} validation accuracy{folds}"


def _courses(metrics: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the accuracy and the noise of each layer over the epochs, as small curves."""
    name, label = "valid_accuracy", "validation accuracy"
    if metrics[0][name] is None:  # trained on all examples
        name, label = "train_accuracy", "training accuracy"
    scores = [line[name] for line in metrics]
    span = f"{min(scores):.1%} to {max(scores):.1%}"
    yield f"{label:<19}  {_curve(scores, min(scores))}  {span}"
    for layer in range(len(metrics[0].get("noise", ()))):
        std = [line["noise"][layer][1] for line in metrics]
        yield f"noise of layer {layer:<5} {_curve(std)}  {max(std):.2g} to {min(std):.2g}"


def _curve(values: list[float], bottom: float = 0.0) -> str:
    """Return a curve from the bottom to its highest value."""
    width = min(len(values), CURVE)
    chosen = [values[index * len(values) // width] for index in range(width)]
    height = max(values) - bottom or 1.0
    return bars([(value - bottom) / height for value in chosen])


def _draw(metrics: list[list[dict[str, Any]]], title: str, out: Path) -> None:
    """Draw accuracy and noise over the epochs, folds of one recipe in one picture."""
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    epochs = np.arange(1, len(metrics[0]) + 1)
    figure = Figure(figsize=(8, 6.4), layout="constrained")  # it needs no display and no closing
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    above.set_title(title, fontsize="medium")
    for name, label, colour in (
        ("train_accuracy", "training, with noise", "tab:orange"),
        ("valid_accuracy", "validation, without noise", "tab:blue"),
    ):
        if metrics[0][0][name] is None:  # trained on all examples
            continue
        values = np.array([[100 * line[name] for line in lines] for lines in metrics])
        above.plot(epochs, values.mean(0), color=colour, label=label)
        above.fill_between(epochs, values.min(0), values.max(0), color=colour, alpha=0.2, lw=0)
    folds = f", mean and range of {len(metrics)} folds" if len(metrics) > 1 else ""
    above.set_ylabel(f"accuracy in %{folds}")
    above.legend(loc="lower right")
    layers = len(metrics[0][0].get("noise", ()))
    shades = colormaps["viridis"](np.linspace(0.0, 0.85, max(layers, 1)))
    for layer in range(layers):
        std = [line["noise"][layer][1] for line in metrics[0]]
        below.plot(epochs, std, color=shades[layer], label=f"layer {layer}")
    below.set_ylabel("noise, std in quanta")
    below.set_xlabel("epoch")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    if layers:
        below.legend(loc="upper right", ncols=2 if layers > 5 else 1, fontsize="small")
    with output_file(out, "out", (".png",)) as partial:
        figure.savefig(partial, dpi=120)
