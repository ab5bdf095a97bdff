"""A trained network, of a run, a packed file or the zoo: in integers, and the theory on it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from softstair import _check, zoo
from softstair._errors import SoftstairError
from softstair.data import load
from softstair.data.batches import Examples
from softstair.data.folds import held_out, split
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
        recipe = self.recipe
        dataset = load(recipe.data, data_dir)
        name, x, _ = held_out(dataset, recipe.fold, recipe.folds, recipe.limit)
        return name, x[:limit]


def deployed(
    run: Path | str, data_dir: Path | str = "data", last_layer: LastLayer = "float"
) -> Deployed:
    """Load the network of a finished run, a packed file or the zoo, and convert it to integers.

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
            f"{str(run)!r} holds no run: give the directory of one, such as fold-0, a packed "
            "network, or the name of one in the zoo."
        )
    else:
        file = run if run.is_file() else _zoo_file(run)
        about, trained = packed.about(file), packed.packed_network(file)
        try:
            recipe = packed.packed_recipe(about, "fold", "folds", "limit")
        except (KeyError, ValueError) as error:
            raise packed.damaged(file, error) from None
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
    dataset = load(recipe.data, data_dir)
    if recipe.limit is not None:
        dataset = dataset.sample(recipe.limit)
    training, valid = split(dataset, recipe.fold, recipe.folds)
    chosen = (valid if len(valid) else training)[:INPUTS]
    numbers = dataset.numbers(recipe.integer_input, recipe.centre_input)
    inputs, _ = next(Examples(dataset.x[chosen], dataset.y[chosen], *numbers).chunks(INPUTS))
    times = [schedule.end * index / (TIMES - 1) for index in range(TIMES)]
    network = trained_network(run, dataset, own_code=trust_code)
    return distances_on_network(network, inputs, schedule, times)


def _zoo_file(name: Path) -> Path:
    try:
        return zoo.path_of(str(name))
    except SoftstairError as error:
        raise RunError(
            f"{_check.shortened(str(name))} is no run or packed network, and {error}"
        ) from None


def _check_code(
    run: Path, recipe: Recipe, hint: str = "export it in Python, with softstair.deploy.integerise"
) -> None:
    """Raise RunError if a run names code: it may come from anybody."""
    if own := [name for name in (recipe.model, recipe.data) if ":" in name]:
        raise RunError(
            f"the run in {str(run)!r} names {' and '.join(own)}, your own code or somebody else's: "
            f"{hint}."
        )
