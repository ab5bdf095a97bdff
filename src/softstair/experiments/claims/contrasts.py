"""Sides of a comparison: groups of trainings that are alike in all but what is compared.

Accuracies are averaged within a fold, over configurations that every side has, and compared fold by
fold: what a fold adds to all sides falls out of their differences.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from softstair.experiments.design import FREEDOMS
from softstair.experiments.results import Training
from softstair.experiments.statistics import Mean, drop_of, mean_of
from softstair.experiments.studies import Study, select

__all__ = [
    "Folds", "Side", "before_the_drop", "difference", "extremes", "final", "minus", "side_by_side",
    "split",
]  # fmt: skip

Folds = Mapping[int, float]
"""A number for each fold."""
SHARE_BEFORE = 0.02
"""The share of all epochs, the last before the learning rate drops, whose mean is taken there."""


@dataclass(frozen=True)
class Side:
    """One side of a comparison: the mean over its configurations, fold by fold.

    folds      validation accuracy
    tests      test accuracy of the last epoch; empty where there is no test set
    trainings  (configuration, fold) of each training that it is the mean of
    """

    folds: Folds
    tests: Folds
    trainings: frozenset[tuple[str, int]]

    @property
    def mean(self) -> Mean:
        """Validation accuracy, over folds."""
        return mean_of(self.folds.values())

    @property
    def test(self) -> Mean | None:
        """Test accuracy, over folds."""
        return mean_of(self.tests.values()) if self.tests else None

    @property
    def configurations(self) -> int:
        """How many configurations it is the mean of."""
        return len({name for name, _ in self.trainings})


def final(training: Training) -> float | None:
    """The validation accuracy of the last epoch; None if the training is not done."""
    return training.valid_accuracy if training.is_done else None


def before_the_drop(training: Training) -> float | None:
    """The mean validation accuracy over the last epochs before the learning rate drops."""
    drop = drop_of(training)
    if drop is None:
        return None
    count = max(1, round(SHARE_BEFORE * int(training.settings["epochs"])))
    last = training.curve[max(0, drop - count) : drop]
    return sum(epoch.valid_accuracy for epoch in last) / len(last)


def side_by_side(
    study: Study,
    sides: Mapping[str, Mapping[str, str]],
    of: Callable[[Training], float | None] = final,
    over: Iterable[str] = (),
) -> dict[str, Side]:
    """Each side on the folds that all sides have; empty if there is no such fold.

    sides   settings of each side, by its label; configurations of two sides are matched in all
            other degrees of freedom
    of      the accuracy of a training
    over    degrees of freedom that are averaged over, and not matched
    """
    named = {name for wanted in sides.values() for name in wanted} | set(over)
    matched = [name for name in FREEDOMS if name not in named]
    cells = {label: _cells(study, wanted, matched, of) for label, wanted in sides.items()}
    shared = set.intersection(*(set(groups) for groups in cells.values()))
    groups = {
        label: [folds for key in shared for folds in cells[label][key].values()] for label in cells
    }
    every = [set(folds) for group in groups.values() for folds in group]
    common = sorted(set.intersection(*every)) if every else []
    return {label: _side(groups[label], common, of) for label in (groups if common else ())}


def split(
    study: Study, wanted: Mapping[str, str], name: str, values: Iterable[str], label: str = "{}"
) -> dict[str, Side]:
    """The values of a degree of freedom side by side, if there are two of them at least."""
    there = {one.settings[name] for one in select(study.trainings, wanted) if one.is_done}
    sides = {label.format(one): {**wanted, name: one} for one in values if one in there}
    return side_by_side(study, sides) if len(sides) > 1 else {}


def minus(one: Folds, other: Folds) -> dict[int, float]:
    """The difference on each fold that both have."""
    return {fold: one[fold] - other[fold] for fold in one if fold in other}


def difference(one: Side, other: Side) -> Mean:
    """How far one side lies above another, fold by fold."""
    return mean_of(minus(one.folds, other.folds).values())


def extremes(sides: Mapping[str, Side]) -> tuple[Side, Side]:
    """The sides with the highest and the lowest mean."""
    ranked = sorted(sides.values(), key=lambda side: side.mean.value)
    return ranked[-1], ranked[0]


Cells = dict[tuple[str, ...], dict[str, dict[int, Training]]]


def _cells(
    study: Study,
    wanted: Mapping[str, str],
    matched: list[str],
    of: Callable[[Training], float | None],
) -> Cells:
    """Trainings by their matched settings, their configuration and their fold."""
    cells: Cells = {}
    for one in select(study.trainings, wanted):
        if of(one) is not None:
            key = tuple(one.settings[name] for name in matched)
            which = "/".join(one.settings[name] for name in FREEDOMS)
            cells.setdefault(key, {}).setdefault(which, {})[one.fold] = one
    return cells


def _side(
    group: list[dict[int, Training]], common: list[int], of: Callable[[Training], float | None]
) -> Side:
    values, tests = {}, {}
    for fold in common:
        trainings = [folds[fold] for folds in group]
        values[fold] = sum(of(one) or 0.0 for one in trainings) / len(trainings)
        known = [one.test_accuracy for one in trainings if one.test_accuracy is not None]
        if len(known) == len(trainings):
            tests[fold] = sum(known) / len(known)
    units = frozenset((folds[fold].configuration, fold) for folds in group for fold in common)
    return Side(values, tests, units)
