"""How far a grid is, as a table or as JSON; on a terminal the table moves on by itself."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.table import Table

from softstair.cli._console import Console
from softstair.cli._grid_tables import widened
from softstair.experiments.design import Design
from softstair.experiments.grid import (
    STATES,
    UnitStatus,
    by_configuration,
    data_versions,
    status_json,
    statuses,
    summarise,
)

__all__ = ["show"]

PAUSE = 2.0
"""Seconds between two looks."""


def show(asked: Design, folder: Path, as_json: bool = False) -> int:
    """Prints a line for every configuration, or all as JSON; returns the exit code."""
    found = statuses(asked, folder)
    if as_json:
        print(json.dumps(status_json(asked, folder, found), indent=1))
        return 0
    console = widened(Console(markup=False))
    if not console.is_terminal or _ended(found):
        console.print(_table(asked, folder, found))
        return 0
    try:
        with Live(_table(asked, folder, found), console=console, auto_refresh=False) as live:
            while not _ended(found):
                time.sleep(PAUSE)
                found = statuses(asked, folder)
                live.update(_table(asked, folder, found), refresh=True)
    except KeyboardInterrupt:
        return 0  # whoever looks may look away
    return 0


def _ended(found: Sequence[UnitStatus]) -> bool:
    return all(place.is_done for place in found)


def _table(asked: Design, folder: Path, found: Sequence[UnitStatus]) -> Table:
    versions = data_versions(found)
    caption = None
    if len(versions) > 1:
        caption = f"several data versions, no mean over them: {'; '.join(versions)}"
    table = Table(title=f"{asked.name} in {folder}", caption=caption)
    table.add_column("configuration", overflow="fold")
    for name in (*STATES, "epochs", "validation"):
        table.add_column(name, justify="right")
    for name, group in by_configuration(found).items():
        table.add_row(name, *_cells(summarise(group)))
    table.add_section()
    table.add_row("all", *_cells(summarise(found)))
    return table


def _cells(sums: dict[str, Any]) -> list[str]:
    accuracy = sums["valid_accuracy"]
    return [
        *(str(sums[state] or "") for state in STATES),
        f"{sums['epochs']}/{sums['of_epochs']}",
        "" if accuracy is None else f"{accuracy:.2%}",
    ]
