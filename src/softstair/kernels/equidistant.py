"""Sums of F and μ over equally spaced thresholds, in closed form for the bounded families.

In units of the spacing w, measured from the nearest threshold: ρ the position of x, η the
half-width of the noise, thresholds at the whole numbers m from −j to K−2−j. Those at or below ρ − η
count in full, those above ρ + η not at all, and the ones between are arithmetic progressions:

    uniform     F = (ρ + η − m)/(2η)
    triangular  F = (η + ρ − m)²/(2η²) for m > ρ,  1 − (η − ρ + m)²/(2η²) for m ≤ ρ

so the cost does not depend on K. Starting from the nearest threshold keeps the precision that
x − θₖ has; starting from a distant one would lose it under narrow noise.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from softstair.kernels.rungs import Rungs
from softstair.noise import Noise, Triangular, Uniform


def knows(noise: Noise) -> bool:
    return type(noise) in (Uniform, Triangular)


class _Support(NamedTuple):
    rho: Tensor
    eta: Tensor | float
    full: Tensor  # a: the last threshold that counts in full
    part: Tensor  # b: the last threshold that counts at all
    below: Tensor  # thresholds with a number not above a, that is a + j + 1


class _Run(NamedTuple):
    """n thresholds in a row; ``first`` the smallest of their distances to the support's edge."""

    first: Tensor
    n: Tensor


def _support(
    x: Tensor, rungs: Rungs, noise: Noise, scale: float | Tensor, edge: float = 0.0
) -> _Support:
    limit = torch.finfo(x.dtype).max
    x = x.clamp(-limit, limit)
    nearest = ((x - rungs.threshold(0)) / rungs.spacing).round().clamp(0, rungs.count - 1)
    rho = (x - rungs.threshold_at(nearest)) / rungs.spacing
    eta = noise.support / (scale * rungs.spacing)
    lowest, highest = -nearest - 1, rungs.count - 1 - nearest
    shift = edge * eta
    full = torch.minimum(torch.maximum((rho - eta + shift).floor(), lowest), highest)
    part = torch.minimum(torch.maximum((rho + eta + shift).floor(), lowest), highest)
    return _Support(rho, eta, full, part, full + nearest + 1)


def _halves(s: _Support) -> tuple[_Run, _Run]:
    """The thresholds under the rising and the falling half of the triangle."""
    middle = torch.minimum(torch.maximum(s.rho.floor(), s.full), s.part)
    rising = _Run(_within(s.rho + s.eta - s.part, s.eta), s.part - middle)
    # Whole numbers by themselves: narrow noise would be lost beside them.
    falling = _Run(_within((s.eta - s.rho) + (s.full + 1), s.eta), middle - s.full)
    return rising, falling


def _within(distance: Tensor, most: Tensor | float) -> Tensor:
    # An empty run has no first term; this keeps what stands there finite, so that 0 times it is 0.
    return torch.minimum(distance.clamp(min=0), torch.zeros_like(distance) + most)


def _sum(run: _Run, eta: Tensor | float) -> Tensor:
    """Σ_{i<n} (first + i)/η."""
    return run.n * (run.first + 0.5 * (run.n - 1)) / eta


def _sum_of_squares(run: _Run, eta: Tensor | float) -> Tensor:
    """Σ_{i<n} ((first + i)/η)²; dividing before squaring lets η be as small as the dtype allows."""
    first, n = run
    rest = n * (n - 1) * (first + (2 * n - 1) / 6)
    return n * (first / eta).square() + rest / eta / eta


def expectation(x: Tensor, rungs: Rungs, noise: Noise, scale: float | Tensor) -> Tensor:
    """q₀ + Δ·Σₖ F((x − θₖ)/β), Δ the one height of the steps."""
    s = _support(x, rungs, noise, scale)
    if isinstance(noise, Uniform):
        average = _within(s.rho + s.eta - 0.5 * (s.full + 1 + s.part), 2 * s.eta)
        partial = (s.part - s.full) * (average / (2 * s.eta))
    else:
        rising, falling = _halves(s)
        squares = _sum_of_squares(rising, s.eta) - _sum_of_squares(falling, s.eta)
        partial = falling.n + 0.5 * squares
    return rungs.lowest + rungs.rise(0) * (s.below + partial)


def slope(x: Tensor, rungs: Rungs, noise: Noise, scale: float | Tensor, edge: float) -> Tensor:
    """Δ·Σₖ μ((x − θₖ)/β)/β; 0 where scale = 1/β is 0, a Dirac's. A share ``edge`` of the support
    decides for the upper of two thresholds whose supports meet."""
    dirac = scale == 0
    live = torch.where(dirac, 1.0, scale) if isinstance(dirac, Tensor) else (scale or 1.0)
    s = _support(x, rungs, noise, live, edge if isinstance(noise, Uniform) else 0.0)
    if isinstance(noise, Uniform):
        density = (s.part - s.full) / (2 * s.eta)
    else:
        rising, falling = _halves(s)
        density = (_sum(rising, s.eta) + _sum(falling, s.eta)) / s.eta
    density = density * (rungs.rise(0) / rungs.spacing)
    if isinstance(dirac, Tensor):
        return torch.where(dirac, torch.zeros_like(density), density)
    return torch.zeros_like(density) if dirac else density
