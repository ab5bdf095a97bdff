"""A trained network that is to be deployed: a run directory, or a packed file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from softstair.data import Dataset, load
from softstair.data.folds import split
from softstair.deploy import ExportError, IntegerNetwork, integerise, quantise_last_layer
from softstair.train import packed
from softstair.train.network import trained_network
from softstair.train.recipe import Recipe, fields_with
from softstair.train.records import RunError, recipe_of, summary_of

__all__ = ["Deployed", "LastLayer", "deployed", "examples"]

LastLayer = Literal["float", "int8"]


@dataclass(frozen=True)
class Deployed:
    """A trained network, and the integer network of it.

    network  the reference of all that is exported: the trained one, or that with its last layer in
             int8
    """

    recipe: Recipe
    trained: nn.Module
    network: nn.Module
    integer: IntegerNetwork
    classes: tuple[str, ...]


def deployed(run: Path, data_dir: Path, last_layer: LastLayer = "float") -> Deployed:
    """What a run directory, a packed file, or the name of one, holds, with its last layer in float
    or in int8."""
    recipe = recipe_of(run) if run.is_dir() else None
    if recipe is None and run.is_dir():
        raise RunError(
            f"{str(run)!r} holds no run: give the directory of one, such as fold-0, or a packed "
            "network."
        )
    if recipe is None:
        about = packed.about(run)
        trained = packed.packed_network(run)
        names = (*fields_with("architecture"), "fold", "folds", "limit")
        recipe = Recipe(**{name: about["recipe"][name] for name in names})
        shape, classes = tuple(about["shape"]), tuple(about["classes"])
        mean, std = about["mean"], about["std"]
    elif summary_of(run) is None:
        raise RunError(
            f"the run in {str(run)!r} is not done: go on with it by softstair train --resume."
        )
    else:
        _refuse_strange_code(recipe, run)
        dataset = load(recipe.data, data_dir)
        trained = trained_network(run, dataset)
        shape, classes = tuple(dataset.x.shape[1:]), dataset.classes
        mean, std = dataset.numbers(recipe.integer_input, recipe.centre_input)
    if recipe.is_float:
        raise ExportError(f"the network of {str(run)!r} is in float: there is no stair to export.")
    if not mean.is_integer():
        raise ExportError(
            f"the network of {str(run)!r} was trained with its zero at byte {mean:g}, which is no "
            "whole number, so that neither its padding nor its first layer can be exact in "
            "integers: train it with --integer-input."
        )
    given = (shape, int(mean), std)
    network = trained if last_layer == "float" else quantise_last_layer(trained, *given)
    return Deployed(recipe, trained, network, integerise(network, *given), classes)


def examples(run: Path, recipe: Recipe, data_dir: Path, limit: int | None) -> tuple[str, Tensor]:
    """What it is tried on: the test set, or the fold that validates where there is none."""
    _refuse_strange_code(recipe, run)
    dataset: Dataset = load(recipe.data, data_dir)
    dataset = dataset if recipe.limit is None else dataset.sample(recipe.limit)
    if dataset.test_x is not None:
        name, x = f"test set of {dataset.name}", dataset.test_x
    else:
        name = f"fold {recipe.fold} of {dataset.name}"
        x = dataset.x[split(dataset, recipe.fold, recipe.folds)[1]]
    return name, x[:limit]


def _refuse_strange_code(recipe: Recipe, run: Path) -> None:
    """A run directory may come from anybody: code that it names is not called."""
    for name in (recipe.model, recipe.data):
        if ":" in name:
            raise RunError(
                f"the run {str(run)!r} names {name}, which is code of its own, and is not called "
                "because a file says so: export it in Python, with softstair.deploy.integerise."
            )
