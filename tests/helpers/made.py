"""Trainings made up: a design's units with accuracies that a test chooses."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache

from paper.design import DESIGNS
from paper.rows import from_row, to_row
from paper.tables import Epoch, Training
from softstair.train.recipe import Recipe

Level = Callable[[Mapping[str, str], int], float]
"""(settings, fold) -> accuracy."""


@cache
def curve(final: float, epochs: int, drop: int, before: float | None = None) -> tuple[Epoch, ...]:
    """Level until the learning rate drops, at ``before`` if it is given; and then at ``final``."""
    first = final if before is None else before
    levels = [first if epoch < drop else final for epoch in range(epochs)]
    return tuple(
        Epoch(epoch, 1e-3 if epoch < drop else 1e-4, 1.0 - level, level, 1.0 - level, level)
        for epoch, level in enumerate(levels)
    )


@cache
def units(
    design: str, epochs: int, where: tuple[tuple[str, tuple[str, ...]], ...], folds: tuple[int, ...]
) -> list[tuple[str, Recipe, dict[str, str]]]:
    """Name, recipe and settings of each unit of a design over so many epochs."""
    chosen = DESIGNS[design].where(dict(where)).rescaled(epochs)
    every = replace(chosen, folds=folds).units()
    version = {"data_version": "unknown"}
    return [(unit.configuration, unit.recipe, to_row(unit.recipe) | version) for unit in every]


def made(
    design: str,
    level: Level,
    epochs: int = 10,
    folds: tuple[int, ...] = (0, 1, 2, 3, 4),
    where: Mapping[str, list[str]] | None = None,
    before: Level | None = None,
) -> list[Training]:
    """Every unit of a design, done, with that accuracy in the end."""
    wanted = tuple((name, tuple(values)) for name, values in (where or {}).items())
    trainings = []
    for name, recipe, settings in units(design, epochs, wanted, folds):
        final = level(settings, recipe.data.fold)
        first = None if before is None else before(settings, recipe.data.fold)
        epochs_of = curve(final, epochs, int(recipe.optimiser.drop or epochs), first)
        trainings.append(Training(name, recipe, epochs_of, final, seconds=1.0))
        vars(trainings[-1])["settings"] = settings  # computed once for all levels of a unit
    return trainings


def varied(trainings: Iterable[Training], **settings: str) -> list[Training]:
    """The trainings as if they had other settings."""
    return [changed(training, **settings) for training in trainings]


def changed(training: Training, **settings: str) -> Training:
    """The training as if it had other settings."""
    row = {**training.settings, **settings}
    return replace(training, recipe=from_row(row), data_version=row["data_version"])


def one_setting() -> list[Training]:
    """A grid over learning rates and seeds, with the names that it has."""
    where = {"noise": ["uniform"], "forward": ["mode"], "interval": ["partition"]}
    rates = {"0.1": 0.6, "0.001": 0.8, "0.01": 0.9}
    trainings = []
    for rate, level in rates.items():
        for seed in ("0", "1"):
            value = lambda _, fold, level=level, seed=seed: level + 0.01 * fold + 0.02 * int(seed)
            units = made("paper-svhn", value, 10, (0, 1), {**where, "power": ["progressive"]})
            name = f"learning_rate={rate},seed={seed}"
            settings = {"learning_rate": rate, "seed": seed}
            trainings += [replace(u, configuration=name) for u in varied(units, **settings)]
    return trainings
