"""ONNX graphs that are built one operator at a time, and what ONNX and QONNX files share."""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

import softstair
from softstair._errors import import_extra
from softstair.deploy import nodes
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.nodes import narrowest
from softstair.deploy.target import HERE, Target

Array = NDArray[Any]
TensorInfo = tuple[str, str, Sequence[int | str]]
"""Name, type and shape of a tensor."""
FLOAT32_EXACT = 2**24
"""Below it float32 holds every integer."""
IR_VERSION = 8
"""Of 2023, so that readers older than the installed onnx package load the file."""


class OnnxGraph:
    """Operators and constants of a network's file, and the names that are in use.

    ``identifiers`` are names of nodes in the file. ``prefix`` is that of the node that is being
    added; the names of its parts begin with it.
    """

    def __init__(self, network: FrozenNetwork, target: Target = HERE) -> None:
        self.onnx = import_extra("onnx", "onnx")
        import_extra("onnx.numpy_helper", "onnx")
        self.network, self.target, self.prefix = copy.deepcopy(network).cpu(), target, ""
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        kinds = ("scores", "class", "values")
        self.names = {"bytes", *(kind + name for kind in kinds for name in network.heads)}
        self.identifiers = {node.name: self.name(node.name) for node in network.nodes}

    def name(self, hint: str) -> str:
        """Return a new name, of letters, digits and underscores."""
        hint = f"{self.prefix}_{hint}" if self.prefix else hint
        word = re.sub(r"[^A-Za-z0-9_]", "_", hint)[:200]
        name = word = word if re.match(r"[A-Za-z]", word) else f"layer_{word}"
        number = 1
        while name in self.names:
            number += 1
            name = f"{word}_{number}"
        self.names.add(name)
        return name

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

    def line(self, x: str, *steps: tuple[str, Any], hint: str) -> str:
        """Add operators one after the other, each with a number, an array or nothing.

        A product with 1 and a sum with 0 are left out.
        """
        for kind, values in steps:
            if values is None:
                x = self.apply(kind, [x], f"{hint}_{kind.lower()}")
            elif bool(np.any(values != {"Mul": 1, "Add": 0}.get(kind))):
                x = self.apply(kind, [x, self.constant(f"{hint}_{kind.lower()}", values)], hint)
        return x

    def clip(self, x: str, low: int, high: int, kind: str, hint: str) -> str:
        """Add limits, which are included; ``kind`` is numpy's name of the type of x."""
        ends = [self.constant("limit", np.array(end, kind)) for end in (low, high)]
        return self.apply("Clip", [x, *ends], hint)

    def pad(self, node: nodes.Pad, x: str, zero: str) -> str:
        """Add a Pad node."""
        before, after = node.padding[::2][::-1], node.padding[1::2][::-1]
        others = [0] * (1 + len(self.network.sizes[node.name]) - len(before))
        pads = np.array([*others, *before, *others, *after], np.int64)
        return self.apply("Pad", [x, self.constant("pads", pads), zero])

    def select(self, node: nodes.Select, x: str) -> str:
        """Add a Gather along each axis that has other places."""
        shape = self.network.sizes[node.inputs[0]]
        axes = enumerate(zip(shape, node.tensors.values(), strict=True), 1)
        moved = [(a, y) for a, (n, y) in axes if not np.array_equal(y.numpy(), np.arange(n))]
        for number, (axis, places) in enumerate(moved, 1):
            inputs = [x, self.constant("places", places.numpy())]
            hint = "" if number == len(moved) else "selected"
            x = self.apply("Gather", inputs, hint, axis=axis)
        return x

    def subtract(self, x: Sequence[str]) -> str:
        """Add the difference of two tensors, or the negative of one."""
        return self.apply("Sub" if len(x) == 2 else "Neg", x)

    def pixel_shuffle(self, node: nodes.PixelShuffle, x: str) -> str:
        """Add a PixelShuffle node: DepthToSpace is of two axes, and not of all types."""
        before, after = (self.network.sizes[name] for name in (node.inputs[0], node.name))
        parts = self.constant("parts", np.array([0, *node.split(before[0]), *before[1:]]))
        x = self.apply("Reshape", [x, parts], "split")
        x = self.apply("Transpose", [x], "ordered", perm=node.order)
        return self.apply("Reshape", [x, self.constant("shape", np.array([0, *after]))])

    def max_pool(self, node: nodes.MaxPool, x: str, name: str) -> str:
        """Add a MaxPool node under exactly this name."""
        windows: dict[str, Any] = {"kernel_shape": node.kernel, "strides": node.stride}
        return self.apply("MaxPool", [x], name=name, pads=pads_of(node), **windows)

    def table_places(self, node: nodes.Input) -> str:
        """Add the place of each input in the tables of all channels, one after the other."""
        place = self.cast("bytes", "INT32")
        if node.dtype != "uint8":  # a negative integer is a place from the end
            place = self.apply("Mod", [place, self.constant("length", np.int32(256))], "place")
        rows = np.arange(0, 256 * node.shape[0], 256, dtype=np.int32)
        return self.line(
            place, ("Add", rows.reshape(-1, *[1] * (len(node.shape) - 1))), hint="place"
        )

    def per_channel(
        self, node: nodes.Steps | nodes.Requantise | nodes.Scores, x: Tensor | Array
    ) -> Array:
        """Return one number a channel, (C,), in a shape for products with a node's results."""
        return np.asarray(x).reshape(-1, *[1] * (len(self.network.sizes[node.name]) - node.axis))

    def model(
        self,
        opsets: Mapping[str, int],
        tensors: Sequence[TensorInfo],
        between: Sequence[TensorInfo] = (),
        properties: Mapping[str, str] | None = None,
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
        helper.set_model_props(model, {**_metadata(self.network), **(properties or {})})
        return model


@dataclass(frozen=True)
class StoredTensor:
    """Integers from ``low`` to ``high``, stored as INT32, UINT8 or INT8 after ``zero`` is added.

    Stored numbers above ``limit`` stand for the limit.
    """

    name: str
    low: int
    high: int
    kind: str = "INT32"
    zero: int = 0
    limit: int | None = None

    def limited(self, graph: OnnxGraph) -> "StoredTensor":
        """Return the same integers without numbers above their limit."""
        if self.limit is None:
            return self
        # ONNX Runtime computes Clip in less time than Min.
        low, kind = self.low + self.zero, self.kind.lower()
        name = graph.clip(self.name, low, self.limit, kind, "limited")
        return replace(self, name=name, limit=None)

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
        name = graph.line(name, ("Add", np.int32(zero - x.zero)), hint=f"{hint}moved")
        name = name if kind == "INT32" else graph.cast(name, kind, f"{hint}moved")
        return replace(x, name=name, kind=kind, zero=zero)


def zero_point(low: int, high: int, kind: str = "UINT8") -> int | None:
    """Return the byte that stands for 0, or None if bytes cannot hold 0 and low to high."""
    zero = -min(low, 0)
    return zero - (kind == "INT8") * 128 if zero + max(high, 0) <= 255 else None


def storage(node: nodes.Node) -> tuple[str, int]:
    """Return type and zero point of a node's results: bytes where they fit."""
    zero = zero_point(node.low, node.high)
    return ("INT32", 0) if zero is None else ("UINT8", zero)


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


def sum_operands(node: nodes.Sum | nodes.SumPool, channels: int) -> tuple[Array, dict[str, Any]]:
    """Return the weights and the attributes of a convolution; a linear layer has no attributes."""
    if isinstance(node, nodes.SumPool):
        weight = np.ones((channels, 1, *node.kernel), np.int64)
        return weight, {"strides": node.stride, "pads": pads_of(node), "group": channels}
    windows = {"strides": node.stride, "pads": [*node.padding] * 2, "dilations": node.dilation}
    attributes = {**windows, "group": node.groups} if node.weight.dim() > 2 else {}
    return node.weight.numpy().astype(np.int64), attributes


def pads_of(node: nodes.MaxPool | nodes.SumPool) -> list[int]:
    """Return the padding of a pooling: before all axes, then after them."""
    padding = node.padding[-len(node.kernel) :]
    beyond = node.beyond or (0,) * len(padding)
    return [*padding, *(size + more for size, more in zip(padding, beyond, strict=True))]


def write_model(model: Any, path: Path | str) -> Path:
    """Write a model to a file."""
    path = Path(path)
    path.write_bytes(model.SerializeToString())
    return path


def _metadata(network: FrozenNetwork) -> dict[str, str]:
    """Return the properties of a file.

    The float network sees (byte − zero)·unit, or, with a table, what that has for the byte times
    unit; its outputs are the scores times ``scales``. The class is that of the largest score times
    ``order``, integers in proportion to the scales. Both are by name if there are several outputs.
    """
    first, heads = network.input, network.heads
    by_output = lambda numbers: json.dumps(numbers.get("scores", numbers))
    known = {
        "softstair": softstair.__version__,
        "digest": network.digest,
        "zero": str(first.zero),
        "unit": repr(first.unit),
        "scales": by_output({f"scores{name}": h.scale.tolist() for name, h in heads.items()}),
        "order": by_output({f"scores{name}": h.order.tolist() for name, h in heads.items()}),
    }
    known |= {"table": "in the file, for each channel"} if first.table is not None else {}
    return known | ({"classes": json.dumps(network.classes)} if network.classes else {})
