"""An integer network as an ONNX file of standard operators, exact as ONNX Runtime runs it.

Features are bytes with a zero point, weights whole numbers of as few bits as they need (operators
on bits spread them out when the file is loaded), sums ConvInteger and MatMulInteger: 32-bit
integers, which no order of summation and no fusion changes. A stair is a comparison for each
threshold. The scores alone are floats: summed in double precision and rounded once, which leaves
next to nothing to the order of summation.

Not taken: DequantizeLinear before MatMul in 2, 4 or 8 bits, which ONNX Runtime's default
optimisations replace by an operator that quantises the features anew (other results; and in 2 bits
wrong ones where the width is no multiple of 4). Nor weights as signed bytes: older x86 processors
add pairs of their products in 16 bits that saturate; unsigned ones with a zero point they do not.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from softstair._errors import import_extra
from softstair.deploy import nodes
from softstair.deploy.integer import ExportError
from softstair.deploy.network import IntegerNetwork
from softstair.deploy.onnx.graph import Described, Graph, plain_names
from softstair.deploy.onnx.stairs import steps
from softstair.deploy.onnx.stored import Stored
from softstair.deploy.onnx.sums import total

__all__ = ["expand", "feature_outputs", "model", "write"]

RESERVED = ("bytes", "scores", "class")
OPSET = 18  # the first with operators on bits
BATCH = "N"


def write(
    network: IntegerNetwork,
    path: Path | str,
    features: bool = False,
    classes: Sequence[str] | None = None,
) -> Path:
    """Writes the file: bytes (N, C, H, W) in, ``scores`` (N, classes) and ``class`` (N,) out.

    With ``features``, what every node gives is an output too (:func:`feature_outputs` has their
    names). ``classes`` are noted in the file's metadata, beside the input's zero and scale.
    """
    made = model(network, features, classes)
    path = Path(path)
    path.write_bytes(made.SerializeToString())
    return path


def feature_outputs(network: IntegerNetwork) -> dict[str, str]:
    """The output that holds what each node gives, as whole numbers in int32, by the node's name."""
    names = plain_names(network, set(RESERVED), "_value")
    outputs = {node: f"{name}_value" for node, name in names.items()}
    return {**outputs, network.nodes[-1].name: "scores"}


def model(
    network: IntegerNetwork, features: bool = False, classes: Sequence[str] | None = None
) -> Any:
    """The same as an ``onnx.ModelProto``, checked, with the shape of every tensor.

    >>> import torch
    >>> import softstair as ss
    >>> net = torch.nn.Sequential(
    ...     torch.nn.Flatten(), torch.nn.Linear(4, 3, bias=False), torch.nn.BatchNorm1d(3),
    ...     torch.nn.ReLU(), torch.nn.Linear(3, 2))
    >>> net = ss.quantise(net, ss.Stair.ternary(), ss.Stair.ternary(), skip="4").eval()
    >>> integer = ss.deploy.integerise(net, shape=(1, 2, 2), zero=128, scale=64.0)
    >>> [one.name for one in model(integer, classes=["cat", "dog"]).graph.output]
    ['scores', 'class']
    """
    taken = set(RESERVED)
    names = plain_names(network, taken, "_value")
    graph = Graph(taken)
    known: dict[str, Stored] = {}
    for node in network.nodes[:-1]:
        known[node.name] = _stored(graph, network, node, known, names[node.name])
    last = network.nodes[-1]
    shape = network.sizes[last.name]
    _scores(graph, last, known[last.inputs[0]], len(shape), names[last.name])
    graph.give("ArgMax", ["scores"], "class", axis=1, keepdims=0)
    outputs: list[Described] = [
        ("scores", "FLOAT", (BATCH, *shape)),
        ("class", "INT64", (BATCH, *shape[1:])),
    ]
    if features:
        for name, output in feature_outputs(network).items():
            if name != last.name:
                whole = known[name].whole(graph, names[name])
                graph.give("Identity", [whole], output)
                outputs.append((output, "INT32", (BATCH, *network.sizes[name])))
    inputs: list[Described] = [("bytes", "UINT8", (BATCH, *network.input.shape))]
    made = graph.model(inputs, outputs, {"": OPSET}, about(network, classes))
    return _checked(made)


def about(network: IntegerNetwork, classes: Sequence[str] | None) -> dict[str, str]:
    """What a file says about itself: the float network sees (byte − zero)/scale."""
    known = {"zero": str(network.input.zero), "scale": repr(network.input.scale)}
    if classes is None:
        return known
    count = network.sizes[network.nodes[-1].name][0]
    if len(classes) != count or not all(isinstance(one, str) for one in classes):
        raise ValueError(
            f"classes must be the names of {count} classes, as the network has scores, but "
            f"{classes!r} was given."
        )
    return {**known, "classes": json.dumps([*classes])}


def _checked(made: Any) -> Any:
    """The model with the shapes that ONNX infers, after its checker has passed it."""
    onnx = import_extra("onnx", "onnx")
    shapes = import_extra("onnx.shape_inference", "onnx")
    onnx.checker.check_model(made, full_check=True)
    return shapes.infer_shapes(made, check_type=True, strict_mode=True, data_prop=True)


def _stored(
    graph: Graph, network: IntegerNetwork, node: nodes.Node, known: dict[str, Stored], name: str
) -> Stored:
    """What a node gives, except for the scores."""
    taken = [known[one] for one in node.inputs]
    rank = len(network.sizes[node.name])
    if isinstance(node, nodes.MaxPool | nodes.SumPool) and rank != 3:
        raise ExportError(
            f"{node.name} pools features of {rank} axes, which ONNX does not: give it channels, "
            "height and width."
        )
    match node:
        case nodes.Input():
            return Stored("bytes", node.low, node.high, True, node.zero)
        case nodes.Sum() | nodes.SumPool():
            return total(graph, taken[0], node, network.sizes[node.name][0], name)
        case nodes.Steps():
            return steps(graph, node, taken, rank, name)
        case nodes.MaxPool():
            return _max_pool(graph, taken[0], node, name)
        case nodes.Flatten():
            return replace(taken[0], name=graph.give("Flatten", [taken[0].name], name))
        case nodes.Expand():
            return replace(taken[0], name=expand(graph, node, taken[0].name, name))
        case nodes.Add():
            both = [one.whole(graph, f"{name}_part") for one in taken]
            return Stored(graph.give("Add", both, name), node.low, node.high)
    raise ExportError(f"{node.name} ({type(node).__name__}) has no form in ONNX.")


def expand(graph: Graph, node: nodes.Expand, x: str, name: str) -> str:
    """A tensor repeated along axes of length 1."""
    shape = graph.constant(f"{name}_shape", np.array((1, *node.shape), np.int64))
    return graph.give("Expand", [x, shape], name)


def _max_pool(graph: Graph, x: Stored, node: nodes.MaxPool, name: str) -> Stored:
    how: dict[str, Any] = {
        "kernel_shape": node.kernel,
        "strides": node.stride,
        "pads": [*node.padding] * 2,
    }
    if x.bytes:
        return replace(x, name=graph.give("MaxPool", [x.name], name, **how))
    # There is no MaxPool of int32.
    largest = graph.apply("MaxPool", [graph.cast(x.name, "DOUBLE", name)], f"{name}_max", **how)
    return replace(x, name=graph.give("Cast", [largest], name, to=graph.onnx.TensorProto.INT32))


def _scores(graph: Graph, node: nodes.Node, x: Stored, rank: int, name: str) -> None:
    """The floats at the end, of that rank without the batch."""
    whole = graph.cast(x.whole(graph, name), "FLOAT", name)
    match node:
        case nodes.Scores():
            unit = graph.constant(f"{name}_unit", np.float32(node.unit))
            features = graph.apply("Mul", [whole, unit], f"{name}_features")
            wide = graph.cast(features, "DOUBLE", name)
            weight = graph.constant(f"{name}_weight", node.weight.numpy().T)
            weight = graph.cast(weight, "DOUBLE", f"{name}_weight")
            y = graph.apply("MatMul", [wide, weight], f"{name}_sums")
            if node.bias is not None:
                bias = graph.constant(f"{name}_bias", node.bias.double().numpy())
                y = graph.apply("Add", [y, bias], f"{name}_biased")
            graph.give("Cast", [y], "scores", to=graph.onnx.TensorProto.FLOAT)
        case nodes.Rescaled():
            shape = (-1, *[1] * (rank - node.axis))
            scale = graph.constant(f"{name}_scale", node.scale.numpy().reshape(shape))
            scaled = graph.apply("Mul", [whole, scale], f"{name}_scaled")
            bias = graph.constant(f"{name}_bias", node.bias.numpy().reshape(shape))
            graph.give("Add", [scaled, bias], "scores")
        case _:
            raise ExportError(f"{node.name} ({type(node).__name__}) gives no scores.")
