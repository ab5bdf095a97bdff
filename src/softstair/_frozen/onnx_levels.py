"""Stairs and requantisations of a network in operators of ONNX that are exact at every input.

A requantisation is one of three. In float32, v·scale rounded to even, where that gives the same
level at every sum that can occur: both are monotone, so it is enough to compare them on both sides
of each level's first input. In float64, where every product is an integer below 2⁵³ over a power of
two. As thresholds, for what reads no float64.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from softstair._frozen import nodes
from softstair._frozen.network import FrozenNetwork
from softstair._frozen.nodes import EXACT_PRODUCT, INT32_LIMIT, ExportError, Requantise, Steps
from softstair._frozen.onnx_graph import Array, OnnxGraph, StoredTensor, storage

MAX_LEVELS = 256  # of requantisations whose thresholds are searched
MAX_COMPARISONS = 31  # with more thresholds a bisection takes fewer operators


def reach(network: FrozenNetwork, node: nodes.Node) -> tuple[Tensor, Tensor]:
    """Return the least and the greatest first input of each channel of a stair, (C,) int64."""
    source = network.node(node.inputs[0])
    if isinstance(source, nodes.Sum):
        x = network.node(source.inputs[0])
        return source.bounds(x.low, x.high)
    assert isinstance(node, Steps | Requantise)
    count = network.sizes[node.name][node.axis - 1]
    return torch.full((count,), source.low), torch.full((count,), source.high)


def has_thresholds(node: Requantise) -> bool:
    """Return whether few enough levels depend on one input."""
    return node.beside is None and node.high - node.low < MAX_LEVELS


def thresholds(node: Requantise, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return signs (C,) and thresholds (C, K − 1) of which sign·x reaches level − ``node.low``.

    x is from ``low`` to ``high``, (C,) each.
    """
    sign = torch.where(node.factor.sign() * node.multiplier.sign() < 0, -1, 1)
    levels = torch.arange(node.low + 1, node.high + 1)
    below = torch.where(sign > 0, low, -high)[:, None].repeat(1, len(levels))
    above = (torch.where(sign > 0, high, -low)[:, None] + 1).repeat(1, len(levels))
    while bool((below < above).any()):
        middle = (below + above) >> 1
        reached = _levels(node, middle * sign[:, None]) >= levels
        above = torch.where(reached, middle, above)
        below = torch.where(reached, below, (middle + 1).minimum(above))
    return sign, below


def is_exact_in_float32(node: Requantise, low: Tensor, high: Tensor) -> bool:
    """Return whether v·scale, rounded to even, gives each level for every x from low to high."""
    factor, bias = node.factor[:, None].long(), node.bias[:, None].long()
    products = torch.stack([low, high], 1) * factor
    widest = max(int(products.abs().max()), int((products + bias).abs().max()))
    if not has_thresholds(node) or widest >= INT32_LIMIT:
        return False
    sign, begins = thresholds(node, low, high)
    x = torch.cat([begins, begins - 1], 1) * sign[:, None]
    x = x.maximum(low[:, None]).minimum(high[:, None])
    y = (x * factor + bias).float() * torch.from_numpy(float32_scale(node))[:, None]
    return bool((y.round().clamp(node.low, node.high) == _levels(node, x)).all())


def float32_scale(node: Requantise) -> Array:
    """Return the quotient multiplier/2^shift of each channel."""
    return np.ldexp(node.multiplier.double().numpy(), -node.shift.numpy()).astype(np.float32)


def _levels(node: Requantise, x: Tensor) -> Tensor:
    """Return the levels of inputs (C, numbers)."""
    return replace(node, axis=1).run(x[None])[0]


def add_steps(
    graph: OnnxGraph, node: Steps | Requantise, sums: StoredTensor, table: Array, levels: Array
) -> StoredTensor:
    """Add levels[how many thresholds of its channel, (C, K − 1), a sum reaches]."""
    kind, zero = storage(node)
    stored = (levels + zero).astype(kind.lower())
    x = sums.as_type(graph, "INT32")
    if len(levels) - 1 > MAX_COMPARISONS:
        result = _bisected(graph, node, x, table, stored)
        return StoredTensor(result, node.low, node.high, kind, zero)
    # The level is replaced by the next one for each threshold that a sum reaches.
    result = graph.constant("level", stored[0])
    for limits, level in zip(table.T, stored[1:], strict=True):
        limit = graph.constant("threshold", graph.per_channel(node, limits.astype(np.int32)))
        reached = graph.apply("GreaterOrEqual", [x.name, limit], "reached")
        next_level = graph.constant("level", level)
        result = graph.apply("Where", [reached, next_level, result], "features")
    return StoredTensor(result, node.low, node.high, kind, zero)


def _bisected(
    graph: OnnxGraph, node: Steps | Requantise, sums: StoredTensor, table: Array, levels: Array
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


def add_requantised(graph: OnnxGraph, node: Requantise, x: list[StoredTensor]) -> StoredTensor:
    """Add the levels of a requantisation, in the fastest form that is exact."""
    low, high = reach(graph.network, node)
    integers = x[0].as_type(graph, "INT32")
    if graph.target.runtime == "openvino":
        if not has_thresholds(node):
            reason = "OpenVINO computes in 32 bits, which its products exceed"
            raise ExportError.of(node.name, reason, "Export it for onnxruntime")
        sign, table = thresholds(node, low, high)
        factor = graph.per_channel(node, sign.int())
        y = replace(integers, name=graph.line(integers.name, ("Mul", factor), hint="signed"))
        return add_steps(graph, node, y, table.numpy(), np.arange(node.low, node.high + 1))
    kind, zero = storage(node)
    if is_exact_in_float32(node, low, high):
        result = _in_float32(graph, node, integers.name, kind, zero)
    else:
        beside = [x[1].as_type(graph, "INT32", "beside_").name] if len(x) == 2 else []
        total = in_float64(graph, node, graph.cast(integers.name, "DOUBLE"), *beside)
        total = graph.clip(total, node.low, node.high, "DOUBLE", "clipped")
        result = graph.cast(graph.line(total, ("Add", np.float64(zero)), hint="moved"), kind)
    return StoredTensor(result, node.low, node.high, kind, zero)


def _in_float32(graph: OnnxGraph, node: Requantise, x: str, kind: str, zero: int) -> str:
    """Add clip(round(v·scale)) + zero, stored as ``kind``."""
    row = lambda values: graph.per_channel(node, values)
    v = graph.line(x, ("Mul", row(node.factor)), ("Add", row(node.bias)), hint="sum")
    y = graph.line(graph.cast(v, "FLOAT"), ("Mul", row(float32_scale(node))), hint="scaled")
    y = graph.clip(graph.apply("Round", [y], "round"), node.low, node.high, "FLOAT", "clipped")
    return graph.cast(graph.line(y, ("Add", np.float32(zero)), hint="moved"), kind)


def in_float64(graph: OnnxGraph, node: Requantise, x: str, beside: str | None = None) -> str:
    """Add the requantisation, not clamped, of x in float64, and of integers beside it."""
    row = lambda values, down: graph.per_channel(node, np.ldexp(values.double().numpy(), -down))
    shift, zeros = node.shift.numpy(), np.zeros_like(node.shift.numpy())
    if node.rounding == "double":
        return _doubly_rounded(graph, node, x)
    half = torch.from_numpy(np.ldexp(0.5 * (shift > 0), shift))
    source = graph.network.node(node.inputs[0])
    factor, addend = node.factor.long() * node.multiplier, node.bias.long() * node.multiplier
    widest = factor.abs().double() * max(-source.low, source.high) + addend.abs() + half
    if float(widest.max()) < EXACT_PRODUCT:
        stages = [("Mul", row(factor, shift)), ("Add", row(addend + half, shift))]
    else:
        stages = [("Mul", row(node.factor, zeros)), ("Add", row(node.bias, zeros))]
        stages += [("Mul", row(node.multiplier, shift)), ("Add", row(half, shift))]
    total = graph.line(x, *stages, hint="total")
    if beside is not None and node.beside is not None:
        other = graph.cast(beside, "DOUBLE", "beside")
        other = graph.line(other, ("Mul", row(node.beside, shift)), hint="beside")
        total = graph.apply("Add", [total, other], "total")
    return graph.apply("Floor", [total], "rounded")


def _doubly_rounded(graph: OnnxGraph, node: Requantise, x: str) -> str:
    """Add floor(v·multiplier/2³¹ + ½), then its quotient by the rest, halves away from zero."""
    row = lambda values: graph.per_channel(node, values)
    v = [("Mul", row(node.factor.double())), ("Add", row(node.bias.double()))]
    multiplier = np.ldexp(node.multiplier.double().numpy(), -31)
    half = ("Add", np.float64(0.5))
    high = graph.line(x, *v, ("Mul", row(multiplier)), half, ("Floor", None), hint="high")
    size = np.ldexp(1.0, 31 - node.shift.numpy())
    y = graph.line(high, ("Abs", None), ("Mul", row(size)), half, ("Floor", None), hint="rest")
    return graph.apply("Mul", [y, graph.apply("Sign", [high], "sign")], "rounded")
