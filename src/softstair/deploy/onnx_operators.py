"""Sums and stairs of an integer network in standard ONNX operators.

Sums over bytes are ConvInteger and MatMulInteger. Wider ones are computed in float32, in parts of
which every partial sum is an integer below 2²⁴. A stair is one comparison per threshold, or a
bisection where there are many.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from softstair.deploy import nodes
from softstair.deploy.nodes import ExportError
from softstair.deploy.onnx_graph import (
    FLOAT32_EXACT,
    Array,
    OnnxGraph,
    largest_sum,
    sum_operands,
)

__all__ = ["StoredTensor", "digits", "steps", "weighted_sum"]

INT32_LIMIT = 2**31
MAX_COMPARISONS = 31
"""With more thresholds a bisection takes fewer operators."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of integers from ``low`` to ``high``: int32, or bytes where ``zero_byte`` is 0."""

    name: str
    low: int
    high: int
    zero_byte: int | None = None

    def as_int32(self, graph: OnnxGraph, hint: str = "") -> str:
        """Return the name of the same integers in int32."""
        if self.zero_byte is None:
            return self.name
        wide = graph.cast(self.name, "INT32", f"{hint}taken")
        zero = graph.constant(f"{hint}zero", np.int32(self.zero_byte))
        return graph.apply("Sub", [wide, zero], f"{hint}whole")

    def as_bytes(self, graph: OnnxGraph, zero: int) -> "StoredTensor":
        """Return the same integers in bytes with that zero, unless they are bytes already."""
        if self.zero_byte is not None:
            return self
        byte = graph.constant("taken_zero", np.int32(zero))
        raised = graph.apply("Add", [self.name, byte], "taken_raised")
        return StoredTensor(graph.cast(raised, "UINT8", "taken"), self.low, self.high, zero)


def zero_point(low: int, high: int) -> int | None:
    """Return the byte that stands for 0, or None if bytes cannot hold 0 and low to high.

    >>> zero_point(-1, 1), zero_point(2, 255), zero_point(-100, 200)
    (1, 0, None)
    """
    zero = -min(low, 0)
    return zero if zero + max(high, 0) <= 255 else None


def weighted_sum(
    graph: OnnxGraph, x: StoredTensor, node: nodes.Sum | nodes.SumPool, channels: int
) -> StoredTensor:
    """Add the sums of a node, in int32."""
    weight, attributes = sum_operands(node, channels)
    if largest_sum(weight, x.low, x.high) >= INT32_LIMIT - 1:
        raise ExportError.of(
            node.name, "its partial sums do not fit into 32 bits", "Use fewer inputs or bits"
        )
    zero, x_zero = zero_point(int(weight.min()), int(weight.max())), zero_point(x.low, x.high)
    if zero is not None and x_zero is not None:
        x_bytes = x.as_bytes(graph, x_zero)
        product = (x_bytes.high + (x_bytes.zero_byte or 0)) * (int(weight.max()) + zero)
        if product * weight[0].size < INT32_LIMIT:
            sums = _sum_of_bytes(graph, x_bytes, weight, zero, attributes)
            return StoredTensor(sums, node.low, node.high)
    floats = graph.cast(x.as_int32(graph), "FLOAT")
    parts = digits(node.name, weight, x.low, x.high)
    return StoredTensor(_sum_of_floats(graph, floats, parts, attributes), node.low, node.high)


def _sum_of_bytes(
    graph: OnnxGraph, x: StoredTensor, weight: Array, zero: int, attributes: Mapping[str, Any]
) -> str:
    linear = weight.ndim == 2
    weight_bytes = ((weight.T if linear else weight) + zero).astype(np.uint8)
    zeros = [graph.constant("zero", np.uint8(byte)) for byte in (x.zero_byte or 0, zero)]
    inputs = [x.name, _packed(graph, weight_bytes), *zeros]
    return graph.apply("MatMulInteger" if linear else "ConvInteger", inputs, **attributes)


def _packed(graph: OnnxGraph, weight: Array) -> str:
    """Store bytes in as few bits as the largest needs; operators unpack them.

    Where all are even, as those of −1 and 1 with zero point 1 are, the lowest bit is not stored.
    """
    even = not (weight & 1).any()
    weight = weight >> 1 if even else weight
    bits = next(bits for bits in (1, 2, 4, 8) if int(weight.max()) < 2**bits)
    if bits == 8:
        return graph.constant("weight", weight << int(even))
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    padded = np.pad(weight.reshape(-1), (0, -weight.size % len(shifts)))
    packed = np.bitwise_or.reduce(padded.reshape(-1, len(shifts)) << shifts, axis=1)[:, None]
    inputs = [graph.constant("weight_packed", packed), graph.constant("weight_places", shifts)]
    shifted = graph.apply("BitShift", inputs, "weight_shifted", direction="RIGHT")
    mask = graph.constant("weight_mask", np.uint8(2**bits - 1))
    values = graph.apply("BitwiseAnd", [shifted, mask], "weight_values")
    if padded.size > weight.size:
        flat = graph.constant("weight_all", np.array([-1]))
        values = graph.apply("Reshape", [values, flat], "weight_padded")
        ends = [graph.constant("weight_end", np.array([end])) for end in (0, weight.size)]
        values = graph.apply("Slice", [values, *ends], "weight_cut")
    if even:
        one_bit = graph.constant("weight_even", np.uint8(1))
        values = graph.apply("BitShift", [values, one_bit], "weight_doubled", direction="LEFT")
    shape = graph.constant("weight_shape", np.array(weight.shape))
    return graph.apply("Reshape", [values, shape], "weight")


def digits(name: str, weight: Array, low: int, high: int) -> list[tuple[int, Array]]:
    """Split weights into Σ 2^shift · digit, so that float32 sums of each digit are exact.

    The highest digit is first; features are from ``low`` to ``high``.

    >>> digits("conv", np.array([[-300, 5]]), low=0, high=2**16)
    [(8, array([[-1,  0]])), (0, array([[-44,   5]]))]
    """
    for bits in (24, 12, 8, 6, 4, 3, 2, 1):
        shifts = range(0, int(np.abs(weight).max()).bit_length() or 1, bits)
        parts = [
            (shift, np.sign(weight) * (np.abs(weight) >> shift & 2**bits - 1))
            for shift in reversed(shifts)
        ]
        if all(largest_sum(part, low, high) < FLOAT32_EXACT for _, part in parts):
            return parts
    raise ExportError.of(
        name, "its sums are not exact in ONNX's float32", "Use fewer inputs or bits of features"
    )


def _sum_of_floats(
    graph: OnnxGraph, x: str, parts: list[tuple[int, Array]], attributes: Mapping[str, Any]
) -> str:
    """Add one sum per digit of the weights, combined as integers."""
    sums = ""
    for shift, digit in parts:
        linear = digit.ndim == 2
        inputs = [x, graph.integers("weight", digit.T if linear else digit, "FLOAT")]
        part = graph.apply("MatMul" if linear else "Conv", inputs, "part", **attributes)
        integers = graph.cast(part, "INT32", "part")
        if shift:
            factor = graph.constant("place", np.int32(2**shift))
            integers = graph.apply("Mul", [integers, factor], "placed")
        sums = graph.apply("Add", [sums, integers], "sums") if sums else integers
    return sums


def steps(graph: OnnxGraph, node: nodes.Steps, x: list[StoredTensor], rank: int) -> StoredTensor:
    """Add the levels of sums, as bytes where they fit; ``rank`` does not count the batch."""
    zero = zero_point(node.low, node.high)
    levels = np.array(node.levels, np.int32)
    if zero is not None:
        levels = (levels + zero).astype(np.uint8)
    thresholds = node.thresholds.numpy().astype(np.int32)
    per_channel = (-1, *[1] * (rank - node.axis))
    if len(x) == 1 and len(levels) - 1 <= MAX_COMPARISONS:
        limits = [column.reshape(per_channel) for column in thresholds.T]
        return StoredTensor(_compared(graph, x[0].name, limits, levels), node.low, node.high, zero)
    rows = thresholds.reshape(-1, thresholds.shape[-1])
    first_rows: Array = np.arange(0, len(rows), len(rows) // len(thresholds))
    shortcut = None
    if len(x) == 2:
        shortcut = x[1].as_int32(graph, "beside_")
        first_rows -= node.first
    first_rows = first_rows.reshape(per_channel).astype(np.int32)
    result = _bisected(graph, x[0], shortcut, rows, first_rows, levels)
    return StoredTensor(result, node.low, node.high, zero)


def _compared(graph: OnnxGraph, sums: str, limits: list[Array], levels: Array) -> str:
    """Replace the level by the next one for each threshold that a sum reaches."""
    result = graph.constant("level", levels[0])
    for limit, level in zip(limits, levels[1:], strict=True):
        inputs = [sums, graph.constant("threshold", limit)]
        reached = graph.apply("GreaterOrEqual", inputs, "reached")
        next_level = graph.constant("level", level)
        result = graph.apply("Where", [reached, next_level, result], "features")
    return result


def _bisected(
    graph: OnnxGraph,
    sums: StoredTensor,
    shortcut: str | None,
    rows: Array,
    first_rows: Array,
    levels: Array,
) -> str:
    """Find each sum in its row of thresholds by bisection.

    The row is ``first_rows`` of the channel plus the shortcut's integer. All rows form one table,
    padded to a power of two by thresholds that no sum reaches; a position in it is a row and the
    number of thresholds reached.
    """
    rounds = (len(levels) - 1).bit_length()
    table = np.full((len(rows), 2**rounds), sums.high + 1)
    table[:, 1 : len(levels)] = rows
    limits = graph.integers("thresholds", table.reshape(-1), "INT32")
    begin = graph.constant("rows", first_rows * np.int32(2**rounds))
    if shortcut is not None:
        length = graph.constant("length", np.int32(2**rounds))
        offset = graph.apply("Mul", [shortcut, length], "beside_rows")
        begin = graph.apply("Add", [offset, begin], "begin")
    position = begin
    for power in reversed(range(rounds)):
        half = graph.constant("half", np.int32(2**power))
        further = graph.apply("Add", [position, half], "further")
        limit = graph.apply("Gather", [limits, further], "limit")
        reached = graph.apply("GreaterOrEqual", [sums.name, limit], "reached")
        position = graph.apply("Where", [reached, further, position], "place")
    index = graph.apply("Sub", [position, begin], "index")
    return graph.apply("Gather", [graph.constant("levels", levels), index], "features")
