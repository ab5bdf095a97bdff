"""One threshold's share of the sums Σₖ rise·F((x − θₖ)/β) and Σₖ rise·μ((x − θₖ)/β)/β, in place.

For each family of the paper, in the fewest passes over a block. ``base`` is the constant of a term
per unit of rise, which the sum starts from instead of adding it K − 1 times.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from softstair.kernels.reference import EDGE
from softstair.noise import Logistic, Noise, Normal, Triangular, Uniform

Add = Callable[[Tensor, Tensor, Tensor, Tensor, float, float, float], None]
"""(total, work, more, x, threshold, 1/β, rise): adds to the total; work and more are spare."""


class Term(NamedTuple):
    add: Add
    base: Callable[[float], float]


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
    torch.sub(x, at, out=work).mul_(scale / Triangular.support).clamp_(-1.0, 1.0)
    total.add_(work, alpha=rise)
    total.addcmul_(work, torch.abs(work, out=more), value=-0.5 * rise)


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


def _uniform_pdf(
    total: Tensor, work: Tensor, _: Tensor, x: Tensor, at: float, scale: float, rise: float
) -> None:
    half, density = Uniform.support / scale, rise * scale / (2 * Uniform.support)
    low, high = at - half * (1 + EDGE), at + half * (1 - EDGE)
    low, high = _round_up(low, x.dtype), _round_up(high, x.dtype)
    if high <= at:  # the support is narrower than the spacing of the dtype: it holds `at` alone
        high = _round_up(math.nextafter(at, math.inf), x.dtype)
    total.add_(torch.ge(x, low, out=work), alpha=density)
    total.sub_(torch.ge(x, high, out=work), alpha=density)


def _round_up(value: float, dtype: torch.dtype) -> float:
    """The smallest number of the dtype not below the value: x ≥ the one iff x ≥ the other."""
    near = torch.tensor(value, dtype=dtype)
    if float(near) < value:
        near = torch.nextafter(near, torch.full_like(near, math.inf))
    return float(near)


def _triangular_pdf(
    total: Tensor, work: Tensor, _: Tensor, x: Tensor, at: float, scale: float, rise: float
) -> None:
    torch.sub(x, at, out=work).mul_(scale / Triangular.support).clamp_(-1.0, 1.0).abs_()
    total.sub_(work, alpha=rise * scale / Triangular.support)


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
    Uniform: Term(_uniform_pdf, lambda scale: 0.0),
    Triangular: Term(_triangular_pdf, lambda scale: scale / Triangular.support),
    Normal: Term(_normal_pdf, lambda scale: 0.0),
    Logistic: Term(_logistic_pdf, lambda scale: 0.0),
}
