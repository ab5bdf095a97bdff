"""Parts of a study side by side: what is compared is alike in all but what it is compared in.

Accuracies are averaged within a fold, over configurations that every side has, and compared fold by
fold: what a fold adds to all of them falls out of their differences.
"""

from collections.abc import Callable, Iterable, Mapping

from softstair.experiments.design import FREEDOMS
from softstair.experiments.results import Training
from softstair.experiments.statistics import Mean, drop_of, mean_of
from softstair.experiments.studies import Study, select

__all__ = ["Folds", "before_the_drop", "difference", "final", "mean", "side_by_side"]

Folds = dict[int, float]
"""An accuracy for each fold."""
SHARE_BEFORE = 0.02
"""The share of all epochs, the last before the learning rate drops, whose mean is taken there."""


def final(training: Training) -> float | None:
    """Its validation accuracy in the end."""
    return training.valid_accuracy if training.is_done else None


def before_the_drop(training: Training) -> float | None:
    """Its mean validation accuracy over the last epochs before the learning rate drops."""
    drop = drop_of(training)
    if drop is None:
        return None
    count = max(1, round(SHARE_BEFORE * int(training.settings["epochs"])))
    last = training.curve[max(0, drop - count) : drop]
    return sum(one.valid_accuracy for one in last) / len(last)


def side_by_side(
    study: Study,
    sides: Mapping[str, Mapping[str, str]],
    of: Callable[[Training], float | None] = final,
    over: Iterable[str] = (),
) -> dict[str, Folds]:
    """The accuracy of each side on each fold that all sides have; nothing, if there is none.

    sides   what each must be, by its name; configurations of two sides are matched in all other
            degrees of freedom
    over    degrees of freedom that are averaged over, and not matched
    """
    named = {name for wanted in sides.values() for name in wanted} | set(over)
    matched = [name for name in FREEDOMS if name not in named]
    cells = {side: _cells(study, wanted, matched, of) for side, wanted in sides.items()}
    shared = set.intersection(*(set(groups) for groups in cells.values()))
    every = [cells[side][key] for side in cells for key in shared]
    folds = sorted(set.intersection(*(set(group) for group in every))) if every else []
    return {
        side: {fold: sum(cells[side][key][fold] for key in shared) / len(shared) for fold in folds}
        for side in (cells if folds else ())
    }


def mean(folds: Folds) -> Mean:
    """The mean of a side."""
    return mean_of(folds.values())


def difference(one: Folds, other: Folds) -> Mean:
    """How far the one lies above the other, fold by fold."""
    return mean_of(one[fold] - other[fold] for fold in one)


def _cells(
    study: Study,
    wanted: Mapping[str, str],
    matched: list[str],
    of: Callable[[Training], float | None],
) -> dict[tuple[str, ...], Folds]:
    """By the matched settings: the mean on each fold that all configurations of them have."""
    found: dict[tuple[str, ...], dict[str, Folds]] = {}
    for one in select(study.trainings, wanted):
        value = of(one)
        if value is not None:
            key = tuple(one.settings[name] for name in matched)
            which = "/".join(one.settings[name] for name in FREEDOMS)
            found.setdefault(key, {}).setdefault(which, {})[one.fold] = value
    means: dict[tuple[str, ...], Folds] = {}
    for key, group in found.items():
        folds = set.intersection(*(set(one) for one in group.values()))
        means[key] = {n: sum(one[n] for one in group.values()) / len(group) for n in folds}
    return {key: folds for key, folds in means.items() if folds}
