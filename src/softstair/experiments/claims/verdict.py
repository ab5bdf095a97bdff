"""Verdicts: a word with the accuracies and differences that it follows from.

The rules. Accuracies are validation accuracies of the last epoch, unless a label says otherwise.

above    A difference counts with three folds or more if its 95 % interval lies above 0; with one or
         two, if it is at least a point and positive on each. If it is positive and does not count,
         the claim holds in part.
same     Two accuracies are the same if the interval of their difference (with one or two folds its
         range) lies within the tolerance, and differ if it lies outside; else it holds in part.
level    A level of the paper is reached from 1.5 points below it, by trainings of full length.
parts    A claim of several parts holds if all of them do, does not hold if none does, and else
         holds in part. It holds in part at best if some of what it speaks of was not trained.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from softstair.experiments.claims.contrasts import Side
from softstair.experiments.statistics import FEWEST, Mean
from softstair.experiments.studies import Study

__all__ = ["Verdict", "Word", "above", "judged_by", "lacking", "read", "same", "so", "untested"]

Word = Literal["holds", "holds in part", "does not hold", "not tested"]
ALONE = 0.01
"""What a difference of one or two folds, which have no interval, must be at least to count: two and
a half standard errors of one on the same 10,000 examples, if the networks part on one in seven."""
MOST_GAPS = 3
"""A sentence has so many differences at most; a table has all of them."""


@dataclass(frozen=True)
class Verdict:
    """A word, and what it follows from.

    sides     accuracies, by label
    gaps      differences and other quantities in percentage points, by label
    missing   what the claim speaks of and was not trained
    note      why it was not tested
    """

    verdict: Word
    study: Study
    sides: Mapping[str, Side] = field(default_factory=dict)
    gaps: Mapping[str, Mean] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    note: str = ""

    @property
    def trainings(self) -> int:
        """How many trainings it follows from."""
        return len({unit for side in self.sides.values() for unit in side.trainings})

    @property
    def sentence(self) -> str:
        """What was measured: evaluation, length, folds, accuracies, differences, what is missing.

        With two folds, brackets hold the range of the two; with more, ± is half of the 95 %
        interval.
        """
        if self.verdict == "not tested":
            return f"{self.study.title}: it takes {self.note}."
        counts = sorted({len(side.folds) for side in self.sides.values()})
        folds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
        plural = "" if folds == "1" else "s"
        parts = [", ".join(f"{label} {side.mean}" for label, side in self.sides.items())]
        if len(self.gaps) <= MOST_GAPS:
            parts += [f"{label}: {gap.in_hundredths()} points" for label, gap in self.gaps.items()]
        if self.missing:
            parts.append(f"without {', '.join(self.missing)}")
        scale = f"{self.study.epochs} epochs, {self.study.statistics} statistics"
        return f"Validation, {scale}, {folds} fold{plural}: {'; '.join(parts)}."


def judged_by(
    study: Study,
    words: Iterable[Word],
    sides: Mapping[str, Side],
    gaps: Mapping[str, Mean],
    missing: Iterable[str] = (),
) -> Verdict:
    """The verdict of a claim whose parts have these words."""
    every, lacks = set(words), tuple(missing)
    word = every.pop() if len(every) == 1 else "holds in part"
    if word == "holds" and lacks:
        word = "holds in part"
    return Verdict(word, study, sides, gaps, lacks)


def untested(study: Study, takes: str) -> Verdict:
    """The verdict where a study lacks what the claim takes."""
    return Verdict("not tested", study, note=takes)


def lacking(there: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """Which of the wanted are not there."""
    known = set(there)
    return [read(one) for one in wanted if one not in known]


def so(good: bool) -> Word:
    """Whether something holds, as a word."""
    return "holds" if good else "does not hold"


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


def read(name: str) -> str:
    """A value as it is read: same_start is same start."""
    return name.replace("_", " ")
