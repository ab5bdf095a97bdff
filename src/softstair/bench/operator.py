"""The operator alone: its bandwidth beside a copy's, its time beside ReLU's, and its memory.

The bytes are the fewest that must move. Forward: x is read and y written, and what is kept for the
backward pass besides, if it is not x itself, is written, a byte an element at most. Backward: the
incoming gradient and what was kept are read, the outgoing gradient written. What is kept is asked
of autograd, not assumed.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import softstair as ss
from softstair import kernels
from softstair import noise as noises
from softstair.bench.clock import Times, race
from softstair.bench.effort import Effort
from softstair.bench.memory import peak
from softstair.regularise import FORWARDS, Forward
from softstair.stair import Stair
from softstair.train.stairs import named

__all__ = ["INNER", "STAIRS", "Row", "Target", "measure", "own_stream", "repeated", "target"]

STAIRS = ("heaviside", "ternary", "int4", "int4@0.07")
"""Unless others are asked for: the last as the paper has it, of a quantum that 16 bits round."""
INNER = 10
"""Calls in one graph: the gap between two launches is no part of the operator."""

Function = Callable[[Tensor], Tensor]
Run = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One operator on one tensor.

    forward, backward             seconds of a pass
    forward_bytes, backward_bytes the fewest bytes that it must move
    copy                          seconds of a copy, which moves copy_bytes
    relu                          seconds of torch.relu, forward and backward together
    kept                          bytes an element kept for the backward pass
    memory                        peak beyond x and the incoming gradient, in sizes of x
    """

    stair: str
    noise: str
    how: Forward
    dtype: str
    elements: int
    forward: Times
    backward: Times
    copy: Times
    relu: float
    forward_bytes: int
    backward_bytes: int
    copy_bytes: int
    kept: float
    memory: float

    @property
    def forward_share(self) -> float:
        """The bandwidth of the forward pass as a share of the copy's."""
        return self._share(self.forward, self.forward_bytes)

    @property
    def backward_share(self) -> float:
        """The bandwidth of the backward pass as a share of the copy's."""
        return self._share(self.backward, self.backward_bytes)

    @property
    def copy_bandwidth(self) -> float:
        """Bytes a second."""
        return self.copy_bytes / self.copy.median

    @property
    def times_relu(self) -> float:
        """Forward and backward, as a multiple of ReLU's."""
        return (self.forward.median + self.backward.median) / self.relu

    def _share(self, times: Times, moved: int) -> float:
        return moved / times.median / self.copy_bandwidth

    def to_json(self) -> dict[str, Any]:
        """Plain data; times in seconds."""
        times = {name: getattr(self, name).to_json() for name in ("forward", "backward", "copy")}
        plain = ("stair", "noise", "how", "dtype", "elements", "kept", "memory", "relu")
        moved = ("forward_bytes", "backward_bytes", "copy_bytes")
        derived = ("forward_share", "backward_share", "copy_bandwidth", "times_relu")
        return {**{name: getattr(self, name) for name in (*plain, *moved, *derived)}, **times}


def measure(
    device: torch.device | str,
    effort: Effort | None = None,
    stairs: Sequence[str] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Every family and forward on each of the stairs, in each of the dtypes.

    >>> effort = Effort(repeats=1, calls=1, seconds=0.0, elements=64)
    >>> len(measure("cpu", effort, stairs=["heaviside"]))
    16
    """
    device = torch.device(device)
    effort = effort or Effort.on(device)
    if stairs is None:
        stairs = ["ternary"] if effort.quick else STAIRS
    targets = [target(name) for name in stairs]
    if dtypes is None:
        both = device.type == "cuda" and not effort.quick
        half = [torch.bfloat16] if device.type == "cuda" else []
        dtypes = [*half, torch.float32] if both or not half else half
    rows = []
    with own_stream(device), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        for dtype in dtypes:
            leaf = torch.randn(effort.elements, device=device, dtype=dtype, requires_grad=True)
            # Not a leaf, as features are none: of a parameter nothing needs to be kept.
            x, gradient = leaf.clone(), torch.randn_like(leaf).detach()
            beside = _baseline(x, gradient)
            for one in targets:
                for noise in noises.names():
                    for how in FORWARDS:
                        tell(f"operator: {one.name}, {noise}, {how}, {_short(dtype)}")
                        rows.append(_row(x, gradient, beside, one, noise, how, effort))
    return rows


class Target(NamedTuple):
    """A stair as it is climbed here."""

    name: str
    stair: Stair
    quantum: float


def target(name: str) -> Target:
    """A stair over most of whose levels standard normal x is spread, or one of a given quantum.

    >>> target("int4").quantum, target("int4@0.07").quantum
    (0.25, 0.07)
    """
    kind, at, given = name.partition("@")
    levels = len(named(kind).levels)
    quantum = 1.0 if levels <= 3 else 4.0 / levels
    if at:
        try:
            quantum = float(given)
        except ValueError:
            quantum = 0.0
        if not 0 < quantum < math.inf:
            raise ValueError(
                f"a stair must be given as {kind}, or with its quantum, a number above 0, as "
                f"{kind}@0.07, but {name!r} was given."
            )
    return Target(name, named(kind, quantum), quantum)


def _baseline(x: Tensor, gradient: Tensor) -> dict[str, Run]:
    """What every operator is measured beside."""
    source, target = x.detach(), torch.empty_like(x, requires_grad=False)
    forward, backward = _relu_passes(x, gradient)
    copy = repeated(lambda: target.copy_(source), x.device)
    return {"copy": copy, "relu forward": forward, "relu backward": backward}


def _row(
    x: Tensor,
    gradient: Tensor,
    beside: dict[str, Run],
    climbed: Target,
    noise: str,
    how: Forward,
    effort: Effort,
) -> Row:
    stair = climbed.stair
    # As a network holds them: tensors beside x, which may move without a synchronisation.
    std = torch.tensor(noises.get(noise).std_within(0.5) * climbed.quantum, device=x.device)
    mean = torch.zeros_like(std)

    def operator(x: Tensor) -> Tensor:
        return ss.regularise(x, stair, noise, mean, std, how)

    forward, backward = _operator_passes(x, gradient, stair, noise, mean, std, how)
    contestants = {**beside, "forward": forward, "backward": backward}
    each = INNER if x.is_cuda else 1
    # Five of them for each row, and dozens of rows: a fifth of the time will do.
    less = replace(effort, seconds=effort.seconds / 5, calls=max(1, effort.calls // each))
    times = race(contestants, x.device, less, each=each)
    written, read = _kept(operator, x)
    whole = x.numel() * x.element_size()
    held = peak(
        lambda: torch.autograd.grad(operator(x), x, gradient), x.device, (x, gradient, mean, std)
    )
    return Row(
        stair=climbed.name,
        noise=noise,
        how=how,
        dtype=_short(x.dtype),
        elements=x.numel(),
        forward=times["forward"],
        backward=times["backward"],
        copy=times["copy"],
        relu=times["relu forward"].median + times["relu backward"].median,
        forward_bytes=2 * whole + min(written, x.numel()),
        backward_bytes=2 * whole + min(read, whole),
        copy_bytes=2 * whole,
        kept=read / x.numel(),
        memory=held / whole,
    )


def _kept(operator: Function, x: Tensor) -> tuple[int, int]:
    """The bytes that the forward pass writes for the backward pass, and those that this reads."""
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        operator(x)
    large = {one.data_ptr(): one for one in saved if one.numel() > 1}
    sizes = {place: one.numel() * one.element_size() for place, one in large.items()}
    read = sum(sizes.values())
    return read - sizes.get(x.data_ptr(), 0), read


def _passes(function: Function, x: Tensor, gradient: Tensor) -> tuple[Run, Run]:
    """The forward and the backward pass of a function on a CPU, each to be called alone."""
    y = function(x)
    pull = lambda: torch.autograd.grad(y, x, gradient, retain_graph=True)
    return (lambda: function(x)), pull


def _relu_passes(x: Tensor, gradient: Tensor) -> tuple[Run, Run]:
    """Those of ReLU, by its kernels."""
    if not x.is_cuda:
        return _passes(torch.relu, x, gradient)
    source = x.detach()
    y = torch.relu(source)
    back = lambda: torch.ops.aten.threshold_backward(gradient, y, 0)
    return repeated(lambda: torch.relu(source), x.device), repeated(back, x.device)


def _operator_passes(
    x: Tensor, gradient: Tensor, stair: Stair, noise: str, mean: Tensor, std: Tensor, how: Forward
) -> tuple[Run, Run]:
    """Those of the operator, by its kernels: what autograd calls, without autograd."""
    if not x.is_cuda:
        return _passes(lambda x: ss.regularise(x, stair, noise, mean, std, how), x, gradient)
    source, family = x.detach(), noises.get(noise)
    climb = lambda: kernels.climb(source, stair, family, mean, std, how, brief=True)
    _, trace = climb()
    pull = lambda: kernels.pull(gradient, trace, stair, family, mean, std)
    return repeated(climb, x.device), repeated(pull, x.device)


def repeated(run: Run, device: torch.device) -> Run:
    """The same a few times in one graph, as the passes are; on a CPU, itself."""
    if device.type != "cuda":
        return run
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(INNER):
            run()
    # A graph knows addresses alone: with the function, the tensors that it works on stay where
    # they are.
    return _Replay(graph, run)


@dataclass(frozen=True)
class _Replay:
    graph: torch.cuda.CUDAGraph
    run: Run

    def __call__(self) -> None:
        self.graph.replay()


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """On CUDA, a stream for everything: a backward pass runs where its forward pass ran, and what
    runs on torch's own stream cannot be captured."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
