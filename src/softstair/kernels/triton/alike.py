"""Both passes where one stair and one noise are alike for all elements, in float32.

:func:`settle` works out once what every element needs; the others then cost an element a few
instructions a threshold, and read nothing but x. A stair is there either whole, a scalar for each
of its few thresholds and levels, or (``KIND`` "native") as the two lines that its thresholds and
levels are on, which :mod:`softstair.kernels.triton.line` works with: (n + first)·unit, rounded to
float32 and then to the tensor's dtype, is then the table to the bit (whoever says so has looked),
and needs no table.

Under symmetric, log-concave noise the mode is a stair too, σ with its thresholds kept between two
limits (see :mod:`softstair.kernels.modes`). All lanes of a program search for them at once.

``LAST`` is the last bit of x's dtype, as one of float32's. ``HALF`` says that it has 16 bits: then
what is less than float16 can hold need not be right. ``SHORT`` says that a line may be taken for
exact and the noise is no Dirac: one decision for a whole block.
"""

import triton
import triton.language as tl

from softstair.kernels.triton import lean, line, memory, shapes
from softstair.kernels.triton.climbing import EDGE, FEW, inverse, is_dirac
from softstair.kernels.triton.shapes import LOG2_E, RATE, SQRT3, UNIFORM_DENSITY

TIE = tl.constexpr(8 * 1.1920928955078125e-07)
POINTS = tl.constexpr(128)


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
    if COUNT <= FEW:
        stair = _whole(table, COUNT)
    else:
        stair = line.settle(table, mean, std, COUNT, FAMILY, HALF, FORWARD == "slope")
    limits = (mean, mean)
    if FORWARD == "mode":
        low, high = tl.load(table), tl.load(table + COUNT - 1)
        margin = low * 0.0
        if COUNT > 1:
            margin = _margin(low, high, tl.load(table + 3 * COUNT + 1), std, FAMILY, HALF)
        limits = (low + margin, high - margin)
        if COUNT > FEW:
            # Thresholds that stay where they are need not be kept between limits.
            thresholds, levels, window, short = stair
            stair = (thresholds, levels, window, short & (margin == 0.0))
    return mean, std, inverse(std), stair, limits


@triton.jit
def _whole(table, COUNT: tl.constexpr):
    """(thresholds, levels, rises)."""
    return _row(table, COUNT), _row(table + COUNT, COUNT + 1), _row(table + 2 * COUNT + 1, COUNT)


@triton.jit
def _row(pointer, COUNT: tl.constexpr):
    row = (tl.load(pointer),)
    for k in tl.static_range(1, COUNT):
        row = row + (tl.load(pointer + k),)  # type: ignore[assignment]  # noqa: RUF005
    return row


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
def is_short(settled):
    """Whether 16 bits may go the short way along this line; to the mode, if it is σ itself."""
    return settled[3][3]


@triton.jit
def climb_all(
    tensors,
    settled,
    COUNT: tl.constexpr,
    FAMILY: tl.constexpr,
    FORWARD: tl.constexpr,
    TRACED: tl.constexpr,
    LAST: tl.constexpr,
    SHORT: tl.constexpr,
    SPAN: tl.constexpr,
    RUNS: tl.constexpr,
):
    """Every block of this program, one after another."""
    x, y, trace, key, size = tensors
    lane, nought = tl.arange(0, SPAN), tl.full((), 0, tl.int64)
    for block in range(tl.program_id(0), tl.cdiv(size, RUNS * SPAN), tl.num_programs(0)):
        number = nought + block
        first = number * (RUNS * SPAN)
        left = size - first
        runs = memory.read(x + first, lane, left, SPAN, RUNS)
        it = (runs, key, number, y + first, trace + first, left)
        climb(it, settled, COUNT, FAMILY, FORWARD, TRACED, LAST, SHORT)


@triton.jit
def climb(
    block,
    settled,
    COUNT: tl.constexpr,
    FAMILY: tl.constexpr,
    FORWARD: tl.constexpr,
    TRACED: tl.constexpr,
    LAST: tl.constexpr,
    SHORT: tl.constexpr,
):
    """The values of a block's runs, and the bytes of their supports where those are asked for."""
    runs, key, number, y, trace, left = block
    SPAN: tl.constexpr = runs[0].shape[0]
    words = runs
    if FORWARD == "random":
        words = shapes.four(key, number, SPAN, LAST > 1)
    for run in tl.static_range(len(runs)):
        at = tl.arange(0, SPAN) + run * SPAN
        x = memory.widened(runs[run], tl.float32)
        result = value(x, settled, words[run], COUNT, FAMILY, FORWARD, LAST, SHORT)
        memory.write(y, at, left, result)
        if TRACED:
            memory.write(trace, at, left, support(x, settled, COUNT, LAST, SHORT))


@triton.jit
def descend(
    block,
    settled,
    COUNT: tl.constexpr,
    FAMILY: tl.constexpr,
    LAST: tl.constexpr,
    SHORT: tl.constexpr,
):
    """grad·slope for a block's runs."""
    runs, grads, out, left = block
    SPAN: tl.constexpr = runs[0].shape[0]
    for run in tl.static_range(len(runs)):
        at = tl.arange(0, SPAN) + run * SPAN
        result = slope(memory.widened(runs[run], tl.float32), settled, COUNT, FAMILY, LAST, SHORT)
        memory.write(out, at, left, memory.widened(grads[run], tl.float32) * result)


@triton.jit
def value(
    x,
    settled,
    word,
    COUNT: tl.constexpr,
    FAMILY: tl.constexpr,
    FORWARD: tl.constexpr,
    LAST: tl.constexpr,
    SHORT: tl.constexpr,
):
    """The forward pass on a run of x in float32; ``word`` is random bits, if it draws."""
    HALF: tl.constexpr = LAST > 1
    mean, std, _, stair, _ = settled
    if FORWARD == "hard":
        result = _number(x) + _look(x, stair, 0.0, COUNT, LAST)
    elif FORWARD == "random":
        result = _drawn(x, settled, word, COUNT, FAMILY, LAST, SHORT)
    elif FORWARD == "mode" and SHORT:
        result = _number(x) + _look(x - mean, stair, 0.0, COUNT, LAST)
    elif FORWARD == "mode":
        result = _number(x) + _kept(x - mean, settled, COUNT, LAST)
    else:
        tl.static_assert(FORWARD == "expectation")
        if SHORT:
            result = line.expectation(x, stair, mean, std, COUNT, FAMILY, LAST, SHORT)
        # One decision for the whole block, so that soft noise does not pay for the look-up.
        elif is_dirac(std):
            result = _number(x) + _look(x - mean, stair, 0.0, COUNT, LAST)
        elif COUNT <= FEW:
            result = _sum(x, settled, COUNT, FAMILY, HALF)
        else:
            result = line.expectation(x, stair, mean, std, COUNT, FAMILY, LAST, SHORT)
        if FAMILY == "uniform":
            result += _number(x)
    return result


@triton.jit
def _number(x):
    """NaN, and 0 for everything else."""
    return lean.nought(x, 0.0)


@triton.jit
def slope(
    x,
    settled,
    COUNT: tl.constexpr,
    FAMILY: tl.constexpr,
    LAST: tl.constexpr,
    SHORT: tl.constexpr,
):
    """d/dx E[σ(x − ν)] on a run of x in float32; 0 for a Dirac. Not for uniform noise."""
    mean, std, scale, stair, _ = settled
    factor = scale * lean.peak(FAMILY)
    if COUNT <= FEW:
        thresholds, _, rises = stair
        # Any finite number will do for a Dirac, since the factor is 0.
        sharp = tl.where(is_dirac(std), 1.0, scale) * lean.sharpness(FAMILY, True)
        total = tl.zeros_like(x)
        for k in tl.static_range(COUNT):
            z = _z(x, mean, thresholds[k], sharp, 0.0, LAST > 1)
            total += (rises[k] * factor) * lean.hump(z, FAMILY)
    else:
        total = line.slope(x, stair, mean, factor * stair[1][1], FAMILY, LAST, SHORT)
    return total


@triton.jit
def support(x, settled, COUNT: tl.constexpr, LAST: tl.constexpr, SHORT: tl.constexpr):
    """Which thresholds have x in the support of their uniform noise, as in the climbing module."""
    mean, std, _, stair, _ = settled
    if COUNT <= FEW:
        half = std * SQRT3
        total = tl.zeros_like(x) + line.WHOLE
        for k in tl.static_range(COUNT):
            # A little to the left, so that an edge between two supports is in the upper one.
            depth = half - tl.abs(x - (mean + (stair[0][k] - half * EDGE)))
            # 1 or 0 without comparing: machines do more products at a time than comparisons.
            total += tl.minimum(tl.maximum(depth * 3e38, 0.0), 1.0) * (1 << k)
        bits = total.to(tl.int32, bitcast=True)
    else:
        bits = line.support(x, stair, mean, std, COUNT, LAST, SHORT)
    return bits


@triton.jit
def _look(x, stair, shift, COUNT: tl.constexpr, LAST: tl.constexpr):
    """σ(x − shift): looked up, or on the line, never summed."""
    if COUNT <= FEW:
        thresholds, levels, _ = stair
        result = tl.where(x >= thresholds[0] + shift, levels[1], levels[0])
        for k in tl.static_range(1, COUNT):
            result = tl.where(x >= thresholds[k] + shift, levels[k + 1], result)
    else:
        result = line.look(x - shift, stair, COUNT, LAST)
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
        result = line.keep(x, stair, low, high, COUNT, LAST)
    return result


@triton.jit
def _drawn(
    x,
    settled,
    word,
    COUNT: tl.constexpr,
    FAMILY: tl.constexpr,
    LAST: tl.constexpr,
    SHORT: tl.constexpr,
):
    """σ(x − ν), ν drawn with the random bits; NaN for NaN."""
    mean, std, _, stair, _ = settled
    std = tl.where(is_dirac(std), 0.0, std)
    if SHORT:
        result = line.draw(x, stair, mean, std, word, COUNT, FAMILY, LAST)
    elif LAST > 1:
        moved = x - lean.draw(word, std, FAMILY)
        result = _number(x) + _look(moved, stair, mean, COUNT, LAST)
    else:
        if FAMILY == "uniform":
            width = std * (2 * SQRT3)
            # From 1 to 2, each in the middle of its share; what brings it to 0 is alike for all.
            moved = (x - (mean - (1.5 - 0.5 / 8388608) * width)) - width * shapes.significand(word)
        else:
            moved = (x - mean) - std * shapes.ppf(shapes.uniform(word), FAMILY)
        result = _number(x) + _look(moved, stair, 0.0, COUNT, LAST)
    return result


@triton.jit
def _sum(x, settled, COUNT: tl.constexpr, FAMILY: tl.constexpr, HALF: tl.constexpr):
    """q₀ + Σₖ (qₖ − qₖ₋₁)·F((x − mean − θₖ)/β)."""
    mean, _, scale, stair, _ = settled
    thresholds, levels, rises = stair
    lowest, highest = levels[0], levels[COUNT]
    if FAMILY == "logistic" and COUNT == 2:
        # Both shares by one reciprocal.
        steep = scale * -(RATE * LOG2_E)
        a = 1.0 + lean.power(_z(x, mean, thresholds[0], steep, 0.0, HALF))
        b = 1.0 + lean.power(_z(x, mean, thresholds[1], steep, 0.0, HALF))
        root = tl.rsqrt(a * b)
        total = lowest + (rises[0] * b + rises[1] * a) * root * root
    else:
        total = tl.zeros_like(x) + _base(lowest, rises, COUNT, FAMILY)
        for k in tl.static_range(COUNT):
            total += _share(x, mean, thresholds[k], scale, rises[k], FAMILY, HALF)
    if not HALF:
        # Rounding may have taken it beyond the ends; to 16 bits it rounds back.
        total = lean.between(total, lowest, highest)
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
    elif FAMILY == "logistic":
        root = tl.rsqrt(1.0 + tl.exp2(_z(x, mean, threshold, scale * -(RATE * LOG2_E), 0.0, HALF)))
        share = rise * root * root
    else:
        sharp = scale * lean.sharpness(FAMILY, False)
        share = rise * lean.odd(_z(x, mean, threshold, sharp, 0.0, HALF), FAMILY, HALF)
    return share
