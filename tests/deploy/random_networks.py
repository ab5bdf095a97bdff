"""Random frozen networks, built node by node, with sums that lie on their thresholds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softstair.deploy import nodes
from softstair.deploy.combining import Multiply, Scale, Subtract
from softstair.deploy.frozen import FrozenNetwork

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


FACTORS = (1, 2), (2, 1), (1, 3), (2, 3)


class RandomBuilder:
    """Adds nodes that read the result of node ``last``, and runs each of them on random bytes."""

    def __init__(
        self, seed: int, shape: tuple[int, ...], zero: int = 0, batch: int = 8, dtype: str = "uint8"
    ) -> None:
        self.random = np.random.default_rng(seed)
        kind = getattr(torch, dtype)
        ends = (torch.iinfo(kind).min, torch.iinfo(kind).max)
        numbers = self.random.integers(ends[0], ends[1] + 1, (batch, *shape))
        self.bytes = torch.tensor(numbers).to(kind)
        self.bytes.view(-1)[:2] = torch.tensor(ends)
        self.nodes: dict[str, nodes.Node] = {}
        self.results: dict[str, Tensor] = {}
        self.last = ""
        span = (ends[0] - zero, ends[1] - zero)
        self.add(nodes.Input("input", (), *span, shape, unit=1 / 64, zero=zero, dtype=dtype))

    def add(self, node: nodes.Node) -> str:
        inputs = [self.results[name] for name in node.inputs] or [self.bytes]
        self.nodes[node.name] = node
        self.results[node.name] = node.run(*inputs)
        assert self.results[node.name].dtype == torch.int32
        self.last = node.name
        return node.name

    def change(self, name: str, **fields: Any) -> str:
        """Change fields of a node, and run it again."""
        return self.add(replace(self.nodes[name], **fields))

    def choose(self, *choices: Any) -> Any:
        return choices[self.random.integers(len(choices))]

    def table(self, low: int, high: int) -> str:
        """Let the input have numbers from ``low`` to ``high`` by a table."""
        kind = torch.int8 if low >= -128 and high < 128 else torch.int16
        channels = self.results["input"].shape[1]
        numbers = torch.tensor(self.random.integers(low, high + 1, (channels, 256)))
        numbers[0, :2] = torch.tensor([low, high])
        return self.change("input", low=low, high=high, table=numbers.to(kind))

    def sum(self, name: str, outputs: int, kind: str, kernel: int = 3, **options: Any) -> str:
        """Add a layer with random weights: linear after a Flatten, a convolution otherwise."""
        x = self.results[self.last]
        kernel_size = (kernel,) * (x.dim() - 2)
        shape = (outputs, x.shape[1] // options.get("groups", 1), *kernel_size)
        return self.weighted(
            name, torch.tensor(self.random.choice(WEIGHTS[kind], shape)), **options
        )

    def weighted(self, name: str, weight: Tensor, source: str = "", **options: Any) -> str:
        """Add a layer with these weights, in the fewest bits that hold them."""
        source = source or self.last
        weight = torch.from_numpy(nodes.narrowest(weight.numpy()))
        axes = weight.dim() - 2
        if axes > 0:
            windows = {"stride": (1,) * axes, "padding": (0,) * axes, "dilation": (1,) * axes}
            options = {**windows, **options}
        node = nodes.Sum(name, (source,), 0, 0, weight, **options)
        least, greatest = node.bounds(self.nodes[source].low, self.nodes[source].high)
        assert least.min() >= -(2**31)
        assert greatest.max() < 2**31
        return self.add(replace(node, low=int(least.min()), high=int(greatest.max())))

    def layer(
        self,
        name: str,
        outputs: int,
        kind: str,
        levels: tuple[int, ...],
        shortcut: str | None = None,
        even: bool = False,
        **options: Any,
    ) -> str:
        """Add a layer and its stair, or with a shortcut its requantisation."""
        self.sum(name, outputs, kind, **options)
        if shortcut is not None:
            return self.requantise(f"{name}.stair", levels[0], levels[-1], shortcut)
        return self.steps(f"{name}.stair", levels, even=even)

    def steps(self, name: str, levels: tuple[int, ...], even: bool = False) -> str:
        """Add a stair whose thresholds are sums that occur, or lie beyond all of them.

        ``even``: they lie on a line, as those of a stair behind a normalisation do.
        """
        source = self.nodes[self.last]
        sums = self.results[self.last].transpose(0, 1).flatten(1).contiguous()
        indices = self.random.integers(0, sums.shape[1], (len(sums), len(levels) - 1))
        table = torch.gather(sums, 1, torch.tensor(indices))
        if self.choose(True, False):
            table[0, 0] = source.low
        if self.choose(True, False):
            table[-1, -1] = source.high + 1
        table = table.sort(-1).values
        if even:
            # Levels from the least sum that occurs to the greatest, or a part of them.
            step = torch.tensor(self.random.uniform(0.6, 1.7, len(sums)))[:, None]
            first, last = (end[:, None].double() for end in sums.aminmax(dim=1))
            line = torch.arange(1.0, len(levels)) * (last - first + 1) / len(levels) * step
            table = (first + line).ceil().clamp(source.low, source.high + 1).int()
        return self.add(nodes.Steps(name, (self.last,), levels[0], levels[-1], table, levels))

    def requantise(
        self, name: str, low: int, high: int, beside: str | None = None, rounding: str = "once"
    ) -> str:
        """Add a requantisation that gives most of its levels; halves are rounded, too."""
        sums = self.results[self.last].transpose(0, 1).flatten(1)
        channels = len(sums)
        random = lambda least, end: torch.tensor(self.random.integers(least, end, channels))
        slope = (high - low) / (sums.amax(1) - sums.amin(1) + 1).double().clamp(min=1)
        slope = slope * torch.tensor(self.random.uniform(0.5, 2, channels))
        factor = torch.tensor(self.random.choice([1, 1, -1, 3], channels))
        if rounding == "double":
            exponent = 31 - torch.frexp(slope).exponent
            shift = exponent.clamp(31, 60)
            multiplier = (slope * 2.0**shift).round().clamp(2**30, 2**31 - 1)
        else:
            shift = random(2, 20)
            multiplier = (slope * 2.0**shift).round().clamp(0, 2**20)
        bias = -(sums.double().mean(1) * factor).round().int() + random(-9, 9)
        other = random(-(2**16), 2**16) if beside else None
        kinds = (factor.int(), bias.int(), multiplier.int(), shift.int())
        inputs = (self.last,) if beside is None else (self.last, beside)
        rest = None if other is None else random(-(2**40), 2**40) >> (40 - shift)
        more = (None if other is None else other.int(), rest, 1, rounding)
        return self.add(nodes.Requantise(name, inputs, low, high, *kinds, *more))

    def lookup(self, name: str, low: int, high: int) -> str:
        """Add places in a table, and what it has there."""
        self.requantise(f"{name}.places", 0, 255)
        table = torch.tensor(self.random.integers(low, high + 1, 256))
        return self.add(nodes.Lookup(name, (self.last,), low, high, nodes.narrow(table)))

    def max_pool(self, name: str, kernel: int, stride: int, padding: int) -> str:
        axes = self.results[self.last].dim() - 2
        windows = ((kernel,) * axes, (stride,) * axes, (padding,) * axes)
        return self._add_in_same_range(nodes.MaxPool, name, *windows)

    def expand(self, name: str, shape: tuple[int, ...]) -> str:
        """Repeat features along axes of length 1."""
        own = self.results[self.last].shape[1:]
        places = [torch.arange(n).int() % size for size, n in zip(own, shape, strict=True)]
        return self._add_in_same_range(nodes.Select, name, *places)

    def select(self, name: str) -> str:
        """Take features from some channels, rows and columns."""
        shape = self.results[self.last].shape[1:]
        draw = lambda n: torch.tensor(self.random.integers(0, n, n + self.random.integers(3)))
        return self._add_in_same_range(nodes.Select, name, *(draw(n).int() for n in shape))

    def pixel_shuffle(self, name: str, *factor: int, channels_first: bool = False) -> str:
        return self._add_in_same_range(nodes.PixelShuffle, name, factor, channels_first)

    def flatten(self, name: str) -> str:
        return self._add_in_same_range(nodes.Flatten, name)

    def _add_in_same_range(self, kind: type[nodes.Node], name: str, *fields: Any) -> str:
        source = self.nodes[self.last]
        return self.add(kind(name, (self.last,), source.low, source.high, *fields))

    def pad(self, name: str, *padding: int) -> str:
        source = self.nodes[self.last]
        ends = (min(source.low, 0), max(source.high, 0))
        return self.add(nodes.Pad(name, (self.last,), *ends, padding))

    def concatenate(self, name: str, *parts: str) -> str:
        low, high = (min(self.nodes[p].low for p in parts), max(self.nodes[p].high for p in parts))
        return self.add(nodes.Concat(name, parts, low, high, 1))

    def sum_pool(self, name: str) -> str:
        """Add the sum over all positions."""
        source, kernel = self.nodes[self.last], tuple(self.results[self.last].shape[2:])
        low, high = (int(np.prod(kernel)) * end for end in (source.low, source.high))
        return self.add(nodes.SumPool(name, (self.last,), low, high, kernel, kernel, (0, 0)))

    def multiply(self, name: str, a: str, b: str) -> str:
        ends = [m * n for m in self._ends(a) for n in self._ends(b)]
        return self.add(Multiply(name, (a, b), min(ends), max(ends)))

    def subtract(self, name: str, *terms: str) -> str:
        low, high = self._ends(terms[0]) if len(terms) == 2 else (0, 0)
        least, greatest = self._ends(terms[-1])
        return self.add(Subtract(name, terms, low - greatest, high - least))

    def scale(self, name: str) -> str:
        """Multiply by a number for each place."""
        shape = (1, *self.results[self.last].shape[2:])
        factor = torch.tensor(self.random.integers(1, 7, shape)).int()
        low, high = (6 * end for end in self._ends(self.last))
        return self.add(Scale(name, (self.last,), min(low, 0), max(high, 0), factor))

    def _ends(self, name: str) -> tuple[int, int]:
        return self.nodes[name].low, self.nodes[name].high

    def add_features(self, name: str, a: str, b: str) -> str:
        low, high = (self.nodes[a].low + self.nodes[b].low, self.nodes[a].high + self.nodes[b].high)
        return self.add(nodes.Add(name, (a, b), low, high))

    def scores(self, name: str, classes: int, kind: str = "int8") -> str:
        """Add a last layer."""
        self.sum(f"{name}.sum", classes, kind)
        return self.scored(name)

    def scored(self, name: str, shift: int = 1) -> str:
        """Add the scores of a sum; those of each class have a unit of its own."""
        sums = self.results[self.last]
        count, reach = sums.shape[1], int(sums.abs().max()) + 1
        bias = torch.tensor(self.random.integers(-reach, reach + 1, count)).int()
        order = torch.tensor(self.random.integers(1, 2**20, count)).int()
        ends = (-(2**31), 2**31 - 1)
        more = (bias, order * 1e-7, order, shift)
        return self.add(nodes.Scores(name, (self.last,), *ends, *more))

    def network(self, outputs: str = "classes", classes: tuple[str, ...] = ()) -> FrozenNetwork:
        sizes = {name: tuple(x.shape[1:]) for name, x in self.results.items()}
        kinds = (nodes.Steps, nodes.Requantise)
        stairs = tuple(name for name, node in self.nodes.items() if isinstance(node, kinds))
        heads = [name for name, node in self.nodes.items() if isinstance(node, nodes.Scores)]
        returns = heads if len(heads) > 1 else None
        return FrozenNetwork(tuple(self.nodes.values()), sizes, stairs, classes, outputs, returns)


def random_network(seed: int) -> RandomBuilder:
    """Convolutions, stairs, requantisations, poolings and shortcuts, then a linear layer."""
    random = np.random.default_rng(1000 + seed)
    choose = lambda choices: choices[random.integers(len(choices))]
    levels = lambda: choose([*LEVELS.values()])
    weights = lambda: choose([*WEIGHTS])

    shape = (int(random.integers(1, 4)), int(random.integers(5, 9)), int(random.integers(5, 9)))
    dtype = choose(["uint8", "uint8", "int8", "int16"])
    zero = {"uint8": int(choose([0, 121, 255])), "int8": -7, "int16": 0}[dtype]
    net = RandomBuilder(seed, shape, zero, dtype=dtype)
    if dtype == "uint8" and random.integers(2):
        net.table(*choose([(-128, 127), (-4000, 3999)]))
    net.layer("first", 6, weights(), levels(), padding=(1, 1))
    if random.integers(2):
        net.max_pool("first.pool", 3, 2, 1)
    if random.integers(2):
        net.pad("first.pad", 1, 0, 0, 2)
    start = net.last
    net.sum("deep", 6, weights(), padding=(1, 1), groups=int(choose([1, 2, 3, 6])))
    ends = choose([(0, 255), (-128, 127), (0, 15), (-20000, 20000)])
    beside, rounding = choose([(None, "once"), (start, "once"), (None, "double")])
    net.requantise("deep.stair", *ends, beside=beside, rounding=rounding)
    if random.integers(2):
        net.add_features("deep.add", start, net.last)
    if random.integers(2):
        net.subtract("deep.difference", *choose([(start, net.last), (net.last,)]))
    if random.integers(2) and max(map(abs, net._ends(net.last))) < 2**13:
        net.multiply("deep.product", net.last, start)
        net.requantise("deep.product.stair", *choose([(0, 15), (-128, 127)]))
    if random.integers(2) and max(map(abs, net._ends(net.last))) < 2**13:
        net.scale("deep.scaled")
    if random.integers(2):
        net.concatenate("deep.both", net.last, start)
    if random.integers(2):
        net.select("deep.selected")
    more = np.random.default_rng(2000 + seed)  # of what was added later
    factors = [f for f in FACTORS if net.results[net.last].shape[1] % (f[0] * f[1]) == 0]
    if factors and more.integers(2):
        factor = factors[more.integers(len(factors))]
        net.pixel_shuffle("pixels", *factor, channels_first=seed % 2 == 0)
    if more.integers(4) == 0:
        features = net.last
        net.scored("early")
        net.last = features
    if random.integers(2):
        net.sum("curved", 6, weights(), padding=(1, 1))
        net.lookup("curved.table", *choose([(0, 15), (-128, 127), (-9, 1000)]))
    net.layer("wide", 5, weights(), levels(), dilation=(1, 2), padding=(0, 2), stride=(2, 1))
    if random.integers(2):
        net.sum_pool("average")
        if random.integers(2):
            net.requantise("average.stair", *ends)
    net.flatten("flat")
    net.sum("linear", 7, weights())
    if random.integers(2):
        net.steps("linear.stair", levels())
        net.sum("last", 4, "int12")
    net.scored("scores")
    return net
