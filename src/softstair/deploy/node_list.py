"""The nodes of a network that is being frozen: features that are moved, pooled and joined."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from softstair.deploy import nodes
from softstair.deploy.combining import Scale
from softstair.deploy.frozen import FrozenNetwork, mapped
from softstair.deploy.modules import (
    beyond_padding,
    not_supported,
    pooling_windows,
    window_counts,
)
from softstair.deploy.nodes import ExportError, Shape, Sum
from softstair.deploy.values import IntegerFeatures

AnyNode = TypeVar("AnyNode", bound=nodes.Node)
REUSABLE = (nodes.MaxPool, nodes.SumPool, nodes.Flatten, nodes.Pad)
"""Operations without weights or a stair: their module may run more than once."""


class NodeList:
    """Nodes in order of execution, and the shapes of their results."""

    def __init__(self, entry: nodes.Input) -> None:
        self.nodes: dict[str, nodes.Node] = {}
        self.sizes: dict[str, Shape] = {}
        self.stairs: list[str] = []
        self.add_node(entry)
        self.input = IntegerFeatures(entry.name, entry.unit, entry.low, entry.high)

    def add_node(self, node: AnyNode) -> AnyNode:
        """Add a node; one that may run more than once gets a new name if it does."""
        if node.name in self.nodes:
            if not isinstance(node, REUSABLE):
                raise ExportError.of(node.name, "it runs more than once", "Use one module per call")
            node = replace(node, name=self.unused(node.name))
        if max(abs(node.low), abs(node.high)) >= nodes.INT32_LIMIT:
            raise ExportError.of(node.name, "its sums do not fit into 32 bits")
        self.nodes[node.name] = node
        if isinstance(node, nodes.Input):
            self.sizes[node.name] = node.shape
        else:
            # A batch of no examples has a shape, and costs nothing.
            empty = [torch.zeros(0, *self.sizes[x], dtype=torch.int32) for x in node.inputs]
            self.sizes[node.name] = tuple(node.run(*empty).shape[1:])
        return node

    def unused(self, name: str) -> str:
        """Return a name that no node has."""
        names = (name, *(f"{name} ({number})" for number in range(2, len(self.nodes) + 3)))
        return next(name for name in names if name not in self.nodes)

    def channel_axis(self, name: str) -> int:
        """Return the axis of a node's channels; the batch is axis 0."""
        node = self.nodes[name]
        is_linear = isinstance(node, Sum) and node.weight.dim() == 2
        return len(self.sizes[name]) if is_linear else 1

    def network(self, returns: Any, classes: Sequence[str], outputs: str) -> FrozenNetwork:
        """Return the network of the nodes that the named scores depend on.

        Scores follow what they read, which then needs no memory.
        """
        needed = {"input"}
        mapped(returns, needed.add)
        for node in reversed(self.nodes.values()):
            if node.name in needed:
                needed.update(node.inputs)
        own = [node for name, node in self.nodes.items() if name in needed]
        heads = [node for node in own if isinstance(node, nodes.Scores)]
        kept: list[nodes.Node] = []
        for node in (node for node in own if node not in heads):
            kept += [node, *(head for head in heads if head.inputs == (node.name,))]
        sizes = {node.name: self.sizes[node.name] for node in kept}
        stairs = tuple(name for name in self.stairs if name in needed)
        return FrozenNetwork(kept, sizes, stairs, classes, outputs, returns)

    def expand(self, name: str, x: IntegerFeatures, shape: Shape) -> IntegerFeatures:
        """Add a repetition of features along axes of length 1, unless they have the shape."""
        if self.sizes[x.node] == shape:
            return x
        sizes = zip(self.sizes[x.node], shape, strict=True)
        return self.select(name, x, [torch.arange(n) % size for size, n in sizes])

    def select(self, name: str, x: IntegerFeatures, places: Sequence[Tensor]) -> IntegerFeatures:
        """Add features from other places along each axis."""
        node = nodes.Select(name, (x.node,), x.low, x.high, *(part.int() for part in places))
        return replace(x, node=self.add_node(node).name)

    def add_features(self, name: str, a: IntegerFeatures, b: IntegerFeatures) -> IntegerFeatures:
        """Add the sum of two features of one unit."""
        shape = torch.broadcast_shapes(self.sizes[a.node], self.sizes[b.node])
        a, b = self.expand(f"{name}.left", a, shape), self.expand(f"{name}.right", b, shape)
        node = self.add_node(nodes.Add(name, (a.node, b.node), a.low + b.low, a.high + b.high))
        return IntegerFeatures(node.name, a.unit, node.low, node.high)

    def join(self, name: str, parts: list[IntegerFeatures], axis: int) -> IntegerFeatures:
        """Add features of one unit side by side."""
        low, high = min(x.low for x in parts), max(x.high for x in parts)
        node = nodes.Concat(name, tuple(x.node for x in parts), low, high, axis)
        return IntegerFeatures(self.add_node(node).name, parts[0].unit, low, high)

    def pad(self, name: str, padding: Shape, x: IntegerFeatures) -> IntegerFeatures:
        """Add zeros around features."""
        if min(padding) < 0:
            raise ExportError.of(name, "it crops (its padding is negative)", "Slice before it")
        low, high = min(x.low, 0), max(x.high, 0)
        node = self.add_node(nodes.Pad(name, (x.node,), low, high, padding))
        return IntegerFeatures(node.name, x.unit, low, high)

    def average(self, name: str, module: Any, axes: int, x: IntegerFeatures) -> IntegerFeatures:
        """Add the sum of each window; the average is that sum in a smaller unit."""
        shape = self.sizes[x.node]
        windows = pooling_windows(name, module, axes, shape)
        beyond, (kernel, _, padding) = beyond_padding(module, windows, shape), windows
        area, low, high = math.prod(kernel), x.low, x.high
        if any(padding) or beyond:
            low, high = min(low, 0), max(high, 0)
        ends = (area * low, area * high)
        node = self.add_node(nodes.SumPool(name, (x.node,), *ends, *windows, beyond))
        counts = window_counts(module, windows, shape)
        result = IntegerFeatures(node.name, x.unit, node.low, node.high)
        if divisor := getattr(module, "divisor_override", None):
            return replace(result, unit=x.unit / divisor)
        if all(bool((count == count[0]).all()) for count in counts):
            return replace(result, unit=x.unit / math.prod(int(count[0]) for count in counts))
        return self._weighted(name, result, counts)

    def _weighted(self, name: str, x: IntegerFeatures, counts: Sequence[Tensor]) -> IntegerFeatures:
        """Add averages of windows with different numbers of elements, in a common unit."""
        common = [math.lcm(*count.tolist()) for count in counts]
        factor, *more = (all_ // count for all_, count in zip(common, counts, strict=True))
        for columns in more:
            factor = factor[:, None] * columns
        largest, name = int(factor.max()), self.unused(f"{name}.weighted")
        ends = (min(x.low * largest, 0), max(x.high * largest, 0))
        node = self.add_node(Scale(name, (x.node,), *ends, factor[None].int()))
        return IntegerFeatures(node.name, x.unit / math.prod(common), *ends)

    def mean(self, name: str, x: IntegerFeatures, axes: Sequence[int]) -> IntegerFeatures:
        """Add the sum over all spatial axes, which keep length 1."""
        count = len(self.sizes[x.node]) - 1
        if count not in (1, 2) or sorted(axis % (count + 2) for axis in axes) != [2, 3][:count]:
            raise not_supported(name, f"a mean over axes {axes}", "mean")
        return self.average(f"{name}.sums", nn.AdaptiveAvgPool2d(1), count, x)
