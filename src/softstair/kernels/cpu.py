"""The operator on a CPU, eagerly: blocks that stay in cache, and as few passes over each as can be.

An eager operation on a large tensor is a trip through memory, and a fresh result of 100 MB is tens
of thousands of page faults. Here x is cut into blocks, each is worked on in place, and nothing the
size of x is allocated but the result. Mean and std are read as Python numbers, which on a CPU costs
no synchronisation.

With a quantum per channel, a block is a number of whole channels, and what differs between channels
is in columns: tensors with a row for each channel. :func:`takes_channels` says for which stairs.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from softstair.kernels import reference
from softstair.kernels.bound import BoundStair, Scalar
from softstair.kernels.cpu_sums import (
    CDF,
    PDF,
    Kernel,
    block_size,
    find_sum,
    overflows,
    scratch,
    sum_of,
)
from softstair.noise import Noise, Normal, Uniform
from softstair.stair import Line, Stair

Limits = tuple[float, float]

SEARCH_POINTS, SEARCH_ROUNDS = 512, 6
MEETING = 4 * torch.finfo(torch.float32).eps
"""Supports of channels meet if their width differs from the spacing by less, relatively: modules
hold the std in float32."""


def value(x: Tensor, bound: BoundStair, forward: str, generator: torch.Generator | None) -> Tensor:
    """Return what :func:`softstair.kernels.reference.value` does, block by block."""
    if bound.quanta is not None:
        return _blockwise(_look_up(x, bound), bound.compute, x, columns=_columns(bound, forward))
    return _blockwise(_forward_kernel(x, bound, forward, generator), bound.compute, x)


def backward(grad: Tensor, x: Tensor, bound: BoundStair) -> Tensor:
    """Return the gradient times the slope of the expectation."""
    if bound.quanta is not None:
        return _channel_backward(grad, x, bound)
    mean, std = float(bound.mean), float(bound.std)
    if std < reference.smallest_std(bound.compute):
        return torch.where(x.isnan(), x, 0.0)
    slope: Kernel
    is_stair = isinstance(bound.noise, Uniform) and (
        not bound.is_line or _supports_meet(bound, std)
    )
    if is_stair and not overflows(bound, 1 / std):
        slope = _uniform_slope(x, bound, mean, std)
    elif (found := find_sum(PDF, bound, std)) is not None:
        slope = sum_of(*found, x, bound, False)
    else:
        slope = lambda out, x: out.copy_(reference.slope(x, bound))
    compares = type(bound.noise) is Uniform  # which loses NaN

    def kernel(target: Tensor, block: Tensor, gradient: Tensor) -> None:
        slope(target, block)
        target.mul_(gradient)
        if compares:
            _keep_nan(target, block)

    return _blockwise(kernel, bound.compute, x, grad)


def takes_channels(x: Tensor, bound: BoundStair, strategy: str) -> bool:
    """Return whether :func:`value` or, as the strategy "backward", :func:`backward` computes a
    stair with a quantum per channel.

    The stair is linear, and its channels lie one after another in memory. Noise is uniform and so
    narrow that σ is the mode; in the backward pass, neighbouring supports meet or are apart.
    """
    assert bound.quanta is not None
    order, shapes = _memory_order(x), (torch.Size(), bound.quanta.shape)
    are_rows = order is not None and order[0] == 0 and bound.stair.axis in (0, -x.dim())
    if not are_rows or not 0 < x[0].numel() <= block_size():
        return False
    is_exact = bound.is_regular and _is_exact(bound.stair, bound.compute)
    if not is_exact or strategy == "hard":
        return is_exact
    tensors = [value for value in (bound.mean, bound.std) if isinstance(value, Tensor)]
    if any(value.device != x.device or value.shape not in shapes for value in tensors):
        return False
    narrowest, widest = _support_widths(bound)
    are_apart = widest < 1 - 4 * max(reference.EDGE, bound.rounded.index_error)
    do_meet = narrowest >= 1 - MEETING and widest <= 1 + MEETING
    has_slope = narrowest > reference.EDGE and (are_apart or do_meet)
    fits = {"mode": widest <= 2, "backward": has_slope}.get(strategy, False)
    return fits and type(bound.noise) is Uniform


@lru_cache(maxsize=4096)
def _is_exact(stair: Stair, dtype: torch.dtype) -> bool:
    """Whether products of numbers and quanta in the dtype are levels and thresholds as rounded."""
    rounded, quanta = stair.rounded(dtype), torch.tensor(stair.quantum, dtype=torch.float64)
    for line in (rounded.level_line, rounded.threshold_line):
        # A short integer or half times 24 bits is exact in float64, so rounded once either way.
        if line is None or line.unit != 1 or (2 * line.first) % 1:
            return False
    in_range = bool(((quanta > 1e-20) & (quanta < 1e20)).all())
    return in_range and torch.equal(quanta.to(dtype).double(), quanta)


def _support_widths(bound: BoundStair) -> tuple[float, float]:
    """The narrowest and the widest support of uniform noise in any channel, in spacings."""
    width = 2 * Uniform.support * torch.as_tensor(bound.std, dtype=torch.float64) / bound.spacing
    return float(width.min()), float(width.max())


def _columns(bound: BoundStair, forward: str) -> list[Tensor]:
    """Return the quanta, and the means unless they are 0 or not used."""
    assert bound.quanta is not None
    quanta = bound.quanta.to(bound.compute).reshape(-1, 1)
    mean = torch.as_tensor(bound.mean, dtype=bound.compute).reshape(-1, 1)
    return [quanta] if forward == "hard" or not mean.any() else [quanta, mean.expand_as(quanta)]


def _forward_kernel(
    x: Tensor, bound: BoundStair, forward: str, generator: torch.Generator | None
) -> Kernel:
    """Return what the forward pass does with a block."""
    noise, mean, std = bound.noise, float(bound.mean), float(bound.std)
    if forward == "hard":
        return _look_up(x, bound)
    if std < reference.smallest_std(bound.compute):
        return _look_up(x, bound, shift=mean)
    if forward == "random" and not noise.has_ppf:
        fill = _stream(noise, 0.0, 1.0, bound.compute, generator)
        return lambda out, x: out.copy_(
            reference.sample(x - mean, bound, 1 / std, fill(torch.empty_like(x)))
        )
    if forward == "random":
        return _look_up(x, bound, draw=_stream(noise, mean, std, bound.compute, generator))
    if forward == "expectation" and isinstance(noise, Uniform) and _supports_meet(bound, std):
        return _expectation(_ramp(bound, mean, std), bound)
    if forward == "expectation":
        if (found := find_sum(CDF, bound, std)) is not None:
            return _expectation(sum_of(*found, x, bound, True), bound)
        return lambda out, x: out.copy_(reference.expectation(x - mean, bound, 1 / std))
    spacing = bound.stair.spacing
    if type(noise) not in CDF or spacing is None:
        return lambda out, x: out.copy_(reference.mode(x - mean, bound, 1 / std))
    return _look_up(x, bound, mode_limits(bound, spacing[0], std), shift=mean)


def _stream(
    noise: Noise, mean: float, std: float, dtype: torch.dtype, generator: torch.Generator | None
) -> Callable[[Tensor], Tensor]:
    """Return a function that fills a flat tensor with the next draws of mean + std·Z, or with
    uniform numbers for a family that cannot invert its cdf.

    NumPy's numbers are two to three times cheaper than torch's; torch's generator seeds them.
    """
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    bits = np.random.Generator(np.random.SFC64(seed))
    numpy_dtype = np.float64 if dtype == torch.float64 else np.float32

    def draw(target: Tensor) -> Tensor:
        if isinstance(noise, Normal):
            bits.standard_normal(out=target.numpy(), dtype=numpy_dtype)
            return target.mul_(std).add_(mean)
        bits.random(out=target.numpy(), dtype=numpy_dtype)
        if not noise.has_ppf:
            return target
        if isinstance(noise, Uniform):
            half = std * noise.support
            return target.mul_(2 * half).add_(mean - half)
        target.clamp_(min=reference.SMALLEST_UNIFORM)
        return target.copy_(noise.ppf(target)).mul_(std).add_(mean)

    return draw


def _expectation(total: Kernel, bound: BoundStair) -> Kernel:
    low, high = bound.rounded.levels[0], bound.rounded.levels[-1]

    def kernel(target: Tensor, block: Tensor) -> None:
        total(target, block)
        target.clamp_(low, high)  # which rounding may exceed

    return kernel


def _supports_meet(bound: BoundStair, std: float) -> bool:
    """Whether thresholds are on a line, and neighbouring supports of uniform noise just meet."""
    if not bound.is_regular:
        return False
    spacing, rounding = float(bound.spacing), 4 * torch.finfo(bound.compute).eps
    return abs(2 * Uniform.support * std - spacing) <= rounding * spacing


def _ramp(bound: BoundStair, mean: float, std: float) -> Kernel:
    """A line from the lowest to the highest level, between the outer edges of the supports."""
    half = Uniform.support * std
    first, last = bound.rounded.thresholds[0] - half, bound.rounded.thresholds[-1] + half
    low, high = bound.stair.levels[0], bound.stair.levels[-1]

    def kernel(target: Tensor, block: Tensor) -> None:
        torch.sub(block, mean + first, out=target).clamp_(0.0, last - first)
        target.mul_((high - low) / (last - first)).add_(low)

    return kernel


def _uniform_slope(x: Tensor, bound: BoundStair, mean: float, std: float) -> Kernel:
    """Σₖ (qₖ − qₖ₋₁)·χ[θₖ − h, θₖ + h)(x)/(2h): up at one edge of each support, down at the other.
    Where supports meet, as at the default std, the two steps cancel and cost nothing."""
    half, at = Uniform.support * std, [mean + threshold for threshold in bound.rounded.thresholds]
    rises = [b - a for a, b in pairwise(bound.stair.levels)]
    if bound.stair.spacing is not None:  # equal but for rounding: where supports meet, they cancel
        rises = [bound.stair.spacing[1]] * bound.count
    supports = list(zip(at, at, rises, strict=True))  # from and to which threshold, and the rise
    if _supports_meet(bound, std):
        supports = [(at[0], at[-1], math.fsum(rises) / bound.count)]
    steps: list[tuple[float, float]] = []
    for first, last, rise in supports:
        low = _round_up(first - half * (1 + reference.EDGE), bound.compute)
        high = _round_up(last + half * (1 - reference.EDGE), bound.compute)
        if high <= last:  # a support narrower than the spacing of the dtype holds `last` alone
            high = _round_up(math.nextafter(last, math.inf), bound.compute)
        density = rise / (2 * half)
        for edge, step in ((low, density), (high, -density)):
            if (edge, -step) in steps:
                steps.remove((edge, -step))
            else:  # not added to another: beyond both edges a support must leave exactly nothing
                steps.append((edge, step))
    ups, downs = (sorted((abs(s), edge) for edge, s in steps if s * way > 0) for way in (1, -1))
    if not ups:  # the supports are so narrow that no number of the dtype lies in any of them
        return lambda out, x: out.zero_()
    limits = torch.tensor([low for _, low in ups], dtype=bound.compute)
    below = torch.nextafter(limits, torch.full_like(limits, -math.inf)).tolist()
    ends = list(zip(below, (high for _, high in downs), strict=True))
    inside, row = torch.tensor(ups[0][0], dtype=bound.compute), scratch(1, x, bound.compute)[0]
    # The first argument where the second lies between the ends, elsewhere 0: in one pass.
    select = torch.ops.aten.hardtanh_backward.grad_input

    def kernel(target: Tensor, block: Tensor) -> None:
        density, work = inside.expand_as(block), row[: len(block)]
        select(density, block, *ends[0], grad_input=target)
        for (rise, _), between in zip(ups[1:], ends[1:], strict=True):
            select(density, block, *between, grad_input=work)
            target.add_(work, alpha=rise / ups[0][0])

    return kernel


def _channel_backward(grad: Tensor, x: Tensor, bound: BoundStair) -> Tensor:
    """Return the gradient times ε·χ[low, high)(x)/(2h): where supports meet, from the lowest edge
    to the highest; else from edge to edge of the nearest threshold's support."""
    assert bound.quanta is not None
    quanta = bound.quanta.reshape(-1, 1)
    half = Uniform.support * torch.as_tensor(bound.std, dtype=torch.float64).reshape(-1, 1)
    are_apart = _support_widths(bound)[1] < 1 - MEETING
    thresholds = (0.0,) if are_apart else bound.rounded.thresholds
    low = quanta * thresholds[0] - half * (1 + reference.EDGE)
    high = quanta * thresholds[-1] + half * (1 - reference.EDGE)
    rows = scratch(2, x, bound.compute)

    def kernel(target: Tensor, x: Tensor, gradient: Tensor, *columns: Tensor) -> None:
        block, (low, high, density, quanta, *shift) = x, columns
        work, moved = rows[:, : block.numel()].view(2, *block.shape)
        if shift:
            block = torch.sub(block, *shift, out=moved)
        if are_apart:
            nearest = _nearest_threshold(target, work, block, bound, quanta)
            block = torch.sub(block, nearest, out=moved)
        torch.ge(block, low, out=target).mul_(torch.lt(block, high, out=work))
        target.mul_(density).mul_(gradient)
        _keep_nan(target, x)

    own = [column.to(bound.compute) for column in (low, high, quanta / (2 * half))]
    columns = [*own, *_columns(bound, "backward")]
    return _blockwise(kernel, bound.compute, x, grad, columns=columns)


def _round_up(value: float, dtype: torch.dtype) -> float:
    """Return the smallest number of the dtype that is not below the value."""
    near = torch.tensor(value, dtype=dtype)
    if float(near) < value:
        near = torch.nextafter(near, torch.full_like(near, math.inf))
    return float(near)


def mode_limits(bound: BoundStair, spacing: float, std: float) -> Limits:
    """Return where the low end level stops being the mode and where the high one starts.

    Under symmetric, uni-modal noise and bins of one width w, the likeliest level is the one whose
    bin holds x, unless an end is likelier: p₀ = F(−d/β), with d the distance from the first
    threshold, against F(f/β) − F((f − w)/β), with f the distance from the bin's own. The families
    here are log-concave, so the likeliest level never falls as x grows, and the low end wins
    exactly up to one margin beyond its threshold (the high end, by symmetry, as far before its
    own): the mode is σ with its thresholds moved inwards to that margin. For uniform noise of
    half-width h the margin is max(0, h − w); for the others it is found by search and remembered.

    Limits are for centred x. Probabilities closer than :func:`softstair.kernels.reference.tie` are
    equal, and the end does not win.
    """
    first, last = bound.rounded.thresholds[0], bound.rounded.thresholds[-1]
    middle, half = 0.5 * (first + last), 0.5 * (last - first)
    share = _margin(bound.noise, spacing / std, half / std, reference.tie(bound.compute))
    margin = share * half
    return (middle, middle) if share >= 1 else (first + margin, last - margin)


@lru_cache(maxsize=4096)
def _margin(noise: Noise, width: float, half: float, tie: float) -> float:
    """The margin as a share of ``half``, where both ends meet; widths in standard deviations."""
    if half == 0:
        return 1.0
    if isinstance(noise, Uniform):
        return max(0.0, noise.support * (1 - 2 * tie) - width) / half
    low, high = 0.0, half
    for _ in range(SEARCH_ROUNDS):
        distance = torch.linspace(low, high, SEARCH_POINTS + 1, dtype=torch.float64)
        own = distance - (distance / width).floor() * width
        end = noise.cdf(-distance)
        # 1 − the two tails, each exact, rather than a difference of two numbers near 1.
        inside = 1 - noise.cdf(-own) - noise.cdf(own - width)
        wins = int((end > inside + tie).sum())
        if wins == 0:
            return low / half
        if wins > SEARCH_POINTS:
            return high / half
        low, high = float(distance[wins - 1]), float(distance[wins])
    return low / half


def _look_up(
    x: Tensor,
    bound: BoundStair,
    limits: Limits = (-math.inf, math.inf),
    shift: float = 0.0,
    draw: Callable[[Tensor], Tensor] | None = None,
) -> Kernel:
    """The level of x − shift, or of x less a draw; the limits are those of the mode."""
    rows = scratch(2, x, bound.compute)
    table = torch.tensor(bound.rounded.levels, dtype=bound.compute)

    def kernel(target: Tensor, block: Tensor, quanta: Scalar = 1.0, shift: Scalar = shift) -> None:
        work, moved = rows[:, : block.numel()].view(2, *block.shape)
        if draw is not None:
            block = torch.sub(block, draw(work), out=moved)
        elif isinstance(shift, Tensor) or shift:
            block = torch.sub(block, shift, out=moved)
        _index(target, work, block, bound, limits, quanta)
        if (line := bound.rounded.level_line) is not None and line.unit_parts:
            _evaluate(line, work.copy_(target), target, quanta)
        else:
            torch.take(table, target.nan_to_num_(0.0).long(), out=target)
        _keep_nan(target, block)

    return kernel


def _keep_nan(target: Tensor, block: Tensor) -> None:
    """Write the NaN of a block to its result. One sum tells whether there is one; asking each
    element costs as much again."""
    if block.sum().isnan():
        target.copy_(torch.where(block.isnan(), block, target))


def _index(
    target: Tensor, work: Tensor, x: Tensor, bound: BoundStair, limits: Limits, quanta: Scalar
) -> None:
    """#{k : x ≥ θₖ}, every threshold clamped to the limits."""
    low, high = limits
    if bound.is_regular:
        # Those below the nearest, and the nearest if x is not below it.
        nearest = _nearest_threshold(target, work, x, bound, quanta)
        target.add_(torch.ge(x, nearest, out=work))
    elif bound.is_line or (bound.is_table and math.isinf(low)):
        target.copy_(bound.index(x))
    else:
        first, *others = (min(max(threshold, low), high) for threshold in bound.rounded.thresholds)
        torch.ge(x, first, out=target)
        for threshold in others:
            target.add_(torch.ge(x, threshold, out=work))
    if bound.is_line and math.isfinite(low):
        target.mul_(torch.ge(x, low, out=work))
        target.add_(torch.ge(x, high, out=work), alpha=bound.count).clamp_(max=bound.count)


def _nearest_threshold(
    target: Tensor, work: Tensor, x: Tensor, bound: BoundStair, quanta: Scalar
) -> Tensor:
    """Return the regular threshold nearest to x, in ``work``, and its number in ``target``."""
    line, first = bound.rounded.threshold_line, bound.rounded.thresholds[0]
    assert line is not None
    torch.sub(x, (first - 0.5 * line.unit) * quanta, out=target)
    target.mul_(1 / (line.unit * quanta)).floor_().clamp_(0, bound.count - 1)
    return _evaluate(line, target, work, quanta)


def _evaluate(line: Line, index: Tensor, out: Tensor, quanta: Scalar) -> Tensor:
    """Write the value of each n in ``index`` to ``out``, times the quanta of channels."""
    line.evaluate(index, out=out)
    return out.mul_(quanta) if isinstance(quanta, Tensor) else out


def _memory_order(x: Tensor) -> list[int] | None:
    """Return the dimensions of x from the outermost in memory, or None if elements have gaps."""
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    return order if x.permute(order).is_contiguous() else None


def _blockwise(
    kernel: Kernel, compute: torch.dtype, x: Tensor, *others: Tensor, columns: Sequence[Tensor] = ()
) -> Tensor:
    """Return the kernel's results over corresponding blocks, in the memory layout of x: flat ones,
    or rows of the channels that the columns have."""
    order = _memory_order(x)
    if order is None:
        x, order = x.contiguous(), list(range(x.dim()))
    result = torch.empty_like(x)
    shape = (len(columns[0]), -1) if columns else (-1,)
    flat = [tensor.permute(order).reshape(shape) for tensor in (result, x, *others)]
    size = block_size() // (x[0].numel() if columns else 1)
    for start in range(0, len(flat[0]), size):
        target, *blocks = (tensor[start : start + size] for tensor in (*flat, *columns))
        if target.dtype == compute:
            kernel(target, *blocks)
        else:
            wide = torch.empty_like(target, dtype=compute)
            kernel(wide, *(block.to(compute) for block in blocks))
            target.copy_(wide)
    return result
