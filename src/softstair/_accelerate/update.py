"""Steps of Adam for latent weights, and a second CUDA stream in which they run.

One launch steps the weights of several layers, in one pass over memory:

    g = dw·slope(w)    m ← β₁·m + (1 − β₁)·g    v ← β₂·v + (1 − β₂)·g²
    w ← clip((1 − rate·decay)·w − rate·(m/(1 − β₁ᵗ)) / (√(v/(1 − β₂ᵗ)) + ε))

dw is the gradient of the quantised weights. The slope of their stair, the step of torch's AdamW (or
Adam, without decay) and the clipping of latent weights follow in registers.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from softstair._accelerate.stairs import PreparedStair, prepare_from_row
from softstair.kernels.triton import evaluator

__all__ = ["LatentSteps", "SecondStream", "Weights", "adam_steps", "supports_update"]

BLOCK = 1024
LAYERS = 24
"""Most layers of a launch: their addresses are arguments, of which CUDA 12.0 takes 4 KB."""


class Weights(NamedTuple):
    """The weights of a layer and what their step needs; the tensors have one memory layout."""

    gradient: Tensor
    """Gradient of the quantised weights."""
    weight: Tensor
    """Latent weights."""
    mean: Tensor
    """First moment."""
    square: Tensor
    """Second moment."""
    rate: Tensor
    """Learning rate, a scalar."""
    step: Tensor
    """Number of this step, from 1, a scalar."""
    stair: PreparedStair
    decay: float
    """Decoupled weight decay."""
    bounds: tuple[float, float]
    """Smallest and largest latent weight."""
    betas: tuple[float, float]
    """Decay rates of the moments."""
    eps: float
    """Added to the root of the second moment."""


@triton.jit
def _own(values, first, COUNT: tl.constexpr):
    """Return the value of this program's layer: the last whose first program is not after it."""
    value = values[0]
    for layer in tl.static_range(1, COUNT):
        value = tl.where(tl.program_id(0) >= first[layer], values[layer], value)
    return value


@triton.jit
def _adam(
    first, gradient_ptrs, weight_ptrs, mean_ptrs, square_ptrs, rate_ptrs, step_ptrs, tables,
    row_ptrs, sizes, decays, lows, highs, eps,
    BETA_1: tl.constexpr, BETA_2: tl.constexpr, LOG_1: tl.constexpr, LOG_2: tl.constexpr,
    LAYERS: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr, FAMILY: tl.constexpr,
):  # fmt: skip
    offsets = (tl.program_id(0) - _own(first, first, LAYERS)) * BLOCK + tl.arange(0, BLOCK)
    size = _own(sizes, first, LAYERS)
    mask = offsets < size
    weight_ptr = _own(weight_ptrs, first, LAYERS)
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0)
    gradient_ptr = _own(gradient_ptrs, first, LAYERS)
    gradient = tl.load(gradient_ptr + offsets, mask=mask, other=0).to(tl.float32)
    row_ptr, table = _own(row_ptrs, first, LAYERS), _own(tables, first, LAYERS)
    prepared = prepare_from_row(row_ptr, table, COUNT, FAMILY, "slope")
    gradient *= evaluator.slope(weight, prepared, COUNT, FAMILY)
    mean_ptr, square_ptr = _own(mean_ptrs, first, LAYERS), _own(square_ptrs, first, LAYERS)
    mean = tl.load(mean_ptr + offsets, mask=mask, other=0)
    square = tl.load(square_ptr + offsets, mask=mask, other=0)
    mean = BETA_1 * mean + (1 - BETA_1) * gradient
    square = BETA_2 * square + (1 - BETA_2) * gradient * gradient
    step = tl.load(_own(step_ptrs, first, LAYERS)).to(tl.float64)
    rate = tl.load(_own(rate_ptrs, first, LAYERS))
    correction = tl.sqrt(1 - tl.exp2(step * LOG_2)).to(tl.float32)
    rate_now = (rate / (1 - tl.exp2(step * LOG_1))).to(tl.float32)
    weight -= weight * rate * _own(decays, first, LAYERS)
    weight -= rate_now * mean / (tl.sqrt(square) / correction + eps)
    low, high = _own(lows, first, LAYERS), _own(highs, first, LAYERS)
    weight = tl.maximum(weight, low, propagate_nan=tl.PropagateNan.ALL)
    weight = tl.minimum(weight, high, propagate_nan=tl.PropagateNan.ALL)
    tl.store(weight_ptr + offsets, weight, mask=mask)
    tl.store(mean_ptr + offsets, mean, mask=mask)
    tl.store(square_ptr + offsets, square, mask=mask)


def adam_steps(layers: Sequence[Weights]) -> None:
    """Change weights and both moments in place, in one launch for layers with one kind of stair,
    dtype of the gradient and setting of Adam."""
    groups: dict[object, list[Weights]] = {}
    for layer in layers:
        kind = (tuple(layer.stair.constants.items()), layer.gradient.dtype, layer.betas, layer.eps)
        groups.setdefault(kind, []).append(layer)
    for group in groups.values():
        for start in range(0, len(group), LAYERS):
            _launch(group[start : start + LAYERS])


def _launch(layers: list[Weights]) -> None:
    sizes = tuple(layer.weight.numel() for layer in layers)
    *first, programs = accumulate((triton.cdiv(size, BLOCK) for size in sizes), initial=0)
    gradients, weights, means, squares, rates, steps, stairs, decays, bounds, betas, eps = zip(
        *layers, strict=True
    )
    lows, highs = zip(*bounds, strict=True)
    _adam[(programs,)](
        tuple(first), gradients, weights, means, squares, rates, steps,
        tuple(stair.table for stair in stairs), tuple(stair.row for stair in stairs), sizes,
        decays, lows, highs, eps[0], *betas[0], *map(math.log2, betas[0]), LAYERS=len(layers),
        BLOCK=BLOCK, **stairs[0].constants, enable_fp_fusion=True,
    )  # fmt: skip


LEAST_WEIGHTS = 1 << 19
"""A launch of Adam during the backward pass has at least this many weights."""
GROUPS = 2
"""Most groups of kernels whose tensors are held: before another begins, the current stream waits
for the oldest."""


class SecondStream:
    """Launches kernels in a second CUDA stream, where they overlap later ones of the current one.

    torch's allocator orders the reuse of memory within one stream only. Reuse stays safe here: the
    second stream waits for the current one before it allocates, and tensors of the current stream
    that it reads are held until the current stream has waited for the kernels that read them. It
    waits for all of them in :meth:`join`, and for the oldest group when there are more than
    ``GROUPS``. Without CUDA, everything runs in the order of the program.
    """

    def __init__(self) -> None:
        self._unjoined: torch.cuda.Stream | None = None
        self._held: deque[tuple[torch.cuda.Event, list[object]]] = deque()

    @contextmanager
    def beside(self, device: torch.device, *read: object) -> Iterator[None]:
        """Return a context whose kernels run after those launched so far, and overlap those that
        are launched between its end and :meth:`join`. They may read the tensors in ``read``, and
        others that live until :meth:`join`."""
        if device.type != "cuda":
            yield
            return
        current = torch.cuda.current_stream(device)
        self._unjoined = second = _stream_beside(current.device_index, current.cuda_stream)
        while read and len(self._held) >= GROUPS:
            current.wait_event(self._held[0][0])
            self._held.popleft()
        second.wait_stream(current)
        done = torch.cuda.Event()
        if read:
            self._held.append((done, [*read]))
        with torch.cuda.stream(second):
            try:
                yield
            finally:
                done.record()

    def hold(self, *read: object) -> None:
        """Hold more tensors, as long as those that the last call of :meth:`beside` was given."""
        if self._held:
            self._held[-1][1].extend(read)

    def join(self) -> None:
        """Let kernels that are launched from now on wait for those of the second stream."""
        if self._unjoined is not None:
            torch.cuda.current_stream(self._unjoined.device).wait_stream(self._unjoined)
        self._unjoined = None
        self._held.clear()


@cache
def _stream_beside(device: int, stream: int) -> torch.cuda.Stream:
    """Return the second stream for a stream of a device.

    It is cached, since cuDNN keeps a workspace for each stream. Each stream has its own: a shared
    one could reuse memory after waiting for one of them while the other still reads it. torch has
    32 streams of each priority; with more than 32 first streams, two share a second one.
    """
    return torch.cuda.Stream(device)


def supports_update(optimiser: torch.optim.Optimizer) -> bool:
    """Whether :class:`LatentSteps` does what the optimiser does."""
    return isinstance(optimiser, torch.optim.Adam) and all(
        (group["decoupled_weight_decay"] or not group["weight_decay"])
        and not (group["amsgrad"] or group["maximize"])
        and min(group["betas"]) > 0
        for group in optimiser.param_groups
    )


class LatentSteps:
    """Takes the optimiser's step for the latent weights of layers, and clips them, in one pass.

    The layers give gradients of their quantised weights to this instead of to autograd. Nothing in
    the backward pass waits for these gradients: on a GPU they and the steps are computed in a
    second stream, where one kernel uses the memory while another multiplies. If a backward pass
    fails, some weights have been changed.
    """

    def __init__(self) -> None:
        self.stream = SecondStream()
        self._optimiser: torch.optim.Optimizer | None = None
        self._bounds: Mapping[Tensor, tuple[float, float]] = {}
        self._pending: list[tuple[Tensor, Tensor, PreparedStair]] = []
        self._updated: set[Tensor] = set()

    def begin(
        self, optimiser: torch.optim.Optimizer, bounds: Mapping[Tensor, tuple[float, float]]
    ) -> None:
        """Begin a step: the next backward pass changes the weights.

        The moments are those of the optimiser, which sees no gradient of these weights; its
        learning rates must be tensors on the device.
        """
        self.join()  # of a step that failed
        self._optimiser, self._bounds = optimiser, bounds
        self._pending, self._updated = [], set()

    def add(self, weight: Tensor, gradient: Tensor, stair: PreparedStair) -> None:
        """Take latent weights, the gradient of the quantised ones, and the stair that quantised
        them; at most once per layer and step."""
        assert weight not in self._updated
        self._updated.add(weight)
        self._pending.append((weight, gradient, stair))
        if sum(gradient.numel() for _, gradient, _ in self._pending) >= LEAST_WEIGHTS:
            self._launch_steps()

    def finish(self) -> set[Tensor]:
        """Launch what remains after the backward pass; return all weights that this step changes.

        Call :meth:`join` before other kernels read them.
        """
        if self._pending:
            with self.stream.beside(self._pending[0][1].device, *self._pending):
                self._launch_steps()
        updated, self._updated = self._updated, set()
        return updated

    def join(self) -> None:
        """Let kernels that are launched from now on wait until all weights are changed."""
        self.stream.join()

    @torch.no_grad()
    def _launch_steps(self) -> None:
        optimiser = self._optimiser
        assert optimiser is not None
        waiting, self._pending = self._pending, []
        groups = {w: group for group in optimiser.param_groups for w in group["params"]}
        given: list[Weights] = []
        for weight, gradient, stair in waiting:
            group, state = groups[weight], _state(optimiser, weight)
            given.append(
                Weights(
                    gradient,
                    weight,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    group["lr"],
                    state["step"],
                    stair,
                    group["weight_decay"],
                    self._bounds.get(weight, (-math.inf, math.inf)),
                    group["betas"],
                    group["eps"],
                )
            )
        torch._foreach_add_([each.step for each in given], 1)
        self.stream.hold(*waiting)  # some came with an earlier layer
        adam_steps(given)
        for weight, _, _ in waiting:
            torch.autograd.graph.increment_version(weight)


def _state(optimiser: torch.optim.Optimizer, weight: Tensor) -> dict[str, Any]:
    """Return the state of a weight, as torch's Adam begins it."""
    state: dict[str, Any] = optimiser.state[weight]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
        state["exp_avg"] = torch.zeros_like(weight)
        state["exp_avg_sq"] = torch.zeros_like(weight)
    return state
