"""Arithmetic of a network's values: products, differences, negatives and constants."""

import operator
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from softstair.deploy.builder import NodeBuilder
from softstair.deploy.combining import Multiply, Subtract
from softstair.deploy.nodes import ExportError, Shape
from softstair.deploy.values import Affine, IntegerFeatures, PendingSum, Value

BYTE = range(-128, 256)
FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
}


def combined(build: NodeBuilder, name: str, function: str, a: Any, b: Any) -> Value:
    """Return the value of a function of two features or sums."""
    if function == "mul":
        return multiplied(build, name, build.integers(name, a), build.integers(name, b))
    if function == "add":
        return build.add(name, a, b)
    if function != "sub":
        raise ExportError.of(name, "it divides features by features", "Multiply instead")
    is_plain = isinstance(a, IntegerFeatures) and isinstance(b, IntegerFeatures)
    if is_plain and a.unit == b.unit and build.shape(a) == build.shape(b):
        return _difference(build, name, a, b)
    return build.add(name, a, negative(build, f"{name}.negative", b))


def multiplied(build: NodeBuilder, name: str, a: IntegerFeatures, b: IntegerFeatures) -> Value:
    """Add an exact product; where bytes do not hold it, it is in a wider unit until it is read."""
    shapes = [build.sizes[x.node] for x in (a, b)]
    if len(shapes[0]) != len(shapes[1]):
        raise ExportError.of(name, f"it multiplies features of shapes {shapes[0]} and {shapes[1]}")
    shape = torch.broadcast_shapes(*shapes)
    one_place = [own[:1] == shape[:1] and set(own[1:]) <= {1} for own in shapes]
    parts = [
        x if is_one else build.expand(f"{name}.{side}", x, shape)
        for x, is_one, side in zip((a, b), one_place, ("left", "right"), strict=True)
    ]
    if one_place[0] and not one_place[1]:  # the larger one first
        parts.reverse()
    ends = [m * n for m, n in product((a.low, a.high), (b.low, b.high))]
    node = Multiply(name, tuple(x.node for x in parts), min(ends), max(ends))
    result = IntegerFeatures(build.add_node(node).name, a.unit * b.unit, node.low, node.high)
    is_byte = node.low in BYTE and node.high in BYTE and node.high - node.low < 256
    return result if is_byte else build.pending(result)


def negative(build: NodeBuilder, name: str, x: Value) -> Value:
    """Return the negative of features or of a sum."""
    if isinstance(x, IntegerFeatures):
        return _difference(build, name, x)
    return _applied(build, name, x, operator.neg, -1.0, 0.0)


def _difference(build: NodeBuilder, name: str, *terms: IntegerFeatures) -> IntegerFeatures:
    """Add the difference of two features of one unit, or the negative of one."""
    first, last = terms[0], terms[-1]
    low, high = (first.low, first.high) if len(terms) == 2 else (0, 0)
    node = Subtract(name, tuple(x.node for x in terms), low - last.high, high - last.low)
    return IntegerFeatures(build.add_node(node).name, last.unit, node.low, node.high)


def with_constant(
    build: NodeBuilder, name: str, function: str, x: Value, constant: Any, is_first: bool
) -> Value:
    """Return the value of a function of features or a sum and of a constant, which may be first."""
    value = torch.as_tensor(constant)
    if value.is_complex() or not bool(value.isfinite().all()):
        raise ExportError.of(name, "its constant is not a finite number")
    if is_first and function == "div":
        raise ExportError.of(name, "it divides a constant by features", "Multiply instead")
    is_factor, number = function in ("mul", "div"), value.numel() == 1
    if function == "add" and number and float(value) == 0 and value.dim() == 0:
        return replace(x)  # Python's sum begins with 0
    if is_factor and number and float(value) > 0 and isinstance(x, IntegerFeatures):
        if value.dim() > len(build.shape(x)) + 1:
            raise _shape_error(build, name, x, value)
        factor = float(value) if function == "mul" else 1 / float(value)
        return replace(x, unit=x.unit * factor)
    per_channel = _per_channel(build, name, x, value.detach())
    own: Any = constant if isinstance(constant, int | float) else per_channel
    numbers = per_channel.double()

    def call(y: Tensor) -> Tensor:
        other = own.reshape(-1, *[1] * (y.dim() - 2)) if isinstance(own, Tensor) else own
        return FUNCTIONS[function](*((other, y) if is_first else (y, other)))

    one = torch.ones_like(numbers)
    sign = -1.0 if function == "sub" else 1.0
    match function, is_first:
        case "mul", _:
            return _applied(build, name, x, call, numbers, 0.0)
        case "div", _:
            return _applied(build, name, x, call, 1 / numbers, 0.0)
        case _, True:
            return _applied(build, name, x, call, sign * one, numbers)
    return _applied(build, name, x, call, one, sign * numbers)


def _applied(
    build: NodeBuilder,
    name: str,
    x: Value,
    function: Callable[[Tensor], Tensor],
    slope: Tensor | float,
    offset: Tensor | float,
) -> PendingSum:
    """Return the value of slope·x + offset, which is computed as ``function``."""
    x = build.pending(x) if isinstance(x, IntegerFeatures) else x
    full = lambda y: torch.as_tensor(y, dtype=torch.float64).expand(len(x.least))
    slope, offset = full(slope), full(offset)
    if not bool(slope.isfinite().all()):
        raise ExportError.of(name, "it divides by 0")
    if x.pools and bool((slope < 0).any()):
        raise ExportError.of(name, "a negative factor follows a pooling", "Pool after the stair")
    return build.apply(name, x, Affine(function, slope, offset))


def _per_channel(build: NodeBuilder, name: str, x: Value, value: Tensor) -> Tensor:
    """Return the constant of each channel, (C,) float32."""
    shape = build.pooled_shape(x)
    axis = build.channel_axis(x.source) if isinstance(x, PendingSum) else 1
    channels = len(x.least) if isinstance(x, PendingSum) else shape[0]
    if value.numel() == 1 and value.dim() <= len(shape) + 1:
        return value.float().reshape(1).expand(channels)
    try:
        rows = value.float().expand(1, *shape)[0].movedim(axis - 1, 0)
        rows = rows.reshape(len(rows), -1)
    except RuntimeError:
        raise _shape_error(build, name, x, value) from None
    if not bool((rows == rows[:, :1]).all()):
        raise ExportError.of(name, "its constant differs from place to place in a channel")
    if len(rows) != channels:
        raise ExportError.of(name, "its channels were broadcast", "Put it before the addition")
    return rows[:, 0]


def _shape_error(build: NodeBuilder, name: str, x: Value, value: Tensor) -> ExportError:
    shape: Shape = build.pooled_shape(x)
    reason = f"its constant has shape {tuple(value.shape)}, and the features {shape}"
    return ExportError.of(name, reason, "Use one number a channel")
