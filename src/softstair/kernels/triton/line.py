"""The evaluator's functions for lines: many equally spaced thresholds, prepared as scalars.

Sums over thresholds run over a window of W neighbouring ones, as many as the noise reaches from any
x. The window lies wholly on the stair, so that nothing needs a mask at its ends, and begins at the
threshold m that brings its middle next to x. Thresholds before it count in full and those after it
not at all: Σₖ F = m + Σ F over the window, a cost that depends on β and not on K.

Distances from x are in the units of :mod:`softstair.kernels.triton.distributions`. The logistic
terms are functions of numbers that grow by one factor from threshold to threshold, and share one
exponential.

The nearest threshold, and the first of a window, is exactly that of the table; further ones in the
window are on a line with it.
"""

import triton
import triton.language as tl

from softstair.kernels.triton.distributions import (
    INTERPRETED,
    SQRT3,
    bounded_exp2,
    centred_cdf,
    clamp,
    nan_else,
    scaled_pdf,
)
from softstair.kernels.triton.general import EDGE

INTEGER = tl.constexpr(12582912.0)
"""1.5·2²³, where float32 holds integers only: adding it rounds."""


@triton.jit
def hard(x, stair, COUNT: tl.constexpr):
    """σ(x), exactly."""
    lowest, rise, _, _, rest = stair[1]
    number, distance = _nearest(x, stair, COUNT)
    return _product(number + tl.where(distance >= 0, lowest + 1.0, lowest), rise, rest)


@triton.jit
def support(x, stair, mean, std, COUNT: tl.constexpr):
    """How many thresholds have x in the support of their uniform noise; 255 in the last byte for
    NaN, whose bits are all 1 on CUDA."""
    _, _, _, low, high = _uniform_window(x, stair, mean, std, COUNT)
    high += nan_else(x, mean - mean)
    return high.to(tl.int32, bitcast=True) - low.to(tl.int32, bitcast=True)


@triton.jit
def expectation(x, stair, mean, std, COUNT: tl.constexpr, FAMILY: tl.constexpr):
    """q₀ + rise·Σₖ F((x − mean − θₖ)/β); an arithmetic progression under uniform noise."""
    _, levels, window = stair
    _, rise, lowest, highest, _ = levels
    if FAMILY == "uniform":
        number, position, half, low, high = _uniform_window(x, stair, mean, std, COUNT)
        count, low = high - low, low - INTEGER
        # The mean of F over the thresholds in the support, if there are any.
        average = (position - (low + 0.5 * count)) * (0.5 / half) + (0.5 + 0.25 / half)
        average = tl.minimum(tl.maximum(average, 0.0), 1.0)
        result = lowest + rise * (count * average + (low + number))
    else:
        start, z = _window_start(x, stair, mean)
        # The terms are F − ½; the halves are added here.
        _, _, _, _, _, _, half_terms = window
        middle = lowest + rise * half_terms
        result = middle + rise * _sum_of_centred_cdfs(start, z, window, FAMILY)
    return clamp(result, lowest, highest)  # which rounding may exceed


@triton.jit
def slope(x, stair, mean, factor, FAMILY: tl.constexpr):
    """factor·Σₖ of :func:`scaled_pdf`; not for uniform noise."""
    terms, _, _, _, _, step, _ = stair[2]
    _, z = _window_start(x, stair, mean)
    total = tl.zeros_like(x)
    if FAMILY == "logistic":
        odds = bounded_exp2(z)
        ratio = tl.exp2(-step)
        for _ in range(terms):
            root = tl.rsqrt(1.0 + odds)
            share = root * root
            total += odds * (share * share)
            odds *= ratio
    else:
        for _ in range(terms):
            total += scaled_pdf(z, FAMILY)
            z -= step
    return total * factor


@triton.jit
def _nearest(x, stair, COUNT: tl.constexpr):
    """(number of the threshold nearest to x, x minus that threshold)."""
    first, _, per_unit, _ = stair[0]
    HIGHEST: tl.constexpr = COUNT - 1
    # Scaled to [0, 1]: a GPU saturates products there at no cost.
    along = x * (per_unit * (1 / HIGHEST)) - first * (1 / HIGHEST)
    number = (tl.minimum(tl.maximum(along, 0.0), 1.0) * HIGHEST + INTEGER) - INTEGER
    return number, x - _threshold(number, stair)


@triton.jit
def _threshold(number, stair):
    """The threshold of that number, exactly that of the table."""
    first, unit, _, rest = stair[0]
    return _product(number + first, unit, rest)


@triton.jit
def _product(number, step, rest):
    """number·(step + rest) in float32, rounded once."""
    if INTERPRETED:
        # The interpreter's fma rounds twice.
        product = (number.to(tl.float64) * step + number * rest).to(tl.float32)
    else:
        product = tl.fma(number, step, number * rest)
    return product


@triton.jit
def _uniform_window(x, stair, mean, std, COUNT: tl.constexpr):
    """(number, position, half, low, high) under uniform noise.

    ``number`` is a threshold's, ``position`` is that of x relative to it and ``half`` the
    half-width of the noise, both in units; ``low`` and ``high`` are the numbers of thresholds below
    the support of x and below its upper end, counted from ``number``, plus ``INTEGER``. They are
    equal beyond the stair and for NaN.
    """
    _, _, per_unit, _ = stair[0]
    half = std * SQRT3 * per_unit
    number, distance = _nearest(x - mean, stair, COUNT)
    position = distance * per_unit
    top = COUNT - number
    low = tl.maximum(position + (0.5 - half * (1.0 - EDGE)), -number)
    high = tl.maximum(position + (0.5 + half * (1.0 + EDGE)), -number)
    return number, position, half, tl.minimum(low, top) + INTEGER, tl.minimum(high, top) + INTEGER


@triton.jit
def _window_start(x, stair, mean):
    """(number of the window's first threshold, x minus that threshold)."""
    _, scale, shift, last_start, sharp, _, _ = stair[2]
    along = tl.minimum(tl.maximum(x * scale + shift, 0.0), 1.0)
    start = (along * last_start + INTEGER) - INTEGER
    return start, ((x - mean) - _threshold(start, stair)) * sharp


@triton.jit
def _sum_of_centred_cdfs(start, z, window, FAMILY: tl.constexpr):
    """start + Σ (F − ½) over the window."""
    terms, _, _, _, _, step, half_terms = window
    total = start
    if FAMILY == "logistic":
        total -= half_terms
        odds = bounded_exp2(z)
        ratio = tl.exp2(-step)
        # Two terms at a time: 1/a + 1/b = (a + b)/ab.
        for _ in range(terms // 2):
            a = 1.0 + odds
            b = 1.0 + odds * ratio
            root = tl.rsqrt(a * b)
            total += ((a + b) * root) * root
            odds *= ratio * ratio
        if terms % 2 == 1:
            root = tl.rsqrt(1.0 + odds)
            total += root * root
    else:
        for _ in range(terms):
            total += centred_cdf(z, FAMILY)
            z -= step
    return total
