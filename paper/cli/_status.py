"""The state of a grid, as a table; on a terminal, while it trains."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import sleep

from rich.live import Live
from rich.table import Table

from paper import results
from paper.design import Design
from paper.results import STATES, UnitStatus
from paper.studies import duration
from paper.tables import Training
from softstair.cli._output import Console, table

Elsewhere = Mapping[str, Training]
"""Units that are done elsewhere, by name."""
PAUSE = 2.0
"""Seconds between two looks at a grid that is training."""
MOST_IDLE_LOOKS = 30
"""Looks without a unit in training after which a grid counts as stopped."""


def show_status(design: Design, folder: Path, elsewhere: Elsewhere, as_json: bool) -> int:
    """Print a row for every configuration; on a terminal, update it until no unit trains."""
    units = results.statuses(design, folder, elsewhere)
    trains = lambda: any(unit.state == "training" for unit in units)
    if as_json:
        print(json.dumps(results.status_json(design, folder, units), indent=1))
        return 0
    console, title = Console(unlimited=True), f"{design.name} in {folder}"
    is_live, idle_looks = console.is_terminal and trains(), 0
    view = lambda: _status_table(title, units, console.is_terminal, is_live)
    if not is_live:
        console.print(view())
        return 0
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(view(), console=console, auto_refresh=False) as live,
    ):
        while idle_looks < MOST_IDLE_LOOKS and not all(unit.is_done for unit in units):
            sleep(PAUSE)
            units = results.statuses(design, folder, elsewhere)
            live.update(view(), refresh=True)
            idle_looks = 0 if trains() else idle_looks + 1
    return 0


def _status_table(
    title: str, units: Sequence[UnitStatus], hide_empty: bool, is_live: bool
) -> Table:
    """Return the table, perhaps without empty columns."""
    sums, notes = results.summarise(units), _status_notes(units)
    states = [state for state in STATES if sums[state] or not hide_empty]
    if is_live:  # a table longer than the terminal loses its last lines
        done = f"{sums['done'] + sums['elsewhere']} of {len(units)} units are done"
        title = "\n".join([title, f"{done}; Ctrl-C ends this view", *notes])
    groups = results.by_configuration(units).items()
    return table(
        title,
        ("configuration",),
        (*states, "folds left", "epochs", "validation"),
        ((name, *_status_cells(group, states)) for name, group in groups),
        total=("all", *_status_cells(units, states)),
        caption=None if is_live else "\n".join(notes),
    )


def _status_cells(units: Sequence[UnitStatus], states: Sequence[str]) -> list[str]:
    sums = results.summarise(units)
    accuracy = sums["valid_accuracy"]
    folds = {str(unit.unit.recipe.data.fold) for unit in units if not unit.is_done}
    return [
        *(str(sums[state] or "") for state in states),
        ", ".join(sorted(folds, key=lambda fold: (len(fold), fold))),
        f"{sums['epochs']}/{sums['of_epochs']}",
        "" if accuracy is None else f"{accuracy:.2%}",
    ]


def _status_notes(units: Sequence[UnitStatus]) -> list[str]:
    """Return the device time used, the estimate of that left, and what it is estimated from; and
    the versions of the data if there are several."""
    spent, done = results.time_spent(units), sum(unit.is_done for unit in units)
    words = [f"device time: {duration(spent['seconds_used'])} used"]
    if any(unit.state == "training" for unit in units):
        words[0] += ", without the units that train now"
    if spent["seconds_left"] is None:
        words.append("time left unknown until a unit is done")
    elif done < len(units):
        left = duration(spent["seconds_left"])
        words.append(f"about {left} left, estimated from {done} of {len(units)} units")
    if count := spent["unmeasured_units"]:
        words.append(f"units with only the time of training steps: {count}")
    notes, versions = ["; ".join(words)], results.data_versions(units)
    if len(versions) > 1:
        notes.append(f"several data versions, no mean over them: {'; '.join(versions)}")
    return notes
