"""Operators of a .tflite file over features in int8, and over integers in float32."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from softstair.deploy import nodes
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.int8_roundings import Integers, Labels
from softstair.deploy.nodes import ExportError, Shape
from softstair.deploy.tflite_graph import Array, TfliteGraph

BYTE = 255
MOST_JOINED = 8  # inputs of a concatenation; TensorFlow Lite Micro takes 10


@dataclass(frozen=True)
class Stored:
    """Features in a tensor of int8, (1, H, W, C): level + zero, in a unit of ``scale``."""

    tensor: int
    shape: Shape
    low: int
    high: int
    zero: int
    scale: float = 1.0
    flat: Shape = ()  # (C, H, W) before a flattening of more than one position


@dataclass(frozen=True)
class Product:
    """A convolution of features ``source``: a sum, the sum of a window, or features times 1."""

    source: str
    weight: Integers  # (O, I/groups, kh, kw)
    stride: Shape = (1, 1)
    padding: Shape = (0, 0)
    dilation: Shape = (1, 1)
    groups: int = 1


def two(size: Sequence[int], fill: int) -> Shape:
    """Return a size along two axes: those of sequences have one."""
    return (fill, *size)[-2:]


def ones(source: str, channels: int, kernel: Shape = (1, 1), **windows: Any) -> Product:
    """Return the sum of each window."""
    weight = np.ones((channels, 1, *kernel), np.int64)
    return Product(source, weight, groups=channels, **windows)


def product_of(network: FrozenNetwork, name: str) -> Product:
    """Return the convolution whose results a node has; of features it is a product with 1."""
    node = network.node(name)
    if isinstance(node, nodes.Flatten) and isinstance(network.node(node.inputs[0]), nodes.Sum):
        return product_of(network, node.inputs[0])
    if isinstance(node, nodes.SumPool):
        sizes = (two(node.kernel, 1), two(node.stride, 1), two(node.padding, 0))
        windows = dict(zip(("kernel", "stride", "padding"), sizes, strict=True))
        return ones(node.inputs[0], network.sizes[name][0], **windows)
    if not isinstance(node, nodes.Sum):
        return ones(name, network.sizes[name][0])
    weight = node.weight.long().numpy()
    if weight.ndim == 2:
        if len(network.sizes[name]) > 1:
            raise ExportError.of(name, "it is linear over the last of several axes", "Flatten it")
        return Product(node.inputs[0], weight[:, :, None, None])
    weight = weight.reshape(*weight.shape[:2], *two(weight.shape[2:], 1))
    sizes = (two(node.stride, 1), two(node.padding, 0), two(node.dilation, 1))
    return Product(node.inputs[0], weight, *sizes, node.groups)


def unit_of_clamp(low: int, high: int) -> float:
    """Return the unit in which -1 and 1 are the ends of signed features."""
    return float(np.float32(1 / max(-low, high)))


def scales_of(network: FrozenNetwork) -> dict[str, float]:
    """Return units of the features of all nodes, in which those that are added or joined agree.

    They are in ratios of powers of two, so that products with them are exact in float32.
    """
    parent: dict[str, tuple[str, float]] = {}

    def root(name: str) -> tuple[str, float]:
        """Return the first node that the unit of a node depends on, and the ratio of both."""
        ratio = 1.0
        while name in parent:
            name, more = parent[name]
            ratio *= more
        return name, ratio

    known: dict[str, float] = {}
    for node in network.nodes:
        ratios = [1.0] * len(node.inputs)
        if isinstance(node, nodes.Requantise) and node.beside is not None:
            down = 2.0 ** -int(node.shift[0])
            ratios = [int(part[0]) * down for part in (node.multiplier, node.beside)]
        elif isinstance(node, nodes.Sum | nodes.SumPool | nodes.Stair):
            ratios = []
        for name, ratio in zip(node.inputs, ratios, strict=False):
            (first, own), (other, beside) = root(name), root(node.name)
            if first != other and math.frexp(ratio)[0] == 0.5:
                parent[other] = (first, own / (ratio * beside))
        is_clamped = isinstance(node, nodes.Stair) and node.low < 0 and node.high - node.low < BYTE
        if is_clamped:
            first, ratio = root(node.name)
            known.setdefault(first, unit_of_clamp(node.low, node.high) / ratio)
    units = {node.name: root(node.name) for node in network.nodes}
    scale = {name: known.get(first, 1.0) * ratio for name, (first, ratio) in units.items()}
    return {name: float(np.float32(value)) for name, value in scale.items()}


class Layers:
    """Operators, and the features that they give by the names of nodes."""

    def __init__(self, network: FrozenNetwork) -> None:
        self.graph, self.network = TfliteGraph(), network
        self.stored: dict[str, Stored] = {}

    def shape(self, name: str) -> Shape:
        """Return the shape of a node's tensor, (1, H, W, C)."""
        channels, *size = self.network.sizes[name]
        return (1, *((1, 1) if not size else two(size, 1)), channels)

    def axes(self, name: str) -> list[int]:
        """Return the axis of a tensor for each axis of a node's result, but the batch."""
        return {1: [3], 2: [3, 2], 3: [3, 1, 2]}[len(self.network.sizes[name])]

    def read(self, name: str, reader: str) -> Stored:
        """Return features; raise ExportError if they are no bytes."""
        if name not in self.stored:
            reason = f"it reads {name!r}, whose integers do not fit into 8 bits"
            raise ExportError.of(reader, reason, "Put an activation between them")
        return self.stored[name]

    def new(self, name: str, x: Stored, **fields: Any) -> Stored:
        """Add a tensor for features as others are, but for some fields."""
        x = replace(x, **fields)
        kind = "FLOAT32" if x.scale is None else "INT8"
        return replace(x, tensor=self.graph.tensor(name, x.shape, kind, x.scale, x.zero))

    def apply(
        self, code: str, x: Stored, y: Stored, *more: int, version: int = 1, **o: Any
    ) -> Stored:
        """Add an operator, and return its output."""
        self.graph.operator(code, [x.tensor, *more], y.tensor, version, **o)
        return y

    def within(self, name: str, low: int, high: int, shape: Shape, scale: float) -> Stored:
        """Return features, without a tensor, that need no clamp."""
        if high - low > BYTE:
            raise ExportError.of(name, "its integers do not fit into 8 bits")
        return Stored(-1, shape, low, high, max(-128 - low, min(0, 127 - high)), scale)

    def summed(self, p: Product, x: Stored, y: Stored) -> Stored:
        """Add a convolution that needs no rounding."""
        row = np.ones(len(p.weight))
        return self.convolve(p, x, y, 0 * row, Labels(x.scale, y.scale).of_weights(row))

    def convolve(
        self, p: Product, x: Stored, y: Stored, bias: Array, unit: Array | None, fused: str = "NONE"
    ) -> Stored:
        """Add a convolution to ``y``; weights stand for ``unit``, (O,), or are in float32."""
        weight, channels = p.weight, x.shape[3]
        count, _, *kernel = weight.shape
        is_linear = kernel == [1, 1] and x.shape[1:3] == (1, 1) and p.groups == 1
        is_deep = p.groups == channels > 1
        if x.flat and p.groups == 1:  # products with 1 are the same in any order
            copies = weight.reshape(count, -1, *x.flat)
            weight = copies.transpose(0, 1, 3, 4, 2).reshape(weight.shape)
        weight = weight.transpose(1, 2, 3, 0) if is_deep else weight.transpose(0, 2, 3, 1)
        weight = weight.reshape(count, -1) if is_linear else weight
        if unit is None:
            constants = [weight.astype(np.float32), bias.astype(np.float32)]
            numbers = [self.graph.constant(f"{p.source}.constant", part) for part in constants]
        else:
            axis, both = 3 * is_deep, unit * np.float32(x.scale)
            numbers = [
                self.graph.constant(f"{p.source}.weight", weight.astype(np.int8), unit, axis),
                self.graph.constant(f"{p.source}.bias", bias.astype(np.int32), both),
            ]
        act = getattr(self.graph.schema.ActivationFunctionType, fused)
        if is_linear:
            options: Any = {"fusedActivationFunction": act, "keepNumDims": True}
            return self.apply("FULLY_CONNECTED", x, y, *numbers, version=5, **options)
        x, padding = self.placed(x, y.shape, kernel, p.stride, p.padding, p.dilation)
        options = {"padding": padding, "fusedActivationFunction": act}
        options |= dict(zip(("strideH", "strideW"), p.stride, strict=True))
        options |= dict(zip(("dilationHFactor", "dilationWFactor"), p.dilation, strict=True))
        if is_deep:
            options["depthMultiplier"] = count // channels
        return self.apply(
            "DEPTHWISE_CONV_2D" if is_deep else "CONV_2D", x, y, *numbers, version=3, **options
        )

    def placed(
        self,
        x: Stored,
        shape: Shape,
        kernel: Any,
        stride: Shape,
        padding: Shape,
        dilation: Shape,
        lowest: bool = False,
    ) -> tuple[Stored, int]:
        """Return the input and the kind of padding of windows, for results of a shape."""
        kinds, before, missing = self.graph.schema.Padding, [], 0
        for n, out, k, s, d in zip(x.shape[1:3], shape[1:3], kernel, stride, dilation, strict=True):
            more = max((out - 1) * s + (k - 1) * d + 1 - n, 0)
            before.append(more // 2 if out == -(-n // s) else -1)
            missing += more
        if not any(padding) and not missing:
            return x, kinds.VALID
        if tuple(before) == tuple(padding):
            return x, kinds.SAME
        sizes = np.array([[0, 0], *([n, n] for n in padding), [0, 0]])
        return self.pad(x, sizes, x.low if lowest else 0), kinds.VALID

    def pad(self, x: Stored, sizes: Array, level: int = 0) -> Stored:
        """Add so many features of a level before and after each axis of a tensor."""
        shape = tuple(int(n) + int(more.sum()) for n, more in zip(x.shape, sizes, strict=True))
        number = self.graph.constant("padding", sizes.astype(np.int32))
        y = self.new("padded", x, shape=shape)
        if level == 0:
            return self.apply("PAD", x, y, number)
        facts = (1, x.scale, x.zero, np.array([level + x.zero], np.int8))
        value = self.graph.tensor("level", facts[:1], "INT8", *facts[1:])
        return self.apply("PADV2", x, y, number, value, version=2)

    def times(self, x: Stored, times: int) -> Stored:
        """Add a multiplication of features."""
        low, high = x.low * times, x.high * times
        zero = max(-128 - low, min(0, 127 - high))
        facts: Any = {"low": low, "high": high, "zero": zero, "scale": x.scale / times}
        return self.apply("QUANTIZE", x, self.new("times", x, **facts), version=2)

    def moved(self, x: Stored, zero: int) -> Stored:
        """Add a move of the zero point, unless it is there."""
        return (
            x
            if x.zero == zero
            else self.apply("QUANTIZE", x, self.new("moved", x, zero=zero), version=2)
        )

    def in_unit(self, x: Stored, scale: float) -> Stored:
        """Add a change of the scale alone, unless features have it."""
        if np.float32(x.scale) == np.float32(scale):
            return x
        return self.summed(ones("unit", x.shape[3]), x, self.new("unit", x, scale=scale))

    def joined(self, name: str, parts: Sequence[Stored], axis: int, y: Stored) -> Stored:
        """Add a concatenation."""
        options = {"version": 2, "axis": axis}
        return self.apply(
            "CONCATENATION", parts[0], self.new(name, y), *(x.tensor for x in parts[1:]), **options
        )

    def copied(self, x: Stored, copies: int) -> Stored:
        """Add so many copies of features as more channels, a power of two."""
        while copies > 1:
            count = min(copies, MOST_JOINED)
            shape = (*x.shape[:3], x.shape[3] * count)
            x, copies = (
                self.joined("copies", [x] * count, 3, replace(x, shape=shape)),
                copies // count,
            )
        return x

    def in_float(self, name: str) -> Stored:
        """Return features, or the sums of windows of them, in float32."""
        if name in self.stored:
            x = self.in_unit(self.stored[name], 1.0)
            return self.apply("DEQUANTIZE", x, self.new("levels", x, scale=None), version=2)
        node = self.network.node(name)
        if isinstance(node, nodes.Flatten):
            return self.in_float(node.inputs[0])
        p = product_of(self.network, name)
        x, shape = self.in_unit(self.read(p.source, name), 1.0), self.shape(name)
        is_whole = p.weight.shape[2:] == x.shape[1:3]
        x = self._blocks(x, name) if is_whole else x
        x = self.apply("DEQUANTIZE", x, self.new("levels", x, scale=None), version=2)
        if is_whole:
            axes = self.graph.constant("axes", np.array([1, 2], np.int32))
            return self.apply("SUM", x, self.new(name, x, shape=shape), axes, keepDims=True)
        return self.convolve(p, x, self.new(name, x, shape=shape), np.zeros(shape[3]), None)

    def _blocks(self, x: Stored, name: str) -> Stored:
        """Add sums of blocks of positions that fit into a byte, so that less is left in float."""
        (_, *size, channels), span = x.shape, max(x.high, 0) - min(x.low, 0)
        count = lambda block: [-(-n // k) for n, k in zip(size, block, strict=True)]
        blocks = product(*(range(1, n + 1) for n in size))
        fitting = [block for block in blocks if math.prod(block) * span <= BYTE]
        block = min(fitting, key=lambda block: (math.prod(count(block)), block))
        area = math.prod(block)
        if area == 1:
            return x
        shape = (1, *count(block), channels)
        missing = (n * k - s for n, k, s in zip(shape[1:3], block, size, strict=True))
        p = ones(name, channels, block, stride=block, padding=tuple(n // 2 for n in missing))
        y = self.within(name, min(x.low, 0) * area, max(x.high, 0) * area, shape, x.scale)
        return self.summed(p, x, self.new("blocks", y))
