"""Sums and their stair as one QLinearConv: integer weights, an integer bias and a float32 scale.

A requantisation is one where float32 gives its levels at every sum. For a stair with thresholds, a
bias and a scale are searched. Level lₖ begins at threshold tₖ and is bₖ = lₖ − l₀ above the lowest.
The stair of a sum s is

    min(clip(rint(scale·(factor·s + bias)), 0, 255), highest byte)

if and only if, with c = 1/scale, factor·tₖ + bias ≥ (bₖ − ½)·c for every k, and
factor·(tₖ − 1) + bias ≤ (bₖ₋₁ + ½)·c: both functions of s do not decrease. Of these two sums, one
beyond the range that the weights can give says nothing; the range's end says it instead. For a
given bias each condition bounds c from one side. The room between the bounds is a concave function
of the bias, so bisection finds an integer bias with room, if there is one. Weights are multiplied
by as large a factor as bytes hold, so that a unit of the bias is a fraction of a unit of the sum.

Runtimes round: factor·s + bias and its product to float32, or not at all, and halves to even or up.
No sum comes near a half, since c has a distance of MARGIN/2 from its bounds, which is 2⁻²⁰, and the
roundings are less than 2⁻²² in all.

Features are uint8. For ARM they are int8 where ONNX Runtime has a faster kernel for it; on x86 that
takes many times as long. Weights are int8; large ones on uint8 features are uint8.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from softstair._frozen import nodes, onnx_graph
from softstair._frozen.network import FrozenNetwork
from softstair._frozen.onnx_graph import Array, OnnxGraph, StoredTensor, zero_point
from softstair._frozen.onnx_levels import float32_scale, is_exact_in_float32
from softstair.deploy.target import HERE, Target

Levels = tuple[int, ...]
Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
MARGIN = 2.0**-19
SMALLEST, LARGEST = 2.0**-8, 2.0**30  # bounds of 1/scale
MAX_TRIES = 8  # of different factors
MAX_BIAS = 2**30
MAX_INPUTS = 2**14  # so that their products with bytes are at most 2³⁰ in all
TERNARY = 64  # factor of ternary weights: 0 and ±64 differ in the two highest bits alone
MAX_WEIGHT = 127  # on ARM, ONNX Runtime's depthwise convolutions are wrong for −128
MAX_PAIR = 2**15 - 1  # AVX2 without VNNI adds two products of bytes in 16 bits that saturate


@dataclass(frozen=True)
class QuantisedConv:
    """A sum and its stair, in bytes: rint(scale·(factor·sum + bias)) + offset, (C,) each."""

    node: nodes.Sum
    stair: nodes.Steps | nodes.Requantise
    kind: str  # of features on ARM, INT8 or UINT8
    weight_kind: str
    factor: Integers
    bias: Integers
    scale: Floats  # exact in float32
    offset: int


def quantised_convs(network: FrozenNetwork, target: Target = HERE) -> dict[str, QuantisedConv]:
    """Return the sums that a QLinearConv computes, by the name of their stair."""
    if target.runtime == "openvino":  # it reads the scales on the axis of the inputs
        return {}
    convs = {}
    for stair in network.nodes:
        if not isinstance(stair, nodes.Steps | nodes.Requantise) or stair.axis != 1:
            continue
        node = network.node(stair.inputs[0])
        if isinstance(node, nodes.Sum) and len(network.users(node.name)) == 1:
            conv = _quantised_conv(node, stair, network.node(node.inputs[0]))
            if conv is not None:
                convs[stair.name] = conv
    return convs


def _quantised_conv(
    node: nodes.Sum, stair: nodes.Steps | nodes.Requantise, x: nodes.Node
) -> QuantisedConv | None:
    weight, fits = node.weight.flatten(1).long().numpy(), stair.low <= 0 and len(stair.inputs) == 1
    fits &= None not in (zero_point(x.low, x.high), zero_point(stair.low, stair.high))
    if not fits or weight.shape[1] > MAX_INPUTS:
        return None
    least, greatest = node.bounds(x.low, x.high)
    largest = min(MAX_WEIGHT, MAX_PAIR // (2 * max(x.high - min(x.low, 0), 1)))
    kind, line = "INT8" if _is_deep(node) else "UINT8", None
    if isinstance(stair, nodes.Steps):
        tables = [part.long().numpy() for part in (stair.thresholds, least, greatest)]
        line, offset = _line(weight, largest, stair.levels, *tables), 0
    elif is_exact_in_float32(stair, least, greatest):
        line, offset = _given_line(weight, largest, stair), -stair.low
    if line is None:
        return None
    kind = kind if line[0] == "INT8" else "UINT8"
    return QuantisedConv(node, stair, kind, *line, offset)


def _is_deep(node: nodes.Sum) -> bool:
    """Return whether ONNX Runtime on ARM is faster with int8 features (by 15 %) than with uint8."""
    _, depth, *window = node.weight.shape
    return math.prod(window) > 1 and node.groups == 1 and depth >= 64


def _given_line(
    weight: Integers, largest: int, stair: nodes.Requantise
) -> tuple[str, Integers, Integers, Floats] | None:
    """Return the type of weights, factor, bias and scale of a requantisation."""
    factor, bias = stair.factor.long().numpy(), stair.bias.long().numpy()
    if np.abs(bias).max() > MAX_BIAS:
        return None
    scale = float32_scale(stair).astype(np.float64)
    if (np.abs(weight).max(1) * np.abs(factor)).max() <= largest:
        return "INT8", factor, bias, scale
    span = max(weight.max(), 0) - min(weight.min(), 0)
    return ("UINT8", factor, bias, scale) if (factor == 1).all() and span <= 255 else None


def _line(
    weight: Integers,
    largest: int,
    levels: Levels,
    thresholds: Integers,
    least: Integers,
    greatest: Integers,
) -> tuple[str, Integers, Integers, Floats] | None:
    """Return the type of weights, factor, bias and scale for thresholds, if there are such."""
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
            return weight_kind, factor, bias, scale
    return None


def scales(
    levels: Levels, thresholds: Integers, least: Integers, greatest: Integers, factor: Integers
) -> tuple[Integers, Floats]:
    """Return bias and scale (C,) that equal thresholds (C, K − 1) at all sums; 0 for no scale.

    Sums are from ``least`` to ``greatest``, (C,), and multiplied by ``factor``, (C,).
    """
    low, high, numbers = least[:, None], greatest[:, None], np.array(levels) - levels[0]
    first = factor[:, None] * np.maximum(thresholds, low)
    before = factor[:, None] * np.minimum(thresholds - 1, high)

    def bounds(bias: Integers) -> tuple[Floats, Floats]:
        """Return the bounds of 1/scale."""
        upper = (first + bias[:, None]) / (numbers[1:] - 0.5)
        lower = (before + bias[:, None]) / (numbers[:-1] + 0.5)
        lower = lower.max(1, where=thresholds > low, initial=SMALLEST)
        return lower, upper.min(1, where=thresholds <= high, initial=LARGEST)

    def room(bias: Integers) -> Floats:
        lower, upper = bounds(bias)
        return upper - (1 + MARGIN) * lower

    below, above = np.full(len(least), -MAX_BIAS), np.full(len(least), MAX_BIAS)
    while bool((below < above).any()):
        middle = (below + above) // 2
        grows = room(middle + 1) > room(middle)
        below, above = np.where(grows, middle + 1, below), np.where(grows, above, middle)
    lower, upper = bounds(below)
    scale = (2 / (lower + upper)).astype(np.float32).astype(np.float64)
    return below, np.where(room(below) >= 0, scale, 0)


def add_quantised_conv(graph: OnnxGraph, conv: QuantisedConv, x: StoredTensor) -> StoredTensor:
    """Add the levels of a sum; linear layers and sequences become convolutions of images."""
    node, stair, kind = conv.node, conv.stair, conv.kind if graph.target.cpu == "arm" else "UINT8"
    weight, attributes = onnx_graph.sum_operands(node, len(node.weight))
    largest = int((np.abs(weight.reshape(len(weight), -1)).max(1) * np.abs(conv.factor)).max())
    x = x.as_type(graph, kind, bits=2 * 255 * largest <= MAX_PAIR)
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
        graph.constant("offset", np.array(lowest + conv.offset, kind.lower())),
        graph.constant("bias", conv.bias.astype(np.int32)),
    ]
    name = graph.apply("QLinearConv", inputs, "levels", **attributes)
    name = graph.apply("Squeeze", [name, *axes], "squeezed") if added else name
    span = stair.high - stair.low
    limit = None if span == 255 else lowest + span
    return StoredTensor(name, stair.low, stair.high, kind, lowest - stair.low, limit)


def _add_weights(graph: OnnxGraph, weight: Array, conv: QuantisedConv) -> list[str]:
    """Add weights times their factor, from as few bits as they need, with scale and zero point."""
    zero, signed = -min(int(weight.min()), 0), conv.weight_kind == "INT8"
    if signed and zero == 1 and (conv.factor == TERNARY).all():
        product = _add_ternary(graph, weight)
    else:
        packed = onnx_graph.packed_weights(graph, (weight + zero).astype(np.uint8))
        integers = graph.cast(packed, "INT32", "weight")
        offset, factors = (
            np.int32(-zero * signed),
            conv.factor.astype(np.int32).reshape(-1, 1, 1, 1),
        )
        product = graph.line(integers, ("Add", offset), ("Mul", factors), hint="weight_product")
    zeros = (0 if signed else zero) * conv.factor
    return [
        graph.cast(product, conv.weight_kind, "weight"),
        graph.constant("scale", conv.scale.astype(np.float32)),
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
