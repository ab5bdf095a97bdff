"""One training from end to end: data, network, run directory, loop, summary."""

import platform
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import softstair
from softstair import kernels
from softstair.data import Dataset, Loading, load
from softstair.data.examples import Examples
from softstair.data.folds import split
from softstair.train import loop
from softstair.train.evaluate import evaluate
from softstair.train.loop import Watch
from softstair.train.machine import (
    device_named,
    enough_memory,
    own_settings,
    refuse_absent_kernels,
    threads_for,
)
from softstair.train.network import make_network, table
from softstair.train.recipe import Recipe
from softstair.train.run import Run, RunError
from softstair.train.state import State

__all__ = ["train"]


def train(
    recipe: Recipe,
    out: Path | str,
    data_dir: Path | str = "data",
    device: str = "auto",
    resume: bool = False,
    watchers: Sequence[Watch] = (),
    threads: int | None = None,
    loading: Loading | None = None,
    dataset: Dataset | None = None,
    model: nn.Module | None = None,
) -> dict[str, Any]:
    """Trains by a recipe in a run directory; returns the summary. SIGINT and SIGTERM raise
    :class:`Interrupted <softstair.train.Interrupted>` once everything is kept.

    ``resume`` goes on with the run that is there, if there is one; without it, a run that is there
    is refused. ``threads`` is for the CPU; None leaves the choice to :func:`threads_for`, and a run
    that goes on keeps those it was begun with. ``dataset`` and ``model`` stand in for what the
    recipe names, for those who have them at hand; to resume, give the same ones again.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as out:
    ...     summary = train(Recipe(limit=200, epochs=1, batch=32), out)
    >>> summary["epochs"], 0 < summary["valid_accuracy"] <= 1
    (1, True)
    """
    with Run.hold(Path(out)) as run:
        begun = run.recipe
        if begun is not None and not resume:
            raise RunError(
                f"the run directory {str(out)!r} holds a run already: go on with it by --resume, "
                "or give another --out."
            )
        if begun is not None:
            refuse_other_recipe(recipe, begun, Path(out))
        if begun is not None and (summary := run.summary) is not None:
            return summary
        place = device_named(device)
        dataset = load(recipe.data, data_dir, loading) if dataset is None else dataset
        dataset = dataset if recipe.limit is None else dataset.sample(recipe.limit)
        refuse_absent_kernels(recipe, place)
        asked = nullcontext() if recipe.kernels == "auto" else kernels.use(recipe.kernels)
        with own_settings(recipe, place), asked:
            torch.manual_seed(recipe.seed)
            with enough_memory(recipe):
                network = make_network(recipe, dataset, model)
                threads = run.threads or threads or threads_for(network, recipe.batch)
                torch.set_num_threads(threads)
                own = model is not None
                return _train(recipe, run, dataset, network, place, Watchers(watchers), own)


def _train(
    recipe: Recipe,
    run: Run,
    dataset: Dataset,
    network: nn.Module,
    device: torch.device,
    watch: Watch,
    own: bool,
) -> dict[str, Any]:
    parts = split(dataset, recipe.fold, recipe.folds)
    numbers = dataset.mean, dataset.std, device
    training, valid = (Examples(dataset.x[part], dataset.y[part], *numbers) for part in parts)
    state = State(recipe, network, len(training), device, own)
    config = {**describe(recipe, dataset, device), "step": state.treatment.to_json()}
    run.begin(config, table(state.network))
    run.resume(state)
    loop.train(state, training, valid, run, watch)
    test_accuracy = None
    if dataset.test_x is not None and dataset.test_y is not None:
        test = Examples(dataset.test_x, dataset.test_y, *numbers)
        test_accuracy = evaluate(state.network, test)[1]
    accuracies = [line["valid_accuracy"] for line in state.history]
    images = recipe.epochs * state.steps * recipe.batch
    summary = {
        "valid_accuracy": accuracies[-1],
        "best_valid_accuracy": max(accuracies),
        "test_accuracy": test_accuracy,
        "epochs": recipe.epochs,
        "images_per_second": images / max(state.seconds, 1e-9),
        "seconds": state.seconds,
        "config": config,
    }
    run.finish(summary)
    return summary


def refuse_other_recipe(given: Recipe, begun: Recipe, out: Path) -> None:
    """A run goes on as it was begun."""
    for name in begun.differences(given):
        raise RunError(
            f"the run in {str(out)!r} was begun with {name} = {getattr(begun, name)!r}, but "
            f"{getattr(given, name)!r} was given: leave it out to resume, or give another --out."
        )


def describe(recipe: Recipe, dataset: Dataset, device: torch.device) -> dict[str, Any]:
    """config.json: everything needed to repeat a run."""
    digest = zlib.crc32(repr((dataset.classes, dataset.mean, dataset.std)).encode())
    for part in (dataset.x, dataset.y, dataset.groups, dataset.test_x, dataset.test_y):
        digest = zlib.crc32(b"" if part is None else part.cpu().numpy().tobytes(), digest)
    data = {"name": dataset.name, "examples": len(dataset), "crc32": f"{digest:08x}"}
    versions = {"softstair": softstair.__version__, "torch": str(torch.__version__)}
    return {
        "recipe": recipe.to_json(),
        "data": data,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "versions": {**versions, "python": platform.python_version()},
    }


class Watchers:
    """Several watchers as one."""

    def __init__(self, watchers: Sequence[Watch]) -> None:
        self.all = watchers

    def begin(self, state: State) -> None:
        for one in self.all:
            one.begin(state)

    def step(self, state: State) -> None:
        for one in self.all:
            one.step(state)

    def epoch(self, state: State, metrics: dict[str, Any]) -> None:
        for one in self.all:
            one.epoch(state, metrics)
