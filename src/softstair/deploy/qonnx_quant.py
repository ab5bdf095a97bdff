"""Frozen networks in QONNX of ``Quant`` nodes alone, which hls4ml reads.

A stair is an affine step (see c/affine.py): level = floor((sum·m + b) / 2^s). The ``Quant`` of the
features floors and clamps. Each channel has the smallest s for which this holds in float32 as well
as in fixed point, at every sum. The output are the sums of the last layer. Scores are
sums·2^shift + bias, of which the metadata have both: they need more bits than float32 has.
"""

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softstair.deploy import nodes, onnx_graph, qonnx
from softstair.deploy.c.affine import MAX_SHIFT, affine_steps, lines_of
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.nodes import ExportError, Stair
from softstair.deploy.onnx_graph import Array
from softstair.deploy.onnx_levels import has_thresholds, reach, thresholds
from softstair.deploy.qonnx import DOMAIN, QonnxGraph


def write(network: FrozenNetwork, path: Path | str) -> Path:
    """Write a QONNX file: ``bytes`` (1, C, H, W), held in float32, in, and the last sums out."""
    return onnx_graph.write_model(model(network), path)


def model(network: FrozenNetwork) -> Any:
    """Return the ``onnx.ModelProto`` of :func:`write`."""
    last = network.last
    shown = {"shift": str(last.shift), "bias": json.dumps(last.bias.tolist())}
    return qonnx.model(network, WRITERS, last.inputs[0], shown)


def decoder(network: FrozenNetwork, file: Path) -> Callable[[Mapping[str, Array]], Any]:
    """Return what makes results of nodes and scores of a file's tensors, or of its output "0"."""
    names = QonnxGraph(network).identifiers
    last = copy.deepcopy(network).cpu().last

    def decode(y: Mapping[str, Array]) -> dict[str, Tensor]:
        found = {name: torch.from_numpy(y[key]).int() for name, key in names.items() if key in y}
        sums = found.get(last.inputs[0])
        if sums is None:
            sums = torch.from_numpy(y["0"]).int().reshape(-1, *network.sizes[last.inputs[0]])
        scores = last.run(sums)
        known = {"class": last.classes(scores)} if network.outputs == "classes" else {}
        return {**found, "scores": scores, **known}

    return decode


def _input(graph: QonnxGraph, node: nodes.Input, x: list[str]) -> None:
    if node.table is not None:
        reason = "its input is a table, which Quant nodes cannot express"
        raise ExportError.of(node.name, reason, "Freeze it with `zero` and `scale`")
    low, high = node.low + node.zero, node.high + node.zero
    given = _quant(
        graph, "bytes", (1, *node.shape), low, high, "ROUND", "given" if node.zero else ""
    )
    if node.zero:
        graph.apply("Sub", [given, graph.constant("zero", np.float32(node.zero))])


def _sum(graph: QonnxGraph, node: nodes.Sum | nodes.SumPool, x: list[str]) -> None:
    weight, attributes = onnx_graph.sum_operands(node, graph.network.sizes[node.name][0])
    linear = weight.ndim == 2
    if graph.prefix in graph.wide:
        raise ExportError.of(node.name, "QONNX holds integers below 2²⁴, not its sums")
    weights = _integers(graph, "weight", weight.T if linear else weight)
    if not linear:
        attributes["kernel_shape"] = weight.shape[2:]  # which moving channels asks for
    graph.apply("MatMul" if linear else "Conv", [*x, weights], **attributes)


def _stair(graph: QonnxGraph, node: Stair, x: list[str]) -> None:
    """Add the affine steps of thresholds, and the levels."""
    if (
        node.axis != 1
        or len(node.inputs) > 1
        or not (isinstance(node, nodes.Steps) or has_thresholds(node))
    ):
        reason = "it adds a shortcut before it rounds, or has more than 8 bits"
        raise ExportError.of(node.name, reason, "Write QONNX of the flavour multithreshold")
    low, high = reach(graph.network, node)
    if isinstance(node, nodes.Steps):
        gaps = np.diff(node.levels)
        step, sign = math.gcd(*gaps.tolist()), np.ones(len(low), np.int64)
        # Where levels are uneven, a threshold is repeated for each step of their common divisor.
        table = np.repeat(node.thresholds.long().numpy(), gaps // step, axis=1)
    else:
        signs, begins = thresholds(node, low, high)
        step, sign, table = 1, signs.numpy(), begins.numpy()
    ends = np.sort([sign * end.numpy() for end in (low, high)], 0)
    count = table.shape[1]
    # What the Quant clamps to: from 0, or as many below 0 as above.
    narrow = count & (count + 1) != 0
    from_zero = not narrow and (node.low >= 0 or step > 1 or count == 1)
    first = 0 if from_zero else -((count + 1) // 2)
    if narrow and (count + 2) & (count + 1):
        reason = f"its {count + 1} levels fill no number of bits"
        raise ExportError.of(node.name, reason, "Write QONNX of the flavour multithreshold")
    m, b, s = _affine(node, table, ends, first)
    y = _scaled(graph, node, x[0], m * sign, b, s)
    moved = node.low - first * step
    plain = step == 1 and moved == 0
    shape, hint = (1, *graph.network.sizes[node.name]), "" if plain else "index"
    y = _quant(graph, y, shape, first, first + count, "FLOOR", hint, narrow)
    if not plain:
        y = graph.apply("Mul", [y, graph.constant("step", np.float32(step))], "steps")
        graph.apply("Add", [y, graph.constant("low", np.float32(moved))])


def _affine(node: Stair, table: Array, ends: Array, first: int) -> Array:
    """Return multiplier, offset and shift of each channel, (3, C)."""
    rows = []
    for begins, least, greatest in zip(table, *ends, strict=True):
        channel = (begins[None], np.array([least]), np.array([greatest]))
        steps = affine_steps(*channel, first)
        for shift in range(0 if steps is None else int(steps.shift[0]), MAX_SHIFT + 1):
            m, b = lines_of(*channel, np.array([shift])).flatten()
            b = b + (first << shift)
            slope, offset = np.ldexp([m, b], -shift)
            if m >= 0 and _is_exact(slope, offset, *channel, first):
                rows.append((m, b, shift))
                break
        else:
            reason = "its levels are no affine steps of the sums that float32 computes"
            raise ExportError.of(node.name, reason, "Write QONNX of the flavour multithreshold")
    return np.array(rows).T


def _is_exact(m: float, b: float, begins: Array, least: Array, greatest: Array, first: int) -> bool:
    """Whether floor(m·x + b) are the levels of all sums, where float32 rounds it and elsewhere.

    None of the ways to compute it decreases, so it is enough that it does at each threshold, at the
    sum before it and at both ends.
    """
    x = np.concatenate([begins[0], begins[0] - 1, least, greatest]).clip(least, greatest)
    level = first + np.searchsorted(begins[0], x, "right")
    single, offset = np.float32(m), np.float32(b)
    exact = x * np.float64(single) + np.float64(offset)
    ways = (exact, exact.astype(np.float32), x.astype(np.float32) * single + offset)
    ends = (first, first + begins.shape[1])
    return all(bool((np.floor(y).clip(*ends) == level).all()) for y in ways)


def _scaled(graph: QonnxGraph, node: Stair, x: str, m: Array, b: Array, s: Array) -> str:
    """Add (sum·m + b) / 2^s: a batch normalisation where the axis of channels may be moved."""
    most = int(s.max())
    m, b = m << (most - s), b << (most - s)
    if len(graph.network.sizes[node.name]) == 1:
        y = graph.apply("Mul", [x, _integers(graph, "multiplier", m[None], most)], "product")
        return graph.apply("Add", [y, _integers(graph, "offset", b[None], most)], "affine")
    inputs = [x, _integers(graph, "multiplier", m, most), _integers(graph, "offset", b, most)]
    inputs += [graph.constant("mean", np.zeros(len(m), np.float32))]
    inputs += [graph.constant("variance", np.ones(len(m), np.float32))]
    return graph.apply("BatchNormalization", inputs, "affine", epsilon=0.0)


def _integers(graph: QonnxGraph, hint: str, values: Array, shift: int = 0) -> str:
    """Add constants values / 2^shift, in float32, after their Quant."""
    scaled = np.ldexp(values.astype(np.float64), -shift).astype(np.float32)
    low, high = (int(np.ldexp(np.float64(end), shift)) for end in (scaled.min(), scaled.max()))
    name = graph.constant(f"{hint}_whole", scaled)
    return _quant(graph, name, values.shape, min(low, 0), high, "ROUND", hint, shift=shift)


def _quant(
    graph: QonnxGraph,
    x: str,
    shape: Sequence[int],
    low: int,
    high: int,
    rounding: str,
    hint: str,
    narrow: bool = False,
    shift: int = 0,
) -> str:
    """Add a Quant to the fewest bits that hold integers over 2^shift."""
    width = max(nodes.bits(low, high), 2) if low < 0 else max(high.bit_length(), 1)
    numbers = {"scale": 2.0**-shift, "zero_point": 0.0, "bits": float(width)}
    inputs = [
        graph.constant(f"{hint or 'level'}_{key}", np.float32(value))
        for key, value in numbers.items()
    ]
    attributes: dict[str, Any] = {
        "signed": int(low < 0),
        "narrow": int(narrow),
        "rounding_mode": rounding,
    }
    name = graph.apply("Quant", [x, *inputs], hint, domain=DOMAIN, **attributes)
    if hint:  # the shape of a node's result is known; ONNX knows no Quant
        graph.between.append((name, "FLOAT", shape))
    return name


WRITERS: dict[type[nodes.Node], Callable[[QonnxGraph, Any, list[str]], Any]] = {
    **qonnx.WRITERS,
    nodes.Input: _input,
    nodes.Sum: _sum,
    nodes.SumPool: _sum,
    nodes.Steps: _stair,
    nodes.Requantise: _stair,
}
"""As in qonnx.py, but for these."""
