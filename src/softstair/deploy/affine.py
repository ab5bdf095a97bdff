"""Affine steps: a product, a sum and a shift in place of a search in thresholds.

Where integers m, b and s exist for each channel such that

    number of thresholds that a sum x reaches = clamp((x·m + b) >> s, 0, K − 1)

for every sum x from the least to the greatest that the weights can give, they replace the
thresholds. Both sides are functions of x that do not decrease (m ≥ 0), so they are equal if and
only if each level k begins at the same sum: x·m + b ≥ k·2ˢ at the threshold tₖ, and not at tₖ − 1.
Of these two sums, one beyond the range says nothing; the range's end says it instead.

For given s and m, each of these conditions bounds b. The room between the greatest lower bound and
the least upper bound is a concave function of m, so bisection finds the smallest m that has room,
if there is one. A solution for s is one for s + 1, with 2m and 2b: bisection finds the smallest s,
and with it the smallest numbers.

With 8 bits or a shortcut v, 64 bits and tables are needed, since the float network rounds its
thresholds, its shortcuts and the sums with them to float32:

    number of k with x·m + b + v·r + rows[v] + correction(x) ≥ k·2ˢ + columns[k − 1]

The tables are those of the layer, from the floats of the network; the corrections, of a few sums of
each channel, are the rest of its rounding. They are less than m/2, so that the left side does not
decrease with x, and the same two conditions of every level prove it, for every v.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from softstair.deploy.nodes import Node, Steps, Sum, narrowest

Integers = npt.NDArray[np.int64]
MAX_SHIFT = 30
WIDE_SHIFTS = (36, 30, 24, 18)
INT32 = 2**31
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
    """Affine steps in 64 bits with tables.

    The sums with a correction in channel c are exceptions[starts[c] : starts[c + 1]].
    """

    multiplier: Integers  # (C,)
    offset: Integers  # (C,)
    shift: int
    row: int  # r; v is the value of the shortcut minus its least
    rows: Integers  # (M,)
    columns: Integers  # (K − 1,), from 0 to 2ˢ
    starts: Integers  # (C + 1,)
    exceptions: Integers  # sums
    corrections: Integers
    most_slots: int  # of a hash table with 8 bytes a slot, smaller than thresholds of 2 bytes

    def tables(self) -> dict[str, Integers]:
        """Return the tables that are not all zero, by their names."""
        names = [name for name in ("rows", "columns") if getattr(self, name).any()]
        names += ["starts", "exceptions", "corrections"] if len(self.exceptions) else []
        return {name: getattr(self, name) for name in names}

    @cached_property
    def hashed(self) -> tuple[Integers, Integers, Integers] | None:
        """A hash table per channel: sizes, starts, and (2, slots) sums and corrections.

        The size is the smallest number n with which all exceptions of the channel have different
        remainders. None if a channel needs more than ``most_slots``.
        """
        parts, sizes = np.split(self.exceptions, self.starts[1:-1]), []
        for part in parts:
            candidates = range(max(1, len(part)), self.most_slots + 1)
            if not (size := next((n for n in candidates if _is_injective(part % n)), 0)):
                return None
            sizes.append(size)
        starts = np.cumsum([0, *sizes])
        slots = [part % n + start for part, n, start in zip(parts, sizes, starts, strict=False)]
        table = np.zeros((2, starts[-1]), np.int64)
        table[:, np.concatenate(slots)] = self.exceptions, self.corrections
        return np.array(sizes), starts[:-1], table


def _is_injective(remainders: Integers) -> bool:
    """Return whether all remainders are different."""
    return int(np.bincount(remainders).max(initial=0)) <= 1


def sum_bounds(source: Node, channels: int) -> tuple[Integers, Integers]:
    """Return the least and the greatest sum of each channel."""
    if isinstance(source, Sum):
        return source.least.numpy(), source.greatest.numpy()
    return np.full(channels, source.low), np.full(channels, source.high)


def small_wide_steps(node: Steps, source: Node, low: int) -> WideSteps | None:
    """Return the wide steps of a stair on the sums of ``source``; ``low`` is its lowest level.

    Returns None if there are none, or if they are not smaller than the thresholds. Numbers in
    tables fit into 32 bits. All numbers and sums are below 2⁵³, so that float64 is exact.
    """
    table = node.thresholds.numpy()
    rows, ends = table.reshape(len(table), -1, table.shape[-1]), sum_bounds(source, len(table))
    floats = node.floats or map(torch.arange, rows.shape[1:])
    values, limits = (numbers.double().numpy() for numbers in floats)
    is_even = node.levels == tuple(range(node.low, node.high + 1))
    steps = wide_steps(rows, *ends, values, limits, low) if is_even else None
    if steps is None:
        return None
    products = (np.abs(ends).max(0) + 1) * steps.multiplier
    largest = (products + np.abs(steps.offset)).max() + len(values) * abs(steps.row)
    widest = max(np.abs(steps.rows).max(), steps.columns.max())
    size = 12 * len(table) + 4 * sum(part.size for part in steps.tables().values())
    fits = widest < INT32 and largest < 2**52 and size < narrowest(table).nbytes
    return steps if fits else None


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
        if np.abs([multiplier, offset, *(products + offset)]).max() < INT32:
            return AffineSteps(multiplier, offset, shift)
    return None


def wide_steps(
    thresholds: Integers,
    least: Integers,
    greatest: Integers,
    values: npt.NDArray[np.float64],
    limits: npt.NDArray[np.float64],
    low: int = 0,
) -> WideSteps | None:
    """Return wide steps that equal thresholds (C, M, K − 1), or None if there are none.

    ``values`` (M,) and ``limits`` (K − 1,) are the floats of the shortcut and of the thresholds, in
    quanta of the levels. A value that does not occur is NaN.
    """
    occurs, levels = ~np.isnan(values), np.arange(1, len(limits) + 1)
    flat = thresholds[:, occurs].reshape(len(thresholds), 1, -1)
    late = limits - levels - (limits - levels).min()
    if late.max() > 1:  # more than one level could be taken too early
        return None
    for shift in WIDE_SHIFTS:
        added = np.rint(np.where(occurs, values, 0.0) * 2.0**shift).astype(np.int64)
        row = int(added[-1] - added[0]) // max(len(added) - 1, 1)
        rows = np.where(occurs, added - added[0] - row * np.arange(len(added)), 0)
        columns = np.rint(late * 2.0**shift).astype(np.int64)
        begins = ((levels << shift) + columns - added[occurs, None]).reshape(1, -1)
        channels = []
        for table, *ends in zip(flat, least, greatest, strict=True):
            conditions = _conditions(table, begins, *(np.array([end]) for end in ends)).tightest()
            channel = conditions.with_exceptions()
            if channel is None:
                break
            channels.append(channel)
        else:
            multiplier, offset, exceptions, corrections = zip(*channels, strict=True)
            starts = np.cumsum([0, *map(len, exceptions)])
            lists = (starts, np.concatenate(exceptions), np.concatenate(corrections))
            offsets = np.array(offset) + (low << shift) + added[0]
            tables, slots = (rows, columns, *lists), thresholds[0].size // 4
            return WideSteps(np.array(multiplier), offsets, shift, row, *tables, slots)
    return None


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

    def tightest(self) -> "_Conditions":
        """Return the conditions of one channel with each sum once."""
        x, place = np.unique(self.x[0], return_inverse=True)
        lower = np.full(len(x), -FAR)
        np.maximum.at(lower, place, self.lower[0])
        y, place = np.unique(self.y[0], return_inverse=True)
        upper = np.full(len(y), FAR)
        np.minimum.at(upper, place, self.upper[0])
        return _Conditions(x[None], lower[None], y[None], upper[None], self.steepest)

    def with_exceptions(self) -> tuple[int, int, Integers, Integers] | None:
        """Return the multiplier and offset of one channel, and sums with their corrections."""
        (multiplier,), (offset,) = self.solution()
        (x, lower), (y, upper) = (self.x[0], self.lower[0]), (self.y[0], self.upper[0])
        needed = np.maximum(lower - multiplier * x - offset, 0)
        excess = np.minimum(upper - multiplier * y - offset, 0)
        sums = np.concatenate([x[needed > 0], y[excess < 0]])
        corrections = np.concatenate([needed[needed > 0], excess[excess < 0]])
        order = np.argsort(sums)
        sums, corrections = sums[order], corrections[order]
        corrected = [np.zeros_like(x), np.zeros_like(y)]
        for points, correction in zip((x, y), corrected, strict=True):
            _, found, place = np.intersect1d(points, sums, return_indices=True)
            correction[found] = corrections[place]
        is_exact = (
            multiplier < INT32
            and 2 * np.abs(corrections).max(initial=0) <= multiplier
            and bool((np.diff(sums) > 0).all())
            and bool((multiplier * x + offset + corrected[0] >= lower).all())
            and bool((multiplier * y + offset + corrected[1] <= upper).all())
        )
        return (int(multiplier), int(offset), sums, corrections) if is_exact else None
