"""Thresholds on a line, where one stair and one noise are alike for all elements, in float32.

Sums over thresholds take a window of neighbouring ones: as many as the noise reaches from any x,
and all of them on the stair, so that nothing needs to be masked at its ends. A window of W begins
at threshold m, the one that brings its middle next to x. Those before it count in full, those after
it not at all, and so Σₖ F = m + Σ F over the window: a cost that depends on β and not on K.

Distances from x are in ``sharp`` units, those in which a family's shape is cheapest: e^{−z²/2} is
2^{−t²}, for one. The logistic terms are functions of numbers that rise by one factor from
threshold to threshold, and need one exponential together.

For 16 bits there is a short way, which leaves the line as it was given, wherever the noise is wider
than what rounding to the dtype moves a threshold by (``UNFELT``). Where it is narrower, the nearest
threshold is taken to the bit, as it was rounded, and a window begins with one that is; those after
it in the window, where there are any, are on a line with it.
"""

import triton
import triton.language as tl

from softstair.kernels.triton import lean
from softstair.kernels.triton.climbing import EDGE, inverse, is_dirac
from softstair.kernels.triton.shapes import INTERPRETED, SQRT3, SQRT6

WHOLE = tl.constexpr(12582912.0)
"""1.5·2²³, where float32 has whole numbers only: adding it rounds."""
EDGE_ALONG = tl.constexpr(2.0**-21)
"""Of a stair's length: so much more of the support is on the left of x, the short way."""
UNFELT = tl.constexpr(1 / 2)
"""Of the std: what rounding may move thresholds by where the line is left as it was given. Narrower
noise reaches one threshold at a time, if rounding moves it by less than a 24th of their distance.
"""


@triton.jit
def settle(
    table,
    mean,
    std,
    COUNT: tl.constexpr,
    FAMILY: tl.constexpr,
    HALF: tl.constexpr,
    SLOPE: tl.constexpr = False,
):
    """(thresholds, levels, window, whether the short way will do)."""
    unit, rise = tl.load(table + 3 * COUNT + 1), tl.load(table + 2 * COUNT + 1)
    rise_rest, unit_rest = tl.load(table + 3 * COUNT + 2), tl.load(table + 3 * COUNT + 3)
    lowest, highest = tl.load(table + COUNT), tl.load(table + 2 * COUNT)
    first = _first(tl.load(table), unit)
    thresholds = (first, unit, 1.0 / unit, unit_rest)
    levels = (_first(lowest, rise), rise, lowest, highest, rise_rest)
    # In the middle of nowhere for a Dirac: its terms are not used, or come to nothing.
    sharp = tl.where(is_dirac(std), 1.0, inverse(std)) * lean.sharpness(FAMILY, SLOPE)
    terms = _reach(std, unit, COUNT, FAMILY, HALF, SLOPE)
    span = COUNT - terms
    per_span = 1.0 / tl.maximum(span, 1.0)
    per_unit = per_span / unit
    shift = -(first + 0.5 * (terms - 1.0)) * per_span - mean * per_unit
    window = (terms.to(tl.int32), per_unit, shift, span, sharp, unit * sharp, 0.5 * terms)
    short = terms < 0
    if HALF:
        number = tl.arange(0, triton.next_power_of_2(COUNT))
        given = tl.load(table + number, mask=number < COUNT, other=0.0)
        moved = tl.where(number < COUNT, tl.abs(given - (number + first) * unit), 0.0)
        narrow = 1000 * EDGE_ALONG if FAMILY == "uniform" else 6e-5
        short = (tl.max(moved, 0) < UNFELT * std) & (std > narrow * COUNT * unit)
    return thresholds, levels, window, short


@triton.jit
def _first(value, unit):
    """The whole or half number of units that a line begins with."""
    return tl.floor(2.0 * (value / unit) + 0.5) * 0.5


@triton.jit
def _reach(
    std, unit, COUNT: tl.constexpr, FAMILY: tl.constexpr, HALF: tl.constexpr, SLOPE: tl.constexpr
):
    """How many neighbouring thresholds the noise reaches, at most.

    Unbounded noise ends where it has 2·10⁻⁸ of a rise left, or of the largest slope; for 16 bits,
    10⁻⁴. What is a hair more than a whole number is that number.
    """
    if FAMILY == "uniform":
        far = SQRT3
    elif FAMILY == "triangular":
        far = SQRT6
    elif FAMILY == "normal":
        far = (4.3 if SLOPE else 3.72) if HALF else (5.9 if SLOPE else 5.5)
    else:
        far = (5.85 if SLOPE else 5.1) if HALF else (10.5 if SLOPE else 9.8)
    terms = tl.ceil(std * (2.0 * far) / unit - 1e-4)
    return tl.minimum(tl.maximum(terms, 1.0), COUNT * 1.0)


@triton.jit
def look(x, line, COUNT: tl.constexpr, LAST: tl.constexpr):
    """σ(x), to the bit."""
    lowest, rise, _, _, rest = line[1]
    number, distance = nearest(x, line, COUNT, LAST)
    result = _times(number + tl.where(distance >= 0, lowest + 1.0, lowest), rise, rest, LAST)
    if INTERPRETED:
        # Storing rounds on a device, while the interpreter cuts bfloat16 off.
        result = _rounded(result, LAST)
    return result


@triton.jit
def keep(x, line, low, high, COUNT: tl.constexpr, LAST: tl.constexpr):
    """σ(x), but its ends below and above those."""
    result = look(x, line, COUNT, LAST)
    result = tl.where(x < low, line[1][2], result)
    return tl.where(x >= high, line[1][3], result)


@triton.jit
def draw(x, line, mean, std, word, COUNT: tl.constexpr, FAMILY: tl.constexpr, LAST: tl.constexpr):
    """σ(x − ν), the short way; NaN for NaN."""
    thresholds, levels, _, _ = line
    lowest, rise, _, _, _ = levels
    closeness = thresholds[2] * (1 / COUNT)
    moved = x - lean.draw(word, std, FAMILY)
    along = moved * closeness + ((0.5 - thresholds[0]) * (1 / COUNT) - mean * closeness)
    along = tl.minimum(tl.maximum(along, 0.0), 1.0)
    # Half of a level is left for the end, where it is fused with the product and costs nothing,
    # and brings NaN back.
    whole = tl.ceil(lowest)
    rest = lean.nought(x, (lowest - whole) * rise)
    result = ((along * COUNT + WHOLE) - (WHOLE - whole)) * rise + rest
    if INTERPRETED:
        result = _rounded(result, LAST)
    return result


@triton.jit
def nearest(x, line, COUNT: tl.constexpr, LAST: tl.constexpr):
    """The number of the threshold next to x, and how far x lies above it."""
    number = _steps(x, line[0][2], -line[0][0], COUNT - 1) - WHOLE
    return number, x - _threshold(number, line, LAST)


@triton.jit
def _threshold(number, line, LAST: tl.constexpr):
    """The threshold of that number, to the bit."""
    first, unit, _, rest = line[0]
    return _rounded(_times(number + first, unit, rest, LAST), LAST)


@triton.jit
def _times(number, step, rest, LAST: tl.constexpr):
    """number·(step + rest) in float32, rounded once; for 16 bits it need not be so exact."""
    if LAST > 1:
        product = number * step
    elif INTERPRETED:
        # The interpreter's fma rounds twice.
        product = (number.to(tl.float64) * step + number * rest).to(tl.float32)
    else:
        product = tl.fma(number, step, number * rest)
    return product


@triton.jit
def _steps(x, closeness, shift, HIGHEST: tl.constexpr):
    """The whole number next to x·closeness + shift, from 0 to the highest, with ``WHOLE``."""
    # From 0 to 1 along the stair: the machine's products end there for nothing.
    along = x * (closeness * (1 / HIGHEST)) + shift * (1 / HIGHEST)
    return tl.minimum(tl.maximum(along, 0.0), 1.0) * HIGHEST + WHOLE


@triton.jit
def _rounded(number, LAST: tl.constexpr):
    """To the dtype's bits, ties away from 0: in place, since two conversions would cost more."""
    if LAST > 1:
        bits = number.to(tl.uint32, bitcast=True) + LAST // 2
        number = (bits & (4294967296 - LAST)).to(tl.float32, bitcast=True)
    return number


@triton.jit
def reached(x, line, mean, std, COUNT: tl.constexpr, LAST: tl.constexpr, SHORT: tl.constexpr):
    """Of uniform noise: a threshold's number, x's place beside it in units, and, both with
    ``WHOLE``, how many thresholds are below all of x's support and how many below its end, counted
    from that number. Beyond the stair, and for NaN, these two are one."""
    first, _, closeness, _ = line[0]
    half = std * SQRT3 * closeness
    if SHORT:
        number, place = 0.0, x * closeness - (first + mean * closeness)
        # A little to the left, as there, but by more than what rounding may take it.
        middle = (0.5 + EDGE_ALONG * COUNT) - (first + mean * closeness)
        low = _steps(x, closeness, middle - half, COUNT)
        high = _steps(x, closeness, middle + half, COUNT)
    else:
        number, distance = nearest(x - mean, line, COUNT, LAST)
        place = distance * closeness
        top = COUNT - number
        low = tl.maximum(place + (0.5 - half * (1.0 - EDGE)), -number)
        high = tl.maximum(place + (0.5 + half * (1.0 + EDGE)), -number)
        low, high = tl.minimum(low, top) + WHOLE, tl.minimum(high, top) + WHOLE
    return number, place, half, low, high


@triton.jit
def support(x, line, mean, std, COUNT: tl.constexpr, LAST: tl.constexpr, SHORT: tl.constexpr):
    """How many thresholds have x in the support of their uniform noise."""
    _, _, _, low, high = reached(x, line, mean, std, COUNT, LAST, SHORT)
    return high.to(tl.int32, bitcast=True) - low.to(tl.int32, bitcast=True)


@triton.jit
def expectation(
    x,
    line,
    mean,
    std,
    COUNT: tl.constexpr,
    FAMILY: tl.constexpr,
    LAST: tl.constexpr,
    SHORT: tl.constexpr,
):
    """q₀ + rise·Σₖ F((x − mean − θₖ)/β); under uniform noise by an arithmetic progression."""
    _, levels, window, _ = line
    _, rise, lowest, highest, _ = levels
    if LAST > 1:
        # Not as 16 bits have it, which would move every level above it.
        lowest = levels[0] * rise
    if FAMILY == "uniform":
        number, place, half, low, high = reached(x, line, mean, std, COUNT, LAST, SHORT)
        count, low = high - low, low - WHOLE
        # The average share of those below high that are not below low, where there are some.
        average = (place - (low + 0.5 * count)) * (0.5 / half) + (0.5 + 0.25 / half)
        average = tl.minimum(tl.maximum(average, 0.0), 1.0)
        result = lowest + rise * (count * average + (low + number))
    else:
        start, z = _start(x, line, mean, LAST, SHORT)
        # Each term but its half, which is there from the beginning.
        result = (lowest + rise * window[6]) + rise * _sum(start, z, window, FAMILY, LAST > 1)
    if LAST == 1:
        # Rounding may have taken it beyond the ends; to 16 bits it rounds back.
        result = lean.between(result, lowest, highest)
    return result


@triton.jit
def slope(x, line, mean, factor, FAMILY: tl.constexpr, LAST: tl.constexpr, SHORT: tl.constexpr):
    """factor·Σₖ μ((x − mean − θₖ)/β), μ as :func:`lean.hump` has it."""
    window = line[2]
    _, z = _start(x, line, mean, LAST, SHORT)
    total = tl.zeros_like(x)
    if FAMILY == "logistic":
        low = lean.power(z)
        ratio = tl.exp2(-window[5])
        for _ in range(window[0]):
            root = tl.rsqrt(1.0 + low)
            share = root * root
            total += low * (share * share)
            low *= ratio
    else:
        for _ in range(window[0]):
            total += lean.hump(z, FAMILY)
            z -= window[5]
    return total * factor


@triton.jit
def _start(x, line, mean, LAST: tl.constexpr, SHORT: tl.constexpr):
    """Where the window begins, and how far above that threshold x lies."""
    first = line[0][0]
    _, per_unit, shift, span, sharp, step, _ = line[2]
    along = tl.minimum(tl.maximum(x * per_unit + shift, 0.0), 1.0)
    start = (along * span + WHOLE) - WHOLE
    if SHORT:
        z = (x * sharp - (first * step + mean * sharp)) - start * step
    else:
        z = ((x - mean) - _threshold(start, line, LAST)) * sharp
    return start, z


@triton.jit
def _sum(start, z, window, FAMILY: tl.constexpr, HALF: tl.constexpr):
    """start + Σ (F − ½) over the window."""
    total = start
    if FAMILY == "logistic":
        total -= window[6]
        low = lean.power(z)
        ratio = tl.exp2(-window[5])
        # Two terms at a time, 1/a + 1/b = (a + b)/ab.
        for _ in range(window[0] // 2):
            a = 1.0 + low
            b = 1.0 + low * ratio
            root = tl.rsqrt(a * b)
            total += ((a + b) * root) * root
            low *= ratio * ratio
        if window[0] % 2 == 1:
            root = tl.rsqrt(1.0 + low)
            total += root * root
    else:
        for _ in range(window[0]):
            total += lean.odd(z, FAMILY, HALF)
            z -= window[5]
    return total
