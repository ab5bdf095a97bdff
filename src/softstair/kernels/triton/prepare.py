"""Preparation: load a stair and its noise into scalars, once for all elements of a tensor.

A kernel evaluates one stair σ under one noise at millions of x. The functions here read the stair
from its ``table`` in memory (:mod:`softstair.kernels.triton.general` describes the layout) and the
noise from its mean and std, and return scalars, which a GPU keeps in registers:

    prepared = (mean, std, 1/std, stair, limits)

:mod:`softstair.kernels.triton.evaluator` then reads nothing from memory but x.

- ``stair`` has two forms. With up to ``FEW`` thresholds it is (thresholds, levels, rises), each a
  tuple of scalars. More thresholds must be a line, that is, equally spaced like their levels:
  (thresholds, levels, window), which :func:`prepare_line` describes.
- ``limits`` is (low, high). Only the mode, the likeliest level, reads it: under symmetric,
  log-concave noise the mode is σ with its thresholds clamped to (low, high).
  :func:`softstair.kernels.cpu.mode_limits` explains why.

A Dirac is noise whose std is too small to divide by.

The element-wise operator calls :func:`prepare` at the start of each program.
"""

import triton
import triton.language as tl

from softstair.kernels.triton.distributions import SQRT3, SQRT6, tail, units_per_std
from softstair.kernels.triton.general import FEW, inverse, is_dirac

__all__ = ["mode_limits", "prepare", "prepare_few", "prepare_line"]

TIE = tl.constexpr(8 * 1.1920928955078125e-07)
"""Probabilities that differ by less than this, 8 ulp of 1, count as equal."""
POINTS = tl.constexpr(128)
"""Distances that are compared in one round of the search in :func:`_margin`."""


@triton.jit
def prepare(table, mean, std, COUNT: tl.constexpr, FAMILY: tl.constexpr, FORWARD: tl.constexpr):
    """Return ``prepared``; FORWARD is the forward strategy, or "slope" for the backward pass."""
    if COUNT <= FEW:
        stair = prepare_few(table, COUNT)
    else:
        stair = prepare_line(table, mean, std, COUNT, FAMILY, FORWARD == "slope")
    limits = (mean, mean)  # placeholders: only the mode reads limits
    if FORWARD == "mode":
        limits = mode_limits(table, std, COUNT, FAMILY)
    return mean, std, inverse(std), stair, limits


@triton.jit
def prepare_few(table, COUNT: tl.constexpr):
    """Load (thresholds, levels, rises), each a tuple of scalars."""
    thresholds, levels = _scalars(table, COUNT), _scalars(table + COUNT, COUNT + 1)
    return thresholds, levels, _scalars(table + 2 * COUNT + 1, COUNT)


@triton.jit
def _scalars(pointer, COUNT: tl.constexpr):
    values = (tl.load(pointer),)
    for k in tl.static_range(1, COUNT):
        values = values + (tl.load(pointer + k),)  # type: ignore[assignment]  # noqa: RUF005
    return values


@triton.jit
def prepare_line(table, mean, std, COUNT: tl.constexpr, FAMILY: tl.constexpr, SLOPE: tl.constexpr):
    """Return (thresholds, levels, window) for :mod:`softstair.kernels.triton.line`.

    A line is computed instead of loaded. Threshold n, counted from 0, is (n + first)·unit, with an
    integer or half-integer ``first``; level n is (n + first)·rise, with another ``first``.

    - thresholds: (first, unit, 1/unit, rounding error of unit).
    - levels: (first, rise, lowest level, highest level, rounding error of rise).
    - window: (terms, scale, shift, last_start, sharp, step, terms/2). Sums run over the thresholds
      that the noise reaches from x only: ``terms`` neighbours, the first of which has the number
      round(last_start·clamp(x·scale + shift, 0, 1)). A distance times ``sharp`` is in the units of
      :mod:`softstair.kernels.triton.distributions`, and ``step`` is ``unit`` times ``sharp``.
    """
    unit, rise = tl.load(table + 3 * COUNT + 1), tl.load(table + 2 * COUNT + 1)
    rise_rest, unit_rest = tl.load(table + 3 * COUNT + 2), tl.load(table + 3 * COUNT + 3)
    lowest, highest = tl.load(table + COUNT), tl.load(table + 2 * COUNT)
    first = _in_units(tl.load(table), unit)
    thresholds = (first, unit, 1.0 / unit, unit_rest)
    levels = (_in_units(lowest, rise), rise, lowest, highest, rise_rest)
    # Any finite number will do for a Dirac: its terms are not used, or multiplied by 0.
    sharp = tl.where(is_dirac(std), 1.0, inverse(std)) * units_per_std(FAMILY, SLOPE)
    terms = _window_size(std, unit, COUNT, FAMILY, SLOPE)
    last_start = COUNT - terms
    per_start = 1.0 / tl.maximum(last_start, 1.0)
    scale = per_start / unit
    shift = -(first + 0.5 * (terms - 1.0)) * per_start - mean * scale
    window = (terms.to(tl.int32), scale, shift, last_start, sharp, unit * sharp, 0.5 * terms)
    return thresholds, levels, window


@triton.jit
def _in_units(value, unit):
    """value/unit to the nearest ½: a line begins at an integer or half-integer number of units."""
    return tl.floor(2.0 * (value / unit) + 0.5) * 0.5


@triton.jit
def _window_size(std, unit, COUNT: tl.constexpr, FAMILY: tl.constexpr, SLOPE: tl.constexpr):
    """Return how many neighbouring thresholds the noise reaches from any x, from 1 to COUNT.

    ``reach`` is the end of the support, in standard deviations. Unbounded noise is cut off where
    2·10⁻⁸ of a rise is left (for SLOPE, of the largest slope). A size that exceeds an integer by
    less than 10⁻⁴ is rounded down.
    """
    if FAMILY == "uniform":
        reach = SQRT3
    elif FAMILY == "triangular":
        reach = SQRT6
    elif FAMILY == "normal":
        reach = 5.9 if SLOPE else 5.5
    else:
        reach = 10.5 if SLOPE else 9.8
    terms = tl.ceil(std * (2.0 * reach) / unit - 1e-4)
    return tl.minimum(tl.maximum(terms, 1.0), COUNT * 1.0)


@triton.jit
def mode_limits(table, std, COUNT: tl.constexpr, FAMILY: tl.constexpr):
    """Return (low, high): the end thresholds, moved inwards by the margin of the mode."""
    low, high = tl.load(table), tl.load(table + COUNT - 1)
    margin = low * 0.0
    if COUNT > 1:
        margin = _margin(low, high, tl.load(table + 3 * COUNT + 1), std, FAMILY)
    return low + margin, high - margin


@triton.jit
def _margin(first, last, spacing, std, FAMILY: tl.constexpr):
    """Return the margin of the mode, at most half of the distance between first and last threshold.

    For x above the first threshold by less than the margin, the lowest level is likelier than the
    level of the bin that contains x; by symmetry, the same holds for the highest level below the
    last threshold. Uniform noise has a closed form. For others, each round of a search compares
    POINTS = 2⁷ distances and adds seven bits to the margin.
    """
    half_length = 0.5 * (last - first)
    if FAMILY == "uniform":
        margin = tl.maximum(std * (SQRT3 * (1 - 2 * TIE)) - spacing, 0.0)
    else:
        scale = inverse(std)
        point = tl.arange(1, POINTS + 1).to(tl.float32)
        margin, step = half_length * 0.0, half_length * (1 / POINTS)
        for _ in tl.static_range(4):
            distance = margin + point * step
            within_bin = distance - tl.floor(distance / spacing) * spacing
            end_probability = tail(distance * scale, FAMILY)
            own_probability = 1.0 - tail(within_bin * scale, FAMILY)
            own_probability -= tail((spacing - within_bin) * scale, FAMILY)
            end_wins = end_probability > own_probability + TIE
            margin += tl.sum(end_wins.to(tl.float32)) * step
            step *= 1 / POINTS
    return tl.where(is_dirac(std), 0.0, tl.minimum(margin, half_length))
