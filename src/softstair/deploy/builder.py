"""The nodes of an integer network, added one operation of the float network at a time.

A value is either integers (:class:`IntegerFeatures`) or a sum whose stair is still to come
(:class:`PendingSum`). What has no exact integer form raises ExportError, which names the layer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from softstair.deploy import nodes
from softstair.deploy.nodes import ExportError, IntegerNetwork, Shape, zero_padding
from softstair.deploy.thresholds import (
    IntegerFeatures,
    PendingSum,
    fold,
    sum_values,
    thresholds_of,
)
from softstair.nn import StairActivation, StairLayer
from softstair.stair import Stair

Value = IntegerFeatures | PendingSum
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
MAX_VALUES = 2**16  # from the lowest to the highest level of a stair
MAX_SHORTCUT_VALUES = 256  # each has thresholds of its own


class NodeBuilder:
    """Nodes in order of execution, and the shapes of their results.

    Without ``search_thresholds`` it takes less time, and the network cannot be run.
    """

    search_thresholds = True

    def __init__(self, shape: Shape, zero: int, scale: float, dtype: torch.dtype) -> None:
        self._nodes: dict[str, nodes.Node] = {}
        self._sizes: dict[str, Shape] = {}
        self._stairs: list[str] = []
        self._summed_by_stair: set[str] = set()
        low, high = torch.iinfo(dtype).min - zero, torch.iinfo(dtype).max - zero
        self._add(nodes.Input("input", (), low, high, shape, zero, scale, dtype))
        values = tuple((number / scale,) * 2 for number in range(low, high + 1))
        self.input = IntegerFeatures("input", 1 / scale, low, high, values)

    def shape(self, x: Value) -> Shape:
        """Return the shape of a value, without the batch and before its pending poolings."""
        if isinstance(x, IntegerFeatures):
            return self._sizes[x.node]
        return self._sizes[x.source if x.shortcut is None else x.shortcut.node]

    def pooled_shape(self, x: Value | str) -> Shape:
        """Return the shape of a value as the float network has it, without the batch."""
        if isinstance(x, str):
            return self._sizes[x]
        y = torch.zeros(1, *self.shape(x))
        for pool in x.pools if isinstance(x, PendingSum) else ():
            y = pool.run(y)
        return tuple(y.shape[1:])

    def layer(self, name: str, layer: StairLayer, x: IntegerFeatures) -> PendingSum:
        """Add the sum of a quantised layer."""
        weight = layer.weight_stair.integers(layer.weight)
        if weight is None:
            raise ExportError.of(name, "its weights have no common quantum", "Choose another stair")
        factor = _factor(name, layer, x)
        shape, axes = self._sizes[x.node], layer.sum_dimensions
        if axes and len(shape) != axes + 1:
            raise ExportError.of(name, f"its input has shape {shape}", f"Give it {axes + 1} axes")
        node = self._add(_weighted_sum(name, layer, weight.long(), x))
        if layer.input_quantum is None and max(-node.low, node.high) >= nodes.FLOAT32_EXACT:
            raise ExportError.of(name, "its sums reach 2²⁴ (float32 rounds)", "Use fewer inputs")
        return PendingSum(
            node.name, (lambda sums: layer.rescale(sums.float() * factor),), layer, factor
        )

    def stair(self, name: str, activation: StairActivation, x: Value) -> IntegerFeatures:
        """Add the thresholds of a stair, then the poolings that were pending."""
        stair, levels = activation.stair, activation.stair.integers
        if levels is None or isinstance(stair.quantum, tuple):
            raise ExportError.of(name, "its levels have no common quantum", "Choose another stair")
        if (function := activation.function) is not None:
            x = self._activated(name, function, x)
        if isinstance(x, IntegerFeatures):
            return self._stair_on_integers(name, stair, x)
        if x.source in self._summed_by_stair:
            raise ExportError.of(name, f"another stair reads {x.source!r} too", "Use one stair")
        self._summed_by_stair.add(x.source)
        axis = self._channel_axis(x.source)
        total = self._sum(x.source)
        steps, source = fold(name, activation, x, total, axis, self.search_thresholds)
        self._nodes[x.source] = source
        shape = self.shape(x)
        if shape != self._sizes[x.source]:  # the shortcut is larger than the sum
            expand = nodes.Expand(f"{name}.expanded", (x.source,), source.low, source.high, shape)
            inputs = (self._add(expand).name, *steps.inputs[1:])
            channels = torch.arange(shape[axis - 1]) % len(steps.thresholds)  # one may be repeated
            floats = steps.floats and steps.floats.of_channels(channels)
            table = steps.thresholds[channels]
            steps = replace(steps, inputs=inputs, thresholds=table, floats=floats)
        names = [*(f"{name}.{number}" for number in range(len(x.pools))), name]
        self._add(replace(steps, name=names[0]))
        for before, after, pool in zip(names, names[1:], x.pools, strict=False):
            low, high = steps.low, steps.high
            self._add(replace(pool, name=after, inputs=(before,), low=low, high=high))
        return self._levels(name, stair)

    def _activated(self, name: str, function: nn.Module, x: Value) -> Value:
        """Apply an activation that is kept before a stair; it must never decrease."""
        check_monotone(name, function)
        if isinstance(x, PendingSum) or x.values is None or [*function.parameters()]:
            return self.apply(name, x, function)
        ends = function(torch.tensor(x.values)).tolist()
        return replace(x, values=tuple((low, high) for low, high in ends))

    def _stair_on_integers(self, name: str, stair: Stair, x: IntegerFeatures) -> IntegerFeatures:
        """Add the thresholds of a stair whose input is quantised, such as a sum of features."""
        thresholds, levels = thresholds_of(stair, x), stair.integers or ()
        if thresholds is None:
            reason = "its input is a sum of features whose rounding decides between two levels"
            raise ExportError.of(name, reason, "Choose a quantum that is a power of two")
        table = thresholds.expand(self._sizes[x.node][0], -1).contiguous()
        self._add(nodes.Steps(name, (x.node,), levels[0], levels[-1], table, levels))
        return self._levels(name, stair)

    def _levels(self, name: str, stair: Stair) -> IntegerFeatures:
        """Return the features that a stair gives."""
        self._stairs.append(name)
        levels, quantum = stair.integers, stair.quantum
        assert levels is not None
        assert isinstance(quantum, float)
        if levels[-1] - levels[0] >= MAX_VALUES:
            reason = f"its levels are from {levels[0]:,} to {levels[-1]:,} quanta"
            raise ExportError.of(name, reason, f"At most {MAX_VALUES:,} integers are allowed")
        floats = dict(zip(levels, stair.rounded(torch.float32).levels, strict=True))
        # Integers between two levels do not occur.
        values = tuple((floats.get(n, math.nan),) * 2 for n in range(levels[0], levels[-1] + 1))
        return IntegerFeatures(name, quantum, levels[0], levels[-1], values)

    def unknown_stair(self, name: str, stair: Stair, shape: Shape) -> IntegerFeatures:
        """Return the features of a stair whose input has no integer form."""
        levels = stair.integers or (0, 0)
        self._add(nodes.Input(name, (), levels[0], levels[-1], shape, 0, 1.0))
        return self._levels(name, stair)

    def apply(self, name: str, x: Value, function: Callable[[Tensor], Tensor]) -> PendingSum:
        """Apply a normalisation or a ReLU to a pending sum."""
        if isinstance(x, IntegerFeatures):
            raise ExportError.of(name, "no weights precede it", "Put it after the weights")
        if isinstance(function, nn.modules.batchnorm._BatchNorm):
            self._check_norm(name, x, function)
        if x.shortcut is None:
            return replace(x, before=(*x.before, function), layer=None)
        return replace(x, after=(*x.after, function))

    def _check_norm(self, name: str, x: PendingSum, norm: Any) -> None:
        if norm.running_mean is None:
            raise ExportError.of(name, "it has no running statistics", "Set track_running_stats")
        axis = self._channel_axis(x.source)
        if axis != 1:
            raise ExportError.of(name, f"its channels are on axis {axis}", "Flatten before it")
        if self.shape(x)[0] != self._sizes[x.source][0]:
            raise ExportError.of(name, "its channels were broadcast", "Put it before the addition")
        if x.pools and norm.weight is not None and bool((norm.weight < 0).any()):
            raise ExportError.of(name, "negative weights follow a pooling", "Pool after the stair")

    def add(self, name: str, a: Value, b: Value) -> Value:
        """Add two features, or a shortcut to a pending sum."""
        if isinstance(a, IntegerFeatures) and isinstance(b, IntegerFeatures):
            if a.unit != b.unit:
                raise ExportError.of(name, f"it adds quanta {a.unit}, {b.unit}", "Use one quantum")
            shape = self._broadcast(name, a, b)
            a, b = self._expand(f"{name}.left", a, shape), self._expand(f"{name}.right", b, shape)
            node = self._add(nodes.Add(name, (a.node, b.node), a.low + b.low, a.high + b.high))
            return IntegerFeatures(node.name, a.unit, node.low, node.high, sum_values(a, b))
        if isinstance(a, PendingSum) and isinstance(b, PendingSum):
            advice = "Quantise the model with `sums`"
            raise ExportError.of(name, "it adds two unquantised sums", advice)
        pending, shortcut = (a, b) if isinstance(a, PendingSum) else (b, a)
        assert isinstance(pending, PendingSum)
        assert isinstance(shortcut, IntegerFeatures)
        if pending.shortcut is not None or pending.pools:
            raise ExportError.of(name, "its sum is pooled or has a shortcut", "Quantise it before")
        values = shortcut.values or ()
        if not 0 < len(values) <= MAX_SHORTCUT_VALUES or any(a < b for a, b in values):
            raise ExportError.of(name, "its shortcut has too many values", "Quantise it before")
        shape = self._broadcast(name, pending, shortcut)
        shortcut = self._expand(f"{name}.shortcut", shortcut, shape)
        return replace(pending, shortcut=shortcut, layer=None)

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
        windows = nodes.pooling_windows(name, module, axes, self.pooled_shape(x))
        dilated = nodes.window(getattr(module, "dilation", 1), axes) != (1,) * axes
        if module.return_indices or getattr(module, "ceil_mode", False) or dilated:
            raise ExportError.of(name, "it pools with return_indices, dilation or ceil_mode")
        if isinstance(x, IntegerFeatures):
            node = self._add(nodes.MaxPool(name, (x.node,), x.low, x.high, *windows))
            return replace(x, node=node.name)
        if self._channel_axis(x.source) != 1:
            raise ExportError.of(name, "it pools over the channels", "Pool after the stair")
        pool = nodes.MaxPool(name, (), 0, 0, *windows)
        return replace(x, pools=(*x.pools, pool), layer=None)

    def average(self, name: str, module: Any, axes: int, x: IntegerFeatures) -> IntegerFeatures:
        """Add the sum of each window; the average is that sum in a smaller unit."""
        windows = nodes.pooling_windows(name, module, axes, self.pooled_shape(x))
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
        """Add features side by side."""
        first, axis = parts[0], axis % (1 + len(self._sizes[parts[0].node]))
        if axis == 0:
            raise not_supported(name, "a concatenation of examples")
        quanta = sorted({x.unit for x in parts})
        if len(quanta) > 1:
            reason = f"it concatenates features with the quanta {', '.join(map(str, quanta))}"
            raise ExportError.of(name, reason, "Give the stairs before it the same quantum")
        low, high = min(x.low for x in parts), max(x.high for x in parts)
        node = self._add(nodes.Concat(name, tuple(x.node for x in parts), low, high, axis))
        same = all((x.low, x.values) == (first.low, first.values) for x in parts)
        return IntegerFeatures(node.name, first.unit, low, high, first.values if same else None)

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
        return self.average(name, nn.AdaptiveAvgPool2d(1), count, x)

    def flatten(self, name: str, x: IntegerFeatures) -> IntegerFeatures:
        """Add a flattening of all axes but the batch."""
        return replace(x, node=self._add(nodes.Flatten(name, (x.node,), x.low, x.high)).name)

    def scores(self, name: str, module: Any, x: IntegerFeatures) -> str:
        """Add the last layer in float: a linear one, or a convolution with one window."""
        shape = self._sizes[x.node]
        if isinstance(module, nn.Linear):
            covers = len(shape) == 1
        else:
            covers = module.weight.shape[1:] == shape and not any(zero_padding(name, module))
        if not covers:
            reason = "it is in float, and not a last layer that gives one score for each class"
            raise ExportError.of(name, reason, "Quantise it, or flatten its input")
        if len(shape) > 1:
            x = self.flatten(f"{name}.flat", x)
        bias = None if module.bias is None else module.bias.detach().clone()
        weight = module.weight.detach().flatten(1).clone()
        return self._add(nodes.Scores(name, (x.node,), 0, 0, weight, bias, x.unit)).name

    def feature_scores(self, x: IntegerFeatures) -> str:
        """Add the scores of a network that ends in features, such as their average."""
        if math.frexp(x.unit)[0] != 0.5 or max(-x.low, x.high) >= nodes.FLOAT32_EXACT:
            reason = f"scores with the quantum {x.unit} are rounded"
            raise ExportError.of(x.node, reason, "End in a linear layer, or use a power of two")
        count = self._sizes[x.node][0]
        scale, bias = torch.full((count,), x.unit), torch.zeros(count)
        return self._add(nodes.Rescaled(f"{x.node}.scores", (x.node,), 0, 0, scale, bias)).name

    def rescaled_scores(self, x: PendingSum, layer: StairLayer, *, flat: bool = False) -> str:
        """Add the scores of a last layer with integer weights; flat: without axes of length 1."""
        if x.source in self._summed_by_stair:
            raise ExportError.of(x.source, "a stair reads it", "Give the stair its own weights")
        count = layer.weight.shape[0]
        scale = layer.weight_stair.scale(layer.weight, 0)
        scale = torch.as_tensor(scale * (layer.input_quantum or 1.0), dtype=torch.float32)
        # The factor is a power of two, so the order of the products does not matter.
        scale = (scale * x.factor).expand(count).clone()
        bias = torch.zeros(count) if layer.bias is None else layer.bias.detach().clone()
        source, axis = self._sum(x.source), self._channel_axis(x.source)
        name, ends = source.name, (source.low, source.high)
        if flat:
            if math.prod(self._sizes[name]) > count:
                raise not_supported(name, "a flattened layer with scores for each position")
            axis, name = 1, self._add(nodes.Flatten(f"{name}.flat", (name,), *ends)).name
        node = nodes.Rescaled(f"{source.name}.scores", (name,), 0, 0, scale, bias, axis)
        return self._add(node).name

    def network(self, last: str, head: str = "") -> IntegerNetwork:
        """Return the network of the nodes that node ``last`` depends on."""
        needed = {"input", last}
        for node in reversed(self._nodes.values()):
            if node.name in needed:
                needed.update(node.inputs)
        kept = [node for name, node in self._nodes.items() if name in needed and name != last]
        kept.append(self._nodes[last])
        sizes = {node.name: self._sizes[node.name] for node in kept}
        stairs = tuple(name for name in self._stairs if name in needed)
        return IntegerNetwork(tuple(kept), sizes, stairs, head)

    def _sum(self, name: str) -> nodes.Sum:
        node = self._nodes[name]
        assert isinstance(node, nodes.Sum)
        return node

    def _channel_axis(self, name: str) -> int:
        """Return the axis of a sum's channels; the batch is axis 0."""
        return len(self._sizes[name]) if self._sum(name).weight.dim() == 2 else 1

    def _add(self, node: AnyNode) -> AnyNode:
        if node.name in self._nodes:
            if not isinstance(node, REUSABLE):
                raise ExportError.of(node.name, "it runs more than once", "Use one module per call")
            names = (f"{node.name} ({number})" for number in count(2))
            node = replace(node, name=next(name for name in names if name not in self._nodes))
        if max(abs(node.low), abs(node.high)) >= nodes.INT32_LIMIT:
            raise ExportError.of(node.name, "its sums do not fit into 32 bits")
        self._nodes[node.name] = node
        if isinstance(node, nodes.Input):
            self._sizes[node.name] = node.shape
        else:
            # A batch of no examples has a shape, and costs nothing.
            empty = [torch.zeros(0, *self._sizes[x], dtype=torch.int64) for x in node.inputs]
            try:
                self._sizes[node.name] = tuple(node.run(*empty).shape[1:])
            except RuntimeError as error:
                given = " and ".join(str(self._sizes[x]) for x in node.inputs)
                reason = f"it cannot take features of shape {given}"
                raise ExportError.of(node.name, reason, "Correct the shape of the input") from error
        return node


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


def _factor(name: str, layer: StairLayer, x: IntegerFeatures) -> float:
    """Return what an integer sum is multiplied by before the layer's own scale."""
    quantum = layer.input_quantum
    if quantum is not None and quantum != x.unit:
        raise ExportError.of(name, f"it reads quantum {x.unit}, not {quantum}", "Quantise again")
    if quantum is not None:
        return 1.0
    if math.frexp(x.unit)[0] == 0.5:
        return x.unit  # a power of two: the float sum is exact as well
    raise ExportError.of(
        name,
        f"the quantum of its input, {x.unit}, is not a power of two and was unknown to `quantise`",
        "Leave it in float with `skip`, or use AvgPool2d, as a module, for averages",
    )


def _weighted_sum(name: str, layer: StairLayer, weight: Tensor, x: IntegerFeatures) -> nodes.Sum:
    """Return the node of a layer's sum, with the bounds of each channel."""
    low, high = x.low, x.high
    windows: dict[str, Any] = {}
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        windows = {key: getattr(layer, key) for key in ("stride", "dilation", "groups")}
        windows["padding"] = zero_padding(name, layer)
        if any(windows["padding"]):
            low, high = min(low, 0), max(high, 0)
    elif not isinstance(layer, nn.Linear):
        raise not_supported(name, type(layer).__name__)
    flat = weight.flatten(1)
    above, below = flat.clamp(min=0).sum(1), flat.clamp(max=0).sum(1)
    least, greatest = above * low + below * high, above * high + below * low
    bounds = (int(least.min()), int(greatest.max()))
    return nodes.Sum(name, (x.node,), *bounds, weight, least, greatest, **windows)
