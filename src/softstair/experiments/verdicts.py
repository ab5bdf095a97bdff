"""Compare cells of a design with each other, and turn their differences into a verdict.

A cell is the mean over all configurations with the same settings, fold by fold and seed by seed.
On each fold, the cells of a group are compared on the configurations that all cells of this fold
have there, so what a fold or a configuration adds to all cells cancels. Two cells are compared on
the folds that both have. Where a group asks for the highest, the lowest or the mean of its cells,
all of them are compared on the folds that all have. Accuracies are validation accuracies of the
last epoch unless a label says otherwise.

above    A difference counts with three folds or more if its 95 % interval lies above 0; with one or
         two, if it is at least a point and positive on each. If it is positive and does not count,
         the claim holds in part.
within   Two accuracies are the same if the interval of their difference (with one or two folds its
         range) lies within the bounds, and differ if it lies outside; else it holds in part.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from softstair.experiments.design import FREEDOMS
from softstair.experiments.studies import FEWEST, Mean, Study, drop_of, mean_of, select
from softstair.experiments.tables import Fold, Training

Word = Literal["holds", "holds in part", "does not hold", "not tested"]
Folds = Mapping[tuple[Fold, int], float]
"""A number for each fold and seed."""
SHARE_BEFORE = 0.02
"""The share of all epochs, the last before the learning rate drops, whose mean is taken there."""
RANKS = ("highest", "lowest", "mean")
"""What a side of a gap may ask of the cells of a group."""
ALONE = 0.01
"""What a difference of one or two folds, which have no interval, must be at least to count: two and
a half standard errors of one on the same 10,000 examples, if the networks part on one in seven."""


@dataclass(frozen=True)
class Gap:
    """A difference and the rules that judge it; claims.toml describes the fields."""

    left: str | float
    right: str | float
    label: str | None = None
    above: bool = False
    within: tuple[float, float] | None = None
    at_most: float | None = None
    at_least: float | None = None

    def judge(self, gap: Mean, is_full: bool) -> Iterator[Word]:
        if self.above:
            yield above(gap)
        if self.within is not None:
            yield within(gap, *self.within)
        if self.at_most is not None:
            yield "holds" if gap.value <= self.at_most else "does not hold"
        if is_full and self.at_least is not None and gap.value < self.at_least:
            yield "does not hold"


@dataclass(frozen=True)
class Group:
    """Cells that are compared with each other; claims.toml describes the fields.

    ``cells`` has the settings of each cell by its label. A claim is tested if at least one group of
    each ``family`` can be compared.
    """

    cells: Mapping[str, Mapping[str, str]]
    gaps: tuple[Gap, ...] = ()
    name: str = ""
    family: str = ""
    optional: bool = False
    one_of: Sequence[Sequence[str]] = ()
    over: Sequence[str] = ()
    before_drop: bool = False
    folds: int = 1

    @property
    def is_ranked(self) -> bool:
        """Whether a gap asks for the highest, the lowest or the mean of its cells."""
        sides = (side for gap in self.gaps for side in (gap.left, gap.right))
        return any(str(side).partition(" ")[0] in RANKS for side in sides)

    def label(self, cell: str) -> str:
        return f"{cell} / {self.name}".replace("_", " ") if self.name else cell.replace("_", " ")


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


def above(gap: Mean) -> Word:
    """Whether a difference is positive; in part, if that may be chance."""
    if gap.value <= 0:
        return "does not hold"
    large = gap.folds >= FEWEST or gap.value >= ALONE
    return "holds" if large and gap.bounds[0] > 0 else "holds in part"


def within(gap: Mean, least: float, most: float) -> Word:
    """Whether a difference lies from ``least`` to ``most``; in part, if that may be chance."""
    low, high = gap.bounds
    if low > most or high < least:
        return "does not hold"
    return "holds" if low >= least and high <= most else "holds in part"


def final(training: Training) -> float | None:
    return training.valid_accuracy if training.is_done else None


def before_the_drop(training: Training) -> float | None:
    """The mean validation accuracy over the last epochs before the learning rate drops."""
    drop = drop_of(training)
    if drop is None:
        return None
    count = max(1, round(SHARE_BEFORE * training.recipe.epochs))
    last = training.curve[max(0, drop - count) : drop]
    return sum(epoch.valid_accuracy or 0.0 for epoch in last) / len(last)


def compare(study: Study, group: Group) -> dict[str, Cell]:
    """Return the cells of a group on the folds that they share with each other; empty if it cannot
    be compared on as many folds as the group needs, with all cells that are trained."""
    accuracy = before_the_drop if group.before_drop else final
    named = {name for wanted in group.cells.values() for name in wanted} | set(group.over)
    matched = [name for name in FREEDOMS if name not in named]
    # Trainings by their label, their fold and their matched settings.
    trained: dict[str, dict[tuple[Fold, int], dict[tuple[str, ...], list[Training]]]] = {}
    for label, wanted in group.cells.items():
        for training in select(study.trainings, wanted):
            if accuracy(training) is not None:
                place = tuple(training.settings[name] for name in matched)
                places = trained.setdefault(label, {}).setdefault(training.repetition, {})
                places.setdefault(place, []).append(training)
    needed = min(2, len(group.cells)) if group.optional else len(group.cells)
    if len(trained) < needed:
        return {}
    chosen: dict[str, dict[tuple[Fold, int], list[Training]]] = {label: {} for label in trained}
    common = 0
    for fold in sorted({fold for folds in trained.values() for fold in folds}):
        there = {label: folds[fold] for label, folds in trained.items() if fold in folds}
        first, *others = there.values()
        shared = [place for place in first if all(place in places for places in others)]
        is_complete = all(any(label in there for label in labels) for labels in group.one_of)
        has_all = len(there) == len(trained)
        if shared and is_complete and (has_all or (len(there) >= needed and not group.is_ranked)):
            common += has_all
            for label, places in there.items():
                chosen[label][fold] = [each for place in shared for each in places[place]]
    if common < group.folds:
        return {}
    return {label: _cell(folds, accuracy) for label, folds in chosen.items()}


def _cell(
    folds: Mapping[tuple[Fold, int], Sequence[Training]],
    accuracy: Callable[[Training], float | None],
) -> Cell:
    values, tests = {}, {}
    for fold, trainings in folds.items():
        values[fold] = sum(accuracy(training) or 0.0 for training in trainings) / len(trainings)
        scores = [t.test_accuracy for t in trainings if t.test_accuracy is not None]
        if len(scores) == len(trainings):
            tests[fold] = sum(scores) / len(scores)
    return Cell(values, tests, tuple(each for trainings in folds.values() for each in trainings))


def difference(gap: Gap, group: Mapping[str, Folds], others: Mapping[str, Folds]) -> Folds | None:
    """Left less right on each fold that both have; None where one of them is absent."""
    left, right = (_picked(side, group, others) for side in (gap.left, gap.right))
    if left is None or right is None:
        return None
    return {fold: left[fold] - right[fold] for fold in left if fold in right}


def _picked(
    side: str | float, group: Mapping[str, Folds], others: Mapping[str, Folds]
) -> Folds | None:
    if isinstance(side, float):
        return {fold: side for folds in (*group.values(), *others.values()) for fold in folds}
    how, _, which = side.partition(" ")
    if how not in RANKS:
        return group.get(side, others.get(side))
    relation, _, name = which.partition(" ")
    cells = [
        folds
        for label, folds in group.items()
        if (label != name if relation == "but" else label.startswith(name))
    ]
    if how == "mean":
        return {fold: sum(folds[fold] for folds in cells) / len(cells) for fold in cells[0]}
    ranked = sorted(cells, key=lambda folds: mean_of(folds.values()).value)
    return ranked[-1] if how == "highest" else ranked[0]
