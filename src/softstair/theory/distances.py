"""Distances ‖x_λ̂,ℓ − x_ℓ‖ between soft and hard features, layer by layer, along a schedule.

x_ℓ are the features of the hard network. x_λ̂,ℓ are those of the network in which every stair is
replaced by its expectation under the noise of time t. The norm is Euclidean over the features of
one input; distances are means over inputs (and networks).
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from softstair import _check
from softstair import noise as noises
from softstair._errors import SoftstairError
from softstair.nn import StairActivation, StairLayer, StairWeight, layer_count, stair_modules
from softstair.noise import Noise
from softstair.schedule import NoisePath, Schedule

__all__ = ["Distances", "distances_on_network", "distances_on_random_networks", "times_to_watch"]

NEAR_END = 1e-6
"""λ just before the end, where the limit λ → 0 is measured: at λ = 0 there is no noise."""


@dataclass(frozen=True)
class Distances:
    """``values[layer][i]`` is the mean distance of a layer's features at ``times[i]``.

    ``largest[layer]`` is the distance if every feature had the largest possible error.
    """

    times: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]
    largest: tuple[float, ...]


def times_to_watch(schedule: Schedule, points: int = 57) -> tuple[float, ...]:
    """Return ``points`` evenly spaced times from 0 to the end, and one just before the end.

    Example:
        >>> times_to_watch(Schedule(layers=2, period=10.0), points=3)
        (0.0, 10.0, 19.99998, 20.0)
    """
    even = [schedule.end * index / (points - 1) for index in range(points)]
    return (*even[:-1], schedule.end * (1 - NEAR_END), schedule.end)


def distances_on_random_networks(
    schedule: NoisePath,
    noise: str | Noise,
    layers: int | None = None,
    times: Sequence[float] | None = None,
    weights: Literal["real", "integer"] = "real",
    networks: int = 8,
    inputs: int = 64,
    width: int = 32,
    seed: int = 0,
) -> Distances:
    """Return distances on random Heaviside networks, the setting of the theorem, in float64.

    Args:
        schedule: A schedule, or any function (layer, t) -> (mean, std).
        noise: Noise family or its name.
        layers: Number of layers; required with a function.
        times: Times to measure at; required with a function, else ``times_to_watch(schedule)``.
        weights: ``"real"``: normal weights, with which no pre-activation is exactly 0;
            ``"integer"``: weights from {−1, 0, 1}, binary inputs and no bias, with which many are.
        networks: Number of networks.
        inputs: Number of inputs per network.
        width: Number of features per layer.
        seed: Seed of weights and inputs.

    Raises:
        ValueError: If ``layers`` or ``times`` is missing, or ``weights`` is unknown.

    Example:
        >>> schedule = Schedule(layers=3, period=10, interval="partition")
        >>> distances = distances_on_random_networks(schedule, "uniform", times=[0, 10, 30])
        >>> distances.values[0][0] > 0.5, distances.values[0][1], distances.values[2][2]
        (True, 0.0, 0.0)
    """
    family = noises.get(noise)
    layers = schedule.layers if isinstance(schedule, Schedule) else layers
    layers = _check.integer("layers", layers, 1)
    _check.choice("weights", weights, ("real", "integer"))
    x0, maps = _random_networks(layers, weights, (networks, inputs, width), seed)

    def features(path: NoisePath, t: float) -> list[list[Tensor]]:
        x, outputs = x0, []
        for layer, (weight, bias) in enumerate(maps):
            # Not by `regularise`, whose sum of cdfs may differ from 0 by 10⁻¹⁷: near the end that
            # exceeds |α| and decides on which side of the threshold s = 0 lies.
            s, (mean, std) = torch.baddbmm(bias, x, weight.mT), path(layer, t)
            x = family.cdf((s - mean) / std) if std > 0 else (s >= mean).to(s.dtype)
            outputs.append([x.flatten(0, 1)])
        return outputs

    return _measure(features, schedule, times, lambda hard: [math.sqrt(width)] * layers)


@torch.no_grad()
def distances_on_network(
    net: nn.Module,
    inputs: Tensor,
    schedule: NoisePath,
    times: Sequence[float] | None = None,
    soft_weights: bool = True,
) -> Distances:
    """Return distances on a quantised network and a batch of inputs, in float64.

    The network is not changed; its batch-norm statistics are fixed. A layer without a quantised
    activation is measured at the output of its quantised weights.

    Args:
        net: A network from :func:`softstair.quantise`.
        inputs: A batch of inputs.
        schedule: A schedule, or any function (layer, t) -> (mean, std).
        times: Times to measure at; required with a function, else ``times_to_watch(schedule)``.
        soft_weights: Whether the weights have noise too. In the theorem they have none.

    Raises:
        ValueError: If ``times`` is missing, the network has no stair, or the schedule has another
            number of layers than the network.

    Example:
        >>> from softstair import Stair
        >>> net = nn.Sequential(nn.Linear(4, 8), StairActivation(Stair.ternary()))
        >>> distances = distances_on_network(net, torch.randn(16, 4), Schedule(layers=1, period=10))
        >>> distances.values[0][0] > 0.1, distances.values[0][-1]
        (True, 0.0)
    """
    layers = layer_count(net)
    if isinstance(schedule, Schedule) and schedule.layers != layers:
        raise SoftstairError(
            f"schedule must have as many layers as the network, {layers}, but it has "
            f"{schedule.layers}; Schedule.for_network counts them.",
            field="schedule",
        )
    work = copy.deepcopy(net).double().eval()
    for module in work.modules():
        if isinstance(module, StairLayer):
            module.training = True
    for _, stair in stair_modules(work):
        stair.training, stair.annealed, stair.strategy = True, False, "expectation"
    watched = [_watched_modules(work, layer) for layer in range(layers)]
    outputs: list[list[Tensor]] = [[] for _ in range(layers)]
    for modules, tensors in zip(watched, outputs, strict=True):
        for module in modules:
            module.register_forward_hook(lambda _, args, output, keep=tensors.append: keep(output))

    def features(path: NoisePath, t: float) -> list[list[Tensor]]:
        for _, stair in stair_modules(work):
            has_noise = soft_weights or not isinstance(stair, StairWeight)
            mean, std = path(stair.layer, t) if has_noise else (0.0, 0.0)
            stair.mean = torch.tensor(mean, dtype=torch.float64, device=stair.mean.device)
            stair.std = torch.tensor(std, dtype=torch.float64, device=stair.std.device)
        for tensors in outputs:
            tensors.clear()
        work(inputs.double() if inputs.is_floating_point() else inputs)
        return [list(tensors) for tensors in outputs]

    return _measure(features, schedule, times, lambda hard: list(map(_largest, watched, hard)))


Features = list[list[Tensor]]
"""For each layer its features, one tensor (inputs, ...) for each module that has some."""


def _measure(
    features: Callable[[NoisePath, float], Features],
    schedule: NoisePath,
    times: Sequence[float] | None,
    largest: Callable[[Features], list[float]],
) -> Distances:
    """Return the distances between the features under the schedule and those without noise."""
    if times is None and isinstance(schedule, Schedule):
        times = times_to_watch(schedule)
    if times is None:
        raise SoftstairError("times must be given with a function (layer, t).", field="times")
    # The same sums as with noise: equal features have a distance of exactly 0.
    hard = features(lambda layer, t: (0.0, 0.0), 0.0)
    columns = []
    for t in times:
        soft = features(schedule, t)
        columns.append([_distance(a, b) for a, b in zip(soft, hard, strict=True)])
    values = tuple(tuple(column[layer] for column in columns) for layer in range(len(hard)))
    return Distances(tuple(map(float, times)), values, tuple(largest(hard)))


def _distance(soft: list[Tensor], hard: list[Tensor]) -> float:
    """Return the norm over all features of an input in a layer, averaged over inputs."""
    squares = [(a - b).flatten(1).square().sum(1) for a, b in zip(soft, hard, strict=True)]
    return float(torch.stack(squares).sum(0).sqrt().mean()) if squares else 0.0


def _largest(modules: list[nn.Module], hard: list[Tensor]) -> float:
    """Return the distance between all features at one end of the stair and all at the other."""
    activation = modules[0] if modules else None
    if not isinstance(activation, StairActivation) or isinstance(activation.stair.quantum, tuple):
        return math.inf
    levels = activation.stair.levels
    return (levels[-1] - levels[0]) * math.sqrt(sum(tensor[0].numel() for tensor in hard))


def _random_networks(
    layers: int, weights: str, shape: tuple[int, int, int], seed: int
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Return inputs (networks, inputs, width), and each layer's weight and bias."""
    generator = torch.Generator().manual_seed(seed)
    networks, _, width = shape
    square, bias = (networks, width, width), (networks, 1, width)

    def normal(size: tuple[int, ...]) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    def integers(low: int, size: tuple[int, ...]) -> Tensor:
        return torch.randint(low, 2, size, generator=generator).double()

    if weights == "integer":
        maps = [(integers(-1, square), torch.zeros(bias).double()) for _ in range(layers)]
        return integers(0, shape), maps
    # Half of the features are 1, so that pre-activations have a variance of about 1.
    scale = math.sqrt(2 / width)
    return normal(shape), [(normal(square) * scale, normal(bias) * scale) for _ in range(layers)]


def _watched_modules(net: nn.Module, layer: int) -> list[nn.Module]:
    """Return the activations of a layer, or the modules with its weights if it has none."""
    modules = list(net.modules())
    activations = [m for m in modules if isinstance(m, StairActivation) and m.layer == layer]
    sums = [m for m in modules if isinstance(m, StairLayer) and m.weight_stair.layer == layer]
    return [*activations] or [*sums]
