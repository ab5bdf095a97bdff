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
from softstair.data.batches import Examples
from softstair.data.folds import split
from softstair.train import loop
from softstair.train.execution import (
    check_kernels,
    choose_device,
    choose_threads,
    memory_errors,
    training_settings,
)
from softstair.train.loop import Watch
from softstair.train.metrics import evaluate
from softstair.train.network import make_network, table
from softstair.train.parallel import ALONE, Team
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
    team: Team = ALONE,
) -> dict[str, Any]:
    """Trains by a recipe in a run directory; returns the summary. SIGINT and SIGTERM raise
    :class:`Interrupted <softstair.train.Interrupted>` once everything is kept.

    ``resume`` goes on with the run that is there, if there is one; without it, a run that is there
    is refused. ``threads`` is for the CPU; None leaves the choice to `choose_threads`, and a run
    that goes on keeps those it was begun with. ``dataset`` and ``model`` stand in for what the
    recipe names, for those who have them at hand; to resume, give the same ones again. ``team`` are
    the processes that train it together, each of which calls this, see
    :func:`joined <softstair.train.parallel.joined>`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as out:
    ...     summary = train(Recipe(limit=200, epochs=1, batch=32), out)
    >>> summary["epochs"], 0 < summary["valid_accuracy"] <= 1
    (1, True)
    """
    with Run.hold(Path(out), team) as run:
        # What the first process was asked for: the others may not see the run that it goes on with.
        recipe, begun, summary = team.share(lambda: _opened(run, recipe, resume))
        if summary is not None:
            return summary
        with team.agreed():
            place = choose_device(device, team.local)
            check_kernels(recipe, place)
        if (found := dataset) is None:
            found = team.in_turn(lambda: load(recipe.data, data_dir, loading))
        asked = nullcontext() if recipe.kernels == "auto" else kernels.use(recipe.kernels)
        with training_settings(recipe, place), asked:
            torch.manual_seed(recipe.seed)
            with memory_errors(recipe):
                with team.agreed():
                    found = found if recipe.limit is None else found.sample(recipe.limit)
                    network = make_network(recipe, found, model)
                part = recipe.batch // team.size
                torch.set_num_threads(begun or threads or choose_threads(network, part))
                own = model is not None
                return _train(recipe, run, found, network, place, Watchers(watchers), own)


def _opened(
    run: Run, recipe: Recipe, resume: bool
) -> tuple[Recipe, int | None, dict[str, Any] | None]:
    """The recipe to follow, the threads of the run if it was begun, and its summary if it is done;
    refuses what cannot be."""
    begun, processes = run.recipe, run.team.size
    summary = None if begun is None else run.summary
    if begun is not None and not resume:
        raise RunError(
            f"the run directory {str(run.path)!r} holds a run already: go on with it by --resume, "
            "or give another --out."
        )
    if begun is not None:
        refuse_other_recipe(recipe, begun, run.path)
    if summary is None and (recipe.batch % processes or recipe.batch < 2 * processes):
        raise ValueError(
            f"batch must be a multiple of the number of processes, {processes}, with two examples "
            f"or more for each, but {recipe.batch} was given."
        )
    return recipe, run.threads, summary


def _train(
    recipe: Recipe,
    run: Run,
    dataset: Dataset,
    network: nn.Module,
    device: torch.device,
    watch: Watch,
    own: bool,
) -> dict[str, Any]:
    team, numbers = run.team, (*dataset.numbers(recipe.integer_input, recipe.centre_input), device)
    if team.size > 1:
        # A model of one's own may draw its first weights from elsewhere than torch.
        network.load_state_dict(team.share(network.state_dict))
    with team.agreed():
        parts = split(dataset, recipe.fold, recipe.folds)
        training, valid = (Examples(dataset.x[part], dataset.y[part], *numbers) for part in parts)
        state = State(recipe, network, len(training), device, own, team)
    if not team.is_first:
        torch.manual_seed(team.seed(recipe.seed))
    described = describe(recipe, dataset, device)
    config = {**described, "processes": team.size, "step": state.execution.to_json()}
    run.begin(config, table(state.network))
    run.resume(state)
    loop.train(state, training, valid, run, watch)
    test_accuracy = None
    if dataset.test_x is not None and dataset.test_y is not None:
        test = Examples(dataset.test_x, dataset.test_y, *numbers)
        test_accuracy = evaluate(
            state.network, test, team=team, forward=state.execution.eval_forward
        )[1]
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
    words: tuple[Any, ...] = (dataset.classes, dataset.mean, dataset.std)
    if recipe.centre_input and dataset.centred is not None:
        words += dataset.centred
    digest = zlib.crc32(repr(words).encode())
    for part in (dataset.x, dataset.y, dataset.groups, dataset.test_x, dataset.test_y):
        digest = zlib.crc32(b"" if part is None else part.cpu().numpy().tobytes(), digest)
    data = {"name": dataset.name, "examples": len(dataset), "crc32": f"{digest:08x}"}
    if dataset.version is not None:
        data["version"] = dataset.version
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
