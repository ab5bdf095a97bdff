"""Affine steps: a product, a sum and a shift in place of a search in thresholds.

Where integers m ≥ 0, b and s exist for each channel such that

    number of thresholds that a sum x reaches = clamp((x·m + b) >> s, 0, K − 1)

for every sum x from the least to the greatest, they replace the thresholds. Both sides are
functions of x that do not decrease, so they are equal if and only if each level k begins at the
same sum: x·m + b ≥ k·2ˢ at the threshold tₖ, and not at tₖ − 1. If one of these two sums is outside
the range, the nearest end of the range is tested instead.

Each condition bounds b for a given m, from below or from above. A b exists if and only if no lower
bound is above an upper one, and each such pair bounds m. A solution for s is one for s + 1, with 2m
and 2b: bisection finds the smallest s.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from softstair.deploy.nodes import INT32_LIMIT

Integers = npt.NDArray[np.int64]
MAX_SHIFT = 30
FAR = 2**61
"""A bound that nothing reaches."""
CHUNK = 2**20
"""Pairs of conditions at a time."""


@dataclass(frozen=True)
class AffineSteps:
    """index = clamp((x·multiplier + offset) >> shift, 0, K − 1), (C,) int64 each.

    Unless it ``is_wide``, x·multiplier + offset fits into 32 bits for every sum x; x·multiplier
    alone may not.
    """

    multiplier: Integers
    offset: Integers
    shift: Integers
    is_wide: bool


def affine_steps(
    thresholds: Integers, least: Integers, greatest: Integers, low: int = 0
) -> AffineSteps | None:
    """Return affine steps that equal thresholds (C, K − 1) for all sums, or None if there are none.

    Sums are from ``least`` to ``greatest``, (C,); ``low`` is added to the index. All channels have
    the same shift where 32 bits are enough for it, and otherwise the smallest.
    """
    size = max(1, CHUNK // max(1, thresholds.shape[1] ** 2))

    def lines(shift: Integers) -> Integers:
        rows = [
            lines_of(*(each[at : at + size] for each in (thresholds, least, greatest, shift)))
            for at in range(0, len(thresholds), size)
        ]
        return np.concatenate(rows, 1)

    below, above = np.full(len(least), -1), np.full(len(least), MAX_SHIFT)
    if (lines(above)[0] < 0).any():
        return None
    while bool((above - below > 1).any()):
        # Rounded up: channels that are done are tested at `above`, never at a negative shift.
        shift = (below + above + 1) // 2
        exists = lines(shift)[0] >= 0
        below, above = np.where(exists, below, shift), np.where(exists, shift, above)
    for shift in (np.full_like(above, above.max()), above):
        multiplier, offset = lines(shift)
        offset = offset + (low << shift)
        products = multiplier * np.stack([least, greatest])
        if np.abs([offset, *(products + offset)]).max() < INT32_LIMIT > multiplier.max():
            return AffineSteps(multiplier, offset, shift, is_wide=False)
    if multiplier.max() < INT32_LIMIT:
        return AffineSteps(multiplier, offset, shift, is_wide=True)
    return None


def lines_of(
    thresholds: Integers, least: Integers, greatest: Integers, shift: Integers
) -> Integers:
    """Return the smallest multipliers for shifts and their offsets, (2, C); −1 for none."""
    least, greatest = least[:, None], greatest[:, None]
    begins = np.arange(1, thresholds.shape[1] + 1) << shift[:, None]
    # x·m + b ≥ begins at the sums x, and y·m + b < begins at the sums y.
    reached, missed = thresholds <= greatest, thresholds > least
    x, y = np.maximum(thresholds, least), np.minimum(thresholds - 1, greatest)
    # (y − x)·m ≤ room, for every pair.
    room = begins[:, None, :] - 1 - begins[:, :, None]
    run = y[:, None, :] - x[:, :, None]
    pairs = reached[:, :, None] & missed[:, None, :]
    bound = -(-room // np.where(run < 0, run, 1))
    multiplier = np.where(pairs & (run < 0), bound, 0).max((1, 2), initial=0)
    in_reach = multiplier <= FAR // np.abs(run).max((1, 2), initial=1)
    multiplier = np.where(in_reach, multiplier, 0)
    fits = run * multiplier[:, None, None] <= room
    lower = np.where(reached, begins - multiplier[:, None] * x, -FAR).max(1, initial=-FAR)
    upper = np.where(missed, begins - 1 - multiplier[:, None] * y, FAR).min(1, initial=FAR)
    # As much room below the offset as above.
    offset = np.where(lower == -FAR, upper, np.where(upper == FAR, lower, (lower + upper) // 2))
    exists = in_reach & (fits | ~pairs).all((1, 2))
    return np.where(exists, np.stack([multiplier, offset]), -1)
