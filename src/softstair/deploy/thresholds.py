"""Batch normalisation and stair as thresholds on whole sums, exactly.

What the float network does between a sum and the level that it becomes is, for one channel, a
monotone function of the sum, however it rounds. So the sums that reach level k are all those from
some whole number on (or up to one, where the normalisation turns the order round), and bisection
finds it by asking the network itself.
"""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Crossing", "search"]

Probe = Callable[[Tensor], Tensor]
"""Sums (B, C) int64 -> the index of the level that each becomes, (B, C)."""


class Crossing:
    """The thresholds of every channel.

    thresholds  (C, K − 1) int64: index = Σₖ [s ≥ tₖ], or of −s where ``turned``
    turned      (C,) bool: the order is turned round
    """

    def __init__(self, thresholds: Tensor, turned: Tensor) -> None:
        self.thresholds, self.turned = thresholds, turned


def search(probe: Probe, least: Tensor, greatest: Tensor, levels: int) -> Crossing:
    """The thresholds between the least and the greatest sum of each channel.

    A level that every sum has reached gets the least sum as its threshold, one that none reaches
    the greatest and one more.

    >>> probe = lambda sums: (sums.double() * 0.3 - 1.0 >= 0.5).long()
    >>> search(probe, torch.tensor([-10]), torch.tensor([10]), levels=2).thresholds
    tensor([[5]])
    """
    with torch.no_grad():
        turned = probe(greatest[None])[0] < probe(least[None])[0]
        sign = torch.where(turned, -1, 1)
        low = torch.where(turned, -greatest, least)
        high = torch.where(turned, -least, greatest) + 1
        wanted = torch.arange(1, levels)[:, None]
        # The first sum that reaches: between below, which may not, and above, which does or is
        # beyond the last.
        below = low.expand(levels - 1, -1).clone()
        above = high.expand(levels - 1, -1).clone()
        while bool((below < above).any()):
            middle = torch.div(below + above, 2, rounding_mode="floor")
            # What has been found stays; its probe must still be a sum that can be.
            asked = torch.minimum(middle, high - 1)
            reaches = probe(sign * asked) >= wanted
            open_ = below < above
            above = torch.where(open_ & reaches, middle, above)
            below = torch.where(open_ & ~reaches, middle + 1, below)
    return Crossing(above.t().contiguous(), turned)
