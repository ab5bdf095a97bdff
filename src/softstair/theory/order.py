"""The order in which a schedule anneals its layers.

ρ_ℓ(t) = β_ℓ(t)/β_ℓ(0) is the share of its noise that layer ℓ still has at time t, or
|α_ℓ(t)|/|α_ℓ(0)| if the std is static. A schedule is synchronised if ρ_ℓ(t) ≤ ρ_{ℓ+1}(t) for all ℓ
and t: no layer is annealed before a layer that feeds it. For a :class:`~softstair.Schedule` the
answer is exact (with n layers, period P, k = ℓ + 1, d = n − ℓ and t from its start):

- same_end: ℓ is behind ℓ+1 for P(n−k−1) < t < P·n under the homogeneous power, and for
  P(n−k−1) < t < P(n − k^d/(k+1)^(d−1)) under the progressive one;
- overlapped with the homogeneous power: all layers are equal;
- otherwise every layer is sometimes ahead of the next and never behind it.

Any other function (layer, t) -> (mean, std) is evaluated on a grid of times.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from softstair import _check
from softstair._errors import SoftstairError
from softstair.schedule import NoisePath, Schedule

__all__ = ["Break", "Synchronisation", "synchronisation"]

ROUNDING = 1e-12
"""Differences of log ρ up to this are rounding."""


@dataclass(frozen=True)
class Break:
    """For start < t < end, layer ``later`` is annealed more than layer ``earlier``, which feeds it.

    ``end`` is where the order is first restored (on a grid it may break again).
    """

    earlier: int
    later: int
    start: float
    end: float


@dataclass(frozen=True)
class Synchronisation:
    """Whether a schedule anneals its layers in order.

    Attributes:
        order: ``"strictly"``: every layer is sometimes ahead of the next and never behind it;
            ``"weakly"``: none is behind, but some neighbours are always equal; or ``"broken"``.
        reason: Why, in one line.
        breaks: The first break of each pair of neighbours that has one.
        resolution: Step of the grid of times, or 0 if the answer is exact.
    """

    order: Literal["strictly", "weakly", "broken"]
    reason: str
    breaks: tuple[Break, ...] = ()
    resolution: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether the order is not broken."""
        return self.order != "broken"

    @property
    def first(self) -> Break | None:
        """The earliest break; of simultaneous ones, that of the lowest layers."""
        return min(self.breaks, key=lambda pair: (pair.start, pair.earlier), default=None)


def synchronisation(
    path: NoisePath, layers: int | None = None, end: float | None = None, points: int = 1001
) -> Synchronisation:
    """Return whether a schedule anneals no layer before the layers that feed it.

    Args:
        path: A schedule, or any function (layer, t) -> (mean, std).
        layers: Number of layers; required with a function.
        end: Last time to look at; required with a function.
        points: Number of times from 0 to ``end`` at which a function is evaluated.

    Raises:
        ValueError: If an argument is missing or invalid, or ``path`` returns an invalid noise.

    Example:
        >>> synchronisation(Schedule(layers=7, period=50, interval="partition")).order
        'strictly'
        >>> synchronisation(Schedule(layers=7, period=50, interval="same_end")).first
        Break(earlier=5, later=6, start=0.0, end=350.0)
        >>> synchronisation(lambda layer, t: (0.0, 1 / (1 + t * (3 - layer))), 3, end=9.0).order
        'strictly'
    """
    if isinstance(path, Schedule):
        return _synchronisation_of_schedule(path)
    layers = _check.integer("layers", layers, 1)
    end, points = _check.number("end", end, above=0), _check.integer("points", points, 2)
    times = [end * index / (points - 1) for index in range(points)]
    logs = [_log_shares(path, layer, times) for layer in range(layers)]
    breaks, equal = [], []
    for layer, (earlier, later) in enumerate(pairwise(logs)):
        # −∞ − (−∞), two layers without noise, is NaN and counts as equal.
        differences = [a - b for a, b in zip(earlier, later, strict=True)]
        behind = [value > ROUNDING for value in differences]
        if any(behind):
            start = behind.index(True)
            stop = behind.index(False, start) if False in behind[start:] else points - 1
            breaks.append(Break(layer, layer + 1, times[start], times[stop]))
        elif not any(value < -ROUNDING for value in differences):
            equal.append(layer)
    return _judge(layers, any(map(any, logs)), breaks, equal, times[1])


def _synchronisation_of_schedule(schedule: Schedule) -> Synchronisation:
    """Return the exact answer, by the rules at the top of the module."""
    n, period, begin = schedule.layers, float(schedule.period), schedule.start
    homogeneous = schedule.power == "homogeneous"
    breaks = []
    if schedule.interval == "same_end":
        for layer in range(n - 1):
            k, d = layer + 1, n - layer
            left = 0.0 if homogeneous else k**d / (k + 1) ** (d - 1)
            start, end = period * (n - k - 1), period * (n - left)
            breaks.append(Break(layer, k, begin + start, begin + end))
    equal = range(n - 1) if schedule.interval == "overlapped" and homogeneous else range(0)
    dynamic_mean = not schedule.static_mean and schedule.first_mean != 0
    dynamic_std = not schedule.static_std and schedule.std0 != 0
    return _judge(n, dynamic_mean or dynamic_std, breaks, equal, resolution=0.0)


def _log_shares(path: NoisePath, layer: int, times: Sequence[float]) -> list[float]:
    """Return log ρ of a layer at each time, or zeros if its noise never changes."""
    noise = [path(layer, t) for t in times]
    for t, (mean, std) in zip(times, noise, strict=True):
        if not (math.isfinite(mean) and math.isfinite(std) and std >= 0):
            raise SoftstairError(
                "path must return a finite mean and a finite std of at least 0, but it returned "
                f"{(mean, std)!r} for layer {layer} at t = {t:g}.",
                field="path",
            )
    means, stds = [abs(mean) for mean, _ in noise], [std for _, std in noise]
    values = means if len(set(stds)) == 1 else stds
    # Noise that starts at 0 and grows is compared with its largest value.
    unit = values[0] or max(values)
    if len(set(values)) == 1:
        return [0.0] * len(times)
    return [math.log(value / unit) if value > 0 else -math.inf for value in values]


def _judge(
    layers: int, dynamic: bool, breaks: list[Break], equal: Sequence[int], resolution: float
) -> Synchronisation:
    """Return the result from the breaks and the layers that are always equal to the next."""
    if not dynamic:
        return Synchronisation("weakly", "nothing moves: every layer keeps its noise throughout")
    if layers == 1:
        return Synchronisation("weakly", "there is one layer, and nothing to be in order with")
    if breaks:
        first = min(breaks, key=lambda pair: (pair.start, pair.earlier))
        span = f"from t = {first.start:g} to t = {first.end:g}"
        reason = f"layer {first.later} is ahead of layer {first.earlier}, which feeds it, {span}"
        return Synchronisation("broken", reason, tuple(breaks), resolution)
    if equal:
        pair = f"layers {equal[0]} and {equal[0] + 1}"
        pairs = pair if len(equal) == 1 else f"{len(equal)} pairs of neighbours"
        reason = f"no layer is ever behind, but {pairs} always go together"
        return Synchronisation("weakly", reason, (), resolution)
    reason = "every layer is at some time ahead of the next, and never behind it"
    return Synchronisation("strictly", reason, (), resolution)
