"""Families of noise: the standardised variable (mean 0, standard deviation 1) of each.

A family is a shape. Its mean α and standard deviation β are given where the noise is used
(:func:`softstair.regularise`): ν = α + β·Z, with Z the standardised variable.

========== ==================================== ==================
family     density μ(z)                         support
========== ==================================== ==================
uniform    1/(2√3)                              [−√3, √3)
triangular (√6 − |z|)/6                         (−√6, √6)
normal     exp(−z²/2)/√(2π)                     ℝ
logistic   a·e^{−az}/(1 + e^{−az})², a = π/√3   ℝ
========== ==================================== ==================
"""

import math
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from softstair import _check

__all__ = ["Logistic", "Noise", "Normal", "Triangular", "Uniform", "get", "names"]

LARGEST = 1e30
"""Of a mean or standard deviation: the ends of the noise are then finite in float32."""
SQRT2, SQRT3, SQRT6 = math.sqrt(2.0), math.sqrt(3.0), math.sqrt(6.0)


class Noise:
    """A family of noise; subclass it for one of your own.

    >>> class Laplace(Noise):
    ...     def cdf(self, z):
    ...         half = 0.5 * torch.exp(-math.sqrt(2) * z.abs())
    ...         return torch.where(z < 0, half, 1 - half)
    ...     def pdf(self, z):
    ...         return torch.exp(-math.sqrt(2) * z.abs()) / math.sqrt(2)
    >>> round(Laplace().std_within(0.5, mass=0.95), 4)
    0.236

    A subclass defines :meth:`cdf` and :meth:`pdf` for tensors of standardised values, in torch
    operations; the variable must have mean 0 and standard deviation 1.
    """

    name: ClassVar[str] = ""
    support: ClassVar[float] = math.inf
    """Half-width of the support of the standardised variable."""
    peaked: ClassVar[bool] = False
    """Symmetric and uni-modal: of bins of equal width the one around x is the most probable."""
    proper: ClassVar[bool] = True
    """A probability measure; some estimators of :mod:`softstair.ste` are only a slope."""

    def cdf(self, z: Tensor) -> Tensor:
        """Return F(z) = P(Z ≤ z)."""
        raise TypeError(f"{type(self).__name__} has no cdf; a family of noise defines cdf and pdf.")

    def pdf(self, z: Tensor) -> Tensor:
        """Return the density μ(z) = F′(z), right-continuous where it jumps, as the stair is."""
        raise TypeError(f"{type(self).__name__} has no pdf; a family of noise defines cdf and pdf.")

    def ppf(self, u: Tensor) -> Tensor:
        """Return the inverse of the cdf at 0 < u < 1, by bisection unless a family overrides it."""
        low = torch.full_like(u, -1.0)
        high = torch.full_like(u, 1.0)
        for _ in range(128):
            low = torch.where(self.cdf(low) > u, 2 * low, low)
            high = torch.where(self.cdf(high) < u, 2 * high, high)
        for _ in range(128):
            middle = 0.5 * (low + high)
            below = self.cdf(middle) < u
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return 0.5 * (low + high)

    @property
    def has_ppf(self) -> bool:
        """Whether the family has an inverse cdf of its own, so that a draw is one evaluation."""
        return type(self).ppf is not Noise.ppf

    def std_within(self, half: float, mass: float = 0.95) -> float:
        """Return the standard deviation at which ``mass`` of the noise is within ±``half``.

        >>> round(Normal().std_within(0.5), 4)
        0.2551

        This is how the paper compares families. Of a bounded family, all of the noise is.

        Raises:
            ValueError: If ``half`` is not above 0, or if ``mass`` is not between 0 and 1.
        """
        _check.number("half", half, above=0)
        if not 0 < mass < 1:
            raise _check.wrong("mass", mass, "between 0 and 1")
        return half / (self.support if math.isfinite(self.support) else _reach(self, mass))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), tuple(sorted(vars(self).items()))))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Uniform(Noise):
    """Uniform noise on [−√3, √3); it regularises the Heaviside function to the hard sigmoid.

    >>> Uniform().cdf(torch.tensor([-2.0, 0.0, 2.0]))
    tensor([0.0000, 0.5000, 1.0000])
    """

    name = "uniform"
    support = SQRT3
    peaked = True

    def cdf(self, z: Tensor) -> Tensor:
        return (z / (2 * SQRT3) + 0.5).clamp(0.0, 1.0)

    def pdf(self, z: Tensor) -> Tensor:
        inside = (z >= -SQRT3) & (z < SQRT3)
        return inside.to(z.dtype) * (0.5 / SQRT3) + 0 * z.clamp(-1.0, 1.0)

    def ppf(self, u: Tensor) -> Tensor:
        return (2 * u - 1) * SQRT3


class Triangular(Noise):
    """Triangular noise, μ(z) = (√6 − |z|)/6: the piecewise polynomial of Bi-Real networks.

    >>> Triangular().cdf(torch.tensor([-3.0, 0.0, 3.0]))
    tensor([0.0000, 0.5000, 1.0000])
    """

    name = "triangular"
    support = SQRT6
    peaked = True

    def cdf(self, z: Tensor) -> Tensor:
        c = (z / SQRT6).clamp(-1.0, 1.0)
        # Squaring 1 − |c| keeps the lower tail accurate; 1 − (…) would keep only the upper one.
        tail = 0.5 * (1 - c.abs()).square()
        return torch.where(c > 0, 1 - tail, tail)

    def pdf(self, z: Tensor) -> Tensor:
        return (SQRT6 - z.abs()).clamp(min=0.0) / 6

    def ppf(self, u: Tensor) -> Tensor:
        reach = 1 - (2 * torch.minimum(u, 1 - u)).sqrt()
        return torch.where(u < 0.5, -reach, reach) * SQRT6


class Normal(Noise):
    """Normal noise, μ(z) = exp(−z²/2)/√(2π): the error function.

    >>> Normal().ppf(torch.tensor([0.5, 0.975]))
    tensor([0.0000, 1.9600])
    """

    name = "normal"
    peaked = True

    def cdf(self, z: Tensor) -> Tensor:
        return 0.5 * torch.erfc(z * (-1 / SQRT2))

    def pdf(self, z: Tensor) -> Tensor:
        return torch.exp(-0.5 * z.square()) * (1 / math.sqrt(2 * math.pi))

    def ppf(self, u: Tensor) -> Tensor:
        return torch.special.ndtri(u)


class Logistic(Noise):
    """Logistic noise of scale √3/π, so that the standard deviation is 1: the sigmoid.

    >>> Logistic().cdf(torch.tensor(0.0))
    tensor(0.5000)
    """

    name = "logistic"
    peaked = True
    rate: ClassVar[float] = math.pi / SQRT3

    def cdf(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z * self.rate)

    def pdf(self, z: Tensor) -> Tensor:
        # e^{−a|z|} cannot overflow, and keeps the tails that σ(1 − σ) would round to 0.
        decay = torch.exp(z.abs() * -self.rate)
        return decay / (1 + decay).square() * self.rate

    def ppf(self, u: Tensor) -> Tensor:
        return torch.logit(u) / self.rate


FAMILIES: dict[str, type[Noise]] = {
    family.name: family for family in (Uniform, Triangular, Normal, Logistic)
}


def names() -> tuple[str, ...]:
    """Return the names of the paper's families, in its order."""
    return tuple(FAMILIES)


def get(noise: str | Noise) -> Noise:
    """Return the family of a name; a family is returned as it is.

    >>> get("normal")
    Normal()

    Raises:
        ValueError: If there is no family of that name.
    """
    if isinstance(noise, Noise):
        return noise
    if isinstance(noise, str) and noise in FAMILIES:
        return FAMILIES[noise]()
    allowed = f"one of {', '.join(names())}, or a softstair.noise.Noise"
    raise _check.wrong("noise", noise, allowed, names())


@lru_cache(maxsize=256)
def _reach(family: Noise, mass: float) -> float:
    """Return how many standard deviations to either side hold a mass, by bisection."""

    def is_low(z: float) -> bool:
        ends = family.cdf(torch.tensor([-z, z], dtype=torch.float64))
        return float(ends[1] - ends[0]) < mass

    low, high = 0.0, 1.0
    while is_low(high):
        low, high = high, 2 * high
        if not math.isfinite(high):
            raise _check.invalid("mass", "is never reached by the cdf of the family")
    while low < (middle := 0.5 * (low + high)) < high:
        low, high = (middle, high) if is_low(middle) else (low, middle)
    return 0.5 * (low + high)
