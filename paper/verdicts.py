"""Compare cells of a design with each other, and turn their differences into a verdict.

A cell is the mean over all configurations with the same settings, fold by fold and seed by seed.
Cells are compared on configurations that agree in all other settings, and on the folds that all of
these have. If not all configurations have the same folds, those with the most folds are compared,
so every fold has the same configurations. A difference of two cells is computed from these two; the
highest, the lowest or the mean of several cells from all of them. Accuracies are validation
accuracies of the last epoch unless a label says otherwise.

above    A difference counts with three folds or more if its 95 % interval lies above 0; with one or
         two, if it is at least a point and positive on each. If it is positive and does not count,
         the claim holds in part.
within   Two accuracies are the same if the interval of their difference (with one or two folds its
         range) lies within the bounds, and differ if it lies outside; else it holds in part.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from operator import attrgetter
from typing import Literal

from paper.design import FREEDOMS
from paper.mean import FEWEST, Mean, mean_of
from paper.studies import Study, drop_of, select
from paper.tables import Fold, Training

Word = Literal["holds", "holds in part", "does not hold", "not tested"]
Repetition = tuple[Fold, int]
Folds = Mapping[Repetition, float]
"""A number for each fold and seed."""
Place = tuple[tuple[str, ...], tuple[str, ...]]
"""The settings that are matched, and those that are averaged over."""
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

    def label(self, cell: str) -> str:
        return f"{cell} / {self.name}".replace("_", " ") if self.name else cell.replace("_", " ")


@dataclass(frozen=True)
class Cell:
    """Trainings by configuration and fold. Accuracies are defined for the cells that
    :func:`aligned` returns, where all configurations have the same folds."""

    runs: Mapping[Place, Mapping[Repetition, Training]]
    accuracy: Callable[[Training], float | None]

    @property
    def trainings(self) -> list[Training]:
        return [training for folds in self.runs.values() for training in folds.values()]

    @property
    def folds(self) -> Folds:
        """The mean over configurations, fold by fold."""
        runs, of = list(self.runs.values()), self.accuracy
        return {fold: sum(of(run[fold]) or 0.0 for run in runs) / len(runs) for fold in runs[0]}

    @property
    def mean(self) -> Mean:
        return mean_of(self.folds.values())

    @property
    def test(self) -> Mean | None:
        is_known = all(training.test_accuracy is not None for training in self.trainings)
        return replace(self, accuracy=attrgetter("test_accuracy")).mean if is_known else None

    @property
    def configurations(self) -> int:
        return len(self.runs)


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
    count = max(1, round(SHARE_BEFORE * training.recipe.run.epochs))
    last = training.curve[max(0, drop - count) : drop]
    return sum(epoch.valid_accuracy or 0.0 for epoch in last) / len(last)


def compare(study: Study, group: Group) -> dict[str, Cell]:
    """Return the cells of a group; empty if it is not tested.

    A group is tested if all its cells (at least two, if they are optional) have ``group.folds``
    folds in common. An optional cell that does not have these folds is left out.
    """
    accuracy = before_the_drop if group.before_drop else final
    named = {name for wanted in group.cells.values() for name in wanted} | set(group.over)
    matched = [name for name in FREEDOMS if name not in named]
    trained: dict[str, dict[Place, dict[Repetition, Training]]] = {}
    for label, wanted in group.cells.items():
        for training in select(study.trainings, wanted):
            if accuracy(training) is not None:
                of = training.settings.__getitem__
                place = tuple(map(of, matched)), tuple(map(of, group.over))
                trained.setdefault(label, {}).setdefault(place, {})[training.repetition] = training
    together: dict[object, set[str]] = {}  # the cells that share settings and folds
    for label, runs in trained.items():
        for (settings, _), folds in runs.items():
            for some in combinations(sorted(folds), group.folds):
                together.setdefault((settings, some), set()).add(label)
    needed = min(2, len(group.cells)) if group.optional else len(group.cells)
    suffices = lambda some: len(some) >= needed and all(some & {*one} for one in group.one_of)
    kept = max(filter(suffices, together.values()), key=len, default=set[str]())
    cells = {label: Cell(trained[label], accuracy) for label in trained if label in kept}
    return cells if group.optional else aligned(cells)


def aligned(cells: Mapping[str, Cell]) -> dict[str, Cell]:
    """Return the cells with only those matched configurations that have the most folds in common,
    and only these folds; empty if there is no common fold."""
    shared: dict[tuple[Place, ...], frozenset[Repetition]] = {}
    for places in product(*(cell.runs for cell in cells.values())):
        if len({settings for settings, _ in places}) == 1:
            runs = (cell.runs[at] for cell, at in zip(cells.values(), places, strict=True))
            shared[places] = frozenset.intersection(*map(frozenset, runs))
    most = max(shared.values(), key=len, default=frozenset[Repetition]())
    kept = [places for places, folds in shared.items() if folds >= most] if most else []
    return {
        label: replace(
            cell, runs={at: {fold: cell.runs[at][fold] for fold in sorted(most)} for at in side}
        )
        for (label, cell), side in zip(cells.items(), zip(*kept, strict=True), strict=False)
    }


def difference(
    gap: Gap,
    cells: Mapping[str, Cell],
    gaps: Mapping[str, Folds],
    value: Callable[[Cell], Folds] = attrgetter("folds"),
) -> tuple[Folds, dict[str, Cell]]:
    """Return left less right for each fold that both sides have, and the cells that it is computed
    from. A side is computed from the cells, or is one of the earlier ``gaps``; if neither is there,
    the difference has no fold."""
    asked = {label for side in (gap.left, gap.right) for label in _asked(side, cells)}
    used = aligned({label: cell for label, cell in cells.items() if label in asked})
    values = {label: value(cell) for label, cell in used.items()}
    left, right = (_picked(side, values, gaps) for side in (gap.left, gap.right))
    return {fold: left[fold] - right[fold] for fold in left if fold in right}, used


def _asked(side: str | float, labels: Iterable[str]) -> list[str]:
    """The cells that a side is computed from."""
    how, _, which = str(side).partition(" ")
    relation, _, name = which.partition(" ")
    if how not in RANKS:
        return [label for label in labels if label == side]
    return [
        each for each in labels if (each != name if relation == "but" else each.startswith(name))
    ]


def _picked(side: str | float, cells: Mapping[str, Folds], gaps: Mapping[str, Folds]) -> Folds:
    if isinstance(side, float):
        return {fold: side for folds in cells.values() for fold in folds}
    asked = [cells[label] for label in _asked(side, cells)]
    if not asked:
        return gaps.get(side, {})
    if side.startswith("mean "):
        return {fold: sum(folds[fold] for folds in asked) / len(asked) for fold in asked[0]}
    rank = min if side.startswith("lowest") else max
    return rank(asked, key=lambda folds: mean_of(folds.values()).value)
