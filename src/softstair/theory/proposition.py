"""Proposition 1, measured: E[σ_ν] = μ ∗ σ, and |D E[σ_ν]| ≤ ‖σ‖_∞·|Dμ|(ℝ).

The expectation and its derivative are those of :func:`softstair.regularise`, which uses the cdf
and the density; the convolution is a quadrature of ∫ σ(x − y)·μ(y) dy that uses the density and the
hard stair alone, so that neither can hide a mistake of the other.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from softstair import noise as noises
from softstair.noise import Noise
from softstair.regularise import regularise
from softstair.stair import Stair

__all__ = ["Proposition", "proposition"]

NODES = 12
"""Gauss–Legendre nodes a panel: exact for polynomials of degree 23."""
CORE = 8.0
"""Where panels of one width end (in standard deviations) and widths begin to grow."""


@dataclass(frozen=True)
class Proposition:
    """Both halves of Proposition 1 for one stair and one noise, over ``points`` values of x."""

    error: float
    """max over x of |E[σ_ν(x)] − (μ ∗ σ)(x)|, the latter by quadrature."""
    largest_derivative: float
    norm: float
    """‖σ‖_∞ = max |qₖ|."""
    bound: float
    """The paper's ‖σ‖_∞·|Dμ|(ℝ)."""
    tight_bound: float
    """½(q_{K−1} − q₀)·|Dμ|(ℝ): a constant added to σ changes ‖σ‖_∞ but not the derivative."""
    points: int

    @property
    def holds(self) -> bool:
        # Where one threshold makes the bound an equality, rounding must not turn it into a no;
        # nor may the grid on which the variation of a family of one's own is summed.
        allowed = 1 + 1e-6
        within = self.largest_derivative <= min(self.bound, self.tight_bound) * allowed
        return within and self.error <= 1e-6 * self.norm


def proposition(
    stair: Stair, noise: str | Noise, mean: float = 0.0, std: float = 1.0, points: int = 401
) -> Proposition:
    """Proposition 1 for a stair and a family at an absolute mean and standard deviation.

    >>> found = proposition(Stair.heaviside(), "uniform", std=0.5 / math.sqrt(3))
    >>> found.error < 1e-12, round(found.largest_derivative, 6), round(found.bound, 6)
    (True, 1.0, 2.0)
    """
    family = noises.get(noise)
    if isinstance(stair.quantum, tuple):
        raise ValueError(
            "stair must have one quantum here, not one a channel: give each channel's own stair."
        )
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise ValueError(
            "Proposition 1 needs noise with a density, a finite mean and a std above 0, "
            f"but mean {mean!r} and std {std!r} were given."
        )
    x = _inputs(stair, family, mean, std, points).requires_grad_()
    expectation = regularise(x, stair, family, mean, std, forward="expectation")
    (slope,) = torch.autograd.grad(expectation.sum(), x)
    error = (expectation.detach() - convolution(x.detach(), stair, family, mean, std)).abs().max()
    variation = total_variation(family) / std
    lowest, highest = stair.levels[0], stair.levels[-1]
    norm = max(abs(lowest), abs(highest))
    return Proposition(
        error=float(error),
        largest_derivative=float(slope.abs().max()),
        norm=norm,
        bound=norm * variation,
        tight_bound=0.5 * (highest - lowest) * variation,
        points=len(x),
    )


def _inputs(stair: Stair, noise: Noise, mean: float, std: float, points: int) -> Tensor:
    """An even grid past both ends of the stair, and every threshold, where narrow noise peaks."""
    thresholds = torch.tensor(stair.thresholds, dtype=torch.float64) + mean
    reach = min(noise.support, CORE) * std + 0.5
    even = torch.linspace(
        float(thresholds[0]) - reach, float(thresholds[-1]) + reach, points, dtype=torch.float64
    )
    # A hair off, because where the supports of uniform noise meet the density of both is counted.
    return torch.cat([even, thresholds]).sort().values + 1e-7 * std


def convolution(x: Tensor, stair: Stair, noise: Noise, mean: float, std: float) -> Tensor:
    """(μ ∗ σ)(x) = ∫ σ(x − y)·μ(y) dy by quadrature, in float64; x has shape (N,).

    The panels end wherever the integrand jumps: at the ends of the support, at the density's peak
    and at y = x − θₖ. For unbounded families they reach 10⁸ standard deviations.
    """
    panels = mean + std * _panels(noise)
    thresholds = torch.tensor(stair.thresholds, dtype=torch.float64)
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(NODES))
    rows = max(1, 2**21 // (NODES * (len(panels) + len(thresholds))))
    parts = []
    for some in x.split(rows):
        jumps = (some[:, None] - thresholds).clamp(float(panels[0]), float(panels[-1]))
        edges = torch.cat([panels.expand(len(some), -1), jumps], dim=1).sort(dim=1).values
        half = 0.5 * edges.diff(dim=1)[..., None]
        y = edges[:, :-1, None] + half * (1 + nodes)
        integrand = stair(some[:, None, None] - y) * noise.pdf((y - mean) / std) / std
        parts.append((integrand * weights * half).sum(dim=(1, 2)))
    return torch.cat(parts) if parts else x.clone()


def _panels(noise: Noise) -> Tensor:
    """Ends of the panels for the standardised variable, symmetric around its peak at 0."""
    if math.isfinite(noise.support):
        return torch.linspace(-noise.support, noise.support, 65, dtype=torch.float64)
    # Chebyshev: less than 10⁻¹⁶ of any family lies beyond 10⁸ standard deviations.
    growing = CORE * 1.3 ** torch.arange(1, 63, dtype=torch.float64)
    core = torch.linspace(-CORE, CORE, 65, dtype=torch.float64)
    return torch.cat([-growing.flip(0), core, growing])


def total_variation(noise: Noise) -> float:
    """|Dμ|(ℝ) of the standardised density: twice its peak for a family with one peak at 0.

    >>> round(total_variation(noises.Triangular()), 6)
    0.816497
    """
    if noise.peaked:
        return 2 * float(noise.pdf(torch.zeros((), dtype=torch.float64)))
    # A sum over a grid is never above the variation; a fine one is close to it from below.
    reach = min(noise.support, 100.0) * (1 + 1e-9)
    z = torch.linspace(-reach, reach, 2**18 + 1, dtype=torch.float64)
    density = torch.cat([z.new_zeros(1), noise.pdf(z), z.new_zeros(1)])
    return float(density.diff().abs().sum())
