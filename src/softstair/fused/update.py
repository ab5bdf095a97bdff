"""The optimiser's step for the latent weights of fused layers, in one pass."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from softstair.fused.layer import FusedLayer
from softstair.kernels.triton.adam import Weights, adam_steps

__all__ = ["supports_update", "update_weights"]


def supports_update(optimiser: torch.optim.Optimizer) -> bool:
    """Whether :func:`update_weights` does what the optimiser does."""
    return isinstance(optimiser, torch.optim.Adam) and all(
        (group["decoupled_weight_decay"] or not group["weight_decay"])
        and not (group["amsgrad"] or group["maximize"])
        and min(group["betas"]) > 0
        for group in optimiser.param_groups
    )


@torch.no_grad()
def update_weights(
    layers: Iterable[FusedLayer],
    optimiser: torch.optim.Optimizer,
    bounds: Mapping[Tensor, tuple[float, float]],
) -> set[Tensor]:
    """Take the optimiser's step for weights of layers with a ``raw_gradient``, and clip them.

    The moments are those of the optimiser, which sees no gradient of these weights; its learning
    rates must be tensors on the device. Return the weights that were updated.
    """
    waiting = [layer for layer in layers if layer.raw_gradient is not None]
    groups = {w: group for group in optimiser.param_groups for w in group["params"]}
    states = [_state(optimiser, layer.sums.weight) for layer in waiting]
    if states:
        torch._foreach_add_([state["step"] for state in states], 1)
    given: list[Weights] = []
    for layer, state in zip(waiting, states, strict=True):
        assert layer.raw_gradient is not None
        (gradient, stair), layer.raw_gradient = layer.raw_gradient, None
        weight = layer.sums.weight
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
                bounds.get(weight, (-math.inf, math.inf)),
                group["betas"],
                group["eps"],
            )
        )
    adam_steps(given)
    for layer in waiting:
        torch.autograd.graph.increment_version(layer.sums.weight)
    return {layer.sums.weight for layer in waiting}


def _state(optimiser: torch.optim.Optimizer, weight: Tensor) -> dict[str, Any]:
    """Return the state of a weight, as torch's Adam begins it."""
    state: dict[str, Any] = optimiser.state[weight]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
        state["exp_avg"] = torch.zeros_like(weight)
        state["exp_avg_sq"] = torch.zeros_like(weight)
    return state
