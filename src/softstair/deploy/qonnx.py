"""Integer networks in QONNX, the ONNX dialect of FPGA tools.

Tensors are float32 that hold integers. Weights follow a ``Quant`` (``BipolarQuant`` where all are
−1 or 1), a stair with its normalisation is a ``MultiThreshold``, and every tensor is annotated with
its integer type. If a stair of many levels has a shortcut, its thresholds are counted by wide steps
(see affine.py).
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from softstair._errors import import_extra
from softstair.deploy import nodes, onnx_graph
from softstair.deploy.affine import small_wide_steps
from softstair.deploy.nodes import ExportError, IntegerNetwork, bits
from softstair.deploy.onnx_graph import Array, OnnxGraph, TensorInfo

DOMAIN = "qonnx.custom_op.general"
OPSETS = {"": 11, DOMAIN: 1}  # those of the qonnx package
RESERVED = ("bytes", "scores")
BATCH = 1


def write(network: IntegerNetwork, path: Path | str, classes: Sequence[str] | None = None) -> Path:
    """Write a QONNX file: ``bytes`` (1, C, H, W), held in float32, in and ``scores`` out."""
    return onnx_graph.write_model(model(network, classes), path)


def feature_tensors(network: IntegerNetwork) -> dict[str, str]:
    """Return the tensor of the file that holds each node's result, by the node's name."""
    return {**onnx_graph.node_names(network, set(RESERVED)), network.last.name: "scores"}


def model(network: IntegerNetwork, classes: Sequence[str] | None = None) -> Any:
    """Return the ``onnx.ModelProto`` of :func:`write`."""
    names = feature_tensors(network)
    graph = _AnnotatedGraph({*RESERVED, *names.values()})
    graph.datatypes["bytes"] = network.input.type_name.upper()
    for node in network.nodes:
        _check_range(network, node)
        name = names[node.name]
        graph.prefix = name
        _add_node(graph, network, node, [names[x] for x in node.inputs])
        if node is not network.last:
            graph.annotate(name, _datatype_of(node), (BATCH, *network.sizes[node.name]))
    tensors: list[TensorInfo] = [
        ("bytes", "FLOAT", (BATCH, *network.input.shape)),
        ("scores", "FLOAT", (BATCH, *network.sizes[network.last.name])),
    ]
    proto = graph.model(network, classes, OPSETS, tensors, graph.between)
    for name, datatype in graph.datatypes.items():
        annotation = proto.graph.quantization_annotation.add(tensor_name=name)
        annotation.quant_parameter_tensor_names.add(key="finn_datatype", value=datatype)
    graph.onnx.checker.check_model(proto)
    return import_extra("onnx.shape_inference", "onnx").infer_shapes(proto)


class _AnnotatedGraph(OnnxGraph):
    """A graph with the integer types of its tensors, and shapes where ONNX cannot infer them."""

    def __init__(self, names: set[str]) -> None:
        super().__init__(names)
        self.datatypes: dict[str, str] = {}
        self.between: list[TensorInfo] = []

    def annotate(self, name: str, datatype: str, shape: Sequence[int]) -> None:
        self.datatypes[name] = datatype
        self.between.append((name, "FLOAT", shape))


def _add_node(
    graph: _AnnotatedGraph, network: IntegerNetwork, node: nodes.Node, x: list[str]
) -> None:
    rank = len(network.sizes[node.name])
    match node:
        case nodes.Input():
            name, graph.prefix = graph.prefix, ""
            zero = graph.constant("zero", np.float32(node.zero))
            graph.apply("Sub", ["bytes", zero], name=name)
        case nodes.Sum() | nodes.SumPool():
            weight, attributes = onnx_graph.sum_operands(node, network.sizes[node.name][0])
            linear = weight.ndim == 2
            weights = _add_weights(graph, weight.T if linear else weight)
            graph.apply("MatMul" if linear else "Conv", [*x, weights], **attributes)
        case nodes.Steps():
            _add_steps(graph, network, node, x)
        case nodes.MaxPool():
            graph.max_pool(node, x[0], graph.prefix)
        case nodes.Expand():
            graph.expand(node, x[0])
        case nodes.Pad():
            graph.pad(node, x[0], graph.constant("zero", np.float32(0)), rank)
        case nodes.Concat():
            graph.apply("Concat", x, axis=node.axis)
        case nodes.Flatten() | nodes.Add():
            graph.apply(type(node).__name__, x)
        case nodes.Scores():
            _add_scores(graph, node, x[0])
        case nodes.Rescaled():
            graph.rescale(node, x[0], rank)
        case _:
            raise ExportError.of(node.name, f"{type(node).__name__} has no form in QONNX")


def _add_weights(graph: _AnnotatedGraph, weight: Array) -> str:
    low, high = int(weight.min()), int(weight.max())
    inputs = [
        graph.constant("weight_whole", weight.astype(np.float32)),
        graph.constant("weight_scale", np.float32(1)),
    ]
    if low == -1 and bool((np.abs(weight) == 1).all()):
        datatype = "BIPOLAR"
        name = graph.apply("BipolarQuant", inputs, "weight", domain=DOMAIN)
    else:
        datatype, width, signed = _datatype(low, high), _width(low, high), low < 0
        inputs.append(graph.constant("weight_zero", np.float32(0)))
        inputs.append(graph.constant("weight_bits", np.float32(width)))
        narrow = signed and low > -(2 ** (width - 1))
        attributes: dict[str, Any] = {"signed": int(signed), "narrow": int(narrow)}
        attributes |= {"rounding_mode": "ROUND", "domain": DOMAIN}
        name = graph.apply("Quant", inputs, "weight", **attributes)
    graph.annotate(name, datatype, weight.shape)
    return name


def _add_steps(
    graph: _AnnotatedGraph, network: IntegerNetwork, node: nodes.Steps, x: list[str]
) -> None:
    if node.axis != 1:
        raise ExportError.of(node.name, f"QONNX has no MultiThreshold on axis {node.axis}")
    thresholds, sums, shape = node.thresholds.numpy(), x[0], network.sizes[node.name]
    if len(x) == 2:
        source, highest = network.node(node.inputs[0]), len(node.levels) - 1
        floats = node.floats if highest > onnx_graph.MAX_COMPARISONS else None
        if floats is not None and small_wide_steps(node, source, 0):
            ends, per_channel = (node.first, 0), (-1, *[1] * (len(shape) - 1))
            integers = graph.cast(x[0], "INT32"), graph.cast(x[1], "INT32", "beside")
            total = onnx_graph.wide_levels(graph, floats, *integers, *ends, per_channel)
            sums = graph.cast(total, "FLOAT", "reached")
            graph.annotate(sums, _datatype(0, highest), (BATCH, *shape))
        else:
            sums = _add_reached(graph, node, x, shape)
        thresholds = np.arange(1, len(node.levels))[None]
    # Where levels are uneven, a threshold is repeated for each step of their common divisor.
    gaps = np.diff(node.levels)
    step = math.gcd(*gaps.tolist())
    thresholds = np.repeat(thresholds, gaps // step, axis=1)
    ends = (node.levels[0], step)
    _add_multi_threshold(graph, sums, thresholds, ends, _datatype_of(node), len(shape))


def _add_reached(
    graph: _AnnotatedGraph, node: nodes.Steps, x: list[str], shape: Sequence[int]
) -> str:
    """Add the number of thresholds that a sum s reaches, where each has a t(n) per shortcut n.

    In each channel t falls or rises with n, so that s ≥ t(n) is a threshold on (the number of
    values v with s ≥ t(v)) ± n.
    """
    table = node.thresholds.numpy()
    count = table.shape[1]
    differences = np.diff(table, axis=1)
    rises = (differences > 0).any((1, 2))
    if bool(((differences < 0).any((1, 2)) & rises).any()):
        raise ExportError.of(node.name, "its thresholds neither fall nor rise with its shortcut")

    def annotated(tensor: str, low: int, high: int) -> str:
        graph.annotate(tensor, _datatype(low, high), (BATCH, *shape))
        return tensor

    low, high, beside = node.first, node.first + count - 1, x[1]
    if rises.any():
        sign = np.where(rises, -1, 1).reshape(-1, *[1] * (len(shape) - 1)).astype(np.float32)
        low, high = min(low, -high), max(high, -low)
        beside = graph.apply("Mul", [beside, graph.constant("sign", sign)], "beside")
        annotated(beside, low, high)
    limits = np.where(rises, 1 - node.first, count + node.first)[:, None]
    reached = ""
    for number in range(table.shape[2]):
        values = np.sort(table[:, :, number], axis=1)
        datatype = _datatype(0, count)
        passed = _add_multi_threshold(graph, x[0], values, (0, 1), datatype, len(shape), "passed")
        added = graph.apply("Add", [annotated(passed, 0, count), beside], "added")
        annotated(added, low, count + high)
        bit = _add_multi_threshold(graph, added, limits, (0, 1), "BINARY", len(shape), "bit")
        annotated(bit, 0, 1)
        if reached:
            bit = annotated(graph.apply("Add", [reached, bit], "reached"), 0, number + 1)
        reached = bit
    return reached


def _add_multi_threshold(
    graph: OnnxGraph,
    x: str,
    thresholds: Array,
    levels: tuple[int, int],
    datatype: str,
    rank: int,
    hint: str = "",
) -> str:
    """Add first + step · (thresholds reached), with ``levels`` = (first, step)."""
    limits = graph.constant("thresholds", thresholds.astype(np.float32))
    return graph.apply(
        "MultiThreshold",
        [x, limits],
        hint,
        domain=DOMAIN,
        out_dtype=datatype,
        out_scale=float(levels[1]),
        out_bias=float(levels[0]),
        data_layout={1: "NC", 2: "NCW"}.get(rank, "NCHW"),
    )


def _add_scores(graph: OnnxGraph, node: nodes.Scores, x: str) -> None:
    if node.unit != 1.0:
        x = graph.apply("Mul", [x, graph.constant("unit", np.float32(node.unit))], "features")
    inputs = [x, graph.constant("weight", node.weight.numpy().T)]
    if node.bias is None:
        graph.apply("MatMul", inputs)
    else:
        bias = graph.constant("bias", node.bias.numpy())
        graph.apply("Add", [graph.apply("MatMul", inputs, "sums"), bias])


def _check_range(network: IntegerNetwork, node: nodes.Node) -> None:
    """Raise ExportError if a partial sum is not an integer that float32 holds."""
    largest = max(abs(node.low), abs(node.high))
    if isinstance(node, nodes.Sum):
        source = network.node(node.inputs[0])
        largest = nodes.largest_sum(node.weight.numpy(), source.low, source.high)
    if largest >= nodes.FLOAT32_EXACT:
        raise ExportError.of(node.name, f"QONNX holds integers below 2²⁴, not {largest}")


def _datatype_of(node: nodes.Node) -> str:
    bipolar = isinstance(node, nodes.Steps) and node.levels == (-1, 1)
    return "BIPOLAR" if bipolar else _datatype(node.low, node.high)


def _datatype(low: int, high: int) -> str:
    """Return QONNX's name of the integers from ``low`` to ``high``."""
    width = _width(low, high)
    if low < 0:
        return f"INT{width}"
    return f"UINT{width}" if width > 1 else "BINARY"


def _width(low: int, high: int) -> int:
    """Return the bits of a signed integer, or of an unsigned one where none is negative."""
    return bits(low, high) if low < 0 else max(high.bit_length(), 1)
