"""Integer networks as ONNX files of standard operators, exact under ONNX Runtime.

Features are bytes with a zero point, weights are packed into as few bits as they need, and sums are
ConvInteger and MatMulInteger: 32-bit integers, which no order of summation and no fusion changes.
The scores of a float last layer are summed in double precision and rounded once.

Two other forms are not exact. DequantizeLinear before MatMul: ONNX Runtime's default optimisations
replace it by an operator that quantises the features again (and in 2 bits gives wrong results where
the width is not a multiple of 4). Signed weights: older x86 processors add pairs of their products
in 16 bits that saturate, which unsigned weights with a zero point avoid.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from softstair._errors import import_extra
from softstair.deploy import nodes
from softstair.deploy.nodes import ExportError, IntegerNetwork
from softstair.deploy.onnx_graph import OnnxGraph, TensorInfo, node_names, write_model
from softstair.deploy.onnx_operators import StoredTensor, steps, weighted_sum

__all__ = ["feature_outputs", "model", "write"]

RESERVED = ("bytes", "scores", "class")
OPSET = 18  # the first with operators on bits
BATCH = "N"


def write(
    network: IntegerNetwork,
    path: Path | str,
    features: bool = False,
    classes: Sequence[str] | None = None,
) -> Path:
    """Write an ONNX file: bytes (N, C, H, W) in, ``scores`` (N, classes) and ``class`` (N,) out.

    Args:
        network: The integer network.
        path: The file to write.
        features: Whether the result of every node is an output too (see :func:`feature_outputs`).
        classes: Names of the classes, for the file's metadata.
    """
    return write_model(model(network, features, classes), path)


def feature_outputs(network: IntegerNetwork) -> dict[str, str]:
    """Return the output that holds each node's result in int32, by the node's name."""
    names = node_names(network, set(RESERVED), "_value")
    outputs = {node: f"{name}_value" for node, name in names.items()}
    return {**outputs, network.last.name: "scores"}


def model(
    network: IntegerNetwork, features: bool = False, classes: Sequence[str] | None = None
) -> Any:
    """Return the ``onnx.ModelProto`` of :func:`write`, checked, with the shape of every tensor.

    >>> import torch
    >>> import softstair as ss
    >>> net = torch.nn.Sequential(
    ...     torch.nn.Flatten(), torch.nn.Linear(4, 3, bias=False), torch.nn.BatchNorm1d(3),
    ...     torch.nn.ReLU(), torch.nn.Linear(3, 2))
    >>> net = ss.quantise(net, ss.Stair.ternary(), ss.Stair.ternary(), skip="4").eval()
    >>> integer = ss.deploy.integerise(net, shape=(1, 2, 2), zero=128, scale=64.0)
    >>> [output.name for output in model(integer, classes=["cat", "dog"]).graph.output]
    ['scores', 'class']
    """
    reserved = set(RESERVED)
    names = node_names(network, reserved, "_value")
    graph = OnnxGraph(reserved)
    stored: dict[str, StoredTensor] = {}
    for node in network.nodes[:-1]:
        graph.prefix = names[node.name]
        stored[node.name] = _add_node(graph, network, node, [stored[x] for x in node.inputs])
    last, shape = network.last, network.sizes[network.last.name]
    graph.prefix = names[last.name]
    _add_scores(graph, last, stored[last.inputs[0]], len(shape))
    graph.apply("ArgMax", ["scores"], name="class", axis=1, keepdims=0)
    tensors: list[TensorInfo] = [
        ("bytes", "UINT8", (BATCH, *network.input.shape)),
        ("scores", "FLOAT", (BATCH, *shape)),
        ("class", "INT64", (BATCH, *shape[1:])),
    ]
    if features:
        for name, tensor in stored.items():
            graph.prefix = names[name]
            integers, output = tensor.as_int32(graph), f"{names[name]}_value"
            graph.apply("Identity", [integers], name=output)
            tensors.append((output, "INT32", (BATCH, *network.sizes[name])))
    proto = graph.model(network, classes, {"": OPSET}, tensors)
    graph.onnx.checker.check_model(proto, full_check=True)
    return import_extra("onnx.shape_inference", "onnx").infer_shapes(
        proto, check_type=True, strict_mode=True, data_prop=True
    )


def _add_node(
    graph: OnnxGraph, network: IntegerNetwork, node: nodes.Node, x: list[StoredTensor]
) -> StoredTensor:
    """Add any node but the last."""
    rank = len(network.sizes[node.name])
    if isinstance(node, nodes.MaxPool | nodes.SumPool) and rank != 3:
        raise ExportError.of(
            node.name, f"ONNX cannot pool {rank} axes", "Give it channels, height and width"
        )
    match node:
        case nodes.Input():
            return StoredTensor("bytes", node.low, node.high, node.zero)
        case nodes.Sum() | nodes.SumPool():
            return weighted_sum(graph, x[0], node, network.sizes[node.name][0])
        case nodes.Steps():
            return steps(graph, node, x, rank)
        case nodes.MaxPool():
            return _add_max_pool(graph, node, x[0])
        case nodes.Flatten():
            return replace(x[0], name=graph.apply("Flatten", [x[0].name]))
        case nodes.Expand():
            return replace(x[0], name=graph.expand(node, x[0].name))
        case nodes.Add():
            terms = [term.as_int32(graph, "part_") for term in x]
            return StoredTensor(graph.apply("Add", terms), node.low, node.high)
    raise ExportError.of(node.name, f"{type(node).__name__} has no form in ONNX")


def _add_max_pool(graph: OnnxGraph, node: nodes.MaxPool, x: StoredTensor) -> StoredTensor:
    if x.zero_byte is not None:
        return replace(x, name=graph.max_pool(node, x.name, graph.prefix))
    # There is no MaxPool of int32.
    largest = graph.max_pool(node, graph.cast(x.name, "DOUBLE"), graph.name("max"))
    return replace(x, name=graph.apply("Cast", [largest], to=graph.onnx.TensorProto.INT32))


def _add_scores(graph: OnnxGraph, node: nodes.Node, x: StoredTensor, rank: int) -> None:
    """Add the last node; ``rank`` does not count the batch."""
    floats = graph.cast(x.as_int32(graph), "FLOAT")
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
