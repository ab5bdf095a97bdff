"""Affine steps: a product, a sum and a shift in place of a search in thresholds.

Where integers m, b and s exist for each channel such that

    number of thresholds that a sum x reaches = clamp((x·m + b) >> s, 0, K − 1)

for every sum x from the least to the greatest that the weights can give, they replace the
thresholds. Both sides are functions of x that do not decrease (m ≥ 0), so they are equal if and
only if each level k begins at the same sum: x·m + b ≥ k·2ˢ at the threshold tₖ, and not at tₖ − 1.
If one of these two sums is outside the range, the nearest end of the range is tested instead.

For given s and m, each of these conditions bounds b. The room between the greatest lower bound and
the least upper bound is a concave function of m, so bisection finds the smallest m that has room,
if there is one. A solution for s is one for s + 1, with 2m and 2b: bisection finds the smallest s,
and with it the smallest numbers.

With features of 8 bits or a shortcut, such integers rarely exist, since the float network rounds
every product and every sum to float32. A channel with a shortcut of 8 bits has 65,025 thresholds,
and hundreds of them would be different without these roundings. Wide steps repeat the roundings in
fixed point. For the value v of the shortcut, and with round24 for rounding to 24 significant bits,
half to even, as float32 does,

    y = round24(round24(round24(round24(x)·factor₁) + addend₁)·factor₂ + addend₂)
    level = number of k with y + value(v) ≥ limitₖ

The product with factor₂ is rounded as well, unless the network uses a fused multiply-add. The sum
y + value(v) is not rounded; instead, limitₖ is the midpoint between the network's threshold and the
float32 below it, because every sum above the midpoint is rounded to the threshold or more. The
level and the number of thresholds that x reaches are monotone functions of x, so they are equal for
every sum if they are equal at every threshold, at the sum before it, and at both ends of the range.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from softstair.deploy.nodes import INT32_LIMIT, FloatSteps, Node, Steps, Sum, narrowest

Integers = npt.NDArray[np.int64]
MAX_SHIFT = 30
UNIT_BITS = 46  # most bits of a quantum in fixed point
FIXED_BITS = 61  # most bits of any number in fixed point; sums of a few of them fit into 64
RECIPROCAL_SHIFT = 44
MARGIN = 2.0**-9  # level k begins less than 1 − MARGIN quanta after k·unit
FAR = 2**61
"""A bound that nothing reaches."""


@dataclass(frozen=True)
class AffineSteps:
    """index = clamp((x·multiplier + offset) >> shift, 0, K − 1), (C,) int64 each.

    x·multiplier + offset fits into 32 bits for every sum x; x·multiplier alone may not.
    """

    multiplier: Integers
    offset: Integers
    shift: Integers


@dataclass(frozen=True)
class WideSteps:
    """What the float network computes from sums to levels, in fixed point.

    Each of S stages computes x·factor·2^−shift + addend; the result of the last is y. The shortcut
    adds v·row + rows[v], where v is its integer minus its least one. A total has level k, or more,
    if it is at least k·unit + columns[k − 1 − low]; the lowest level is ``low``.
    """

    factors: Integers  # (S, C)
    shifts: Integers  # (S, C), 0 in the first of two stages
    addends: Integers  # (S, C)
    is_fused: bool  # whether the last stage rounds once, after its addition
    unit: int
    low: int
    origin: int  # added to y: low·unit, the least shortcut, and what makes columns non-negative
    row: int
    rows: Integers  # (M,)
    columns: Integers  # (K − 1,)

    @property
    def scalars(self) -> dict[str, int]:
        """The fields of an ss_sink (softstair_steps.h) that are one number for all channels."""
        coarse = self.unit.bit_length() - 16
        reciprocal = -(-(1 << (RECIPROCAL_SHIFT + coarse)) // self.unit)
        numbers = {"unit": self.unit, "origin": self.origin, "row": self.row}
        return numbers | {"fused": int(self.is_fused), "coarse": coarse, "reciprocal": reciprocal}

    def rescaled(self, x: Integers, channel: int) -> Integers:
        """Return y of sums x of one channel, as ss_rescaled does in C."""
        y = _round24(x)
        stages = zip(self.factors, self.shifts, self.addends, strict=True)
        for stage, numbers in enumerate(stages, 1):
            factor, shift, addend = (each[channel] for each in numbers)
            excess = np.maximum(np.frexp(y.astype(np.float64))[1] - 24, 0)
            left, y = excess - shift, (y >> excess) * factor
            y = np.where(left < 0, y >> np.maximum(-left, 0), y << np.maximum(left, 0))
            is_rounded = stage < len(self.factors) or not self.is_fused
            y = _round24((_round24(y) if is_rounded else y) + addend)
        return y

    def levels(self, total: Integers) -> Integers:
        """Return the levels of y + origin + v·row + rows[v], as C does."""
        coarse, reciprocal = self.scalars["coarse"], self.scalars["reciprocal"]
        high = self.low + len(self.columns)
        total = np.clip(total, self.low * self.unit, (high + 1) * self.unit)
        candidate = (((total >> coarse) + 1) * reciprocal) >> RECIPROCAL_SHIFT
        level = np.minimum(candidate, high)
        column = np.concatenate([[-FAR], self.columns])[level - self.low]
        return level - (total < level * self.unit + column)


def _round24(x: Integers) -> Integers:
    return x.astype(np.float32).astype(np.int64)


def sum_bounds(source: Node, channels: int) -> tuple[Integers, Integers]:
    """Return the least and the greatest sum of each channel."""
    if isinstance(source, Sum):
        return source.least.numpy(), source.greatest.numpy()
    return np.full(channels, source.low), np.full(channels, source.high)


def small_wide_steps(node: Steps, source: Node, low: int) -> WideSteps | None:
    """Return the wide steps of a stair on the sums of ``source``; ``low`` is its lowest level.

    Returns None if there are none, or if they are not smaller than the thresholds. Otherwise, the
    wide steps and ``node.floats`` were both proven to equal the thresholds for every sum.
    """
    table, floats = node.thresholds.numpy(), node.floats
    rows, ends = table.reshape(len(table), -1, table.shape[-1]), sum_bounds(source, len(table))
    is_even = node.levels == tuple(range(node.low, node.high + 1))
    steps = wide_steps(floats, *ends, low) if floats is not None and is_even else None
    if steps is None or floats is None:
        return None
    arrays = (steps.factors, *(each for each in (steps.rows, steps.columns) if each.any()))
    size = sum(4 * each.size for each in arrays) + 17 * len(table)
    is_smaller = size < narrowest(table).nbytes
    return steps if is_smaller and _is_exact(steps, floats, rows, *ends) else None


def affine_steps(
    thresholds: Integers, least: Integers, greatest: Integers, low: int = 0
) -> AffineSteps | None:
    """Return affine steps that equal thresholds (C, K − 1) for all sums, or None if there are none.

    Sums are from ``least`` to ``greatest``, (C,); ``low`` is added to the index. All channels have
    the same shift where 32 bits are enough for it.
    """
    below, above = np.full(len(least), -1), np.full(len(least), MAX_SHIFT)
    levels = np.arange(1, thresholds.shape[1] + 1)

    def conditions(shift: Integers) -> "_Conditions":
        return _conditions(thresholds, levels << shift[:, None], least, greatest)

    if not conditions(above).exists.all():
        return None
    while bool((above - below > 1).any()):
        # Rounded up: channels that are done are tested at `above`, never at a negative shift.
        shift = (below + above + 1) // 2
        exists = conditions(shift).exists
        below, above = np.where(exists, below, shift), np.where(exists, shift, above)
    for shift in (np.full_like(above, above.max()), above):
        multiplier, offset = conditions(shift).solution()
        offset = offset + (low << shift)
        products = multiplier * np.stack([least, greatest])
        if np.abs([multiplier, offset, *(products + offset)]).max() < INT32_LIMIT:
            return AffineSteps(multiplier, offset, shift)
    return None


def wide_steps(
    floats: FloatSteps, least: Integers, greatest: Integers, low: int = 0
) -> WideSteps | None:
    """Return the steps of a float network in fixed point, or None if 64 bits are not enough."""
    limits, quantum = floats.limits, floats.quantum
    farthest = torch.from_numpy(np.maximum(np.abs(least), np.abs(greatest)))[:, None]
    magnitudes = replace(floats, factors=floats.factors.abs(), addends=floats.addends.abs())
    largest = float(magnitudes.rescaled(farthest).max() + floats.values.abs().nan_to_num().max())
    largest = max(largest, float(limits.abs().max()), quantum)
    if not math.isfinite(largest):
        return None
    levels = np.arange(1, len(limits) + 1)
    late = float(np.ptp(limits.double().numpy() / quantum - levels))
    bits = min(
        UNIT_BITS, 31 - math.frexp(late)[1], FIXED_BITS - 1 - math.frexp(largest / quantum)[1]
    )
    place = bits - math.frexp(quantum)[1]  # the unit of fixed point is 2^−place
    unit = round(quantum * 2.0**place)

    def fixed(numbers: torch.Tensor) -> Integers:
        scaled = numbers.double().nan_to_num().numpy() * 2.0**place
        return np.rint(scaled).astype(np.int64)

    # A sum half-way between two floats is rounded to that whose last bit is 0.
    before = torch.nextafter(limits, torch.tensor(-torch.inf))
    is_odd = (limits.view(torch.int32) & 1).numpy()
    columns = fixed((limits.double() + before.double()) / 2) + is_odd - levels * unit
    values = fixed(floats.values)
    row = int(values[-1] - values[0]) // max(len(values) - 1, 1)
    rows = values - values[0] - row * np.arange(len(values))
    rows = np.where(floats.values.isnan().numpy(), 0, rows)
    origin = low * unit - int(columns.min()) + int(values[0])

    mantissas, exponents = np.frexp(floats.factors.double().numpy())
    factors, exponents = (mantissas * 2.0**24).astype(np.int64), exponents - 24
    shifts, addends = np.zeros_like(factors), np.zeros_like(factors)
    shifts[-1], addends[-1] = -place - exponents.sum(0), fixed(floats.addends[-1])
    if len(factors) == 2:
        bias = floats.addends[0].double().numpy() * 2.0 ** -exponents[0]
        reach = np.abs(bias) + np.abs(factors[0]) * farthest.numpy()[:, 0]
        if reach.max() >= 2.0**FIXED_BITS:
            return None
        addends[0] = np.rint(bias).astype(np.int64)
    factors[shifts > FIXED_BITS] = 0  # _is_exact finds out whether these small products matter
    shifts[shifts > FIXED_BITS] = 0
    columns = columns - columns.min()
    begins = (levels + low) * unit + columns
    steps = WideSteps(
        *(factors, shifts, addends, floats.is_fused, unit, low, origin, row, rows, columns)
    )
    # The level is a non-decreasing function of the total: testing where levels begin is enough.
    is_right = np.array_equal(steps.levels(begins), levels + low)
    is_right &= np.array_equal(steps.levels(begins - 1), levels + low - 1)
    is_right &= late < 1 - MARGIN
    fits = bits >= 16 and max(np.abs(rows).max(), columns.max()) < INT32_LIMIT
    return steps if fits and is_right and np.abs(shifts).max() <= FIXED_BITS else None


def _is_exact(
    steps: WideSteps, floats: FloatSteps, table: Integers, least: Integers, greatest: Integers
) -> bool:
    """Return whether ``steps`` and ``floats`` equal thresholds (C, M, K − 1) for every sum."""
    occurs = ~floats.values.isnan()
    values, beside = floats.values[occurs], steps.rows + steps.row * np.arange(len(steps.rows))
    beside = beside[occurs.numpy(), None] + steps.origin
    for c, (low, high) in enumerate(zip(least, greatest, strict=True)):
        thresholds = table[c, occurs.numpy()]
        # A level that begins where the level below begins, for each value, adds no points.
        points = thresholds[:, (np.diff(thresholds, prepend=thresholds[:, :1] - 1) != 0).any(0)]
        ends = np.broadcast_to([low, high], (len(points), 2))
        x = np.clip(np.concatenate([points, points - 1, ends], 1), low, high)
        rows = (torch.from_numpy(np.ascontiguousarray(each)) for each in (thresholds, x))
        expected = torch.searchsorted(*rows, right=True).numpy()
        y = floats.of_channels(torch.tensor([c])).rescaled(torch.from_numpy(x).reshape(1, -1))
        totals = y.reshape(x.shape) + values[:, None]
        reached = torch.searchsorted(floats.limits, totals, right=True).numpy()
        levels = steps.levels(steps.rescaled(x, c) + beside) - steps.low
        if not (np.array_equal(expected, levels) and np.array_equal(expected, reached)):
            return False
    return True


def _conditions(
    thresholds: Integers, begins: Integers, least: Integers, greatest: Integers
) -> "_Conditions":
    """Return the conditions of thresholds (C, n), where level k begins at ``begins``."""
    reached, missed = thresholds <= greatest[:, None], thresholds > least[:, None]
    return _Conditions(
        np.where(reached, np.maximum(thresholds, least[:, None]), 0),
        np.where(reached, begins, -FAR),
        np.where(missed, np.minimum(thresholds - 1, greatest[:, None]), 0),
        np.where(missed, begins - 1, FAR),
        2 * int(np.abs(begins).max()) + 1,
    )


@dataclass(frozen=True)
class _Conditions:
    """Sums x with x·m + b ≥ lower, and sums y with y·m + b ≤ upper, (C, n) each."""

    x: Integers
    lower: Integers
    y: Integers
    upper: Integers
    steepest: int  # a multiplier with which every sum skips all levels

    def offsets(self, multiplier: Integers) -> tuple[Integers, Integers]:
        """Return the least and the greatest offset of every channel."""
        least = (self.lower - multiplier[:, None] * self.x).max(1)
        return least, (self.upper - multiplier[:, None] * self.y).min(1)

    def room(self, multiplier: Integers) -> Integers:
        least, greatest = self.offsets(multiplier)
        return greatest - least

    def multipliers(self) -> Integers:
        """Return the smallest multiplier with room for an offset, or that with the most room."""
        below = np.zeros(len(self.x), dtype=np.int64)
        farthest = max(1, int(np.abs(self.x).max()), int(np.abs(self.y).max()))
        above = np.full_like(below, min(self.steepest, FAR // 2 // farthest))
        while bool((below < above).any()):
            middle = (below + above) // 2
            room = self.room(middle)
            grows = (room < 0) & (self.room(middle + 1) > room)
            below, above = np.where(grows, middle + 1, below), np.where(grows, above, middle)
        return below

    @property
    def exists(self) -> npt.NDArray[np.bool_]:
        return self.room(self.multipliers()) >= 0

    def solution(self) -> tuple[Integers, Integers]:
        """Return multiplier and offset, with as much room below the offset as above."""
        multiplier = self.multipliers()
        least, greatest = self.offsets(multiplier)
        middle = (least + greatest) // 2
        offset = np.where(least == -FAR, greatest, np.where(greatest == FAR, least, middle))
        return multiplier, offset
