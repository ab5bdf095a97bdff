"""Sums over the thresholds of a stair, on a CPU: an expectation, or its slope.

The sum has one term for each threshold, Σₖ (qₖ − qₖ₋₁)·term((x − θₖ)/β). Where thresholds are on a
line, only those near x are summed: the time does not depend on the number of levels.
"""

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from softstair.kernels import reference
from softstair.kernels.bound import FEW_LEVELS, BoundStair
from softstair.noise import Logistic, Noise, Normal, Triangular, Uniform

BLOCK, MAX_THREADS = 1 << 17, 8
"""Elements of a block for each thread, and threads at most."""
MAX_WINDOW = 8
"""Sums of more thresholds take longer than the closed form of the reference, where there is one."""

Kernel = Callable[..., None]
"""(target, *blocks): fills a block of the result, in the dtype of computation."""


class Term(NamedTuple):
    """The term of one threshold, for a rise of 1: base + factor·shape.

    The sums are Σₖ rise·F((x − θₖ)/β) and Σₖ rise·μ((x − θₖ)/β)/β; base and factor are functions of
    1/β, and the shape alone is computed for each threshold.
    """

    shape: Callable[[Tensor, Tensor, float], None]
    """(distance, spare, 1/β): replaces the distances x − θ by their shapes."""
    factor: Callable[[float], float]
    reach: Callable[[float, float], float]
    """(β in spacings, −ln of the precision): how far thresholds matter beyond the nearest, in
    spacings."""
    base: Callable[[float], float] = lambda scale: 0.0
    vanishes: bool = False
    """Whether base + factor·shape is a difference, which must be exactly 0 outside the support."""


def _uniform_cdf(distance: Tensor, spare: Tensor, scale: float) -> None:
    half = Uniform.support / scale
    distance.clamp_(-half, half)


def _uniform_pdf(distance: Tensor, spare: Tensor, scale: float) -> None:
    # 1 from θ − h to θ + h, with the edges of reference.edge.
    half = Uniform.support / scale
    torch.ge(distance, -half * (1 + reference.EDGE), out=spare)
    torch.lt(distance, half * (1 - reference.EDGE), out=distance).mul_(spare)


def _triangular_cdf(distance: Tensor, spare: Tensor, scale: float) -> None:
    # c − c|c|/2, c the position within the support.
    _clamp_to_triangle(distance, scale)
    torch.abs(distance, out=spare)
    distance.addcmul_(distance, spare, value=-0.5 / _triangle_unit(scale))


def _triangular_pdf(distance: Tensor, spare: Tensor, scale: float) -> None:
    _clamp_to_triangle(distance, scale)
    distance.abs_()


def _clamp_to_triangle(distance: Tensor, scale: float) -> None:
    """Clamp to the support, in the triangle's unit."""
    unit, half = _triangle_unit(scale), Triangular.support / scale
    if unit != half:
        distance.mul_(1 / half)
    distance.clamp_(-unit, unit)


def _triangle_unit(scale: float) -> float:
    """Half the width of the support; narrow noise is scaled to 1, lest its square vanish."""
    half = Triangular.support / scale
    return half if half > 1e-15 else 1.0


def _normal_cdf(distance: Tensor, spare: Tensor, scale: float) -> None:
    distance.mul_(scale / math.sqrt(2)).erf_()


def _normal_pdf(distance: Tensor, spare: Tensor, scale: float) -> None:
    distance.mul_(scale * math.sqrt(0.5))
    # An exponential that underflows takes 50 times as long as one that does not.
    tiny = torch.finfo(distance.dtype).tiny
    distance.mul_(distance).neg_().clamp_(min=math.log(1.25 * tiny)).exp_()
    torch.threshold_(distance, 1.5 * tiny, 0.0)


def _logistic_cdf(distance: Tensor, spare: Tensor, scale: float) -> None:
    distance.mul_(scale * Logistic.rate).sigmoid_()


def _logistic_pdf(distance: Tensor, spare: Tensor, scale: float) -> None:
    # s(1 − s) with s = sigmoid(−|z|) keeps the tails that sigmoid(|z|) rounds to 1.
    distance.abs_().mul_(-scale * Logistic.rate).sigmoid_()
    distance.addcmul_(distance, distance, value=-1)


def _uniform_reach(width: float, precision: float) -> float:
    return Uniform.support * (1 + reference.EDGE) * width - 0.5


def _triangular_reach(width: float, precision: float) -> float:
    return Triangular.support * width - 0.5


def _normal_reach(width: float, precision: float) -> float:
    # exp(−(n² + n)/(2·width²)) of the density of the nearest threshold is left n further on.
    return 0.5 * (math.hypot(1, math.sqrt(8 * precision) * width) - 1)


def _logistic_reach(width: float, precision: float) -> float:
    return precision * width / Logistic.rate


CDF: dict[type[Noise], Term] = {
    Uniform: Term(_uniform_cdf, lambda s: 0.5 * s / Uniform.support, _uniform_reach, lambda s: 0.5),
    Triangular: Term(
        _triangular_cdf, lambda s: 1 / _triangle_unit(s), _triangular_reach, lambda s: 0.5
    ),
    Normal: Term(_normal_cdf, lambda s: 0.5, _normal_reach, lambda s: 0.5),
    Logistic: Term(_logistic_cdf, lambda s: 1.0, _logistic_reach),
}
PDF: dict[type[Noise], Term] = {
    Uniform: Term(_uniform_pdf, lambda s: 0.5 * s / Uniform.support, _uniform_reach),
    Triangular: Term(
        _triangular_pdf,
        lambda s: -s / Triangular.support / _triangle_unit(s),
        _triangular_reach,
        lambda s: s / Triangular.support,
        vanishes=True,
    ),
    Normal: Term(_normal_pdf, lambda s: s / math.sqrt(2 * math.pi), _normal_reach),
    Logistic: Term(_logistic_pdf, lambda s: s * Logistic.rate, _logistic_reach),
}
"""The slope under uniform noise is a stair itself, and mostly computed as one instead."""


def find_sum(
    table: Mapping[type[Noise], Term], bound: BoundStair, std: float
) -> tuple[Term, int | None] | None:
    """Return the term of a bound stair's noise, and how many thresholds on each side of the nearest
    matter (None: all are summed); None if the reference computes the sum."""
    term = table.get(type(bound.noise))
    if term is None or overflows(bound, max(abs(term.factor(1 / std)), 1 / std)):
        return None
    has_closed_form = reference.has_closed_form(bound)
    most = min(bound.count - 1, MAX_WINDOW if has_closed_form else bound.count)
    if bound.is_regular:
        precision = 2 - math.log(torch.finfo(bound.compute).eps)
        reach = term.reach(std / float(bound.spacing), precision) + bound.rounded.index_error
        if 2 * reach + 1 <= most:
            return term, max(0, math.ceil(reach))
    # Over many thresholds, rounding leaves more of a term that vanishes than a small slope has.
    is_rough = term.vanishes and bound.count >= FEW_LEVELS
    return None if has_closed_form or is_rough else (term, None)


def sum_of(term: Term, reach: int | None, x: Tensor, bound: BoundStair, is_value: bool) -> Kernel:
    """Return a kernel of Σₖ (qₖ − qₖ₋₁)·term((x − θₖ)/β), plus q₀ for a value, over the thresholds
    within ``reach`` of the nearest one."""
    mean, scale = float(bound.mean), 1 / float(bound.std)
    rises = [b - a for a, b in pairwise(bound.stair.levels)]
    if reach is not None:
        rises = rises[: 2 * reach + 1]
    terms = sorted(zip(rises, bound.rounded.thresholds, strict=False), reverse=True)
    largest = terms[0][0]  # the sum is in its units
    factor = term.factor(scale)
    offset = math.fsum(rises) * term.base(scale) + (bound.stair.levels[0] if is_value else 0.0)
    offset_tensor = torch.tensor(offset, dtype=bound.compute)
    noise_floor = (8 + len(rises)) * torch.finfo(bound.compute).eps * abs(offset)
    rows = scratch(2 if reach is None else 3, x, bound.compute)

    def sum_all(target: Tensor, block: Tensor, work: Tensor, spare: Tensor) -> None:
        for k, (rise, threshold) in enumerate(terms):
            term.shape(torch.sub(block, mean + threshold, out=work if k else target), spare, scale)
            if k:
                target.add_(work, alpha=rise / largest)

    def sum_near(target: Tensor, block: Tensor, work: Tensor, spare: Tensor, index: Tensor) -> None:
        line = bound.rounded.threshold_line
        assert line is not None
        assert reach is not None
        before = bound.rounded.thresholds[0] + (reach - 0.5) * line.unit
        torch.sub(block, mean, out=index).sub_(before).mul_(1 / line.unit).floor_()
        index.clamp_(0, bound.count - len(rises))
        target.zero_()
        for _ in rises:
            torch.sub(block, mean, out=work).sub_(line.evaluate(index, out=spare))
            term.shape(work, spare, scale)
            target.add_(work)
            index.add_(1)
        if is_value:  # thresholds below have the term 1; their number is added last, being large
            target.add_(index.sub_(len(rises)), alpha=1 / factor)

    add_up = sum_all if reach is None else sum_near

    def kernel(target: Tensor, block: Tensor) -> None:
        add_up(target, block, *rows[:, : len(block)])
        if offset:
            torch.add(offset_tensor, target, alpha=factor * largest, out=target)
        else:
            target.mul_(factor * largest)
        if term.vanishes:
            # What rounding leaves outside of the support is no slope; Adam would make one of it.
            torch.threshold_(target, noise_floor, 0.0)

    return kernel


def overflows(bound: BoundStair, factor: float) -> bool:
    """Whether the factor times the range of the levels overflows: a sum of zeros times that would
    be NaN, so :mod:`softstair.kernels.reference` takes it."""
    span = bound.stair.levels[-1] - bound.stair.levels[0]
    return span * abs(factor) > torch.finfo(bound.compute).max


def scratch(count: int, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``count`` rows for intermediate results of a block."""
    return torch.empty(count, min(block_size(), x.numel()), dtype=dtype)


def block_size() -> int:
    """Return how many elements a block has. Levels do not depend on it; a sigmoid of torch may, by
    an ulp."""
    return BLOCK * min(torch.get_num_threads(), MAX_THREADS)
