"""The layers of a network along a schedule: their order, and how far they are from the hard ones.

Order. ρ_ℓ(t) = β_ℓ(t)/β_ℓ(0) is the share of its noise that layer ℓ still has at time t, or
|α_ℓ(t)|/|α_ℓ(0)| if the std is static. A schedule is synchronised if ρ_ℓ(t) ≤ ρ_{ℓ+1}(t) for all ℓ
and t: no layer is annealed before a layer that feeds it. For a :class:`~softstair.Schedule` the
answer is exact (with n layers, period P, k = ℓ + 1, d = n − ℓ and t from its start):

- same_end: ℓ is behind ℓ+1 for P(n−k−1) < t < P·n under the homogeneous power, and for
  P(n−k−1) < t < P(n − k^d/(k+1)^(d−1)) under the progressive one;
- overlapped with the homogeneous power: all layers are equal;
- otherwise every layer is sometimes ahead of the next and never behind it.

Any other function (layer, t) -> (mean, std) is evaluated on a grid of times.

Distance. x_ℓ are the features of the hard network. x_λ̂,ℓ are those of the network in which every
stair is replaced by its expectation under the noise of time t. ‖x_λ̂,ℓ − x_ℓ‖ is Euclidean over the
features of one input, averaged over inputs (and networks).
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from softstair import Noise, Schedule, _check, noise as noises
from softstair.nn import StairActivation, StairLayer, StairWeight, layer_count, stair_modules
from softstair.schedule import NoisePath

ROUNDING = 1e-12
"""Differences of log ρ up to this are rounding."""
NEAR_END = 1e-6
"""λ just before the end, where the limit λ → 0 is measured: at λ = 0 there is no noise."""


@dataclass(frozen=True)
class Break:
    """For start < t < end, layer ``later`` is annealed more than layer ``earlier``, which feeds it.

    ``end`` is where the order is first restored (on a grid it may break again).
    """

    earlier: int
    later: int
    start: float
    end: float


@dataclass(frozen=True)
class Synchronisation:
    """Whether a schedule anneals its layers in order.

    Attributes:
        order: ``"strictly"``: every layer is sometimes ahead of the next and never behind it;
            ``"weakly"``: none is behind, but some neighbours are always equal; or ``"broken"``.
        reason: Why, in one line.
        breaks: The first break of each pair of neighbours that has one, the earliest first.
        resolution: Step of the grid of times, or 0 if the answer is exact.
    """

    order: Literal["strictly", "weakly", "broken"]
    reason: str
    breaks: tuple[Break, ...] = ()
    resolution: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether the order is not broken."""
        return self.order != "broken"

    @property
    def first(self) -> Break | None:
        """The earliest break; of simultaneous ones, that of the lowest layers."""
        return self.breaks[0] if self.breaks else None


def synchronisation(
    path: NoisePath, layers: int | None = None, end: float | None = None, points: int = 1001
) -> Synchronisation:
    """Return whether a schedule anneals no layer before the layers that feed it.

    Args:
        path: A schedule, or any function (layer, t) -> (mean, std).
        layers: Number of layers; required with a function.
        end: Last time to look at; required with a function.
        points: Number of times from 0 to ``end`` at which a function is evaluated.

    Raises:
        ValueError: If an argument is missing or invalid, or ``path`` returns an invalid noise.

    Example:
        >>> synchronisation(Schedule(layers=7, period=50, interval="partition")).order
        'strictly'
        >>> synchronisation(Schedule(layers=7, period=50, interval="same_end")).first
        Break(earlier=5, later=6, start=0.0, end=350.0)
        >>> synchronisation(lambda layer, t: (0.0, 1 / (1 + t * (3 - layer))), 3, end=9.0).order
        'strictly'
    """
    if isinstance(path, Schedule):
        return _synchronisation_of_schedule(path)
    layers = _check.integer("layers", layers, 1)
    end, points = _check.number("end", end, above=0), _check.integer("points", points, 2)
    times = [end * index / (points - 1) for index in range(points)]
    logs = [_log_shares(path, layer, times) for layer in range(layers)]
    breaks, equal = [], []
    for layer, (earlier, later) in enumerate(pairwise(logs)):
        # −∞ − (−∞), two layers without noise, is NaN and counts as equal.
        differences = [a - b for a, b in zip(earlier, later, strict=True)]
        behind = [value > ROUNDING for value in differences]
        if any(behind):
            start = behind.index(True)
            stop = behind.index(False, start) if False in behind[start:] else points - 1
            breaks.append(Break(layer, layer + 1, times[start], times[stop]))
        elif not any(value < -ROUNDING for value in differences):
            equal.append(layer)
    return _judge(layers, any(map(any, logs)), breaks, equal, times[1])


def _synchronisation_of_schedule(schedule: Schedule) -> Synchronisation:
    """Return the exact answer, by the rules at the top of the module."""
    n, period, begin = schedule.layers, float(schedule.period), schedule.start
    homogeneous = schedule.power == "homogeneous"
    breaks = []
    if schedule.interval == "same_end":
        for layer in range(n - 1):
            k, d = layer + 1, n - layer
            left = 0.0 if homogeneous else k**d / (k + 1) ** (d - 1)
            start, end = begin + period * (n - k - 1), begin + period * (n - left)
            breaks.append(Break(layer, k, start, end))
    equal = range(n - 1) if schedule.interval == "overlapped" and homogeneous else range(0)
    dynamic_mean = not schedule.static_mean and schedule.first_mean != 0
    dynamic_std = not schedule.static_std and schedule.std0 != 0
    return _judge(n, dynamic_mean or dynamic_std, breaks, equal, resolution=0.0)


def _log_shares(path: NoisePath, layer: int, times: Sequence[float]) -> list[float]:
    """Return log ρ of a layer at each time, or zeros if its noise never changes."""
    noise = [path(layer, t) for t in times]
    for t, (mean, std) in zip(times, noise, strict=True):
        if not (math.isfinite(mean) and math.isfinite(std) and std >= 0):
            raise _check.invalid(
                "path",
                "must return a finite mean and a finite std of at least 0, but it returned "
                f"{(mean, std)!r} for layer {layer} at t = {t:g}",
            )
    means, stds = [abs(mean) for mean, _ in noise], [std for _, std in noise]
    values = means if len(set(stds)) == 1 else stds
    # Noise that starts at 0 and grows is compared with its largest value.
    unit = values[0] or max(values)
    if len(set(values)) == 1:
        return [0.0] * len(times)
    return [math.log(value / unit) if value > 0 else -math.inf for value in values]


def _judge(
    layers: int, dynamic: bool, breaks: list[Break], equal: Sequence[int], resolution: float
) -> Synchronisation:
    """Return the result from the breaks and the layers that are always equal to the next."""
    if not dynamic:
        return Synchronisation("weakly", "nothing moves: every layer keeps its noise throughout")
    if layers == 1:
        return Synchronisation("weakly", "there is one layer, and nothing to be in order with")
    if breaks:
        first, *_ = ordered = sorted(breaks, key=lambda pair: (pair.start, pair.earlier))
        span = f"from t = {first.start:g} to t = {first.end:g}"
        reason = f"layer {first.later} is ahead of layer {first.earlier}, which feeds it, {span}"
        return Synchronisation("broken", reason, tuple(ordered), resolution)
    if equal:
        pair = f"layers {equal[0]} and {equal[0] + 1}"
        pairs = pair if len(equal) == 1 else f"{len(equal)} pairs of neighbours"
        reason = f"no layer is ever behind, but {pairs} always go together"
        return Synchronisation("weakly", reason, (), resolution)
    reason = "every layer is at some time ahead of the next, and never behind it"
    return Synchronisation("strictly", reason, (), resolution)


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
        raise _check.invalid(
            "schedule",
            f"must have {layers} layers, as the network, but has {schedule.layers}; "
            "Schedule.for_network counts them",
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
        raise _check.invalid("times", "must be given with a function (layer, t)")
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
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    integers = lambda low, size: torch.randint(low, 2, size, generator=generator).double()
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
