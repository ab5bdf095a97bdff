"""The nodes of a frozen network, added one operation of the float network at a time.

A value is either integers (:class:`IntegerFeatures`) or a sum whose stair is still to come
(:class:`PendingSum`). What has no integer form raises ExportError, which names the layer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from softstair.deploy import nodes
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.nodes import ExportError, Requantise, Rounding, Shape, Steps, Sum
from softstair.deploy.requantise import Line, requantise
from softstair.deploy.thresholds import of_stair
from softstair.deploy.values import (
    Affine,
    Function,
    IntegerFeatures,
    PendingSum,
    Rescaled,
    Scaled,
    Value,
    followed,
    line_of,
)
from softstair.nn import StairActivation, StairLayer
from softstair.stair import Stair

AnyNode = TypeVar("AnyNode", bound=nodes.Node)
REUSABLE = (nodes.MaxPool, nodes.SumPool, nodes.Flatten, nodes.Pad)
"""Operations without weights or a stair: their module may run more than once."""
ADVICE = {
    "amax": "Use nn.AdaptiveMaxPool2d(1) instead",
    "getitem": "To drop axes of length 1, use x.flatten(1)",
    "mean": "Use x.mean([2, 3]) instead",
    "pad": "Use nn.ZeroPad2d instead",
}
"""What to do about functions that are not exported."""
MAX_VALUES = 2**16
"""From the lowest to the highest level of a stair."""
MAX_STEPS = 254
"""Thresholds of a stair on a sum; a stair with more is a multiplication."""
INT16 = (-(2**15), 2**15 - 1)
SCORE_BITS, SCORE_SHIFT, ORDER_BITS = 30, 8, 30


@dataclass(frozen=True)
class Choices:
    """What :func:`softstair.freeze` may choose."""

    rounding: Rounding = "once"
    last_bits: int = 8
    """Of the weights of a last layer in float."""
    input_bits: int = 8
    """Of a table of the input."""
    searched: bool = True
    """Whether thresholds and multipliers are searched; without, the network cannot be run."""


class NodeBuilder:
    """Nodes in order of execution, and the shapes of their results."""

    def __init__(self, entry: nodes.Input, choices: Choices) -> None:
        self.choices = choices
        self._nodes: dict[str, nodes.Node] = {}
        self._sizes: dict[str, Shape] = {}
        self._stairs: list[str] = []
        self.has_float_layer = False
        """Whether the last layer was in float."""
        self.doubts: dict[str, ExportError] = {}
        """What training may make impossible, by layer."""
        self._sums: set[str] = set()
        """Nodes that give sums of products, not features."""
        self._read: set[str] = set()
        """Those of them that a stair or the scores read."""
        self._add(entry)
        self.input = IntegerFeatures(entry.name, entry.unit, entry.low, entry.high)

    def shape(self, x: Value) -> Shape:
        """Return the shape of a value, without the batch and before its pending poolings."""
        if isinstance(x, IntegerFeatures):
            return self._sizes[x.node]
        return self._sizes[x.source if x.shortcut is None else x.shortcut.node]

    def pooled_shape(self, x: Value) -> Shape:
        """Return the shape of a value as the float network has it, without the batch."""
        y = torch.zeros(1, *self.shape(x))
        for pool in x.pools if isinstance(x, PendingSum) else ():
            y = pool.run(y)
        return tuple(y.shape[1:])

    def layer(self, name: str, layer: StairLayer, x: IntegerFeatures) -> PendingSum:
        """Add the sum of a quantised layer."""
        weight = layer.weight_stair.integers(layer.weight)
        if weight is None:
            raise ExportError.of(name, "its weights have no common quantum", "Choose another stair")
        quantum = layer.input_quantum
        if quantum is not None and quantum != x.unit:
            raise ExportError.of(
                name, f"it reads quantum {x.unit}, not {quantum}", "Quantise again"
            )
        node = self._weighted_sum(name, layer, weight, x)
        factor = x.unit if quantum is None else 1.0
        bounds = node.bounds(x.low, x.high)
        return PendingSum(node.name, *bounds, (Rescaled(layer, factor),), layer.sum_dimensions)

    def _weighted_sum(self, name: str, layer: Any, weight: Tensor, x: IntegerFeatures) -> Sum:
        """Add the node of a layer's sum."""
        windows: dict[str, Any] = {}
        if isinstance(layer, nn.Conv1d | nn.Conv2d):
            windows = {key: getattr(layer, key) for key in ("stride", "dilation")}
            windows |= {"groups": layer.groups, "padding": zero_padding(name, layer)}
            shape, axes = self._sizes[x.node], weight.dim() - 2
            if len(shape) != axes + 1:
                raise ExportError.of(
                    name, f"its input has shape {shape}", f"Give it {axes + 1} axes"
                )
        elif not isinstance(layer, nn.Linear):
            raise not_supported(name, type(layer).__name__)
        narrow = torch.from_numpy(nodes.narrowest(weight.long().numpy()))
        node = Sum(name, (x.node,), 0, 0, narrow, **windows)
        low, high = node.bounds(x.low, x.high)
        self._sums.add(name)
        return self._add(replace(node, low=int(low.min()), high=int(high.max())))

    def stair(self, name: str, activation: StairActivation, x: Value) -> IntegerFeatures:
        """Add what a stair makes of a value, then the poolings that were pending."""
        stair = activation.stair
        if stair.integers is None or isinstance(stair.quantum, tuple):
            raise ExportError.of(name, "its levels have no common quantum", "Choose another stair")
        if activation.function is not None:
            check_monotone(name, activation.function)
            x = self.apply(name, x, activation.function)
        if isinstance(x, IntegerFeatures):
            x = self._pending(x)
        if x.source in self._read:
            raise ExportError.of(name, f"another stair reads {x.source!r} too", "Use one stair")
        self._read |= {x.source} & self._sums
        names = [*(f"{name}.{number}" for number in range(len(x.pools))), name]
        ends = (stair.integers[0], stair.integers[-1])
        if ends[1] - ends[0] >= MAX_VALUES:
            reason = f"its levels are from {ends[0]:,} to {ends[1]:,} quanta"
            raise ExportError.of(name, reason, f"At most {MAX_VALUES:,} integers are allowed")
        self._levels(names[0], stair, x)
        for before, after, pool in zip(names, names[1:], x.pools, strict=False):
            self._add(replace(pool, name=after, inputs=(before,), low=ends[0], high=ends[1]))
        self._stairs.append(name)
        quantum = stair.quantum
        assert isinstance(quantum, float)
        return IntegerFeatures(name, quantum, *ends)

    def unknown_stair(self, name: str, stair: Stair, shape: Shape) -> IntegerFeatures:
        """Return the features of a stair whose input has no integer form."""
        assert stair.integers is not None
        assert isinstance(stair.quantum, float)
        ends = (stair.integers[0], stair.integers[-1])
        self._add(nodes.Input(name, (), *ends, shape, stair.quantum))
        return IntegerFeatures(name, stair.quantum, *ends)

    def _levels(self, name: str, stair: Stair, x: PendingSum) -> None:
        """Add the node that gives the levels of a stair."""
        line = line_of(x.before)
        if x.shortcut is None and (len(stair) - 1 <= MAX_STEPS or line is None or _gaps(stair)):
            self._steps(name, stair, x)
            return
        if line is None or (x.shortcut is not None and line.is_clamped):
            reason = "its input is added to a shortcut, and is no line of a sum"
            raise ExportError.of(name, reason, "Quantise it before the addition")
        total = followed(line, x.after)
        if total is None or _gaps(stair):
            self._steps(name, stair, self._total(f"{name}.total", stair, x, line))
            return
        quantum, levels = stair.quantum, stair.integers
        assert isinstance(quantum, float)
        assert levels is not None
        total = total.in_levels(quantum, stair.thresholds[0], levels[0])
        ends = (end + 0.5 for end in (total.low, total.high))
        low, high = (min(max(end, levels[0]), levels[-1]) for end in ends)
        beside = self._slope_beside(x, line) / quantum
        self._requantised(name, x, total, beside, math.floor(low), math.floor(high))

    def _slope_beside(self, x: PendingSum, line: Line) -> Tensor:
        """Return what 1 of the shortcut adds to the sum, (C,)."""
        unit = torch.zeros_like(line.slope) + (x.shortcut.unit if x.shortcut else 0.0)
        after = followed(Line(unit, torch.zeros_like(unit)), x.after)
        return unit if after is None else after.slope

    def _steps(self, name: str, stair: Stair, x: PendingSum) -> None:
        """Add the thresholds of a stair."""
        levels, axis = stair.integers, self._channel_axis(x.source)
        assert levels is not None
        if self.choices.searched:
            found = of_stair(stair, x.before, x.least, x.greatest, x.axes)
            table = found.thresholds
            self._negate(x, found.decreasing)
        else:
            largest = torch.where(-x.least > x.greatest, x.least, x.greatest + 1)
            table = largest[:, None].expand(-1, len(levels) - 1).contiguous()
        source, channels = self._expanded(name, x)
        table = table.clamp(max=nodes.INT32_LIMIT - 1).int()[channels]
        self._add(Steps(name, (source,), levels[0], levels[-1], table, levels, axis))

    def _requantised(
        self, name: str, x: PendingSum, line: Line, beside: Tensor, low: int, high: int
    ) -> None:
        """Add the multiplication of a sum, and of its shortcut, that gives levels."""
        least, greatest = x.least, x.greatest
        if isinstance(self._nodes[x.source], Sum):
            falling = line.slope < 0
            self._negate(x, falling)
            line = replace(line, slope=line.slope.abs())
            least, greatest = (
                torch.where(falling, -b, a) for a, b in ((least, greatest), (greatest, least))
            )
        axis, (source, channels) = self._channel_axis(x.source), self._expanded(name, x)
        line = replace(line, slope=line.slope[channels], offset=line.offset[channels])
        inputs = (source,) if x.shortcut is None else (source, x.shortcut.node)
        empty = torch.zeros(len(line.slope), dtype=torch.int32)
        numbers: Any = [empty] * 4
        facts: Any = {"axis": axis, "rounding": self.choices.rounding}
        node = Requantise(name, inputs, low, high, *numbers, **facts)
        if self.choices.searched:
            reach = 0 if x.shortcut is None else max(-x.shortcut.low, x.shortcut.high)
            second = None if x.shortcut is None else beside[channels]
            try:
                node = requantise(node, line, least[channels], greatest[channels], second, reach)
            except ArithmeticError as error:
                raise ExportError.of(name, f"{error}", "Train again") from None
        elif x.shortcut is not None:
            node = replace(node, beside=empty)
        self._add(node)

    def _total(self, name: str, stair: Stair, x: PendingSum, line: Line) -> PendingSum:
        """Add a sum and its shortcut as integers of 16 bits, to which a stair can be applied."""
        assert x.shortcut is not None
        ends = [line.slope * end + line.offset for end in (x.least, x.greatest)]
        more = [x.shortcut.unit * end for end in (x.shortcut.low, x.shortcut.high)]
        reach = max(float(end.abs().max()) for end in ends) + max(map(abs, more))
        if not x.after:  # beyond its thresholds a stair changes no more
            known = max(abs(stair.thresholds[0]), abs(stair.thresholds[-1])) * 1.25
            reach = min(reach, max(known, x.shortcut.unit))
        unit = max(reach, 1e-30) / (INT16[1] - 1)
        # Rounded down, so that a threshold at 0 is where it was.
        whole = Line(line.slope / unit, line.offset / unit - 0.5)
        beside = torch.full_like(line.slope, x.shortcut.unit / unit)
        self._requantised(name, x, whole, beside, *INT16)
        channels = self._sizes[name][self._channel_axis(name) - 1]
        low, high = (torch.full((channels,), end) for end in INT16)
        functions: tuple[Function, ...] = (Scaled(unit, channels), *x.after)
        return PendingSum(name, low, high, functions, len(self._sizes[name]) - 1)

    def _expanded(self, name: str, x: PendingSum) -> tuple[str, Tensor]:
        """Return the node of a sum, repeated where its shortcut is larger, and its channels."""
        shape, own, axis = self.shape(x), self._sizes[x.source], self._channel_axis(x.source)
        channels = torch.arange(shape[axis - 1]) % len(x.least)  # one may be repeated
        if shape == own:
            return x.source, channels
        source = self._nodes[x.source]
        node = nodes.Expand(f"{name}.expanded", (x.source,), source.low, source.high, shape)
        return self._add(node).name, channels

    def _negate(self, x: PendingSum, channels: Tensor) -> None:
        """Negate the weights of the channels in which a function decreases."""
        if not bool(channels.any()):
            return
        source = self._nodes[x.source]
        if not isinstance(source, Sum):
            raise ExportError.of(x.source, "a function of it decreases", "Put it after the weights")
        sign = torch.where(channels, -1, 1).reshape(-1, *[1] * (source.weight.dim() - 1))
        weight = torch.from_numpy(nodes.narrowest((source.weight.long() * sign).numpy()))
        least = torch.where(channels, -x.greatest, x.least)
        greatest = torch.where(channels, -x.least, x.greatest)
        ends: Any = {"low": int(least.min()), "high": int(greatest.max())}
        self._nodes[x.source] = replace(source, weight=weight, **ends)

    def apply(self, name: str, x: Value, function: Callable[[Tensor], Tensor]) -> PendingSum:
        """Apply a normalisation or an activation that is kept."""
        if isinstance(function, nn.modules.batchnorm._BatchNorm):
            if isinstance(x, IntegerFeatures):
                raise ExportError.of(name, "no weights precede it", "Put it after the weights")
            self._check_norm(name, x, function)
        x = self._pending(x) if isinstance(x, IntegerFeatures) else x
        if x.shortcut is None:
            return replace(x, before=(*x.before, function))
        return replace(x, after=(*x.after, function))

    def _pending(self, x: IntegerFeatures) -> PendingSum:
        """Return features as a sum to which functions are applied."""
        shape = self._sizes[x.node]
        least, greatest = (torch.full((shape[0],), end) for end in (x.low, x.high))
        functions = (Scaled(x.unit, shape[0]),)
        return PendingSum(x.node, least, greatest, functions, len(shape) - 1)

    def _check_norm(self, name: str, x: PendingSum, norm: Any) -> None:
        if norm.running_mean is None:
            raise ExportError.of(name, "it has no running statistics", "Set track_running_stats")
        axis = self._channel_axis(x.source)
        if axis != 1:
            raise ExportError.of(name, f"its channels are on axis {axis}", "Flatten before it")
        if self.shape(x)[0] != self._sizes[x.source][0]:
            raise ExportError.of(name, "its channels were broadcast", "Put it before the addition")
        if x.pools and norm.weight is not None:
            error = ExportError.of(
                name, "negative weights follow a pooling", "Pool after the stair"
            )
            if bool((norm.weight < 0).any()):
                raise error
            self.doubts[name] = error

    def add(self, name: str, a: Value, b: Value) -> Value:
        """Add two features, or a shortcut to a sum."""
        if isinstance(a, IntegerFeatures) and isinstance(b, IntegerFeatures):
            if a.unit == b.unit:
                return self._add_features(name, a, b)
            a = self._pending(a)
        if isinstance(a, PendingSum) and isinstance(b, PendingSum):
            if not self._is_features(a) and not self._is_features(b):
                advice = "Quantise the model with `sums`"
                raise ExportError.of(name, "it adds two unquantised sums", advice)
            a, b = (b, a) if self._is_features(a) else (a, b)
            b = self.integers(name, b)
        pending, shortcut = (a, b) if isinstance(a, PendingSum) else (b, a)
        assert isinstance(pending, PendingSum)
        assert isinstance(shortcut, IntegerFeatures)
        if pending.pools:
            raise ExportError.of(name, "its sum is pooled", "Quantise it before")
        if pending.shortcut is not None:
            pending = self._pending(self.integers(name, pending))
        shape = self._broadcast(name, pending, shortcut)
        return replace(pending, shortcut=self._expand(f"{name}.shortcut", shortcut, shape))

    def _add_features(self, name: str, a: IntegerFeatures, b: IntegerFeatures) -> IntegerFeatures:
        shape = self._broadcast(name, a, b)
        a, b = self._expand(f"{name}.left", a, shape), self._expand(f"{name}.right", b, shape)
        node = self._add(nodes.Add(name, (a.node, b.node), a.low + b.low, a.high + b.high))
        return IntegerFeatures(node.name, a.unit, node.low, node.high)

    def _is_features(self, x: PendingSum) -> bool:
        """Return whether a value is a sum of features, which a byte can stand for."""
        return x.source not in self._sums

    def integers(self, name: str, x: Value) -> IntegerFeatures:
        """Return integers: sums of features with different quanta become bytes."""
        if isinstance(x, IntegerFeatures):
            return x
        if not self._is_features(x) or x.after or len(x.before) > 1:
            advice = "Add an activation before it, or quantise the model with `sums`"
            raise ExportError.of(name, f"its input, {x.source!r}, is not quantised", advice)
        line, other = line_of(x.before), x.shortcut
        assert line is not None
        scale = float(line.slope[0])
        ends = [scale * int(x.least[0]), scale * int(x.greatest[0])]
        if other is not None:
            ends = [ends[0] + other.unit * other.low, ends[1] + other.unit * other.high]
        unit, low, high = byte_range(*ends)
        beside = self._slope_beside(x, line) / unit
        node = f"{name}.bytes"
        whole = Line(line.slope / unit, line.offset / unit)
        self._requantised(self._unused(node), x, whole, beside, low, high)
        return IntegerFeatures(next(reversed(self._nodes)), unit, low, high)

    def _broadcast(self, name: str, a: Value, b: Value) -> Shape:
        first, second = self.shape(a), self.shape(b)
        pairs = list(zip(first, second, strict=False))
        if len(first) != len(second) or any(m != n and 1 not in (m, n) for m, n in pairs):
            raise ExportError.of(name, f"it adds shapes {first} and {second}", "Use one shape")
        return tuple(max(pair) for pair in pairs)

    def _expand(self, name: str, x: IntegerFeatures, shape: Shape) -> IntegerFeatures:
        if self._sizes[x.node] == shape:
            return x
        node = self._add(nodes.Expand(name, (x.node,), x.low, x.high, shape))
        return replace(x, node=node.name)

    def max_pool(self, name: str, module: Any, axes: int, x: Value) -> Value:
        """Add a max-pooling over so many axes, or keep it pending behind a sum."""
        windows = pooling_windows(name, module, axes, self.pooled_shape(x))
        dilated = window(getattr(module, "dilation", 1), axes) != (1,) * axes
        if module.return_indices or getattr(module, "ceil_mode", False) or dilated:
            raise ExportError.of(name, "it pools with return_indices, dilation or ceil_mode")
        if isinstance(x, IntegerFeatures):
            node = self._add(nodes.MaxPool(name, (x.node,), x.low, x.high, *windows))
            return replace(x, node=node.name)
        if self._channel_axis(x.source) != 1:
            raise ExportError.of(name, "it pools over the channels", "Pool after the stair")
        return replace(x, pools=(*x.pools, nodes.MaxPool(name, (), 0, 0, *windows)))

    def average(self, name: str, module: Any, axes: int, x: IntegerFeatures) -> IntegerFeatures:
        """Add the sum of each window; the average is that sum in a smaller unit."""
        windows = pooling_windows(name, module, axes, self.pooled_shape(x))
        if getattr(module, "ceil_mode", False):
            raise ExportError.of(name, "it averages with ceil_mode", "Remove it")
        kernel, _, padding = windows
        if any(padding) and not module.count_include_pad:
            reason = "its windows at the border average fewer features"
            raise ExportError.of(name, reason, "Set count_include_pad=True")
        area = math.prod(kernel)
        low, high = area * x.low, area * x.high
        if any(padding):
            low, high = min(low, 0), max(high, 0)
        node = self._add(nodes.SumPool(name, (x.node,), low, high, *windows))
        unit = x.unit / (getattr(module, "divisor_override", None) or area)
        return IntegerFeatures(node.name, unit, low, high)

    def concatenate(self, name: str, parts: list[IntegerFeatures], axis: int) -> IntegerFeatures:
        """Add features side by side; with different quanta they become bytes of one."""
        axis %= 1 + len(self._sizes[parts[0].node])
        if axis == 0:
            raise not_supported(name, "a concatenation of examples")
        if len({x.unit for x in parts}) > 1:
            ends = [(x.unit * x.low, x.unit * x.high) for x in parts]
            unit, low, high = byte_range(min(a for a, _ in ends), max(b for _, b in ends))
            parts = [self._in_unit(name, x, unit, low, high) for x in parts]
        low, high = min(x.low for x in parts), max(x.high for x in parts)
        node = self._add(nodes.Concat(name, tuple(x.node for x in parts), low, high, axis))
        return IntegerFeatures(node.name, parts[0].unit, low, high)

    def _in_unit(
        self, name: str, x: IntegerFeatures, unit: float, low: int, high: int
    ) -> IntegerFeatures:
        """Return features in another unit, rounded."""
        if x.unit == unit:
            return x
        pending = self._pending(x)
        line, node = line_of(pending.before), self._unused(f"{name}.bytes")
        assert line is not None
        whole = Line(line.slope / unit, line.offset / unit)
        self._requantised(node, pending, whole, torch.zeros_like(line.slope), low, high)
        return IntegerFeatures(node, unit, low, high)

    def pad(self, name: str, padding: Shape, x: IntegerFeatures) -> IntegerFeatures:
        """Add zeros around features."""
        if min(padding) < 0:
            raise ExportError.of(name, "it crops (its padding is negative)", "Slice before it")
        low, high = min(x.low, 0), max(x.high, 0)
        node = self._add(nodes.Pad(name, (x.node,), low, high, padding))
        return IntegerFeatures(node.name, x.unit, low, high)

    def mean(self, name: str, x: IntegerFeatures, axes: Sequence[int]) -> IntegerFeatures:
        """Add the sum over all spatial axes, which keep length 1."""
        count = len(self._sizes[x.node]) - 1
        if count not in (1, 2) or sorted(axis % (count + 2) for axis in axes) != [2, 3][:count]:
            raise not_supported(name, f"a mean over axes {axes}", "mean")
        return self.average(f"{name}.sums", nn.AdaptiveAvgPool2d(1), count, x)

    def flatten(self, name: str, x: Value) -> Value:
        """Add a flattening of all axes but the batch; of a sum only if its axes have length 1."""
        if isinstance(x, IntegerFeatures):
            return replace(x, node=self._add(nodes.Flatten(name, (x.node,), x.low, x.high)).name)
        shape = self.shape(x)
        if x.pools or x.shortcut or len(x.before) > 1 or math.prod(shape) > len(x.least):
            return self.flatten(name, self.integers(name, x))
        source = self._nodes[x.source]
        node = self._add(nodes.Flatten(name, (x.source,), source.low, source.high))
        self._sums.add(node.name)
        return replace(x, source=node.name)

    def last_layer(self, name: str, module: Any, x: IntegerFeatures) -> PendingSum:
        """Add the sum of a last layer in float, with integer weights."""
        self.has_float_layer = True
        reach = 2 ** (self.choices.last_bits - 1) - 1
        weight = module.weight.detach().double()
        largest = weight.flatten(1).abs().amax(1).clamp(min=1e-30)
        # As many levels as sums in 32 bits allow.
        total = weight.flatten(1).abs().sum(1) / largest * max(-x.low, x.high, 1)
        reach = min(reach, int((2.0 ** (SCORE_BITS - 1) / total.clamp(min=1)).min()))
        quanta = largest / max(reach, 1)
        levels = (weight / quanta.reshape(-1, *[1] * (weight.dim() - 1))).round()
        node = self._weighted_sum(name, module, levels, x)
        bias = torch.zeros_like(quanta) if module.bias is None else module.bias.detach().double()
        scale = Affine(quanta * x.unit, bias)
        return PendingSum(name, *node.bounds(x.low, x.high), (scale,), weight.dim() - 2)

    def scores(self, x: Value) -> str:
        """Add the scores of a network, and return their name."""
        x = self._pending(x) if isinstance(x, IntegerFeatures) else x
        line = line_of(x.before)
        if line is None or line.is_clamped or x.shortcut or x.pools:
            raise ExportError("net must end in a linear or quantised layer, but it does not.")
        if x.source in self._read:
            raise ExportError.of(x.source, "a stair reads it", "Give the stair its own weights")
        self._read |= {x.source} & self._sums
        return self._add(self._scores(x, line)).name

    def _scores(self, x: PendingSum, line: Line) -> nodes.Scores:
        largest = torch.maximum(x.least.abs(), x.greatest.abs()).double()
        # Where the weights are 0, or as good as 0, the unit is one that can hold the bias.
        slope = torch.where(line.slope == 0, 2.0**-100, line.slope)
        is_constant = (line.offset / slope).abs() > 2.0**SCORE_BITS
        slope = torch.where(is_constant, line.offset.abs() / 2.0 ** (SCORE_BITS - 2), slope)
        bias = line.offset / slope
        room = (2.0**SCORE_BITS / (largest + bias.abs()).clamp(min=1)).min()
        shift = max(0, min(SCORE_SHIFT, math.floor(math.log2(float(room)))))
        shift = shift if bool(bias.any()) else 0
        scale, whole = slope / 2**shift, (bias * 2**shift).round()
        order = (scale / scale.abs().max() * 2.0**ORDER_BITS).round()
        if bool((scale == scale[0]).all()):
            order = torch.ones_like(order)
        low = int(((x.least << shift) + whole.long()).min())
        high = int(((x.greatest << shift) + whole.long()).max())
        facts = (whole.int(), scale, order.int(), shift, self._channel_axis(x.source))
        return nodes.Scores(f"{x.source}.scores", (x.source,), low, high, *facts)

    def network(self, last: str, classes: Sequence[str], outputs: str) -> FrozenNetwork:
        """Return the network of the nodes that node ``last`` depends on."""
        needed = {"input", last}
        for node in reversed(self._nodes.values()):
            if node.name in needed:
                needed.update(node.inputs)
        kept = [node for name, node in self._nodes.items() if name in needed and name != last]
        kept.append(self._nodes[last])
        sizes = {node.name: self._sizes[node.name] for node in kept}
        stairs = tuple(name for name in self._stairs if name in needed)
        return FrozenNetwork(kept, sizes, stairs, classes, outputs)

    def _channel_axis(self, name: str) -> int:
        """Return the axis of a node's channels; the batch is axis 0."""
        node = self._nodes[name]
        if isinstance(node, nodes.Flatten):
            return 1
        is_linear = isinstance(node, Sum) and node.weight.dim() == 2
        return len(self._sizes[name]) if is_linear else 1

    def _unused(self, name: str) -> str:
        names = (name, *(f"{name} ({number})" for number in range(2, len(self._nodes) + 3)))
        return next(name for name in names if name not in self._nodes)

    def _add(self, node: AnyNode) -> AnyNode:
        if node.name in self._nodes:
            if not isinstance(node, REUSABLE):
                raise ExportError.of(node.name, "it runs more than once", "Use one module per call")
            node = replace(node, name=self._unused(node.name))
        if max(abs(node.low), abs(node.high)) >= nodes.INT32_LIMIT:
            raise ExportError.of(node.name, "its sums do not fit into 32 bits")
        self._nodes[node.name] = node
        if isinstance(node, nodes.Input):
            self._sizes[node.name] = node.shape
        else:
            # A batch of no examples has a shape, and costs nothing.
            empty = [torch.zeros(0, *self._sizes[x], dtype=torch.int32) for x in node.inputs]
            try:
                self._sizes[node.name] = tuple(node.run(*empty).shape[1:])
            except RuntimeError as error:
                given = " and ".join(str(self._sizes[x]) for x in node.inputs)
                reason = f"it cannot take features of shape {given}"
                raise ExportError.of(node.name, reason, "Correct the shape of the input") from error
        return node


def byte_range(low: float, high: float) -> tuple[float, int, int]:
    """Return a unit, and the least and the greatest of the integers of 8 bits for a range."""
    if low >= 0:
        return max(high, 1e-30) / 255, 0, 255
    return max(-low / 128, high / 127), -128, 127


def _gaps(stair: Stair) -> bool:
    """Return whether a stair is other than equal steps, one level each."""
    levels, quantum = np.array(stair.integers), stair.quantum
    steps = np.diff(np.array(stair.thresholds))
    even = bool(np.allclose(steps, quantum, rtol=1e-6, atol=0))
    return not even or not bool((np.diff(levels) == 1).all())


def check_monotone(name: str, function: nn.Module) -> None:
    """Raise ExportError if an activation that is kept before a stair decreases somewhere."""
    if not never_decreases(function):
        reason = f"it keeps {type(function).__name__}, which decreases somewhere"
        advice = 'Use ReLU or Tanh, or a stair in its place: quantise(…, activation="replace")'
        raise ExportError.of(name, reason, advice)


@torch.no_grad()
def never_decreases(activation: nn.Module) -> bool:
    """Return whether an activation never decreases, in any channel."""
    channels = sum(parameter.numel() for parameter in activation.parameters())
    x = torch.linspace(-64, 64, 2**14)[:, None].expand(-1, max(channels, 1))
    return not bool((activation.eval()(x).diff(dim=0) < 0).any())


def not_supported(name: str, kind: str, function: str = "") -> ExportError:
    """Return the error for an operation, or a use of it, that is not exported."""
    advice = ADVICE.get(function or kind, "Remove or replace it")
    return ExportError.of(name, f"{kind} is not supported", advice)


def window(size: Any, axes: int) -> Shape:
    """Return a size along each axis."""
    return (size,) * axes if isinstance(size, int) else tuple(map(int, size))


def zero_padding(name: str, layer: nn.Conv1d | nn.Conv2d) -> Shape:
    """Return the zeros before and after each axis of a convolution's input."""
    # Last axis first, before and after.
    padding = layer._reversed_padding_repeated_twice[::-1]
    if layer.padding_mode != "zeros" or padding[::2] != padding[1::2]:
        reason = f"it pads with {layer.padding_mode!r} ({layer.padding!r})"
        raise ExportError.of(name, reason, "Pad by as many zeros on both sides")
    return tuple(padding[::2])


def pooling_windows(name: str, module: Any, axes: int, shape: Shape) -> tuple[Shape, Shape, Shape]:
    """Return the kernel, stride and padding of a pooling over features of that shape."""
    if len(shape) not in (axes + 1, 2):  # for PyTorch, (H, W) is one image per channel
        raise ExportError.of(name, f"it pools features of shape {shape}", "Give it (C, H, W)")
    if not hasattr(module, "output_size"):
        windows = (module.kernel_size, module.stride, module.padding)
        kernel, stride, padding = (window(size, axes) for size in windows)
        return kernel, stride, padding
    sizes, outputs = shape[-axes:], module.output_size
    outputs = (outputs,) * axes if isinstance(outputs, int) else outputs
    outputs = [output or size for output, size in zip(outputs, sizes, strict=True)]
    if any(size % output for size, output in zip(sizes, outputs, strict=True)):
        reason = f"its windows over {sizes} differ in size"
        raise ExportError.of(name, reason, "Choose an output size that divides it")
    kernel = tuple(size // output for size, output in zip(sizes, outputs, strict=True))
    return kernel, kernel, (0,) * axes
