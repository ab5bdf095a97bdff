"""Verdicts: a word and a sentence; how differences become the one, and figures the other."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from softstair.experiments.claims.contrasts import Folds, mean
from softstair.experiments.statistics import Mean
from softstair.experiments.studies import Study

__all__ = [
    "ALONE",
    "Verdict",
    "Word",
    "capital",
    "greater",
    "in_part",
    "points",
    "read",
    "scale",
    "so",
    "spread",
    "together",
    "told",
    "untested",
    "whole",
]

Word = Literal["holds", "holds in part", "does not hold", "not tested"]
ALONE = 0.01
"""What the difference of a single fold, which has no interval, must be to be there: two and a half
standard errors of one on the same 10,000 examples, if the networks part on one in seven."""


@dataclass(frozen=True)
class Verdict:
    """A word, and a sentence with what was measured.

    complete   whether that is all that the claim is about
    so_far     whether it would hold, were it complete
    """

    verdict: Word
    sentence: str
    complete: bool = True
    so_far: bool = False


def so(good: bool) -> Word:
    """What holds, or does not."""
    return "holds" if good else "does not hold"


def greater(gap: Mean) -> Word:
    """Whether a difference is above nought; in part, if that may be by chance.

    >>> greater(Mean(0.02, 0.01, 0.03, 5)), greater(Mean(0.02, -0.01, 0.05, 5))
    ('holds', 'holds in part')
    """
    if gap.value <= 0:
        return "does not hold"
    sure = gap.value >= ALONE if gap.low is None else gap.low > 0
    return "holds" if sure else "holds in part"


def together(found: Iterable[Word]) -> Word:
    """What several parts of a claim come to."""
    words = set(found)
    return words.pop() if len(words) == 1 else "holds in part"


def in_part(word: Word) -> Word:
    """In part at best: not all that the paper speaks of was looked at."""
    return "holds in part" if word == "holds" else word


def whole(verdict: Verdict, there: Iterable[str], wanted: Iterable[str]) -> Verdict:
    """The verdict; if not all are there that the paper speaks of, in part at best."""
    there = list(there)
    missing = [read(one) for one in wanted if one not in there]
    if not missing:
        return verdict
    said = f"{verdict.sentence.removesuffix('.')}; without {', '.join(missing)}."
    so_far = verdict.so_far or verdict.verdict == "holds"
    return Verdict(in_part(verdict.verdict), said, complete=False, so_far=so_far)


def untested(study: Study, what: str) -> Verdict:
    """It takes what is not there."""
    return Verdict("not tested", f"{study.title}: it takes {what}, which are not all done.")


def spread(sides: Mapping[str, Folds]) -> float:
    """How far the highest mean lies above the lowest."""
    values = [mean(folds).value for folds in sides.values()]
    return max(values) - min(values)


def told(sides: Mapping[str, Folds]) -> str:
    """Such as "mode 86.1 ± 0.2 %, random 82.0 ± 0.4 %"."""
    return ", ".join(f"{read(name)} {mean(folds)}" for name, folds in sides.items())


def points(gap: Mean, sign: bool = False) -> str:
    """A difference in percentage points."""
    return gap.in_hundredths(sign)


def scale(study: Study, *sides: Mapping[str, Folds]) -> str:
    """On how many folds, over how many epochs, and what is not as the paper has it."""
    counts = sorted({len(folds) for one in sides for folds in one.values()})
    folds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    return f" ({folds} fold{'' if folds == '1' else 's'}, {study.scale})"


def read(name: str) -> str:
    """A name as it is read: same_start is same start."""
    return name.replace("_", " ")


def capital(sentence: str) -> str:
    """With a capital at its head."""
    return sentence[:1].upper() + sentence[1:]
