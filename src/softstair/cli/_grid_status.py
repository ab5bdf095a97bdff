"""How far a grid is, from its run directories; on a terminal the table moves on by itself."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

from rich.live import Live
from rich.table import Table

from softstair.cli._console import Console
from softstair.experiments.design import Design, Unit
from softstair.experiments.engines import has_begun
from softstair.train.run import RunError, summary_of

__all__ = ["show"]

PAUSE = 2.0
"""Seconds between two looks."""
LATELY = 120.0
"""A unit that wrote something so many seconds ago is taken to be training."""


@dataclass(frozen=True)
class Place:
    """Where a unit stands: waiting, begun, training or done; its epochs so far, and accuracy."""

    what: str
    epochs: int = 0
    accuracy: float | None = None


def show(asked: Design, folder: Path) -> int:
    """Prints a line for every configuration; returns the exit code."""
    console = Console(markup=False)
    table, left = _look(asked, folder)
    if not console.is_terminal or not left:
        console.print(table)
        return 0
    try:
        with Live(table, console=console, auto_refresh=False) as live:
            while left:
                time.sleep(PAUSE)
                table, left = _look(asked, folder)
                live.update(table, refresh=True)
    except KeyboardInterrupt:
        return 0  # whoever looks may look away
    return 0


def _look(asked: Design, folder: Path) -> tuple[Table, int]:
    """The table, and how many units are not done."""
    table = Table(title=f"{asked.name} in {folder}")
    table.add_column("configuration", overflow="fold")
    for name in ("done", "training", "begun", "waiting", "epochs", "validation"):
        table.add_column(name, justify="right")
    total: list[Place] = []
    for configuration in asked.configurations:
        places = [_place(configuration.unit(fold), folder) for fold in asked.folds]
        total += places
        table.add_row(configuration.name, *_cells(places, configuration.recipe.epochs))
    table.add_section()
    table.add_row("all", *_cells(total, None))
    return table, sum(place.what != "done" for place in total)


def _cells(places: list[Place], epochs: int | None) -> list[str]:
    counts = [
        sum(p.what == what for p in places) for what in ("done", "training", "begun", "waiting")
    ]
    done = sum(place.epochs for place in places)
    scores = [place.accuracy for place in places if place.accuracy is not None]
    mean = f"{sum(scores) / len(scores):.2%}" if scores else ""
    whole = f"{done}/{epochs * len(places)}" if epochs is not None else str(done)
    return [*(str(count) if count else "" for count in counts), whole, mean]


def _place(unit: Unit, folder: Path) -> Place:
    path = unit.path(folder)
    if not has_begun(unit, folder):
        return Place("waiting")
    epochs, accuracy = _last(path / "metrics.jsonl")
    if summary_of(path) is not None:
        return Place("done", epochs, accuracy)
    files = [path / "metrics.jsonl", path / "config.json", path / "checkpoint"]
    written = max((file.stat().st_mtime for file in files if file.exists()), default=0.0)
    lately = time.time() - written < LATELY
    return Place("training" if lately else "begun", epochs, accuracy)


def _last(file: Path) -> tuple[int, float | None]:
    """The number of epochs done, and the accuracy of the last; somebody may be writing there."""
    if not file.is_file():
        return 0, None
    lines = file.read_bytes().split(b"\n")[:-1]
    try:
        return len(lines), float(json.loads(lines[-1])["valid_accuracy"]) if lines else None
    except (ValueError, LookupError, TypeError):
        raise RunError(f"{str(file)!r} is damaged or was edited: restore it.") from None
