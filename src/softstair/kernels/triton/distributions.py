"""Noise families and random numbers for blocks in Triton: :mod:`softstair.noise` on the device.

``FAMILY`` is the name of the family, known at compile time; a block is float32.

The normal tail is 2^{P(d)} with P of degree 8: an absolute error of 9·10⁻⁸ and a relative one of
1 % up to nine standard deviations, at a fraction of the cost of the library's error function. The
inverse of the normal cdf is (u − ½)·P(w)/Q(w) with w = −log 4u(1 − u): relative error 2.5·10⁻⁷ for
u ≥ 2⁻²⁴.

The second half of the noise functions (from :func:`units_per_std` on) works in units in which a
family costs the fewest instructions: the normal density is 2^{−t²}, the logistic odds are 2^t (t
falls as x grows), and the triangular support ends at 1. They keep NaN; those of the first half lose
it for bounded families, whose callers restore it.
"""

import math

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

UNIFORM_DENSITY = tl.constexpr(0.5 / math.sqrt(3.0))
SQRT3 = tl.constexpr(math.sqrt(3.0))
SQRT6 = tl.constexpr(math.sqrt(6.0))
NORMAL_DENSITY = tl.constexpr(1 / math.sqrt(2 * math.pi))
RATE = tl.constexpr(math.pi / math.sqrt(3.0))
LOG2_E = tl.constexpr(1 / math.log(2.0))
LN_2 = tl.constexpr(math.log(2.0))
HALF_LOG2_E = tl.constexpr((0.5 * LOG2_E.value) ** 0.5)
INSIDE = tl.constexpr((1 - 2**-23) / 2**31)
"""Maps a 32-bit integer strictly into (−1, 1)."""
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels run on the CPU, slowly."""
IS_CUDA = tl.constexpr(not INTERPRETED.value and torch.version.hip is None)
"""Whether PTX may be used: a fast logarithm, and one instruction for both halves of a product."""
ROUNDS = tl.constexpr(7)
"""Rounds of Philox: the fewest that pass every test of randomness its authors ran."""


@triton.jit
def tail(d, FAMILY: tl.constexpr):
    """P(Z > d) for d ≥ 0."""
    if FAMILY == "uniform":
        p = tl.maximum(0.5 - d * UNIFORM_DENSITY, 0.0)
    elif FAMILY == "triangular":
        rest = tl.maximum(1.0 - d * (1 / SQRT6), 0.0)
        p = 0.5 * rest * rest
    elif FAMILY == "normal":
        p = _normal_tail(d)
    else:
        tl.static_assert(FAMILY == "logistic")
        p = _sigmoid(d * -RATE)
    return p


@triton.jit
def _normal_tail(d):
    p = -4.29584671e-07 * d + 8.88849951e-06
    p = p * d - 3.79008894e-05
    p = p * d - 4.92812384e-04
    p = p * d + 7.51255706e-03
    p = p * d - 5.27885138e-02
    p = p * d - 4.59119408e-01
    p = p * d - 1.15111501
    return tl.exp2(p * d - 0.999999823)


@triton.jit
def _sigmoid(y):
    """1/(1 + e^{−y})."""
    # rsqrt is one instruction, a division is nine.
    root = tl.rsqrt(1.0 + tl.exp2(y * -LOG2_E))
    return root * root


@triton.jit
def cdf(z, FAMILY: tl.constexpr):
    """F(z) = P(Z ≤ z), to a few ulp of 1."""
    if FAMILY == "uniform":
        p = tl.minimum(tl.maximum(z * UNIFORM_DENSITY + 0.5, 0.0), 1.0)
    elif FAMILY == "logistic":
        p = _sigmoid(z * RATE)
    else:
        beyond = tail(tl.abs(z), FAMILY)
        p = tl.where(z < 0, beyond, 1.0 - beyond)
    return p


@triton.jit
def pdf(z, FAMILY: tl.constexpr):
    """μ(z) = F′(z), right-continuous where it jumps."""
    if FAMILY == "uniform":
        inside = (z >= -SQRT3) & (z < SQRT3)
        p = tl.where(inside, z * 0.0 + UNIFORM_DENSITY, 0.0)
    elif FAMILY == "triangular":
        p = tl.maximum(SQRT6 - tl.abs(z), 0.0) * (1 / 6)
    elif FAMILY == "normal":
        p = tl.exp(-0.5 * z * z) * NORMAL_DENSITY
    else:
        tl.static_assert(FAMILY == "logistic")
        # e^{−a|z|} cannot overflow, and keeps the tails that F(1 − F) would round away.
        decay = tl.exp(tl.abs(z) * -RATE)
        share = 1.0 / (1.0 + decay)
        p = decay * share * share * RATE
    return p


@triton.jit
def ppf(u, FAMILY: tl.constexpr):
    """The inverse of the cdf at 0 < u < 1."""
    if FAMILY == "uniform":
        z = (2.0 * u - 1.0) * SQRT3
    elif FAMILY == "triangular":
        reach = SQRT6 - tl.sqrt(tl.minimum(u, 1.0 - u)) * (2 * SQRT3)
        z = tl.where(u < 0.5, -reach, reach)
    elif FAMILY == "normal":
        z = _normal_ppf(u)
    else:
        tl.static_assert(FAMILY == "logistic")
        z = (_log2(u) - _log2(1.0 - u)) * (LN_2 / RATE)
    return z


@triton.jit
def _normal_ppf(u):
    side = u - 0.5
    # Logarithms to base 2, the GPU's own.
    w = -_log2(u * (4.0 - 4.0 * u))
    p = 3.32784407e-06 * w + 5.10401564e-04
    p = p * w + 8.90887646e-03
    p = p * w + 9.67162803e-02
    p = p * w + 6.83968716e-01
    p = p * w + 2.50662889
    q = 2.7662901e-05 * w + 1.01853636e-03
    q = q * w + 1.57241493e-02
    q = q * w + 9.14029485e-02
    q = q * w + 1.0
    root = tl.rsqrt(q)
    return (side * root) * (p * root)


@triton.jit
def _log2(y):
    return libdevice.fast_log2f(y) if IS_CUDA else tl.log2(y)


@triton.jit
def units_per_std(FAMILY: tl.constexpr, SLOPE: tl.constexpr):
    """Units of the functions below per standard deviation; not for uniform noise."""
    if FAMILY == "triangular":
        unit = 1 / SQRT6
    elif FAMILY == "normal":
        unit = HALF_LOG2_E if SLOPE else 1.0
    else:
        unit = -RATE * LOG2_E
    return unit


@triton.jit
def centred_cdf(z, FAMILY: tl.constexpr):
    """F − ½, an odd function, for triangular and normal noise."""
    if FAMILY == "triangular":
        rest = tl.maximum(1.0 - tl.abs(z), 0.0, propagate_nan=tl.PropagateNan.ALL)
        half = 0.5 - 0.5 * (rest * rest)
    else:
        tl.static_assert(FAMILY == "normal")
        half = 0.5 - tail(tl.abs(z), "normal")
    return _copy_sign(half, z)


@triton.jit
def bounded_exp2(z):
    """2^z, at most 2⁶⁰: its reciprocal is then negligible and its products are finite."""
    return tl.exp2(tl.minimum(z, 60.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def clamp(value, low, high):
    value = tl.maximum(value, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(value, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def nan_else(x, value):
    """NaN where x is NaN, elsewhere ``value`` ≤ 0: one instruction, and right for infinity."""
    return tl.minimum(tl.abs(x), value, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def valid_mean(mean, std):
    """The mean; NaN, and with it the results, where mean or std is beyond its limits, which the
    host cannot see without waiting."""
    is_valid = (tl.abs(mean) <= 1e30) & (std >= 0) & (std <= 1e30)
    return tl.where(is_valid, mean, float("nan"))


@triton.jit
def scaled_pdf(z, FAMILY: tl.constexpr):
    """The density divided by :func:`pdf_scale`."""
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
def pdf_scale(FAMILY: tl.constexpr):
    if FAMILY == "triangular":
        p = 1 / SQRT6
    elif FAMILY == "normal":
        p = NORMAL_DENSITY
    else:
        p = RATE
    return p


@triton.jit
def _copy_sign(value, sign):
    """``value`` ≥ 0 with the sign of ``sign``."""
    bit = sign.to(tl.uint32, bitcast=True) & 0x80000000
    return (value.to(tl.uint32, bitcast=True) | bit).to(tl.float32, bitcast=True)


@triton.jit
def philox_words(seed, number, BLOCK: tl.constexpr):
    """Four blocks of random 32-bit words, those of ``tl.philox``."""
    return _philox(seed, number * BLOCK, tl.arange(0, BLOCK), False)


@triton.jit
def shared_words(seed, first, pair, is_second):
    """Four blocks from half as many random words: two neighbours, which one thread handles, share
    word first + pair, the second with its halves exchanged.

    Each word is uniform. The upper halves of two neighbours are independent, so that the joint
    probability of two levels is the product to within 2⁻¹⁶.
    """
    a, b, c, d = _philox(seed, first, pair, IS_CUDA)
    return (
        _exchange_halves(a, is_second),
        _exchange_halves(b, is_second),
        _exchange_halves(c, is_second),
        _exchange_halves(d, is_second),
    )


@triton.jit
def _exchange_halves(word, is_second):
    return tl.where(is_second, (word >> 16) | (word << 16), word)


@triton.jit
def _philox(seed, first, lane, FUSED: tl.constexpr):
    """Philox of the counters first + lane, whose low halves do not overflow. Half of the first two
    rounds is the same for all lanes, and computed once."""
    a = (lane + first.to(tl.int32)).to(tl.uint32, bitcast=True)
    b = (first >> 32).to(tl.uint32)
    c = b * 0
    d = b * 0
    key, other = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        high, low = _multiply(c, 0xCD9E8D57, FUSED)
        higher, lower = _multiply(a, 0xD2511F53, FUSED)
        a = high ^ b ^ key
        b = low
        c = higher ^ d ^ other
        d = lower
        key += 0x9E3779B9
        other += 0xBB67AE85
    return a, b, c, d


@triton.jit
def _multiply(word, FACTOR: tl.constexpr, FUSED: tl.constexpr):
    """(high, low) halves of a 64-bit product; FUSED: one instruction that takes more registers."""
    factor = tl.full(word.shape, FACTOR, tl.uint32)
    if FUSED and len(word.shape) > 0:
        # Not with a 64-bit dtype, for which the compiler would move words between threads.
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b64 t; mul.wide.u32 t, $2, $3; mov.b64 {$0, $1}, t; }",
            "=r,=r,r,r",
            [word, factor],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
    else:
        high = tl.umulhi(word, factor)
        low = word * factor
    return high, low


@triton.jit
def uniform(word):
    """A float32 strictly inside (0, 1): the middle of one of 2²³ intervals."""
    return significand(word) - (1 - 0.5 / 8388608)


@triton.jit
def significand(word):
    """A float32 in [1, 2) from 23 bits of a random word, without a conversion."""
    bits = (word.to(tl.uint32, bitcast=True) >> 9) | 0x3F800000
    return bits.to(tl.float32, bitcast=True)
