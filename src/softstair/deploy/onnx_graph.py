"""ONNX graphs that are built one operator at a time, and what ONNX and QONNX files share."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import softstair
from softstair import _check
from softstair._errors import import_extra
from softstair.deploy import nodes
from softstair.deploy.affine import MARGIN
from softstair.deploy.nodes import IntegerNetwork, narrowest
from softstair.deploy.target import HERE, Target

Array = NDArray[Any]
IR_VERSION = 8
"""Of 2023, so that readers older than the installed onnx package load the file."""
MAX_COMPARISONS = 31  # with more thresholds other forms take fewer operators
TensorInfo = tuple[str, str, Sequence[int | str]]
"""Name, type and shape of a tensor."""


class OnnxGraph:
    """Operators, constants, and the names that are in use.

    ``prefix`` is the name of the node that is being added; the names of its parts begin with it.
    """

    def __init__(self, names: set[str], target: Target = HERE) -> None:
        self.onnx = import_extra("onnx", "onnx")
        import_extra("onnx.numpy_helper", "onnx")
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.names, self.target = set(names), target
        self.prefix = ""

    def constant(self, hint: str, values: Any) -> str:
        """Store an array and return its name."""
        name = self.name(hint)
        array = np.asarray(values, order="C")
        self.constants.append(self.onnx.numpy_helper.from_array(array, name))
        return name

    def integers(self, hint: str, values: Array, kind: str) -> str:
        """Store integers in as few bytes as they need, cast to ``kind`` when the file is read."""
        return self.cast(self.constant(hint, narrowest(values)), kind, hint)

    def apply(
        self, kind: str, inputs: Sequence[str], hint: str = "", name: str = "", **attributes: Any
    ) -> str:
        """Add an operator; its result is ``name``, a new name from a hint, or else ``prefix``."""
        name = name or (self.name(hint) if hint else self.prefix)
        attributes = {"domain": "", **attributes}
        self.nodes.append(self.onnx.helper.make_node(kind, [*inputs], [name], name, **attributes))
        return name

    def cast(self, x: str, kind: str, hint: str = "") -> str:
        """Add a cast to FLOAT, DOUBLE, INT32, UINT8, …"""
        hint = f"{hint}_{kind.lower()}" if hint else kind.lower()
        return self.apply("Cast", [x], hint, to=getattr(self.onnx.TensorProto, kind))

    def expand(self, node: nodes.Expand, x: str) -> str:
        """Add an Expand node."""
        shape = self.constant("shape", np.array((1, *node.shape), np.int64))
        return self.apply("Expand", [x, shape])

    def pad(self, node: nodes.Pad, x: str, zero: str, rank: int) -> str:
        """Add a Pad node; ``rank`` does not count the batch."""
        before, after = node.padding[::2][::-1], node.padding[1::2][::-1]
        others = [0] * (1 + rank - len(before))
        pads = np.array([*others, *before, *others, *after], np.int64)
        return self.apply("Pad", [x, self.constant("pads", pads), zero])

    def max_pool(self, node: nodes.MaxPool, x: str, name: str) -> str:
        """Add a MaxPool node under exactly this name."""
        pads = [*node.padding] * 2
        windows: dict[str, Any] = {"kernel_shape": node.kernel, "strides": node.stride}
        return self.apply("MaxPool", [x], name=name, pads=pads, **windows)

    def rescale(self, node: nodes.Rescaled, x: str, rank: int) -> None:
        """Add ``scores`` = scale · x + bias; ``rank`` does not count the batch."""
        shape = (-1, *[1] * (rank - node.axis))
        scale = self.constant("scale", node.scale.numpy().reshape(shape))
        bias = self.constant("bias", node.bias.numpy().reshape(shape))
        self.apply("Add", [self.apply("Mul", [x, scale], "scaled"), bias], name="scores")

    def name(self, hint: str) -> str:
        """Return a new name."""
        return _unique(f"{self.prefix}_{hint}" if self.prefix else hint, self.names)

    def model(
        self,
        network: IntegerNetwork,
        classes: Sequence[str] | None,
        opsets: Mapping[str, int],
        tensors: Sequence[TensorInfo],
        between: Sequence[TensorInfo] = (),
    ) -> Any:
        """Return the model of its input, outputs and tensors ``between`` of a known shape."""
        helper, kinds = self.onnx.helper, self.onnx.TensorProto

        def described(tensors: Sequence[TensorInfo]) -> list[Any]:
            make = helper.make_tensor_value_info
            return [make(name, getattr(kinds, kind), [*shape]) for name, kind, shape in tensors]

        ends, inner = described(tensors), described(between)
        graph = helper.make_graph(
            self.nodes, "softstair", ends[:1], ends[1:], self.constants, value_info=inner
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid(*opset) for opset in opsets.items()],
            ir_version=IR_VERSION,
            producer_name="softstair",
            producer_version=softstair.__version__,
        )
        helper.set_model_props(model, _metadata(network, classes))
        return model


@dataclass(frozen=True)
class StoredTensor:
    """Integers from ``low`` to ``high``, stored as INT32, UINT8 or INT8 after ``zero`` is added.

    Stored numbers above ``limit`` stand for the limit. ``flat``: in the shape (N, numbers).
    """

    name: str
    low: int
    high: int
    kind: str = "INT32"
    zero: int = 0
    limit: int | None = None
    flat: bool = False

    def limited(self, graph: OnnxGraph) -> "StoredTensor":
        """Return the same integers without numbers above their limit."""
        if self.limit is None:
            return self
        # ONNX Runtime computes Clip in less time than Min.
        ends = [np.array(end, self.kind.lower()) for end in (self.low + self.zero, self.limit)]
        inputs = [self.name, *(graph.constant("limit", end) for end in ends)]
        return replace(self, name=graph.apply("Clip", inputs, "limited"), limit=None)

    def as_type(
        self, graph: OnnxGraph, kind: str, hint: str = "", bits: bool = False
    ) -> "StoredTensor":
        """Return the same integers, limited, in another type.

        With ``bits``, bytes whose values lie in one half of their range are reinterpreted as the
        other type of bytes, with another zero point.
        """
        x = self.limited(graph)
        if kind == x.kind:
            return x
        half = (min(x.low, 0) + x.zero) // 128
        if bits and x.kind != "INT32" and half == (max(x.high, 0) + x.zero) // 128:
            name = graph.cast(x.name, kind, f"{hint}bits")
            return replace(x, name=name, kind=kind, zero=x.zero - 256 * half)
        name = x.name if x.kind == "INT32" else graph.cast(x.name, "INT32", f"{hint}taken")
        zero = 0 if kind == "INT32" else zero_point(x.low, x.high, kind)
        assert zero is not None
        if zero != x.zero:
            offset = graph.constant(f"{hint}offset", np.int32(zero - x.zero))
            name = graph.apply("Add", [name, offset], f"{hint}moved")
        name = name if kind == "INT32" else graph.cast(name, kind, f"{hint}moved")
        return replace(x, name=name, kind=kind, zero=zero)


def zero_point(low: int, high: int, kind: str = "UINT8") -> int | None:
    """Return the byte that stands for 0, or None if bytes cannot hold 0 and low to high."""
    zero = -min(low, 0)
    return zero - (kind == "INT8") * 128 if zero + max(high, 0) <= 255 else None


def packed_weights(graph: OnnxGraph, weight: Array, top: bool = False) -> str:
    """Store bytes in as few bits as the largest needs; operators unpack them.

    Where all are even, as those of −1 and 1 with zero point 1 are, the lowest bit is not stored.
    With ``top`` the stored bits become the highest of each byte, instead of the lowest.
    """
    even = not (weight & 1).any()
    weight = weight >> 1 if even else weight
    bits = next(bits for bits in (1, 2, 4, 8) if int(weight.max()) < 2**bits)
    # OpenVINO reads the weights of a MatMulInteger wrongly if operators unpack them.
    if bits == 8 or (weight.ndim == 2 and graph.target.runtime == "openvino"):
        return graph.constant("weight", weight << int(even))
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    padded = np.pad(weight.reshape(-1), (0, -weight.size % len(shifts)))
    packed = np.bitwise_or.reduce(padded.reshape(-1, len(shifts)) << shifts, axis=1)[:, None]
    places, direction = (shifts[::-1], "LEFT") if top else (shifts, "RIGHT")
    inputs = [graph.constant("weight_packed", packed), graph.constant("weight_places", places)]
    shifted = graph.apply("BitShift", inputs, "weight_shifted", direction=direction)
    mask = graph.constant("weight_mask", np.uint8((2**bits - 1) << (8 - bits) * top))
    values = graph.apply("BitwiseAnd", [shifted, mask], "weight_values")
    if padded.size > weight.size:
        flat = graph.constant("weight_all", np.array([-1]))
        values = graph.apply("Reshape", [values, flat], "weight_padded")
        ends = [graph.constant("weight_end", np.array([end])) for end in (0, weight.size)]
        values = graph.apply("Slice", [values, *ends], "weight_cut")
    if even and not top:
        one_bit = graph.constant("weight_even", np.uint8(1))
        values = graph.apply("BitShift", [values, one_bit], "weight_doubled", direction="LEFT")
    shape = graph.constant("weight_shape", np.array(weight.shape))
    return graph.apply("Reshape", [values, shape], "weight")


def wide_levels(
    graph: OnnxGraph,
    floats: nodes.FloatSteps,
    sums: str,
    shortcut: str | None,
    first: int,
    low: int,
    per_channel: nodes.Shape,
) -> str:
    """Add the operations of the float network; return its levels as int32, the lowest is ``low``.

    Sums and shortcut are int32, and the shortcut is at least ``first``. Operations are in float32,
    except that a fused stage is in float64 and then rounded, as in :class:`FloatSteps`.
    """
    y, last = graph.cast(sums, "FLOAT", "sums"), len(floats.factors) - 1
    for stage in range(last + 1):
        kind = "DOUBLE" if stage == last and floats.is_fused else "FLOAT"
        y = y if kind == "FLOAT" else graph.cast(y, kind, "exact")
        for operator, numbers in (("Mul", floats.factors), ("Add", floats.addends)):
            if operator == "Mul" or bool(numbers[stage].any()):
                term = graph.constant(operator.lower(), numbers[stage].reshape(per_channel).numpy())
                term = term if kind == "FLOAT" else graph.cast(term, kind)
                y = graph.apply(operator, [y, term], "rescaled")
        y = y if kind == "FLOAT" else graph.cast(y, "FLOAT", "rounded")
    if shortcut is not None:
        if first:
            offset = graph.constant("first", np.int32(first))
            shortcut = graph.apply("Sub", [shortcut, offset], "row")
        values = graph.constant("values", floats.values.nan_to_num().numpy())
        y = graph.apply("Add", [y, graph.apply("Gather", [values, shortcut], "value")], "total")
    # The candidate is right or one too high: limit k is less than a quantum above an even stair's.
    limits, count = floats.limits.numpy(), len(floats.limits)
    late = limits.astype(np.float64) / floats.quantum - np.arange(1, count + 1)
    candidate = graph.cast(y, "DOUBLE", "quanta")
    line = (("Mul", 1 / floats.quantum), ("Add", MARGIN / 2 - float(late.min())))
    for operator, number in (*line, ("Max", 0.0), ("Min", float(count))):
        candidate = graph.apply(operator, [candidate, graph.constant("number", number)], "quanta")
    candidate = graph.cast(candidate, "INT32", "candidate")
    begins = np.concatenate([np.array([-np.inf], np.float32), limits])
    begin = graph.apply("Gather", [graph.constant("limits", begins), candidate], "begin")
    less = graph.cast(graph.apply("Less", [y, begin], "too_high"), "INT32")
    if low:
        candidate = graph.apply("Add", [candidate, graph.constant("low", np.int32(low))], "level")
    return graph.apply("Sub", [candidate, less], "levels")


def node_names(network: IntegerNetwork, names: set[str], suffix: str = "") -> dict[str, str]:
    """Return an identifier for each node and reserve it in ``names``, with ``suffix`` as well."""
    identifiers = {}
    for node in network.nodes:
        name = _unique(node.name, names, suffix)
        names |= {name, name + suffix}
        identifiers[node.name] = name
    return identifiers


def _unique(hint: str, names: set[str], suffix: str = "") -> str:
    """Return the hint in letters, digits and underscores, with a number if it is in use."""
    word = re.sub(r"[^A-Za-z0-9_]", "_", hint)[:200]
    word = word if re.match(r"[A-Za-z]", word) else f"layer_{word}"
    name, number = word, 1
    while name in names or name + suffix in names:
        number += 1
        name = f"{word}_{number}"
    names.add(name)
    return name


def _metadata(network: IntegerNetwork, classes: Sequence[str] | None) -> dict[str, str]:
    """Return the properties of a file: the float network sees (byte − zero)/scale."""
    properties = {"softstair": softstair.__version__, "digest": network.digest}
    properties |= {"zero": str(network.input.zero), "scale": repr(network.input.scale)}
    if classes is None:
        return properties
    count = network.sizes[network.last.name][0]
    if len(classes) != count or not all(isinstance(name, str) for name in classes):
        raise _check.wrong("classes", classes, f"{count} names, one per score")
    return {**properties, "classes": json.dumps([*classes])}


def sum_operands(node: nodes.Sum | nodes.SumPool, channels: int) -> tuple[Array, dict[str, Any]]:
    """Return the weights and the attributes of a convolution; a linear layer has no attributes."""
    if isinstance(node, nodes.SumPool):
        weight = np.ones((channels, 1, *node.kernel), np.int64)
        pads = [*node.padding[-len(node.kernel) :]] * 2
        return weight, {"strides": node.stride, "pads": pads, "group": channels}
    if node.weight.dim() == 2:
        return node.weight.numpy(), {}
    return node.weight.numpy(), {
        "strides": node.stride,
        "pads": [*node.padding] * 2,
        "dilations": node.dilation,
        "group": node.groups,
    }


def write_model(model: Any, path: Path | str) -> Path:
    """Write a model to a file."""
    path = Path(path)
    path.write_bytes(model.SerializeToString())
    return path
