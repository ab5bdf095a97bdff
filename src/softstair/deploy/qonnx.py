"""An integer network in QONNX, the dialect of tools for FPGAs.

Its tensors are float32 that hold whole numbers: weights are their own numbers behind a ``Quant`` (a
``BipolarQuant`` where all are −1 or 1), a stair with its normalisation is a ``MultiThreshold``, and
every tensor is annotated with the integers that it holds.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from softstair._errors import import_extra
from softstair.deploy import nodes
from softstair.deploy.integer import ExportError
from softstair.deploy.network import IntegerNetwork
from softstair.deploy.onnx import about, expand
from softstair.deploy.onnx.graph import Described, Graph, plain_names
from softstair.deploy.onnx.sums import EXACT_IN_FLOAT, how_to_sum, reach

__all__ = ["feature_tensors", "model", "write"]

DOMAIN = "qonnx.custom_op.general"
OPSETS = {"": 11, DOMAIN: 1}  # as the qonnx package has them
RESERVED = ("bytes", "scores")
ONE_IMAGE = 1


def write(network: IntegerNetwork, path: Path | str, classes: Sequence[str] | None = None) -> Path:
    """Writes the file: the bytes of one image (1, C, H, W), held in float32, become ``scores``."""
    made = model(network, classes)
    path = Path(path)
    path.write_bytes(made.SerializeToString())
    return path


def feature_tensors(network: IntegerNetwork) -> dict[str, str]:
    """The tensor in the file that holds what each node gives, by the node's name."""
    names = plain_names(network, set(RESERVED), "")
    return {**names, network.nodes[-1].name: "scores"}


def model(network: IntegerNetwork, classes: Sequence[str] | None = None) -> Any:
    """The same as an ``onnx.ModelProto``.

    >>> import torch
    >>> import softstair as ss
    >>> net = torch.nn.Sequential(
    ...     torch.nn.Flatten(), torch.nn.Linear(4, 3, bias=False), torch.nn.BatchNorm1d(3),
    ...     torch.nn.ReLU(), torch.nn.Linear(3, 2))
    >>> net = ss.quantise(net, ss.Stair.ternary(), ss.Stair.ternary(), skip="4").eval()
    >>> integer = ss.deploy.integerise(net, shape=(1, 2, 2), zero=128, scale=64.0)
    >>> [one.op_type for one in model(integer).graph.node]
    ['Sub', 'Flatten', 'Quant', 'MatMul', 'MultiThreshold', 'MatMul', 'Add']
    """
    names = feature_tensors(network)
    graph = _Annotated({*RESERVED, *names.values()})
    graph.holds["bytes"] = "UINT8"
    for node in network.nodes:
        _refuse_wide(network, node)
        _put(graph, network, node, [names[one] for one in node.inputs], names[node.name])
        if names[node.name] != "scores":
            graph.holds[names[node.name]] = _integers(node)
            graph.between.append((names[node.name], "FLOAT", _shape(network, node)))
    inputs: list[Described] = [("bytes", "FLOAT", (ONE_IMAGE, *network.input.shape))]
    outputs: list[Described] = [("scores", "FLOAT", _shape(network, network.nodes[-1]))]
    made = graph.model(inputs, outputs, OPSETS, about(network, classes), graph.between)
    for name, integers in graph.holds.items():
        note = made.graph.quantization_annotation.add(tensor_name=name)
        note.quant_parameter_tensor_names.add(key="finn_datatype", value=integers)
    graph.onnx.checker.check_model(made)
    return import_extra("onnx.shape_inference", "onnx").infer_shapes(made)


class _Annotated(Graph):
    """A graph that knows which integers its tensors hold, and the shapes of custom operators."""

    def __init__(self, taken: set[str]) -> None:
        super().__init__(taken)
        self.holds: dict[str, str] = {}
        self.between: list[Described] = []


def _put(
    graph: _Annotated, network: IntegerNetwork, node: nodes.Node, taken: list[str], name: str
) -> None:
    match node:
        case nodes.Input():
            graph.give("Sub", ["bytes", graph.constant("zero", np.float32(node.zero))], name)
        case nodes.Sum() | nodes.SumPool():
            weight, how = how_to_sum(node, network.sizes[node.name][0])
            flat = weight.ndim == 2
            weights = _weights(graph, weight.T if flat else weight, f"{name}_weight")
            graph.give("MatMul" if flat else "Conv", [*taken, weights], name, **how)
        case nodes.Steps():
            _steps(graph, node, taken, len(network.sizes[node.name]), name)
        case nodes.MaxPool():
            how = {"kernel_shape": node.kernel, "strides": node.stride, "pads": [*node.padding] * 2}
            graph.give("MaxPool", taken, name, **how)
        case nodes.Expand():
            expand(graph, node, taken[0], name)
        case nodes.Flatten() | nodes.Add():
            graph.give(type(node).__name__, taken, name)
        case nodes.Scores():
            _scores(graph, node, taken[0], name)
        case nodes.Rescaled():
            shape = (-1, *[1] * (len(network.sizes[node.name]) - node.axis))
            scale = graph.constant(f"{name}_scale", node.scale.numpy().reshape(shape))
            bias = graph.constant(f"{name}_bias", node.bias.numpy().reshape(shape))
            graph.give("Add", [graph.apply("Mul", [*taken, scale], f"{name}_scaled"), bias], name)
        case _:
            raise ExportError(f"{node.name} ({type(node).__name__}) has no form in QONNX.")


def _weights(graph: _Annotated, weight: Any, name: str) -> str:
    """Whole weights, and how many bits they have."""
    low, high = int(weight.min()), int(weight.max())
    inputs = [
        graph.constant(f"{name}_whole", weight.astype(np.float32)),
        graph.constant(f"{name}_scale", np.float32(1)),
    ]
    if low == -1 and bool((np.abs(weight) == 1).all()):
        integers = "BIPOLAR"
        made = graph.apply("BipolarQuant", inputs, name, DOMAIN)
    else:
        integers = _datatype(low, high)
        bits, signed = _bits(low, high)
        inputs += [
            graph.constant(f"{name}_zero", np.float32(0)),
            graph.constant(f"{name}_bits", np.float32(bits)),
        ]
        narrow = signed and low > -(2 ** (bits - 1))
        how = {"signed": int(signed), "narrow": int(narrow), "rounding_mode": "ROUND"}
        made = graph.apply("Quant", inputs, name, DOMAIN, **how)
    graph.holds[made] = integers
    graph.between.append((made, "FLOAT", weight.shape))
    return made


def _steps(graph: Graph, node: nodes.Steps, taken: list[str], rank: int, name: str) -> None:
    if len(taken) == 2:
        raise ExportError(
            f"{node.name} is a stair on a sum and a shortcut, which MultiThreshold of QONNX does "
            "not express: put a stair before the addition, or export to ONNX or C."
        )
    if node.axis != 1:
        raise ExportError(
            f"{node.name} has its channels along axis {node.axis}, which MultiThreshold of QONNX "
            "does not express: flatten before its weights."
        )
    # Where levels are uneven, one threshold stands for several steps of their common measure.
    gaps = np.diff(node.levels)
    step = math.gcd(*gaps.tolist())
    thresholds = np.repeat(node.thresholds.numpy(), gaps // step, axis=1)
    limits = graph.constant(f"{name}_thresholds", thresholds.astype(np.float32))
    graph.give(
        "MultiThreshold",
        [*taken, limits],
        name,
        DOMAIN,
        out_dtype=_integers(node),
        out_scale=float(step),
        out_bias=float(node.levels[0]),
        data_layout="NC" if rank == 1 else "NCHW",
    )


def _scores(graph: Graph, node: nodes.Scores, x: str, name: str) -> None:
    if node.unit != 1.0:
        unit = graph.constant(f"{name}_unit", np.float32(node.unit))
        x = graph.apply("Mul", [x, unit], f"{name}_features")
    inputs = [x, graph.constant(f"{name}_weight", node.weight.numpy().T)]
    if node.bias is None:
        graph.give("MatMul", inputs, name)
    else:
        bias = graph.constant(f"{name}_bias", node.bias.numpy())
        graph.give("Add", [graph.apply("MatMul", inputs, f"{name}_sums"), bias], name)


def _refuse_wide(network: IntegerNetwork, node: nodes.Node) -> None:
    """Every partial sum must be one of float32's whole numbers."""
    most = max(abs(node.low), abs(node.high))
    if isinstance(node, nodes.Sum):
        (source,) = (one for one in network.nodes if one.name in node.inputs)
        most = reach(node.weight.numpy(), source.low, source.high)
    if most >= EXACT_IN_FLOAT:
        raise ExportError(
            f"the sums of {node.name} can come to {most}, and QONNX holds whole numbers below "
            f"{EXACT_IN_FLOAT} only: give it fewer inputs or stairs of fewer bits."
        )


def _integers(node: nodes.Node) -> str:
    """QONNX's name for the integers that a node gives."""
    bipolar = isinstance(node, nodes.Steps) and node.levels == (-1, 1)
    return "BIPOLAR" if bipolar else _datatype(node.low, node.high)


def _datatype(low: int, high: int) -> str:
    """
    >>> _datatype(-1, 1), _datatype(0, 1), _datatype(0, 15), _datatype(-8, 7), _datatype(0, 0)
    ('INT2', 'BINARY', 'UINT4', 'INT4', 'BINARY')
    """
    bits, signed = _bits(low, high)
    if signed:
        return f"INT{bits}"
    return f"UINT{bits}" if bits > 1 else "BINARY"


def _bits(low: int, high: int) -> tuple[int, bool]:
    """How many hold the whole numbers from low to high, and whether one is a sign."""
    if low < 0:
        return 1 + max((-low - 1).bit_length(), max(high, 0).bit_length()), True
    return max(high.bit_length(), 1), False


def _shape(network: IntegerNetwork, node: nodes.Node) -> tuple[int, ...]:
    return (ONE_IMAGE, *network.sizes[node.name])
