"""Frozen networks as .pte files of ExecuTorch: one graph of XNNPACK's kernels, exact in them.

Features are int8 with a zero point, in the unit 1. A sum and its stair are a convolution whose bias
and scales are searched, so that XNNPACK's product in float32, rounded half to even, gives each
level (see int8_roundings.py). The last layer is in float32 on integers below 2²⁴, which is exact.
"""

import copy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softstair._errors import SoftstairError
from softstair.deploy import nodes
from softstair.deploy.frozen import FrozenNetwork, load_frozen
from softstair.deploy.int8_roundings import Fit, Stairs, fit
from softstair.deploy.loaders import Array
from softstair.deploy.nodes import ExportError
from softstair.deploy.onnx_graph import FLOAT32_EXACT
from softstair.deploy.onnx_levels import has_thresholds, reach, thresholds
from softstair.deploy.processes import python_with
from softstair.deploy.tflite_layers import Product, product_of, two

COPIES = (1, 2, 4, 8, 16)
BYTE, MAX_WEIGHT = 255, 127
SAME = (nodes.MaxPool, nodes.Pad, nodes.Flatten)
"""Nodes whose results have the zero point of what they read."""
Values = dict[str, Tensor]


def write(network: FrozenNetwork, path: Path | str, trace: bool = False) -> Path:
    """Write a .pte file: int8 in, (1, C, H, W), the network's bytes less 128; int32 scores out.

    Sequences are (1, C, 1, L). With ``trace`` features are outputs too. ExecuTorch may be in an
    environment of its own.
    """
    if find_spec("executorch"):
        Path(path).write_bytes(content(network, trace))
        return Path(path)
    code = "import sys; sys.path.append(sys.argv[1]); from softstair.deploy import pte; pte.main()"
    with tempfile.TemporaryDirectory() as folder:
        file = network.save(Path(folder) / "frozen.safetensors")
        words = [str(Path(__file__).parents[2]), str(file), str(path), str(int(trace))]
        command = [str(python_with("executorch")), "-P", "-c", code, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:]
        kind = ExportError if "cannot export" in said[0] else SoftstairError
        raise kind(said[0].partition("Error: ")[2] or f"ExecuTorch ended and said: {said[0]}")
    return Path(path)


def trace(network: FrozenNetwork, path: Path, out: Path) -> Path:
    """Write a file that has the features as outputs, too."""
    return write(network, out, trace=True)


def main() -> None:
    """Write the file of a saved network: the arguments are the two paths and ``trace``."""
    _, _, source, path, trace = sys.argv
    Path(path).write_bytes(content(load_frozen(source), trace == "1"))


def encode(network: FrozenNetwork, x: Tensor) -> Array:
    """Return what a file takes for integers."""
    moved = x.cpu().short() - 128 * (network.input.dtype == "uint8")
    return _spatial(moved.to(torch.int8)).numpy()


def decoder(network: FrozenNetwork, file: Path) -> Callable[[Mapping[str, Array]], Any]:
    """Return what makes results of nodes, scores and classes of the outputs of a file."""
    network = copy.deepcopy(network).cpu()
    last, zero = network.last, zeros(network)

    def decode(y: Mapping[str, Array]) -> dict[str, Tensor]:
        scores = torch.from_numpy(y["0"]).reshape(-1, *network.sizes[last.name])
        known = {"class": last.classes(scores)} if network.outputs == "classes" else {}
        for number, name in enumerate(zero, 1):
            if str(number) in y:
                levels = torch.from_numpy(y[str(number)]).int() - zero[name]
                known[name] = levels.reshape(-1, *network.sizes[name])
        return {"scores": scores, **known}

    return decode


def zeros(network: FrozenNetwork) -> dict[str, int]:
    """Return the zero points of the results that a file has in int8."""
    found: dict[str, int] = {}
    for node in network.nodes:
        if isinstance(node, nodes.Input):
            found[node.name] = node.zero - 128 * (node.dtype == "uint8")
        elif isinstance(node, SAME):
            if node.inputs[0] in found:
                found[node.name] = found[node.inputs[0]]
        elif isinstance(node, nodes.Concat) and len({found.get(x) for x in node.inputs}) == 1:
            found[node.name] = found[node.inputs[0]]
        elif not isinstance(node, nodes.Sum | nodes.Scores) and node.high - node.low <= BYTE:
            found[node.name] = max(-128 - node.low, min(127, 127 - node.high))
    return found


def content(network: FrozenNetwork, trace: bool) -> bytes:
    """Return the bytes of a file; it needs executorch."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    module = _Graph(network, trace).eval()
    example = torch.from_numpy(encode(network, network.input.random(1)))
    program = to_edge_transform_and_lower(
        torch.export.export(module, (example,), strict=False),
        partitioner=[XnnpackPartitioner()],
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    calls = [node for node in program.exported_program().graph.nodes if node.op == "call_function"]
    names = [str(call.target) for call in calls]
    delegates = sum("call_delegate" in name for name in names)
    if delegates != 1:
        others = sorted({name.split(":")[1][:40] for name in names if "EdgeOpOverload" in name})
        raise ExportError(
            f"cannot export: XNNPACK takes {delegates} parts of the network, without {others}."
        )
    return bytes(program.to_executorch().buffer)


class _Graph(nn.Module):
    """A network as torch operations that XNNPACK has: quantise, compute, quantise again."""

    def __init__(self, network: FrozenNetwork, trace: bool) -> None:
        super().__init__()
        import torch.ao.quantization.fx._decomposed  # noqa: F401  it registers the operators

        network = copy.deepcopy(network).cpu()
        self.sources, self.trace, self.zero = [network], trace, zeros(network)
        self.steps: dict[str, Callable[[Values], Tensor]] = {}
        self.wide: dict[str, str] = {}
        writers: dict[type[nodes.Node], Callable[[Any], Any]] = {
            nodes.Steps: self._stair,
            nodes.Requantise: self._stair,
            nodes.MaxPool: self._max_pool,
            nodes.SumPool: self._sum_pool,
            nodes.Add: lambda node: (
                lambda v: self._real(node.inputs[0], v) + self._real(node.inputs[1], v)
            ),
            nodes.Concat: self._concat,
            nodes.Pad: lambda node: lambda v: F.pad(self._real(node.inputs[0], v), node.padding),
            nodes.Flatten: lambda node: lambda v: self._real(node.inputs[0], v).flatten(1),
        }
        entry = network.input
        if entry.table is not None or entry.dtype == "int16":
            reason = "XNNPACK reads no table, and no int16"
            raise ExportError.of(entry.name, reason, "Freeze it with `zero` and `scale`, for bytes")
        if len(network.heads) > 1:
            raise ExportError("cannot export: a .pte has one output, and the network has several.")
        for node in network.nodes[1:]:
            if node.name not in self.zero:
                if not isinstance(node, nodes.Sum | nodes.SumPool | nodes.Flatten | nodes.Scores):
                    raise ExportError.of(node.name, "its integers do not fit into 8 bits")
            elif type(node) not in writers:
                raise ExportError.of(node.name, f"XNNPACK has no {type(node).__name__}")
            else:
                self.steps[node.name] = writers[type(node)](node)
        self.scores = self._scores(network.last)

    @property
    def network(self) -> FrozenNetwork:
        """The network, which is no part of this module."""
        return self.sources[0]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = {self.network.input.name: x}
        for name, step in self.steps.items():
            y, zero = step(values), self.zero[name]
            values[name] = torch.ops.quantized_decomposed.quantize_per_tensor.default(
                y, 1.0, zero, -128, 127, torch.int8
            )
        return self.scores(values), *([values[name] for name in self.zero] if self.trace else [])

    def _real(self, name: str, values: Values) -> Tensor:
        """Return the result of a node in float32."""
        if name in values:
            return torch.ops.quantized_decomposed.dequantize_per_tensor.default(
                values[name], 1.0, self.zero[name], -128, 127, torch.int8
            )
        node = self.network.node(name)
        if isinstance(node, nodes.Flatten):
            return self._real(node.inputs[0], values).flatten(1)
        p = product_of(self.network, name)
        return _convolve(p, self._real(p.source, values), self.get_buffer(self.wide[name]), None)

    def _keep_weights(self, name: str) -> None:
        """Register the weights of what is not stored in int8, but in float32."""
        node = self.network.node(name)
        if isinstance(node, nodes.Flatten) and name not in self.zero:
            self._keep_weights(node.inputs[0])
        elif name not in self.zero:
            p = product_of(self.network, name)
            self.wide[name] = self._keep("wide", self._shaped(p), torch.float32)
            self._keep_weights(p.source)

    def _keep(self, hint: str, values: Array, dtype: torch.dtype) -> str:
        """Register a constant, and return its name."""
        name = f"{hint}_{len(self._buffers)}"
        self.register_buffer(name, torch.tensor(values, dtype=dtype))
        return name

    def _shaped(self, p: Product) -> Array:
        """Return weights of two axes for features of one."""
        is_linear = len(self.network.sizes[p.source]) == 1
        return p.weight.reshape(len(p.weight), -1) if is_linear else p.weight

    def _stair(self, node: nodes.Stair) -> Callable[[Values], Tensor]:
        if node.axis != 1 or len(node.inputs) > 1:
            reason = "it adds a shortcut before it rounds, or its channels are not on axis 1"
            raise ExportError.of(node.name, reason, "Freeze it with arithmetic='int8'")
        p, ends = product_of(self.network, node.inputs[0]), reach(self.network, node)
        if isinstance(node, nodes.Requantise):
            if not has_thresholds(node):
                raise ExportError.of(node.name, "its levels do not fit into 8 bits")
            signs, begins = thresholds(node, *ends)
            levels = np.arange(node.low, node.high + 1)
        else:
            begins, levels = node.thresholds.long(), np.array(node.levels)
            signs = torch.ones(len(begins), dtype=torch.int64)
        sign = signs.numpy()
        least, greatest = np.sort([sign * end.numpy() for end in ends], 0)
        p = replace(p, weight=p.weight * sign[:, None, None, None])
        return self._levels(node, p, Stairs(levels, begins.numpy(), least, greatest))

    def _levels(self, node: nodes.Node, p: Product, stairs: Stairs) -> Callable[[Values], Tensor]:
        """Return a convolution that gives levels."""
        if p.source not in self.zero:
            raise ExportError.of(node.name, f"it reads {p.source!r}, which has more than 8 bits")
        copies, found = self._fitted(node, p, stairs)
        whole = p.weight * found.factor[:, None, None, None]
        parts = [whole // copies + (part < whole % copies) for part in range(copies)]
        p = replace(p, weight=np.concatenate(parts, 1))
        scale = found.scale.astype(np.float32)
        names = [
            self._keep("weight", self._shaped(p), torch.int8),
            self._keep("scale", scale, torch.float32),
            self._keep("zero", np.zeros(len(scale)), torch.int64),
            self._keep("bias", found.bias * scale.astype(np.float64), torch.float32),
        ]

        def run(values: Values) -> Tensor:
            weight, unit, zero, bias = (self.get_buffer(name) for name in names)
            x = self._real(p.source, values)
            for _ in range(copies.bit_length() - 1):
                # ExecuTorch gives XNNPACK no concatenation that reads one node twice.
                again = self._quantised_again(p.source, x)
                x = self._quantised_again(p.source, torch.cat([x, again], 1))
            weight = torch.ops.quantized_decomposed.dequantize_per_channel.default(
                weight, unit, zero, 0, -127, 127, torch.int8
            )
            y = _convolve(p, x, weight, bias)
            return F.relu(y) if node.low == 0 else F.hardtanh(y, float(node.low), float(node.high))

        return run

    def _quantised_again(self, name: str, x: Tensor) -> Tensor:
        ops, how = torch.ops.quantized_decomposed, (1.0, self.zero[name], -128, 127, torch.int8)
        return ops.dequantize_per_tensor.default(ops.quantize_per_tensor.default(x, *how), *how)

    def _fitted(self, node: nodes.Node, p: Product, stairs: Stairs) -> tuple[int, Fit]:
        """Return the numbers of each channel that give its levels, and how often x is needed."""
        largest = np.abs(p.weight.reshape(len(p.weight), -1)).max(1).clip(1)
        clamp = (node.low, node.high)
        for copies in COPIES if p.groups == 1 else (1,):
            factor = MAX_WEIGHT * copies // largest
            found = fit(stairs, factor, clamp, ("xnnpack",)) if factor.all() else None
            if found is not None and found.found.all():
                unit = found.scale.astype(np.float32)
                given = (found.bias * unit.astype(np.float64)).astype(np.float32)
                if (np.rint(given / unit) == found.bias).all():  # as ExecuTorch reads a bias
                    return copies, found
        reason = "no scale gives its levels in XNNPACK"
        raise ExportError.of(node.name, reason, "Freeze it with arithmetic='int8'")

    def _max_pool(self, node: nodes.MaxPool) -> Callable[[Values], Tensor]:
        sizes = (two(node.kernel, 1), two(node.stride, 1), two(node.padding, 0))
        return lambda values: F.max_pool2d(self._real(node.inputs[0], values), *sizes)

    def _sum_pool(self, node: nodes.SumPool) -> Callable[[Values], Tensor]:
        p, levels = product_of(self.network, node.name), np.arange(node.low, node.high + 1)
        begins = np.tile(levels[1:], (len(p.weight), 1))
        ends = (np.full(len(p.weight), end) for end in (node.low, node.high))
        return self._levels(node, p, Stairs(levels, begins, *ends))

    def _concat(self, node: nodes.Concat) -> Callable[[Values], Tensor]:
        if node.axis != 1 or len({self.zero.get(name) for name in node.inputs}) > 1:
            reason = "it joins features whose largest levels differ, or not their channels"
            raise ExportError.of(node.name, reason)
        return lambda values: torch.cat([self._real(name, values) for name in node.inputs], 1)

    def _scores(self, node: nodes.Scores) -> Callable[[Values], Tensor]:
        """Return the scores, whose sums are in float32."""
        p = product_of(self.network, node.inputs[0])
        source = self.network.node(p.source)
        if nodes.largest_sum(p.weight, source.low, source.high) >= FLOAT32_EXACT:
            raise ExportError.of(node.name, "its sums are above 2^24, where float32 is not exact")
        self._keep_weights(p.source)
        name = self._keep("last", self._shaped(p), torch.float32)
        rows = node.bias.numpy().reshape(-1, *[1] * (len(self.network.sizes[node.name]) - 1))
        bias = self._keep("last_bias", rows, torch.int32)

        def run(values: Values) -> Tensor:
            sums = _convolve(p, self._real(p.source, values), self.get_buffer(name), None)
            return sums.to(torch.int32) * (1 << node.shift) + self.get_buffer(bias)

        return run


def _convolve(p: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.dim() == 2:
        return F.linear(x, weight, bias)
    return F.conv2d(x, weight, bias, p.stride, p.padding, p.dilation, p.groups)


def _spatial(x: Tensor) -> Tensor:
    """Return sequences as images of one row."""
    return x.unsqueeze(2) if x.dim() == 3 else x
