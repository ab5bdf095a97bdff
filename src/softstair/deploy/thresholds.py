"""Thresholds on integers that stand for rescaling, batch normalisation and stair, exactly.

What the float network does between a sum and its level is, for one channel, a monotone function of
the sum, however it rounds. So the sums that reach level k are all integers from some threshold on
(or up to one, where the function decreases), and bisection finds it by asking the network itself.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from softstair.stair import Stair

LevelIndex = Callable[[Tensor], Tensor]
"""Sums (B, C) int64 -> index of the level that each becomes, (B, C)."""
Function = Callable[[Tensor], Tensor]
Thresholds = tuple[Tensor, Tensor]
"""Of every channel, (C, K − 1) int64 and (C,) bool: index = Σₖ [s ≥ tₖ], or Σₖ [−s ≥ tₖ] where the
second, "decreasing", is true."""


@torch.no_grad()
def search(index: LevelIndex, least: Tensor, greatest: Tensor, levels: int) -> Thresholds:
    """Find the thresholds between the least and the greatest sum of each channel.

    A level that every sum reaches has the least sum as its threshold; one that none reaches has the
    greatest sum plus 1.
    """
    decreasing = index(greatest[None])[0] < index(least[None])[0]
    sign = torch.where(decreasing, -1, 1)
    low = torch.where(decreasing, -greatest, least)
    high = torch.where(decreasing, -least, greatest) + 1
    level = torch.arange(1, levels)[:, None]
    # Invariant: the first sum that reaches the level is from `below` to `above`.
    below = low.expand(levels - 1, -1).clone()
    above = high.expand(levels - 1, -1).clone()
    while bool((below < above).any()):
        middle = torch.div(below + above, 2, rounding_mode="floor")
        # Where the search has ended, the network is still asked about a sum that can occur.
        reaches = index(sign * torch.minimum(middle, high - 1)) >= level
        searching = below < above
        above = torch.where(searching & reaches, middle, above)
        below = torch.where(searching & ~reaches, middle + 1, below)
    return above.t().contiguous(), decreasing


def of_stair(
    stair: Stair, functions: Sequence[Function], least: Tensor, greatest: Tensor, axes: int
) -> Thresholds:
    """Find the thresholds of a stair after functions of (N, C) and so many axes of length 1."""

    def index(sums: Tensor) -> Tensor:
        y = sums.reshape(*sums.shape, *[1] * axes)
        for function in functions:
            y = function(y)
        return stair.index(y).reshape(sums.shape)

    return search(index, least, greatest, len(stair))
