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
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from softstair._frozen.nodes import INT32_LIMIT

Integers = npt.NDArray[np.int64]
MAX_SHIFT = 30
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
