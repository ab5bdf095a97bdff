"""The evaluator: a stair and its noise in scalars, and both passes in float32 on these.

A kernel evaluates one stair σ under one noise at millions of x. :func:`prepare` and its parts read
the stair from its ``table`` in memory (:mod:`softstair.kernels.triton.general` describes the
layout) and the noise from its mean and std, and return scalars, which a GPU keeps in registers:

    prepared = (mean, std, 1/std, stair, limits)

- ``stair`` has two forms. With up to ``FEW`` thresholds it is (thresholds, levels, rises), each a
  tuple of scalars. More thresholds must be a line, that is, equally spaced like their levels:
  (thresholds, levels, window), which :func:`prepare_line` describes.
- ``limits`` is (low, high). Only the mode, the likeliest level, reads it: under symmetric,
  log-concave noise the mode is σ with its thresholds clamped to (low, high).
  :func:`softstair.kernels.cpu.mode_limits` explains why.

An element then costs a few instructions per threshold and reads nothing from memory but x. A Dirac
is noise whose std is too small to divide by. The element-wise operator calls :func:`prepare` at the
start of each program; fused layers read what another room prepared, a row a layer.

``SELECT`` says how NaN is kept: by a selection, with which the fused kernels need fewer registers
(173 instead of 242), or by a sum, with which the element-wise ones do (96 instead of 116 for the
mode of 16 levels).
"""

import triton
import triton.language as tl

from softstair.kernels.triton import line
from softstair.kernels.triton.distributions import (
    IS_CUDA,
    LOG2_E,
    RATE,
    SQRT3,
    SQRT6,
    UNIFORM_DENSITY,
    bounded_exp2,
    centred_cdf,
    clamp,
    nan_else,
    pdf_scale,
    ppf,
    scaled_pdf,
    significand,
    tail,
    uniform,
    units_per_std,
)
from softstair.kernels.triton.general import EDGE, FEW, inverse, is_dirac, nan_bits

__all__ = ["mode_limits", "prepare", "prepare_few", "prepare_line", "slope", "support", "value"]

TIE = tl.constexpr(8 * 1.1920928955078125e-07)
"""Probabilities that differ by less than this, 8 ulp of 1, count as equal."""
POINTS = tl.constexpr(128)
"""Distances that are compared in one round of the search in :func:`_margin`."""


@triton.jit
def prepare(table, mean, std, COUNT: tl.constexpr, FAMILY: tl.constexpr, FORWARD: tl.constexpr):
    """Return ``prepared``; FORWARD is the forward strategy, or "slope" for the backward pass."""
    if COUNT <= FEW:
        stair = prepare_few(table, COUNT)
    else:
        stair = prepare_line(table, mean, std, COUNT, FAMILY, FORWARD == "slope")
    limits = (mean, mean)  # placeholders: only the mode reads limits
    if FORWARD == "mode":
        limits = mode_limits(table, std, COUNT, FAMILY)
    return mean, std, inverse(std), stair, limits


@triton.jit
def prepare_few(table, COUNT: tl.constexpr):
    """Load (thresholds, levels, rises), each a tuple of scalars."""
    thresholds, levels = _scalars(table, COUNT), _scalars(table + COUNT, COUNT + 1)
    return thresholds, levels, _scalars(table + 2 * COUNT + 1, COUNT)


@triton.jit
def _scalars(pointer, COUNT: tl.constexpr):
    values = (tl.load(pointer),)
    for k in tl.static_range(1, COUNT):
        values = values + (tl.load(pointer + k),)  # type: ignore[assignment]  # noqa: RUF005
    return values


@triton.jit
def prepare_line(table, mean, std, COUNT: tl.constexpr, FAMILY: tl.constexpr, SLOPE: tl.constexpr):
    """Return (thresholds, levels, window) for :mod:`softstair.kernels.triton.line`.

    A line is computed instead of loaded. Threshold n, counted from 0, is (n + first)·unit, with an
    integer or half-integer ``first``; level n is (n + first)·rise, with another ``first``.

    - thresholds: (first, unit, 1/unit, rounding error of unit).
    - levels: (first, rise, lowest level, highest level, rounding error of rise).
    - window: (terms, scale, shift, last_start, sharp, step, terms/2). Sums run over the thresholds
      that the noise reaches from x only: ``terms`` neighbours, the first of which has the number
      round(last_start·clamp(x·scale + shift, 0, 1)). A distance times ``sharp`` is in the units of
      :mod:`softstair.kernels.triton.distributions`, and ``step`` is ``unit`` times ``sharp``.
    """
    unit, rise = tl.load(table + 3 * COUNT + 1), tl.load(table + 2 * COUNT + 1)
    rise_rest, unit_rest = tl.load(table + 3 * COUNT + 2), tl.load(table + 3 * COUNT + 3)
    lowest, highest = tl.load(table + COUNT), tl.load(table + 2 * COUNT)
    first = _in_units(tl.load(table), unit)
    thresholds = (first, unit, 1.0 / unit, unit_rest)
    levels = (_in_units(lowest, rise), rise, lowest, highest, rise_rest)
    # Any finite number will do for a Dirac: its terms are not used, or multiplied by 0.
    sharp = tl.where(is_dirac(std), 1.0, inverse(std)) * units_per_std(FAMILY, SLOPE)
    terms = _window_size(std, unit, COUNT, FAMILY, SLOPE)
    last_start = COUNT - terms
    per_start = 1.0 / tl.maximum(last_start, 1.0)
    scale = per_start / unit
    shift = -(first + 0.5 * (terms - 1.0)) * per_start - mean * scale
    window = (terms.to(tl.int32), scale, shift, last_start, sharp, unit * sharp, 0.5 * terms)
    return thresholds, levels, window


@triton.jit
def _in_units(value, unit):
    """value/unit to the nearest ½: a line begins at an integer or half-integer number of units."""
    return tl.floor(2.0 * (value / unit) + 0.5) * 0.5


@triton.jit
def _window_size(std, unit, COUNT: tl.constexpr, FAMILY: tl.constexpr, SLOPE: tl.constexpr):
    """Return how many neighbouring thresholds the noise reaches from any x, from 1 to COUNT.

    ``reach`` is the end of the support, in standard deviations. Unbounded noise is cut off where
    2·10⁻⁸ of a rise is left (for SLOPE, of the largest slope). A size that exceeds an integer by
    less than 10⁻⁴ is rounded down.
    """
    if FAMILY == "uniform":
        reach = SQRT3
    elif FAMILY == "triangular":
        reach = SQRT6
    elif FAMILY == "normal":
        reach = 5.9 if SLOPE else 5.5
    else:
        reach = 10.5 if SLOPE else 9.8
    terms = tl.ceil(std * (2.0 * reach) / unit - 1e-4)
    return tl.minimum(tl.maximum(terms, 1.0), COUNT * 1.0)


@triton.jit
def mode_limits(table, std, COUNT: tl.constexpr, FAMILY: tl.constexpr):
    """Return (low, high): the end thresholds, moved inwards by the margin of the mode."""
    low, high = tl.load(table), tl.load(table + COUNT - 1)
    margin = low * 0.0
    if COUNT > 1:
        margin = _margin(low, high, tl.load(table + 3 * COUNT + 1), std, FAMILY)
    return low + margin, high - margin


@triton.jit
def _margin(first, last, spacing, std, FAMILY: tl.constexpr):
    """Return the margin of the mode, at most half of the distance between first and last threshold.

    For x above the first threshold by less than the margin, the lowest level is likelier than the
    level of the bin that contains x; by symmetry, the same holds for the highest level below the
    last threshold. Uniform noise has a closed form. For others, each round of a search compares
    POINTS = 2⁷ distances and adds seven bits to the margin.
    """
    half_length = 0.5 * (last - first)
    if FAMILY == "uniform":
        margin = tl.maximum(std * (SQRT3 * (1 - 2 * TIE)) - spacing, 0.0)
    else:
        scale = inverse(std)
        point = tl.arange(1, POINTS + 1).to(tl.float32)
        margin, step = half_length * 0.0, half_length * (1 / POINTS)
        for _ in tl.static_range(4):
            distance = margin + point * step
            within_bin = distance - tl.floor(distance / spacing) * spacing
            end_probability = tail(distance * scale, FAMILY)
            own_probability = 1.0 - tail(within_bin * scale, FAMILY)
            own_probability -= tail((spacing - within_bin) * scale, FAMILY)
            end_wins = end_probability > own_probability + TIE
            margin += tl.sum(end_wins.to(tl.float32)) * step
            step *= 1 / POINTS
    return tl.where(is_dirac(std), 0.0, tl.minimum(margin, half_length))


@triton.jit
def value(
    x, prepared, word,
    COUNT: tl.constexpr, FAMILY: tl.constexpr, FORWARD: tl.constexpr, SELECT: tl.constexpr,
):  # fmt: skip
    """The forward pass on a block of x in float32; ``word`` is random bits, for random alone."""
    mean, std, _, stair, _ = prepared
    if FORWARD == "hard":
        result = _keep_nan(x, _hard(x, stair, COUNT), 0.0, SELECT)
    elif FORWARD == "random":
        result = _random(x, prepared, word, COUNT, FAMILY, SELECT)
    elif FORWARD == "mode":
        result = _keep_nan(x, _mode(x - mean, prepared, COUNT), mean, SELECT)
    else:
        tl.static_assert(FORWARD == "expectation")
        # One branch for the whole block: soft noise does not pay for the look-up.
        if is_dirac(std):
            result = _keep_nan(x, _hard(x - mean, stair, COUNT), mean, SELECT)
        elif COUNT <= FEW:
            result = _expectation(x, prepared, COUNT, FAMILY)
        else:
            result = line.expectation(x, stair, mean, std, COUNT, FAMILY)
        if FAMILY == "uniform":
            result += nan_else(x, mean - mean)
    return result


@triton.jit
def slope(x, prepared, COUNT: tl.constexpr, FAMILY: tl.constexpr):
    """d/dx E[σ(x − ν)] on a block of x in float32; 0 for a Dirac."""
    mean, std, scale, stair, _ = prepared
    if FAMILY == "uniform":
        total = _uniform_slope(x, prepared, COUNT)
    elif COUNT <= FEW:
        thresholds, _, rises = stair
        factor = scale * pdf_scale(FAMILY)
        # Any finite number will do for a Dirac, since the factor is 0.
        sharp = tl.where(is_dirac(std), 1.0, scale) * units_per_std(FAMILY, True)
        total = tl.zeros_like(x)
        for k in tl.static_range(COUNT):
            z = ((x - mean) - thresholds[k]) * sharp
            total += (rises[k] * factor) * scaled_pdf(z, FAMILY)
    else:
        _, rise, _, _, _ = stair[1]
        factor = scale * pdf_scale(FAMILY) * rise
        total = line.slope(x, stair, mean, factor, FAMILY)
    return total


@triton.jit
def _uniform_slope(x, prepared, COUNT: tl.constexpr):
    mean, std, scale, stair, _ = prepared
    density = scale * UNIFORM_DENSITY
    if COUNT <= FEW:
        thresholds, _, rises = stair
        total = tl.zeros_like(x)
        for k in tl.static_range(COUNT):
            inside = _depth(x, mean, std, thresholds[k]) > 0.0
            total += tl.where(inside, rises[k] * density, 0.0)
    else:
        _, rise, _, _, _ = stair[1]
        count = line.support(x, stair, mean, std, COUNT)
        total = count.to(tl.float32) * (rise * density)
    return total


@triton.jit
def _depth(x, mean, std, threshold):
    """How far x lies inside the support of a threshold's uniform noise; negative outside."""
    half = std * SQRT3
    # A little to the left: an edge between two supports belongs to the upper one.
    return half - tl.abs(x - (mean + (threshold - half * EDGE)))


@triton.jit
def support(x, prepared, COUNT: tl.constexpr):
    """Which thresholds have x in the support of their uniform noise, as in :mod:`general`."""
    mean, std, _, stair, _ = prepared
    kept = nan_else(x, mean - mean)
    if COUNT <= FEW:
        total = kept + line.INTEGER
        for k in tl.static_range(COUNT):
            depth = _depth(x, mean, std, stair[0][k])
            # 1 or 0 without a comparison: a GPU has a higher rate of products.
            total += tl.minimum(tl.maximum(depth * 3e38, 0.0), 1.0) * (1 << k)
        bits = total.to(tl.int32, bitcast=True)
    else:
        bits = line.support(x, stair, mean, std, COUNT)
    # One instruction on CUDA, where all bits of NaN are 1.
    return bits if IS_CUDA and COUNT != FEW else tl.where(kept != kept, nan_bits(COUNT), bits)


@triton.jit
def _keep_nan(x, result, mean, SELECT: tl.constexpr):
    """NaN where x is NaN, elsewhere the result; with SELECT, for a mean that is a number."""
    return tl.where(x != x, x, result) if SELECT else nan_else(x, mean - mean) + result


@triton.jit
def _hard(x, stair, COUNT: tl.constexpr):
    """σ(x): looked up, or on the line, never summed."""
    if COUNT <= FEW:
        thresholds, levels, _ = stair
        result = tl.where(x >= thresholds[0], levels[1], levels[0])
        for k in tl.static_range(1, COUNT):
            result = tl.where(x >= thresholds[k], levels[k + 1], result)
    else:
        result = line.hard(x, stair, COUNT)
    return result


@triton.jit
def _mode(x, prepared, COUNT: tl.constexpr):
    """σ(x) with its thresholds clamped to the limits of the mode."""
    _, _, _, stair, limits = prepared
    low, high = limits
    if COUNT <= FEW:
        thresholds, levels, _ = stair
        clamped = tl.minimum(tl.maximum(thresholds[0], low), high)
        result = tl.where(x >= clamped, levels[1], levels[0])
        for k in tl.static_range(1, COUNT):
            clamped = tl.minimum(tl.maximum(thresholds[k], low), high)
            result = tl.where(x >= clamped, levels[k + 1], result)
    else:
        _, _, lowest, highest, _ = stair[1]
        result = line.hard(x, stair, COUNT)
        result = tl.where(x < low, lowest, result)
        result = tl.where(x >= high, highest, result)
    return result


@triton.jit
def _random(
    x, prepared, word, COUNT: tl.constexpr, FAMILY: tl.constexpr, SELECT: tl.constexpr
):  # fmt: skip
    """σ(x − ν), with ν drawn from the random bits; NaN for NaN."""
    mean, std, _, stair, _ = prepared
    std = tl.where(is_dirac(std), 0.0, std)
    if FAMILY == "uniform":
        width = std * (2 * SQRT3)
        # Significands lie in [1, 2); the shift to the mean is the same for all elements.
        moved = (x - (mean - (1.5 - 0.5 / 8388608) * width)) - width * significand(word)
    else:
        moved = (x - mean) - std * ppf(uniform(word), FAMILY)
    return _keep_nan(x, _hard(moved, stair, COUNT), mean, SELECT)


@triton.jit
def _expectation(x, prepared, COUNT: tl.constexpr, FAMILY: tl.constexpr):
    """q₀ + Σₖ (qₖ − qₖ₋₁)·F((x − mean − θₖ)/β) of few thresholds."""
    mean, _, scale, stair, _ = prepared
    thresholds, levels, rises = stair
    lowest, highest = levels[0], levels[COUNT]
    if FAMILY == "logistic" and COUNT == 2:
        # Two terms with one reciprocal.
        rate = scale * -(RATE * LOG2_E)
        a = 1.0 + bounded_exp2(((x - mean) - thresholds[0]) * rate)
        b = 1.0 + bounded_exp2(((x - mean) - thresholds[1]) * rate)
        root = tl.rsqrt(a * b)
        total = lowest + (rises[0] * b + rises[1] * a) * root * root
    else:
        start = lowest
        if FAMILY == "normal" or FAMILY == "triangular":
            # Their terms are rise·(F − ½).
            for k in tl.static_range(COUNT):
                start += 0.5 * rises[k]
        total = tl.zeros_like(x) + start
        for k in tl.static_range(COUNT):
            total += _term((x - mean) - thresholds[k], scale, rises[k], FAMILY)
    return clamp(total, lowest, highest)  # which rounding may exceed


@triton.jit
def _term(distance, scale, rise, FAMILY: tl.constexpr):
    """rise·F, or rise·(F − ½) for normal and triangular noise."""
    if FAMILY == "uniform":
        z = distance * (scale * UNIFORM_DENSITY) + 0.5
        term = rise * tl.minimum(tl.maximum(z, 0.0), 1.0)
    elif FAMILY == "logistic":
        root = tl.rsqrt(1.0 + tl.exp2(distance * (scale * -(RATE * LOG2_E))))
        term = rise * root * root
    else:
        term = rise * centred_cdf(distance * (scale * units_per_std(FAMILY, False)), FAMILY)
    return term
