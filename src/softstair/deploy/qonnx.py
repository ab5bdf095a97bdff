"""Frozen networks in QONNX, the ONNX dialect of FPGA tools.

Tensors are float32 that hold integers. Weights follow a ``Quant`` (``BipolarQuant`` where all are
−1 or 1), a stair with its normalisation is a ``MultiThreshold``, and every tensor is annotated with
its integer type. A requantisation of one input is a ``MultiThreshold`` too. With a second input, or
with many levels, it is in float64, as is a last layer whose sums float32 does not hold.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from softstair._errors import import_extra
from softstair.deploy import nodes, onnx_graph
from softstair.deploy.combining import Multiply, Scale, Subtract
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.nodes import ExportError, bits
from softstair.deploy.onnx_graph import Array, OnnxGraph, TensorInfo
from softstair.deploy.onnx_levels import has_thresholds, in_float64, reach, thresholds

DOMAIN = "qonnx.custom_op.general"
OPSETS = {"": 11, DOMAIN: 1}  # those of the qonnx package
BATCH = 1


class QonnxGraph(OnnxGraph):
    """A graph with the integer types of its tensors, and shapes where ONNX cannot infer them.

    Tensors in ``wide`` are float64.
    """

    def __init__(self, network: FrozenNetwork) -> None:
        super().__init__(network)
        self.datatypes: dict[str, str] = {}
        self.between: list[TensorInfo] = []
        self.wide: set[str] = set()

    def annotate(self, name: str, datatype: str, shape: Sequence[int]) -> None:
        self.datatypes[name] = datatype
        self.between.append((name, "DOUBLE" if name in self.wide else "FLOAT", shape))


def write(network: FrozenNetwork, path: Path | str) -> Path:
    """Write a QONNX file: ``bytes`` (1, C, H, W), held in float32, in, and ``scores`` out.

    Scores are in float32 or, if they are wider, in float64. qonnx knows one output: the class is
    that of the largest score times ``order``, which the file's metadata have.
    """
    return onnx_graph.write_model(model(network), path)


def model(
    network: FrozenNetwork,
    writers: Mapping[type[nodes.Node], Callable[[QonnxGraph, Any, list[str]], Any]] | None = None,
    output: str = "",
    properties: Mapping[str, str] | None = None,
) -> Any:
    """Return the ``onnx.ModelProto`` of :func:`write`; each node's result has the node's name.

    Other ``writers`` may end at another node than the scores, the ``output``.
    """
    if len(network.heads) > 1:
        raise ExportError("QONNX has one output: freeze a network that returns one.")
    graph = QonnxGraph(network)
    network, writers = graph.network, writers or WRITERS
    graph.datatypes["bytes"] = network.input.dtype.upper()
    for node in network.nodes:
        if output and node is network.last:
            break
        graph.prefix = graph.identifiers[node.name]
        _check_range(graph, node)
        writers[type(node)](graph, node, [graph.identifiers[x] for x in node.inputs])
        if node is not network.last and node.name != output:
            graph.annotate(graph.prefix, _datatype_of(node), (BATCH, *network.sizes[node.name]))
    end, name = output or network.last.name, graph.identifiers[output] if output else "scores"
    tensors: list[TensorInfo] = [
        ("bytes", "FLOAT", (BATCH, *network.input.shape)),
        (name, "DOUBLE" if name in graph.wide else "FLOAT", (BATCH, *network.sizes[end])),
    ]
    proto = graph.model(OPSETS, tensors, graph.between, properties)
    for name, datatype in graph.datatypes.items():
        annotation = proto.graph.quantization_annotation.add(tensor_name=name)
        annotation.quant_parameter_tensor_names.add(key="finn_datatype", value=datatype)
    graph.onnx.checker.check_model(proto)
    return import_extra("onnx.shape_inference", "onnx").infer_shapes(proto)


def _check_range(graph: QonnxGraph, node: nodes.Node) -> None:
    """Raise ExportError if a sum is not an integer that float32 holds, but for the last layer's."""
    largest = max(abs(node.low), abs(node.high))
    if isinstance(node, nodes.Sum):
        source = graph.network.node(node.inputs[0])
        largest = max(largest, nodes.largest_sum(node.weight.numpy(), source.low, source.high))
    if largest < onnx_graph.FLOAT32_EXACT:
        return
    users = graph.network.users(node.name)
    is_last = isinstance(node, nodes.Sum) and node.weight.dim() == 2
    is_last &= all(isinstance(user, nodes.Scores) for user in users)
    if not is_last and not isinstance(node, nodes.Scores):
        raise ExportError.of(node.name, f"QONNX holds integers below 2²⁴, not {largest}")
    graph.wide.add("scores" if isinstance(node, nodes.Scores) else graph.prefix)


def _input(graph: QonnxGraph, node: nodes.Input, x: list[str]) -> None:
    if node.table is None:
        graph.apply("Sub", ["bytes", graph.constant("zero", np.float32(node.zero))])
        return
    inputs = [graph.constant("table", node.table.flatten().float().numpy())]
    graph.apply("Gather", [*inputs, graph.table_places(node)])


def _sum(graph: QonnxGraph, node: nodes.Sum | nodes.SumPool, x: list[str]) -> None:
    weight, attributes = onnx_graph.sum_operands(node, graph.network.sizes[node.name][0])
    linear = weight.ndim == 2
    inputs = [*x, _add_weights(graph, weight.T if linear else weight)]
    if graph.prefix in graph.wide:
        inputs = [graph.cast(name, "DOUBLE", f"wide{place}") for place, name in enumerate(inputs)]
    graph.apply("MatMul" if linear else "Conv", inputs, **attributes)


def _add_weights(graph: QonnxGraph, weight: Array) -> str:
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


def _steps(graph: QonnxGraph, node: nodes.Steps, x: list[str]) -> None:
    # Where levels are uneven, a threshold is repeated for each step of their common divisor.
    gaps = np.diff(node.levels)
    step = math.gcd(*gaps.tolist())
    table = np.repeat(node.thresholds.numpy(), gaps // step, axis=1)
    _add_multi_threshold(graph, node, x[0], table, step)


def _requantise(graph: QonnxGraph, node: nodes.Requantise, x: list[str]) -> None:
    if has_thresholds(node) and node.axis == 1:
        sign, table = thresholds(node, *reach(graph.network, node))
        sums = graph.line(x[0], ("Mul", graph.per_channel(node, sign.float())), hint="signed")
        if sums != x[0]:
            source = graph.network.node(node.inputs[0])
            widest = max(-source.low, source.high)
            shape = (BATCH, *graph.network.sizes[source.name])
            graph.annotate(sums, _datatype(-widest, widest), shape)
        _add_multi_threshold(graph, node, sums, table.numpy(), 1)
        return
    total = in_float64(graph, node, *x)
    ends = (("Max", np.float64(node.low)), ("Min", np.float64(node.high)))
    total = graph.line(total, *ends, hint="clipped")
    graph.apply("Cast", [total], to=graph.onnx.TensorProto.FLOAT)


def _lookup(graph: QonnxGraph, node: nodes.Lookup, x: list[str]) -> None:
    places = graph.cast(x[0], "INT64", "places")
    graph.apply("Gather", [graph.constant("table", node.table.float().numpy()), places])


def _add_multi_threshold(
    graph: QonnxGraph, node: nodes.Steps | nodes.Requantise, x: str, table: Array, step: int
) -> None:
    """Add low + step · (thresholds reached)."""
    if node.axis != 1:
        raise ExportError.of(node.name, f"QONNX has no MultiThreshold on axis {node.axis}")
    layout = {1: "NC", 2: "NCW"}.get(len(graph.network.sizes[node.name]), "NCHW")
    graph.apply(
        "MultiThreshold",
        [x, graph.constant("thresholds", table.astype(np.float32))],
        domain=DOMAIN,
        out_dtype=_datatype_of(node),
        out_scale=float(step),
        out_bias=float(node.low),
        data_layout=layout,
    )


def _scores(graph: QonnxGraph, node: nodes.Scores, x: list[str]) -> None:
    kind = np.float64 if "scores" in graph.wide else np.float32
    same = ("scores" in graph.wide) == (x[0] in graph.wide)
    sums = x[0] if same else graph.cast(x[0], "DOUBLE" if kind is np.float64 else "FLOAT", "sums")
    sums = graph.line(sums, ("Mul", kind(1 << node.shift)), hint="shifted")
    bias = graph.constant("bias", graph.per_channel(node, node.bias).astype(kind))
    graph.apply("Add", [sums, bias], name="scores")


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
    """Return the bits of a signed integer, or of an unsigned one where none is negative.

    A signed one of 1 bit would be -1 or 1 for QONNX.
    """
    return max(bits(low, high), 2) if low < 0 else max(high.bit_length(), 1)


WRITERS: dict[type[nodes.Node], Callable[[QonnxGraph, Any, list[str]], Any]] = {
    nodes.Input: _input,
    nodes.Sum: _sum,
    nodes.SumPool: _sum,
    nodes.Steps: _steps,
    nodes.Requantise: _requantise,
    nodes.Lookup: _lookup,
    nodes.MaxPool: lambda graph, node, x: graph.max_pool(node, x[0], graph.prefix),
    nodes.Select: lambda graph, node, x: graph.select(node, x[0]),
    nodes.PixelShuffle: lambda graph, node, x: graph.pixel_shuffle(node, x[0]),
    nodes.Add: lambda graph, node, x: graph.apply("Add", x),
    nodes.Concat: lambda graph, node, x: graph.apply("Concat", x, axis=node.axis),
    nodes.Pad: lambda graph, node, x: graph.pad(node, x[0], graph.constant("zero", np.float32(0))),
    nodes.Flatten: lambda graph, node, x: graph.apply("Flatten", x),
    nodes.Scores: _scores,
    Multiply: lambda graph, node, x: graph.apply("Mul", x),
    Subtract: lambda graph, node, x: graph.subtract(x),
    Scale: lambda graph, node, x: graph.apply(
        "Mul", [x[0], graph.constant("factor", node.factor.float().numpy())]
    ),
}
"""The operations of a frozen network, each with the function that adds it to a file."""
