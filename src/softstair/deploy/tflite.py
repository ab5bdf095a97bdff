"""Frozen networks as .tflite files of INT8 operators, exact in the kernels that they name.

Features are int8 with a zero point. A sum and its stair are one convolution, whose clamp is a
fused activation or the end of int8. Bias and scales of its channels are searched, so that all
roundings of INT8 runtimes give each level (see int8_roundings.py): weights are multiplied by as
much as bytes hold. Where that is too coarse, features are multiplied first, or the input is joined
to itself. A requantisation has its own numbers. The last layer is in float32 on integers below 2²⁴,
which is exact.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softstair import _check
from softstair.deploy import nodes
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.int8_roundings import ALL, FAMILIES, Fit, Labels, Stairs, fit
from softstair.deploy.nodes import ExportError, NeedsInt8, Shape, Stair, largest_sum
from softstair.deploy.onnx_graph import FLOAT32_EXACT
from softstair.deploy.onnx_levels import has_thresholds, reach, thresholds
from softstair.deploy.requantise import is_clear
from softstair.deploy.tflite_graph import Array, facts_of
from softstair.deploy.tflite_layers import (
    BYTE,
    Layers,
    Product,
    Stored,
    ones,
    product_of,
    scales_of,
    two,
    unit_of_clamp,
)

MAX_WEIGHT = 127  # products of −128 saturate on ARM
COPIES = (2, 4, 8, 16)
INT8 = "Freeze it with arithmetic='int8'"
KERNELS = ("xnnpack", "builtin", "reference")
"""Of LiteRT; TensorFlow Lite Micro rounds as the reference kernels do."""


def write(network: FrozenNetwork, path: Path | str, kernels: str = "", trace: bool = False) -> Path:
    """Write a .tflite file: int8 ``bytes`` (1, H, W, C) in, int32 ``scores`` and their float32
    ``values`` out, of each output.

    The bytes are those of the network less 128. With ``trace`` the features are outputs too. The
    metadata have the network's digest and the kernels in which the file is exact; where ``kernels``
    are named and are not among them, ExportError is raised.
    """
    written = _writer(network)
    if kernels and kernels not in written.kernels:
        rounding = "once" if kernels == "xnnpack" else "double"
        reason = f"it is exact in {' and '.join(written.kernels)}, and not in {kernels}"
        raise ExportError.of("the network", reason, f"Freeze it with rounding={rounding!r}")
    Path(path).write_bytes(written.content(trace))
    return Path(path)


def traced(network: FrozenNetwork, path: Path, out: Path) -> Path:
    """Write a file like another, with the features as outputs too."""
    decoder(network, path)
    return write(network, out, trace=True)


def encode(network: FrozenNetwork, x: Tensor) -> Array:
    """Return what a file reads of a batch, (N, H, W, C) int8."""
    moved = x.cpu().numpy().astype(np.int16) - 128 * (x.dtype == torch.uint8)
    channels, *size = network.input.shape
    rows = moved.astype(np.int8).reshape(len(x), channels, *((1, 1) if not size else two(size, 1)))
    return np.ascontiguousarray(rows.transpose(0, 2, 3, 1))


def decoder(
    network: FrozenNetwork, file: Path
) -> Callable[[Mapping[str, Array]], dict[str, Tensor]]:
    """Return what makes features, scores and values of the outputs of a file."""
    about = facts_of(file.read_bytes())
    if about.get("digest") != network.digest:
        raise _check.invalid("path", f"must be of this network, but {str(file)!r} is of another")

    def results(outputs: Mapping[str, Array]) -> dict[str, Tensor]:
        found = {}
        for number, (name, (zero, shape)) in enumerate(about["outputs"].items()):
            y = torch.from_numpy(outputs[str(number)])
            y = (y if y.is_floating_point() else y.int() - zero).reshape(len(y), -1, shape[0])
            found[name] = y.transpose(1, 2).reshape(len(y), *shape)
        return found

    return results


@lru_cache(maxsize=1)  # a file and its trace need the same search
def _writer(network: FrozenNetwork) -> "_Writer":
    return _Writer(network)


class _Writer(Layers):
    """The operators of a network, node by node."""

    def __init__(self, network: FrozenNetwork) -> None:
        super().__init__(copy.deepcopy(network).cpu())
        self.roundings = {*ALL}
        """Of the kernels in which all of it is exact."""
        self.scales = scales_of(self.network)
        writers: dict[type[nodes.Node], Callable[[Any], Stored | None]] = {
            nodes.Input: self._input,
            nodes.Steps: self._stair,
            nodes.Requantise: self._stair,
            nodes.SumPool: self._sum_pool,
            nodes.MaxPool: self._max_pool,
            nodes.Select: self._select,
            nodes.Add: self._add,
            nodes.Concat: self._concat,
            nodes.Pad: self._pad,
            nodes.Flatten: self._flatten,
        }
        for node in self.network.nodes:
            if isinstance(node, nodes.Sum | nodes.Scores):
                continue  # its stair or the scores write it
            if type(node) not in writers:
                kind = type(node).__name__
                raise ExportError.of(node.name, f"there is no {kind} of integers in a .tflite")
            stored = writers[type(node)](node)
            if stored is not None:
                self.stored[node.name] = stored
        self.results: dict[str, tuple[int, int, Shape]] = {}
        for name, head in self.network.heads.items():
            size = self.network.sizes[head.name]
            for kind, number in zip(("scores", "values"), self._scores(head), strict=True):
                self.results[kind + name] = (number, 0, size)

    @property
    def kernels(self) -> list[str]:
        """The kernels in which all layers are exact."""
        return [name for name in KERNELS if name in self.roundings]

    def content(self, trace: bool) -> bytes:
        """Return the file."""
        network, outputs = self.network, dict(self.results)
        for name, x in self.stored.items() if trace else ():
            if not x.flat and name != network.input.name:
                outputs[name] = (x.tensor, x.zero, network.sizes[name])
        self.graph.graph.outputs = [number for number, *_ in outputs.values()]
        if not self.kernels:
            raise ExportError("cannot export: some layers round once, others doubly. Freeze again.")
        heads = network.heads.items()
        about = {
            "digest": network.digest,
            "kernels": self.kernels,
            "input": f"{network.input.dtype} - {128 * (network.input.dtype == 'uint8')}",
            "outputs": {name: rest for name, (_, *rest) in outputs.items()},
            "scales": {name: head.scale.tolist() for name, head in heads},
            "order": {name: head.order.tolist() for name, head in heads},
            "classes": network.classes,
        }
        return self.graph.content(about)

    def _input(self, node: nodes.Input) -> Stored:
        if node.dtype == "int16":
            raise ExportError.of(node.name, "it reads int16", "Freeze it for uint8 or int8")
        zero = node.zero - 128 * (node.dtype == "uint8")
        span = (node.low, node.high) if node.table is None else (0, BYTE)
        x = self.new("bytes", Stored(-1, self.shape(node.name), *span, zero))
        self.graph.graph.inputs = [x.tensor]
        if node.table is None:
            return x
        table, levels = node.table.long().numpy(), np.arange(node.low, node.high + 1)
        if node.high - node.low > BYTE:
            reason = "the table of its bytes has more than 8 bits"
            raise ExportError.of(node.name, reason, "Give `zero` and `scale`")
        begins = np.array([np.searchsorted(row, levels[1:]) for row in table])
        ends = np.repeat([[0], [BYTE]], len(table), 1)
        return self._levels(node, ones("bytes", len(table)), x, Stairs(levels, begins, *ends))

    def _stair(self, node: Stair) -> Stored:
        if node.axis != 1:
            raise ExportError.of(node.name, "its channels are not on axis 1")
        if isinstance(node, nodes.Requantise) and len(node.inputs) > 1:
            return self._shortcut(node)
        p, ends = product_of(self.network, node.inputs[0]), reach(self.network, node)
        if isinstance(node, nodes.Requantise):
            if not has_thresholds(node):
                raise NeedsInt8.of(node.name, "its levels do not fit into 8 bits", INT8)
            signs, begins = thresholds(node, *ends)
            levels = np.arange(node.low, node.high + 1)
        else:
            begins, levels = node.thresholds.long(), np.array(node.levels)
            signs = torch.ones(len(begins), dtype=torch.int64)
        table, sign = begins.numpy(), signs.numpy()
        least, greatest = np.sort([sign * end.numpy() for end in ends], 0)
        p = replace(p, weight=p.weight * sign[:, None, None, None])
        x = self.read(p.source, node.name)
        return self._levels(node, p, x, Stairs(levels, table, least, greatest))

    def _levels(self, node: Any, p: Product, x: Stored, stairs: Stairs) -> Stored:
        """Add a convolution that gives levels."""
        y, fused, clamp = self._clamped(node)
        p, x, found = self._fitted(node, p, x, stairs, y.scale, clamp)
        unit = Labels(x.scale, y.scale).of_weights(found.scale)
        return self.convolve(p, x, self.new(node.name, y), found.bias, unit, fused)

    def _clamped(self, node: Any) -> tuple[Stored, str, tuple[int, int]]:
        """Return features without a tensor, the activation that clamps them, and the clamp."""
        low, high, scale = node.low, node.high, self.scales[node.name]
        y = Stored(-1, self.shape(node.name), low, high, min(127 - high, 127), scale)
        if low >= 0:
            return y, "RELU", (0, high)
        if high - low == BYTE:
            return y, "NONE", (low, high)
        end = max(-low, high)
        zero = y.zero if high <= -low else -128 - low
        y = replace(y, zero=zero, scale=unit_of_clamp(low, high))
        return y, "RELU_N1_TO_1", (max(-end, -128 - zero), min(end, 127 - zero))

    def _shortcut(self, node: nodes.Requantise) -> Stored:
        """Add the sum of two bytes."""
        assert node.beside is not None
        assert node.rest is not None
        a, b = (self.network.node(name) for name in node.inputs)
        ratios = np.ldexp([node.multiplier.numpy(), node.beside.numpy()], -node.shift.numpy())
        is_one = (ratios == ratios[:, :1]).all() and not node.rest.any() and not node.bias.any()
        ends = ((a.low, a.high), (b.low, b.high), node.low, node.high)
        own = *ratios[:, 0].tolist(), *ends
        if node.inputs[0] not in self.stored or not is_one or not is_clear(*own):
            raise NeedsInt8.of(node.name, "it adds a shortcut before it rounds", INT8)
        y, fused, _ = self._clamped(node)
        units = (float(np.float32(ratio * y.scale)) for ratio in ratios[:, 0])
        parts = [self.in_unit(self.stored[x], s) for x, s in zip(node.inputs, units, strict=True)]
        act = getattr(self.graph.schema.ActivationFunctionType, fused)
        y, facts = self.new(node.name, y), {"version": 2, "fusedActivationFunction": act}
        return self.apply("ADD", parts[0], y, parts[1].tensor, **facts)

    def _fitted(
        self, node: Any, p: Product, x: Stored, stairs: Stairs, scale: float, clamp: tuple[int, int]
    ) -> tuple[Product, Stored, Fit]:
        """Return the weights, the input and the numbers of each channel that give its levels."""
        largest = np.abs(p.weight.reshape(len(p.weight), -1)).max(1).clip(1)
        row = lambda values: values[:, None, None, None]
        if isinstance(node, nodes.Requantise):
            own = Fit.of(node.factor, node.bias, node.multiplier, node.shift)
            for roundings in (ALL, FAMILIES[node.rounding]):
                near = own.near(stairs, clamp, roundings, Labels(x.scale, scale))
                if near.found.all() and (own.factor * largest <= MAX_WEIGHT).all():
                    self.roundings &= {*roundings}
                    return replace(p, weight=p.weight * row(own.factor)), x, near
            raise NeedsInt8.of(node.name, "INT8 kernels round some of its sums differently", INT8)
        span = BYTE // max(x.high - x.low, 1)
        ways = [(1, 1), *([(1, span)] if span > 1 else [])]
        ways += [(copies, 1) for copies in COPIES if p.groups == 1]
        for copies, times in ways:
            factor, labels = MAX_WEIGHT * copies // largest * times, Labels(x.scale / times, scale)
            found = fit(stairs, factor, clamp, ALL, labels, times) if factor.all() else None
            if found is not None and found.found.all():
                whole = p.weight * row(found.factor // times)
                parts = [whole // copies + (part < whole % copies) for part in range(copies)]
                x = self.times(x, times) if times > 1 else self.copied(x, copies)
                return replace(p, weight=np.concatenate(parts, 1)), x, found
        reason = "no scale gives its levels in all kernels"
        raise ExportError.of(node.name, reason, "Give its features or weights fewer bits")

    def _sum_pool(self, node: nodes.SumPool) -> Stored | None:
        if node.high - node.low > BYTE:
            return None  # a stair or the scores write it
        p = product_of(self.network, node.name)
        return self.summed(p, self.read(p.source, node.name), self.new(node.name, self._free(node)))

    def _free(self, node: nodes.Node) -> Stored:
        """Return the features of a node without a clamp."""
        scale = self.scales[node.name]
        return self.within(node.name, node.low, node.high, self.shape(node.name), scale)

    def _max_pool(self, node: nodes.MaxPool) -> Stored:
        x, shape = self.read(node.inputs[0], node.name), self.shape(node.name)
        sizes = (two(node.kernel, 1), two(node.stride, 1))
        x, padding = self.placed(x, shape, *sizes, two(node.padding, 0), (1, 1), lowest=True)
        names = ("filterHeight", "filterWidth", "strideH", "strideW")
        options = dict(zip(names, (*sizes[0], *sizes[1]), strict=True))
        y = self.new(node.name, x, shape=shape)
        return self.apply("MAX_POOL_2D", x, y, version=2, padding=padding, **options)

    def _select(self, node: nodes.Select) -> Stored:
        x = self._unflat(node)
        for axis, part in zip(self.axes(node.name), node.tensors.values(), strict=False):
            places = part.int().numpy()
            if not np.array_equal(places, np.arange(x.shape[axis])):
                shape = (*x.shape[:axis], len(places), *x.shape[axis + 1 :])
                number = self.graph.constant("places", places)
                y = self.new(node.name, x, shape=shape)
                x = self.apply("GATHER", x, y, number, version=2, axis=axis)
        return x

    def _add(self, node: nodes.Add) -> Stored:
        a, b = (self.read(name, node.name) for name in node.inputs)
        y = self.new(node.name, self._free(node), flat=a.flat)
        a, b = self.in_unit(a, y.scale), self.in_unit(b, y.scale)
        return self.apply("ADD", a, y, b.tensor, version=2)

    def _concat(self, node: nodes.Concat) -> Stored:
        y, axis = self._free(node), self.axes(node.name)[node.axis - 1]
        parts = [self.in_unit(self._unflat(node, name), y.scale) for name in node.inputs]
        return self.joined(node.name, [self.moved(part, y.zero) for part in parts], axis, y)

    def _pad(self, node: nodes.Pad) -> Stored:
        x, sizes = self._unflat(node), np.zeros((4, 2), np.int32)
        if not x.low <= 0 <= x.high:
            x = self.moved(x, self._free(node).zero)
        axes = reversed(self.axes(node.name))
        for axis, *ends in zip(axes, node.padding[::2], node.padding[1::2], strict=False):
            sizes[axis] = ends
        return replace(self.pad(x, sizes), low=node.low, high=node.high)

    def _unflat(self, node: nodes.Node, name: str = "") -> Stored:
        """Return an input of a node, whose positions are in the order of the network."""
        x = self.read(name or node.inputs[0], node.name)
        if x.flat:
            raise ExportError.of(node.name, "it reads flattened positions", "Flatten after it")
        return x

    def _flatten(self, node: nodes.Flatten) -> Stored | None:
        x = self.stored.get(node.inputs[0])
        if x is None:
            return None  # of sums: their reader writes them
        *_, height, width, channels = x.shape
        if height * width == 1:
            return x
        size, flat = np.array([1, 1, 1, math.prod(x.shape)]), (channels, height, width)
        y = self.new(node.name, x, shape=tuple(size.tolist()), flat=flat)
        number = self.graph.constant("size", size.astype(np.int32))
        return self.apply("RESHAPE", x, y, number, newShape=size.tolist())

    def _scores(self, node: nodes.Scores) -> tuple[int, int]:
        """Add scores in int32, and the values that they stand for."""
        p, name = product_of(self.network, node.inputs[0]), node.name
        source, bias = self.network.node(p.source), node.bias.long().numpy()
        largest = largest_sum(p.weight, source.low, source.high)
        if largest >= FLOAT32_EXACT:
            reason = f"its sums are up to {largest:,}, and float32 is exact below 2^24"
            raise NeedsInt8.of(name, reason, INT8)
        fits = (largest << node.shift) + np.abs(bias).max() < FLOAT32_EXACT
        p = replace(p, weight=p.weight << node.shift) if fits else p
        x = self.in_float(p.source)
        sums = self.new("sums", replace(x, shape=self.shape(name)))
        sums = self.convolve(p, x, sums, bias * fits, None)
        scores = self._add_in_int32("CAST", sums, "scores")
        if not fits:
            scores = self._add_in_int32("MUL", scores, "scores", 1 << node.shift)
            scores = self._add_in_int32("ADD", scores, "scores", bias)
            sums = self.apply("CAST", scores, self.new("wide", sums))
        unit = self.graph.constant("unit", node.scale.numpy().astype(np.float32))
        return scores.tensor, self.apply("MUL", sums, self.new("values", sums), unit).tensor

    def _add_in_int32(self, code: str, x: Stored, name: str, *values: Any) -> Stored:
        """Add an operator on int32."""
        y = replace(x, tensor=self.graph.tensor(name, x.shape, "INT32"))
        constants = (self.graph.constant(name, np.atleast_1d(v).astype(np.int32)) for v in values)
        return self.apply(code, x, y, *constants)
