"""The cost of each layer of an integer network, and the width of integers."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from softstair.deploy.nodes import IntegerNetwork, Scores, Sum

__all__ = ["Cost", "bits", "costs", "narrowest"]


@dataclass(frozen=True)
class Cost:
    """The cost of one layer.

    Attributes:
        weights: Number of weights.
        weight_bits: Bits per weight, as few as its values need (32 in float).
        products: Multiply-accumulate operations per input.
        low, high: The least and the greatest sum.
        sum_bits: Bits of a signed integer that holds both; 0 for a float layer.
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


def costs(network: IntegerNetwork) -> list[Cost]:
    """Return the cost of every layer with weights, in order of execution."""
    rows = []
    for node in network.nodes:
        if not isinstance(node, Sum | Scores):
            continue
        count = node.weight.numel()
        positions = math.prod(network.sizes[node.name]) // len(node.weight)
        weight_bits, sum_bits = 32, 0
        if isinstance(node, Sum):
            weight_bits = max(1, (node.weight.unique().numel() - 1).bit_length())
            sum_bits = bits(node.low, node.high)
        ends = (node.low, node.high)
        rows.append(Cost(node.name, count, weight_bits, count * positions, *ends, sum_bits))
    return rows


def bits(low: int, high: int) -> int:
    """Return the width of a signed integer that holds ``low`` to ``high``."""
    return 1 + max((-low - 1).bit_length() if low < 0 else 0, max(high, 0).bit_length())


def narrowest(values: npt.NDArray[Any]) -> npt.NDArray[np.signedinteger]:
    """Return integers in the fewest of 8, 16, 32 or 64 bits that hold them."""
    for dtype in (np.int8, np.int16, np.int32):
        limits = np.iinfo(dtype)
        if values.size == 0 or (values.min() >= limits.min and values.max() <= limits.max):
            return values.astype(dtype)
    return values.astype(np.int64)
