"""Trainings made up: a design's units with accuracies that a test chooses."""

from collections.abc import Callable, Mapping
from functools import cache

from softstair.experiments.design import DESIGNS, FIELDS, value_of
from softstair.experiments.results import Epoch, Training

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
def configurations(
    design: str, epochs: int, where: tuple[tuple[str, tuple[str, ...]], ...]
) -> list[tuple[str, dict[str, str], int]]:
    """Name, settings and drop of each of a design's configurations over so many epochs."""
    chosen = DESIGNS[design].where(dict(where)).rescaled(epochs).configurations
    return [
        (
            one.name,
            {name: value_of(one.recipe, name) for name in FIELDS},
            int(one.recipe.drop or epochs),
        )
        for one in chosen
    ]


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
    found = []
    for name, shared, drop in configurations(design, epochs, wanted):
        for fold in folds:
            settings = {**shared, "fold": str(fold)}
            final = level(settings, fold)
            first = None if before is None else before(settings, fold)
            found.append(
                Training(name, settings, curve(final, epochs, drop, first), final, seconds=1.0)
            )
    return found
