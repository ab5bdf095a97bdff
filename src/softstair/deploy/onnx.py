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

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from softstair import _check
from softstair._errors import import_extra
from softstair.deploy import nodes, onnx_graph
from softstair.deploy.combining import Multiply, Scale, Subtract
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.nodes import INT32_LIMIT, ExportError
from softstair.deploy.onnx_graph import Array, OnnxGraph, StoredTensor, storage, zero_point
from softstair.deploy.onnx_levels import add_stair, too_wide
from softstair.deploy.qlinear_conv import add_quantised_conv, quantised_convs
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

    A network of values has float64 ``values`` in place of ``class``; one with several outputs has
    ``scores_0`` and so on, or with the names of a dictionary. A file for OpenVINO has
    neither where they need 64 bits: see ``order`` and ``scales`` in its metadata. With ``trace``
    the results of nodes are outputs too, in int32; only sums in a QLinearConv have none.
    """
    return onnx_graph.write_model(model(network, target_of("onnx", cpu, runtime), trace), path)


def trace(network: FrozenNetwork, path: Path, out: Path) -> Path:
    """Write a file of the same target as another, with the results of nodes as outputs too."""
    known = _properties(network, path)
    return write(network, out, cast(Cpu, known["cpu"]), cast(Runtime, known["runtime"]), trace=True)


def decoder(network: FrozenNetwork, file: Path) -> Callable[[Mapping[str, Array]], Any]:
    """Return what makes results of nodes, scores and answers of the outputs of a file."""
    features = json.loads(_properties(network, file).get("features", "{}"))
    names = {output: name for name, output in features.items()}
    return lambda y: {names.get(key, key): torch.from_numpy(value) for key, value in y.items()}


def _properties(network: FrozenNetwork, file: Path) -> dict[str, str]:
    """Return the metadata of a file, which must be of the network."""
    known = {row.key: row.value for row in import_extra("onnx").load(file).metadata_props}
    if known.get("digest") != network.digest:
        raise _check.invalid("path", f"must be of this network, but {str(file)!r} is of another")
    return known


def model(network: FrozenNetwork, target: Target = HERE, trace: bool = False) -> Any:
    """Return the ``onnx.ModelProto`` of :func:`write`, checked, with the shape of every tensor."""
    graph = OnnxGraph(network, target)
    network, stored = graph.network, dict[str, StoredTensor]()
    outputs = {head.name: name for name, head in network.heads.items()}
    ends: dict[str, list[onnx_graph.TensorInfo]] = {}
    convs = quantised_convs(network, target)
    within = {conv.node.name for conv in convs.values()}
    for node in network.nodes:
        graph.prefix = graph.identifiers[node.name]
        if isinstance(node, nodes.Scores):
            name = outputs[node.name]
            ends[name] = _add_outputs(graph, node, stored[node.inputs[0]], name)
        elif conv := convs.get(node.name):
            levels = add_quantised_conv(graph, conv, stored[conv.node.inputs[0]])
            # The maximum of a window is limited after it: fewer elements.
            is_pooled = all(isinstance(user, nodes.MaxPool) for user in network.users(node.name))
            stored[node.name] = levels if is_pooled else levels.limited(graph)
        elif node.name not in within:
            stored[node.name] = WRITERS[type(node)](graph, node, [stored[x] for x in node.inputs])
    tensors: list[onnx_graph.TensorInfo] = [
        ("bytes", network.input.dtype.upper(), (BATCH, *network.input.shape)),
        *(tensor for name in network.heads for tensor in ends[name]),
    ]
    properties = {**target._asdict(), "note": NOTES[target.runtime]}
    if trace:
        features = {name: _add_feature(graph, name, x) for name, x in stored.items()}
        properties["features"] = json.dumps(features)
        sizes = {output: network.sizes[name] for name, output in features.items()}
        tensors += [(output, "INT32", (BATCH, *size)) for output, size in sizes.items()]
    proto = graph.model({"": OPSET}, tensors, properties=properties)
    graph.onnx.checker.check_model(proto, full_check=True)
    return import_extra("onnx.shape_inference", "onnx").infer_shapes(
        proto, check_type=True, strict_mode=True, data_prop=True
    )


def _add_feature(graph: OnnxGraph, name: str, x: StoredTensor) -> str:
    """Add an output with a node's result, and return its name."""
    graph.prefix = graph.identifiers[name]
    return graph.apply("Identity", [x.as_type(graph, "INT32").name], "value")


def _add_outputs(
    graph: OnnxGraph, node: nodes.Scores, x: StoredTensor, name: str
) -> list[onnx_graph.TensorInfo]:
    """Add ``scores``, and ``class`` or ``values``, of the output with this name; return their
    types and shapes."""
    row, shape = lambda values: graph.per_channel(node, values), graph.network.sizes[node.name]
    scores = x.as_type(graph, "INT32").name
    scores = graph.line(scores, ("Mul", np.int32(1 << node.shift)), hint="shifted")
    bias = graph.constant("bias", row(node.bias))
    scores = graph.apply("Add", [scores, bias], name=f"scores{name}")
    ends: list[onnx_graph.TensorInfo] = [(scores, "INT32", (BATCH, *shape))]
    if graph.network.outputs == "values":
        if graph.target.runtime == "openvino":
            return ends
        inputs = [graph.cast(scores, "DOUBLE"), graph.constant("scale", row(node.scale))]
        values = graph.apply("Mul", inputs, name=f"values{name}")
        return [*ends, (values, "DOUBLE", (BATCH, *shape))]
    order, ranked = row(node.order.long()), scores
    if (order != order.reshape(-1)[0]).any() or (order < 1).any():
        if graph.target.runtime == "openvino":  # it multiplies in 32 bits
            return ends
        ranked = graph.line(graph.cast(scores, "INT64"), ("Mul", order), hint="ranked")
    graph.apply("ArgMax", [ranked], name=f"class{name}", axis=node.axis, keepdims=0)
    return [*ends, (f"class{name}", "INT64", (BATCH, *shape[: node.axis - 1], *shape[node.axis :]))]


def _input(graph: OnnxGraph, node: nodes.Input, x: list[StoredTensor]) -> StoredTensor:
    if node.table is None and node.dtype != "int16":
        return StoredTensor("bytes", node.low, node.high, node.dtype.upper(), node.zero)
    if node.table is None:
        operands = [graph.cast("bytes", "INT32"), graph.constant("zero", np.int32(node.zero))]
        return StoredTensor(graph.apply("Sub", operands), node.low, node.high)
    kind, zero = storage(node)
    table = (node.table.flatten().int().numpy() + zero).astype(kind.lower())
    inputs = [graph.constant("table", table), graph.table_places(node)]
    return StoredTensor(graph.apply("Gather", inputs), node.low, node.high, kind, zero)


def _sum_pool(graph: OnnxGraph, node: nodes.SumPool, x: list[StoredTensor]) -> StoredTensor:
    _check_rank(graph, node)
    shape, positions = graph.network.sizes[node.name], math.prod(node.kernel)
    is_padded = any((*node.padding, *node.beyond))
    whole = node.kernel == graph.network.sizes[node.inputs[0]][1:] and not is_padded
    if x[0].kind == "INT32" or not whole:
        return _weighted_sum(graph, node, x)
    # The sum over all positions is a product with ones. Channels are last where ONNX Runtime
    # convolves: there this Transpose is no operation.
    axes = [0, *range(2, 2 + len(node.kernel)), 1]
    last = graph.apply("Transpose", [x[0].name], "last", perm=axes)
    merged = graph.constant("merged", np.array([0, positions, -1]))
    zeros = [np.uint8(0), np.array(x[0].zero, x[0].kind.lower())]
    inputs = [graph.constant("ones", np.ones(positions, np.uint8))]
    inputs.append(graph.apply("Reshape", [last, merged], "positions"))
    inputs += [graph.constant("zero", zero) for zero in zeros]
    total = graph.apply("MatMulInteger", inputs, "total")
    size = graph.constant("shape", np.array([0, *shape]))
    return StoredTensor(graph.apply("Reshape", [total, size]), node.low, node.high)


def _weighted_sum(
    graph: OnnxGraph, node: nodes.Sum | nodes.SumPool, x: list[StoredTensor]
) -> StoredTensor:
    weight, attributes = onnx_graph.sum_operands(node, graph.network.sizes[node.name][0])
    low, high, linear = min(x[0].low, 0), max(x[0].high, 0), weight.ndim == 2
    largest = nodes.largest_sum(weight, low, high)
    if largest >= INT32_LIMIT:
        raise ExportError.of(node.name, "its partial sums do not fit into 32 bits")
    x_bytes, span = zero_point(low, high) is not None, max(weight.max(), 0) - min(weight.min(), 0)
    result = lambda name: StoredTensor(name, node.low, node.high)
    if x_bytes and span <= 255 and (high - low) * span * weight[0].size < INT32_LIMIT:
        stored = x[0].as_type(graph, "UINT8")
        return result(_sum_of_bytes(graph, stored.name, stored.zero, weight, attributes))
    integers = x[0].as_type(graph, "INT32").name
    if largest < onnx_graph.FLOAT32_EXACT:
        inputs = [graph.cast(integers, "FLOAT")]
        inputs.append(graph.integers("weight", weight.T if linear else weight, "FLOAT"))
        y = graph.apply("MatMul" if linear else "Conv", inputs, "wide", **attributes)
        return result(graph.cast(y, "INT32"))
    if graph.target.runtime == "openvino":
        raise too_wide(node)
    if linear:
        weights = graph.integers("weight", weight.T, "INT32")
        return result(graph.apply("MatMul", [integers, weights]))
    return result(_sum_of_digits(graph, node.name, integers, (low, high), weight, attributes))


def _sum_of_bytes(
    graph: OnnxGraph,
    x: str,
    x_zero: int,
    weight: Array,
    attributes: dict[str, Any],
    hint: str = "",
) -> str:
    """Add the sums of bytes of which ``x_zero`` stands for 0, in int32."""
    zero, linear = -min(int(weight.min()), 0), weight.ndim == 2
    weight_bytes = ((weight.T if linear else weight) + zero).astype(np.uint8)
    zeros = [graph.constant("zero", np.uint8(byte)) for byte in (x_zero, zero)]
    inputs = [x, onnx_graph.packed_weights(graph, weight_bytes), *zeros]
    kind = "MatMulInteger" if linear else "ConvInteger"
    return graph.apply(kind, inputs, hint, **attributes)


def _sum_of_digits(
    graph: OnnxGraph,
    name: str,
    x: str,
    ends: tuple[int, int],
    weight: Array,
    attributes: dict[str, Any],
) -> str:
    """Add one sum for each byte of the features and each byte of the weights, put together.

    x is Σ 256ᵖ·(digitₚ(x − low) − digitₚ(−low)). Each sum is below 2³¹; together they are in 64
    bits, and then fit into 32 again.
    """
    if weight[0].size * 255**2 >= INT32_LIMIT:
        raise ExportError.of(name, "its sums of bytes do not fit into 32 bits", "Use fewer inputs")
    low, high = ends
    total, moved = "", graph.line(x, ("Add", np.int32(-low)), hint="moved")
    moved = graph.cast(moved, "UINT32")
    for place in range(0, (high - low).bit_length(), 8):
        inputs = [moved, graph.constant("places", np.uint32(place))]
        digit = graph.apply("BitShift", inputs, "digits", direction="RIGHT")
        digit = graph.apply("BitwiseAnd", [digit, graph.constant("mask", np.uint32(255))], "digit")
        digit = graph.cast(digit, "UINT8", "digit")
        for w_place in range(0, int(np.abs(weight).max()).bit_length(), 7):
            w_digit = np.sign(weight) * (np.abs(weight) >> w_place & 127)
            zero = -low >> place & 255
            part = _sum_of_bytes(graph, digit, zero, w_digit, attributes, "part")
            factor = ("Mul", np.int64(2 ** (place + w_place)))
            part = graph.line(graph.cast(part, "INT64", "part"), factor, hint="placed")
            total = graph.apply("Add", [total, part], "sums") if total else part
    return graph.cast(total, "INT32")


def _lookup(graph: OnnxGraph, node: nodes.Lookup, x: list[StoredTensor]) -> StoredTensor:
    kind, zero = storage(node)
    table = (node.table.int().numpy() + zero).astype(kind.lower())
    inputs = [graph.constant("table", table), x[0].as_type(graph, "INT32").name]
    return StoredTensor(graph.apply("Gather", inputs), node.low, node.high, kind, zero)


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


def _select(graph: OnnxGraph, node: nodes.Select, x: list[StoredTensor]) -> StoredTensor:
    return replace(x[0], name=graph.select(node, x[0].name))


def _pixel_shuffle(graph: OnnxGraph, node: Any, x: list[StoredTensor]) -> StoredTensor:
    return replace(x[0], name=graph.pixel_shuffle(node, x[0].name))


def _flatten(graph: OnnxGraph, node: nodes.Flatten, x: list[StoredTensor]) -> StoredTensor:
    return replace(x[0], name=graph.apply("Flatten", [x[0].name]))


def _pad(graph: OnnxGraph, node: nodes.Pad, x: list[StoredTensor]) -> StoredTensor:
    zero = graph.constant("zero", np.array(x[0].zero, x[0].kind.lower()))
    return replace(x[0], name=graph.pad(node, x[0].name, zero), low=node.low, high=node.high)


def _concat(graph: OnnxGraph, node: nodes.Concat, x: list[StoredTensor]) -> StoredTensor:
    if len({(part.kind, part.zero) for part in x}) > 1:
        x = [part.as_type(graph, "INT32", "part_") for part in x]
    result = graph.apply("Concat", [part.name for part in x], axis=node.axis)
    return StoredTensor(result, node.low, node.high, x[0].kind, x[0].zero)


def _add(graph: OnnxGraph, node: nodes.Add, x: list[StoredTensor]) -> StoredTensor:
    terms = [term.as_type(graph, "INT32", "part_").name for term in x]
    return StoredTensor(graph.apply("Add", terms), node.low, node.high)


def _multiply(graph: OnnxGraph, node: Multiply, x: list[StoredTensor]) -> StoredTensor:
    factors = [factor.as_type(graph, "INT32", "part_").name for factor in x]
    return StoredTensor(graph.apply("Mul", factors), node.low, node.high)


def _subtract(graph: OnnxGraph, node: Subtract, x: list[StoredTensor]) -> StoredTensor:
    terms = [term.as_type(graph, "INT32", "part_").name for term in x]
    return StoredTensor(graph.subtract(terms), node.low, node.high)


def _scale(graph: OnnxGraph, node: Scale, x: list[StoredTensor]) -> StoredTensor:
    factor = graph.constant("factor", node.factor.numpy())
    result = graph.apply("Mul", [x[0].as_type(graph, "INT32").name, factor])
    return StoredTensor(result, node.low, node.high)


WRITERS: dict[type[nodes.Node], Callable[[OnnxGraph, Any, list[StoredTensor]], StoredTensor]] = {
    nodes.Input: _input,
    nodes.Sum: _weighted_sum,
    nodes.Steps: add_stair,
    nodes.Requantise: add_stair,
    nodes.Lookup: _lookup,
    nodes.MaxPool: _max_pool,
    nodes.SumPool: _sum_pool,
    nodes.Select: _select,
    nodes.PixelShuffle: _pixel_shuffle,
    nodes.Add: _add,
    nodes.Concat: _concat,
    nodes.Pad: _pad,
    nodes.Flatten: _flatten,
    Multiply: _multiply,
    Subtract: _subtract,
    Scale: _scale,
}
"""The operations of a frozen network, each with the function that adds it to a file."""
