"""Shapes of noise in float32, each in the units in which it costs the fewest instructions.

A distance of z standard deviations is ``sharpness``·z of them: there the normal density is 2^{−t²},
the logistic odds are 2^t (t falling with x), and the triangular support ends at 1. NaN stays NaN.
Draws are for tensors of 16 bits. Those of normal noise lose 2·10⁻⁵ of a probability at most, 3.4
standard deviations out; of a tail of 3·10⁻⁵, a fifth.
"""

import triton
import triton.language as tl

from softstair.kernels.triton.shapes import (
    LN_2,
    LOG2_E,
    NORMAL_DENSITY,
    RATE,
    SQRT3,
    SQRT6,
    log2,
    tail,
)

HALF_LOG2_E = tl.constexpr((0.5 * LOG2_E.value) ** 0.5)
INSIDE = tl.constexpr((1 - 2**-23) / 2**31)
"""What takes an integer of 32 bits strictly inside (−1, 1)."""


@triton.jit
def sharpness(FAMILY: tl.constexpr, SLOPE: tl.constexpr):
    """How many units of its own a family has to the standard deviation."""
    if FAMILY == "triangular":
        unit = 1 / SQRT6
    elif FAMILY == "normal":
        unit = HALF_LOG2_E if SLOPE else 1.0
    else:
        unit = -RATE * LOG2_E
    return unit


@triton.jit
def odd(z, FAMILY: tl.constexpr, HALF: tl.constexpr):
    """F − ½, an odd function; of the logistic family in another way."""
    if FAMILY == "triangular":
        rest = tl.maximum(1.0 - tl.abs(z), 0.0, propagate_nan=tl.PropagateNan.ALL)
        half = 0.5 - 0.5 * (rest * rest)
    else:
        tl.static_assert(FAMILY == "normal")
        half = 0.5 - tail(tl.abs(z), "normal", HALF)
    return _signed(half, z)


@triton.jit
def power(z):
    """2^z, but no more than 2⁶⁰: it is nothing upside down, and its products are finite."""
    return tl.exp2(tl.minimum(z, 60.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def between(number, lowest, highest):
    """The number, no further out than those."""
    number = tl.maximum(number, lowest, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(number, highest, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def nought(x, least):
    """``least``, which is 0 or less, but NaN where x is: in one step, and for infinity too."""
    return tl.minimum(tl.abs(x), least, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def hump(z, FAMILY: tl.constexpr):
    """The density as a share of :func:`peak`."""
    if FAMILY == "triangular":
        p = tl.maximum(1.0 - tl.abs(z), 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif FAMILY == "normal":
        p = tl.exp2(-z * z)
    else:
        tl.static_assert(FAMILY == "logistic")
        # 2^{−|t|} cannot overflow, and keeps the tails that F(1 − F) would round away.
        decay = tl.exp2(-tl.abs(z))
        root = tl.rsqrt(1.0 + decay)
        share = root * root
        p = decay * (share * share)
    return p


@triton.jit
def peak(FAMILY: tl.constexpr):
    """What :func:`hump` is a share of: the largest density, or four times that."""
    if FAMILY == "triangular":
        p = 1 / SQRT6
    elif FAMILY == "normal":
        p = NORMAL_DENSITY
    else:
        p = RATE
    return p


@triton.jit
def draw(word, std, FAMILY: tl.constexpr):
    """A number with the family's distribution, and that standard deviation, from 32 random bits.

    The inverse of the normal cdf at (1 + t)/2 is t·P(−log₂(1 − t²)), a smooth even function of t
    beside t, whose logarithm reaches into both tails.
    """
    number = word.to(tl.int32, bitcast=True).to(tl.float32)
    if FAMILY == "uniform":
        z = number * (std * (SQRT3 * INSIDE))
    elif FAMILY == "triangular":
        rest = tl.abs(number) * -INSIDE + 1.0
        z = std * _signed(tl.sqrt(rest) * -SQRT6 + SQRT6, number)
    elif FAMILY == "normal":
        t = number * INSIDE
        w = -log2(1.0 - t * t)
        # The factors are alike for all, and so std costs an element nothing.
        p = (3.9733125e-05 * std) * w - 1.21143068e-03 * std
        p = p * w + 7.45872777e-03 * std
        p = p * w + 2.28268507e-01 * std
        z = t * (p * w + 1.2530309 * std)
    else:
        tl.static_assert(FAMILY == "logistic")
        z = (log2(number * INSIDE + 1.0) - log2(number * -INSIDE + 1.0)) * (std * (LN_2 / RATE))
    return z


@triton.jit
def _signed(number, sign):
    """The number, not negative, with the sign of the other."""
    bit = sign.to(tl.uint32, bitcast=True) & 0x80000000
    return (number.to(tl.uint32, bitcast=True) | bit).to(tl.float32, bitcast=True)
