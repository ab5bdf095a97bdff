"""The forward pass where one stair and one noise are alike for all elements, in float32.

:func:`settle` works out once what every element needs; :func:`value` and :func:`support` then cost
an element a few instructions a threshold, and read nothing but x. A stair is there either whole, a
scalar for each of its few thresholds and levels, or (``KIND`` "native") as the two lines that its
thresholds and levels are on: fl((n + first)·unit), rounded once more to the tensor's dtype, is then
the table to the bit (:func:`softstair.kernels.triton.kind` has looked), and needs no table.

Under symmetric, log-concave noise the mode is a stair too, σ with its thresholds kept between two
limits (see :mod:`softstair.kernels.modes`). All lanes of a program search for them at once.

``HALF`` says that x has 16 bits: then what is less than float16 can hold need not be right.
``LAST`` is the last bit of its dtype, as one of float32's.
"""

import triton
import triton.language as tl

from softstair.kernels.triton import shapes, window
from softstair.kernels.triton.climbing import EDGE, FEW, inverse, is_dirac
from softstair.kernels.triton.shapes import INTERPRETED, LOG2_E, RATE, SQRT3, SQRT6, UNIFORM_DENSITY

TIE = tl.constexpr(8 * 1.1920928955078125e-07)
POINTS = tl.constexpr(128)
WHOLE = tl.constexpr(12582912.0)
"""1.5·2²³, where float32 has whole numbers only: adding it rounds."""


@triton.jit
def settle(
    table,
    mean,
    std,
    COUNT: tl.constexpr,
    FAMILY: tl.constexpr,
    FORWARD: tl.constexpr,
    HALF: tl.constexpr,
):
    """(mean, std, 1/std, the stair, the limits of the mode)."""
    stair = _whole(table, COUNT) if COUNT <= FEW else _lines(table, COUNT)
    limits = (mean, mean)
    if FORWARD == "mode":
        low, high = tl.load(table), tl.load(table + COUNT - 1)
        margin = low * 0.0
        if COUNT > 1:
            margin = _margin(low, high, tl.load(table + 3 * COUNT + 1), std, FAMILY, HALF)
        limits = (low + margin, high - margin)
    return mean, std, inverse(std), stair, limits


@triton.jit
def _whole(table, COUNT: tl.constexpr):
    """(thresholds, levels, rises)."""
    return _row(table, COUNT), _row(table + COUNT, COUNT + 1), _row(table + 2 * COUNT + 1, COUNT)


@triton.jit
def _lines(table, COUNT: tl.constexpr):
    """(first threshold in units, unit, 1/unit, first level in rises, rise, end levels)."""
    unit, rise = tl.load(table + 3 * COUNT + 1), tl.load(table + 2 * COUNT + 1)
    lowest, highest = tl.load(table + COUNT), tl.load(table + 2 * COUNT)
    return (
        _first(tl.load(table), unit),
        unit,
        1.0 / unit,
        _first(lowest, rise),
        rise,
        lowest,
        highest,
    )


@triton.jit
def _row(pointer, COUNT: tl.constexpr):
    row = (tl.load(pointer),)
    for k in tl.static_range(1, COUNT):
        row = row + (tl.load(pointer + k),)  # type: ignore[assignment]  # noqa: RUF005
    return row


@triton.jit
def _first(value, unit):
    """The whole or half number of units that a line begins with."""
    return tl.floor(2.0 * (value / unit) + 0.5) * 0.5


@triton.jit
def _margin(first, last, spacing, std, FAMILY: tl.constexpr, HALF: tl.constexpr):
    """How far beyond its threshold the end of a stair wins; at most to the middle."""
    half = 0.5 * (last - first)
    dirac = is_dirac(std)
    if FAMILY == "uniform":
        margin = tl.maximum(std * (SQRT3 * (1 - 2 * TIE)) - spacing, 0.0)
    else:
        scale = inverse(std)
        point = tl.arange(1, POINTS + 1).to(tl.float32)
        margin, step = half * 0.0, half * (1 / POINTS)
        # Each round tells seven bits of it: 21, or 28.
        for _ in tl.static_range(3 if HALF else 4):
            distance = margin + point * step
            own = distance - tl.floor(distance / spacing) * spacing
            end = shapes.tail(distance * scale, FAMILY)
            inside = 1.0 - shapes.tail(own * scale, FAMILY)
            inside -= shapes.tail((spacing - own) * scale, FAMILY)
            margin += tl.sum((end > inside + TIE).to(tl.float32)) * step
            step *= 1 / POINTS
    return tl.where(dirac, 0.0, tl.minimum(margin, half))


@triton.jit
def value(
    x,
    settled,
    word,
    COUNT: tl.constexpr,
    FAMILY: tl.constexpr,
    FORWARD: tl.constexpr,
    HALF: tl.constexpr,
    LAST: tl.constexpr,
):
    """The forward pass on a block of x in float32; ``word`` is random bits, if it draws."""
    mean, std, _, _, _ = settled
    if FORWARD == "hard":
        result = _look(x, settled, COUNT, LAST)
    elif FORWARD == "random":
        result = _look(_noisy(x, mean, std, word, FAMILY, HALF), settled, COUNT, LAST)
    elif FORWARD == "mode":
        result = _kept(x - mean, settled, COUNT, LAST)
    else:
        tl.static_assert(FORWARD == "expectation")
        # One decision for the whole block, so that soft noise does not pay for the look-up.
        if is_dirac(std):
            result = _look(x - mean, settled, COUNT, LAST)
        elif COUNT <= FEW:
            result = _sum(x, settled, COUNT, FAMILY, HALF)
        else:
            result = _sum_on_line(x - mean, settled, COUNT, FAMILY, HALF, LAST)
    # NaN, and 0 for everything else: min keeps a NaN, and infinity does not reach the product.
    number = tl.minimum(tl.abs(x), 1.0, propagate_nan=tl.PropagateNan.ALL)
    return number * 0.0 + result


@triton.jit
def support(x, settled, COUNT: tl.constexpr, LAST: tl.constexpr):
    """Which thresholds have x in the support of their uniform noise, as in the climbing module."""
    mean, std, _, stair, _ = settled
    centred = x - mean
    if COUNT <= FEW:
        half = std * SQRT3
        bits = tl.zeros_like(x).to(tl.int32)
        for k in tl.static_range(COUNT):
            # A little to the left, so that an edge between two supports is in the upper one.
            inside = tl.abs(centred - (stair[0][k] - half * EDGE)) < half
            bits |= tl.where(inside, 1 << k, 0)
    else:
        number, distance = _nearest(centred, stair, COUNT, LAST)
        _, _, count = _reached(number, distance * stair[2], std * SQRT3 * stair[2], COUNT)
        bits = (count + WHOLE).to(tl.int32, bitcast=True)
    return bits


@triton.jit
def _look(x, settled, COUNT: tl.constexpr, LAST: tl.constexpr):
    """σ(x): looked up, or on the line, never summed."""
    _, _, _, stair, _ = settled
    if COUNT <= FEW:
        thresholds, levels, _ = stair
        result = tl.where(x >= thresholds[0], levels[1], levels[0])
        for k in tl.static_range(1, COUNT):
            result = tl.where(x >= thresholds[k], levels[k + 1], result)
    else:
        number, distance = _nearest(x, stair, COUNT, LAST)
        result = (number + tl.where(distance >= 0, stair[3] + 1.0, stair[3])) * stair[4]
        if INTERPRETED:
            # Storing rounds on a device, while the interpreter cuts bfloat16 off.
            result = _rounded(result, LAST)
    return result


@triton.jit
def _kept(x, settled, COUNT: tl.constexpr, LAST: tl.constexpr):
    """σ(x) with its thresholds kept between the limits of the mode."""
    _, _, _, stair, limits = settled
    low, high = limits
    if COUNT <= FEW:
        thresholds, levels, _ = stair
        kept = tl.minimum(tl.maximum(thresholds[0], low), high)
        result = tl.where(x >= kept, levels[1], levels[0])
        for k in tl.static_range(1, COUNT):
            kept = tl.minimum(tl.maximum(thresholds[k], low), high)
            result = tl.where(x >= kept, levels[k + 1], result)
    else:
        result = _look(x, settled, COUNT, LAST)
        result = tl.where(x < low, stair[5], result)
        result = tl.where(x >= high, stair[6], result)
    return result


@triton.jit
def _noisy(x, mean, std, word, FAMILY: tl.constexpr, HALF: tl.constexpr):
    """x less a draw of the noise."""
    std = tl.where(is_dirac(std), 0.0, std)
    if FAMILY == "uniform":
        width = std * (2 * SQRT3)
        # From 1 to 2, each in the middle of its share; what brings it to 0 is alike for all.
        moved = (x - (mean - (1.5 - 0.5 / 8388608) * width)) - width * shapes.significand(word)
    else:
        moved = (x - mean) - std * shapes.ppf(shapes.uniform(word), FAMILY, HALF)
    return moved


@triton.jit
def _sum(x, settled, COUNT: tl.constexpr, FAMILY: tl.constexpr, HALF: tl.constexpr):
    """q₀ + Σₖ (qₖ − qₖ₋₁)·F((x − mean − θₖ)/β)."""
    mean, _, scale, stair, _ = settled
    thresholds, levels, rises = stair
    lowest, highest = levels[0], levels[COUNT]
    if FAMILY == "logistic" and COUNT == 2:
        # Both shares by one reciprocal; beyond 2⁵⁰ there is nothing left of either.
        steep = scale * -(RATE * LOG2_E)
        a = 1.0 + tl.exp2(tl.minimum(_z(x, mean, thresholds[0], steep, 0.0, HALF), 50.0))
        b = 1.0 + tl.exp2(tl.minimum(_z(x, mean, thresholds[1], steep, 0.0, HALF), 50.0))
        root = tl.rsqrt(a * b)
        total = lowest + (rises[0] * b + rises[1] * a) * root * root
    else:
        total = tl.zeros_like(x) + _base(lowest, rises, COUNT, FAMILY)
        for k in tl.static_range(COUNT):
            total += _share(x, mean, thresholds[k], scale, rises[k], FAMILY, HALF)
    if not HALF:
        # Rounding may have taken it beyond the ends; to 16 bits it rounds back.
        total = tl.minimum(tl.maximum(total, lowest), highest)
    return total


@triton.jit
def _z(x, mean, threshold, scale, plus: tl.constexpr, HALF: tl.constexpr):
    """(x − mean − θ)·scale + plus; in one step where the difference need not be exact."""
    if HALF:
        z = x * scale + (plus - (threshold + mean) * scale)
    else:
        z = ((x - mean) - threshold) * scale + plus
    return z


@triton.jit
def _base(lowest, rises, COUNT: tl.constexpr, FAMILY: tl.constexpr):
    """What the sum begins with: half of all rises too, where a share is one of F − ½."""
    base = lowest
    if FAMILY == "normal" or FAMILY == "triangular":
        for k in tl.static_range(COUNT):
            base += 0.5 * rises[k]
    return base


@triton.jit
def _share(x, mean, threshold, scale, rise, FAMILY: tl.constexpr, HALF: tl.constexpr):
    """rise·F, or rise·(F − ½)."""
    if FAMILY == "uniform":
        z = _z(x, mean, threshold, scale * UNIFORM_DENSITY, 0.5, HALF)
        share = rise * tl.minimum(tl.maximum(z, 0.0), 1.0)
    elif FAMILY == "triangular":
        z = _z(x, mean, threshold, scale * (0.5 / SQRT6), 0.5, HALF)
        h = tl.minimum(tl.maximum(z, 0.0), 1.0) - 0.5
        share = (2.0 * rise) * (h * (1.0 - tl.abs(h)))
    elif FAMILY == "normal":
        z = _z(x, mean, threshold, scale, 0.0, HALF)
        half = 0.5 - shapes.tail(tl.abs(z), "normal", HALF)
        sign = z.to(tl.uint32, bitcast=True) & 0x80000000
        share = rise * (half.to(tl.uint32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
    else:
        root = tl.rsqrt(1.0 + tl.exp2(_z(x, mean, threshold, scale * -(RATE * LOG2_E), 0.0, HALF)))
        share = rise * root * root
    return share


@triton.jit
def _sum_on_line(
    x, settled, COUNT: tl.constexpr, FAMILY: tl.constexpr, HALF: tl.constexpr, LAST: tl.constexpr
):
    """The same along a line; under uniform noise by the sum of an arithmetic progression."""
    _, std, scale, stair, _ = settled
    spacing, closeness, rise = stair[1], stair[2], stair[4]
    number, distance = _nearest(x, stair, COUNT, LAST)
    if FAMILY == "uniform":
        rho, eta = distance * closeness, std * SQRT3 * closeness
        low, high, count = _reached(number, rho, eta, COUNT)
        # The average share of the thresholds after low up to high, where there are some.
        middle = rho - 0.5 * (low + high)
        average = middle * (0.5 / eta) + (0.5 - 0.25 / eta)
        average = tl.minimum(tl.maximum(average, 0.0), 1.0)
        total = count * average + (low + number + 1.0)
    else:
        number, distance = window.settle(number, distance, spacing)
        total = window.above(number, distance, spacing, std, scale, COUNT, FAMILY, HALF)
    total = stair[5] + rise * total
    return tl.minimum(tl.maximum(total, stair[5]), stair[6])


@triton.jit
def _nearest(x, stair, COUNT: tl.constexpr, LAST: tl.constexpr):
    """The number of the threshold next to x, and how far x lies above it."""
    first, spacing, closeness = stair[0], stair[1], stair[2]
    # From 0 to 1 along the stair: the machine's products end there for nothing.
    along = x * (closeness * (1 / (COUNT - 1))) - first * (1 / (COUNT - 1))
    along = tl.minimum(tl.maximum(along, 0.0), 1.0)
    number = (along * (COUNT - 1) + WHOLE) - WHOLE
    return number, x - _rounded((number + first) * spacing, LAST)


@triton.jit
def _rounded(number, LAST: tl.constexpr):
    """To the dtype's bits, ties away from 0: in place, since two conversions would cost more."""
    if LAST > 1:
        bits = number.to(tl.uint32, bitcast=True) + LAST // 2
        number = (bits & (4294967296 - LAST)).to(tl.float32, bitcast=True)
    return number


@triton.jit
def _reached(number, rho, eta, COUNT: tl.constexpr):
    """The last threshold below all of x's support, the last below its end, both counted from the
    nearest, and how many are between. Far beyond the stair there is none between; none for NaN."""
    top = (COUNT - 1.0) - number
    low = tl.floor(tl.maximum(rho - eta * (1.0 - EDGE), top - COUNT))
    high = rho + eta * (1.0 + EDGE)
    high = tl.floor(tl.minimum(high, top, propagate_nan=tl.PropagateNan.ALL))
    return low, high, tl.maximum(high - low, 0.0)
