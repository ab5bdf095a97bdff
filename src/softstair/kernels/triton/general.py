"""The general evaluator: stairs with bins of one width, per channel too, any mean and std.

It does what :mod:`softstair.kernels.reference` does, on a block of x. The stair is a row of a table
in memory (:func:`softstair.kernels.triton.table`), with n = ``COUNT`` thresholds, all in float32:

    θ₁ … θ_n | q₀ … q_n | rises q₁ − q₀ … | distance of neighbouring thresholds
    | rounding error of the first rise | and of that distance

``table`` points to the table; ``row`` is 0, or a block with the start of each element's row where
channels have stairs of their own. ``KIND`` says what is known of the stair:

=======  ==========================================  ===========================================
kind     the stair                                   sums over thresholds
=======  ==========================================  ===========================================
line     equally spaced, and many levels             those that the noise reaches from x; the
                                                     others below x count in full
even     equally spaced bins                         all
=======  ==========================================  ===========================================

``mean`` and ``std`` are scalars or blocks. Whether the noise is a Dirac (a std too small to divide
by) is decided here, without a synchronisation with the host.
"""

import triton
import triton.language as tl

from softstair.kernels.triton.distributions import (
    SQRT3,
    SQRT6,
    UNIFORM_DENSITY,
    cdf,
    pdf,
    ppf,
    tail,
)

FEW = tl.constexpr(8)
"""Up to so many thresholds are kept as scalars by the evaluator, and as bits in one byte."""
EDGE = tl.constexpr(1e-6)
"""As in the reference: x on the edge of a uniform support, give or take, is in the upper one."""


@triton.jit
def value(
    x, table, row, mean, std, u,
    COUNT: tl.constexpr, FAMILY: tl.constexpr, FORWARD: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The forward pass; ``u`` holds uniform numbers strictly inside (0, 1), for random alone."""
    levels = table + row + COUNT
    if FORWARD != "hard":
        x -= mean
    if FORWARD == "hard":
        result = tl.load(levels + _index(x, table, row, COUNT, KIND))
    elif FORWARD == "random":
        moved = x - tl.where(is_dirac(std), 0.0, std) * ppf(u, FAMILY)
        result = tl.load(levels + _index(moved, table, row, COUNT, KIND))
    elif FORWARD == "mode":
        result = tl.load(levels + _mode(x, table, row, std, COUNT, FAMILY, KIND))
    else:
        tl.static_assert(FORWARD == "expectation")
        result = _expectation(x, table, row, std, COUNT, FAMILY, KIND)
        if len(std.shape) == 0:
            # One branch for the whole block: soft noise does not pay for the look-up.
            if is_dirac(std):
                result = tl.load(levels + _index(x, table, row, COUNT, KIND))
        else:
            hard = tl.load(levels + _index(x, table, row, COUNT, KIND))
            result = tl.where(is_dirac(std), hard, result)
    return tl.where(x != x, x, result)


@triton.jit
def slope(x, table, row, mean, std, COUNT: tl.constexpr, FAMILY: tl.constexpr, KIND: tl.constexpr):
    """d/dx E[σ(x − ν)] = Σₖ (qₖ − qₖ₋₁)·μ((x − θₖ)/β)/β; 0 for a Dirac."""
    if FAMILY == "uniform" and (KIND == "line" or COUNT <= FEW):
        bits = support(x, table, row, mean, std, COUNT, KIND)
        total = slope_of(bits, table, row, std, COUNT, KIND)
    else:
        scale = inverse(std)
        total = _sum(x - mean, tl.zeros_like(x), table, row, std, scale, COUNT, FAMILY, KIND, True)
        total = tl.where(is_dirac(std), 0.0, total * scale)
    centred = x - mean
    return tl.where(centred != centred, centred, total)


@triton.jit
def support(x, table, row, mean, std, COUNT: tl.constexpr, KIND: tl.constexpr):
    """Which thresholds have x in the support of their uniform noise: all that the slope needs.

    One bit per threshold, up to eight; on a line, the number of thresholds. For NaN, the byte that
    :func:`nan_bits` gives.
    """
    centred = x - mean
    if KIND == "line":
        nearest, distance, spacing = _nearest(centred, table, row, COUNT)
        rho, eta = distance * (1.0 / spacing), std * SQRT3 / spacing
        low = tl.floor(rho + eta * (EDGE - 1.0))
        high = tl.floor(rho + eta * (EDGE + 1.0))
        low = tl.minimum(tl.maximum(low, -1.0 - nearest), COUNT - 1.0 - nearest)
        high = tl.minimum(tl.maximum(high, -1.0 - nearest), COUNT - 1.0 - nearest)
        bits = (high - low).to(tl.int32)
    else:
        tl.static_assert(COUNT <= FEW)
        scale = inverse(std)
        bits = (x != x).to(tl.int32) * 0
        for k in tl.static_range(COUNT):
            z = (centred - tl.load(table + row + k)) * scale + EDGE * SQRT3
            bits += ((z >= -SQRT3) & (z < SQRT3)).to(tl.int32) << k
    return tl.where(centred != centred, nan_bits(COUNT), bits)


@triton.jit
def nan_bits(COUNT: tl.constexpr):
    """The result of :func:`support` for NaN. Of eight thresholds, the first and the last never
    have x in their supports without the others."""
    return 129 if COUNT == 8 else 255


@triton.jit
def slope_of(bits, table, row, std, COUNT: tl.constexpr, KIND: tl.constexpr):
    """The slope under uniform noise from the result of :func:`support`."""
    scale = inverse(std) * UNIFORM_DENSITY
    is_nan = bits == nan_bits(COUNT)
    if KIND == "line":
        if COUNT == 255:  # under wide noise the byte says that x is in all supports
            spacing = tl.load(table + row + 3 * COUNT + 1)
            is_wide = (std * SQRT3 >= 126.5 * spacing) & (std <= 1e30)
            is_nan = tl.where(is_wide, False, is_nan)
        total = bits.to(scale.dtype) * tl.load(table + row + 2 * COUNT + 1)
    else:
        total = tl.zeros_like(bits).to(scale.dtype)
        for k in tl.static_range(COUNT):
            total += tl.where((bits >> k) & 1 != 0, tl.load(table + row + 2 * COUNT + 1 + k), 0.0)
    return tl.where(is_nan, float("nan"), total * scale)


@triton.jit
def is_dirac(std):
    """Whether the std is too small for the dtype to divide by: the density would overflow."""
    return std < 1e-30


@triton.jit
def inverse(std):
    """1/β, and 0 for a Dirac: every density vanishes with it."""
    dirac = is_dirac(std)
    return tl.where(dirac, 0.0, 1.0 / tl.where(dirac, 1.0, std))


@triton.jit
def _index(x, table, row, COUNT: tl.constexpr, KIND: tl.constexpr):
    """#{k : x ≥ θₖ}; 0 for NaN."""
    if KIND == "line":
        # Dividing finds the threshold to within one; comparing with its neighbours decides.
        position = (x - tl.load(table + row)) * (1.0 / tl.load(table + row + 3 * COUNT + 1))
        guess = _clip(position, COUNT - 2).to(tl.int32)
        index = guess + (x >= tl.load(table + row + guess)).to(tl.int32)
        index += (x >= tl.load(table + row + guess + 1)).to(tl.int32)
    else:
        # Binary search.
        index = (x != x).to(tl.int32) * 0
        for bit in tl.static_range(16):
            if (32768 >> bit) <= COUNT:
                further = index + (32768 >> bit)
                threshold = tl.load(table + row + tl.minimum(further, COUNT) - 1)
                index = tl.where((further <= COUNT) & (x >= threshold), further, index)
    return index


@triton.jit
def _mode(x, table, row, std, COUNT: tl.constexpr, FAMILY: tl.constexpr, KIND: tl.constexpr):
    """The index of the likeliest level; ties, and differences within a few ulp, go to σ(x)."""
    home = _index(x, table, row, COUNT, KIND)
    tie = 8 * 1.1920928955078125e-07
    lead = tl.where(is_dirac(std), 2.0, tie)  # no two probabilities differ by 2
    if COUNT == 1:
        index = home
    elif FAMILY == "uniform":
        # An end wins as far as its bin holds as much of the noise as a bin in the middle can.
        first, last = tl.load(table + row), tl.load(table + row + COUNT - 1)
        margin = std * (SQRT3 * (1 - 2 * tie)) - tl.load(table + row + 3 * COUNT + 1)
        margin = tl.minimum(tl.maximum(margin, 0.0), 0.5 * (last - first))
        index = tl.where(x < first + margin, 0, home)
        index = tl.where(x >= last - margin, COUNT, index)
    else:
        scale = inverse(std)
        above_first = x - tl.load(table + row)
        below_last = tl.load(table + row + COUNT - 1) - x
        end = tail(tl.minimum(above_first, below_last) * scale, FAMILY)
        if COUNT == 2:
            own = 1.0 - end - tail(tl.maximum(above_first, below_last) * scale, FAMILY)
        else:
            bin = tl.minimum(tl.maximum(home, 1), COUNT - 1)
            under = (x - tl.load(table + row + bin - 1)) * scale
            over = (tl.load(table + row + bin) - x) * scale
            own = 1.0 - tail(under, FAMILY) - tail(over, FAMILY)
        wins = (home > 0) & (home < COUNT) & (end > own + lead)
        index = tl.where(wins, tl.where(above_first < below_last, 0, COUNT), home)
    return index


@triton.jit
def _expectation(x, table, row, std, COUNT: tl.constexpr, FAMILY: tl.constexpr, KIND: tl.constexpr):
    """q₀ + Σₖ (qₖ − qₖ₋₁)·F((x − θₖ)/β), clamped to the end levels, which rounding may exceed."""
    lowest, highest = tl.load(table + row + COUNT), tl.load(table + row + 2 * COUNT)
    total = tl.zeros_like(x) + lowest
    total = _sum(x, total, table, row, std, inverse(std), COUNT, FAMILY, KIND, False)
    return tl.where(total < lowest, lowest, tl.where(total > highest, highest, total))


@triton.jit
def _sum(
    x, total, table, row, std, scale,
    COUNT: tl.constexpr, FAMILY: tl.constexpr, KIND: tl.constexpr, DENSITY: tl.constexpr,
):  # fmt: skip
    """total + Σₖ (qₖ − qₖ₋₁)·F((x − θₖ)/β), or with DENSITY the same of μ.

    On a line the sum runs over a window of thresholds, as many as the noise reaches, with x in its
    middle: those before it count in full (or have no density), those after it not at all.
    """
    if KIND == "line":
        first, spacing = tl.load(table + row), tl.load(table + row + 3 * COUNT + 1)
        terms = _reach(std, spacing, COUNT, FAMILY)
        start = _clip((x - first) * (1.0 / spacing) - 0.5 * terms + 1.0, COUNT - terms)
        start = start.to(tl.int32)
        if not DENSITY:
            total += start * tl.load(table + row + 2 * COUNT + 1)
        for k in range(terms):
            total += _term(start + k, x, table, row, scale, COUNT, FAMILY, DENSITY)
    else:
        for k in range(COUNT):
            total += _term(k, x, table, row, scale, COUNT, FAMILY, DENSITY)
    return total


@triton.jit
def _term(
    k, x, table, row, scale, COUNT: tl.constexpr, FAMILY: tl.constexpr, DENSITY: tl.constexpr
):
    rise = tl.load(table + row + 2 * COUNT + 1 + k)
    z = (x - tl.load(table + row + k)) * scale
    if not DENSITY:
        share = cdf(z, FAMILY)
    elif FAMILY == "uniform":
        share = pdf(z + EDGE * SQRT3, FAMILY)
    else:
        share = pdf(z, FAMILY)
    return rise * share


@triton.jit
def _nearest(x, table, row, COUNT: tl.constexpr):
    """(number of the threshold nearest to x, x minus that threshold, spacing of thresholds)."""
    spacing = tl.load(table + row + 3 * COUNT + 1)
    position = (x - tl.load(table + row)) * (1.0 / spacing)
    number = tl.floor(_clip(position + 0.5, COUNT - 1))
    return number, x - tl.load(table + row + number.to(tl.int32)), spacing


@triton.jit
def _clip(number, highest):
    """The number between 0 and the highest; 0 for NaN."""
    number = tl.where(number > 0, number, 0.0)
    return tl.where(number < highest, number, highest * 1.0)


@triton.jit
def _reach(std, spacing, COUNT: tl.constexpr, FAMILY: tl.constexpr):
    """How many neighbouring thresholds the noise reaches from x: one number for the block.

    Unbounded noise ends where the rest rounds away beside the term of the nearest threshold.
    """
    if FAMILY == "uniform":
        far = SQRT3
    elif FAMILY == "triangular":
        far = SQRT6
    elif FAMILY == "normal":
        far = 6.5
    else:
        far = 10.5
    terms = tl.ceil(std * (2.0 * far) / spacing)
    if len(terms.shape) > 0:
        terms = tl.max(terms)
    return tl.minimum(tl.maximum(terms, 1.0), COUNT * 1.0).to(tl.int32)
