"""What a layer's noise does as the schedule ends: powers of λ = (T − t)/T, with T the last instant.

Near the end every layer of a :class:`~softstair.Schedule` is one of a few kinds, because its mean
and its std are each a constant or a power of λ_ℓ = κ_ℓ·λ:

========== ============================== =======================================
interval   λ_ℓ                            near the end
========== ============================== =======================================
same_end   n/(ℓ+1)·λ                      every layer still moves
overlapped λ                              every layer still moves
partition  nλ in the last layer, else 0   all but the last arrived before the end
same_start λ in the last layer, else 0    all but the last arrived before the end
========== ============================== =======================================

The verdicts of :mod:`softstair.theory.hypotheses` are read off these powers.
"""

import math
from dataclasses import dataclass
from typing import Literal

from softstair import noise as noises
from softstair.noise import Noise
from softstair.schedule import Schedule

__all__ = ["Limit", "PowerLaw", "Tail", "limit", "tail"]

Tail = Literal["bounded", "light", "unknown"]


@dataclass(frozen=True)
class PowerLaw:
    """coefficient·λ_ℓ^exponent; exponent 0 where nothing moves, coefficient 0 where nothing is."""

    coefficient: float
    exponent: int

    @property
    def is_zero(self) -> bool:
        return self.coefficient == 0

    @property
    def vanishes(self) -> bool:
        """Whether it tends to 0 as λ does (it may be 0 all along)."""
        return self.is_zero or self.exponent > 0


@dataclass(frozen=True)
class Limit:
    """One layer near the end of its schedule: α = mean(λ_ℓ), β = std(λ_ℓ), λ_ℓ = scale·λ.

    ``scale`` is 0 where the layer's annealing range ends before the schedule does (``arrived``).
    """

    layer: int
    mean: PowerLaw
    std: PowerLaw
    scale: float

    @property
    def arrived(self) -> bool:
        return self.scale == 0

    @property
    def is_exact(self) -> bool:
        """No noise is left: σ_ℓ is the Heaviside itself, not an approximation of it."""
        return self.mean.is_zero and self.std.is_zero


def limit(schedule: Schedule, layer: int) -> Limit:
    """The powers of λ that a layer's mean and std follow near the end.

    >>> limit(Schedule(layers=4, period=10, interval="same_end", power="progressive"), 1)
    ... # doctest: +NORMALIZE_WHITESPACE, +ELLIPSIS
    Limit(layer=1, mean=PowerLaw(coefficient=0.0, exponent=0),
          std=PowerLaw(coefficient=0.288..., exponent=6), scale=2.0)
    >>> limit(Schedule(layers=4, period=10, interval="partition"), 1).is_exact
    True
    """
    start, end = schedule.range(layer)
    scale = schedule.end / (end - start) if end == schedule.end else 0.0
    power = schedule.exponent(layer)
    mean = _law(schedule.first_mean, schedule.static_mean, power, scale)
    std = _law(schedule.std0, schedule.static_std, 2 * power, scale)
    return Limit(layer, mean, std, scale)


def _law(first: float, static: bool, power: int, scale: float) -> PowerLaw:
    if first == 0 or (not static and scale == 0):
        return PowerLaw(0.0, 0)
    return PowerLaw(first, 0 if static else power)


def tail(noise: Noise) -> Tail:
    """How the family's tails end, as far as the theorem can tell.

    ``"light"``: F(−z) falls faster than any power of 1/z, and F⁻¹(εu)/F⁻¹(u) → 1 as u → 0 for
    every ε > 0. Of a family that a user wrote only the std is known, and with it Chebyshev's
    F(−z) ≤ 1/z².

    >>> tail(noises.Uniform()), tail(noises.Logistic())
    ('bounded', 'light')
    """
    if not noise.proper:
        raise ValueError(
            f"noise must be a probability measure for the theorem, but {noise!r} is none: "
            f"choose one of {', '.join(noises.names())}."
        )
    if math.isfinite(noise.support):
        return "bounded"
    return "light" if type(noise) in (noises.Normal, noises.Logistic) else "unknown"
