"""How far a grid is, as a table or as JSON; on a terminal the table moves on by itself."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.table import Table

from softstair.cli._console import Console
from softstair.cli._grid_places import STATES, Place, places
from softstair.cli._grid_tables import widened
from softstair.experiments.design import Design
from softstair.experiments.results import UNKNOWN

__all__ = ["show"]

PAUSE = 2.0
"""Seconds between two looks."""


def show(asked: Design, folder: Path, as_json: bool = False) -> int:
    """Prints a line for every configuration, or all as JSON; returns the exit code."""
    found = places(asked, folder)
    if as_json:
        print(json.dumps(_plain(asked, folder, found), indent=1))
        return 0
    console = widened(Console(markup=False))
    if not console.is_terminal or _ended(found):
        console.print(_table(asked, folder, found))
        return 0
    try:
        with Live(_table(asked, folder, found), console=console, auto_refresh=False) as live:
            while not _ended(found):
                time.sleep(PAUSE)
                found = places(asked, folder)
                live.update(_table(asked, folder, found), refresh=True)
    except KeyboardInterrupt:
        return 0  # whoever looks may look away
    return 0


def _ended(found: Sequence[Place]) -> bool:
    return all(place.is_done for place in found)


def _grouped(asked: Design, found: Sequence[Place]) -> dict[str, list[Place]]:
    """The places of each configuration."""
    size = len(asked.folds)
    groups = [list(found[start : start + size]) for start in range(0, len(found), size)]
    return dict(zip([one.name for one in asked.configurations], groups, strict=True))


def _table(asked: Design, folder: Path, found: Sequence[Place]) -> Table:
    versions = _versions(found)
    caption = None
    if len(versions) > 1:
        caption = f"several data versions, no mean over them: {'; '.join(versions)}"
    table = Table(title=f"{asked.name} in {folder}", caption=caption)
    table.add_column("configuration", overflow="fold")
    for name in (*STATES, "epochs", "validation"):
        table.add_column(name, justify="right")
    for name, group in _grouped(asked, found).items():
        table.add_row(name, *_cells(_sums(group)))
    table.add_section()
    table.add_row("all", *_cells(_sums(found)))
    return table


def _plain(asked: Design, folder: Path, found: Sequence[Place]) -> dict[str, Any]:
    configurations = [
        {"name": name, **_sums(group), "units": [place.to_json() for place in group]}
        for name, group in _grouped(asked, found).items()
    ]
    all_of_them = {"name": asked.name, "folder": str(folder), **_sums(found)}
    return {**all_of_them, "configurations": configurations}


def _sums(found: Sequence[Place]) -> dict[str, Any]:
    """How many are done, training, begun and waiting; their epochs, and their mean accuracy, if all
    are of one data version."""
    scores = [place.accuracy for place in found if place.accuracy is not None]
    if len(_versions(found)) > 1:
        scores = []
    return {
        **{state: sum(place.state == state for place in found) for state in STATES},
        "epochs": sum(place.epochs for place in found),
        "of_epochs": sum(place.of_epochs for place in found),
        "valid_accuracy": sum(scores) / len(scores) if scores else None,
    }


def _versions(found: Sequence[Place]) -> list[str]:
    """The data versions of those with an accuracy."""
    scored = [place for place in found if place.accuracy is not None]
    return list(dict.fromkeys(place.data_version or UNKNOWN for place in scored))


def _cells(sums: dict[str, Any]) -> list[str]:
    accuracy = sums["valid_accuracy"]
    return [
        *(str(sums[state] or "") for state in STATES),
        f"{sums['epochs']}/{sums['of_epochs']}",
        "" if accuracy is None else f"{accuracy:.2%}",
    ]
