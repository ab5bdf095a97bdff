"""The network of a finished run or packed file: its integer network, and the theory on it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from softstair.data import Dataset, load
from softstair.data.batches import Examples
from softstair.data.folds import split
from softstair.deploy import ExportError, IntegerNetwork, integerise, quantise_last_layer
from softstair.schedule import Schedule
from softstair.theory import Distances, distances_on_network
from softstair.train import packed
from softstair.train.network import trained_network
from softstair.train.recipe import Recipe
from softstair.train.records import RunError, metrics_of, recipe_of, summary_of

LastLayer = Literal["float", "int8"]
INPUTS = 16
TIMES = 7
"""Few inputs and times: the network runs in float64, once for each time."""


@dataclass(frozen=True)
class Deployed:
    """A trained network and its integer network.

    ``integer`` equals ``network``: ``trained``, or a copy with its last layer in INT8. The recipe
    of a packed file is what the file keeps of it.
    """

    source: Path
    recipe: Recipe
    trained: nn.Module
    network: nn.Module
    integer: IntegerNetwork
    classes: tuple[str, ...]

    def examples(
        self, data_dir: Path | str = "data", limit: int | None = None
    ) -> tuple[str, Tensor]:
        """Return the test set, or the validation fold if there is none, and its name."""
        _check_code(self.source, self.recipe)
        dataset = _dataset(self.recipe, data_dir)
        if dataset.test_x is not None:
            return f"test set of {dataset.name}", dataset.test_x[:limit]
        chosen = split(dataset, self.recipe.fold, self.recipe.folds)[1]
        return f"fold {self.recipe.fold} of {dataset.name}", dataset.x[chosen][:limit]


def deployed(
    run: Path | str, data_dir: Path | str = "data", last_layer: LastLayer = "float"
) -> Deployed:
    """Load the network of a finished run or packed file, and convert it to integers.

    A last layer that was trained in float stays so, or its weights are quantised to INT8. Code that
    a run names is not called. Raises ExportError if the network is not exact in integers.
    """
    run = Path(run)
    recipe = recipe_of(run) if run.is_dir() else None
    if recipe is not None:
        if summary_of(run) is None:
            raise RunError(f"the run in {str(run)!r} is not finished: continue it with `resume`.")
        _check_code(run, recipe)
        dataset = load(recipe.data, data_dir)
        trained = trained_network(run, dataset)
        shape, classes = tuple(dataset.x.shape[1:]), dataset.classes
        mean, std = dataset.numbers(recipe.integer_input, recipe.centre_input)
    elif run.is_dir():
        raise RunError(
            f"{str(run)!r} holds no run: give the directory of one, such as fold-0, or a packed "
            "network."
        )
    else:
        about, trained = packed.about(run), packed.packed_network(run)
        recipe = packed.packed_recipe(about, "fold", "folds", "limit")
        shape, classes = tuple(about["shape"]), tuple(about["classes"])
        mean, std = about["mean"], about["std"]
    if recipe.is_float:
        raise ExportError(f"the network of {str(run)!r} is float: nothing in it is quantised.")
    if not mean.is_integer():
        raise ExportError(
            f"the zero of the input of {str(run)!r} is at byte {mean:g}, not at an integer, so "
            "neither its padding nor its first layer is exact: train it with `integer_input`."
        )
    given = (shape, int(mean), std)
    network = trained if last_layer == "float" else quantise_last_layer(trained, *given)
    return Deployed(run, recipe, trained, network, integerise(network, *given), classes)


def trained_recipe(run: Path) -> tuple[Recipe, int]:
    """Return the recipe of a run and the number of layers that it quantises."""
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
    """Return the distances between soft and hard features of a trained network, on some validation
    examples; ``trust_code`` allows functions of the user's own that the run names."""
    recipe, _ = trained_recipe(run)
    if not trust_code:
        _check_code(run, recipe, "pass `trust_code` if you trust it")
    dataset = _dataset(recipe, data_dir)
    training, valid = split(dataset, recipe.fold, recipe.folds)
    chosen = (valid if len(valid) else training)[:INPUTS]
    numbers = dataset.numbers(recipe.integer_input, recipe.centre_input)
    inputs, _ = next(Examples(dataset.x[chosen], dataset.y[chosen], *numbers).chunks(INPUTS))
    times = [schedule.end * index / (TIMES - 1) for index in range(TIMES)]
    network = trained_network(run, dataset, own_code=trust_code)
    return distances_on_network(network, inputs, schedule, times)


def _dataset(recipe: Recipe, data_dir: Path | str) -> Dataset:
    dataset = load(recipe.data, data_dir)
    return dataset if recipe.limit is None else dataset.sample(recipe.limit)


def _check_code(
    run: Path, recipe: Recipe, hint: str = "export it in Python, with softstair.deploy.integerise"
) -> None:
    """Raise RunError if a run names code: it may come from anybody."""
    if own := [name for name in (recipe.model, recipe.data) if ":" in name]:
        raise RunError(
            f"the run in {str(run)!r} names {' and '.join(own)}, your own code or somebody else's: "
            f"{hint}."
        )
