"""The operator on a CPU, eagerly: blocks that stay in cache, and as few passes over each as can be.

An eager operation on a large tensor is a trip through memory, and a fresh result of 100 MB is tens
of thousands of page faults. Here x is cut into blocks, each is worked on in place, and nothing the
size of x is allocated but the result. The noise is read as Python numbers, which on a CPU costs no
synchronisation.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from softstair.kernels import draws, equidistant, reference
from softstair.kernels.modes import mode_limits
from softstair.kernels.rungs import FEW_LEVELS, Rungs
from softstair.kernels.terms import CDF, PDF, Term
from softstair.noise import Noise, Uniform

BLOCK = 1 << 20

Kernel = Callable[..., None]
"""(target, *blocks): fills a block of the result, in the working dtype, from the inputs'."""


def value(
    x: Tensor,
    rungs: Rungs,
    noise: Noise,
    mean: float,
    std: float,
    forward: str,
    generator: torch.Generator | None,
) -> Tensor:
    """The forward pass of :mod:`softstair.kernels.reference`, block by block."""
    kernel = _kernel(x, rungs, noise, mean, std, forward, generator)
    return _blockwise(kernel, rungs.working, x)


def pull(grad: Tensor, x: Tensor, rungs: Rungs, noise: Noise, mean: float, std: float) -> Tensor:
    """The backward pass: the gradient times the slope of the expectation."""
    if std < reference.smallest_std(rungs.working):
        return torch.zeros_like(x)
    slope: Kernel = lambda out, x: out.copy_(reference.slope(x, rungs, noise, mean, std))
    term = None if _closed_form(rungs, noise) else PDF.get(type(noise))
    if term is not None and not (term.vanishes and len(rungs.stair) > FEW_LEVELS):
        if not _overflows(rungs, term.factor(1 / std)):
            slope = _sum_of(term, x, rungs, 0.0, mean, std)
    elif isinstance(noise, Uniform) and not (rungs.is_line or _overflows(rungs, 1 / std)):
        slope = _uniform_slope(x, rungs, mean, std)

    def kernel(target: Tensor, block: Tensor, gradient: Tensor) -> None:
        slope(target, block)
        target.mul_(gradient)

    return _blockwise(kernel, rungs.working, x, grad)


def _kernel(
    x: Tensor,
    rungs: Rungs,
    noise: Noise,
    mean: float,
    std: float,
    forward: str,
    generator: torch.Generator | None,
) -> Kernel:
    """What the forward pass does with a block."""
    if forward == "hard":
        return _look_up(x, rungs)
    if std < reference.smallest_std(rungs.working):
        return _look_up(x, rungs, shift=mean)
    if forward == "random" and not noise.has_ppf:
        fill = draws.stream(noise, 0.0, 1.0, rungs.working, generator)
        return lambda out, x: out.copy_(
            reference.sample(x - mean, rungs, noise, 1 / std, fill(torch.empty_like(x)))
        )
    if forward == "random":
        return _look_up(x, rungs, draw=draws.stream(noise, mean, std, rungs.working, generator))
    if forward == "expectation":
        term = None if _closed_form(rungs, noise) else CDF.get(type(noise))
        if term is not None and not _overflows(rungs, term.factor(1 / std)):
            return _expectation(_sum_of(term, x, rungs, rungs.stair.levels[0], mean, std), rungs)
        return lambda out, x: out.copy_(reference.expectation(x - mean, rungs, noise, 1 / std))
    spacing = rungs.stair.spacing
    if type(noise) not in CDF or spacing is None:
        return lambda out, x: out.copy_(reference.mode(x - mean, rungs, noise, 1 / std))
    first, last = rungs.rounded.thresholds[0], rungs.rounded.thresholds[-1]
    tie = reference.tie(rungs.working)
    return _look_up(x, rungs, mode_limits(first, last, spacing[0], noise, std, tie), shift=mean)


def _expectation(total: Kernel, rungs: Rungs) -> Kernel:
    low, high = rungs.rounded.levels[0], rungs.rounded.levels[-1]

    def kernel(target: Tensor, block: Tensor) -> None:
        total(target, block)
        target.clamp_(low, high)  # as reference.within_levels

    return kernel


def _sum_of(term: Term, x: Tensor, rungs: Rungs, start: float, mean: float, std: float) -> Kernel:
    """start + Σₖ (qₖ − qₖ₋₁)·term((x − θₖ)/β)."""
    rises = [b - a for a, b in pairwise(rungs.stair.levels)]
    factor = term.factor(1 / std)
    start += math.fsum(rises) * term.base(1 / std)
    scratch = _scratch(2, x, rungs.working)
    first = torch.tensor(start, dtype=rungs.working)
    noise_floor = (8 + len(rises)) * torch.finfo(rungs.working).eps * abs(start)

    def kernel(target: Tensor, block: Tensor) -> None:
        work, spare = scratch[:, : len(block)]
        for k, (threshold, rise) in enumerate(zip(rungs.rounded.thresholds, rises, strict=True)):
            term.shape(work if k else target, spare, block, mean + threshold, 1 / std)
            if k:
                target.add_(work, alpha=rise / rises[0])
        if start:
            torch.add(first, target, alpha=factor * rises[0], out=target)
        else:
            target.mul_(factor * rises[0])
        if term.vanishes:
            # What rounding leaves outside of the support is no slope; Adam would make one of it. Of
            # many thresholds it leaves so much that a slope might go with it: they go elsewhere.
            torch.threshold_(target, noise_floor, 0.0)

    return kernel


def _uniform_slope(x: Tensor, rungs: Rungs, mean: float, std: float) -> Kernel:
    """Σₖ (qₖ − qₖ₋₁)·χ[θₖ − h, θₖ + h)(x)/(2h): up at one edge of each support, down at the other.
    Where supports meet, as at the default std, the two steps cancel and cost nothing."""
    half = Uniform.support * std
    steps: dict[float, float] = {}
    for k, threshold in enumerate(rungs.rounded.thresholds):
        density = (rungs.stair.levels[k + 1] - rungs.stair.levels[k]) / (2 * half)
        at = mean + threshold
        low = _round_up(at - half * (1 + reference.EDGE), rungs.working)
        high = _round_up(at + half * (1 - reference.EDGE), rungs.working)
        if high <= at:  # a support narrower than the spacing of the dtype holds `at` alone
            high = _round_up(math.nextafter(at, math.inf), rungs.working)
        steps[low] = steps.get(low, 0.0) + density
        steps[high] = steps.get(high, 0.0) - density
    largest = max(map(abs, steps.values()))
    kept = [step for step in steps.items() if abs(step[1]) > 1e-9 * largest]
    if not kept:  # the supports are so narrow that no number of the dtype lies in any of them
        return lambda out, x: out.zero_()
    (first, rise), *others = kept
    scratch = _scratch(1, x, rungs.working)

    def kernel(target: Tensor, block: Tensor) -> None:
        work = scratch[0, : len(block)]
        torch.ge(block, first, out=target).mul_(rise)
        for edge, step in others:
            target.add_(torch.ge(block, edge, out=work), alpha=step)

    return kernel


def _round_up(value: float, dtype: torch.dtype) -> float:
    """The smallest number of the dtype not below the value: x ≥ the one iff x ≥ the other."""
    near = torch.tensor(value, dtype=dtype)
    if float(near) < value:
        near = torch.nextafter(near, torch.full_like(near, math.inf))
    return float(near)


def _look_up(
    x: Tensor,
    rungs: Rungs,
    limits: tuple[float, float] = (-math.inf, math.inf),
    shift: float = 0.0,
    draw: Callable[[Tensor], Tensor] | None = None,
) -> Kernel:
    """The level of x − shift, or of x less a draw; the limits are those of the mode."""
    scratch = _scratch(2, x, rungs.working)
    table = torch.tensor(rungs.rounded.levels, dtype=rungs.working)

    def kernel(target: Tensor, block: Tensor) -> None:
        work, moved = scratch[:, : len(block)]
        if draw is not None:
            block = torch.sub(block, draw(work), out=moved)
        elif shift:
            block = torch.sub(block, shift, out=moved)
        _index(target, work, block, rungs, limits)
        if (line := rungs.rounded.level_line) is not None and line.native:
            target.add_(line.first).mul_(line.unit)
        else:
            torch.take(table, target.nan_to_num_(0.0).long(), out=target)
        # One sum tells whether there is a NaN to keep; asking each element costs as much again.
        if block.sum().isnan():
            target.copy_(torch.where(block.isnan(), block, target))

    return kernel


def _index(
    target: Tensor, work: Tensor, x: Tensor, rungs: Rungs, limits: tuple[float, float]
) -> None:
    """#{k : x ≥ θₖ}, every threshold kept between the limits."""
    low, high = limits
    if rungs.is_line:
        target.copy_(rungs.index(x))
        if math.isfinite(low):
            target.mul_(torch.ge(x, low, out=work))
            target.add_(torch.ge(x, high, out=work), alpha=rungs.count).clamp_(max=rungs.count)
        return
    if rungs.is_table and math.isinf(low):
        target.copy_(rungs.index(x))
        return
    first, *others = (min(max(threshold, low), high) for threshold in rungs.rounded.thresholds)
    torch.ge(x, first, out=target)
    for threshold in others:
        target.add_(torch.ge(x, threshold, out=work))


def _closed_form(rungs: Rungs, noise: Noise) -> bool:
    return rungs.is_line and equidistant.knows(noise)


def _overflows(rungs: Rungs, factor: float) -> bool:
    """Whether the factor times the range of the levels is too large for the working dtype; a sum
    of zeros times that would be NaN, so :mod:`softstair.kernels.reference` takes it."""
    span = rungs.stair.levels[-1] - rungs.stair.levels[0]
    return span * abs(factor) > torch.finfo(rungs.working).max


def _scratch(count: int, x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, min(BLOCK, x.numel()), dtype=dtype)


def _blockwise(kernel: Kernel, working: torch.dtype, x: Tensor, *others: Tensor) -> Tensor:
    """The kernel's results over corresponding flat blocks of the tensors, laid out as x is."""
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    if not x.permute(order).is_contiguous():
        x, order = x.contiguous(), list(range(x.dim()))
    result = torch.empty_like(x)
    flat = [tensor.permute(order).reshape(-1) for tensor in (result, x, *others)]
    for start in range(0, x.numel(), BLOCK):
        target, *blocks = (tensor[start : start + BLOCK] for tensor in flat)
        if target.dtype == working:
            kernel(target, *blocks)
        else:
            wide = torch.empty_like(target, dtype=working)
            kernel(wide, *(block.to(working) for block in blocks))
            target.copy_(wide)
    return result
