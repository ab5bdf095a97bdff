"""The evaluator: both passes in float32 on what :mod:`softstair.kernels.triton.prepare` prepared.

An element costs a few instructions per threshold and reads nothing from memory but x. ``prepared``
comes from :func:`prepare <softstair.kernels.triton.prepare.prepare>` in the element-wise operator,
and from another room, a row a layer, in fused layers.

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
    UNIFORM_DENSITY,
    bounded_exp2,
    centred_cdf,
    clamp,
    nan_else,
    pdf_scale,
    ppf,
    scaled_pdf,
    significand,
    uniform,
    units_per_std,
)
from softstair.kernels.triton.general import EDGE, FEW, is_dirac, nan_bits


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
