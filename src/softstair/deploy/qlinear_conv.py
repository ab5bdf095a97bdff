"""Sums and their stair as one QLinearConv: integer weights, an integer bias and a float32 scale.

It is a line of onnx_levels.py, at every sum that can occur. For a stair with thresholds, weights
are multiplied by as large a factor as bytes hold, so that a unit of the bias is a fraction of a
unit of the sum. Where that is too coarse, features of 4 bits are multiplied by 17, or the input is
joined to itself and each part has its share of the factor.

Features are uint8. For ARM they are int8 where ONNX Runtime has a faster kernel for it; on x86 that
takes many times as long. Weights are int8; large ones on uint8 features are uint8.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from softstair.deploy import nodes, onnx_graph
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.int8_roundings import Integers
from softstair.deploy.nodes import Stair
from softstair.deploy.onnx_graph import Array, OnnxGraph, StoredTensor, zero_point
from softstair.deploy.onnx_levels import Line, reach, requantisation_line, scales
from softstair.deploy.target import HERE, Target

MAX_TRIES = 8  # of different factors
MAX_INPUTS = 2**14  # so that their products with bytes are at most 2³⁰ in all
TERNARY = 64  # factor of ternary weights: 0 and ±64 differ in the two highest bits alone
MAX_WEIGHT = 127  # on ARM, ONNX Runtime's depthwise convolutions are wrong for −128
TIMES, COPIES = 17, (2, 4)
MAX_PAIR = 2**15 - 1  # AVX2 without VNNI adds two products of bytes in 16 bits that saturate


@dataclass(frozen=True)
class QuantisedConv:
    """A sum and its stair, in bytes."""

    node: nodes.Sum
    stair: Stair
    kind: str  # of features on ARM, INT8 or UINT8
    weight_kind: str
    line: Line
    times: int = 1
    copies: int = 1


def quantised_convs(network: FrozenNetwork, target: Target = HERE) -> dict[str, QuantisedConv]:
    """Return the sums that a QLinearConv computes, by the name of their stair."""
    if target.runtime == "openvino":  # it reads the scales on the axis of the inputs
        return {}
    convs = {}
    for stair in network.nodes:
        if not isinstance(stair, Stair) or stair.axis != 1 or len(stair.inputs) > 1:
            continue
        node = network.node(stair.inputs[0])
        if isinstance(node, nodes.Sum) and len(network.users(node.name)) == 1:
            conv = _quantised_conv(network, node, stair)
            if conv is not None:
                convs[stair.name] = conv
    return convs


def _quantised_conv(network: FrozenNetwork, node: nodes.Sum, stair: Stair) -> QuantisedConv | None:
    x, weight = network.node(node.inputs[0]), node.weight.flatten(1).long().numpy()
    fits = None not in (zero_point(x.low, x.high), zero_point(stair.low, stair.high))
    if not fits or stair.low > 0 or weight.shape[1] > MAX_INPUTS:
        return None
    low, high = reach(network, stair)
    times = copies = 1
    largest = min(MAX_WEIGHT, MAX_PAIR // (2 * max(x.high - min(x.low, 0), 1)))
    if isinstance(stair, nodes.Requantise):
        line = requantisation_line(stair, low, high)
        weight_kind = line and _kind_of(weight, largest, line)
    else:
        tables = (stair.thresholds.long().numpy(), low.numpy(), high.numpy())
        weight_kind, line = _searched(weight, largest, stair.levels, *tables)
        if line is None:
            bits = (x.high - min(x.low, 0)).bit_length()
            groups = node.groups if weight.shape[1] <= MAX_INPUTS // COPIES[-1] else 0
            weight_kind, line, times, copies = _finer(
                weight, largest, stair.levels, tables, bits, groups
            )
    if line is None or not weight_kind:
        return None
    kind = "INT8" if _is_deep(node) and weight_kind == "INT8" else "UINT8"
    kind = "UINT8" if times > 1 else kind
    return QuantisedConv(node, stair, kind, weight_kind, line, times, copies)


def _is_deep(node: nodes.Sum) -> bool:
    """Return whether ONNX Runtime on ARM is faster with int8 features (by 15 %) than with uint8."""
    _, depth, *window = node.weight.shape
    return math.prod(window) > 1 and node.groups == 1 and depth >= 64


def _kind_of(weight: Integers, largest: int, line: Line) -> str:
    """Return the type of weights times the factors of a line; empty if bytes do not hold them."""
    if (np.abs(weight).max(1) * np.abs(line.factor)).max() <= largest:
        return "INT8"
    span = max(weight.max(), 0) - min(weight.min(), 0)
    return "UINT8" if (line.factor == 1).all() and span <= 255 else ""


def _searched(
    weight: Integers,
    largest: int,
    levels: tuple[int, ...],
    thresholds: Integers,
    least: Integers,
    greatest: Integers,
) -> tuple[str, Line | None]:
    """Return the type of weights and the line for thresholds, if there is one."""
    signed = largest // np.abs(weight).max(1).clip(1)
    unsigned = np.full_like(signed, 255 // max(weight.max() - min(weight.min(), 0), 1))
    tries = [("INT8", signed, MAX_TRIES), ("UINT8", unsigned, 1)]
    if weight.min() == -1 and weight.max() <= 1 and largest >= TERNARY:
        tries.insert(0, ("INT8", np.full_like(signed, TERNARY), 1))
    for weight_kind, factor, count in tries:
        bias, scale = np.zeros_like(factor), np.zeros(len(factor))
        for _ in range(count if factor.all() else 0):
            rows = np.flatnonzero(scale == 0)
            channels = (part[rows] for part in (thresholds, least, greatest, factor))
            bias[rows], scale[rows] = scales(levels, *channels)
            if scale.all() or factor[scale == 0].min() == 1:
                break
            factor[scale == 0] -= 1
        if scale.all():
            return weight_kind, Line(factor, bias, scale, levels[0])
    return "", None


def _finer(
    weight: Integers,
    largest: int,
    levels: tuple[int, ...],
    tables: tuple[Integers, Integers, Integers],
    bits: int,
    groups: int,
) -> tuple[str, Line | None, int, int]:
    """Return the same for sums of features that are multiplied, or joined to themselves."""
    span = max(weight.max(), 0) - min(weight.min(), 0)
    if bits <= 4 and span <= 255:
        factor = np.full(len(weight), 255 // max(span, 1))
        bias, scale = scales(levels, *tables, TIMES * factor)
        if scale.all():
            return "UINT8", Line(factor, bias, scale, levels[0]), TIMES, 1
    signed = largest // np.abs(weight).max(1).clip(1)
    unsigned = np.full_like(signed, 255 // max(span, 1))
    for copies in COPIES if groups == 1 else ():
        for weight_kind, share in (("INT8", signed), ("UINT8", unsigned)):
            bias, scale = scales(levels, *tables, copies * share)
            if share.all() and scale.all():
                return weight_kind, Line(copies * share, bias, scale, levels[0]), 1, copies
    return "", None, 1, 1


def add_quantised_conv(graph: OnnxGraph, conv: QuantisedConv, x: StoredTensor) -> StoredTensor:
    """Add the levels of a sum; linear layers and sequences become convolutions of images."""
    node, stair, kind = conv.node, conv.stair, conv.kind if graph.target.cpu == "arm" else "UINT8"
    weight, attributes = onnx_graph.sum_operands(node, len(node.weight))
    factors = np.abs(conv.line.factor)
    largest = int((np.abs(weight.reshape(len(weight), -1)).max(1) * factors).max()) // conv.copies
    is_small = 2 * 255 * largest <= MAX_PAIR and conv.times == 1
    x = x.as_type(graph, kind, bits=is_small)
    if conv.times > 1:
        assert 0 <= x.low + x.zero <= x.high + x.zero < 16
        high = graph.constant("places", np.uint8(4))
        high = graph.apply("BitShift", [x.name, high], "high", direction="LEFT")
        x = replace(x, name=graph.apply("BitwiseOr", [x.name, high], "times"), zero=TIMES * x.zero)
    if conv.copies > 1:
        joined = graph.apply("Concat", [x.name] * conv.copies, "joined", axis=1)
        x = replace(x, name=joined)
    added = tuple(range(2, 6 - weight.ndim))
    axes = [graph.constant("axes", np.array(added))] if added else []
    image = graph.apply("Unsqueeze", [x.name, *axes], "image") if added else x.name
    if len(added) == 1:
        attributes["pads"] = [0, *node.padding] * 2
        attributes |= {"strides": (1, *node.stride), "dilations": (1, *node.dilation)}
    unit, lowest = graph.constant("unit", np.float32(1)), -128 if kind == "INT8" else 0
    inputs = [
        image,
        unit,
        graph.constant("image_zero", np.array(x.zero, kind.lower())),
        *_add_weights(graph, np.expand_dims(weight, added), conv),
        unit,
        graph.constant("first", np.array(lowest + conv.line.first - stair.low, kind.lower())),
        graph.constant("bias", conv.line.bias.astype(np.int32)),
    ]
    name = graph.apply("QLinearConv", inputs, "levels", **attributes)
    name = graph.apply("Squeeze", [name, *axes], "squeezed") if added else name
    span = stair.high - stair.low
    limit = None if span == 255 else lowest + span
    return StoredTensor(name, stair.low, stair.high, kind, lowest - stair.low, limit)


def _add_weights(graph: OnnxGraph, weight: Array, conv: QuantisedConv) -> list[str]:
    """Add weights times their factor, from as few bits as they need, with scale and zero point."""
    zero, signed = -min(int(weight.min()), 0), conv.weight_kind == "INT8"
    factor = conv.line.factor
    zeros = (not signed) * zero * (factor // conv.copies)
    if signed and zero == 1 and (factor == TERNARY).all():
        product = _add_ternary(graph, weight)
    else:
        packed = onnx_graph.packed_weights(graph, (weight + zero).astype(np.uint8))
        moved = graph.cast(packed, "INT32", "weight")
        moved = graph.line(moved, ("Add", np.int32(-zero * signed)), hint="weight_product")
        share = (factor // conv.copies).astype(np.int32)[:, None, None, None]
        product = graph.line(moved, ("Mul", share), hint="weight_product")
        if conv.copies > 1:
            product = graph.apply("Concat", [product] * conv.copies, "weight_joined", axis=1)
    return [
        graph.cast(product, conv.weight_kind, "weight"),
        graph.constant("scale", conv.line.scale.astype(np.float32)),
        graph.constant("weight_zeros", zeros.astype(conv.weight_kind.lower())),
    ]


def _add_ternary(graph: OnnxGraph, weight: Array) -> str:
    """Add the bits of 64 times weights from −1 to 1, in operations on bytes alone."""
    sign_only = bool(weight.all())
    codes = ((weight & 3) >> sign_only).astype(np.uint8)
    product = onnx_graph.packed_weights(graph, codes, top=True)
    if sign_only:
        inputs = [product, graph.constant("weight_one", np.uint8(TERNARY))]
        product = graph.apply("BitwiseOr", inputs, "weight_product")
    return product
