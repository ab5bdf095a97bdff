"""The operator on a block: what :mod:`softstair.kernels.reference` does, for blocks in Triton.

A block of x is in the working dtype (float32, or float64). A stair is a row of a table there:

    θ₁ … θ_n | q₀ … q_n | rises q₁ − q₀ … | distance of neighbouring thresholds (1 if uneven)
    | what the working dtype has left out of the first rise | and of that distance

with n = ``COUNT`` thresholds, each rounded as the tensor's own dtype rounds it: ``table`` points to
it, ``row`` is 0, or a block with the start of each element's row where channels have their own.
``KIND`` says what is known of the stair:

=======  ==========================================  ===========================================
kind     the stair                                   sums over thresholds
=======  ==========================================  ===========================================
line     equally spaced, and many levels             those within reach of the noise; the others
                                                     below count in full
even     equally spaced bins                         all
uneven   anything                                    all
=======  ==========================================  ===========================================

``mean`` and ``std`` are scalars or blocks; std is read where it lies, so a Dirac (a std below what
the dtype can divide by) is found here. No branch of the host knows of it.
"""

import triton
import triton.language as tl

from softstair.kernels.triton import window
from softstair.kernels.triton.shapes import SQRT3, UNIFORM_DENSITY, cdf, pdf, ppf, tail

FEW = tl.constexpr(8)
"""Up to so many thresholds, loops over them are unrolled."""
EDGE = tl.constexpr(1e-6)
"""That of the reference: x on the edge of a uniform support, give or take, is in the upper one."""


@triton.jit
def value(
    x,
    table,
    row,
    mean,
    std,
    u,
    COUNT: tl.constexpr,
    FAMILY: tl.constexpr,
    FORWARD: tl.constexpr,
    KIND: tl.constexpr,
):
    """The forward pass; ``u`` is read by random alone: uniform numbers strictly inside (0, 1)."""
    if FORWARD == "hard":
        result = level(index(x, table, row, COUNT, KIND), table, row, COUNT)
    elif FORWARD == "random":
        moved = x - mean - tl.where(is_dirac(std), 0.0, std) * ppf(u, FAMILY)
        result = level(index(moved, table, row, COUNT, KIND), table, row, COUNT)
    elif FORWARD == "mode":
        number = _mode(x - mean, table, row, std, COUNT, FAMILY, KIND)
        result = level(number, table, row, COUNT)
    else:
        tl.static_assert(FORWARD == "expectation")
        result = _expectation(x - mean, table, row, std, COUNT, FAMILY, KIND)
        if len(std.shape) == 0:
            # One decision for the whole block, so that soft noise does not pay for the look-up.
            if is_dirac(std):
                result = level(index(x - mean, table, row, COUNT, KIND), table, row, COUNT)
        else:
            hard = level(index(x - mean, table, row, COUNT, KIND), table, row, COUNT)
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
            total = window.densities(centred, table, row, std, scale, COUNT, FAMILY)
            total *= tl.load(table + row + 2 * COUNT + 1)
        elif COUNT <= FEW:
            total = tl.zeros_like(centred)
            for k in tl.static_range(COUNT):
                total += _density(k, centred, table, row, scale, COUNT, FAMILY)
        else:
            total = tl.zeros_like(centred)
            for k in range(COUNT):
                total += _density(k, centred, table, row, scale, COUNT, FAMILY)
        total = tl.where(is_dirac(std), 0.0, total * scale)
    return tl.where(x != x, x, total)


@triton.jit
def support(x, table, row, mean, std, COUNT: tl.constexpr, KIND: tl.constexpr):
    """Which thresholds have x in the support of their uniform noise: all that its slope needs.

    A bit for each of up to eight thresholds; on a line, their number. None for NaN.
    """
    if KIND == "line":
        nearest, distance, spacing = window.nearest(x - mean, table, row, COUNT)
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
    """The slope under uniform noise from what :func:`support` found."""
    scale = inverse(std) * UNIFORM_DENSITY
    if KIND == "line":
        total = bits.to(scale.dtype) * tl.load(table + row + 2 * COUNT + 1)
    else:
        total = tl.zeros_like(bits).to(scale.dtype)
        for k in tl.static_range(COUNT):
            total += tl.where((bits >> k) & 1 != 0, tl.load(table + row + 2 * COUNT + 1 + k), 0.0)
    return total * scale


@triton.jit
def index(x, table, row, COUNT: tl.constexpr, KIND: tl.constexpr):
    """#{k : x ≥ θₖ}; 0 for NaN."""
    if KIND == "line":
        # Dividing finds the threshold to within one; comparing with its neighbours decides.
        position = (x - tl.load(table + row)) * (1.0 / tl.load(table + row + 3 * COUNT + 1))
        guess = window.clip(position, COUNT - 2).to(tl.int32)
        number = guess + (x >= tl.load(table + row + guess)).to(tl.int32)
        number += (x >= tl.load(table + row + guess + 1)).to(tl.int32)
    elif COUNT <= FEW:
        number = (x >= tl.load(table + row)).to(tl.int32)
        for k in tl.static_range(1, COUNT):
            number += (x >= tl.load(table + row + k)).to(tl.int32)
    else:
        number = (x != x).to(tl.int32) * 0
        for bit in tl.static_range(16):
            if (32768 >> bit) <= COUNT:
                further = number + (32768 >> bit)
                at = tl.load(table + row + tl.minimum(further, COUNT) - 1)
                number = tl.where((further <= COUNT) & (x >= at), further, number)
    return number


@triton.jit
def level(number, table, row, COUNT: tl.constexpr):
    """q of each index: looked up, never summed."""
    if COUNT <= FEW:
        result = tl.where(
            number > 0, tl.load(table + row + COUNT + 1), tl.load(table + row + COUNT)
        )
        for k in tl.static_range(1, COUNT):
            result = tl.where(number > k, tl.load(table + row + COUNT + 1 + k), result)
    else:
        result = tl.load(table + row + COUNT + number)
    return result


@triton.jit
def is_dirac(std):
    """Too narrow for the dtype to divide by: the density would overflow."""
    return std < (1e-200 if std.dtype == tl.float64 else 1e-30)


@triton.jit
def inverse(std):
    """1/β, and 0 where the noise is a Dirac: then every density vanishes with it."""
    dirac = is_dirac(std)
    return tl.where(dirac, 0.0, 1.0 / tl.where(dirac, 1.0, std))


@triton.jit
def _mode(x, table, row, std, COUNT: tl.constexpr, FAMILY: tl.constexpr, KIND: tl.constexpr):
    """The index of the likeliest level; ties, and differences within a few ulp, go to σ(x)."""
    home = index(x, table, row, COUNT, KIND)
    tie = 8 * (2.220446049250313e-16 if x.dtype == tl.float64 else 1.1920928955078125e-07)
    lead = tl.where(is_dirac(std), 2.0, tie)  # no probability is so much larger than another
    if COUNT == 1:
        number = home
    elif KIND == "uneven":
        winner, best, own = _likeliest(x, home, table, row, inverse(std), COUNT, FAMILY)
        number = tl.where(best > own + lead, winner, home)
    elif FAMILY == "uniform":
        # An end wins up to where its bin's share of the noise is that of a whole bin.
        first, last = tl.load(table + row), tl.load(table + row + COUNT - 1)
        margin = std * (SQRT3 * (1 - 2 * tie)) - tl.load(table + row + 3 * COUNT + 1)
        margin = tl.minimum(tl.maximum(margin, 0.0), 0.5 * (last - first))
        number = tl.where(x < first + margin, 0, home)
        number = tl.where(x >= last - margin, COUNT, number)
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
        number = tl.where(wins, tl.where(above_first < below_last, 0, COUNT), home)
    return number


@triton.jit
def _likeliest(x, home, table, row, scale, COUNT: tl.constexpr, FAMILY: tl.constexpr):
    """argmaxₖ pₖ, its probability and that of x's own bin, by one walk along the thresholds."""
    above = tl.zeros_like(x) + 1.0
    best = tl.zeros_like(x)
    own = tl.zeros_like(x)
    winner = home * 0
    if COUNT <= FEW:
        for k in tl.static_range(COUNT):
            here = above
            above = cdf((x - tl.load(table + row + k)) * scale, FAMILY)
            own = tl.where(home == k, here - above, own)
            winner = tl.where(here - above > best, k, winner)
            best = tl.maximum(best, here - above)
    else:
        for k in range(COUNT):
            here = above
            above = cdf((x - tl.load(table + row + k)) * scale, FAMILY)
            own = tl.where(home == k, here - above, own)
            winner = tl.where(here - above > best, k, winner)
            best = tl.maximum(best, here - above)
    own = tl.where(home == COUNT, above, own)
    winner = tl.where(above > best, COUNT, winner)
    return winner, tl.maximum(best, above), own


@triton.jit
def _expectation(x, table, row, std, COUNT: tl.constexpr, FAMILY: tl.constexpr, KIND: tl.constexpr):
    """q₀ + Σₖ (qₖ − qₖ₋₁)·F((x − θₖ)/β), kept between the end levels, beyond which rounding may
    have taken it."""
    scale = inverse(std)
    lowest, highest = tl.load(table + row + COUNT), tl.load(table + row + 2 * COUNT)
    if KIND == "line":
        rise = tl.load(table + row + 2 * COUNT + 1)
        number, distance, spacing = window.below(x, table, row, COUNT)
        above = window.above(number, distance, spacing, std, scale, COUNT, FAMILY)
        total = lowest + rise * above
    elif COUNT <= FEW:
        total = tl.zeros_like(x) + lowest
        for k in tl.static_range(COUNT):
            total += _share(k, x, table, row, scale, COUNT, FAMILY)
    else:
        total = tl.zeros_like(x) + lowest
        for k in range(COUNT):
            total += _share(k, x, table, row, scale, COUNT, FAMILY)
    return tl.where(total < lowest, lowest, tl.where(total > highest, highest, total))


@triton.jit
def _share(k, x, table, row, scale, COUNT: tl.constexpr, FAMILY: tl.constexpr):
    rise = tl.load(table + row + 2 * COUNT + 1 + k)
    return rise * cdf((x - tl.load(table + row + k)) * scale, FAMILY)


@triton.jit
def _density(k, x, table, row, scale, COUNT: tl.constexpr, FAMILY: tl.constexpr):
    rise = tl.load(table + row + 2 * COUNT + 1 + k)
    z = (x - tl.load(table + row + k)) * scale
    if FAMILY == "uniform":
        z += EDGE * SQRT3
    return rise * pdf(z, FAMILY)
