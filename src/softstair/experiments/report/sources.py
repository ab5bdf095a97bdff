"""Where the units of a report come from: run directories, tables, and folders of tables."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from softstair.experiments.report.study import refuse_repeated
from softstair.experiments.results import Training, located

__all__ = ["Sources", "gathered"]


@dataclass(frozen=True)
class Sources:
    """The units of a report, and what lay beside them that is no table of units.

    trainings     each unit once
    passed_over   tables of something else, which were met in a folder
    """

    trainings: list[Training]
    passed_over: list[Path]


def gathered(paths: Iterable[Path]) -> Sources:
    """What lies in these folders and tables; a unit that lies in two of them is an error."""
    passed_over: list[Path] = []
    found = [placed for path in paths for placed in located(path, passed_over)]
    trainings = [one for one, _ in found]
    refuse_repeated(trainings, [place for _, place in found])
    return Sources(trainings, passed_over)
