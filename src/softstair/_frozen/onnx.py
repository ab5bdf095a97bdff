"""Frozen networks as ONNX files of standard operators, exact under ONNX Runtime.

Features are bytes with a zero point, and weights are packed into as few bits as they need. Where a
QLinearConv gives the same levels at every sum, it is a layer and its stair (see qlinear_conv.py).
Otherwise sums are ConvInteger and MatMulInteger: 32-bit integers, which no order of summation and
no fusion changes. Wider features or weights are float32 where every partial sum is below 2²⁴, or
else a product of integers in a linear layer and sums of bytes in a convolution. Stairs and
requantisations are those of onnx_levels.py.

Two other forms are not exact. DequantizeLinear before MatMul: ONNX Runtime's default optimisations
replace it by an operator that quantises the features again (and in 2 bits gives wrong results where
the width is not a multiple of 4). Large signed weights: older x86 processors add pairs of their
products in 16 bits that saturate, which small ones, or unsigned ones with a zero point, avoid.
"""

import copy
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softstair._errors import import_extra
from softstair._frozen import nodes, onnx_graph
from softstair._frozen.network import FrozenNetwork
from softstair._frozen.nodes import ExportError
from softstair._frozen.onnx_graph import Array, OnnxGraph, StoredTensor, storage, zero_point
from softstair._frozen.onnx_levels import add_requantised, add_steps
from softstair._frozen.qlinear_conv import add_quantised_conv, quantised_convs
from softstair.deploy.target import HERE, Cpu, Runtime, Target, target_of

OPSET = 18  # the first with operators on bits
BATCH = "N"
NOTES = {
    "onnxruntime": "OpenVINO reads this file wrongly: write another with runtime=openvino",
    "openvino": "exact where INFERENCE_PRECISION_HINT is f32",
}


def write(
    network: FrozenNetwork,
    path: Path | str,
    cpu: Cpu | None = None,
    runtime: Runtime = "onnxruntime",
    trace: bool = False,
) -> Path:
    """Write an ONNX file: ``bytes`` (N, C, H, W) in, int32 ``scores`` and int64 ``class`` out.

    A network of values has float64 ``values`` in place of ``class``. With ``trace`` the results of
    nodes are outputs too, in int32; only sums that a QLinearConv computes have none.
    """
    return onnx_graph.write_model(model(network, target_of("onnx", cpu, runtime), trace), path)


def runner(file: Path | str) -> Callable[[Tensor], dict[str, Tensor]]:
    """Return what a file computes of a batch under ONNX Runtime.

    Results are those of nodes, by their names, if the file has them, and ``"scores"`` and
    ``"class"`` or ``"values"``.
    """
    runtime = import_extra("onnxruntime", "onnx")
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    traced = json.loads(session.get_modelmeta().custom_metadata_map.get("features", "{}"))
    ends = [output.name for output in session.get_outputs()]
    names = {name: name for name in ends if name not in traced.values()} | traced

    def run(x: Tensor) -> dict[str, Tensor]:
        results = session.run([*names.values()], {"bytes": x.cpu().numpy()})
        return dict(zip(names, map(torch.from_numpy, results), strict=True))

    return run


def model(network: FrozenNetwork, target: Target = HERE, trace: bool = False) -> Any:
    """Return the ``onnx.ModelProto`` of :func:`write`, checked, with the shape of every tensor."""
    network = copy.deepcopy(network).cpu()
    graph = OnnxGraph(network, target, "_value")
    stored: dict[str, StoredTensor] = {}
    convs = quantised_convs(network, target)
    within = {conv.node.name for conv in convs.values()}
    for node in network.nodes[:-1]:
        graph.prefix = graph.identifiers[node.name]
        if conv := convs.get(node.name):
            levels = add_quantised_conv(graph, conv, stored[conv.node.inputs[0]])
            # The maximum of a window is limited after it: fewer elements.
            is_pooled = all(isinstance(user, nodes.MaxPool) for user in network.users(node.name))
            stored[node.name] = levels if is_pooled else levels.limited(graph)
        elif node.name not in within:
            stored[node.name] = WRITERS[type(node)](graph, node, [stored[x] for x in node.inputs])
    graph.prefix = graph.identifiers[network.last.name]
    _add_scores(graph, network.last, stored[network.last.inputs[0]])
    tensors: list[onnx_graph.TensorInfo] = [
        ("bytes", network.input.dtype.upper(), (BATCH, *network.input.shape)),
        ("scores", "INT32", (BATCH, *network.sizes[network.last.name])),
        _add_answer(graph, network.last),
    ]
    features = {name: f"{graph.identifiers[name]}_value" for name in stored if trace}
    for name, output in features.items():
        graph.prefix = graph.identifiers[name]
        graph.apply("Identity", [stored[name].as_type(graph, "INT32").name], name=output)
        tensors.append((output, "INT32", (BATCH, *network.sizes[name])))
    properties = {**target._asdict(), "note": NOTES[target.runtime]}
    properties |= {"features": json.dumps(features)} if trace else {}
    proto = graph.model({"": OPSET}, tensors, properties=properties)
    graph.onnx.checker.check_model(proto, full_check=True)
    return import_extra("onnx.shape_inference", "onnx").infer_shapes(
        proto, check_type=True, strict_mode=True, data_prop=True
    )


def _add_scores(graph: OnnxGraph, node: nodes.Scores, x: StoredTensor) -> None:
    integers = x.as_type(graph, "INT32").name
    moved = graph.line(integers, ("Mul", np.int32(1 << node.shift)), hint="shifted")
    bias = graph.constant("bias", graph.per_channel(node, node.bias))
    graph.apply("Add", [moved, bias], name="scores")


def _add_answer(graph: OnnxGraph, node: nodes.Scores) -> onnx_graph.TensorInfo:
    """Add ``class`` or ``values``; return its type and shape."""
    row, shape = lambda x: graph.per_channel(node, x), graph.network.sizes[node.name]
    if graph.network.outputs == "values":
        inputs = [graph.cast("scores", "DOUBLE"), graph.constant("scale", row(node.scale))]
        graph.apply("Mul", inputs, name="values")
        return "values", "DOUBLE", (BATCH, *shape)
    order, ranked = row(node.order.long()), "scores"
    if (order != order.reshape(-1)[0]).any() or (order < 1).any():
        ranked = graph.line(graph.cast("scores", "INT64"), ("Mul", order), hint="ranked")
    graph.apply("ArgMax", [ranked], name="class", axis=node.axis, keepdims=0)
    rest = (*shape[: node.axis - 1], *shape[node.axis :])
    return "class", "INT64", (BATCH, *rest)


def _input(graph: OnnxGraph, node: nodes.Input, x: list[StoredTensor]) -> StoredTensor:
    if node.table is not None:
        return _looked_up(graph, node, node.table.numpy())
    if node.dtype != "int16":
        return StoredTensor("bytes", node.low, node.high, node.dtype.upper(), node.zero)
    operands = [graph.cast("bytes", "INT32"), graph.constant("zero", np.int32(node.zero))]
    return StoredTensor(graph.apply("Sub", operands), node.low, node.high)


def _looked_up(graph: OnnxGraph, node: nodes.Input, table: Array) -> StoredTensor:
    """Add what the table of each channel has."""
    kind, zero = storage(node)
    flat = table.reshape(-1).astype(np.int32) + zero
    values = graph.constant("table", flat.astype(np.uint8)) if kind == "UINT8" else ""
    inputs = [values or graph.integers("table", flat, kind), graph.table_places(node)]
    return StoredTensor(graph.apply("Gather", inputs), node.low, node.high, kind, zero)


def _sum_pool(graph: OnnxGraph, node: nodes.SumPool, x: list[StoredTensor]) -> StoredTensor:
    shape = graph.network.sizes[node.inputs[0]]
    _check_rank(graph, node)
    if node.kernel != shape[1:] or any(node.padding) or x[0].kind == "INT32":
        return _weighted_sum(graph, node, x)
    # The sum over all positions is a product with ones. Channels are last where ONNX Runtime
    # convolves: there this Transpose is no operation.
    axes, positions = range(2, 2 + len(node.kernel)), math.prod(node.kernel)
    last = graph.apply("Transpose", [x[0].name], "last", perm=[0, *axes, 1])
    merged = graph.constant("merged", np.array([0, positions, -1]))
    inputs = [
        graph.constant("ones", np.ones(positions, np.uint8)),
        graph.apply("Reshape", [last, merged], "positions"),
        graph.constant("zero", np.uint8(0)),
        graph.constant("zero", np.array(x[0].zero, x[0].kind.lower())),
    ]
    total = graph.apply("MatMulInteger", inputs, "total")
    sizes = graph.constant("shape", np.array([0, *graph.network.sizes[node.name]]))
    return StoredTensor(graph.apply("Reshape", [total, sizes]), node.low, node.high)


def _weighted_sum(
    graph: OnnxGraph, node: nodes.Sum | nodes.SumPool, x: list[StoredTensor]
) -> StoredTensor:
    weight, attributes = onnx_graph.sum_operands(node, graph.network.sizes[node.name][0])
    low, high, linear = x[0].low, x[0].high, weight.ndim == 2
    largest = nodes.largest_sum(weight, low, high)
    if largest >= nodes.INT32_LIMIT:
        raise ExportError.of(node.name, "its partial sums do not fit into 32 bits")
    zero = zero_point(int(weight.min()), int(weight.max()))
    if zero is not None and zero_point(low, high) is not None:
        x_bytes = x[0].as_type(graph, "UINT8")
        product = (x_bytes.high + x_bytes.zero) * (int(weight.max()) + zero)
        if product * weight[0].size < nodes.INT32_LIMIT:
            y = _sum_of_bytes(graph, x_bytes.name, x_bytes.zero, weight, zero, attributes)
            return StoredTensor(y, node.low, node.high)
    integers = x[0].as_type(graph, "INT32").name
    if largest < onnx_graph.FLOAT32_EXACT:
        inputs = [graph.cast(integers, "FLOAT")]
        inputs.append(graph.integers("weight", weight.T if linear else weight, "FLOAT"))
        y = graph.apply("MatMul" if linear else "Conv", inputs, "wide", **attributes)
        return StoredTensor(graph.cast(y, "INT32"), node.low, node.high)
    if linear:
        inputs = [integers, graph.integers("weight", weight.T, "INT32")]
        return StoredTensor(graph.apply("MatMul", inputs), node.low, node.high)
    y = _sum_of_digits(graph, node.name, integers, (low, high), weight, attributes)
    return StoredTensor(y, node.low, node.high)


def _sum_of_bytes(
    graph: OnnxGraph,
    x: str,
    x_zero: int,
    weight: Array,
    zero: int,
    attributes: Mapping[str, Any],
    hint: str = "",
) -> str:
    """Add the sums of bytes of which ``x_zero`` and ``zero`` stand for 0, in int32."""
    linear = weight.ndim == 2
    weight_bytes = ((weight.T if linear else weight) + zero).astype(np.uint8)
    zeros = [graph.constant("zero", np.uint8(byte)) for byte in (x_zero, zero)]
    inputs = [x, onnx_graph.packed_weights(graph, weight_bytes), *zeros]
    return graph.apply("MatMulInteger" if linear else "ConvInteger", inputs, hint, **attributes)


def _sum_of_digits(
    graph: OnnxGraph,
    name: str,
    x: str,
    ends: tuple[int, int],
    weight: Array,
    attributes: Mapping[str, Any],
) -> str:
    """Add one sum for each byte of the features and each byte of the weights, put together.

    Each is below 2³¹; together they are in 64 bits, and then fit into 32 again.
    """
    if weight[0].size * 255**2 >= nodes.INT32_LIMIT:
        raise ExportError.of(name, "its sums of bytes do not fit into 32 bits", "Use fewer inputs")
    total = ""
    x_digits = [(place, *_digit(graph, x, place, count)) for place, count in _places(*ends)]
    for w_place, w_count in _places(int(weight.min()), int(weight.max())):
        digit = weight >> 8 * w_place
        digit = digit if w_place == w_count - 1 else digit & 255
        zero = -min(int(digit.min()), 0)
        for place, byte, x_zero in x_digits:
            part = _sum_of_bytes(graph, byte, x_zero, digit, zero, attributes, "part")
            factor = np.int64(256 ** (place + w_place))
            part = graph.line(graph.cast(part, "INT64", "part"), ("Mul", factor), hint="placed")
            total = graph.apply("Add", [total, part], "sums") if total else part
    return graph.cast(total, "INT32")


def _places(low: int, high: int) -> list[tuple[int, int]]:
    """Return the number of each byte of signed integers, the lowest is 0, and their count."""
    count = -(-nodes.bits(low, high) // 8)
    return [(place, count) for place in range(count)]


def _digit(graph: OnnxGraph, x: str, place: int, count: int) -> tuple[str, int]:
    """Add a byte of int32 features, and return the byte that stands for 0."""
    top = place == count - 1
    unsigned = graph.cast(x, "UINT32", "bits") if place else x
    if place:
        inputs = [unsigned, graph.constant("places", np.uint32(8 * place))]
        unsigned = graph.apply("BitShift", inputs, "digits", direction="RIGHT")
    mask = graph.constant("mask", np.array(255, np.uint32 if place else np.int32))
    byte = graph.cast(graph.apply("BitwiseAnd", [unsigned, mask], "digit"), "UINT8", "digit")
    if not top:
        return byte, 0
    # The highest byte has a sign: with its first bit turned, 128 stands for 0.
    sign = graph.constant("sign", np.uint8(128))
    return graph.apply("BitwiseXor", [byte, sign], "digit_signed"), 128


def _steps(graph: OnnxGraph, node: nodes.Steps, x: list[StoredTensor]) -> StoredTensor:
    return add_steps(graph, node, x[0], node.thresholds.long().numpy(), np.array(node.levels))


def _max_pool(graph: OnnxGraph, node: nodes.MaxPool, x: list[StoredTensor]) -> StoredTensor:
    _check_rank(graph, node)
    if x[0].kind != "INT32":
        return replace(x[0], name=graph.max_pool(node, x[0].name, graph.prefix)).limited(graph)
    # There is no MaxPool of int32.
    largest = graph.max_pool(node, graph.cast(x[0].name, "DOUBLE"), graph.name("max"))
    return replace(x[0], name=graph.cast(largest, "INT32"))


def _check_rank(graph: OnnxGraph, node: nodes.MaxPool | nodes.SumPool) -> None:
    if len(graph.network.sizes[node.name]) != len(node.kernel) + 1:
        raise ExportError.of(node.name, "ONNX cannot pool without channels", "Give it (C, H, W)")


def _expand(graph: OnnxGraph, node: nodes.Expand, x: list[StoredTensor]) -> StoredTensor:
    return replace(x[0], name=graph.expand(node, x[0].name))


def _flatten(graph: OnnxGraph, node: nodes.Flatten, x: list[StoredTensor]) -> StoredTensor:
    return replace(x[0], name=graph.apply("Flatten", [x[0].name]))


def _pad(graph: OnnxGraph, node: nodes.Pad, x: list[StoredTensor]) -> StoredTensor:
    zero = graph.constant("zero", np.array(x[0].zero, x[0].kind.lower()))
    low, high = min(x[0].low, 0), max(x[0].high, 0)
    return replace(x[0], name=graph.pad(node, x[0].name, zero), low=low, high=high)


def _concat(graph: OnnxGraph, node: nodes.Concat, x: list[StoredTensor]) -> StoredTensor:
    if len({(part.kind, part.zero) for part in x}) > 1:
        x = [part.as_type(graph, "INT32", "part_") for part in x]
    result = graph.apply("Concat", [part.name for part in x], axis=node.axis)
    return StoredTensor(result, node.low, node.high, x[0].kind, x[0].zero)


def _add(graph: OnnxGraph, node: nodes.Add, x: list[StoredTensor]) -> StoredTensor:
    terms = [term.as_type(graph, "INT32", "part_").name for term in x]
    return StoredTensor(graph.apply("Add", terms), node.low, node.high)


WRITERS: dict[type[nodes.Node], Callable[[OnnxGraph, Any, list[StoredTensor]], StoredTensor]] = {
    nodes.Input: _input,
    nodes.Sum: _weighted_sum,
    nodes.Steps: _steps,
    nodes.Requantise: add_requantised,
    nodes.MaxPool: _max_pool,
    nodes.SumPool: _sum_pool,
    nodes.Expand: _expand,
    nodes.Add: _add,
    nodes.Concat: _concat,
    nodes.Pad: _pad,
    nodes.Flatten: _flatten,
}
"""The operations of a frozen network, each with the function that adds it to a file."""
