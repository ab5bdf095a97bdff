"""The general evaluator: any stair, per channel too, any mean and std, in float32 or float64.

It does what :mod:`softstair.kernels.reference` does, on a block of x. The stair is a row of a table
in memory (:func:`softstair.kernels.triton.table`), with n = ``COUNT`` thresholds, all rounded as
the dtype of the tensor rounds them:

    θ₁ … θ_n | q₀ … q_n | rises q₁ − q₀ … | distance of neighbouring thresholds (1 if uneven)
    | rounding error of the first rise | and of that distance

``table`` points to the table; ``row`` is 0, or a block with the start of each element's row where
channels have stairs of their own. ``KIND`` says what is known of the stair:

=======  ==========================================  ===========================================
kind     the stair                                   sums over thresholds
=======  ==========================================  ===========================================
line     equally spaced, and many levels             those that the noise reaches from x; the
                                                     others below x count in full
even     equally spaced bins                         all
uneven   anything                                    all
=======  ==========================================  ===========================================

``mean`` and ``std`` are scalars or blocks. Whether the noise is a Dirac (a std too small to divide
by) is decided here, without a synchronisation with the host.
"""

import triton
import triton.language as tl

from softstair.kernels.triton.distributions import (
    LOG2_E,
    RATE,
    SQRT3,
    SQRT6,
    UNIFORM_DENSITY,
    cdf,
    pdf,
    ppf,
    tail,
)

FEW = tl.constexpr(8)
"""Loops over at most so many thresholds are unrolled."""
EDGE = tl.constexpr(1e-6)
"""As in the reference: x on the edge of a uniform support, give or take, is in the upper one."""


@triton.jit
def value(
    x, table, row, mean, std, u,
    COUNT: tl.constexpr, FAMILY: tl.constexpr, FORWARD: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The forward pass; ``u`` holds uniform numbers strictly inside (0, 1), for random alone."""
    if FORWARD == "hard":
        result = _level(_index(x, table, row, COUNT, KIND), table, row, COUNT)
    elif FORWARD == "random":
        moved = x - mean - tl.where(is_dirac(std), 0.0, std) * ppf(u, FAMILY)
        result = _level(_index(moved, table, row, COUNT, KIND), table, row, COUNT)
    elif FORWARD == "mode":
        index = _mode(x - mean, table, row, std, COUNT, FAMILY, KIND)
        result = _level(index, table, row, COUNT)
    else:
        tl.static_assert(FORWARD == "expectation")
        result = _expectation(x - mean, table, row, std, COUNT, FAMILY, KIND)
        if len(std.shape) == 0:
            # One branch for the whole block: soft noise does not pay for the look-up.
            if is_dirac(std):
                result = _level(_index(x - mean, table, row, COUNT, KIND), table, row, COUNT)
        else:
            hard = _level(_index(x - mean, table, row, COUNT, KIND), table, row, COUNT)
            result = tl.where(is_dirac(std), hard, result)
    return tl.where(x != x, x, result)


@triton.jit
def slope(x, table, row, mean, std, COUNT: tl.constexpr, FAMILY: tl.constexpr, KIND: tl.constexpr):
    """d/dx E[σ(x − ν)] = Σₖ (qₖ − qₖ₋₁)·μ((x − θₖ)/β)/β; 0 for a Dirac."""
    if FAMILY == "uniform" and (KIND == "line" or COUNT <= FEW):
        bits = support(x, table, row, mean, std, COUNT, KIND)
        total = slope_of(bits, table, row, std, COUNT, KIND)
    else:
        centred, scale = x - mean, inverse(std)
        if KIND == "line":
            total = _sum_of_pdfs(centred, table, row, std, scale, COUNT, FAMILY)
            total *= tl.load(table + row + 2 * COUNT + 1)
        elif COUNT <= FEW:
            total = tl.zeros_like(centred)
            for k in tl.static_range(COUNT):
                total += _pdf_term(k, centred, table, row, scale, COUNT, FAMILY)
        else:
            total = tl.zeros_like(centred)
            for k in range(COUNT):
                total += _pdf_term(k, centred, table, row, scale, COUNT, FAMILY)
        total = tl.where(is_dirac(std), 0.0, total * scale)
    return tl.where(x != x, x, total)


@triton.jit
def support(x, table, row, mean, std, COUNT: tl.constexpr, KIND: tl.constexpr):
    """Which thresholds have x in the support of their uniform noise: all that the slope needs.

    One bit per threshold, up to eight; on a line, the number of thresholds. 0 for NaN.
    """
    if KIND == "line":
        nearest, distance, spacing = _nearest(x - mean, table, row, COUNT)
        rho, eta = distance * (1.0 / spacing), std * SQRT3 / spacing
        low = tl.floor(rho + eta * (EDGE - 1.0))
        high = tl.floor(rho + eta * (EDGE + 1.0))
        low = tl.minimum(tl.maximum(low, -1.0 - nearest), COUNT - 1.0 - nearest)
        high = tl.minimum(tl.maximum(high, -1.0 - nearest), COUNT - 1.0 - nearest)
        bits = (high - low).to(tl.int32)
    else:
        tl.static_assert(COUNT <= FEW)
        centred, scale = x - mean, inverse(std)
        bits = (x != x).to(tl.int32) * 0
        for k in tl.static_range(COUNT):
            z = (centred - tl.load(table + row + k)) * scale + EDGE * SQRT3
            bits += ((z >= -SQRT3) & (z < SQRT3)).to(tl.int32) << k
    return bits


@triton.jit
def slope_of(bits, table, row, std, COUNT: tl.constexpr, KIND: tl.constexpr):
    """The slope under uniform noise from the result of :func:`support`."""
    scale = inverse(std) * UNIFORM_DENSITY
    if KIND == "line":
        total = bits.to(scale.dtype) * tl.load(table + row + 2 * COUNT + 1)
    else:
        total = tl.zeros_like(bits).to(scale.dtype)
        for k in tl.static_range(COUNT):
            total += tl.where((bits >> k) & 1 != 0, tl.load(table + row + 2 * COUNT + 1 + k), 0.0)
    return total * scale


@triton.jit
def is_dirac(std):
    """Whether the std is too small for the dtype to divide by: the density would overflow."""
    return std < (1e-200 if std.dtype == tl.float64 else 1e-30)


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
    elif COUNT <= FEW:
        index = (x >= tl.load(table + row)).to(tl.int32)
        for k in tl.static_range(1, COUNT):
            index += (x >= tl.load(table + row + k)).to(tl.int32)
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
def _level(index, table, row, COUNT: tl.constexpr):
    """q of each index: looked up, never summed."""
    if COUNT <= FEW:
        level = tl.where(index > 0, tl.load(table + row + COUNT + 1), tl.load(table + row + COUNT))
        for k in tl.static_range(1, COUNT):
            level = tl.where(index > k, tl.load(table + row + COUNT + 1 + k), level)
    else:
        level = tl.load(table + row + COUNT + index)
    return level


@triton.jit
def _mode(x, table, row, std, COUNT: tl.constexpr, FAMILY: tl.constexpr, KIND: tl.constexpr):
    """The index of the likeliest level; ties, and differences within a few ulp, go to σ(x)."""
    home = _index(x, table, row, COUNT, KIND)
    tie = 8 * (2.220446049250313e-16 if x.dtype == tl.float64 else 1.1920928955078125e-07)
    lead = tl.where(is_dirac(std), 2.0, tie)  # no two probabilities differ by 2
    if COUNT == 1:
        index = home
    elif KIND == "uneven":
        winner, best, own = _likeliest(x, home, table, row, inverse(std), COUNT, FAMILY)
        index = tl.where(best > own + lead, winner, home)
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
def _likeliest(x, home, table, row, scale, COUNT: tl.constexpr, FAMILY: tl.constexpr):
    """argmaxₖ pₖ, its probability and that of the bin that holds x."""
    above, best, own = tl.zeros_like(x) + 1.0, tl.zeros_like(x), tl.zeros_like(x)
    winner = home * 0
    if COUNT <= FEW:
        for k in tl.static_range(COUNT):
            below = cdf((x - tl.load(table + row + k)) * scale, FAMILY)
            winner, best, own = _better(k, above - below, home, winner, best, own)
            above = below
    else:
        for k in range(COUNT):
            below = cdf((x - tl.load(table + row + k)) * scale, FAMILY)
            winner, best, own = _better(k, above - below, home, winner, best, own)
            above = below
    return _better(COUNT, above, home, winner, best, own)


@triton.jit
def _better(k, probability, home, winner, best, own):
    own = tl.where(home == k, probability, own)
    winner = tl.where(probability > best, k, winner)
    return winner, tl.maximum(best, probability), own


@triton.jit
def _expectation(x, table, row, std, COUNT: tl.constexpr, FAMILY: tl.constexpr, KIND: tl.constexpr):
    """q₀ + Σₖ (qₖ − qₖ₋₁)·F((x − θₖ)/β), clamped to the end levels, which rounding may exceed."""
    scale = inverse(std)
    lowest, highest = tl.load(table + row + COUNT), tl.load(table + row + 2 * COUNT)
    if KIND == "line":
        rise = tl.load(table + row + 2 * COUNT + 1)
        total = lowest + rise * _sum_of_cdfs(x, table, row, std, scale, COUNT, FAMILY)
    elif COUNT <= FEW:
        total = tl.zeros_like(x) + lowest
        for k in tl.static_range(COUNT):
            total += _cdf_term(k, x, table, row, scale, COUNT, FAMILY)
    else:
        total = tl.zeros_like(x) + lowest
        for k in range(COUNT):
            total += _cdf_term(k, x, table, row, scale, COUNT, FAMILY)
    return tl.where(total < lowest, lowest, tl.where(total > highest, highest, total))


@triton.jit
def _cdf_term(k, x, table, row, scale, COUNT: tl.constexpr, FAMILY: tl.constexpr):
    rise = tl.load(table + row + 2 * COUNT + 1 + k)
    return rise * cdf((x - tl.load(table + row + k)) * scale, FAMILY)


@triton.jit
def _pdf_term(k, x, table, row, scale, COUNT: tl.constexpr, FAMILY: tl.constexpr):
    rise = tl.load(table + row + 2 * COUNT + 1 + k)
    z = (x - tl.load(table + row + k)) * scale
    if FAMILY == "uniform":
        z += EDGE * SQRT3
    return rise * pdf(z, FAMILY)


# On a line, with n the number of the last threshold not above x and d its distance from x, the
# thresholds at and below it lie at d, d + w, d + 2w, … and those above at w − d, 2w − d, …; a step
# of the loops takes one of each. Σ F is n + 1, the thresholds not above x, less their tails, plus
# the tails of those above: no difference of numbers near 1, and a cost that depends on β/w, not on
# K. The logistic tails e/(1 + e) fall by one factor from step to step; a pair needs one division.


@triton.jit
def _sum_of_cdfs(x, table, row, std, scale, COUNT: tl.constexpr, FAMILY: tl.constexpr):
    """Σₖ F((x − θₖ)/β) on a line."""
    number, distance, spacing = _below(x, table, row, COUNT)
    total = number + 1.0
    if FAMILY == "logistic":
        rate = scale * -(RATE * LOG2_E)
        low = tl.exp2(distance * rate)
        high = tl.exp2((spacing - distance) * rate)
        ratio = tl.exp2(spacing * rate)
        for step in range(_reach(std, spacing, COUNT, FAMILY)):
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
        for step in range(_reach(std, spacing, COUNT, FAMILY)):
            under = tail((distance + step * spacing) * scale, FAMILY)
            over = tail((spacing - distance + step * spacing) * scale, FAMILY)
            total += tl.where(number + step < COUNT - 1.0, over, 0.0)
            total -= tl.where(number >= step, under, 0.0)
    return total


@triton.jit
def _sum_of_pdfs(x, table, row, std, scale, COUNT: tl.constexpr, FAMILY: tl.constexpr):
    """Σₖ μ((x − θₖ)/β) on a line."""
    number, distance, spacing = _below(x, table, row, COUNT)
    total = tl.zeros_like(distance)
    if FAMILY == "logistic":
        low = tl.exp(distance * scale * -RATE)
        high = tl.exp((spacing - distance) * scale * -RATE)
        ratio = tl.exp(spacing * scale * -RATE)
        for step in range(_reach(std, spacing, COUNT, FAMILY)):
            under = tl.where(number >= step, low, 0.0)
            over = tl.where(number + step < COUNT - 1.0, high, 0.0)
            a = 1.0 + under
            b = 1.0 + over
            share = 1.0 / (a * b)
            total += (under * b * b + over * a * a) * share * share * RATE
            low *= ratio
            high *= ratio
    else:
        for step in range(_reach(std, spacing, COUNT, FAMILY)):
            under = pdf((distance + step * spacing) * scale, FAMILY)
            over = pdf((spacing - distance + step * spacing) * scale, FAMILY)
            total += tl.where(number + step < COUNT - 1.0, over, 0.0)
            total += tl.where(number >= step, under, 0.0)
    return total


@triton.jit
def _nearest(x, table, row, COUNT: tl.constexpr):
    """(number of the threshold nearest to x, x minus that threshold, spacing of thresholds)."""
    spacing = tl.load(table + row + 3 * COUNT + 1)
    position = (x - tl.load(table + row)) * (1.0 / spacing)
    number = tl.floor(_clip(position + 0.5, COUNT - 1))
    return number, x - tl.load(table + row + number.to(tl.int32)), spacing


@triton.jit
def _below(x, table, row, COUNT: tl.constexpr):
    """As :func:`_nearest`, of the last threshold not above x; number −1 where there is none.

    The distance to the nearest threshold is exact, as narrow noise needs.
    """
    number, distance, spacing = _nearest(x, table, row, COUNT)
    is_above = distance < 0
    number = tl.where(is_above, number - 1.0, number)
    return number, tl.where(is_above, distance + spacing, distance), spacing


@triton.jit
def _clip(number, HIGHEST: tl.constexpr):
    """The number between 0 and HIGHEST; 0 for NaN."""
    number = tl.where(number > 0, number, 0.0)
    return tl.where(number < HIGHEST, number, HIGHEST * 1.0)


@triton.jit
def _reach(std, spacing, COUNT: tl.constexpr, FAMILY: tl.constexpr):
    """How many thresholds on either side of x the noise reaches: one number for the block.

    Unbounded noise ends where the rest rounds away beside the term of the nearest threshold.
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
