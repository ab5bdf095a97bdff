"""The operator beside a copy and ReLU, and convolutions of integers in int8 beside bfloat16.

Bytes are the fewest that must move. Forward: x is read and y is written, and so is what is saved
for the backward pass if it is not x itself, at most one byte per element. Backward: the incoming
gradient and what was saved are read, the outgoing gradient is written. Autograd is asked what is
saved. Convolutions include the moments that a batch normalisation needs; the int8 sums are compared
with those of float64.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import softstair as ss
from benchmarks.speed import clock
from benchmarks.speed.clock import Effort, Record, Times, graph_of
from softstair import Stair, _accelerate, _check, kernels, noise as noises
from softstair.convert.options import StairName, stair_named
from softstair.regularise import FORWARDS, Forward

STAIRS = ("heaviside", "ternary", "int4", "int4@0.07")
"""Default stairs; the last is the paper's, with a quantum that 16-bit dtypes round."""

CONVOLUTIONS = ((128, 256, 16), (256, 256, 16), (256, 512, 8), (512, 512, 8))
"""(input channels, output channels, side) of VGG8's 3×3 convolutions of quantised features."""
Passes = tuple[Callable[[], object], Callable[[], object]]
"""A forward and a backward pass."""


@dataclass(frozen=True)
class OperatorRow(Record):
    """One operator on one tensor."""

    stair: str
    noise: str
    how: Forward
    dtype: str
    elements: int
    forward: Times
    backward: Times
    copy: Times
    relu: float  # seconds of torch.relu, forward and backward together
    forward_bytes: int  # the fewest that must move
    backward_bytes: int
    copy_bytes: int
    kept: float  # bytes per element saved for the backward pass
    memory: float  # peak beyond x and the incoming gradient, as a multiple of the size of x

    @property
    def forward_share(self) -> float:
        """Bandwidth of the forward pass as a fraction of the copy's."""
        return self.forward_bytes / self.forward.median / self.copy_bandwidth

    @property
    def backward_share(self) -> float:
        """Bandwidth of the backward pass as a fraction of the copy's."""
        return self.backward_bytes / self.backward.median / self.copy_bandwidth

    @property
    def copy_bandwidth(self) -> float:
        """Bytes per second of the copy."""
        return self.copy_bytes / self.copy.median

    @property
    def times_relu(self) -> float:
        """Time of forward and backward as a multiple of ReLU's."""
        return (self.forward.median + self.backward.median) / self.relu


def measure_operator(
    device: torch.device | str,
    effort: Effort | None = None,
    stairs: Sequence[str] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> list[OperatorRow]:
    """Measure the operator: a row for each dtype, stair, noise family and forward.

    ``stairs`` are names, "int4@0.07" with a quantum; None: ``STAIRS`` (quick: ternary). ``dtypes``
    None: float32 on a CPU, bfloat16 and float32 on CUDA (quick: bfloat16). ``progress`` is called
    with a line before each stair.
    """
    device = torch.device(device)
    effort = effort or Effort.on(device)
    names = stairs if stairs is not None else ["ternary"] if effort.quick else STAIRS
    targets = {name: bench_stair(name) for name in names}
    if dtypes is None:
        dtypes = [torch.bfloat16, torch.float32] if device.type == "cuda" else [torch.float32]
        dtypes = dtypes[:1] if effort.quick else dtypes
    rows = []
    with clock.own_stream(device), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        for dtype in dtypes:
            leaf = torch.randn(effort.elements, device=device, dtype=dtype, requires_grad=True)
            # Like features, x is not a leaf: for a parameter nothing need be saved.
            x, gradient = leaf.clone(), torch.randn_like(leaf).detach()
            baselines = _baselines(x, gradient)
            for name, stair in targets.items():
                progress(f"operator: {name}, {_short(dtype)}: all noise families and forwards")
                for noise, how in product(noises.names(), FORWARDS):
                    rows.append(_row(x, gradient, baselines, name, stair, noise, how, effort))
    return rows


def bench_stair(name: str) -> Stair:
    """Return a stair whose levels a standard normal x mostly reaches, or one of a given quantum.

    >>> bench_stair("int4").quantum, bench_stair("int4@0.07").quantum
    (0.25, 0.07)
    """
    kind, at, value = name.partition("@")
    levels = len(stair_named(_check.choice("stairs", kind, get_args(StairName))).levels)
    quantum = 1.0 if levels <= 3 else 4.0 / levels
    if at:
        try:
            quantum = float(value)
        except ValueError:
            quantum = 0.0
        if not 0 < quantum < math.inf:
            allowed = f"{kind}, or {kind}@ and a quantum above 0 ({kind}@0.07)"
            raise _check.wrong("stairs", name, allowed)
    return stair_named(kind, quantum)


def _baselines(x: Tensor, gradient: Tensor) -> dict[str, Callable[[], object]]:
    """Return the functions that every operator is timed beside."""
    source, destination = x.detach(), torch.empty_like(x, requires_grad=False)
    copy = graph_of(lambda: destination.copy_(source), x.device)
    if x.is_cuda:
        y = torch.relu(source)
        kernel = torch.ops.aten.threshold_backward
        passes: Passes = (lambda: torch.relu(source)), (lambda: kernel(gradient, y, 0))
    else:
        passes = _autograd_passes(torch.relu, x, gradient)
    forward, backward = (graph_of(function, x.device) for function in passes)
    return {"copy": copy, "relu forward": forward, "relu backward": backward}


def _row(
    x: Tensor,
    gradient: Tensor,
    baselines: dict[str, Callable[[], object]],
    name: str,
    stair: Stair,
    noise: str,
    how: Forward,
    effort: Effort,
) -> OperatorRow:
    # Tensors on the device of x, as in a network: no synchronisation is needed to read them.
    assert isinstance(stair.quantum, float)
    std = torch.tensor(noises.get(noise).std_within(0.5) * stair.quantum, device=x.device)
    mean = torch.zeros_like(std)

    def operator(x: Tensor) -> Tensor:
        return ss.regularise(x, stair, noise, mean, std, how)

    if x.is_cuda:  # the kernels that autograd calls, without autograd
        soft, source = kernels.SoftStair(stair, noises.get(noise), mean, std), x.detach()
        run = lambda: kernels.forward(source, soft, how, compact=True)
        _, saved = run()
        passes: Passes = run, lambda: kernels.backward(gradient, saved, soft)
    else:
        passes = _autograd_passes(operator, x, gradient)
    forward, backward = (graph_of(function, x.device) for function in passes)
    each = clock.GRAPH_CALLS if x.is_cuda else 1
    # There are dozens of rows with five functions each: a fifth of the time is enough.
    less = replace(effort, seconds=effort.seconds / 5, calls=max(1, effort.calls // each))
    functions = {**baselines, "forward": forward, "backward": backward}
    times = clock.race(functions, x.device, less, each=each)
    written, read = _saved_bytes(operator, x)
    size = x.numel() * x.element_size()
    step = lambda: torch.autograd.grad(operator(x), x, gradient)
    return OperatorRow(
        stair=name,
        noise=noise,
        how=how,
        dtype=_short(x.dtype),
        elements=x.numel(),
        forward=times["forward"],
        backward=times["backward"],
        copy=times["copy"],
        relu=times["relu forward"].median + times["relu backward"].median,
        forward_bytes=2 * size + min(written, x.numel()),
        backward_bytes=2 * size + min(read, size),
        copy_bytes=2 * size,
        kept=read / x.numel(),
        memory=clock.peak_memory(step, x.device, (x, gradient, mean, std)) / size,
    )


def _saved_bytes(operator: Callable[[Tensor], Tensor], x: Tensor) -> tuple[int, int]:
    """Return the bytes written for the backward pass, and the bytes that it reads."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        operator(x)
    sizes = {t.data_ptr(): t.numel() * t.element_size() for t in saved if t.numel() > 1}
    read = sum(sizes.values())
    return read - sizes.get(x.data_ptr(), 0), read


def _autograd_passes(function: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> Passes:
    y = function(x)
    backward = lambda: torch.autograd.grad(y, x, gradient, retain_graph=True)
    return (lambda: function(x)), backward


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class ConvolutionRow(Record):
    """Seconds of a convolution in int8 and in bfloat16, and how many of its sums are wrong."""

    inputs: int
    outputs: int
    side: int
    int8: Times
    bfloat16: Times
    wrong: int
    sums: int

    @property
    def ratio(self) -> float:
        """Speed of int8 relative to bfloat16."""
        return self.bfloat16.median / self.int8.median


def measure_exact(
    device: torch.device | str,
    batch: int = 256,
    effort: Effort | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> list[ConvolutionRow]:
    """Measure the convolutions of VGG8 in int8 and in bfloat16; none without int8 kernels.

    >>> measure_exact("cpu")
    []
    """
    device = torch.device(device)
    effort = effort or Effort.on(device)
    rows = []
    with clock.own_stream(device):
        for inputs, outputs, side in CONVOLUTIONS if _accelerate.can_fuse(device) else ():
            progress(f"exact: {inputs} to {outputs} channels: measuring")
            shapes = (batch, inputs, side, side), (outputs, inputs, 3, 3)
            integers = (torch.randint(-1, 2, shape, device=device) for shape in shapes)
            x, weight = (
                values.to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
                for values in integers
            )
            rows.append(_convolution_row(x, weight, effort))
    return rows


def _convolution_row(x: Tensor, weight: Tensor, effort: Effort) -> ConvolutionRow:
    from softstair._accelerate import moments, products

    module = nn.BatchNorm2d(len(weight), device=x.device).requires_grad_(False)
    zeros = lambda: moments.zeros_for(1, len(weight), x.device)[0]
    norm = lambda: moments.Normalisation(module, module.weight, module.bias, zeros())
    features, weights = x.to(torch.int8), weight.to(torch.int8)
    convolve = products.convolve_with_statistics
    int8 = lambda: convolve(features, weights, 1, torch.int16, norm())
    bfloat16 = lambda: moments.batch_statistics(F.conv2d(x, weight, padding=1), norm())
    functions = {"int8": graph_of(int8, x.device), "bfloat16": graph_of(bfloat16, x.device)}
    times = clock.race(functions, x.device, effort, each=clock.GRAPH_CALLS)
    expected = F.conv2d(x.double(), weight.double(), padding=1)
    wrong = int((int8()[0].double() != expected).sum())
    sizes = x.shape[1], len(weight), x.shape[2]
    return ConvolutionRow(*sizes, times["int8"], times["bfloat16"], wrong, expected.numel())
