"""Where the units of a report come from: run directories, tables, and folders of tables."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from softstair.experiments import results
from softstair.experiments.report.study import repeated
from softstair.experiments.results import ForeignTable, Training
from softstair.train.run import RunError

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
    found = [placed for path in paths for placed in _placed(path, passed_over)]
    trainings = [one for one, _ in found]
    if (twice := repeated(trainings)) is not None:
        one = trainings[twice[1]]
        first, second = (str(found[at][1]) for at in twice)
        raise RunError(
            f"each unit must be given once, but fold {one.fold} of {one.configuration!r} was given "
            f"twice, by {first!r} and by {second!r}: leave one of the two out."
        )
    return Sources(trainings, passed_over)


def _placed(path: Path, passed_over: list[Path]) -> list[tuple[Training, Path]]:
    """The units of a path, each with its run directory or its table.

    The tables of a folder may lie in its folders, as run directories may; where some are, none is
    looked for deeper.
    """
    if path.is_dir() and not results.find(path):
        for depth in ("*", "*/*", "*/*/*"):
            named = (one for one in path.glob(depth) if one.suffix in (".csv", ".parquet"))
            found: list[tuple[Training, Path]] = []
            # A table that links lead to twice is one table.
            tables = {one.resolve(): one for one in sorted(named, reverse=True) if one.is_file()}
            for table in sorted(tables.values()):
                try:
                    found += [(one, table) for one in results.load(table)]
                except ForeignTable:
                    passed_over.append(table)
            if found:
                return found
    return [(one, one.path or path) for one in results.load(path)]
