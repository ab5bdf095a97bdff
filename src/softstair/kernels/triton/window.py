"""Sums of F and μ over thresholds on a line: only those that the noise reaches from x.

Numbered from the last threshold not above x, at a distance d below it, the thresholds at and below
it lie at d, d + w, d + 2w, … and those above at w − d, 2w − d, …; one step of the loop takes one of
each. What counts in full is n + 1, the thresholds not above x, less their tails, plus the tails of
those above: no difference of numbers near 1, and a cost that depends on β/w and not on K.

The logistic tails e/(1 + e) fall by one factor from step to step, and a pair needs one division.
"""

import triton
import triton.language as tl

from softstair.kernels.triton.shapes import LOG2_E, RATE, SQRT3, SQRT6, pdf, tail


@triton.jit
def above(number, distance, spacing, std, scale, COUNT: tl.constexpr, FAMILY: tl.constexpr):
    """Σₖ F((x − θₖ)/β), scale being 1/β, from what :func:`below` says of x."""
    total = number + 1.0
    if FAMILY == "logistic":
        rate = scale * -(RATE * LOG2_E)
        low = tl.exp2(distance * rate)
        high = tl.exp2((spacing - distance) * rate)
        ratio = tl.exp2(spacing * rate)
        for step in range(reach(std, spacing, COUNT, FAMILY)):
            under = tl.where(number >= step, low, 0.0)
            over = tl.where(number + step < COUNT - 1.0, high, 0.0)
            both = (1.0 + under) * (1.0 + over)
            if both.dtype == tl.float64:
                total += (over - under) / both
            else:
                root = tl.rsqrt(both)
                total += (over - under) * root * root
            low *= ratio
            high *= ratio
    else:
        for step in range(reach(std, spacing, COUNT, FAMILY)):
            under = tail((distance + step * spacing) * scale, FAMILY)
            over = tail((spacing - distance + step * spacing) * scale, FAMILY)
            total += tl.where(number + step < COUNT - 1.0, over, 0.0)
            total -= tl.where(number >= step, under, 0.0)
    return total


@triton.jit
def densities(x, table, row, std, scale, COUNT: tl.constexpr, FAMILY: tl.constexpr):
    """Σₖ μ((x − θₖ)/β)."""
    number, distance, spacing = below(x, table, row, COUNT)
    total = tl.zeros_like(distance)
    if FAMILY == "logistic":
        low = tl.exp(distance * scale * -RATE)
        high = tl.exp((spacing - distance) * scale * -RATE)
        ratio = tl.exp(spacing * scale * -RATE)
        for step in range(reach(std, spacing, COUNT, FAMILY)):
            under = tl.where(number >= step, low, 0.0)
            over = tl.where(number + step < COUNT - 1.0, high, 0.0)
            a = 1.0 + under
            b = 1.0 + over
            share = 1.0 / (a * b)
            total += (under * b * b + over * a * a) * share * share * RATE
            low *= ratio
            high *= ratio
    else:
        for step in range(reach(std, spacing, COUNT, FAMILY)):
            under = pdf((distance + step * spacing) * scale, FAMILY)
            over = pdf((spacing - distance + step * spacing) * scale, FAMILY)
            total += tl.where(number + step < COUNT - 1.0, over, 0.0)
            total += tl.where(number >= step, under, 0.0)
    return total


@triton.jit
def nearest(x, table, row, COUNT: tl.constexpr):
    """The number of the threshold next to x, how far x lies above it, and their spacing."""
    spacing = tl.load(table + row + 3 * COUNT + 1)
    position = (x - tl.load(table + row)) * (1.0 / spacing)
    number = tl.floor(clip(position + 0.5, COUNT - 1))
    return number, x - tl.load(table + row + number.to(tl.int32)), spacing


@triton.jit
def below(x, table, row, COUNT: tl.constexpr):
    """The number of the last threshold not above x (−1 where there is none), how far x lies above
    it, and their spacing. The distance to the nearest threshold is exact, as narrow noise needs."""
    number, distance, spacing = nearest(x, table, row, COUNT)
    number, distance = settle(number, distance, spacing)
    return number, distance, spacing


@triton.jit
def settle(number, distance, spacing):
    """From the nearest threshold to the last one not above x."""
    is_above = distance < 0
    number = tl.where(is_above, number - 1.0, number)
    return number, tl.where(is_above, distance + spacing, distance)


@triton.jit
def clip(number, HIGHEST: tl.constexpr):
    """Between 0 and the highest; 0 for NaN."""
    number = tl.where(number > 0, number, 0.0)
    return tl.where(number < HIGHEST, number, HIGHEST * 1.0)


@triton.jit
def reach(std, spacing, COUNT: tl.constexpr, FAMILY: tl.constexpr):
    """How many thresholds on either side of x the noise reaches: one number for a whole block.

    Unbounded noise ends where what is left rounds away beside the nearest threshold's share.
    """
    if FAMILY == "uniform":
        far = SQRT3
    elif FAMILY == "triangular":
        far = SQRT6
    elif FAMILY == "normal":
        far = 9.0 if std.dtype == tl.float64 else 6.5
    else:
        far = 21.0 if std.dtype == tl.float64 else 10.5
    steps = tl.ceil(std * far / spacing)
    if len(steps.shape) > 0:
        steps = tl.max(steps)
    return tl.minimum(tl.maximum(steps, 1.0), COUNT * 1.0).to(tl.int32)
