"""One threshold's share of the sums Σₖ rise·F((x − θₖ)/β) and Σₖ rise·μ((x − θₖ)/β)/β, in place.

For the families of the paper, in the fewest passes over a block; the sum of uniform densities is a
stair itself, and is made in :mod:`softstair.kernels.cpu`. ``base`` is the constant of a term per
unit of rise, which the sum starts from instead of adding it K − 1 times.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from softstair.noise import Logistic, Noise, Normal, Triangular, Uniform

Add = Callable[[Tensor, Tensor, Tensor, Tensor, float, float, float], None]
"""(total, work, more, x, threshold, 1/β, rise): adds to the total; work and more are spare."""


class Term(NamedTuple):
    add: Add
    base: Callable[[float], float]
    vanishes: bool = False
    """Is a difference that is exactly 0 away from the thresholds."""


def _uniform_cdf(
    total: Tensor, work: Tensor, _: Tensor, x: Tensor, at: float, scale: float, rise: float
) -> None:
    half = Uniform.support / scale
    torch.sub(x, at, out=work).clamp_(-half, half)
    total.add_(work, alpha=rise * 0.5 / half)


def _triangular_cdf(
    total: Tensor, work: Tensor, more: Tensor, x: Tensor, at: float, scale: float, rise: float
) -> None:
    # ½ + c − c|c|/2, c the position within the support.
    unit = _within_triangle(work, x, at, scale)
    total.add_(work, alpha=rise / unit)
    total.addcmul_(work, torch.abs(work, out=more), value=-0.5 * rise / unit**2)


def _within_triangle(work: Tensor, x: Tensor, at: float, scale: float) -> float:
    """x − at, cut off at the ends of the support; returns the unit in which it is measured, half
    the support's width. Narrow noise is scaled to 1, lest its square vanish."""
    half = Triangular.support / scale
    torch.sub(x, at, out=work)
    if half > 1e-15:
        work.clamp_(-half, half)
        return half
    work.mul_(1 / half).clamp_(-1.0, 1.0)
    return 1.0


def _normal_cdf(
    total: Tensor, work: Tensor, _: Tensor, x: Tensor, at: float, scale: float, rise: float
) -> None:
    torch.sub(x, at, out=work).mul_(scale / math.sqrt(2)).erf_()
    total.add_(work, alpha=0.5 * rise)


def _logistic_cdf(
    total: Tensor, work: Tensor, _: Tensor, x: Tensor, at: float, scale: float, rise: float
) -> None:
    torch.sub(x, at, out=work).mul_(scale * Logistic.rate).sigmoid_()
    total.add_(work, alpha=rise)


def _triangular_pdf(
    total: Tensor, work: Tensor, _: Tensor, x: Tensor, at: float, scale: float, rise: float
) -> None:
    unit = _within_triangle(work, x, at, scale)
    total.sub_(work.abs_(), alpha=rise * scale / Triangular.support / unit)


def _normal_pdf(
    total: Tensor, work: Tensor, _: Tensor, x: Tensor, at: float, scale: float, rise: float
) -> None:
    torch.sub(x, at, out=work).mul_(scale)
    work.mul_(work).mul_(-0.5).exp_()
    total.add_(work, alpha=rise * scale / math.sqrt(2 * math.pi))


def _logistic_pdf(
    total: Tensor, work: Tensor, _: Tensor, x: Tensor, at: float, scale: float, rise: float
) -> None:
    # s(1 − s) with s = sigmoid(−|z|) keeps the tails that sigmoid(|z|) rounds to 1.
    torch.sub(x, at, out=work).abs_().mul_(-scale * Logistic.rate).sigmoid_()
    density = rise * scale * Logistic.rate
    total.add_(work, alpha=density).addcmul_(work, work, value=-density)


CDF: dict[type[Noise], Term] = {
    Uniform: Term(_uniform_cdf, lambda scale: 0.5),
    Triangular: Term(_triangular_cdf, lambda scale: 0.5),
    Normal: Term(_normal_cdf, lambda scale: 0.5),
    Logistic: Term(_logistic_cdf, lambda scale: 0.0),
}
PDF: dict[type[Noise], Term] = {
    Triangular: Term(_triangular_pdf, lambda scale: scale / Triangular.support, vanishes=True),
    Normal: Term(_normal_pdf, lambda scale: 0.0),
    Logistic: Term(_logistic_pdf, lambda scale: 0.0),
}
