"""Shapes of noise on the device: what :mod:`softstair.noise` is, for blocks in Triton.

``FAMILY`` is the family's name, known when a kernel is compiled; a block is float32 or float64. The
bounded families lose a NaN (the machine's max and min prefer numbers), so whoever calls puts it
back.

The error function of the library costs more than all the rest of a kernel in float32. There the
normal tail is 2^{P(d)}, P of degree 8, within 9·10⁻⁸ of the truth, less than float32 rounds
away from a probability, and within 1 % of itself out to nine standard deviations; in float64 it is
the error function. The inverse of the normal cdf is (u − ½)·P(w)/Q(w) with w = −log 4u(1 − u), a
smooth even function of u − ½ whose logarithm keeps both tails: 1.3·10⁻⁷ relative for every u from
2⁻⁵³ on in float64, 2.5·10⁻⁷ from 2⁻²⁴ on in float32. For tensors of 16 bits the tail is shorter
(``HALF``), and draws are those of :mod:`softstair.kernels.triton.lean`.
"""

import math
import os

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

UNIFORM_DENSITY = tl.constexpr(0.5 / math.sqrt(3.0))
SQRT3 = tl.constexpr(math.sqrt(3.0))
SQRT6 = tl.constexpr(math.sqrt(6.0))
SQRT_HALF = tl.constexpr(math.sqrt(0.5))
NORMAL_DENSITY = tl.constexpr(1 / math.sqrt(2 * math.pi))
RATE = tl.constexpr(math.pi / math.sqrt(3.0))
LOG2_E = tl.constexpr(1 / math.log(2.0))
LN_2 = tl.constexpr(math.log(2.0))
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
IS_CUDA = tl.constexpr(not INTERPRETED.value and torch.version.hip is None)
"""Whether instructions may be asked for by name. Triton's logarithm is right to the ulp, and dear;
and it takes two multiplications to both halves of a product."""
ROUNDS = tl.constexpr(7)
"""Of Philox: the fewest that pass every test of randomness known to its authors."""


@triton.jit
def tail(d, FAMILY: tl.constexpr, HALF: tl.constexpr = False):
    """P(Z > d) for d ≥ 0; to 8·10⁻⁵ if it is for 16 bits."""
    if FAMILY == "uniform":
        p = tl.maximum(0.5 - d * UNIFORM_DENSITY, 0.0)
    elif FAMILY == "triangular":
        rest = tl.maximum(1.0 - d * (1 / SQRT6), 0.0)
        p = 0.5 * rest * rest
    elif FAMILY == "normal":
        p = _normal_tail(d, HALF)
    else:
        tl.static_assert(FAMILY == "logistic")
        p = _sigmoid(d * -RATE)
    return p


@triton.jit
def _normal_tail(d, HALF: tl.constexpr):
    if d.dtype == tl.float64:
        p = 0.5 - 0.5 * tl.erf(d * SQRT_HALF)
    elif HALF:
        p = -3.14127505e-02 * d - 4.78945881e-01
        p = p * d - 1.14558661
        p = tl.exp2(p * d - 1.00021672)
    else:
        p = -4.29584671e-07 * d + 8.88849951e-06
        p = p * d - 3.79008894e-05
        p = p * d - 4.92812384e-04
        p = p * d + 7.51255706e-03
        p = p * d - 5.27885138e-02
        p = p * d - 4.59119408e-01
        p = p * d - 1.15111501
        p = tl.exp2(p * d - 0.999999823)
    return p


@triton.jit
def _sigmoid(y):
    """1/(1 + e^{−y})."""
    if y.dtype == tl.float64:
        p = 1.0 / (1.0 + tl.exp(-y))
    else:
        # The root's reciprocal is one instruction, where a division is nine.
        root = tl.rsqrt(1.0 + tl.exp2(y * -LOG2_E))
        p = root * root
    return p


@triton.jit
def cdf(z, FAMILY: tl.constexpr):
    """F(z) = P(Z ≤ z), to a few units in the last place of 1."""
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
        # Not max and min: their constants would be float32 whatever z is.
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
        z = (log2(u) - log2(1.0 - u)) * (LN_2 / RATE)
    return z


@triton.jit
def _normal_ppf(u):
    side = u - 0.5
    if u.dtype == tl.float64:
        w = -tl.log(4.0 * u * (1.0 - u))
        above = 3.085261643e-07 * w + 1.05826087e-04
        above = above * w + 2.379645326e-03
        above = above * w + 2.604337617e-02
        above = above * w + 1.883741931e-01
        above = above * w + 9.175307147e-01
        above = above * w + 2.506628594
        below = 3.160405653e-06 * w + 2.365806565e-04
        below = below * w + 2.563194455e-03
        below = below * w + 3.481730602e-02
        below = below * w + 1.04245239e-01
        below = below * w + 1.0
        z = side * (above / below)
    else:
        # To base 2, as the machine has it.
        w = -log2(u * (4.0 - 4.0 * u))
        above = 3.32784407e-06 * w + 5.10401564e-04
        above = above * w + 8.90887646e-03
        above = above * w + 9.67162803e-02
        above = above * w + 6.83968716e-01
        above = above * w + 2.50662889
        below = 2.7662901e-05 * w + 1.01853636e-03
        below = below * w + 1.57241493e-02
        below = below * w + 9.14029485e-02
        below = below * w + 1.0
        root = tl.rsqrt(below)
        z = (side * root) * (above * root)
    return z


@triton.jit
def log2(y):
    """As the machine has it."""
    return libdevice.fast_log2f(y) if IS_CUDA and y.dtype == tl.float32 else tl.log2(y)


@triton.jit
def four(seed, number, SPAN: tl.constexpr, HALF: tl.constexpr):
    """The words of a block's four runs."""
    return shared(seed, number, SPAN) if HALF else words(seed, number, SPAN, 0)


@triton.jit
def words(seed, number, SPAN: tl.constexpr, stream):
    """Four blocks of SPAN random 32-bit words, the number-th of a seed: those of ``tl.philox``."""
    return _philox(seed, number * SPAN, tl.arange(0, SPAN), stream, False)


@triton.jit
def shared(seed, number, SPAN: tl.constexpr):
    """The same for tensors of 16 bits, from half as many words: two neighbours share one, the
    second with its halves exchanged. (They are one thread's, which works their word out once.)

    Each is uniform, with all of its bits. The upper halves of two are independent, and so the
    probability of any two levels together is the product to within 2⁻¹⁶.
    """
    lane = tl.arange(0, SPAN)
    is_second = (lane & 1) != 0
    a, b, c, d = _philox(seed, number * (SPAN // 2), lane >> 1, 0, IS_CUDA)
    return (
        _turned(a, is_second),
        _turned(b, is_second),
        _turned(c, is_second),
        _turned(d, is_second),
    )


@triton.jit
def _turned(word, is_second):
    return tl.where(is_second, (word >> 16) | (word << 16), word)


@triton.jit
def _philox(seed, first, lane, stream, FUSED: tl.constexpr):
    """Of the counters first + lane, whose low halves no carry leaves. What is alike for all lanes,
    half of the first two rounds, is worked out for one."""
    a = (lane + first.to(tl.int32)).to(tl.uint32, bitcast=True)
    b = (first >> 32).to(tl.uint32)
    c = b * 0 + stream
    d = b * 0
    key, other = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        high, low = _product(c, 0xCD9E8D57, FUSED)
        higher, lower = _product(a, 0xD2511F53, FUSED)
        a = high ^ b ^ key
        b = low
        c = higher ^ d ^ other
        d = lower
        key += 0x9E3779B9
        other += 0xBB67AE85
    return a, b, c, d


@triton.jit
def _product(word, FACTOR: tl.constexpr, FUSED: tl.constexpr):
    """Both halves of a product of 64 bits; by one instruction, which takes more registers."""
    factor = tl.full(word.shape, FACTOR, tl.uint32)
    if FUSED and len(word.shape) > 0:
        # Not by a type of 64 bits, for which the compiler would move words between threads.
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
    """A float32 strictly inside (0, 1) from a random word: the middle of one of 2²³ shares."""
    return significand(word) - (1 - 0.5 / 8388608)


@triton.jit
def significand(word):
    """A float32 from 1 to below 2 with 23 bits of a random word, which need no conversion."""
    bits = (word.to(tl.uint32, bitcast=True) >> 9) | 0x3F800000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def uniform_double(high, low):
    """A float64 of 53 bits strictly inside (0, 1) from two random words."""
    upper = (high.to(tl.uint32, bitcast=True) >> 5).to(tl.float64)
    lower = (low.to(tl.uint32, bitcast=True) >> 6).to(tl.float64)
    return tl.maximum(upper * 67108864.0 + lower, 0.5) * (1 / 9007199254740992)
