"""The theory on the trained network of a run."""

from pathlib import Path

from paper.theory.annealing import Distances, distances_on_network
from softstair import Schedule
from softstair.data import load, split
from softstair.data.batches import Examples
from softstair.train import Recipe, RunError, trained_network
from softstair.train.records import metrics_of, recipe_of

INPUTS = 16
TIMES = 7
"""Few inputs and times: the network runs in float64, once for each time."""


def trained_recipe(run: Path) -> tuple[Recipe, int]:
    """Return the recipe of a run and the number of layers that it quantises."""
    recipe = recipe_of(run)
    if recipe is None:
        raise RunError(f"`run` must be a run directory, but {str(run)!r} holds no run.")
    metrics = run / "metrics.jsonl"
    if not metrics.exists() or not metrics.stat().st_size:
        raise RunError(
            f"the run in {str(run)!r} has no epoch yet: continue it with softstair train `resume`."
        )
    layers = len(metrics_of(run)[0].get("noise", ()))
    if not layers:
        raise RunError(f"`run` must be of a quantised network, but that in {str(run)!r} is float.")
    return recipe, layers


def distances_on_run(
    run: Path, schedule: Schedule, data_dir: Path | str = "data", trust_code: bool = False
) -> Distances:
    """Return the distances between soft and hard features of a trained network, on some validation
    examples; ``trust_code`` allows functions of the user's own that the run names."""
    recipe, _ = trained_recipe(run)
    if not trust_code and (own := list(recipe.own_code.values())):
        raise RunError(
            f"the run in {str(run)!r} names {' and '.join(own)}, your own code or somebody else's: "
            "pass `trust_code` if you trust it."
        )
    dataset = load(recipe.data.name, data_dir).sample(recipe.data.limit)
    training, valid = split(dataset, recipe.data.fold, recipe.data.folds)
    chosen = (valid if len(valid) else training)[:INPUTS]
    numbers = dataset.numbers(recipe.data.integer_input, recipe.data.centre_input)
    inputs, _ = next(Examples(dataset.x[chosen], dataset.y[chosen], *numbers).chunks(INPUTS))
    times = [schedule.end * index / (TIMES - 1) for index in range(TIMES)]
    network = trained_network(run, dataset, own_code=trust_code)
    return distances_on_network(network, inputs, schedule, times)
