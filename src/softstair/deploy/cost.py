"""What each layer of an integer network costs: bytes, products, and how wide its sums get."""

import math
from dataclasses import dataclass

from softstair.deploy.network import IntegerNetwork
from softstair.deploy.nodes import Scores, Sum

__all__ = ["Cost", "bits", "costs"]


@dataclass(frozen=True)
class Cost:
    """A layer's.

    weights      how many
    weight_bits  bits of each, as few as hold its values (32 for a float one)
    products     multiply-accumulates for one input
    low, high    the least and the greatest sum
    sum_bits     of a signed number that holds both
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
        """Of the weights, packed."""
        return -(-self.weights * self.weight_bits // 8)


def costs(network: IntegerNetwork) -> list[Cost]:
    """The cost of every layer with weights, in order."""
    found = []
    for node in network.nodes:
        if not isinstance(node, Sum | Scores):
            continue
        count = node.weight.numel()
        places = math.prod(network.sizes[node.name]) // len(node.weight)
        if isinstance(node, Sum):
            levels = node.weight.unique().numel()
            width, reach = max(1, (levels - 1).bit_length()), bits(node.low, node.high)
        else:
            width, reach = 32, 0
        found.append(Cost(node.name, count, width, count * places, node.low, node.high, reach))
    return found


def bits(low: int, high: int) -> int:
    """Of a signed number that holds everything from low to high.

    >>> bits(-128, 127), bits(-129, 0), bits(0, 0)
    (8, 9, 1)
    """
    return 1 + max((-low - 1).bit_length() if low < 0 else 0, max(high, 0).bit_length())
