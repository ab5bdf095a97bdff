"""Means over folds with 95 % intervals, of numbers and along curves.

Wherever ± is written here, in the claims and in the report, it is half of Student's 95 % interval:
t(0.975, n − 1)·s/√n over n folds. It takes three folds: with two, t is 12.7 and the interval says
nothing, so the two values are given as a range instead. The folds of one partition share most of
their training examples, so the intervals are too narrow rather than too wide: they say how far one
fold is from the next, not what another data set would give.

>>> str(mean_of([0.85, 0.86, 0.87])), str(mean_of([0.85, 0.87])), str(mean_of([0.85]))
('86.0 ± 2.5 %', '86.0 (85.0 to 87.0) %', '85.0 %')
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from softstair._errors import import_extra
from softstair.experiments.results import Epoch, Training

__all__ = ["Curve", "Mean", "curve_of", "curves", "drop_of", "final_of", "mean_of"]

Numbers = NDArray[np.float64]
CONFIDENCE = 0.95
FEWEST = 3
"""Folds that an interval takes at least."""


@dataclass(frozen=True)
class Mean:
    """A mean over folds, as a share of 1.

    low, high     its 95 % interval; None with fewer than three folds
    least, most   the smallest and the largest value
    """

    value: float
    low: float | None
    high: float | None
    least: float
    most: float
    folds: int

    @property
    def margin(self) -> float | None:
        """Half of the interval: what is written after ±."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    @property
    def bounds(self) -> tuple[float, float]:
        """The interval; with fewer than three folds the range."""
        if self.low is None or self.high is None:
            return self.least, self.most
        return self.low, self.high

    def __str__(self) -> str:
        """Per cent."""
        return f"{self.in_hundredths()} %"

    def in_hundredths(self, sign: bool = False, digits: int = 1) -> str:
        """The mean times 100 with its ± or, of two folds, its range."""
        number = lambda share, plus: f"{100 * share:{plus}z.{digits}f}".replace("-", "−")
        value = number(self.value, "+" if sign else "")
        if self.margin is not None:
            return f"{value} ± {number(self.margin, '')}"
        ends = f" ({number(self.least, '')} to {number(self.most, '')})"
        return value + (ends if self.folds > 1 else "")


@dataclass(frozen=True)
class Curve:
    """Means over folds along the epochs; low and high are None with fewer than three folds.

    settings   those of the configuration, without the fold
    epochs     counting from 1: after so many epochs
    """

    settings: Mapping[str, str]
    epochs: NDArray[np.int64]
    mean: Numbers
    low: Numbers | None
    high: Numbers | None
    folds: tuple[int, ...]


def mean_of(values: Iterable[float]) -> Mean:
    """The mean of one number per fold, with its interval and its range."""
    column = np.array([[value] for value in values], np.float64)
    if not column.size:
        raise ValueError("a mean must be of a number at least, but none was given.")
    mean, low, high = _interval(column)
    return Mean(
        float(mean[0]),
        low=None if low is None else float(low[0]),
        high=None if high is None else float(high[0]),
        least=float(column.min()),
        most=float(column.max()),
        folds=len(column),
    )


def final_of(trainings: Iterable[Training]) -> Mean | None:
    """The mean of the last epoch's validation accuracy, of the folds that are done, if any is."""
    done = [one.valid_accuracy for one in trainings if one.is_done]
    return mean_of(done) if done else None


def curve_of(trainings: Sequence[Training], metric: str = "valid_accuracy") -> Curve:
    """The curve of one configuration's folds, as far as every one of them has come."""
    if metric not in Epoch.__dataclass_fields__ or metric == "epoch":
        known = ", ".join(name for name in Epoch.__dataclass_fields__ if name != "epoch")
        raise ValueError(f"metric must be one of {known}, but {metric!r} was given.")
    if not trainings:
        raise ValueError("a curve must have a training at least, but none was given.")
    length = min(len(one.curve) for one in trainings)
    values = [[getattr(epoch, metric) for epoch in one.curve[:length]] for one in trainings]
    mean, low, high = _interval(np.array(values, np.float64))
    settings = {k: v for k, v in trainings[0].settings.items() if k != "fold"}
    folds = tuple(sorted(one.fold for one in trainings))
    return Curve(settings, np.arange(1, length + 1), mean, low, high, folds)


def curves(trainings: Iterable[Training], metric: str = "valid_accuracy") -> dict[str, Curve]:
    """A curve for each configuration, by its name, in the order in which they come."""
    groups: dict[str, list[Training]] = {}
    for one in trainings:
        groups.setdefault(one.configuration, []).append(one)
    return {name: curve_of(folds, metric) for name, folds in groups.items()}


def drop_of(training: Training) -> int | None:
    """How many epochs it had done when its learning rate became lower; None if it never did."""
    first = training.curve[0].learning_rate
    lower = (one.epoch for one in training.curve if one.learning_rate < first * (1 - 1e-6))
    return next(lower, None)


def _interval(values: Numbers) -> tuple[Numbers, Numbers | None, Numbers | None]:
    """(folds, places) -> mean, low and high of each place."""
    folds = len(values)
    mean: Numbers = values.mean(0)
    if folds < FEWEST:
        return mean, None, None
    # scipy.stats is not imported for a quantile of Student's t: it takes as long as a figure.
    quantile = import_extra("scipy.special").stdtrit(folds - 1, (1 + CONFIDENCE) / 2)
    margin = quantile * values.std(0, ddof=1) / folds**0.5
    return mean, mean - margin, mean + margin
