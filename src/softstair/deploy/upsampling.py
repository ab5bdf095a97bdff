"""Transposed convolutions as convolutions whose outputs are the phases of a larger image.

Position s·q + r of the result, of stride s, is the sum of the inputs q + t times the weights k with
s·t + d·k = r + padding. So phase r is a convolution with the weights of some k, and a pixel shuffle
puts the phases side by side. Where a phase has no weight for an offset, it is 0.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from softstair.deploy import nodes
from softstair.deploy.modules import window
from softstair.deploy.node_list import NodeList
from softstair.deploy.nodes import ExportError, Shape, Sum, narrow
from softstair.deploy.thresholds import Function
from softstair.deploy.values import IntegerFeatures, PendingSum, Value


class UpsamplingNodes(NodeList):
    """The nodes of transposed convolutions, pixel shuffles and linear interpolations."""

    def __init__(self, entry: nodes.Input) -> None:
        super().__init__(entry)
        self._sums: set[str] = set()
        """Nodes that give sums of products, not features."""
        self._read: set[str] = set()
        """Those of them that a stair or the scores read."""

    def _transposed(
        self, name: str, layer: Any, weight: Tensor, function: Function, x: IntegerFeatures
    ) -> PendingSum:
        """Add a transposed convolution: sums of its phases, put side by side later."""
        before, axes = self.sizes[x.node], weight.dim() - 2
        shape = tuple(layer(torch.zeros(1, *before)).shape[1:])
        phases = phases_of(name, layer, weight, before[1:], shape[1:])
        if phases.repeats > 1:
            places = [torch.arange(n) for n in before]
            places[0] = places[0].repeat(phases.repeats)
            x = self.select(f"{name}.repeated", x, places)
        padding = tuple(n for n, _ in phases.padding)
        if any(n != m for n, m in phases.padding):
            around = tuple(n for ends in reversed(phases.padding) for n in ends)
            x, padding = self.pad(f"{name}.padded", around, x), (0,) * axes
        windows: Any = {"padding": padding, "stride": (1,) * axes, "dilation": (1,) * axes}
        windows |= {"groups": phases.groups}
        node = Sum(name, (x.node,), 0, 0, narrow(phases.weight), **windows)
        ends = node.bounds(x.low, x.high)
        self.add_node(replace(node, low=int(ends[0].min()), high=int(ends[1].max())))
        self._sums.add(name)
        least, greatest = (end.reshape(-1, shape[0]) for end in ends)
        total = PendingSum(name, least.amin(0), greatest.amax(0), (function,), axes)
        if math.prod(phases.factor) == 1:
            return total
        shuffle = nodes.PixelShuffle(f"{name}.shuffled", (), 0, 0, phases.factor)
        larger = shuffle.shape(self.sizes[name])
        cut = [torch.arange(n).int() for n in shape]
        crop = nodes.Select(f"{name}.cut", (), 0, 0, *cut)
        return replace(total, pools=(shuffle,) if larger == shape else (shuffle, crop))

    def pixel_shuffle(self, name: str, module: Any, x: Value) -> Value:
        """Add a pixel shuffle, or keep it pending behind a sum."""
        factor = (module.upscale_factor,) * 2
        node = nodes.PixelShuffle(name, (), 0, 0, factor, channels_first=True)
        if isinstance(x, PendingSum):
            return replace(x, pools=(*x.pools, node))
        ends: Any = {"low": x.low, "high": x.high}
        return replace(x, node=self.add_node(replace(node, inputs=(x.node,), **ends)).name)

    def _shuffled(self, x: PendingSum) -> PendingSum:
        """Return a sum with its pending pixel shuffles."""
        if not x.pools or any(isinstance(pool, nodes.MaxPool) for pool in x.pools):
            return x
        node = self.nodes[x.source]
        for pool in x.pools:
            ends: Any = {"low": node.low, "high": node.high, "inputs": (node.name,)}
            node = self.add_node(replace(pool, name=self.unused(pool.name), **ends))
        if len(x.least) != self.sizes[node.name][0]:
            raise ExportError.of(x.pools[0].name, "it shuffles sums", "Quantise them before it")
        self._sums.add(node.name)
        self._read |= {x.source} & self._sums
        return replace(x, source=node.name, pools=())

    def interpolated(self, name: str, x: IntegerFeatures) -> IntegerFeatures:
        """Add a linear interpolation to twice the size: sums of 1, 2, 1 over neighbours of features
        that are repeated, those at the ends once more."""
        channels, *sizes = self.sizes[x.node]
        near = [(torch.arange(-1, 2 * n + 1).clamp(0, 2 * n - 1) // 2) for n in sizes]
        x = self.select(self.unused(f"{name}.repeated"), x, [torch.arange(channels), *near])
        weight, axes = torch.tensor([1, 2, 1]), len(sizes)
        kernel = weight if axes == 1 else weight[:, None] * weight
        area, one, name = 4**axes, (1,) * axes, self.unused(name)
        facts: Any = {"stride": one, "padding": (0,) * axes, "dilation": one, "groups": channels}
        rows = narrow(kernel.expand(channels, 1, *kernel.shape).contiguous())
        self.add_node(Sum(name, (x.node,), area * x.low, area * x.high, rows, **facts))
        return IntegerFeatures(name, x.unit / area, area * x.low, area * x.high)


class Phases(NamedTuple):
    """A convolution with the outputs of all phases, the phase first."""

    weight: Tensor  # (phases · O, I / groups, k, …)
    factor: Shape  # the phases along each axis
    groups: int
    repeats: int  # of the input's channels
    padding: tuple[tuple[int, int], ...]  # before and after each axis


def phases_of(name: str, layer: nn.Module, weight: Tensor, size: Shape, output: Shape) -> Phases:
    """Return the convolution for weights (I, O / groups, k, …) over features of that size, whose
    result has the size ``output``."""
    own = vars(layer)
    if own["padding_mode"] != "zeros":
        raise ExportError.of(name, f"it pads with {own['padding_mode']!r}", "Pad with zeros")
    axes, groups, factor = len(size), own["groups"], window(own["stride"], len(size))
    places, padding = [], []
    for axis in range(axes):
        facts = (window(own[key], axes)[axis] for key in ("padding", "dilation"))
        numbers = (weight.shape[2 + axis], factor[axis], *facts, size[axis], output[axis])
        table, *ends = _taps(*numbers)
        places.append(table)
        padding.append((ends[0], ends[1]))
    for axis, table in enumerate(places):  # a weight 0 at the end stands for none
        at = 2 + 2 * axis
        none = torch.zeros_like(weight.narrow(at, 0, 1))
        weight = torch.cat([weight, none], at).index_select(at, table.flatten())
        weight = weight.unflatten(at, table.shape)
    count = math.prod(factor)
    split = weight.unflatten(0, (groups, -1))  # (g, I/g, O/g, r, t, …)
    order = [3 + 2 * axis for axis in range(axes)] + [0, 2, 1]
    order += [4 + 2 * axis for axis in range(axes)]
    rows = split.permute(order)  # (r, …, g, O/g, I/g, t, …)
    rows = rows.reshape(-1, *rows.shape[axes + 2 :])
    repeats = count if groups > 1 else 1
    return Phases(rows, factor, groups * repeats, repeats, tuple(padding))


def by_output(weight: Tensor, groups: int) -> Tensor:
    """Return weights (I, O / groups, …) as (O, I / groups, …), or the other way round."""
    return weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)


def _taps(
    kernel: int, stride: int, padding: int, dilation: int, size: int, output: int
) -> tuple[Tensor, int, int]:
    """Return the weight of each phase and offset, (stride, offsets), and the zeros before and after
    the input; ``kernel`` stands for none."""
    found: dict[tuple[int, int], int] = {}
    for k in range(kernel):
        for phase in range(stride):
            offset, rest = divmod(phase + padding - dilation * k, stride)
            if rest == 0:
                found[phase, offset] = k
    count = -(-output // stride)
    offsets = [offset for _, offset in found]
    first, last = min(0, *offsets), max(size - count, *offsets)
    table = torch.full((stride, last - first + 1), kernel)
    for (phase, offset), k in found.items():
        table[phase, offset - first] = k
    return table, -first, count + last - size
