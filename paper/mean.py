"""The mean of repetitions, with its interval.

Wherever ± is written by the commands and in the report, it is half of
Student's 95 % interval: t(0.975, n − 1)·s/√n over n repetitions. It takes three: with two, t is
12.7 and the interval says nothing, so the two values are given as a range instead. The folds of one
partition share most of their training examples, so the intervals are too narrow rather than too
wide: they say how far one fold is from the next, not what another data set would give.

>>> str(mean_of([0.85, 0.86, 0.87])), str(mean_of([0.85, 0.87])), str(mean_of([0.85]))
('86.0 ± 2.5 %', '86.0 (85.0 to 87.0) %', '85.0 %')
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from softstair._errors import SoftstairError, import_extra

Numbers = NDArray[np.float64]
CONFIDENCE = 0.95
FEWEST = 3
"""Repetitions that an interval takes at least."""


@dataclass(frozen=True)
class Mean:
    """A mean over repetitions, half of its 95 % interval (None below three), and its range."""

    value: float
    margin: float | None
    least: float
    most: float
    folds: int

    @property
    def bounds(self) -> tuple[float, float]:
        """The interval; with fewer than three repetitions the range."""
        if self.margin is None:
            return self.least, self.most
        return self.value - self.margin, self.value + self.margin

    def __str__(self) -> str:
        return f"{self.in_hundredths()} %"

    def in_percent(self) -> str:
        """The mean as commands print it.

        >>> mean_of([0.85, 0.86, 0.87]).in_percent(), mean_of([0.85, 0.87]).in_percent()
        ('86.00% ± 2.48%', '86.00% (85.00% to 87.00%)')
        """
        return self.in_hundredths(digits=2, unit="%")

    def in_hundredths(self, digits: int = 1, unit: str = "") -> str:
        """The mean times 100 with its ± or, of two repetitions, its range."""
        number = lambda share: f"{100 * share:z.{digits}f}{unit}".replace("-", "−")
        value = number(self.value)
        if self.margin is not None:
            return f"{value} ± {number(self.margin)}"
        ends = f" ({number(self.least)} to {number(self.most)})"
        return value + (ends if self.folds > 1 else "")


def mean_of(values: Iterable[float]) -> Mean:
    """Return the mean of one number per repetition, with its interval and its range."""
    column = np.array([[value] for value in values], np.float64)
    if not column.size:
        raise SoftstairError("a mean must be of at least one number, but none was given.")
    mean, margin = interval(column)
    half = None if margin is None else float(margin[0])
    return Mean(float(mean[0]), half, float(column.min()), float(column.max()), len(column))


def interval(values: Numbers) -> tuple[Numbers, Numbers | None]:
    """Return (repetitions, places) -> mean of each place, and half of its interval."""
    count = len(values)
    mean: Numbers = values.mean(0)
    if count < FEWEST:
        return mean, None
    # scipy.stats is not imported for a quantile of Student's t: it takes as long as a figure.
    quantile = import_extra("scipy.special").stdtrit(count - 1, (1 + CONFIDENCE) / 2)
    return mean, quantile * values.std(0, ddof=1) / count**0.5
