"""The nodes of a frozen network, added one operation of the float network at a time.

A value is either integers (:class:`IntegerFeatures`) or a sum whose stair is still to come
(:class:`PendingSum`). What has no integer form raises ExportError, which names the layer.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from softstair._projections import Projection
from softstair.deploy import nodes
from softstair.deploy.modules import (
    TABLE,
    beyond_padding,
    has_gaps,
    has_table,
    not_supported,
    pooling_windows,
    quantum_and_levels,
    table_of,
    window,
    zero_padding,
)
from softstair.deploy.nodes import (
    Arithmetic,
    ExportError,
    Lookup,
    Requantise,
    Rounding,
    Shape,
    Steps,
    Sum,
    narrow,
)
from softstair.deploy.requantise import Line, added, requantise, unit_of_bytes
from softstair.deploy.thresholds import Function, of_stair
from softstair.deploy.upsampling import UpsamplingNodes, by_output
from softstair.deploy.values import (
    SCORE_BITS,
    IntegerFeatures,
    PendingSum,
    Rescaled,
    Value,
    byte_range,
    followed,
    integer_weights,
    line_of,
    scores_of,
)
from softstair.nn import StairActivation, StairLayer
from softstair.stair import Stair

MAX_VALUES = 2**16
"""From the lowest to the highest level of a stair."""
MAX_STEPS = 254
"""Thresholds of a stair on a sum; a stair with more is a multiplication."""
INT16 = (-(2**15), 2**15 - 1)
BYTE = 255
INT8_LAST_BITS = 23
"""Of the sums of a last layer in INT8: float32 holds them."""


@dataclass(frozen=True)
class Choices:
    """What :func:`softstair.freeze` may choose."""

    rounding: Rounding = "once"
    arithmetic: Arithmetic = "fine"
    last_bits: int = 8
    """Of the weights of a last layer in float."""
    input_bits: int = 8
    """Of a table of the input."""
    outputs: str = "classes"
    """Or values, of which an activation at the end is a part."""
    searched: bool = True
    """Whether thresholds and multipliers are searched; without, the network cannot be run."""


class NodeBuilder(UpsamplingNodes):
    """The nodes of sums, stairs and shortcuts."""

    def __init__(self, entry: nodes.Input, choices: Choices) -> None:
        super().__init__(entry)
        self.choices = choices
        self.float_layers: list[str] = []
        """The last layers that were in float."""
        self.doubts: dict[str, ExportError] = {}
        """What training may make impossible, by layer."""
        self.is_int8 = choices.arithmetic == "int8"
        self.clamped = 0
        """How many weights of -128 became -127."""

    def shape(self, x: Value) -> Shape:
        """Return the shape of a value, without the batch and before its pending poolings."""
        if isinstance(x, IntegerFeatures):
            return self.sizes[x.node]
        return self.sizes[x.source if x.shortcut is None else x.shortcut.node]

    def pooled_shape(self, x: Value) -> Shape:
        """Return the shape of a value as the float network has it, without the batch."""
        y = torch.zeros(1, *self.shape(x))
        for pool in x.pools if isinstance(x, PendingSum) else ():
            y = pool.run(y)
        return tuple(y.shape[1:])

    def layer(self, name: str, layer: StairLayer, x: IntegerFeatures) -> PendingSum:
        """Add the sum of a quantised layer."""
        if isinstance(layer, Projection):
            problem = "its weights are in groups, or its features per token"
            raise ExportError.of(name, problem, "Give it bits without ':'")
        weight = layer.weight_stair.integers(layer.weight)
        if weight is None:
            raise ExportError.of(name, "its weights have no common quantum", "Choose another stair")
        quantum = layer.input_quantum
        if quantum is not None and quantum != x.unit:
            raise ExportError.of(
                name, f"it reads quantum {x.unit}, not {quantum}", "Quantise again"
            )
        function = Rescaled(layer, x.unit if quantum is None else 1.0)
        return self._weighted_sum(name, layer, weight, function, x)

    def last_layer(self, name: str, module: Any, x: IntegerFeatures) -> PendingSum:
        """Add the sum of a last layer in float, with integer weights."""
        self.float_layers.append(name)
        reach, weight = max(-x.low, x.high), module.weight
        is_transposed = isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d)
        if is_transposed:  # outputs first
            weight = by_output(weight, module.groups)
        room = INT8_LAST_BITS if self.is_int8 else SCORE_BITS - 1
        weight, quanta = integer_weights(weight, self.choices.last_bits, reach, room)
        weight = by_output(weight, module.groups) if is_transposed else weight
        bias = torch.zeros_like(quanta) if module.bias is None else module.bias.detach().double()
        return self._weighted_sum(name, module, weight, Line(quanta * x.unit, bias), x)

    def _weighted_sum(
        self, name: str, layer: Any, weight: Tensor, function: Function, x: IntegerFeatures
    ) -> PendingSum:
        """Add the sum of a layer, to which a function is applied next."""
        windows: dict[str, Any] = {}
        if isinstance(layer, nn.ConvTranspose1d | nn.ConvTranspose2d):
            return self._transposed(name, layer, weight, function, x)
        if isinstance(layer, nn.Conv1d | nn.Conv2d):
            windows = {key: getattr(layer, key) for key in ("stride", "dilation", "groups")}
            windows |= {"padding": zero_padding(name, layer)}
        elif not isinstance(layer, nn.Linear):
            raise not_supported(name, type(layer).__name__)
        if self.is_int8 and weight.min() == -128 and weight.max() < 128:
            self.clamped += int((weight == -128).sum())
            weight = weight.clamp(min=-127)
        node = Sum(name, (x.node,), 0, 0, narrow(weight), **windows)
        least, greatest = node.bounds(x.low, x.high)
        self.add_node(replace(node, low=int(least.min()), high=int(greatest.max())))
        self._sums.add(name)
        return PendingSum(name, least, greatest, (function,), weight.dim() - 2)

    def doubled(self, name: str, x: IntegerFeatures) -> IntegerFeatures:
        """Add a linear interpolation to twice the size; what a byte does not hold is rounded."""
        x = self.interpolated(name, x)
        if x.high - min(x.low, 0) <= 255:
            return x
        return self._in_unit(name, self.pending(x), *byte_range(x.unit * x.low, x.unit * x.high))

    def stair(self, name: str, activation: StairActivation, x: Value) -> IntegerFeatures:
        """Add what a stair makes of a value, then the poolings that were pending."""
        stair = activation.stair
        if stair.integers is None or isinstance(stair.quantum, tuple):
            raise ExportError.of(name, "its levels have no common quantum", "Choose another stair")
        function = activation.function
        is_table = function is not None and has_table(name, function)
        if function is not None and not is_table:
            x = self.apply(name, x, function)
        if isinstance(x, IntegerFeatures):
            x = self.pending(x)
        if x.source in self._read:
            raise ExportError.of(name, f"another stair reads {x.source!r} too", "Use one stair")
        self._read |= {x.source} & self._sums
        quantum, levels = quantum_and_levels(stair)
        low, high = levels[0], levels[-1]
        if high - low >= MAX_VALUES:
            reason = f"its levels are from {low:,} to {high:,} quanta"
            raise ExportError.of(name, reason, f"At most {MAX_VALUES:,} integers are allowed")
        # Poolings are exchanged with the stair, or with places in a table: these never decrease.
        names = [f"{name}.{number}" for number in range(len(x.pools) + is_table)] + [name]
        ends: dict[str, Any] = {"low": low, "high": high}
        if function is not None and is_table:
            ends = {"low": 0, "high": TABLE - 1}
            table = self._places(names[0], stair, function, x)
            last = Lookup(name, (names[-2],), low, high, narrow(table))
        else:
            self._levels(names[0], stair, x)
        for before, after, pool in zip(names, names[1:], x.pools, strict=False):
            self.add_node(replace(pool, name=after, inputs=(before,), **ends))
        if is_table:
            self.add_node(last)
        self.stairs.append(name)
        return IntegerFeatures(name, quantum, low, high)

    def _places(self, name: str, stair: Stair, function: nn.Module, x: PendingSum) -> Tensor:
        """Add the place in a table for each sum, and return the levels of the table."""
        line = line_of(x.before)
        total = None if line is None or line.is_clamped else followed(line, x.after)
        if line is None or total is None or total.is_clamped:
            reason = f"the input of {type(function).__name__} is no line of a sum"
            raise ExportError.of(name, reason, "Quantise it before")
        beside = self._slope_beside(x, line)
        reach = beside.abs() * (max(-x.shortcut.low, x.shortcut.high) if x.shortcut else 0)
        sums = [total.slope * end + total.offset for end in (x.least, x.greatest)]
        low, high = (torch.minimum(*sums) - reach).min(), (torch.maximum(*sums) + reach).max()
        unit, first, table = table_of(function, stair, float(low), float(high))
        place = Line(total.slope / unit, total.offset / unit - first)
        self._requantised(name, x, place, beside / unit, 0, TABLE - 1)
        return table

    def sigmoid(self, name: str, x: Value) -> IntegerFeatures:
        """Add a sigmoid at the end of a network, in steps of 1/255."""
        stair = Stair.linear(8, signed=False, quantum=1 / 255, thresholds="midpoint")
        result = self.stair(name, StairActivation(stair, function=nn.Sigmoid()).eval(), x)
        self.stairs.remove(name)  # the trained network has none there
        return result

    def unknown_stair(self, name: str, stair: Stair, shape: Shape) -> IntegerFeatures:
        """Return the features of a stair whose input has no integer form."""
        quantum, levels = quantum_and_levels(stair)
        self.add_node(nodes.Input(name, (), levels[0], levels[-1], shape, quantum))
        return IntegerFeatures(name, quantum, levels[0], levels[-1])

    def _levels(self, name: str, stair: Stair, x: PendingSum) -> None:
        """Add the node that gives the levels of a stair."""
        line = line_of(x.before)
        if x.shortcut is None and (len(stair) - 1 <= MAX_STEPS or line is None or has_gaps(stair)):
            self._steps(name, stair, x)
            return
        if line is None or (x.shortcut is not None and line.is_clamped):
            reason = "its input is added to a shortcut, and is no line of a sum"
            raise ExportError.of(name, reason, "Quantise it before the addition")
        total = followed(line, x.after)
        if total is None or has_gaps(stair):
            self._steps(name, stair, self._total(f"{name}.total", stair, x, line))
            return
        quantum, levels = quantum_and_levels(stair)
        total = total.in_levels(quantum, stair.thresholds[0], levels[0])
        ends = (end + 0.5 for end in (total.low, total.high))
        low, high = (math.floor(min(max(end, levels[0]), levels[-1])) for end in ends)
        self._requantised(name, x, total, self._slope_beside(x, line) / quantum, low, high)

    def _slope_beside(self, x: PendingSum, line: Line) -> Tensor:
        """Return what 1 of the shortcut adds to the sum, (C,)."""
        unit = torch.zeros_like(line.slope) + (x.shortcut.unit if x.shortcut else 0.0)
        after = followed(Line.of(unit), x.after)
        return unit if after is None else after.slope

    def _steps(self, name: str, stair: Stair, x: PendingSum) -> None:
        """Add the thresholds of a stair."""
        (_, levels), axis = quantum_and_levels(stair), self.channel_axis(x.source)
        if self.choices.searched:
            table, decreasing = of_stair(stair, x.before, x.least, x.greatest, x.axes)
            x = self._negated(x, decreasing)
        else:
            largest = torch.where(-x.least > x.greatest, x.least, x.greatest + 1)
            table = largest[:, None].expand(-1, len(levels) - 1).contiguous()
        source, channels = self._expanded(name, x)
        table = table.clamp(max=nodes.INT32_LIMIT - 1).int()[channels]
        self.add_node(Steps(name, (source,), levels[0], levels[-1], table, levels, axis))

    def _requantised(
        self, name: str, x: PendingSum, line: Line, beside: Tensor, low: int, high: int
    ) -> None:
        """Add the multiplication of a sum, and of its shortcut, that gives levels."""
        if self.is_int8 and x.shortcut is not None and high - low <= BYTE:
            self._added(name, x, line, beside, low, high)
            return
        if self.is_int8 and self.choices.rounding == "double" and -BYTE <= low < 0:
            self._moved(name, x, line, beside, low, high)
            return
        least, greatest = x.least, x.greatest
        if isinstance(self.nodes[x.source], Sum):
            falling = line.slope < 0
            self._negated(x, falling)
            line = replace(line, slope=line.slope.abs())
            least, greatest = (
                torch.where(falling, -b, a) for a, b in ((least, greatest), (greatest, least))
            )
        axis, (source, channels) = self.channel_axis(x.source), self._expanded(name, x)
        line = replace(line, slope=line.slope[channels], offset=line.offset[channels])
        inputs = (source,) if x.shortcut is None else (source, x.shortcut.node)
        empty = torch.zeros(len(line.slope), dtype=torch.int32)
        numbers: Any = [empty] * 4
        facts: Any = {"axis": axis, "rounding": self.choices.rounding}
        node = Requantise(name, inputs, low, high, *numbers, **facts)
        if self.choices.searched:
            reach = 0 if x.shortcut is None else max(-x.shortcut.low, x.shortcut.high)
            second = None if x.shortcut is None else beside[channels]
            parts = None
            if self.is_int8 and second is None and high - low <= BYTE:
                parts = self._parts(x.source)[channels]
            ends = (least[channels], greatest[channels])
            try:
                node = requantise(node, line, *ends, second, reach, parts)
            except ArithmeticError as error:
                raise ExportError.of(name, f"{error}", "Train again") from None
        elif x.shortcut is not None:
            node = replace(node, beside=empty, rest=empty.long())
        self.add_node(node)

    def _moved(
        self, name: str, x: PendingSum, line: Line, beside: Tensor, low: int, high: int
    ) -> None:
        """Add levels from 0, and then their move: kernels round negative halves differently."""
        first = self.unused(f"{name}.unsigned")
        line = replace(line, offset=line.offset - low)
        self._requantised(first, x, line, beside, 0, high - low)
        axis = self.channel_axis(x.source)
        one = torch.ones(self.sizes[first][axis - 1], dtype=torch.int32)
        self.add_node(
            Requantise(name, (first,), low, high, one, low * one, one, 0 * one, axis=axis)
        )

    def _parts(self, source: str) -> Tensor:
        """Return by what INT8 weights of a sum can be multiplied, (C,)."""
        node = self.nodes[source]
        if not isinstance(node, Sum):
            return torch.full((self.sizes[source][0],), 127)
        return (127 // node.weight.long().flatten(1).abs().amax(1).clamp(min=1)).clamp(min=1)

    def _added(
        self, name: str, x: PendingSum, line: Line, beside: Tensor, low: int, high: int
    ) -> None:
        """Add a sum as bytes, and their sum with a shortcut."""
        assert x.shortcut is not None
        if bool((beside != beside[0]).any()):
            reason = "a normalisation follows its addition"
            raise ExportError.of(name, reason, "Freeze it with arithmetic='fine'")
        other = float(beside[0])
        reached = [line.slope * end + line.offset for end in (x.least, x.greatest)]
        shares = [other * x.shortcut.low, other * x.shortcut.high]
        least = max(float(torch.minimum(*reached).min()), low - 1 - max(shares))
        greatest = min(float(torch.maximum(*reached).max()), high + 1 - min(shares))
        unit, first = unit_of_bytes(least, greatest, low < 0)
        branch = self.unused(f"{name}.branch")
        bytes_of = Line(line.slope / unit, line.offset / unit)
        self._requantised(
            branch, replace(x, shortcut=None), bytes_of, 0 * beside, first, first + BYTE
        )
        ends = ((first, first + BYTE), (x.shortcut.low, x.shortcut.high))
        axis = self.channel_axis(x.source)
        empty = torch.zeros(self.sizes[branch][axis - 1], dtype=torch.int32)
        rest, inputs = empty.long(), (branch, x.shortcut.node)
        node = Requantise(
            name, inputs, low, high, empty + 1, empty, empty, empty, empty, rest, axis
        )
        try:
            node = added(node, unit, other, *ends) if self.choices.searched else node
        except ArithmeticError as error:
            raise ExportError.of(name, f"{error}", "Freeze it with arithmetic='fine'") from None
        self.add_node(node)

    def average(self, name: str, module: Any, axes: int, x: IntegerFeatures) -> IntegerFeatures:
        """Add an average; in INT8, features of more than 4 bits have averages of 8."""
        y = super().average(name, module, axes, x)
        if not self.is_int8 or x.high - x.low < 16 or y.high - y.low <= BYTE:
            return y
        return self._in_unit(name, self.pending(y), *byte_range(y.low * y.unit, y.high * y.unit))

    def _in_unit(
        self, name: str, x: PendingSum, unit: float, low: int, high: int
    ) -> IntegerFeatures:
        """Return features, and what is added to them, rounded to another unit."""
        line, name = line_of(x.before), self.unused(f"{name}.bytes")
        assert line is not None
        whole = Line(line.slope / unit, line.offset / unit)
        self._requantised(name, x, whole, self._slope_beside(x, line) / unit, low, high)
        return IntegerFeatures(name, unit, low, high)

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
        pending = self.pending(IntegerFeatures(name, unit, *INT16))
        return replace(pending, before=(*pending.before, *x.after))

    def _expanded(self, name: str, x: PendingSum) -> tuple[str, Tensor]:
        """Return the node of a sum, repeated where its shortcut is larger, and its channels."""
        shape, source = self.shape(x), self.nodes[x.source]
        channels = torch.arange(shape[self.channel_axis(x.source) - 1]) % len(x.least)
        features = IntegerFeatures(x.source, 1.0, source.low, source.high)
        return self.expand(f"{name}.expanded", features, shape).node, channels

    def _negated(self, x: PendingSum, channels: Tensor) -> PendingSum:
        """Negate the weights of the channels in which a function decreases, or the features."""
        if not bool(channels.any()):
            return x
        source, sign = self.nodes[x.source], torch.where(channels, -1, 1)
        least = torch.where(channels, -x.greatest, x.least)
        greatest = torch.where(channels, -x.least, x.greatest)
        ends: Any = {"low": int(least.min()), "high": int(greatest.max())}
        if isinstance(source, Sum):
            rows = sign.repeat(len(source.weight) // len(sign))  # of each phase
            weight = narrow(source.weight * rows.reshape(-1, *[1] * (source.weight.dim() - 1)))
            self.nodes[x.source] = replace(source, weight=weight, **ends)
            return x
        axes = len(self.sizes[x.source]) - 1
        if axes not in (1, 2):
            raise ExportError.of(x.source, "a function of it decreases", "Put it after the weights")
        one, none = (1,) * axes, (0,) * axes
        facts: Any = {"stride": one, "padding": none, "dilation": one, "groups": len(sign)}
        weight = narrow(sign.reshape(-1, 1, *one))
        name = self.unused(f"{x.source}.negated")
        self.add_node(Sum(name, (x.source,), weight=weight, **ends, **facts))
        return replace(x, source=name, least=least, greatest=greatest)

    def apply(self, name: str, x: Value, function: Function) -> PendingSum:
        """Apply a normalisation or an activation that is kept."""
        x = self.pending(x) if isinstance(x, IntegerFeatures) else x
        if isinstance(function, nn.modules.batchnorm._BatchNorm):
            self._check_norm(name, x, function)
        if x.shortcut is None:
            return replace(x, before=(*x.before, function))
        return replace(x, after=(*x.after, function))

    def pending(self, x: IntegerFeatures) -> PendingSum:
        """Return features as a sum to which functions are applied."""
        shape = self.sizes[x.node]
        least, greatest = (torch.full((shape[0],), end) for end in (x.low, x.high))
        line = Line.of(torch.full((shape[0],), x.unit, dtype=torch.float64))
        return PendingSum(x.node, least, greatest, (line,), len(shape) - 1)

    def _check_norm(self, name: str, x: PendingSum, norm: Any) -> None:
        if norm.running_mean is None:
            raise ExportError.of(name, "it has no running statistics", "Set track_running_stats")
        axis = self.channel_axis(x.source)
        if axis != 1:
            raise ExportError.of(name, f"its channels are on axis {axis}", "Flatten before it")
        if self.shape(x)[0] != self.sizes[x.source][0]:
            raise ExportError.of(name, "its channels were broadcast", "Put it before the addition")
        if norm.running_mean.shape != x.least.shape:
            raise ExportError.of(name, "its channels were shuffled", "Put it before the shuffle")
        if any(isinstance(pool, nodes.MaxPool) for pool in x.pools) and norm.weight is not None:
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
                return self.add_features(name, a, b)
            a = self.pending(a)
        if isinstance(a, PendingSum) and isinstance(b, PendingSum):
            if not self._is_features(a) and not self._is_features(b):
                advice = "Quantise the model with `sums`"
                raise ExportError.of(name, "it adds two unquantised sums", advice)
            a, b = (b, a) if self._is_features(a) else (a, b)
            b = self.integers(name, b)
        pending, shortcut = (a, b) if isinstance(a, PendingSum) else (b, a)
        assert isinstance(pending, PendingSum)
        assert isinstance(shortcut, IntegerFeatures)
        pending = self._shuffled(pending)
        if pending.pools:
            raise ExportError.of(name, "its sum is pooled", "Quantise it before")
        if pending.shortcut is not None:
            pending = self.pending(self.integers(name, pending))
        shape = torch.broadcast_shapes(self.shape(pending), self.shape(shortcut))
        return replace(pending, shortcut=self.expand(f"{name}.shortcut", shortcut, shape))

    def _is_features(self, x: PendingSum) -> bool:
        """Return whether a value is a sum of features, which a byte can stand for."""
        return x.source not in self._sums

    def integers(self, name: str, x: Value) -> IntegerFeatures:
        """Return integers: sums of features with different quanta become bytes."""
        if isinstance(x, IntegerFeatures):
            return x
        line, other = line_of(x.before), x.shortcut
        if not self._is_features(x) or x.after or line is None or line.is_clamped:
            advice = "Add an activation before it, or quantise the model with `sums`"
            raise ExportError.of(name, f"its input, {x.source!r}, is not quantised", advice)
        values = torch.stack([line.slope * end + line.offset for end in (x.least, x.greatest)])
        ends = [float(values.min()), float(values.max())]
        if other is not None:
            ends = [ends[0] + other.unit * other.low, ends[1] + other.unit * other.high]
        result = self._in_unit(name, x, *byte_range(*ends))
        for pool in x.pools:
            named = replace(pool, name=self.unused(f"{result.node}.pooled"), inputs=(result.node,))
            node = self.add_node(replace(named, low=result.low, high=result.high))
            result = replace(result, node=node.name)
        return result

    def concatenate(self, name: str, parts: list[IntegerFeatures], axis: int) -> IntegerFeatures:
        """Add features side by side; with different quanta they become bytes of one."""
        axis %= 1 + len(self.sizes[parts[0].node])
        if axis == 0:
            raise not_supported(name, "a concatenation of examples")
        if len({x.unit for x in parts}) > 1:
            ends = [(x.unit * x.low, x.unit * x.high) for x in parts]
            entry = byte_range(min(a for a, _ in ends), max(b for _, b in ends))
            parts = [
                x if x.unit == entry[0] else self._in_unit(name, self.pending(x), *entry)
                for x in parts
            ]
        return self.join(name, parts, axis)

    def max_pool(self, name: str, module: Any, axes: int, x: Value) -> Value:
        """Add a max-pooling over so many axes, or keep it pending behind a sum."""
        windows: Any = pooling_windows(name, module, axes, self.pooled_shape(x))
        dilated = window(getattr(module, "dilation", 1), axes) != (1,) * axes
        if module.return_indices or dilated:
            raise ExportError.of(name, "it pools with return_indices or dilation")
        windows = (*windows, beyond_padding(module, windows, self.pooled_shape(x)))
        if isinstance(x, IntegerFeatures):
            node = self.add_node(nodes.MaxPool(name, (x.node,), x.low, x.high, *windows))
            return replace(x, node=node.name)
        if self.channel_axis(x.source) != 1:
            raise ExportError.of(name, "it pools over the channels", "Pool after the stair")
        return replace(x, pools=(*x.pools, nodes.MaxPool(name, (), 0, 0, *windows)))

    def flatten(self, name: str, x: Value) -> Value:
        """Add a flattening of all axes but the batch; of a sum only if its axes have length 1."""
        if isinstance(x, PendingSum):
            is_plain = not x.pools and x.shortcut is None and len(x.before) == 1
            if not is_plain or math.prod(self.shape(x)) > len(x.least):
                x = self.integers(name, x)
        before = x.node if isinstance(x, IntegerFeatures) else x.source
        source = self.nodes[before]
        flat = self.add_node(nodes.Flatten(name, (before,), source.low, source.high)).name
        if isinstance(x, IntegerFeatures):
            return replace(x, node=flat)
        self._sums.add(flat)
        return replace(x, source=flat)

    def scores(self, x: Value) -> str:
        """Add the scores of a network, and return their name."""
        x = self.pending(x) if isinstance(x, IntegerFeatures) else self._shuffled(x)
        line = line_of(x.before)
        if line is None or line.is_clamped or x.shortcut or x.pools:
            raise ExportError("net must end in a linear or quantised layer, but it does not.")
        if x.source in self._read:
            raise ExportError.of(x.source, "a stair reads it", "Give the stair its own weights")
        self._read |= {x.source} & self._sums
        scores = scores_of(x, line, self.channel_axis(x.source))
        return self.add_node(replace(scores, name=self.unused(scores.name))).name
