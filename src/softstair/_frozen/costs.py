"""What the layers of a frozen network cost: weights, products, and the range of the sums."""

import math
from dataclasses import dataclass

from softstair._frozen.network import FrozenNetwork
from softstair._frozen.nodes import Sum, bits


@dataclass(frozen=True)
class Cost:
    """The cost of one layer.

    Attributes:
        weights: Number of weights.
        weight_bits: Bits per weight, as few as its values need.
        products: Multiply-accumulate operations per input.
        low, high: The least and the greatest sum.
        sum_bits: Bits of a signed integer that holds both.
    """

    name: str
    weights: int
    weight_bits: int
    products: int
    low: int
    high: int
    sum_bits: int

    @property
    def bytes(self) -> int:
        """Size of the packed weights."""
        return -(-self.weights * self.weight_bits // 8)


def costs(frozen: FrozenNetwork) -> list[Cost]:
    """Return the cost of every layer with weights, in order of execution."""
    rows = []
    for node in frozen.nodes:
        if isinstance(node, Sum):
            count, size = node.weight.numel(), math.prod(frozen.sizes[node.name])
            width = max(1, (node.weight.unique().numel() - 1).bit_length())
            counts = (count, width, count * size // len(node.weight))
            ends = (node.low, node.high)
            rows.append(Cost(node.name, *counts, *ends, bits(*ends)))
    return rows
