"""The operator in plain torch operations: the oracle of every other backend.

Nothing here writes in place, branches on a tensor's value or keeps K copies of x, so it is right on
any device, under every functional transform and inside a compiled graph. ``mean`` and ``std`` are
numbers or tensors that broadcast against x; a std of 0 (or too small for the dtype to divide by) is
a Dirac at the mean.
"""

import torch
from torch import Tensor

from softstair.kernels import equidistant
from softstair.kernels.rungs import Rungs
from softstair.noise import Noise, Uniform

Scalar = float | Tensor
EDGE = 1e-6
"""Relative to the support: more than float32 loses on the way from a schedule to here."""


def smallest_std(dtype: torch.dtype) -> float:
    """Below this the noise is a Dirac: its density would overflow."""
    return 1e-30 if dtype == torch.float32 else 1e-200


def value(
    x: Tensor, rungs: Rungs, noise: Noise, mean: Scalar, std: Scalar, forward: str, draw: Tensor
) -> Tensor:
    """The forward pass; ``draw`` is read by random alone: standardised noise, or the uniforms of a
    family that cannot invert its cdf."""
    if forward == "hard":
        return rungs.value(x)
    centred = x - mean
    if forward == "random" and noise.has_ppf:
        return rungs.value(centred - _dead_below(std, x) * draw)
    if isinstance(std, float) and std < smallest_std(x.dtype):
        return rungs.value(centred)
    scale = inverse(std, x)
    if forward == "random":
        result = sample(centred, rungs, noise, scale, draw)
    else:
        result = (expectation if forward == "expectation" else mode)(centred, rungs, noise, scale)
    if isinstance(std, float):
        return result
    return torch.where(std < smallest_std(x.dtype), rungs.value(centred), result)


def inverse(std: Scalar, x: Tensor) -> Scalar:
    """1/β, and 0 where the noise is a Dirac: then every density vanishes with it."""
    if isinstance(std, float):
        return 1 / std if std >= smallest_std(x.dtype) else 0.0
    dirac = std < smallest_std(x.dtype)
    return torch.where(dirac, 0.0, 1 / torch.where(dirac, 1.0, std))


def _dead_below(std: Scalar, x: Tensor) -> Scalar:
    if isinstance(std, float):
        return std if std >= smallest_std(x.dtype) else 0.0
    return torch.where(std < smallest_std(x.dtype), 0.0, std)


def expectation(x: Tensor, rungs: Rungs, noise: Noise, scale: Scalar) -> Tensor:
    """E[σ(x − ν)] = q₀ + Σₖ (qₖ − qₖ₋₁)·F((x − θₖ)/β), scale being 1/β."""
    if rungs.is_line and equidistant.knows(noise):
        return within_levels(equidistant.expectation(x, rungs, noise, scale), rungs)
    total = torch.zeros_like(x) + rungs.lowest
    for k in range(rungs.count):
        total = total + rungs.rise(k) * noise.cdf((x - rungs.threshold(k)) * scale)
    return within_levels(total, rungs)


def within_levels(x: Tensor, rungs: Rungs) -> Tensor:
    """An expectation lies between the end levels; rounding may have taken it an ulp beyond."""
    return x.clamp(min=rungs.level(0)).clamp(max=rungs.level(rungs.count))


def slope(x: Tensor, rungs: Rungs, noise: Noise, mean: Scalar, std: Scalar) -> Tensor:
    """d/dx E[σ(x − ν)] = Σₖ (qₖ − qₖ₋₁)·μ((x − θₖ)/β)/β: the backward pass of every forward."""
    if not noise.proper:
        return noise.pdf(x)
    limit = torch.finfo(x.dtype).max
    centred = (x - mean).clamp(-limit, limit)
    scale = inverse(std, x)
    if rungs.is_line and equidistant.knows(noise):
        return equidistant.slope(centred, rungs, noise, scale, EDGE)
    total = torch.zeros_like(x)
    for k in range(rungs.count):
        z = (centred - rungs.threshold(k)) * scale + edge(noise)
        total = total + rungs.rise(k) * noise.pdf(z)
    return total * scale


def edge(noise: Noise) -> float:
    """By how much x is taken to lie further right where a density jumps, as uniform noise's does.

    Neighbouring thresholds often share an edge of their supports: the default std spans half a
    quantum, and without batch-norm every x lies on an edge. Rounding must not decide whether both
    thresholds count there, or none: an x on the edge, give or take, belongs to the upper one.
    """
    return EDGE * noise.support if isinstance(noise, Uniform) else 0.0


def mode(x: Tensor, rungs: Rungs, noise: Noise, scale: Scalar) -> Tensor:
    """q of the likeliest level; ties, and differences within a few ulp, go to σ(x).

    Bins of one width under symmetric, uni-modal noise leave three candidates: the bin that holds x
    and the two ends, which are unbounded and win under wide noise (and, for unbounded families,
    in a thin band beyond the outermost thresholds at any width).
    """
    if noise.peaked and rungs.stair.spacing is not None:
        index = _likeliest_of_three(x, rungs, noise, scale)
    else:
        index = _likeliest(x, rungs, noise, scale)
    if rungs.is_line:
        result = rungs.level_at(index)
    else:
        result = torch.zeros_like(x) + rungs.level(0)
        for k in range(rungs.count):
            result = torch.where(index > k, rungs.level(k + 1), result)
    return torch.where(x.isnan(), x, result)


def sample(x: Tensor, rungs: Rungs, noise: Noise, scale: Scalar, u: Tensor) -> Tensor:
    """The level whose index is Σₖ [u < F((x − θₖ)/β)]."""
    result = torch.zeros_like(x) + rungs.level(0)
    for k in range(rungs.count):
        above = u < noise.cdf((x - rungs.threshold(k)) * scale)
        result = torch.where(above, rungs.level(k + 1), result)
    return torch.where(x.isnan(), x, result)


def tie(dtype: torch.dtype) -> float:
    """Probabilities closer than this are equal."""
    return 8 * torch.finfo(dtype).eps


def _likeliest_of_three(x: Tensor, rungs: Rungs, noise: Noise, scale: Scalar) -> Tensor:
    index = rungs.index(x)
    first, last = rungs.threshold(0), rungs.threshold(rungs.count - 1)
    lowest = noise.cdf((first - x) * scale)
    highest = noise.cdf((x - last) * scale)
    if rungs.count == 1:
        return index
    if rungs.count == 2:
        own = 1 - lowest - highest
    else:
        below, above = _neighbours(x, index, rungs)
        own = 1 - noise.cdf((below - x) * scale) - noise.cdf((x - above) * scale)
    interior = (index > 0) & (index < rungs.count)
    index = torch.where(interior & (lowest > own + tie(x.dtype)) & (lowest > highest), 0.0, index)
    top = interior & (highest > own + tie(x.dtype)) & (highest >= lowest)
    return torch.where(top, float(rungs.count), index)


def _neighbours(x: Tensor, index: Tensor, rungs: Rungs) -> tuple[Tensor, Tensor]:
    """The thresholds below and above the bin that holds x (any two where x lies in an end)."""
    if rungs.is_line:
        number = index.clamp(1, rungs.count - 1)
        return rungs.threshold_at(number - 1), rungs.threshold_at(number)
    below = torch.zeros_like(x) + rungs.threshold(0)
    above = torch.zeros_like(x) + rungs.threshold(1)
    for k in range(1, rungs.count - 1):
        below = torch.where(index > k, rungs.threshold(k), below)
        above = torch.where(index > k, rungs.threshold(k + 1), above)
    return below, above


def _likeliest(x: Tensor, rungs: Rungs, noise: Noise, scale: Scalar) -> Tensor:
    """argmaxₖ pₖ by one walk along the thresholds, for bins of any width and noise of any shape."""
    home = rungs.index(x)
    best = own = torch.zeros_like(x)
    winner = torch.zeros_like(x)
    above = torch.ones_like(x)
    for k in range(rungs.count + 1):
        here = above
        if k < rungs.count:
            above = noise.cdf((x - rungs.threshold(k)) * scale)
            probability = here - above
        else:
            probability = here
        own = torch.where(home == k, probability, own)
        winner = torch.where(probability > best, float(k), winner)
        best = torch.maximum(best, probability)
    return torch.where(best > own + tie(x.dtype), winner, home)
