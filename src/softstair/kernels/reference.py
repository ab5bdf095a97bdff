"""The operator in plain torch operations: the oracle of every other backend.

Nothing here writes in place, branches on a tensor's value or keeps K copies of x, so it is right on
any device, under every functional transform and inside a compiled graph. A std of 0 (or too small
for the dtype to divide by) is a Dirac at the mean.

Random numbers come from torch here. The other backends draw one number from torch's generator and
seed a stream of their own with it, which is cheaper and as reproducible.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from softstair.kernels.bound import BoundStair, Scalar
from softstair.noise import FAMILIES, LARGEST, Noise, Normal, Triangular, Uniform

EDGE = 1e-6
"""Relative to the support: more than float32 loses on the way from a schedule to here."""
SMALLEST_UNIFORM = 2.0**-25
"""Half of the smallest uniform number above 0, which would be −∞ under unbounded noise."""


def smallest_std(dtype: torch.dtype) -> float:
    """Below this the noise is a Dirac: its density would overflow."""
    return 1e-30 if dtype == torch.float32 else 1e-200


def tie(dtype: torch.dtype) -> float:
    """Probabilities closer than this are equal."""
    return 8 * torch.finfo(dtype).eps


def value(x: Tensor, bound: BoundStair, forward: str, draw: Tensor) -> Tensor:
    """Return the forward pass, in x's dtype.

    ``draw`` is read by random alone: standardised noise, or uniform numbers for a family that
    cannot invert its cdf.
    """
    return _value(x.to(bound.compute), bound, forward, draw).to(x.dtype)


def _value(x: Tensor, bound: BoundStair, forward: str, draw: Tensor) -> Tensor:
    if forward == "hard":
        return bound.hard(x)
    mean, std = _noise(bound, x)
    centred = x - mean
    smallest = smallest_std(x.dtype)
    if forward == "random" and bound.noise.has_ppf:
        if isinstance(std, float):
            return bound.hard(centred - (std if std >= smallest else 0.0) * draw)
        return bound.hard(centred - torch.where(std < smallest, 0.0, std) * draw)
    if isinstance(std, float) and std < smallest:
        return bound.hard(centred)
    scale = inverse(std, x.dtype)
    if forward == "random":
        result = sample(centred, bound, scale, draw)
    else:
        result = (expectation if forward == "expectation" else mode)(centred, bound, scale)
    if isinstance(std, float):
        return result
    return torch.where(std < smallest, bound.hard(centred), result)


def draws_like(
    x: Tensor, noise: Noise, dtype: torch.dtype, generator: torch.Generator | None
) -> Tensor:
    """Return a draw for each element of x, as :func:`value` reads it."""
    is_normal = isinstance(noise, Normal)
    # Compilers and vmap know the functions without a generator; only the others take one.
    if generator is None:
        draw = torch.randn_like(x, dtype=dtype) if is_normal else torch.rand_like(x, dtype=dtype)
    else:
        function = torch.randn if is_normal else torch.rand
        draw = function(x.shape, dtype=dtype, device=x.device, generator=generator)
    return draw if is_normal or not noise.has_ppf else noise.ppf(draw.clamp(min=SMALLEST_UNIFORM))


def inverse(std: Scalar, dtype: torch.dtype) -> Scalar:
    """1/β, and 0 where the noise is a Dirac: every density vanishes with it."""
    if isinstance(std, float):
        return 1 / std if std >= smallest_std(dtype) else 0.0
    dirac = std < smallest_std(dtype)
    return torch.where(dirac, 0.0, 1 / torch.where(dirac, 1.0, std))


def expectation(x: Tensor, bound: BoundStair, scale: Scalar) -> Tensor:
    """E[σ(x − ν)] = q₀ + Σₖ (qₖ − qₖ₋₁)·F((x − θₖ)/β) of centred x, with scale = 1/β."""
    if has_closed_form(bound):
        total = bound.level(0) + bound.rise(0) * _closed_cdfs(x, bound, scale)
    else:
        total = torch.zeros_like(x) + bound.level(0)
        for k in range(bound.count):
            total = total + bound.rise(k) * bound.noise.cdf((x - bound.threshold(k)) * scale)
    # Rounding may have taken it an ulp beyond the end levels.
    return total.clamp(min=bound.level(0)).clamp(max=bound.level(bound.count))


def slope(x: Tensor, bound: BoundStair) -> Tensor:
    """d/dx E[σ(x − ν)] = Σₖ (qₖ − qₖ₋₁)·μ((x − θₖ)/β)/β, in the dtype of computation; 0 for a
    Dirac."""
    x = x.to(bound.compute)
    if not bound.noise.proper:
        return torch.where(x.isnan(), x, bound.noise.pdf(x))
    limit = torch.finfo(x.dtype).max
    mean, std = _noise(bound, x)
    centred = (x - mean).clamp(-limit, limit)
    scale = inverse(std, x.dtype)
    if has_closed_form(bound):
        return _closed_slope(centred, bound, scale)
    shift = edge(bound.noise)
    total = torch.zeros_like(x)
    for k in range(bound.count):
        z = (centred - bound.threshold(k)) * scale + shift
        total = total + bound.rise(k) * bound.noise.pdf(z)
    total = total * scale
    # A family of one's own may lose NaN.
    is_own = all(type(bound.noise) is not family for family in FAMILIES.values())
    return torch.where(x.isnan(), x, total) if is_own else total


def edge(noise: Noise) -> float:
    """By how much x is taken to lie further right where a density jumps, as uniform noise's does.

    Neighbouring thresholds often share an edge of their supports: the default std spans half a
    quantum, and without batch-norm every x lies on an edge. Rounding must not decide whether both
    thresholds count there, or none: an x on the edge, give or take, belongs to the upper one.
    """
    return EDGE * noise.support if isinstance(noise, Uniform) else 0.0


def mode(x: Tensor, bound: BoundStair, scale: Scalar) -> Tensor:
    """q of the likeliest level for centred x; ties, and differences within a few ulp, go to σ(x).

    Bins of one width under symmetric, uni-modal noise leave three candidates: the bin that holds x
    and the two ends, which are unbounded and win under wide noise (and, for unbounded families,
    in a thin band beyond the outermost thresholds at any width).
    """
    if bound.noise.peaked and bound.stair.spacing is not None:
        index = _likeliest_of_three(x, bound, scale)
    else:
        index = _likeliest(x, bound, scale)
    if bound.is_line:
        result = bound.level_at(index)
    else:
        result = torch.zeros_like(x) + bound.level(0)
        for k in range(bound.count):
            result = torch.where(index > k, bound.level(k + 1), result)
    return torch.where(x.isnan(), x, result)


def sample(x: Tensor, bound: BoundStair, scale: Scalar, u: Tensor) -> Tensor:
    """The level whose index is Σₖ [u < F((x − θₖ)/β)], for centred x."""
    result = torch.zeros_like(x) + bound.level(0)
    for k in range(bound.count):
        above = u < bound.noise.cdf((x - bound.threshold(k)) * scale)
        result = torch.where(above, bound.level(k + 1), result)
    return torch.where(x.isnan(), x, result)


def _noise(bound: BoundStair, x: Tensor) -> tuple[Scalar, Scalar]:
    """Return mean and std in x's dtype. The mean is NaN, and with it the results, where they are
    not within their limits: on a GPU, reading them to raise an error would wait for it."""
    both: Any = (v.to(x.dtype) if isinstance(v, Tensor) else v for v in (bound.mean, bound.std))
    mean, std = both
    if isinstance(mean, float) and isinstance(std, float):
        return mean, std
    is_valid = (abs(mean) <= LARGEST) & (std >= 0) & (std <= LARGEST)
    return mean + torch.where(is_valid, 0.0, torch.nan).to(x.dtype), std


def _likeliest_of_three(x: Tensor, bound: BoundStair, scale: Scalar) -> Tensor:
    index, cdf = bound.index(x), bound.noise.cdf
    first, last = bound.threshold(0), bound.threshold(bound.count - 1)
    lowest = cdf((first - x) * scale)
    highest = cdf((x - last) * scale)
    if bound.count == 1:
        return index
    if bound.count == 2:
        own = 1 - lowest - highest
    else:
        below, above = _neighbours(x, index, bound)
        own = 1 - cdf((below - x) * scale) - cdf((x - above) * scale)
    interior = (index > 0) & (index < bound.count)
    index = torch.where(interior & (lowest > own + tie(x.dtype)) & (lowest > highest), 0.0, index)
    top = interior & (highest > own + tie(x.dtype)) & (highest >= lowest)
    return torch.where(top, float(bound.count), index)


def _neighbours(x: Tensor, index: Tensor, bound: BoundStair) -> tuple[Tensor, Tensor]:
    """The thresholds below and above the bin that holds x (any two where x lies in an end)."""
    if bound.is_line:
        number = index.clamp(1, bound.count - 1)
        return bound.threshold_at(number - 1), bound.threshold_at(number)
    below = torch.zeros_like(x) + bound.threshold(0)
    above = torch.zeros_like(x) + bound.threshold(1)
    for k in range(1, bound.count - 1):
        below = torch.where(index > k, bound.threshold(k), below)
        above = torch.where(index > k, bound.threshold(k + 1), above)
    return below, above


def _likeliest(x: Tensor, bound: BoundStair, scale: Scalar) -> Tensor:
    """argmaxₖ pₖ by one walk along the thresholds, for bins of any width and noise of any shape."""
    home = bound.index(x)
    best = own = torch.zeros_like(x)
    winner = torch.zeros_like(x)
    remaining = torch.ones_like(x)
    for k in range(bound.count + 1):
        probability = remaining
        if k < bound.count:
            remaining = bound.noise.cdf((x - bound.threshold(k)) * scale)
            probability = probability - remaining
        own = torch.where(home == k, probability, own)
        winner = torch.where(probability > best, float(k), winner)
        best = torch.maximum(best, probability)
    return torch.where(best > own + tie(x.dtype), winner, home)


# Sums of F and μ over equally spaced thresholds, in closed form for the bounded families. In units
# of the spacing w, measured from the nearest threshold: ρ the position of x, η the half-width of
# the noise, thresholds at the integers m from −j to K−2−j. Those at or below ρ − η count in full,
# those above ρ + η not at all, and the ones between are arithmetic progressions:
#
#     uniform     F = (ρ + η − m)/(2η)
#     triangular  F = (η + ρ − m)²/(2η²) for m > ρ,  1 − (η − ρ + m)²/(2η²) for m ≤ ρ
#
# so the cost does not depend on K. Starting from the nearest threshold keeps the precision that
# x − θₖ has; starting from a distant one would lose it under narrow noise.


def has_closed_form(bound: BoundStair) -> bool:
    """Whether sums over thresholds have a closed form: a bounded family on a line."""
    return bound.is_line and type(bound.noise) in (Uniform, Triangular)


class _Support(NamedTuple):
    rho: Tensor
    eta: Scalar
    full: Tensor  # number of the last threshold that counts in full
    part: Tensor  # number of the last threshold that counts at all
    below: Tensor  # how many count in full


class _Progression(NamedTuple):
    """n thresholds in a row; ``first`` the smallest of their distances to the support's edge."""

    first: Tensor
    n: Tensor

    def sum(self, eta: Scalar) -> Tensor:
        """Σ_{i<n} (first + i)/η."""
        return self.n * (self.first + 0.5 * (self.n - 1)) / eta

    def sum_of_squares(self, eta: Scalar) -> Tensor:
        """Σ_{i<n} ((first + i)/η)²; dividing before squaring allows the smallest η."""
        first, n = self
        rest = n * (n - 1) * (first + (2 * n - 1) / 6)
        return n * (first / eta).square() + rest / eta / eta


def _support(x: Tensor, bound: BoundStair, scale: Scalar, edge: float = 0.0) -> _Support:
    limit = torch.finfo(x.dtype).max
    x = x.clamp(-limit, limit)
    nearest = ((x - bound.threshold(0)) / bound.spacing).round().clamp(0, bound.count - 1)
    rho = (x - bound.threshold_at(nearest)) / bound.spacing
    eta = bound.noise.support / (scale * bound.spacing)
    lowest, highest = -nearest - 1, bound.count - 1 - nearest
    shift = edge * eta
    full = torch.minimum(torch.maximum((rho - eta + shift).floor(), lowest), highest)
    part = torch.minimum(torch.maximum((rho + eta + shift).floor(), lowest), highest)
    return _Support(rho, eta, full, part, full + nearest + 1)


def _halves(s: _Support) -> tuple[_Progression, _Progression]:
    """The thresholds under the rising and the falling half of the triangle."""
    middle = torch.minimum(torch.maximum(s.rho.floor(), s.full), s.part)
    rising = _Progression(_within(s.rho + s.eta - s.part, s.eta), s.part - middle)
    # The integers by themselves: narrow noise would be lost beside them.
    falling = _Progression(_within((s.eta - s.rho) + (s.full + 1), s.eta), middle - s.full)
    return rising, falling


def _within(distance: Tensor, most: Scalar) -> Tensor:
    # An empty progression has no first term; this keeps it finite, so that 0 times it is 0.
    return torch.minimum(distance.clamp(min=0), torch.zeros_like(distance) + most)


def _closed_cdfs(x: Tensor, bound: BoundStair, scale: Scalar) -> Tensor:
    """Σₖ F((x − θₖ)/β)."""
    s = _support(x, bound, scale)
    if isinstance(bound.noise, Uniform):
        average = _within(s.rho + s.eta - 0.5 * (s.full + 1 + s.part), 2 * s.eta)
        partial = (s.part - s.full) * (average / (2 * s.eta))
    else:
        rising, falling = _halves(s)
        squares = rising.sum_of_squares(s.eta) - falling.sum_of_squares(s.eta)
        partial = falling.n + 0.5 * squares
    return s.below + partial


def _closed_slope(x: Tensor, bound: BoundStair, scale: Scalar) -> Tensor:
    """Δ·Σₖ μ((x − θₖ)/β)/β, Δ the height of every step; 0 where scale = 1/β is 0, a Dirac's."""
    dirac = scale == 0
    live = torch.where(dirac, 1.0, scale) if isinstance(dirac, Tensor) else (scale or 1.0)
    s = _support(x, bound, live, EDGE if isinstance(bound.noise, Uniform) else 0.0)
    if isinstance(bound.noise, Uniform):
        density = (s.part - s.full) / (2 * s.eta)
    else:
        rising, falling = _halves(s)
        density = (rising.sum(s.eta) + falling.sum(s.eta)) / s.eta
    density = density * (bound.rise(0) / bound.spacing)
    return density if isinstance(scale, float) and scale else density * (scale != 0)
