"""Sums over whole weights: of bytes as ConvInteger and MatMulInteger, of anything wider in float32
where every partial sum is a whole number below 2²⁴, which float32 holds."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softstair.deploy import nodes
from softstair.deploy.integer import ExportError
from softstair.deploy.onnx.graph import Graph
from softstair.deploy.onnx.stored import Stored, zero_point

__all__ = ["digits", "how_to_sum", "reach", "spread", "total"]

Array = NDArray[Any]
EXACT_IN_FLOAT = 2**24
EXACT_IN_INT = 2**31


def how_to_sum(node: nodes.Sum | nodes.SumPool, channels: int) -> tuple[Array, dict[str, Any]]:
    """The weights of a node, and the attributes of their convolution; a pool is one of ones."""
    if isinstance(node, nodes.SumPool):
        weight = np.ones((channels, 1, *node.kernel), np.int64)
        return weight, {"strides": node.stride, "group": channels}
    if node.weight.dim() == 2:
        return node.weight.numpy(), {}
    pads = [*node.padding] * 2
    return node.weight.numpy(), {
        "strides": node.stride,
        "pads": pads,
        "dilations": node.dilation,
        "group": node.groups,
    }


def total(
    graph: Graph, x: Stored, node: nodes.Sum | nodes.SumPool, channels: int, name: str
) -> Stored:
    """The sums of a node, in int32."""
    weight, how = how_to_sum(node, channels)
    if reach(weight, x.low, x.high) >= EXACT_IN_INT - 1:
        raise ExportError(
            f"the sums of {node.name} do not fit into 32 bits in every order of summation: give it "
            "fewer inputs or stairs of fewer bits."
        )
    zero = zero_point(int(weight.min()), int(weight.max()))
    if zero is not None and zero_point(x.low, x.high) is not None:
        small = x.as_bytes(graph, f"{name}_taken")
        products = (small.high + small.zero_byte) * (int(weight.max()) + zero)
        if products * weight[0].size < EXACT_IN_INT:
            sums = _of_bytes(graph, small, weight, zero, how, name)
            return Stored(sums, node.low, node.high)
    taken = graph.cast(x.whole(graph, name), "FLOAT", name)
    parts = digits(node.name, weight, x.low, x.high)
    return Stored(_of_floats(graph, taken, parts, how, name), node.low, node.high)


def _of_bytes(
    graph: Graph, x: Stored, weight: Array, zero: int, how: Mapping[str, Any], name: str
) -> str:
    flat = weight.ndim == 2
    raised = ((weight.T if flat else weight) + zero).astype(np.uint8)
    zeros = [graph.constant(f"{name}_zero", np.uint8(one)) for one in (x.zero_byte, zero)]
    inputs = [x.name, spread(graph, raised, f"{name}_weight"), *zeros]
    return graph.give("MatMulInteger" if flat else "ConvInteger", inputs, name, **how)


def spread(graph: Graph, weight: Array, name: str) -> str:
    """Bytes, of which the file holds as few bits each as the largest needs; where all are even, as
    those of −1 and 1 with the zero 1 are, not the lowest one."""
    even = not (weight & 1).any()
    weight = weight >> 1 if even else weight
    bits = next(one for one in (1, 2, 4, 8) if int(weight.max()) < 2**one)
    if bits == 8:
        return graph.constant(name, weight << int(even))
    places = np.arange(0, 8, bits, dtype=np.uint8)
    padded = np.pad(weight.reshape(-1), (0, -weight.size % len(places)))
    packed = np.bitwise_or.reduce(padded.reshape(-1, len(places)) << places, axis=1)[:, None]
    inputs = [graph.constant(f"{name}_packed", packed), graph.constant(f"{name}_places", places)]
    shifted = graph.apply("BitShift", inputs, f"{name}_shifted", direction="RIGHT")
    mask = graph.constant(f"{name}_mask", np.uint8(2**bits - 1))
    values = graph.apply("BitwiseAnd", [shifted, mask], f"{name}_values")
    if padded.size > weight.size:
        whole = graph.constant(f"{name}_all", np.array([-1]))
        values = graph.apply("Reshape", [values, whole], f"{name}_padded")
        ends = [graph.constant(f"{name}_end", np.array([one])) for one in (0, weight.size)]
        values = graph.apply("Slice", [values, *ends], f"{name}_cut")
    if even:
        one_place = graph.constant(f"{name}_even", np.uint8(1))
        values = graph.apply("BitShift", [values, one_place], f"{name}_doubled", direction="LEFT")
    shape = graph.constant(f"{name}_shape", np.array(weight.shape))
    return graph.apply("Reshape", [values, shape], name)


def digits(name: str, weight: Array, low: int, high: int) -> list[tuple[int, Array]]:
    """Weights as Σ 2^place · digit, the highest place first, so that no sum of a digit leaves the
    whole numbers of float32 while features are from low to high.

    >>> digits("conv", np.array([[-300, 5]]), low=0, high=2**16)
    [(8, array([[-1,  0]])), (0, array([[-44,   5]]))]
    """
    for bits in (24, 12, 8, 6, 4, 3, 2, 1):
        places = range(0, int(np.abs(weight).max()).bit_length() or 1, bits)
        parts = [
            (one, np.sign(weight) * (np.abs(weight) >> one & 2**bits - 1))
            for one in reversed(places)
        ]
        if all(reach(part, low, high) < EXACT_IN_FLOAT for _, part in parts):
            return parts
    raise ExportError(
        f"the sums of {name} are not exact in ONNX's float32: give it fewer inputs or features of "
        "fewer bits."
    )


def _of_floats(
    graph: Graph, x: str, parts: list[tuple[int, Array]], how: Mapping[str, Any], name: str
) -> str:
    """In as many parts as there are digits, put together as integers."""
    sums = ""
    for place, digit in parts:
        flat = digit.ndim == 2
        inputs = [x, graph.whole(f"{name}_weight", digit.T if flat else digit, "FLOAT")]
        part = graph.apply("MatMul" if flat else "Conv", inputs, f"{name}_part", **how)
        whole = graph.cast(part, "INT32", f"{name}_part")
        if place:
            factor = graph.constant(f"{name}_place", np.int32(2**place))
            whole = graph.apply("Mul", [whole, factor], f"{name}_placed")
        sums = graph.apply("Add", [sums, whole], f"{name}_sums") if sums else whole
    return sums


def reach(weight: Array, low: int, high: int) -> int:
    """How far from 0 a sum over features from low to high can get, in any order of summation.

    >>> reach(np.array([[3, -2]]), low=-1, high=10)
    32
    """
    flat = weight.reshape(len(weight), -1)
    ends = np.stack([flat * low, flat * high, np.zeros_like(flat)])
    return int(max(ends.max(0).sum(1).max(), -ends.min(0).sum(1).min()))
