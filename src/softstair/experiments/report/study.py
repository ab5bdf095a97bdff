"""What the page is about: trainings become configurations, each with the mean of its folds."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from softstair.experiments import design
from softstair.experiments.results import NAMES, Training
from softstair.experiments.statistics import Mean, mean_of
from softstair.train.run import RunError

__all__ = ["Folds", "arranged", "refuse_repeated", "telling", "values_of", "varied"]

FREEDOMS = (
    "data", "model", "noise", "forward", "static_mean", "static_std", "interval", "power",
    "epochs", "precision",
)  # fmt: skip
"""The fields that are filters wherever they vary; others are where these do not tell them."""
ORDER = {
    "noise": ("uniform", "triangular", "normal", "logistic"),
    "forward": ("expectation", "mode", "random"),
    "interval": ("same_start", "same_end", "partition", "overlapped", "none"),
    "power": ("homogeneous", "progressive", "none"),
}
"""The paper's order of the values."""


@dataclass(frozen=True)
class Folds:
    """A configuration: the units that differ in their fold alone, by fold.

    is_twin   whether it is a float network beside quantised ones, to which no degree of freedom
              matters
    """

    name: str
    settings: dict[str, str]
    units: tuple[Training, ...]
    is_twin: bool = False

    @property
    def done(self) -> list[Training]:
        """Those that came to their last epoch."""
        return [unit for unit in self.units if unit.is_done]

    def outcome(self, name: str) -> Mean | None:
        """The mean over the folds that are done; None where there is nothing to take it of."""
        values = [getattr(unit, name) for unit in self.done]
        known = [value for value in values if value is not None]
        return mean_of(known) if known else None

    def value(self, name: str) -> str | None:
        """What a field is set to; None where that does not matter."""
        return None if self.is_twin and name in design.FREEDOMS else self.settings[name]

    @property
    def shown(self) -> list[Training]:
        """Those that its curve is of: the ones that are done, or all until one is."""
        return self.done or list(self.units)


def arranged(trainings: Sequence[Training]) -> list[Folds]:
    """The configurations, in the order in which they come.

    Grids of several data sets may have the same names, so what was trained tells them apart. Of
    settings that only some of them know, for a table has fewer than a run directory, none is.
    """
    if not trainings:
        raise ValueError("a report must have a training to tell of, but none was given.")
    refuse_repeated(trainings)
    known = _known(trainings)
    found: dict[Hashable, dict[int, Training]] = {}
    for one in trainings:
        found.setdefault(_identity(one, known), {})[one.fold] = one
    quantised = {one.settings["data"] for one in trainings if not _is_float(one)}
    lines = []
    for folds in found.values():
        units = tuple(folds[fold] for fold in sorted(folds))
        settings = {name: units[0].settings[name] for name in known}
        is_twin = _is_float(units[0]) and settings["data"] in quantised
        lines.append(Folds(units[0].configuration, settings, units, is_twin))
    return lines


def _is_float(one: Training) -> bool:
    return one.settings.get("weights") == one.settings.get("features") == "float"


def refuse_repeated(trainings: Sequence[Training], places: Sequence[Path] | None = None) -> None:
    """Refuses a unit that is given twice; ``places`` are where the units lie, if that is known."""
    known = _known(trainings)
    first: dict[Hashable, int] = {}
    for number, one in enumerate(trainings):
        before = first.setdefault((_identity(one, known), one.fold), number)
        if before != number:
            by = ""
            if places is not None:
                by = f", by {str(places[before])!r} and by {str(places[number])!r}"
            raise RunError(
                f"each unit must be given once, but fold {one.fold} of {one.configuration!r} was "
                f"given twice{by}: leave one of the two out."
            )


def varied(lines: Sequence[Folds]) -> list[str]:
    """The fields in which the configurations differ: of the first ones every one, of the others
    those that no other settles."""
    names = [name for name in (*FREEDOMS, *NAMES) if name in lines[0].settings]
    found: list[str] = []
    for name in dict.fromkeys(names):
        if len(values_of(lines, name)) < 2:
            continue
        if name in FREEDOMS or not any(_settles(lines, other, name) for other in found):
            found.append(name)
    return found


def telling(lines: Sequence[Folds]) -> list[str]:
    """Those of the fields that differ which no other one settles."""
    left = varied(lines)
    for name in reversed(left[:]):
        if any(_settles(lines, other, name) for other in left if other != name):
            left.remove(name)
    return left


def values_of(lines: Sequence[Folds], name: str) -> list[str]:
    """The values of a field, in the paper's order, or by size, or as they come."""
    every = dict.fromkeys(one.value(name) for one in lines)
    values = [one for one in every if one is not None]
    if name in ORDER:
        known = ORDER[name]
        return sorted(values, key=lambda one: known.index(one) if one in known else len(known))
    try:
        return sorted(values, key=float)
    except ValueError:
        return values


def _settles(lines: Sequence[Folds], one: str, other: str) -> bool:
    """Whether each value of the first field comes with one value of the other."""
    pairs = {(line.settings[one], line.settings[other]) for line in lines}
    return len(pairs) == len({line.settings[one] for line in lines})


def _known(trainings: Sequence[Training]) -> list[str]:
    every = [name for name in NAMES if name != "fold"]
    return [name for name in every if all(name in one.settings for one in trainings)]


def _identity(one: Training, known: Sequence[str]) -> Hashable:
    return one.configuration, *(one.settings[name] for name in known)
