"""Compare cells of a design with each other, and turn their differences into a verdict.

A cell is the mean over all configurations with the same settings, fold by fold. The cells of a
group are compared on the configurations and folds that all of them have, so what a fold adds to all
cells cancels. Accuracies are validation accuracies of the last epoch unless a label says otherwise.

above    A difference counts with three folds or more if its 95 % interval lies above 0; with one or
         two, if it is at least a point and positive on each. If it is positive and does not count,
         the claim holds in part.
same     Two accuracies are the same if the interval of their difference (with one or two folds its
         range) lies within the tolerance, and differ if it lies outside; else it holds in part.
level    A level of the paper is reached from 1.5 points below it, by trainings of full length.
parts    A claim of several parts holds if all of them do, does not hold if none does, and else
         holds in part. It holds in part at best if some of what it speaks of was not trained.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import numpy as np

from softstair.experiments.design import FREEDOMS
from softstair.experiments.results import Training
from softstair.experiments.studies import FEWEST, Mean, Study, drop_of, mean_of, select

Word = Literal["holds", "holds in part", "does not hold", "not tested"]
Folds = Mapping[int, float]
"""A number for each fold."""
SHARE_BEFORE = 0.02
"""The share of all epochs, the last before the learning rate drops, whose mean is taken there."""
TAIL = 6
"""Variability is that of the last sixth of the epochs: the last 20 of 120."""
ALONE = 0.01
"""What a difference of one or two folds, which have no interval, must be at least to count: two and
a half standard errors of one on the same 10,000 examples, if the networks part on one in seven."""
MOST_GAPS = 3
"""A sentence has so many differences at most; a table has all of them."""


@dataclass(frozen=True)
class Gap:
    """A difference, left less right: cells or earlier gaps by label, picks of cells, or a constant.

    rule       turns it into a part of the verdict; None: it is shown, and decides nothing
    label      None: it decides, and is not shown; {} stands for the name of the group
    at_least   what it must be in trainings of full length
    """

    label: str | None
    left: "str | Pick | float"
    right: "str | Pick | float"
    rule: Callable[[Mean], Word] | None = None
    at_least: float | None = None


@dataclass(frozen=True)
class Pick:
    """The highest, the lowest or the mean of the cells of a group whose label begins with ``only``,
    without the cell called ``but``."""

    how: Literal["highest", "lowest", "mean"]
    only: str = ""
    but: str = ""


@dataclass(frozen=True)
class Group:
    """Cells that are compared with each other.

    cells         settings of each cell by its label; cells are matched in all other degrees of
                  freedom
    gaps          differences within the group; those whose cells are absent are left out
    name          tells it from other groups; it is added to the labels of its cells
    optional      two of the cells are enough
    one_of        of each of these tuples of labels, one must be there
    over          degrees of freedom that are averaged over, and not matched
    before_drop   compare accuracies before the learning rate drops, not those of the last epoch
    folds         how many it takes at least
    family        a claim is tested where a group of each family is there
    """

    cells: Mapping[str, Mapping[str, Any]]
    gaps: tuple[Gap, ...] = ()
    name: str = ""
    optional: bool = False
    one_of: tuple[tuple[str, ...], ...] = ()
    over: tuple[str, ...] = ()
    before_drop: bool = False
    folds: int = 1
    family: str = ""

    def label(self, cell: str) -> str:
        return f"{cell} / {self.name}".replace("_", " ") if self.name else cell.replace("_", " ")


@dataclass(frozen=True)
class Contrast:
    """What is compared to judge a claim.

    groups       groups of cells
    needs        what it takes to test it, in words; empty: trainings of full length
    gaps         differences of cells and gaps of several groups
    keep         which groups of a family are judged: all, the one whose cells lie furthest apart,
                 or the one with the highest accuracy
    variability  compare the std over folds, averaged over the last sixth of the epochs
    all_cells    whether the verdict says which cells are not there
    """

    groups: tuple[Group, ...]
    needs: str = ""
    gaps: tuple[Gap, ...] = ()
    keep: Literal["all", "widest", "best"] = "all"
    variability: bool = False
    all_cells: bool = True


@dataclass(frozen=True)
class Cell:
    """The mean over configurations, fold by fold: validation accuracy, and test accuracy if any."""

    folds: Folds
    tests: Folds
    trainings: tuple[Training, ...]

    @property
    def mean(self) -> Mean:
        return mean_of(self.folds.values())

    @property
    def test(self) -> Mean | None:
        return mean_of(self.tests.values()) if self.tests else None

    @property
    def configurations(self) -> int:
        return len({training.configuration for training in self.trainings})


@dataclass(frozen=True)
class Judgement:
    """The verdict of one study on a claim, and what it follows from.

    cells     accuracies, by label
    gaps      differences and other quantities, by label
    missing   what the claim speaks of and was not trained
    needs     what it takes to test the claim, where it was not tested
    """

    verdict: Word
    study: Study
    cells: Mapping[str, Cell] = field(default_factory=dict)
    gaps: Mapping[str, Mean] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    needs: str = ""

    @property
    def trainings(self) -> int:
        every = (training for cell in self.cells.values() for training in cell.trainings)
        return len({(training.configuration, training.fold) for training in every})

    @property
    def sentence(self) -> str:
        """What was measured: evaluation, length, folds, accuracies, differences, what is absent."""
        if self.verdict == "not tested":
            return f"{self.study.title}: it takes {self.needs}."
        counts = sorted({len(cell.folds) for cell in self.cells.values()})
        folds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
        plural = "" if folds == "1" else "s"
        parts = [", ".join(f"{label} {cell.mean}" for label, cell in self.cells.items())]
        if len(self.gaps) <= MOST_GAPS:
            parts += [f"{label}: {gap.in_hundredths()} points" for label, gap in self.gaps.items()]
        if self.missing:
            parts.append(f"without {', '.join(self.missing)}")
        scale = f"{self.study.epochs} epochs, {self.study.statistics} statistics"
        return f"Validation, {scale}, {folds} fold{plural}: {'; '.join(parts)}."


def judge(contrast: Contrast, study: Study, full_length: int) -> Judgement:
    """Return the verdict of one study; trainings of ``full_length`` epochs can tell levels."""
    is_full = study.epochs >= full_length
    names = dict.fromkeys(group.family for group in contrast.groups)
    families = [
        _compared(study, [group for group in contrast.groups if group.family == name], contrast)
        for name in names
    ]
    needs = contrast.needs or f"trainings over {full_length} epochs"
    if not all(families) or not (contrast.needs or is_full):
        return Judgement("not tested", study, needs=needs)
    compared = list(chain(*families))
    cells: dict[str, Cell] = {}
    words: list[Word] = []
    shown: dict[str, Mean] = {}
    every: dict[str, Folds] = {}
    for group, there in [*compared, (Group({}, contrast.gaps), {})]:
        values: dict[str, Folds] = {
            label: {0: _variability(study, cell)} if contrast.variability else cell.folds
            for label, cell in there.items()
        }
        for gap in group.gaps:
            if not (folds := _difference(gap, values, every)):
                continue
            mean = mean_of(folds.values())
            words += [gap.rule(mean)] if gap.rule else []
            if is_full and gap.at_least is not None and mean.value < gap.at_least:
                words.append("does not hold")
            if gap.label is not None:
                every[gap.label] = folds
                shown[gap.label.format(group.name.replace("_", " "))] = mean
        cells |= {group.label(label): cell for label, cell in there.items()}
        every |= {group.label(label): folds for label, folds in values.items()}
    if not words:  # the groups share no fold
        return Judgement("not tested", study, needs=needs)
    missing = tuple(_missing(contrast, compared)) if contrast.all_cells else ()
    verdict = words[0] if len(set(words)) == 1 else "holds in part"
    if verdict == "holds" and missing:
        verdict = "holds in part"
    return Judgement(verdict, study, cells, shown, missing)


def above(gap: Mean) -> Word:
    """Whether a difference is positive; in part, if that may be chance.

    >>> above(Mean(0.02, 0.01, 0.03, 0, 0, 5)), above(Mean(0.02, -0.01, 0.05, 0, 0, 5))
    ('holds', 'holds in part')
    """
    if gap.value <= 0:
        return "does not hold"
    large = gap.folds >= FEWEST or gap.value >= ALONE
    return "holds" if large and gap.bounds[0] > 0 else "holds in part"


def same(gap: Mean, tolerance: float, below: float | None = None) -> Word:
    """Whether a difference lies from ``-below`` to ``tolerance``; in part, if that may be chance.

    >>> same(Mean(0.002, -0.001, 0.005, 0, 0, 5), 0.01), same(Mean(0.01, 0, 0.02, 0, 0, 5), 0.01)
    ('holds', 'holds in part')
    """
    least = -tolerance if below is None else -below
    low, high = gap.bounds
    if low > tolerance or high < least:
        return "does not hold"
    return "holds" if low >= least and high <= tolerance else "holds in part"


def at_most(gap: Mean, limit: float) -> Word:
    return "holds" if gap.value <= limit else "does not hold"


def final(training: Training) -> float | None:
    return training.valid_accuracy if training.is_done else None


def before_the_drop(training: Training) -> float | None:
    """The mean validation accuracy over the last epochs before the learning rate drops."""
    drop = drop_of(training)
    if drop is None:
        return None
    count = max(1, round(SHARE_BEFORE * int(training.settings["epochs"])))
    last = training.curve[max(0, drop - count) : drop]
    return sum(epoch.valid_accuracy for epoch in last) / len(last)


def compare(study: Study, group: Group) -> dict[str, Cell]:
    """Return the cells of a group on the folds that all have; empty if it cannot be compared."""
    accuracy = before_the_drop if group.before_drop else final
    named = {name for wanted in group.cells.values() for name in wanted} | set(group.over)
    matched = [name for name in FREEDOMS if name not in named]
    trained: dict[str, Places] = {}
    for label, wanted in group.cells.items():
        places: Places = {}
        for training in select(study.trainings, wanted):
            if accuracy(training) is not None:
                place = tuple(training.settings[name] for name in matched)
                configuration = tuple(training.settings[name] for name in FREEDOMS)
                folds = places.setdefault(place, {}).setdefault(configuration, {})
                folds[training.fold] = training
        if places:
            trained[label] = places
    needed = min(2, len(group.cells)) if group.optional else len(group.cells)
    is_complete = all(any(label in trained for label in labels) for labels in group.one_of)
    if len(trained) < needed or not is_complete:
        return {}
    first, *others = trained.values()
    shared = [place for place in first if all(place in places for places in others)]
    chosen = {
        label: [folds for place in shared for folds in places[place].values()]
        for label, places in trained.items()
    }
    every = [set(folds) for configurations in chosen.values() for folds in configurations]
    common = sorted(set.intersection(*every)) if every else []
    if len(common) < group.folds:
        return {}
    return {label: _cell(folds, common, accuracy) for label, folds in chosen.items()}


Places = dict[tuple[str, ...], dict[tuple[str, ...], dict[int, Training]]]
"""Trainings by their matched settings, their configuration and their fold."""


def _cell(
    configurations: Sequence[Mapping[int, Training]],
    common: Sequence[int],
    accuracy: Callable[[Training], float | None],
) -> Cell:
    values, tests = {}, {}
    for fold in common:
        trainings = [folds[fold] for folds in configurations]
        values[fold] = sum(accuracy(training) or 0.0 for training in trainings) / len(trainings)
        scores = [t.test_accuracy for t in trainings if t.test_accuracy is not None]
        if len(scores) == len(trainings):
            tests[fold] = sum(scores) / len(scores)
    return Cell(values, tests, tuple(folds[fold] for folds in configurations for fold in common))


def _compared(
    study: Study, family: Sequence[Group], contrast: Contrast
) -> list[tuple[Group, dict[str, Cell]]]:
    """The groups of a family that are there, or the one of them that is kept."""
    there = [(group, cells) for group in family if (cells := compare(study, group))]
    if contrast.keep == "all" or not there:
        return there
    reduce = np.ptp if contrast.keep == "widest" else np.max
    return [max(there, key=lambda pair: reduce([cell.mean.value for cell in pair[1].values()]))]


def _difference(gap: Gap, group: Mapping[str, Folds], others: Mapping[str, Folds]) -> Folds | None:
    """Left less right on each fold that both have; None where one of them is absent."""
    left, right = (_picked(side, group, others) for side in (gap.left, gap.right))
    if left is None or right is None:
        return None
    if isinstance(left, float):
        left = dict.fromkeys(right, left)
    if isinstance(right, float):
        right = dict.fromkeys(left, right)
    return {fold: left[fold] - right[fold] for fold in left if fold in right}


def _picked(
    side: str | Pick | float, group: Mapping[str, Folds], others: Mapping[str, Folds]
) -> Any:
    if isinstance(side, float):
        return side
    if isinstance(side, str):
        return group.get(side, others.get(side))
    cells = [
        folds for label, folds in group.items() if label.startswith(side.only) and label != side.but
    ]
    if side.how == "mean":
        return {fold: sum(folds[fold] for folds in cells) / len(cells) for fold in cells[0]}
    ranked = sorted(cells, key=lambda folds: mean_of(folds.values()).value)
    return ranked[-1] if side.how == "highest" else ranked[0]


def _variability(study: Study, cell: Cell) -> float:
    last = max(1, study.epochs // TAIL)
    curves = [[epoch.valid_accuracy for epoch in run.curve[-last:]] for run in cell.trainings]
    return float(np.std(curves, axis=0, ddof=1).mean())


def _missing(contrast: Contrast, compared: list[tuple[Group, dict[str, Cell]]]) -> Iterator[str]:
    """Groups that are not there, and cells that not all groups have."""
    absent: dict[str, bool] = {}
    if contrast.keep == "all":
        there = {group.name for group, _ in compared}
        absent = {group.name: group.name not in there for group in contrast.groups}
    for group, cells in compared:
        for label in group.cells:
            name = label.partition(" /")[0]
            absent[name] = label not in cells or absent.get(name, False)
    yield from (name.replace("_", " ") for name, is_absent in absent.items() if is_absent)
    if contrast.variability and any(
        len(cell.folds) < FEWEST for _, cells in compared for cell in cells.values()
    ):
        yield "a third fold"
