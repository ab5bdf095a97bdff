"""A second CUDA stream, and the optimiser's steps for latent weights that run in it."""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from softstair._accelerate.adam import Weights, adam_steps
from softstair._accelerate.prepared import PreparedStair

__all__ = ["LatentSteps", "SecondStream", "supports_update"]

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
