"""Integer networks put together at random, node by node, whose sums land on their thresholds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from softstair.deploy import IntegerNetwork, nodes

KINDS = {
    "ternary": (-1, 0, 1),
    "sign": (-1, 1),
    "switches": (0, 1),
    "int4": tuple(range(-8, 8)),
    "int8": tuple(range(-128, 128)),
    "even": (-6, -2, 4),
    "int12": (-2048, -300, -1, 0, 7, 2047),
}
STAIRS = {
    "ternary": (-1, 0, 1),
    "sign": (-1, 1),
    "uint4": tuple(range(16)),
    "uneven": (-5, -1, 0, 4, 100),
    "positive": (3, 4, 9),
    "negative": (-9, -4),
    "uint6": tuple(range(64)),
    "wide": tuple(range(-900, 901, 30)),
}


class Growing:
    """Nodes, and what they give for bytes that the thresholds are taken from."""

    def __init__(self, seed: int, shape: tuple[int, ...], zero: int, batch: int = 8) -> None:
        self.random = np.random.default_rng(seed)
        self.bytes = torch.tensor(self.random.integers(0, 256, (batch, *shape)), dtype=torch.uint8)
        self.nodes: dict[str, nodes.Node] = {}
        self.known: dict[str, Tensor] = {}
        self.hits = 0
        made = nodes.Input("input", (), -zero, 255 - zero, shape=shape, zero=zero, scale=64.0)
        self.last = self.add(made)

    def add(self, node: nodes.Node) -> str:
        self.nodes[node.name] = node
        taken = [self.known[one] for one in node.inputs] or [self.bytes]
        self.known[node.name] = node.run(*taken)
        self.last = node.name
        return node.name

    def pick(self, *choices: Any) -> Any:
        return choices[self.random.integers(len(choices))]

    def sum(self, name: str, outputs: int, kind: str, kernel: int = 3, **how: Any) -> str:
        """Weights of that kind over the last features."""
        source = self.nodes[self.last]
        x = self.known[self.last]
        places = () if x.dim() == 2 else (kernel, kernel)
        shape = (outputs, x.shape[1] // how.get("groups", 1), *places)
        weight = torch.tensor(self.random.choice(KINDS[kind], shape))
        low, high = min(source.low, 0), max(source.high, 0)
        flat = weight.flatten(1)
        ends = torch.stack([flat * low, flat * high])
        least, greatest = ends.amin(0).sum(1), ends.amax(0).sum(1)
        bounds = (int(least.min()), int(greatest.max()))
        node = nodes.Sum(
            name, (self.last,), *bounds, weight=weight, least=least, greatest=greatest, **how
        )
        return self.add(node)

    def steps(self, name: str, levels: tuple[int, ...], beside: str | None = None) -> str:
        """Thresholds that are sums which occur, or lie beyond all of them."""
        sums = self.known[self.last]
        channels = sums.transpose(0, 1).flatten(1)
        rows = 1
        first = 0
        if beside is not None:
            first = self.nodes[beside].low
            rows = self.nodes[beside].high - first + 1
        picked = self.random.integers(0, channels.shape[1], (len(channels), rows, len(levels) - 1))
        table = torch.gather(channels[:, None].expand(-1, rows, -1), 2, torch.tensor(picked))
        source = self.nodes[self.last]
        if self.pick(True, False):
            table[0, :, 0] = source.low
        if self.pick(True, False):
            table[-1, :, -1] = source.high + 1
        table = table.sort(-1).values
        if beside is None:
            table = table[:, 0]
            self.hits += int((channels[:, :, None] == table[:, None]).sum())
        inputs = (self.last,) if beside is None else (self.last, beside)
        ends = (levels[0], levels[-1])
        return self.add(
            nodes.Steps(name, inputs, *ends, thresholds=table, levels=levels, first=first)
        )

    def pool(self, name: str, kernel: int, stride: int, padding: int) -> str:
        source = self.nodes[self.last]
        pair = ((kernel, kernel), (stride, stride), (padding, padding))
        return self.add(nodes.MaxPool(name, (self.last,), source.low, source.high, *pair))

    def sum_pool(self, name: str, kernel: tuple[int, int], stride: tuple[int, int]) -> str:
        source, area = self.nodes[self.last], kernel[0] * kernel[1]
        low, high = area * source.low, area * source.high
        return self.add(nodes.SumPool(name, (self.last,), low, high, kernel, stride))

    def plus(self, name: str, a: str, b: str) -> str:
        low = self.nodes[a].low + self.nodes[b].low
        return self.add(nodes.Add(name, (a, b), low, self.nodes[a].high + self.nodes[b].high))

    def expand(self, name: str, shape: tuple[int, ...]) -> str:
        source = self.nodes[self.last]
        return self.add(nodes.Expand(name, (self.last,), source.low, source.high, shape))

    def flat(self, name: str) -> str:
        source = self.nodes[self.last]
        return self.add(nodes.Flatten(name, (self.last,), source.low, source.high))

    def scores(self, name: str, classes: int, unit: float = 0.3) -> str:
        weight = torch.tensor(self.random.normal(size=(classes, self.known[self.last].shape[1])))
        bias = self.pick(None, torch.tensor(self.random.normal(size=classes)).float())
        return self.add(nodes.Scores(name, (self.last,), 0, 0, weight.float(), bias, unit))

    def rescaled(self, name: str) -> str:
        count = self.known[self.last].shape[1]
        pair = [torch.tensor(self.random.normal(size=count)).float() for _ in range(2)]
        return self.add(nodes.Rescaled(name, (self.last,), 0, 0, *pair))

    def network(self) -> IntegerNetwork:
        sizes = {name: tuple(x.shape[1:]) for name, x in self.known.items()}
        return IntegerNetwork(tuple(self.nodes.values()), sizes)


def random_network(seed: int, shortcut: bool = True, widest: bool = True) -> Growing:
    """Convolutions, stairs, pools and shortcuts of many kinds, then linear layers and scores."""
    random = np.random.default_rng(1000 + seed)
    kinds = [*KINDS][: None if widest else -1]
    stairs = [*STAIRS][: None if widest else -1]

    def one(choices: list[str]) -> str:
        return choices[random.integers(len(choices))]

    shape = (int(random.integers(1, 4)), int(random.integers(5, 9)), int(random.integers(5, 9)))
    net = Growing(seed, shape, zero=int(random.choice([0, 121, 255])))
    net.sum("first", 6, one(kinds), padding=(1, 1))
    net.steps("first.stair", STAIRS[one(stairs)])
    if random.integers(2):
        net.pool("first.pool", 3, 2, 1)
    start = net.last
    net.sum("deep", 6, one(kinds), padding=(1, 1), groups=int(random.choice([1, 2, 3, 6])))
    room = net.nodes[start].high - net.nodes[start].low < 70
    if shortcut and room and random.integers(2):
        net.steps("deep.stair", STAIRS[one(stairs)], beside=start)
    else:
        net.steps("deep.stair", STAIRS[one(stairs)])
    if random.integers(2):
        net.plus("deep.add", start, net.last)
    net.sum("wide", 5, one(kinds), dilation=(1, 2), padding=(0, 2), stride=(2, 1))
    net.steps("wide.stair", STAIRS[one(stairs)])
    if random.integers(2):
        high, across = net.known[net.last].shape[2:]
        net.sum_pool("average", (high, across), (high, across))
    net.flat("flat")
    net.sum("linear", 7, one(kinds))
    if random.integers(2):
        net.rescaled("linear.scores")
    else:
        net.steps("linear.stair", STAIRS[one(stairs)])
        net.scores("last", 4)
    return net
