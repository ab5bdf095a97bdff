"""One threshold's share of the sums Σₖ rise·F((x − θₖ)/β) and Σₖ rise·μ((x − θₖ)/β)/β, in place.

For the families of the paper, in the fewest passes over a block: a term is base + factor·shape, and
only the shape is computed for each threshold. The sum of uniform densities is a stair itself, and
is made in :mod:`softstair.kernels.cpu`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from softstair.noise import Logistic, Noise, Normal, Triangular, Uniform

Shape = Callable[[Tensor, Tensor, Tensor, float, float], None]
"""(out, spare, x, threshold, 1/β): writes the shape of x − threshold to out."""


class Term(NamedTuple):
    """base + factor·shape, for a rise of 1; base and factor are functions of 1/β."""

    shape: Shape
    factor: Callable[[float], float]
    base: Callable[[float], float] = lambda scale: 0.0
    vanishes: bool = False
    """Is a difference that is exactly 0 away from the thresholds."""


def _uniform_cdf(out: Tensor, spare: Tensor, x: Tensor, at: float, scale: float) -> None:
    half = Uniform.support / scale
    torch.sub(x, at, out=out).clamp_(-half, half)


def _triangular_cdf(out: Tensor, spare: Tensor, x: Tensor, at: float, scale: float) -> None:
    # c − c|c|/2, c the position within the support.
    _within_triangle(out, x, at, scale)
    out.addcmul_(out, torch.abs(out, out=spare), value=-0.5 / _triangle_unit(scale))


def _triangular_pdf(out: Tensor, spare: Tensor, x: Tensor, at: float, scale: float) -> None:
    _within_triangle(out, x, at, scale)
    out.abs_()


def _within_triangle(out: Tensor, x: Tensor, at: float, scale: float) -> None:
    """x − at, cut off at the ends of the support, in the triangle's unit."""
    unit, half = _triangle_unit(scale), Triangular.support / scale
    torch.sub(x, at, out=out)
    if unit != half:
        out.mul_(1 / half)
    out.clamp_(-unit, unit)


def _triangle_unit(scale: float) -> float:
    """Half the width of the support; narrow noise is scaled to 1, lest its square vanish."""
    half = Triangular.support / scale
    return half if half > 1e-15 else 1.0


def _normal_cdf(out: Tensor, spare: Tensor, x: Tensor, at: float, scale: float) -> None:
    torch.sub(x, at, out=out).mul_(scale / math.sqrt(2)).erf_()


def _normal_pdf(out: Tensor, spare: Tensor, x: Tensor, at: float, scale: float) -> None:
    torch.sub(x, at, out=out).mul_(scale * math.sqrt(0.5))
    out.mul_(out).neg_().exp_()


def _logistic_cdf(out: Tensor, spare: Tensor, x: Tensor, at: float, scale: float) -> None:
    torch.sub(x, at, out=out).mul_(scale * Logistic.rate).sigmoid_()


def _logistic_pdf(out: Tensor, spare: Tensor, x: Tensor, at: float, scale: float) -> None:
    # s(1 − s) with s = sigmoid(−|z|) keeps the tails that sigmoid(|z|) rounds to 1.
    torch.sub(x, at, out=out).abs_().mul_(-scale * Logistic.rate).sigmoid_()
    out.addcmul_(out, out, value=-1)


CDF: dict[type[Noise], Term] = {
    Uniform: Term(_uniform_cdf, lambda s: 0.5 * s / Uniform.support, lambda s: 0.5),
    Triangular: Term(_triangular_cdf, lambda s: 1 / _triangle_unit(s), lambda s: 0.5),
    Normal: Term(_normal_cdf, lambda s: 0.5, lambda s: 0.5),
    Logistic: Term(_logistic_cdf, lambda s: 1.0),
}
PDF: dict[type[Noise], Term] = {
    Triangular: Term(
        _triangular_pdf,
        lambda s: -s / Triangular.support / _triangle_unit(s),
        lambda s: s / Triangular.support,
        vanishes=True,
    ),
    Normal: Term(_normal_pdf, lambda s: s / math.sqrt(2 * math.pi)),
    Logistic: Term(_logistic_pdf, lambda s: s * Logistic.rate),
}
