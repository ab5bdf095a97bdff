"""Random integer networks, built node by node, with sums that lie on their thresholds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softstair.deploy import IntegerNetwork, nodes

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


class RandomBuilder:
    """Adds nodes that read the result of node ``last``, and runs each of them on random bytes."""

    def __init__(self, seed: int, shape: tuple[int, ...], zero: int, batch: int = 8) -> None:
        self.random = np.random.default_rng(seed)
        self.bytes = torch.tensor(self.random.integers(0, 256, (batch, *shape)), dtype=torch.uint8)
        self.nodes: dict[str, nodes.Node] = {}
        self.results: dict[str, Tensor] = {}
        self.sums_on_thresholds = 0
        self.last = ""
        self.add(nodes.Input("input", (), -zero, 255 - zero, shape=shape, zero=zero, scale=64.0))

    def add(self, node: nodes.Node) -> str:
        inputs = [self.results[name] for name in node.inputs] or [self.bytes]
        self.nodes[node.name] = node
        self.results[node.name] = node.run(*inputs)
        self.last = node.name
        return node.name

    def change(self, name: str, **fields: Any) -> str:
        """Change fields of a node, and run it again."""
        return self.add(replace(self.nodes[name], **fields))

    def choose(self, *choices: Any) -> Any:
        return choices[self.random.integers(len(choices))]

    def sum(self, name: str, outputs: int, kind: str, kernel: int = 3, **options: Any) -> str:
        """Add a layer with random weights: linear after a Flatten, a convolution otherwise."""
        source, x = self.nodes[self.last], self.results[self.last]
        kernel_size = () if x.dim() == 2 else (kernel, kernel)
        shape = (outputs, x.shape[1] // options.get("groups", 1), *kernel_size)
        weight = torch.tensor(self.random.choice(WEIGHTS[kind], shape))
        flat = weight.flatten(1)
        ends = torch.stack([flat * min(source.low, 0), flat * max(source.high, 0)])
        least, greatest = ends.amin(0).sum(1), ends.amax(0).sum(1)
        bounds = (int(least.min()), int(greatest.max()))
        return self.add(nodes.Sum(name, (self.last,), *bounds, weight, least, greatest, **options))

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
        """Add a layer and its stair, with the options of :meth:`sum` and :meth:`steps`."""
        self.sum(name, outputs, kind, **options)
        return self.steps(f"{name}.stair", levels, shortcut, even=even)

    def steps(
        self,
        name: str,
        levels: tuple[int, ...],
        shortcut: str | None = None,
        monotone: bool = False,
        even: bool = False,
    ) -> str:
        """Add a stair whose thresholds are sums that occur, or lie beyond all of them.

        ``monotone``: they fall with the shortcut, or rise in every third channel. ``even``: they
        lie on a line, as those of a stair behind a normalisation do.
        """
        source = self.nodes[self.last]
        sums = self.results[self.last].transpose(0, 1).flatten(1)
        rows, first = 1, 0
        if shortcut is not None:
            first = self.nodes[shortcut].low
            rows = self.nodes[shortcut].high - first + 1
        indices = self.random.integers(0, sums.shape[1], (len(sums), rows, len(levels) - 1))
        table = torch.gather(sums[:, None].expand(-1, rows, -1), 2, torch.tensor(indices))
        if self.choose(True, False):
            table[0, :, 0] = source.low
        if self.choose(True, False):
            table[-1, :, -1] = source.high + 1
        table = table.sort(-1).values
        if monotone:
            table = table.sort(1, descending=True).values
            table[::3] = table[::3].flip(1)
        floats = None
        if even:
            # Levels from the least sum that occurs to the greatest, or a part of them.
            span, step = sums.amax(1) - sums.amin(1), self.random.uniform(0.6, 1.7, len(sums))
            slope = len(levels) / (span * torch.tensor(step))
            table, floats = _in_float32(source, slope, sums.amin(1), rows, len(levels))
        inputs: tuple[str, ...] = (self.last,)
        if shortcut is None:
            table = table[:, 0]
            self.sums_on_thresholds += int((sums[:, :, None] == table[:, None]).sum())
        else:
            inputs = (self.last, shortcut)
        steps = (table, levels, first)
        return self.add(nodes.Steps(name, inputs, levels[0], levels[-1], *steps, floats=floats))

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

    def sum_pool(self, name: str) -> str:
        """Add the sum over all positions."""
        source, kernel = self.nodes[self.last], tuple(self.results[self.last].shape[2:])
        low, high = (kernel[0] * kernel[1] * end for end in (source.low, source.high))
        return self.add(nodes.SumPool(name, (self.last,), low, high, kernel, kernel))

    def add_features(self, name: str, a: str, b: str) -> str:
        low, high = (self.nodes[a].low + self.nodes[b].low, self.nodes[a].high + self.nodes[b].high)
        return self.add(nodes.Add(name, (a, b), low, high))

    def scores(self, name: str, classes: int, unit: float = 0.3) -> str:
        inputs = self.results[self.last].shape[1]
        weight = torch.tensor(self.random.normal(size=(classes, inputs)))
        bias = self.choose(None, torch.tensor(self.random.normal(size=classes)).float())
        return self.add(nodes.Scores(name, (self.last,), 0, 0, weight.float(), bias, unit))

    def rescaled(self, name: str) -> str:
        count = self.results[self.last].shape[1]
        scale, bias = (torch.tensor(self.random.normal(size=count)).float() for _ in range(2))
        return self.add(nodes.Rescaled(name, (self.last,), 0, 0, scale, bias))

    def network(self) -> IntegerNetwork:
        sizes = {name: tuple(x.shape[1:]) for name, x in self.results.items()}
        return IntegerNetwork(tuple(self.nodes.values()), sizes)


def _in_float32(
    source: nodes.Node, slope: Tensor, start: Tensor, values: int, levels: int
) -> tuple[Tensor, nodes.FloatSteps]:
    """Thresholds of slope · (sum − start) + value, which is compared with 1, 2, … in float32."""
    factor, addend = slope.float(), -(slope * start).float()
    shortcut, limits = torch.arange(float(values)), torch.arange(1.0, levels)
    sums = torch.arange(source.low, source.high + 1)
    y = sums.float() * factor[:, None] + addend[:, None]
    totals, begins = y[:, None] + shortcut[:, None], limits.repeat(len(y), values, 1)
    stages = (factor[None], addend[None], False)
    floats = nodes.FloatSteps(*stages, shortcut, limits, 1.0)
    return torch.searchsorted(totals, begins) + source.low, floats


def random_network(seed: int, monotone: bool = False, widest: bool = True) -> RandomBuilder:
    """Convolutions, stairs, poolings and shortcuts of many kinds, then linear layers and scores."""
    random = np.random.default_rng(1000 + seed)
    end = None if widest else -1

    def weights() -> str:
        names = [*WEIGHTS][:end]
        return names[random.integers(len(names))]

    def levels() -> tuple[int, ...]:
        stairs = [*LEVELS.values()][:end]
        return stairs[random.integers(len(stairs))]

    shape = (int(random.integers(1, 4)), int(random.integers(5, 9)), int(random.integers(5, 9)))
    net = RandomBuilder(seed, shape, zero=int(random.choice([0, 121, 255])))
    net.layer("first", 6, weights(), levels(), padding=(1, 1))
    if random.integers(2):
        net.max_pool("first.pool", 3, 2, 1)
    start = net.last
    net.sum("deep", 6, weights(), padding=(1, 1), groups=int(random.choice([1, 2, 3, 6])))
    few_values = net.nodes[start].high - net.nodes[start].low < 70
    shortcut = start if few_values and random.integers(2) else None
    net.steps("deep.stair", levels(), shortcut, monotone)
    if random.integers(2):
        net.add_features("deep.add", start, net.last)
    net.layer("wide", 5, weights(), levels(), dilation=(1, 2), padding=(0, 2), stride=(2, 1))
    if random.integers(2):
        net.sum_pool("average")
    net.flatten("flat")
    net.sum("linear", 7, weights())
    if random.integers(2):
        net.rescaled("linear.scores")
    else:
        net.steps("linear.stair", levels())
        net.scores("last", 4)
    return net
