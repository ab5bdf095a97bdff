"""The network of a run, for ``softstair check --run``: its recipe, and its distances."""

from pathlib import Path

from softstair.data import load
from softstair.data.batches import Examples
from softstair.data.folds import split
from softstair.schedule import Schedule
from softstair.theory import Distances, distances_on_network
from softstair.train import trained_network
from softstair.train.recipe import Recipe
from softstair.train.records import RunError, metrics_of, recipe_of

__all__ = ["measure", "trained_recipe"]

INPUTS = 16
POINTS = 7
"""Few of both: the network runs in float64, twice as slow, once for every time."""


def trained_recipe(run: Path) -> tuple[Recipe, int]:
    """The recipe of a run, and the number of layers that it quantised."""
    recipe = recipe_of(run)
    if recipe is None:
        raise RunError(f"--run must be a run directory, but {str(run)!r} holds no run.")
    if not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").stat().st_size:
        raise RunError(
            f"--run must have trained for an epoch, but that in {str(run)!r} has not: go on with "
            "it by softstair train --resume."
        )
    layers = len(metrics_of(run)[0].get("noise", ()))
    if not layers:
        raise RunError(
            f"--run must be the run of a quantised network, but that in {str(run)!r} is in float."
        )
    return recipe, layers


def measure(run: Path, data_dir: Path, schedule: Schedule, own_code: bool = False) -> Distances:
    """The distances on the trained network, for some of the fold's validation examples."""
    recipe, _ = trained_recipe(run)
    strange = [name for name in (recipe.model, recipe.data) if ":" in name]
    if strange and not own_code:
        raise RunError(
            f"the run in {str(run)!r} was begun with {' and '.join(strange)}, which is code of its "
            "own, and is not called because a file says so: give --own-code if you trust it."
        )
    dataset = load(recipe.data, data_dir)
    dataset = dataset if recipe.limit is None else dataset.sample(recipe.limit)
    chosen = split(dataset, recipe.fold, recipe.folds)[1][:INPUTS]
    numbers = dataset.numbers(recipe.integer_input, recipe.centre_input)
    examples = Examples(dataset.x[chosen], dataset.y[chosen], *numbers)
    inputs, _ = next(examples.chunks(INPUTS))
    times = [schedule.end * index / (POINTS - 1) for index in range(POINTS)]
    network = trained_network(run, dataset, own_code=own_code)
    return distances_on_network(network, inputs, schedule, times)
