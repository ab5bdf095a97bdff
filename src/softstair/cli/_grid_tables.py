"""A design, and what came of it, as tables."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.table import Table

from softstair.cli._console import Console, say
from softstair.experiments.design import Design
from softstair.experiments.estimate import Estimate
from softstair.experiments.grid import STATES, UnitStatus
from softstair.experiments.results import UNKNOWN, Training

__all__ = ["design", "duration", "estimate", "outcome", "progress", "say", "widened"]

FEW = 40
"""Configurations that are listed one by one."""
WIDEST = 10_000
"""Columns of what is no terminal."""


def widened(console: Console) -> Console:
    """The console; where it is no terminal, it has room for every row in a line of its own."""
    if not console.is_terminal:
        console.width = WIDEST
    return console


def design(asked: Design) -> None:
    """Prints what varies, over which values, and how many units that makes."""
    table = Table(title=asked.name)
    table.add_column("degree of freedom")
    table.add_column("values")
    recipes = [one.recipe for one in asked.configurations]
    for field in asked.varied():
        values = dict.fromkeys(recipe.cell(field) for recipe in recipes)
        table.add_row(field, ", ".join(values))
    console = widened(Console(markup=False))
    if asked.varied():
        console.print(table)
    if len(recipes) <= FEW:
        console.print("\n".join(one.name for one in asked.configurations), soft_wrap=True)
    epochs = sorted({recipe.epochs for recipe in recipes})
    count, folds = len(recipes), len(asked.folds)
    if asked.left_out:
        say(f"[[without]] leaves out {asked.left_out} of the combinations of {asked.name}")
    say(
        f"{count} configuration{_s(count)} × {folds} fold{_s(folds)} = {len(asked)} units of "
        f"{', '.join(map(str, epochs))} epochs"
    )


def progress(places: Sequence[UnitStatus], folder: Path) -> None:
    """Prints how many units are done and begun, if any are."""
    counts = {state: sum(place.state == state for place in places) for state in STATES}
    words = [f"{counts[state]} {state}" for state in STATES[:-1] if counts[state]]
    if words:
        say(f"of these {', '.join(words)} in {folder}, {counts['waiting'] or 'none'} waiting")


def estimate(asked: Design, found: Estimate, places: Sequence[UnitStatus]) -> None:
    """Prints how long what is left would take here, one unit after the other."""
    first = asked.configurations[0]
    left = [place for place in places if not place.is_done]
    epochs = sum(max(0, place.of_epochs - place.epochs) for place in left)
    begun = epochs < sum(place.of_epochs for place in places)
    which = f"what is left of {len(left)} unit{_s(len(left))}" if begun else "all"
    say(
        f"a step of {first.name} takes {1000 * found.step:.3g} ms on {found.device}, and an "
        f"evaluation {found.evaluation:.2g} s: about {duration(found.unit)} a unit, and "
        f"{duration(found.unit * epochs / first.recipe.epochs)} for {which}, one after another; "
        "truncation and units side by side take less"
    )


def outcome(found: Iterable[Training]) -> None:
    """Prints the accuracy of every configuration over its folds, each data version by itself."""
    found = list(found)
    versions = list(dict.fromkeys(one.data_version for one in found))
    grouped: dict[str, list[Training]] = {}
    for one in found:
        version = f" ({one.data_version})" if len(versions) > 1 else ""
        grouped.setdefault(f"{one.configuration}{version}", []).append(one)
    title = "accuracy of the network without noise"
    if any(len(folds) > 1 for folds in grouped.values()):
        title += ", mean ± standard deviation over folds"
    table = Table(title=title)
    table.add_column("configuration", overflow="fold")
    for name in ("folds", "validation", "test", "seconds a unit"):
        table.add_column(name, justify="right")
    for name, folds in grouped.items():
        tests = [one.test_accuracy for one in folds if one.test_accuracy is not None]
        table.add_row(
            name,
            str(len(folds)),
            _spread([one.valid_accuracy for one in folds]),
            _spread(tests) if tests else "none",
            f"{statistics.mean(one.seconds or 0.0 for one in folds):.1f}",
        )
    widened(Console(markup=False)).print(table)
    if len(grouped) > 1:
        accuracies = {
            name: [one.valid_accuracy for one in folds] for name, folds in grouped.items()
        }
        best = max(accuracies, key=lambda name: statistics.mean(accuracies[name]))
        say(f"best: {best}, validation {_spread(accuracies[best])}")
    if versions != [UNKNOWN]:
        say(f"data: {'; '.join(versions)}")


def duration(seconds: float) -> str:
    """A time in words.

    >>> duration(40.0), duration(5400.0), duration(400000.0)
    ('40 s', '1.5 hours', '4.6 days')
    """
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 1.5 * size or (unit == "hours" and seconds >= size):
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _spread(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2%}"
    return f"{statistics.mean(values):.2%} ± {statistics.stdev(values):.2%}"


def _s(count: int) -> str:
    return "" if count == 1 else "s"
