"""A trained network that is to be deployed: a run directory, or a packed file."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from softstair.data import Dataset, load
from softstair.data.folds import split
from softstair.deploy import ExportError, IntegerNetwork, integerise
from softstair.train import packed
from softstair.train.network import trained_network
from softstair.train.recipe import Recipe
from softstair.train.run import RunError, recipe_of

__all__ = ["Deployed", "deployed", "examples"]


@dataclass(frozen=True)
class Deployed:
    """A trained network, and the integer network of it."""

    recipe: Recipe
    network: nn.Module
    integer: IntegerNetwork
    classes: tuple[str, ...]


def deployed(run: Path, data_dir: Path) -> Deployed:
    """What a run directory, a packed file, or the name of one, holds."""
    recipe = recipe_of(run) if run.is_dir() else None
    if recipe is None and run.is_dir():
        raise RunError(
            f"{str(run)!r} holds no run: give the directory of one, such as fold-0, or a packed "
            "network."
        )
    if recipe is None:
        about = packed.about(run)
        network = packed.packed_network(run)
        recipe = Recipe(**{name: about["recipe"][name] for name in packed.DECIDING})
        shape, classes = tuple(about["shape"]), tuple(about["classes"])
        mean, std = float(about["mean"]), float(about["std"])
    else:
        dataset = load(recipe.data, data_dir)
        network = trained_network(run, dataset)
        shape, classes = tuple(dataset.x.shape[1:]), dataset.classes
        mean, std = dataset.numbers(recipe.integer_input)
    if recipe.is_float:
        raise ExportError(f"the network of {str(run)!r} is in float: there is no stair to export.")
    if not mean.is_integer():
        raise ExportError(
            f"the network of {str(run)!r} was trained with its zero at byte {mean:g}, which is no "
            "whole number, so that neither its padding nor its first layer can be exact in "
            "integers: train it with --integer-input."
        )
    return Deployed(recipe, network, integerise(network, shape, int(mean), std), classes)


def examples(recipe: Recipe, data_dir: Path, limit: int | None) -> tuple[str, Tensor]:
    """What it is tried on: the test set, or the fold that validates where there is none."""
    dataset: Dataset = load(recipe.data, data_dir)
    if dataset.test_x is not None:
        name, x = f"test set of {dataset.name}", dataset.test_x
    else:
        name = f"fold {recipe.fold} of {dataset.name}"
        x = dataset.x[split(dataset, recipe.fold, recipe.folds)[1]]
    return name, x[:limit]
