"""Theory on the network of a run, as ``softstair check --run`` shows it."""

from pathlib import Path

from softstair.data import load
from softstair.data.batches import Examples
from softstair.data.folds import split
from softstair.schedule import Schedule
from softstair.theory import Distances, distances_on_network
from softstair.train.network import trained_network
from softstair.train.recipe import Recipe
from softstair.train.records import RunError, metrics_of, recipe_of

INPUTS = 16
TIMES = 7
"""Few inputs and times: the network runs in float64, once for each time."""


def trained_recipe(run: Path) -> tuple[Recipe, int]:
    """Return the recipe of a run and the number of layers that it quantises.

    Raises:
        RunError: If there is no run, or one without an epoch, or one of a float network.
    """
    recipe = recipe_of(run)
    if recipe is None:
        raise RunError(f"`run` must be a run directory, but {str(run)!r} holds no run.")
    metrics = run / "metrics.jsonl"
    if not metrics.exists() or not metrics.stat().st_size:
        raise RunError(f"the run in {str(run)!r} has no epoch yet: continue it with `resume`.")
    layers = len(metrics_of(run)[0].get("noise", ()))
    if not layers:
        raise RunError(f"`run` must be of a quantised network, but that in {str(run)!r} is float.")
    return recipe, layers


def distances_on_run(
    run: Path, schedule: Schedule, data_dir: Path | str = "data", trust_code: bool = False
) -> Distances:
    """Return the distances between soft and hard features of a trained network.

    Args:
        run: Run directory.
        schedule: Schedule of the noise.
        data_dir: Folder with the data sets. The inputs are from the fold's validation examples.
        trust_code: Whether to call functions of the user's own that the run names.

    Raises:
        RunError: If there is no trained network, or if it needs code that is not trusted.
    """
    recipe, _ = trained_recipe(run)
    own = [name for name in (recipe.model, recipe.data) if ":" in name]
    if own and not trust_code:
        raise RunError(
            f"the run in {str(run)!r} names {' and '.join(own)}, your own code or somebody else's: "
            "pass `trust_code` if you trust it."
        )
    dataset = load(recipe.data, data_dir)
    dataset = dataset if recipe.limit is None else dataset.sample(recipe.limit)
    chosen = split(dataset, recipe.fold, recipe.folds)[1][:INPUTS]
    numbers = dataset.numbers(recipe.integer_input, recipe.centre_input)
    inputs, _ = next(Examples(dataset.x[chosen], dataset.y[chosen], *numbers).chunks(INPUTS))
    times = [schedule.end * index / (TIMES - 1) for index in range(TIMES)]
    network = trained_network(run, dataset, own_code=trust_code)
    return distances_on_network(network, inputs, schedule, times)
