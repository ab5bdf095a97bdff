"""What happens: ‖x_λ̂,ℓ − x_ℓ‖, layer by layer, along a schedule.

x_λ̂,ℓ are the features of the network whose stairs are replaced by their expectations under the
noise of time t, x_ℓ those of the hard network. Euclidean norms of one input's features, averaged
over inputs (and networks).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from softstair import noise as noises
from softstair.noise import Noise
from softstair.schedule import NoisePath, Schedule

__all__ = ["Distances", "distances_on_random_networks", "times_to_watch"]

ALMOST = 1e-6
"""λ just before the end: the limit λ → 0 is looked at here, because at λ = 0 the noise is gone."""


@dataclass(frozen=True)
class Distances:
    """``values[layer][i]`` is the mean distance of that layer's features at ``times[i]``.

    ``largest`` is the distance at which every feature of a layer is as wrong as it can be.
    """

    times: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]
    largest: tuple[float, ...]


def times_to_watch(schedule: Schedule, points: int = 57) -> tuple[float, ...]:
    """Even times from 0 to the end, and one just before the end (λ = 10⁻⁶).

    >>> times_to_watch(Schedule(layers=2, period=10.0), points=3)
    (0.0, 10.0, 19.99998, 20.0)
    """
    even = [schedule.end * index / (points - 1) for index in range(points)]
    return (*even[:-1], schedule.end * (1 - ALMOST), schedule.end)


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
    """Distances on random Heaviside networks, in float64; the theorem's setting.

    ``"real"`` weights are normal and never put a pre-activation on the threshold. ``"integer"``
    ones are drawn from {−1, 0, 1}, over binary inputs and without bias: a pre-activation is then
    exactly 0 for a good share of inputs, the case that convergence iii and iv are about.

    >>> schedule = Schedule(layers=3, period=10, interval="partition")
    >>> found = distances_on_random_networks(schedule, "uniform", times=[0, 10, 30])
    >>> [len(found.values), found.values[0][0] > 0.5, found.values[0][1], found.values[2][2]]
    [3, True, 0.0, 0.0]
    """
    family = noises.get(noise)
    if isinstance(schedule, Schedule):
        layers = schedule.layers
        times = times_to_watch(schedule) if times is None else times
    if layers is None or times is None:
        raise ValueError(
            "layers and times must be given with a function (layer, t) -> (mean, std), "
            f"but layers={layers!r} and times={times!r} were given."
        )
    if weights not in ("real", "integer"):
        raise ValueError(f"weights must be real or integer, but {weights!r} was given.")
    generator = torch.Generator().manual_seed(seed)
    x, maps = _draw(layers, weights, (networks, inputs, width), generator)
    target = _features(x, maps, _hard)
    columns = []
    for t in times:
        soft = _features(x, maps, partial(_expected, family, schedule, t))
        columns.append([_distance(a, b) for a, b in zip(soft, target, strict=True)])
    return Distances(
        times=tuple(float(t) for t in times),
        values=tuple(tuple(column[layer] for column in columns) for layer in range(layers)),
        largest=(math.sqrt(width),) * layers,
    )


def _hard(layer: int, s: Tensor) -> Tensor:
    return (s >= 0).to(s.dtype)


def _expected(noise: Noise, schedule: NoisePath, t: float, layer: int, s: Tensor) -> Tensor:
    """σ_ℓ(s) = F((s − α)/β), straight from the cdf; H(s − α) where β = 0.

    Not by :func:`softstair.regularise`, whose way to the sum of K − 1 cdfs may miss a 0 by 10⁻¹⁷:
    near the end that is more than |α|, and decides on which side of it s = 0 lies.
    """
    mean, std = schedule(layer, t)
    return noise.cdf((s - mean) / std) if std > 0 else (s >= mean).to(s.dtype)


Affine = tuple[Tensor, Tensor]


def _draw(
    layers: int, weights: str, shape: tuple[int, int, int], generator: torch.Generator
) -> tuple[Tensor, list[Affine]]:
    """Inputs (networks, inputs, width), and W (networks, width, width) and b for every layer."""
    networks, inputs, width = shape

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    def whole(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high + 1, size, generator=generator, dtype=torch.int64).double()

    square, bias = (networks, width, width), (networks, 1, width)
    if weights == "integer":
        maps = [(whole(-1, 1, *square), torch.zeros(bias).double()) for _ in range(layers)]
        return whole(0, 1, networks, inputs, width), maps
    # Half of the Heavisides are 1, so that 2/width makes pre-activations of variance about 1.
    scale = math.sqrt(2 / width)
    return normal(networks, inputs, width), [
        (normal(*square) * scale, normal(*bias) * scale) for _ in range(layers)
    ]


def _features(
    x: Tensor, maps: list[Affine], activation: Callable[[int, Tensor], Tensor]
) -> list[Tensor]:
    """x_1 … x_L: the features after every layer."""
    features = []
    for layer, (weight, bias) in enumerate(maps):
        x = activation(layer, torch.baddbmm(bias, x, weight.mT))
        features.append(x)
    return features


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm(dim=-1).mean())
