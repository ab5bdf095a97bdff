"""Random frozen networks for ONNX, with requantisations that a runtime may compute in float."""

from __future__ import annotations

import numpy as np
import torch
from random_networks import LEVELS, WEIGHTS, RandomBuilder

from softstair.deploy import nodes
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.nodes import bits

WEIGHT_BITS = {"ternary": 2, "sign": 1, "binary": 1, "int4": 4, "int8": 8, "even": 4}
"""The bits that files store weights in."""
RANGES = [(0, 255), (-128, 127), (-7, 7), (0, 15), (-(2**15), 2**15 - 1)]
"""The ends of requantisations."""


class Builder(RandomBuilder):
    """Requantisations of which the bits of multipliers can be limited; random last layers."""

    def look_up(self, kind: str) -> str:
        """Let the input have all numbers of a type by a table."""
        ends = torch.iinfo(getattr(torch, kind))
        return self.table(ends.min, ends.max)

    def requantise(
        self,
        name: str,
        low: int = -128,
        high: int = 127,
        beside: str | None = None,
        rounding: nodes.Rounding = "once",
        negative: bool = False,
        factor: int = 1,
        significant: int = 31,
    ) -> str:
        """Add a requantisation that spreads what occurs over its range, and a bit beyond.

        ``significant``: the most bits of multipliers. ``negative``: some of them are, or, where
        they may not be, factors.
        """
        values = self.results[self.last].transpose(0, 1).flatten(1).long()
        count = len(values)
        factors = torch.full((count,), factor)
        if negative:
            factors[::2] *= -1
        v = values * factors[:, None]
        bias = -(v.amin(1) + v.amax(1)) // 2
        bias = torch.where(bias.abs() < 2**31, bias, 0) + torch.arange(count)
        bias = bias if factor % 2 else bias | 1  # without halves: float32 may be exact
        v = v + bias[:, None]
        # Every product stays below 2⁵², with one for the second input.
        source = self.nodes[self.last]
        reach = max(abs(source.low), abs(source.high)) * factor + int(bias.abs().max())
        wanted = (high - low) * 1.2 / (v.amax(1) - v.amin(1)).clamp(min=1).double()
        wanted = wanted * torch.tensor(self.random.uniform(0.5, 1.5, count))
        largest = min(significant, 51 - int(reach).bit_length())
        shift = largest - 1 - torch.log2(wanted).floor().long()
        if rounding == "double":
            shift = 30 - torch.log2(wanted).floor().long()
        shift = shift.clamp(31 if rounding == "double" else 0, 62)
        multiplier = (wanted * 2.0**shift).long()
        if rounding == "double":
            multiplier = multiplier.clamp(2**30, 2**31 - 1)
        other, rest, inputs = None, None, (self.last,)
        if beside:
            inputs = (self.last, beside)
            other = (torch.tensor(self.random.uniform(0.1, 1, count)) * 2.0**shift).long()
            y = self.nodes[beside]
            room = 51 - bits(y.low, y.high)
            other = other.clamp(max=2 ** min(room, 31) - 1).int()
            rest = (torch.tensor(self.random.uniform(-9, 9, count)) * 2.0**shift).long()
        own = (factors.int(), bias.int(), multiplier.int(), shift.int(), other, rest)
        return self.add(nodes.Requantise(name, inputs, low, high, *own, rounding=rounding))

    def scores(self, name: str, shift: int = 0) -> str:
        """Add the scores of the last sums."""
        source, count = self.nodes[self.last], self.results[self.last].shape[1]
        bias = torch.tensor(self.random.integers(-1000, 1000, count), dtype=torch.int32)
        order = torch.tensor(self.random.integers(2**29, 2**30, count), dtype=torch.int32)
        ends = (int(source.low << shift) - 1000, int(source.high << shift) + 1000)
        rest = (bias, order.double() / 2**40, order, shift)
        return self.add(nodes.Scores(name, (self.last,), *ends, *rest))

    def head(self, classes: int = 4, kind: str = "int8") -> FrozenNetwork:
        """Add a linear layer and its scores; return the network."""
        if self.results[self.last].dim() > 2:
            self.flatten("flat")
        self.sum("last.sum", classes, kind)
        self.scores("last")
        return self.network()


def random_network(seed: int, widest: bool = True) -> Builder:
    """Convolutions, stairs, requantisations and poolings of many kinds, then a linear layer.

    Without ``widest`` every sum is below 2²⁴.
    """
    random = np.random.default_rng(1000 + seed)
    end = None if widest else -1

    def weights() -> str:
        names = [*WEIGHTS][:end]
        return names[random.integers(len(names))]

    def stair(name: str) -> None:
        if random.integers(2):
            stairs = [*LEVELS.values()][:end]
            net.steps(name, stairs[random.integers(len(stairs))], even=bool(random.integers(2)))
            return
        ranges = RANGES[:end]
        rounding = ("once", "double")[int(random.integers(2))]
        significant = int(random.choice([12, 31]))
        ends = ranges[random.integers(len(ranges))]
        net.requantise(name, *ends, rounding=rounding, significant=significant)

    shape = (int(random.integers(1, 4)), int(random.integers(5, 9)), int(random.integers(5, 9)))
    dtype = str(random.choice(["uint8", "uint8", "int8", *(["int16"] if widest else [])]))
    table = "" if dtype == "int16" else str(random.choice(["", "", "int8", "int16"][:end]))
    zero = int(random.choice([0, 121, 255])) if dtype == "uint8" else 0
    net = Builder(seed, shape, 0 if table else zero, dtype=dtype)
    if table:
        net.look_up(table)
    net.sum("first", 6, weights() if dtype != "int16" else "int4", padding=(1, 1))
    stair("first.stair")
    if random.integers(2):
        net.max_pool("first.pool", 3, 2, 1)
    start = net.last
    net.sum("deep", 6, weights(), padding=(1, 1), groups=int(random.choice([1, 2, 3, 6])))
    if random.integers(2):
        net.requantise("deep.stair", *RANGES[random.integers(4)], beside=start)
    else:
        stair("deep.stair")
    if random.integers(2):
        net.add_features("deep.add", start, net.last)
    net.sum("wide", 5, weights(), dilation=(1, 2), padding=(0, 2), stride=(2, 1))
    stair("wide.stair")
    if random.integers(2):
        net.sum_pool("average")
        if random.integers(2):
            net.requantise("average.stair")
    net.flatten("flat")
    net.sum("linear", 7, weights())
    if random.integers(2):
        stair("linear.stair")
        net.sum("last.sum", 4, "int8")
    net.scores("last")
    return net
