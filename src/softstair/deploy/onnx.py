"""Integer networks as ONNX files of standard operators, exact under ONNX Runtime.

Features are bytes with a zero point, and weights are packed into as few bits as they need. Where a
QLinearConv gives the same levels at every sum, it is a layer and its stair (see qlinear_conv.py).
Otherwise sums are ConvInteger and MatMulInteger: 32-bit integers, which no order of summation and
no fusion changes. Wider sums are float32, in parts of which every partial sum is an integer below
2²⁴. A stair is one comparison per threshold. With many, or with a shortcut, it repeats the float
operations of the trained network where these were proven to give the same levels (wide steps, see
affine.py), or else bisects. The scores of a float last layer are summed in double precision and
rounded once.

Two other forms are not exact. DequantizeLinear before MatMul: ONNX Runtime's default optimisations
replace it by an operator that quantises the features again (and in 2 bits gives wrong results where
the width is not a multiple of 4). Large signed weights: older x86 processors add pairs of their
products in 16 bits that saturate, which small ones, or unsigned ones with a zero point, avoid.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from softstair._errors import import_extra
from softstair.deploy import nodes, onnx_graph
from softstair.deploy.affine import small_wide_steps
from softstair.deploy.nodes import ExportError, IntegerNetwork
from softstair.deploy.onnx_graph import Array, OnnxGraph, StoredTensor, zero_point
from softstair.deploy.qlinear_conv import add_quantised_conv, quantised_convs
from softstair.deploy.target import HERE, Cpu, Runtime, Target, target_of

RESERVED = ("bytes", "scores", "class")
OPSET = 18  # the first with operators on bits
BATCH = "N"
NOTES = {
    "onnxruntime": "OpenVINO reads this file wrongly: write another with runtime=openvino",
    "openvino": "exact where INFERENCE_PRECISION_HINT is f32",
}


def write(
    network: IntegerNetwork,
    path: Path | str,
    features: bool = False,
    classes: Sequence[str] | None = None,
    cpu: Cpu | None = None,
    runtime: Runtime = "onnxruntime",
) -> Path:
    """Write an ONNX file: bytes (N, C, H, W) in, ``scores`` (N, classes) and ``class`` (N,) out.

    With ``features`` the result of every node is an output too, by :func:`feature_outputs`.
    ``classes`` are names for the file's metadata; ``cpu`` and ``runtime`` are those of ``export``.
    """
    target = target_of("onnx", cpu, runtime)
    return onnx_graph.write_model(model(network, features, classes, target), path)


def feature_outputs(network: IntegerNetwork, target: Target = HERE) -> dict[str, str]:
    """Return the output that holds each node's result in int32, by the node's name.

    Sums that a QLinearConv computes together with their stair have none.
    """
    names = onnx_graph.node_names(network, set(RESERVED), "_value")
    within = {conv.node.name for conv in quantised_convs(network, target).values()}
    outputs = {node: f"{name}_value" for node, name in names.items() if node not in within}
    return {**outputs, network.last.name: "scores"}


def model(
    network: IntegerNetwork,
    features: bool = False,
    classes: Sequence[str] | None = None,
    target: Target = HERE,
) -> Any:
    """Return the ``onnx.ModelProto`` of :func:`write`, checked, with the shape of every tensor."""
    reserved = set(RESERVED)
    names = onnx_graph.node_names(network, reserved, "_value")
    graph = OnnxGraph(reserved, target)
    stored: dict[str, StoredTensor] = {}
    convs, outputs = quantised_convs(network, target), feature_outputs(network, target)
    for node in network.nodes[:-1]:
        graph.prefix = names[node.name]
        if conv := convs.get(node.name):
            levels = add_quantised_conv(graph, conv, stored[conv.node.inputs[0]])
            # The maximum of a window is limited after it: fewer elements.
            is_pooled = all(isinstance(user, nodes.MaxPool) for user in network.users(node.name))
            stored[node.name] = levels if is_pooled else levels.limited(graph)
        elif node.name in outputs:
            stored[node.name] = _add_node(graph, network, node, [stored[x] for x in node.inputs])
    last, shape = network.last, network.sizes[network.last.name]
    graph.prefix = names[last.name]
    _add_scores(graph, last, stored[last.inputs[0]], len(shape))
    graph.apply("ArgMax", ["scores"], name="class", axis=1, keepdims=0)
    tensors: list[onnx_graph.TensorInfo] = [
        ("bytes", network.input.type_name.upper(), (BATCH, *network.input.shape)),
        ("scores", "FLOAT", (BATCH, *shape)),
        ("class", "INT64", (BATCH, *shape[1:])),
    ]
    if features:
        for name, tensor in stored.items():
            graph.prefix = names[name]
            integers, output = tensor.as_type(graph, "INT32"), f"{names[name]}_value"
            sizes = graph.constant("sizes", np.array([0, *network.sizes[name]]))
            graph.apply("Reshape", [integers.name, sizes], name=output)
            tensors.append((output, "INT32", (BATCH, *network.sizes[name])))
    proto = graph.model(network, classes, {"": OPSET}, tensors)
    for key, value in {**target._asdict(), "note": NOTES[target.runtime]}.items():
        proto.metadata_props.add(key=key, value=value)
    graph.onnx.checker.check_model(proto, full_check=True)
    return import_extra("onnx.shape_inference", "onnx").infer_shapes(
        proto, check_type=True, strict_mode=True, data_prop=True
    )


def _add_node(
    graph: OnnxGraph, network: IntegerNetwork, node: nodes.Node, x: list[StoredTensor]
) -> StoredTensor:
    """Add any node but the last."""
    rank = len(network.sizes[node.name])
    if isinstance(node, nodes.MaxPool | nodes.SumPool) and rank != len(node.kernel) + 1:
        raise ExportError.of(node.name, "ONNX cannot pool without channels", "Give it (C, H, W)")
    match node:
        case nodes.Input():
            if node.type_name != "int16":
                return StoredTensor("bytes", node.low, node.high, node.type_name.upper(), node.zero)
            operands = [graph.cast("bytes", "INT32"), graph.constant("zero", np.int32(node.zero))]
            return StoredTensor(graph.apply("Sub", operands), node.low, node.high)
        case nodes.SumPool() if (
            x[0].kind != "INT32"
            and not any(node.padding)
            and node.kernel == network.sizes[node.inputs[0]][1:]
        ):
            flat = all(isinstance(user, nodes.Flatten) for user in network.users(node.name))
            return _add_total(graph, node, x[0], None if flat else network.sizes[node.name])
        case nodes.Sum() | nodes.SumPool():
            return _weighted_sum(graph, x[0], node, network.sizes[node.name][0])
        case nodes.Steps():
            return _steps(graph, network, node, x)
        case nodes.MaxPool():
            if x[0].kind != "INT32":
                largest = graph.max_pool(node, x[0].name, graph.prefix)
                return replace(x[0], name=largest).limited(graph)
            # There is no MaxPool of int32.
            largest = graph.max_pool(node, graph.cast(x[0].name, "DOUBLE"), graph.name("max"))
            integers = graph.apply("Cast", [largest], to=graph.onnx.TensorProto.INT32)
            return replace(x[0], name=integers)
        case nodes.Flatten():
            if x[0].flat:
                return x[0]
            return replace(x[0], name=graph.apply("Flatten", [x[0].name]))
        case nodes.Expand():
            return replace(x[0], name=graph.expand(node, x[0].name))
        case nodes.Pad():
            zero = graph.constant("zero", np.array(x[0].zero, x[0].kind.lower()))
            return replace(x[0], name=graph.pad(node, x[0].name, zero, rank))
        case nodes.Concat():
            if len({(part.kind, part.zero) for part in x}) > 1:
                x = [part.as_type(graph, "INT32", "part_") for part in x]
            result = graph.apply("Concat", [part.name for part in x], axis=node.axis)
            return StoredTensor(result, node.low, node.high, x[0].kind, x[0].zero)
        case nodes.Add():
            terms = [term.as_type(graph, "INT32", "part_").name for term in x]
            return StoredTensor(graph.apply("Add", terms), node.low, node.high)
    raise ExportError.of(node.name, f"{type(node).__name__} has no form in ONNX")


def _add_total(
    graph: OnnxGraph, node: nodes.SumPool, x: StoredTensor, shape: nodes.Shape | None
) -> StoredTensor:
    """Add the sum of bytes over all positions, in a shape or flat: a product with ones."""
    axes, positions = range(2, 2 + len(node.kernel)), math.prod(node.kernel)
    # Channels are last where ONNX Runtime convolves: there this is no operation.
    last = graph.apply("Transpose", [x.name], "last", perm=[0, *axes, 1])
    merged = graph.constant("merged", np.array([0, positions, -1]))
    inputs = [
        graph.constant("ones", np.ones(positions, np.uint8)),
        graph.apply("Reshape", [last, merged], "positions"),
        graph.constant("zero", np.uint8(0)),
        graph.constant("zero", np.array(x.zero, x.kind.lower())),
    ]
    total = graph.apply("MatMulInteger", inputs, "total")
    if shape is not None:
        total = graph.apply("Reshape", [total, graph.constant("shape", np.array([0, *shape]))])
    return StoredTensor(total, node.low, node.high, flat=shape is None)


def _add_scores(graph: OnnxGraph, node: nodes.Node, x: StoredTensor, rank: int) -> None:
    """Add the last node; ``rank`` does not count the batch."""
    x = x.limited(graph)
    floats = graph.cast(x.name, "FLOAT")
    if x.zero:
        floats = graph.apply("Sub", [floats, graph.constant("zero", np.float32(x.zero))], "moved")
    match node:
        case nodes.Scores():
            unit = graph.constant("unit", np.float32(node.unit))
            features = graph.apply("Mul", [floats, unit], "features")
            wide = graph.cast(features, "DOUBLE")
            weight = graph.cast(graph.constant("weight", node.weight.numpy().T), "DOUBLE", "weight")
            y = graph.apply("MatMul", [wide, weight], "sums")
            if node.bias is not None:
                bias = graph.constant("bias", node.bias.double().numpy())
                y = graph.apply("Add", [y, bias], "biased")
            graph.apply("Cast", [y], name="scores", to=graph.onnx.TensorProto.FLOAT)
        case nodes.Rescaled():
            graph.rescale(node, floats, rank)
        case _:
            raise ExportError.of(node.name, f"{type(node).__name__} does not give scores")


def _weighted_sum(
    graph: OnnxGraph, x: StoredTensor, node: nodes.Sum | nodes.SumPool, channels: int
) -> StoredTensor:
    """Add the sums of a node, in int32."""
    weight, attributes = onnx_graph.sum_operands(node, channels)
    if nodes.largest_sum(weight, x.low, x.high) >= nodes.INT32_LIMIT - 1:
        raise ExportError.of(node.name, "its partial sums do not fit into 32 bits")
    zero = zero_point(int(weight.min()), int(weight.max()))
    if zero is not None and zero_point(x.low, x.high) is not None:
        x_bytes, linear = x.as_type(graph, "UINT8"), weight.ndim == 2
        product = (x_bytes.high + x_bytes.zero) * (int(weight.max()) + zero)
        if product * weight[0].size < nodes.INT32_LIMIT:
            weight_bytes = ((weight.T if linear else weight) + zero).astype(np.uint8)
            zeros = [graph.constant("zero", np.uint8(byte)) for byte in (x_bytes.zero, zero)]
            inputs = [x_bytes.name, onnx_graph.packed_weights(graph, weight_bytes), *zeros]
            kind = "MatMulInteger" if linear else "ConvInteger"
            return StoredTensor(graph.apply(kind, inputs, **attributes), node.low, node.high)
    floats = graph.cast(x.as_type(graph, "INT32").name, "FLOAT")
    parts = digits(node.name, weight, x.low, x.high)
    return StoredTensor(_sum_of_floats(graph, floats, parts, attributes), node.low, node.high)


def digits(name: str, weight: Array, low: int, high: int) -> list[tuple[int, Array]]:
    """Split weights into Σ 2^shift · digit, so that float32 sums of each digit are exact.

    The highest digit is first; features are from ``low`` to ``high``.
    """
    for bits in (24, 12, 8, 6, 4, 3, 2, 1):
        shifts = range(0, int(np.abs(weight).max()).bit_length() or 1, bits)
        parts = [
            (shift, np.sign(weight) * (np.abs(weight) >> shift & 2**bits - 1))
            for shift in reversed(shifts)
        ]
        if all(nodes.largest_sum(part, low, high) < nodes.FLOAT32_EXACT for _, part in parts):
            return parts
    raise ExportError.of(name, "its sums are not exact in float32", "Use fewer inputs or bits")


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


def _steps(
    graph: OnnxGraph, network: IntegerNetwork, node: nodes.Steps, x: list[StoredTensor]
) -> StoredTensor:
    """Add the levels of sums, as bytes where they fit."""
    zero = zero_point(node.low, node.high)
    kind, zero = ("INT32", 0) if zero is None else ("UINT8", zero)
    levels: Array = (np.array(node.levels) + zero).astype(kind.lower())
    thresholds = node.thresholds.numpy().astype(np.int32)
    per_channel = (-1, *[1] * (len(network.sizes[node.name]) - node.axis))
    sums = x[0].as_type(graph, "INT32")
    if len(x) == 1 and len(levels) - 1 <= onnx_graph.MAX_COMPARISONS:
        # The level is replaced by the next one for each threshold that a sum reaches.
        result = graph.constant("level", levels[0])
        for limits, level in zip(thresholds.T, levels[1:], strict=True):
            limit = graph.constant("threshold", limits.reshape(per_channel))
            reached = graph.apply("GreaterOrEqual", [sums.name, limit], "reached")
            next_level = graph.constant("level", level)
            result = graph.apply("Where", [reached, next_level, result], "features")
        return StoredTensor(result, node.low, node.high, kind, zero)
    shortcut = x[1].as_type(graph, "INT32", "beside_").name if len(x) == 2 else None
    source = network.node(node.inputs[0])
    low = int(levels[0])
    if kind == "UINT8" and node.floats is not None and small_wide_steps(node, source, low):
        ends = (node.first, low)
        total = onnx_graph.wide_levels(graph, node.floats, sums.name, shortcut, *ends, per_channel)
        return StoredTensor(graph.cast(total, kind), node.low, node.high, kind, zero)
    rows = thresholds.reshape(-1, thresholds.shape[-1])
    first_rows: Array = np.arange(0, len(rows), len(rows) // len(thresholds)) - node.first
    first_rows = first_rows.reshape(per_channel).astype(np.int32)
    result = _bisected(graph, sums, shortcut, rows, first_rows, levels)
    return StoredTensor(result, node.low, node.high, kind, zero)


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
