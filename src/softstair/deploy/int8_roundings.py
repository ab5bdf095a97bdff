"""How INT8 runtimes multiply a sum by a scale and round it, and scales on which they agree.

All of them compute level = clamp(round((factor·sum + bias)·scale)) with whole biases, and differ in
the rounding. None decreases with the sum: one that gives the levels at every threshold, at the sum
before it and at both ends gives them at all sums.

For levels l₀ < … < lₖ with thresholds tₖ and c = 1/scale, factor·tₖ + bias ≥ (lₖ − ½)·c and
factor·(tₖ − 1) + bias ≤ (lₖ₋₁ + ½)·c. For a given bias each condition bounds c from one side; the
room between the bounds is a concave function of the bias, so bisection finds the roomiest bias.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
SMALLEST, LARGEST = 2.0**-8, 2.0**30  # bounds of 1/scale
MAX_BIAS, MAX_SUM = 2**30, 2**30
NEAR = 3  # biases beside the roomiest that are tried
ODD = 2**13
NEAR_BIASES, MOVES = (0, 1, -1, 2, -2), sorted(range(-12, 13), key=abs)
PLACES = (0.5, 0.3, 0.7, 0.15, 0.85, 0.02, 0.98)  # of a scale between its bounds


class Labels(NamedTuple):
    """The scales that a file has for an input and an output of a layer."""

    x: float = 1.0
    y: float = 1.0

    def of_weights(self, scale: Floats) -> npt.NDArray[np.float32]:
        """Return the scales of weights with which a runtime multiplies by ``scale``."""
        return (scale * self.y / self.x).astype(np.float32)

    def seen(self, scale: Floats) -> tuple[Floats, Floats]:
        """Return the scales of XNNPACK, which computes them in float32, and of the others."""
        x, y, weights = np.float32(self.x), np.float32(self.y), self.of_weights(scale)
        return (x * weights / y).astype(np.float64), np.float64(x) * weights / np.float64(y)


PLAIN = Labels()


def fixed_point(scale: Floats) -> tuple[Integers, Integers]:
    """Return the multipliers of 31 bits that runtimes make of scales, and the exponents."""
    mantissa, exponent = np.frexp(scale)
    multiplier = np.floor(mantissa * 2.0**31 + 0.5).astype(np.int64)
    over = multiplier == 2**31
    return np.where(over, multiplier // 2, multiplier), exponent + over.astype(np.int64)


def _xnnpack(v: Integers, scale: Floats) -> Integers:
    """Return the product in float32, its halves rounded to even."""
    single = scale.astype(np.float32)
    return np.rint(v.astype(np.float32) * single).astype(np.int64)


def _single(v: Integers, scale: Floats) -> Integers:
    """Return the product with 31 bits, halves rounded up."""
    multiplier, exponent = fixed_point(scale)
    return (v * multiplier + (1 << (30 - exponent))) >> (31 - exponent)


def _high(v: Integers, scale: Floats) -> tuple[Integers, Integers]:
    """Return the high half of a product, halves rounded up, and the bits that are still to go."""
    multiplier, exponent = fixed_point(scale)
    left = np.maximum(exponent, 0)
    return ((v << left) * multiplier + 2**30) >> 31, np.maximum(-exponent, 0)


def _builtin(v: Integers, scale: Floats) -> Integers:
    """Return the product rounded twice, halves up, as ruy does on x86."""
    high, right = _high(v, scale)
    return (high + ((1 << right) >> 1)) >> right


def _reference(v: Integers, scale: Floats) -> Integers:
    """Return the product rounded twice as gemmlowp does, the second time halves away from zero."""
    high, right = _high(v, scale)
    return np.sign(high) * ((np.abs(high) + ((1 << right) >> 1)) >> right)


ROUNDINGS: dict[str, Callable[[Integers, Floats], Integers]] = {
    "xnnpack": _xnnpack,
    "single": _single,
    "builtin": _builtin,
    "reference": _reference,
}
"""By the kernels that round so; "single" are ARM's, where they are built to round once."""
FAMILIES = {"once": ("xnnpack", "single"), "double": ("builtin", "reference")}
ALL = (*ROUNDINGS,)


class Stairs(NamedTuple):
    """Channels whose levels begin at thresholds, for sums from ``least`` to ``greatest``."""

    levels: Integers  # (K,)
    thresholds: Integers  # (C, K − 1)
    least: Integers  # (C,)
    greatest: Integers

    def rows(self, rows: Any) -> "Stairs":
        """Return some of the channels."""
        return Stairs(self.levels, *(part[rows] for part in self[1:]))

    def ends(self) -> tuple[Integers, Integers]:
        """Return the sums that decide, (C, 2K), and the levels there."""
        least, greatest = self.least[:, None], self.greatest[:, None]
        sums = np.concatenate([self.thresholds, self.thresholds - 1, least, greatest], 1)
        sums = np.clip(sums, least, greatest)
        index = [
            np.searchsorted(*pair, "right") for pair in zip(self.thresholds, sums, strict=True)
        ]
        return sums, self.levels[np.array(index)]

    def bounds(self, factor: Integers, bias: Integers) -> tuple[Floats, Floats]:
        """Return the bounds of 1/scale, (C,)."""
        low, high = self.least[:, None], self.greatest[:, None]
        first = factor[:, None] * np.maximum(self.thresholds, low) + bias[:, None]
        before = factor[:, None] * np.minimum(self.thresholds - 1, high) + bias[:, None]
        reached, missed = self.thresholds <= high, self.thresholds > low
        up, down = self.levels[1:] - 0.5, self.levels[:-1] + 0.5
        upper = np.minimum(
            (first / up).min(1, where=reached & (up > 0), initial=LARGEST),
            (before / down).min(1, where=missed & (down < 0), initial=LARGEST),
        )
        lower = np.maximum(
            (before / down).max(1, where=missed & (down > 0), initial=SMALLEST),
            (first / up).max(1, where=reached & (up < 0), initial=SMALLEST),
        )
        return lower, upper

    def room(self, factor: Integers, bias: Integers, margin: float = 0.0) -> Floats:
        """Return how far the bounds of 1/scale are apart, of which the lower grows by a margin."""
        lower, upper = self.bounds(factor, bias)
        return upper - (1 + margin) * lower

    def roomiest(self, factor: Integers, margin: float = 0.0) -> Integers:
        """Return the smallest bias with most room between the bounds of 1/scale."""
        below, above = np.full(len(factor), -MAX_BIAS), np.full(len(factor), MAX_BIAS)
        while bool((below < above).any()):
            middle = (below + above) // 2
            here, beyond = (self.room(factor, bias, margin) for bias in (middle, middle + 1))
            grows = np.where(beyond == here, middle < 0, beyond > here)
            below, above = np.where(grows, middle + 1, below), np.where(grows, above, middle)
        return below

    def candidates(self, factor: Integers) -> Iterator[tuple[Integers, Floats]]:
        """Yield biases and scales near the roomiest bias."""
        middle = self.roomiest(factor)
        for near in sorted(range(-NEAR, NEAR + 1), key=abs):
            lower, upper = self.bounds(factor, middle + near)
            has_room = upper > lower
            lower, upper = (np.where(has_room, end, 1.0) for end in (lower, upper))
            # Just above a power of two, multipliers of 31 bits have all of them.
            even = (1 + 2.0**-20) * 2.0 ** np.floor(np.log2(upper))
            ends = np.minimum(upper, 2 * lower)
            for inverse in (even.clip(lower, upper), *(lower + p * (ends - lower) for p in PLACES)):
                yield middle + near, np.where(has_room, 1 / inverse, 0.0)


class Fit(NamedTuple):
    """Numbers of each channel, (C,); a scale of 0 says that there are none."""

    factor: Integers
    bias: Integers
    scale: Floats

    @classmethod
    def of(cls, factor: Tensor, bias: Tensor, multiplier: Tensor, shift: Tensor) -> "Fit":
        """Return the numbers of a requantisation."""
        scale = np.ldexp(multiplier.double().numpy(), -shift.numpy())
        return cls(factor.long().numpy(), bias.long().numpy(), scale)

    def near(self, stairs: Stairs, *how: Any) -> "Fit":
        """Return the same with scales moved by bits of float32 until roundings give the levels."""
        scale = np.zeros_like(self.scale)
        for move in (0, 1, -1, 2, -2, 3, -3):
            moved = self._replace(scale=self.scale * (1 + move * 2.0**-23))
            right = (scale == 0) & moved.agrees(stairs, *how)
            scale = np.where(right, moved.scale, scale)
        return self._replace(scale=scale)

    @property
    def found(self) -> npt.NDArray[np.bool_]:
        """Whether a channel has numbers."""
        return self.scale > 0

    def agrees(
        self,
        stairs: Stairs,
        clamp: tuple[int, int],
        roundings: Sequence[str] = ALL,
        labels: Labels = PLAIN,
    ) -> npt.NDArray[np.bool_]:
        """Return for each channel whether all roundings give its levels, after a clamp."""
        sums, levels = stairs.ends()
        v = self.factor[:, None] * sums + self.bias[:, None]
        single, scale = labels.seen(self.scale)
        fits = (scale >= 2.0**-30) & (np.abs(v).max(1) * np.maximum(scale, 1) < MAX_SUM)
        v = np.where(fits[:, None], v, 0)
        for name in roundings:
            seen = np.where(fits, single if name == "xnnpack" else scale, 0.5)
            given = np.clip(ROUNDINGS[name](v, seen[:, None]), *clamp)
            fits = fits & (given == levels).all(1)
        return fits


def fit(
    stairs: Stairs,
    largest: Integers,
    clamp: tuple[int, int],
    roundings: Sequence[str] = ALL,
    labels: Labels = PLAIN,
    step: int = 1,
) -> Fit:
    """Search factors from the largest to half of it, in steps, with biases and scales.

    Channels with one level have a factor of 0.
    """
    _, levels = stairs.ends()
    is_constant = (levels == levels[:, :1]).all(1)
    bias: Any = np.where(is_constant, 2 * levels[:, 0], 0)
    scale: Any = np.where(is_constant, 0.5, 0)
    found = Fit(np.where(is_constant, 0, largest), bias, scale)
    for less in range(0, int(largest.max()) // 2 + 1, step):
        rows = np.flatnonzero(~found.found & (2 * (largest - less) >= largest))
        part, factor = stairs.rows(rows), (largest - less)[rows]
        for bias, scale in part.candidates(factor):
            rest = ~found.found[rows] & (scale > 0)
            if not rest.any():
                continue
            trial = Fit(factor[rest], bias[rest], scale[rest])
            right = trial.agrees(part.rows(rest), clamp, roundings, labels)
            for target, values in zip(found, trial, strict=True):
                target[rows[rest][right]] = values[right]
    return found


def settled(
    own: Fit, least: Integers, greatest: Integers, low: int, high: int, rounding: str
) -> Fit:
    """Return numbers near to these on which all roundings agree, or else those of a family."""
    found = Fit(own.factor.copy(), own.bias.copy(), own.scale.copy())
    coarse = [(bias, own.scale * (1 + move * 2.0**-14)) for move in MOVES for bias in NEAR_BIASES]
    fine = [(0, own.scale * (1 + move * 2.0**-23)) for move in sorted(range(-64, 65), key=abs)]
    fine.insert(1, (0, far_from_halves(own.scale)))
    rest = np.ones(len(least), bool)
    for roundings, moves in ((ALL, coarse), (FAMILIES[rounding], fine)):
        for bias, scales in moves:
            # Few parts of a sum leave no room for all roundings; a bias moves by part of a level.
            rows = np.flatnonzero(rest & ((own.factor >= 4) | (len(roundings) < len(ALL))))
            rows = rows[abs(bias) * own.scale[rows] <= 2.0**-4]
            if not len(rows):
                continue
            scale = scales[rows].astype(np.float32).astype(np.float64)
            trial = Fit(own.factor[rows], own.bias[rows] + bias, scale)
            agree = _agree(trial, least[rows], greatest[rows], low, high, roundings)
            for target, values in zip(found, trial, strict=True):
                target[rows[agree]] = values[agree]
            rest[rows[agree]] = False
    return found


def far_from_halves(scale: Floats) -> Floats:
    """Return scales q/p with an odd p near 2¹³: no whole number times q/p is within 1/2p of a half.

    Float32 products up to 255 are wrong by at most 2⁻¹⁶, with that of the scale.
    """
    q = np.maximum(np.floor(ODD * scale), 1)
    return q / (2 * np.floor(q / scale / 2) + 1)


def _agree(
    own: Fit, least: Integers, greatest: Integers, low: int, high: int, roundings: Sequence[str]
) -> npt.NDArray[np.bool_]:
    """Return for each channel whether roundings give the same levels at all sums."""
    factor, bias, scale = own.factor[:, None], own.bias[:, None], own.scale[:, None]
    edges = ((np.arange(low + 1, high + 1) - 0.5) / scale - bias) / np.maximum(factor, 1)
    middle = np.rint(edges.clip(-(2.0**40), 2.0**40)).astype(np.int64)
    sums = np.concatenate([middle + step for step in (-2, -1, 0, 1, 2)], 1)
    v = factor * sums.clip(least[:, None], greatest[:, None]) + bias
    first, *others = (ROUNDINGS[name](v, scale).clip(low, high) for name in roundings)
    return np.all([(other == first).all(1) for other in others], 0)
