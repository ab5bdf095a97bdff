"""Stairs and requantisations of a network in operators of ONNX that are exact at every input.

The fastest form is a line: level = first + rint(float32(factor·x + bias)·scale). A requantisation
is one where float32 gives its levels: both are monotone, so it is enough to compare them on both
sides of each level's first input. For a stair with levels lₖ, bias and scale are searched for the
numbers lₖ − l₀, as in int8_roundings.py.

Runtimes round: factor·x + bias and its product to float32, or not at all, and halves to even or up.
No input comes near a half, since c has a distance of MARGIN/2 from its bounds, which is 2⁻²⁰, and
the roundings are less than 2⁻²² in all.

Other stairs compare with each threshold, or bisect. Other requantisations are in float64, where
every product is an integer below 2⁵³ over a power of two.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from softstair.deploy import nodes
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.int8_roundings import MAX_BIAS, Floats, Integers, Stairs
from softstair.deploy.nodes import (
    EXACT_PRODUCT,
    INT32_LIMIT,
    ExportError,
    Requantise,
    Stair,
    Steps,
)
from softstair.deploy.onnx_graph import FLOAT32_EXACT, Array, OnnxGraph, StoredTensor, storage
from softstair.deploy.thresholds import search

MARGIN = 2.0**-19
MAX_LEVELS = 256  # of requantisations whose thresholds are searched
MAX_COMPARISONS = 31  # with more thresholds a bisection takes fewer operators


class Line(NamedTuple):
    """level = first + rint(float32(factor·x + bias)·scale), clamped; (C,) each."""

    factor: Integers
    bias: Integers
    scale: Floats  # exact in float32
    first: int


def reach(network: FrozenNetwork, node: Stair) -> tuple[Tensor, Tensor]:
    """Return the least and the greatest first input of each channel of a stair, (C,) int64."""
    source = network.node(node.inputs[0])
    if isinstance(source, nodes.Sum):
        x = network.node(source.inputs[0])
        return source.bounds(x.low, x.high)
    count = network.sizes[node.name][node.axis - 1]
    return torch.full((count,), source.low), torch.full((count,), source.high)


def has_thresholds(node: Requantise) -> bool:
    """Return whether few enough levels depend on one input."""
    return node.beside is None and node.high - node.low < MAX_LEVELS


def thresholds(node: Requantise, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return signs (C,) and thresholds (C, K − 1) of which sign·x reaches level − ``node.low``.

    x is from ``low`` to ``high``, (C,) each.
    """
    index = lambda x: replace(node, axis=1).run(x) - node.low
    table, decreasing = search(index, low, high, node.high - node.low + 1)
    return torch.where(decreasing, -1, 1), table


def requantisation_line(node: Requantise, low: Tensor, high: Tensor) -> Line | None:
    """Return the line of a requantisation if it gives each level for every x from low to high."""
    factor, bias = node.factor.long(), node.bias.long()
    products = torch.stack([low, high]) * factor
    widest = max(int(products.abs().max()), int((products + bias).abs().max()))
    if not has_thresholds(node) or widest >= INT32_LIMIT or int(bias.abs().max()) > MAX_BIAS:
        return None
    sign, begins = thresholds(node, low, high)
    x = torch.cat([begins, begins - 1], 1) * sign[:, None]
    x = x.maximum(low[:, None]).minimum(high[:, None])
    scale = np.ldexp(node.multiplier.double().numpy(), -node.shift.numpy()).astype(np.float32)
    y = (x * factor[:, None] + bias[:, None]).float() * torch.from_numpy(scale)[:, None]
    levels = replace(node, axis=1).run(x[None])[0]
    if bool((y.round().clamp(node.low, node.high) != levels).any()):
        return None
    return Line(factor.numpy(), bias.numpy(), scale.astype(np.float64), 0)


def scales(
    levels: tuple[int, ...],
    thresholds: Integers,
    least: Integers,
    greatest: Integers,
    factor: Integers,
) -> tuple[Integers, Floats]:
    """Return bias and scale (C,) that equal thresholds (C, K − 1) at all sums; 0 for no scale.

    Sums are from ``least`` to ``greatest``, (C,), and multiplied by ``factor``, (C,).
    """
    stairs = Stairs(np.array(levels) - levels[0], thresholds, least, greatest)
    bias = stairs.roomiest(factor, MARGIN)
    lower, upper = stairs.bounds(factor, bias)
    scale = (2 / (lower + upper)).astype(np.float32).astype(np.float64)
    return bias, np.where(stairs.room(factor, bias, MARGIN) >= 0, scale, 0)


def _line(node: Stair, low: Tensor, high: Tensor) -> Line | None:
    """Return the line of a stair or a requantisation, if there is one."""
    if isinstance(node, Requantise):
        return requantisation_line(node, low, high)
    widest = int(torch.maximum(low.abs(), high.abs()).max())
    factor = np.full(len(low), 2 ** max(0, 22 - widest.bit_length()))
    tables = [part.long().numpy() for part in (node.thresholds, low, high)]
    bias, scale = scales(node.levels, tables[0], tables[1], tables[2], factor)
    return Line(factor, bias, scale, node.levels[0]) if scale.all() else None


def add_stair(graph: OnnxGraph, node: Stair, x: list[StoredTensor]) -> StoredTensor:
    """Add the levels of a stair or a requantisation, in the fastest form that is exact."""
    low, high = reach(graph.network, node)
    kind, zero = storage(node)
    if graph.target.runtime != "openvino":
        if kind == "UINT8" and (line := _line(node, low, high)):
            return _add_line(graph, node, x[0], line, zero)
        if isinstance(node, Requantise):
            total = in_float64(graph, node, *(part.as_type(graph, "INT32").name for part in x))
            total = graph.clip(total, node.low, node.high, "float64", "clipped")
            result = graph.cast(graph.line(total, ("Add", np.float64(zero)), hint="moved"), kind)
            return StoredTensor(result, node.low, node.high, kind, zero)
    sums, levels = x[0].as_type(graph, "INT32"), np.arange(node.low, node.high + 1)
    if isinstance(node, Steps):
        table, levels = node.thresholds, np.array(node.levels)
    elif has_thresholds(node):
        sign, table = thresholds(node, low, high)
        widest, signs = max(-sums.low, sums.high), graph.per_channel(node, sign.int())
        name = graph.line(sums.name, ("Mul", signs), hint="signed")
        sums = StoredTensor(name, -widest, widest)
    else:
        raise too_wide(node)
    stored = (levels + zero).astype(kind.lower())
    result = _compared(graph, node, sums, table.long().numpy(), stored)
    return StoredTensor(result, node.low, node.high, kind, zero)


def too_wide(node: nodes.Node) -> ExportError:
    """Return the error that OpenVINO has no numbers for a node: it computes float64 in float32."""
    reason = "OpenVINO computes in 32 bits, which its products exceed"
    return ExportError.of(node.name, reason, "Export it for onnxruntime")


def _add_line(
    graph: OnnxGraph, node: Stair, x: StoredTensor, line: Line, zero: int
) -> StoredTensor:
    """Add first + rint(float32(factor·x + bias)·scale), clamped, in bytes."""
    row = lambda values, dtype: graph.per_channel(node, values.astype(dtype))
    bias = line.bias - line.factor * x.zero
    ends = [abs(end + x.zero) * np.abs(line.factor) + np.abs(bias) for end in (x.low, x.high)]
    if int(np.max(ends)) < FLOAT32_EXACT:
        v, kind = graph.cast(x.limited(graph).name, "FLOAT"), "float32"
    else:
        v, kind, bias = x.as_type(graph, "INT32").name, "int32", line.bias
    v = graph.line(v, ("Mul", row(line.factor, kind)), ("Add", row(bias, kind)), hint="sum")
    v = v if kind == "float32" else graph.cast(v, "FLOAT")
    y = graph.line(v, ("Mul", row(line.scale, np.float32)), hint="scaled")
    # QuantizeLinear rounds to even, adds the zero point and clamps at once.
    inputs = [y, graph.constant("unit", np.float32(1))]
    inputs.append(graph.constant("first", np.uint8(line.first + zero)))
    limit = None if node.high - node.low == 255 else node.high + zero
    levels = graph.apply("QuantizeLinear", inputs, "levels")
    return StoredTensor(levels, node.low, node.high, "UINT8", zero, limit).limited(graph)


def _compared(
    graph: OnnxGraph, node: Stair, sums: StoredTensor, table: Array, levels: Array
) -> str:
    """Add levels[how many thresholds of its channel, (C, K − 1), a sum reaches]."""
    if len(levels) - 1 > MAX_COMPARISONS:
        return _bisected(graph, node, sums, table, levels)
    # The level is replaced by the next one for each threshold that a sum reaches.
    result = graph.constant("level", levels[0])
    for limits, level in zip(table.T, levels[1:], strict=True):
        limit = graph.constant("threshold", graph.per_channel(node, limits.astype(np.int32)))
        reached = graph.apply("GreaterOrEqual", [sums.name, limit], "reached")
        next_level = graph.constant("level", level)
        result = graph.apply("Where", [reached, next_level, result], "features")
    return result


def _bisected(
    graph: OnnxGraph, node: Stair, sums: StoredTensor, table: Array, levels: Array
) -> str:
    """Find each sum in its row of thresholds by bisection.

    All rows form one table, padded to a power of two by thresholds that no sum reaches; a position
    in it is a row and the number of thresholds reached.
    """
    rounds = (len(levels) - 1).bit_length()
    padded = np.full((len(table), 2**rounds), min(sums.high + 1, INT32_LIMIT - 1))
    padded[:, 1 : len(levels)] = table
    limits = graph.integers("thresholds", padded.reshape(-1), "INT32")
    rows = np.arange(len(table), dtype=np.int32) * np.int32(2**rounds)
    position = begin = graph.constant("rows", graph.per_channel(node, rows))
    for power in reversed(range(rounds)):
        half = graph.constant("half", np.int32(2**power))
        further = graph.apply("Add", [position, half], "further")
        limit = graph.apply("Gather", [limits, further], "limit")
        reached = graph.apply("GreaterOrEqual", [sums.name, limit], "reached")
        position = graph.apply("Where", [reached, further, position], "place")
    index = graph.apply("Sub", [position, begin], "index")
    return graph.apply("Gather", [graph.constant("levels", levels), index], "features")


def in_float64(graph: OnnxGraph, node: Requantise, x: str, beside: str = "") -> str:
    """Add the requantisation, not clamped, of integers and of those beside them."""
    shift, x = node.shift.numpy(), graph.cast(x, "DOUBLE")
    row = lambda values, down: graph.per_channel(node, np.ldexp(values.double().numpy(), -down))
    v = [("Mul", row(node.factor, 0)), ("Add", row(node.bias, 0))]
    if node.rounding == "double":
        return _doubly_rounded(graph, node, graph.line(x, *v, hint="sum"))
    half = torch.from_numpy(np.ldexp(0.5 * (shift > 0), shift))
    if node.rest is not None:
        half = half + node.rest
    source = graph.network.node(node.inputs[0])
    factor, addend = node.factor.long() * node.multiplier, node.bias.long() * node.multiplier
    widest = factor.abs().double() * max(-source.low, source.high) + addend.abs() + half
    if float(widest.max()) < EXACT_PRODUCT:
        stages = [("Mul", row(factor, shift)), ("Add", row(addend + half, shift))]
    else:
        stages = [*v, ("Mul", row(node.multiplier, shift)), ("Add", row(half, shift))]
    total = graph.line(x, *stages, hint="total")
    if node.beside is not None:
        other = graph.cast(beside, "DOUBLE", "beside")
        other = graph.line(other, ("Mul", row(node.beside, shift)), hint="beside")
        total = graph.apply("Add", [total, other], "total")
    return graph.apply("Floor", [total], "rounded")


def _doubly_rounded(graph: OnnxGraph, node: Requantise, v: str) -> str:
    """Add floor(v·multiplier/2³¹ + ½), then its quotient by the rest, halves away from zero."""
    multiplier = graph.per_channel(node, np.ldexp(node.multiplier.double().numpy(), -31))
    rest = graph.per_channel(node, np.ldexp(1.0, 31 - node.shift.numpy()))
    half = ("Add", np.float64(0.5))
    high = graph.line(v, ("Mul", multiplier), half, ("Floor", None), hint="high")
    size = graph.line(high, ("Abs", None), ("Mul", rest), half, ("Floor", None), hint="rest")
    return graph.apply("Mul", [size, graph.apply("Sign", [high], "sign")], "rounded")
