"""‖x_λ̂,ℓ − x_ℓ‖ along a schedule, on a stair network and a batch of inputs."""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from softstair.schedule import NoisePath, Schedule
from softstair.theory.distances import Distances, times_to_watch

__all__ = ["distances_on_network"]


@torch.no_grad()
def distances_on_network(
    net: nn.Module,
    inputs: Tensor,
    schedule: NoisePath,
    times: Sequence[float] | None = None,
    soft_weights: bool = True,
) -> Distances:
    """How far the expected features of a stair network are from its hard ones.

    ``net`` (as :func:`softstair.quantise` makes it) is copied, in float64 and with its batch-norm
    statistics at rest, and left as it is. Every stair is replaced by its expectation under the
    noise of time t; ``soft_weights=False`` leaves the weights hard, as in the theorem, where they
    are given. A layer without features of its own is measured at its sums.

    >>> from softstair import Schedule, Stair
    >>> from softstair.nn import StairActivation
    >>> net = nn.Sequential(nn.Linear(4, 8), StairActivation(Stair.ternary()))
    >>> found = distances_on_network(net, torch.randn(16, 4), Schedule(layers=1, period=10))
    >>> found.values[0][0] > 0.1, found.values[0][-1]
    (True, 0.0)
    """
    from softstair.nn import StairWeight, layer_count, stair_modules

    layers = layer_count(net)
    times = _times(schedule, times, layers)
    work = _softened(net)
    outputs = _watch(work, layers)

    def features(noise: Callable[[int], tuple[float, float]]) -> list[list[Tensor]]:
        for _, module in stair_modules(work):
            hard = isinstance(module, StairWeight) and not soft_weights
            mean, std = (0.0, 0.0) if hard else noise(module.layer)
            module.mean = torch.tensor(mean, dtype=torch.float64, device=module.mean.device)
            module.std = torch.tensor(std, dtype=torch.float64, device=module.std.device)
        for one in outputs:
            one.clear()
        work(inputs.double() if inputs.is_floating_point() else inputs)
        return [list(one) for one in outputs]

    # Hard by way of noise that is 0: the very sums of the soft pass, so that 0 means 0.
    target = features(lambda layer: (0.0, 0.0))
    columns = []
    for t in times:
        soft = features(partial(_noise_at, schedule, t))
        columns.append([_distance(a, b) for a, b in zip(soft, target, strict=True)])
    return Distances(
        times=tuple(float(t) for t in times),
        values=tuple(tuple(column[layer] for column in columns) for layer in range(layers)),
        largest=tuple(_largest(work, layer, one) for layer, one in enumerate(target)),
    )


def _noise_at(schedule: NoisePath, t: float, layer: int) -> tuple[float, float]:
    return schedule(layer, t)


def _times(schedule: NoisePath, times: Sequence[float] | None, layers: int) -> Sequence[float]:
    if isinstance(schedule, Schedule) and schedule.layers != layers:
        raise ValueError(
            f"schedule must have as many layers as the network, {layers}, but it has "
            f"{schedule.layers}; Schedule.for_network counts them."
        )
    if times is not None:
        return times
    if isinstance(schedule, Schedule):
        return times_to_watch(schedule)
    raise ValueError("times must be given with a function (layer, t) -> (mean, std).")


def _softened(net: nn.Module) -> nn.Module:
    """A copy in eval() but for its stairs, which compute expectations."""
    from softstair.nn import StairLayer, stair_modules

    work = copy.deepcopy(net).double().eval()
    for module in work.modules():
        if isinstance(module, StairLayer):
            module.training = True
    for _, stair in stair_modules(work):
        stair.training, stair.annealed, stair.strategy = True, False, "expectation"
    return work


def _watched(net: nn.Module, layer: int) -> list[nn.Module]:
    """The activations of a layer; where there is none, the sums."""
    from softstair.nn import StairActivation, StairLayer

    modules = list(net.modules())
    found = [m for m in modules if isinstance(m, StairActivation) and m.layer == layer]
    sums = [m for m in modules if isinstance(m, StairLayer) and m.weight_stair.layer == layer]
    return [*found] or [*sums]


def _watch(net: nn.Module, layers: int) -> list[list[Tensor]]:
    """For each layer a list to which every call of its watched modules appends what it returns."""
    outputs: list[list[Tensor]] = [[] for _ in range(layers)]
    for layer, kept in enumerate(outputs):

        def keep(module: nn.Module, _: Any, output: Tensor, kept: list[Tensor] = kept) -> None:
            kept.append(output)

        for module in _watched(net, layer):
            module.register_forward_hook(keep)
    return outputs


def _distance(soft: list[Tensor], target: list[Tensor]) -> float:
    """Norm over all features that one input has in a layer, averaged over inputs."""
    squares = [(a - b).flatten(1).square().sum(1) for a, b in zip(soft, target, strict=True)]
    return float(torch.stack(squares).sum(0).sqrt().mean()) if squares else 0.0


def _largest(net: nn.Module, layer: int, target: list[Tensor]) -> float:
    from softstair.nn import StairActivation

    activation = next((m for m in _watched(net, layer) if isinstance(m, StairActivation)), None)
    if activation is None or isinstance(activation.stair.quantum, tuple):
        return math.inf
    levels = activation.stair.levels
    return (levels[-1] - levels[0]) * math.sqrt(sum(one[0].numel() for one in target))
