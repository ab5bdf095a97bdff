"""The time line, cut where the order of two neighbouring layers changes.

A :class:`~softstair.Schedule` is judged exactly: between the ends of the annealing ranges
log ρ_ℓ − log ρ_{ℓ+1} = p·log(e − t) − p′·log(e′ − t) + c turns at most once, so that every crossing
is bracketed. Any other function (layer, t) ↦ (mean, std) is judged on a grid.
"""

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

from softstair.noise import bisect
from softstair.schedule import NoisePath, Schedule

__all__ = ["Span", "logs_of_function", "moves", "spans_of_grid", "spans_of_schedule"]

ROUNDING = 1e-12
"""Differences of log ρ below this are rounding, and so are spans of time below this share of T."""

Span = tuple[float, float, int]
"""(from, to, sign of log ρ_ℓ − log ρ_{ℓ+1} in between): 1 where the order is broken."""


def moves(schedule: Schedule) -> bool:
    """Whether any noise changes at all."""
    mean = not schedule.static_mean and schedule.first_mean != 0
    return mean or (not schedule.static_std and schedule.std0 != 0)


def _log_left(schedule: Schedule, layer: int, t: float) -> float:
    remaining = schedule.remaining(layer, t)
    # In logarithms, because (λ_ℓ)^2(n−ℓ) underflows long before it is 0.
    return schedule.exponent(layer) * math.log(remaining) if remaining > 0 else -math.inf


def _sign(difference: float) -> int:
    # −∞ − (−∞), two layers that have both arrived, is no difference either.
    if math.isnan(difference) or abs(difference) <= ROUNDING:
        return 0
    return 1 if difference > 0 else -1


def spans_of_schedule(schedule: Schedule, layer: int) -> list[Span]:
    """The time line cut where the order of two neighbours can change, with the order in between."""

    def difference(t: float) -> float:
        return _log_left(schedule, layer, t) - _log_left(schedule, layer + 1, t)

    last = float(schedule.end)
    ends = {0.0, last, *schedule.range(layer), *schedule.range(layer + 1)}
    cuts = sorted(float(t) for t in ends)
    pieces = [
        piece for low, high in pairwise(cuts) for piece in _monotone(schedule, layer, low, high)
    ]
    marks = {low for low, _ in pieces} | {last}
    marks |= {root for low, high in pieces for root in _crossing(difference, low, high)}
    line = sorted(marks)
    return [
        (low, high, _sign(difference(0.5 * (low + high))))
        for low, high in pairwise(line)
        if high - low > ROUNDING * schedule.end
    ]


def _monotone(
    schedule: Schedule, layer: int, low: float, high: float
) -> Iterator[tuple[float, float]]:
    """[low, high] cut where the slopes p/(e − t) and p′/(e′ − t) of the two logs are equal."""
    p, q = schedule.exponent(layer), schedule.exponent(layer + 1)
    e, f = schedule.range(layer)[1], schedule.range(layer + 1)[1]
    turn = (p * f - q * e) / (p - q) if p != q else math.nan
    if low < turn < high:
        yield low, turn
        yield turn, high
    else:
        yield low, high


def _crossing(difference: Callable[[float], float], low: float, high: float) -> Iterator[float]:
    # The ends themselves may sit at −∞ − (−∞); a hair inside they do not.
    hair = (high - low) * 1e-9
    left, right = _sign(difference(low + hair)), _sign(difference(high - hair))
    if left * right < 0:
        yield bisect(lambda t: _sign(difference(t)) == left, low + hair, high - hair)


def logs_of_function(path: NoisePath, layer: int, times: list[float]) -> list[float]:
    """log ρ of one layer at each time: of the std where it moves, else of the mean."""
    noise = [path(layer, t) for t in times]
    for t, (mean, std) in zip(times, noise, strict=True):
        if not (math.isfinite(mean) and math.isfinite(std) and std >= 0):
            raise ValueError(
                "the noise of a schedule must be a finite mean and a finite std of 0 or above, "
                f"but {(mean, std)!r} was given for layer {layer} at t = {t:g}."
            )
    stds, means = [std for _, std in noise], [abs(mean) for mean, _ in noise]
    moving = stds if any(std != stds[0] for std in stds) else means
    if all(value == moving[0] for value in moving):
        return [0.0] * len(times)
    # Noise that begins at 0 and grows has no first value to be measured by; its largest serves.
    unit = moving[0] or max(moving)
    return [math.log(value / unit) if value > 0 else -math.inf for value in moving]


def spans_of_grid(times: list[float], before: list[float], after: list[float]) -> list[Span]:
    """The order of two neighbours from each time of a grid to the next."""
    step = times[1] - times[0]
    return [
        (t, min(t + step, times[-1]), _sign(b - a))
        for t, b, a in zip(times, before, after, strict=True)
    ]
