"""The optimiser's steps for the latent weights of fused layers, beside the backward pass."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from softstair.fused.stream import SecondStream
from softstair.kernels.triton.adam import Weights, adam_steps
from softstair.kernels.triton.prepare import PreparedStair

__all__ = ["LatentSteps", "supports_update"]

LEAST_WEIGHTS = 1 << 19
"""A launch of Adam during the backward pass has at least this many weights."""


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
        states = [_state(optimiser, weight) for weight, _, _ in waiting]
        torch._foreach_add_([state["step"] for state in states], 1)
        given: list[Weights] = []
        for (weight, gradient, stair), state in zip(waiting, states, strict=True):
            group = groups[weight]
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
