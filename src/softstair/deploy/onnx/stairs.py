"""Stairs on sums: a comparison for each threshold, or a bisection where there are many."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from softstair.deploy import nodes
from softstair.deploy.onnx.graph import Graph
from softstair.deploy.onnx.stored import Stored, zero_point

__all__ = ["steps"]

Array = NDArray[Any]
MOST_COMPARED = 31
"""With more thresholds a bisection takes fewer operators than comparisons."""


def steps(graph: Graph, node: nodes.Steps, x: list[Stored], rank: int, name: str) -> Stored:
    """The levels of sums of that rank, without the batch: bytes where they fit."""
    zero = zero_point(node.low, node.high)
    levels = np.array(node.levels, np.int32)
    if zero is not None:
        levels = (levels + zero).astype(np.uint8)
    sums, thresholds = x[0], node.thresholds.numpy().astype(np.int32)
    if len(x) == 1 and len(levels) - 1 <= MOST_COMPARED:
        made = _compared(graph, sums.name, thresholds, levels, rank - node.axis, name)
    else:
        rows = thresholds.reshape(-1, thresholds.shape[-1])
        firsts = np.arange(0, len(rows), len(rows) // len(thresholds))
        beside = x[1].whole(graph, f"{name}_beside") if len(x) == 2 else None
        if beside is not None:
            firsts -= node.first
        firsts = firsts.reshape(-1, *[1] * (rank - node.axis)).astype(np.int32)
        made = _bisected(graph, sums, beside, rows, firsts, levels, name)
    return Stored(made, node.low, node.high, zero is not None, zero or 0)


def _compared(
    graph: Graph, sums: str, thresholds: Array, levels: Array, behind: int, name: str
) -> str:
    """Each threshold that a sum reaches puts the next level in place of the one before; so many
    axes lie behind that of the channels."""
    made = graph.constant(f"{name}_level", levels[0])
    for limits, level in zip(thresholds.T, levels[1:], strict=True):
        limit = graph.constant(f"{name}_threshold", limits.reshape(-1, *[1] * behind))
        reached = graph.apply("GreaterOrEqual", [sums, limit], f"{name}_reached")
        next_level = graph.constant(f"{name}_level", level)
        made = graph.apply("Where", [reached, next_level, made], f"{name}_features")
    return made


def _bisected(
    graph: Graph,
    sums: Stored,
    beside: str | None,
    rows: Array,
    firsts: Array,
    levels: Array,
    name: str,
) -> str:
    """Where a sum lies in its row of thresholds, halving the row each time.

    Row ``firsts`` of its channel, so many further as the number ``beside`` it says. All rows are
    one table, each of a power of two: a place in it is a row, and how many of its thresholds were
    reached. Beyond a row's own thresholds lie some that no sum reaches.
    """
    rounds = (len(levels) - 1).bit_length()
    table = np.full((len(rows), 2**rounds), sums.high + 1)
    table[:, 1 : len(levels)] = rows
    limits = graph.whole(f"{name}_thresholds", table.reshape(-1), "INT32")
    begin = graph.constant(f"{name}_rows", firsts * np.int32(2**rounds))
    if beside is not None:
        length = graph.constant(f"{name}_length", np.int32(2**rounds))
        further = graph.apply("Mul", [beside, length], f"{name}_beside_rows")
        begin = graph.apply("Add", [further, begin], f"{name}_begin")
    place = begin
    for power in reversed(range(rounds)):
        half = graph.constant(f"{name}_half", np.int32(2**power))
        further = graph.apply("Add", [place, half], f"{name}_further")
        limit = graph.apply("Gather", [limits, further], f"{name}_limit")
        reached = graph.apply("GreaterOrEqual", [sums.name, limit], f"{name}_reached")
        place = graph.apply("Where", [reached, further, place], f"{name}_place")
    index = graph.apply("Sub", [place, begin], f"{name}_index")
    kept = graph.constant(f"{name}_levels", levels)
    return graph.apply("Gather", [kept, index], f"{name}_features")
