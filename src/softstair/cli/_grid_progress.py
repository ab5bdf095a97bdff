"""What a grid looks like while it trains: a bar for each unit on a terminal, elsewhere a line for
each that is done."""

import sys
from collections.abc import Sequence
from pathlib import Path

from softstair.cli import _train_progress
from softstair.cli._console import Console
from softstair.experiments.design import Unit
from softstair.experiments.grid import unfinished
from softstair.train.progress import Event
from softstair.train.records import RunError, summary_of

__all__ = ["Progress"]


class Progress:
    """:meth:`told` hears what a unit tells; how many are done is counted over the whole grid."""

    def __init__(self, units: Sequence[Unit], folder: Path) -> None:
        self._folder, self._total = folder, len(units)
        self._done = len(units) - len(list(unfinished(units, folder)))
        self._labels: dict[str, str] = {}
        self._before = self._done
        self._console = Console()
        self._bars = _train_progress.Progress(console=self._console, verb="grid")

    def __enter__(self) -> "Progress":
        self._bars.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.__exit__(*error)

    def told(self, unit: Unit, news: Event) -> None:
        """Event of a unit, see ``softstair.train.progress``."""
        if self._console.is_terminal:
            self._bars.told(self._label(unit), news)
        elif news["kind"] == "done":
            self._done += 1
            words = f"{self._done}/{self._total} {unit.name} is done{self._accuracy(unit)}"
            print(f"softstair grid: {words}", file=sys.stderr)
        else:
            self._bars.told(unit.name, news)

    def _label(self, unit: Unit) -> str:
        """The name of a unit behind its number among those that are done or begun."""
        number = self._before + len(self._labels) + 1
        return self._labels.setdefault(unit.name, f"{number}/{self._total} {unit.name}")

    def _accuracy(self, unit: Unit) -> str:
        """From its summary: a unit that had but that to write tells of no epoch."""
        try:
            summary = summary_of(unit.path(self._folder))
        except RunError:
            return ""
        return "" if summary is None else f", validation {summary['valid_accuracy']:.2%}"
