"""Engines: what trains the units of a design, here or on a cluster.

An engine is a function ``run(units, folder, tell, …)`` that returns how many units failed. It
trains each in its run directory, which is all that it leaves behind: a unit that is done there is
never trained again, one that was begun goes on. ``tell(unit, news)`` hears how they go.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from softstair.experiments.design import Unit
from softstair.experiments.results import find
from softstair.train.progress import Event
from softstair.train.records import (
    check_same_recipe,
    recipe_of,
    refuse_other_data,
    summary_of,
)

__all__ = ["Tell", "has_begun", "refuse_mixed_data", "unfinished"]

Tell = Callable[[Unit, Event], None]


def unfinished(units: Iterable[Unit], folder: Path) -> Iterator[Unit]:
    """The units that are not done yet."""
    for unit in units:
        if not has_begun(unit, folder) or summary_of(unit.path(folder)) is None:
            yield unit


def refuse_mixed_data(units: Iterable[Unit], folder: Path, data_dir: str) -> None:
    """Raises RunError if the folder has runs of another version of these units' data sets than
    lies in ``data_dir``."""
    refuse_other_data(find(folder), {unit.recipe.data for unit in units}, data_dir)


def has_begun(unit: Unit, folder: Path) -> bool:
    """Whether a unit has a run directory; one in which another recipe was begun is refused."""
    path = unit.path(folder)
    if (begun := recipe_of(path)) is None:
        return False
    check_same_recipe(unit.recipe, begun, path)
    return True
