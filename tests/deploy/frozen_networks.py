"""Random frozen networks, built node by node, with sums that lie on their thresholds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from softstair.deploy import nodes
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.nodes import bits

WEIGHTS = {
    "ternary": (-1, 0, 1),
    "sign": (-1, 1),
    "binary": (0, 1),
    "int4": tuple(range(-8, 8)),
    "int8": tuple(range(-128, 128)),
    "even": (-6, -2, 4),
    "int12": (-2048, -300, -1, 0, 7, 2047),
}
"""The values that the weights of a layer are drawn from."""
WEIGHT_BITS = {"ternary": 2, "sign": 1, "binary": 1, "int4": 4, "int8": 8, "even": 4}
"""The bits that files store them in."""
LEVELS = {
    "ternary": (-1, 0, 1),
    "sign": (-1, 1),
    "uint4": tuple(range(16)),
    "uneven": (-5, -1, 0, 4, 100),
    "positive": (3, 4, 9),
    "negative": (-9, -4),
    "uint6": tuple(range(64)),
    "wide": tuple(range(-900, 901, 30)),
}
"""The levels of stairs."""
RANGES = [(0, 255), (-128, 127), (-7, 7), (0, 15), (-(2**15), 2**15 - 1)]
"""The ends of requantisations."""


class Builder:
    """Adds nodes that read the result of node ``last``, and runs each of them on random inputs.

    ``table``: the type of a table of the input, ``"int8"`` or ``"int16"``.
    """

    def __init__(
        self,
        seed: int,
        shape: tuple[int, ...],
        zero: int = 0,
        batch: int = 8,
        dtype: str = "uint8",
        table: str = "",
    ) -> None:
        self.random = np.random.default_rng(seed)
        kind = getattr(torch, dtype)
        low, high = torch.iinfo(kind).min, torch.iinfo(kind).max
        draws = self.random.integers(low, high + 1, (batch, *shape))
        self.x = torch.tensor(draws).to(kind)
        self.x.view(-1)[:2] = torch.tensor([low, high])
        self.nodes: dict[str, nodes.Node] = {}
        self.results: dict[str, Tensor] = {}
        self.sums_on_thresholds = 0
        self.last = ""
        ends, rows = (low - zero, high - zero), None
        if table:
            limits = torch.iinfo(getattr(torch, table))
            ends = (limits.min, limits.max)
            values = self.random.integers(limits.min, limits.max + 1, (shape[0], 256))
            rows = torch.tensor(values).to(getattr(torch, table))
        rest = {"zero": 0 if table else zero, "dtype": dtype, "table": rows}
        self.add(nodes.Input("input", (), *ends, shape, 1 / 64, **rest))

    def add(self, node: nodes.Node) -> str:
        inputs = [self.results[name] for name in node.inputs] or [self.x]
        self.nodes[node.name] = node
        self.results[node.name] = node.run(*inputs)
        self.last = node.name
        return node.name

    def choose(self, *choices: Any) -> Any:
        return choices[self.random.integers(len(choices))]

    def sum(self, name: str, outputs: int, kind: str, kernel: int = 3, **options: Any) -> str:
        """Add a layer with random weights: linear after a Flatten, a convolution otherwise."""
        source, x = self.nodes[self.last], self.results[self.last]
        kernel_size = () if x.dim() == 2 else (kernel,) * (x.dim() - 2)
        shape = (outputs, x.shape[1] // options.pop("groups", 1), *kernel_size)
        if x.dim() > 2:
            options["groups"] = x.shape[1] // shape[1]
        weight = torch.tensor(self.random.choice(WEIGHTS[kind], shape)).to(
            torch.int16 if kind == "int12" else torch.int8
        )
        if x.dim() == 3:
            options = {"stride": (1,), "padding": (0,), "dilation": (1,)} | options
        return self.add_sum(name, weight, source, **options)

    def add_sum(self, name: str, weight: Tensor, source: nodes.Node, **options: Any) -> str:
        node = nodes.Sum(name, (source.name,), 0, 0, weight, **options)
        least, greatest = node.bounds(source.low, source.high)
        ends = (int(least.min()), int(greatest.max()))
        return self.add(nodes.Sum(name, (source.name,), *ends, weight, **options))

    def layer(
        self, name: str, outputs: int, kind: str, levels: Any, even: bool = False, **options: Any
    ) -> str:
        """Add a layer and its stair, with the options of :meth:`sum` and :meth:`steps`."""
        self.sum(name, outputs, kind, **options)
        return self.steps(f"{name}.stair", levels, even=even)

    def steps(self, name: str, levels: tuple[int, ...], even: bool = False) -> str:
        """Add a stair whose thresholds are sums that occur, or lie beyond all of them.

        ``even``: they lie on a line, as those of a stair behind a normalisation do.
        """
        source = self.nodes[self.last]
        sums = self.results[self.last].transpose(0, 1).flatten(1)
        indices = self.random.integers(0, sums.shape[1], (len(sums), len(levels) - 1))
        table = torch.gather(sums, 1, torch.tensor(indices))
        if self.choose(True, False):
            table[0, 0] = source.low
        if self.choose(True, False):
            table[-1, -1] = source.high + 1
        if even:
            # Levels from the least sum that occurs to the greatest, or a part of them.
            span, step = sums.amax(1) - sums.amin(1), self.random.uniform(0.6, 1.7, len(sums))
            places = torch.arange(1, len(levels)) / len(levels) * torch.tensor(step)[:, None]
            table = (sums.amin(1)[:, None] + span[:, None] * places).ceil().int()
        table = table.sort(-1).values.contiguous()
        self.sums_on_thresholds += int((sums[:, :, None] == table[:, None]).sum())
        return self.add(nodes.Steps(name, (self.last,), levels[0], levels[-1], table, levels))

    def requantise(
        self,
        name: str,
        low: int = -128,
        high: int = 127,
        beside: str = "",
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
        other, inputs = None, (self.last,)
        if beside:
            inputs = (self.last, beside)
            other = (torch.tensor(self.random.uniform(0.1, 1, count)) * 2.0**shift).long()
            y = self.nodes[beside]
            room = 51 - bits(y.low, y.high)
            other = other.clamp(max=2 ** min(room, 31) - 1).int()
        own = (factors.int(), bias.int(), multiplier.int(), shift.int(), other)
        return self.add(nodes.Requantise(name, inputs, low, high, *own, rounding=rounding))

    def max_pool(self, name: str, kernel: int, stride: int, padding: int) -> str:
        windows = ((kernel, kernel), (stride, stride), (padding, padding))
        return self._add_in_same_range(nodes.MaxPool, name, *windows)

    def expand(self, name: str, shape: tuple[int, ...]) -> str:
        return self._add_in_same_range(nodes.Expand, name, shape)

    def flatten(self, name: str) -> str:
        return self._add_in_same_range(nodes.Flatten, name)

    def _add_in_same_range(self, kind: type[nodes.Node], name: str, *fields: Any) -> str:
        source = self.nodes[self.last]
        return self.add(kind(name, (self.last,), source.low, source.high, *fields))

    def sum_pool(self, name: str, kernel: tuple[int, ...] = (), **options: Any) -> str:
        """Add the sums of windows, by default over all positions."""
        source = self.nodes[self.last]
        kernel = kernel or tuple(self.results[self.last].shape[2:])
        count = int(np.prod(kernel))
        low, high = count * min(source.low, 0), count * max(source.high, 0)
        return self.add(nodes.SumPool(name, (self.last,), low, high, kernel, kernel, **options))

    def add_features(self, name: str, a: str, b: str) -> str:
        low, high = (self.nodes[a].low + self.nodes[b].low, self.nodes[a].high + self.nodes[b].high)
        return self.add(nodes.Add(name, (a, b), low, high))

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

    def network(self, **options: Any) -> FrozenNetwork:
        sizes = {name: tuple(x.shape[1:]) for name, x in self.results.items()}
        stairs = (nodes.Steps, nodes.Requantise)
        named = [name for name, node in self.nodes.items() if isinstance(node, stairs)]
        return FrozenNetwork(tuple(self.nodes.values()), sizes, named, **options)


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
    net = Builder(seed, shape, zero, dtype=dtype, table=table)
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
