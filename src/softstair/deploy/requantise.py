"""Multipliers and shifts that stand for real numbers, in integers and in float32 alike.

A level is round(slope·x + offset). In integers it is (v·multiplier + half) >> shift of
v = x·factor + bias. The multiplier has at most 24 bits, so that float32 holds it, and is moved by
at most 2⁻⁹ of itself until a float32 product rounded to even gives the same level at every sum.
With a second input it is (x·multiplier + y·beside + rest + half) >> shift, with up to 30 bits.
"""

import math
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor

from softstair.deploy.int8_roundings import Fit, settled
from softstair.deploy.nodes import INT32_LIMIT, Requantise, Rounding

FINE = 2.0**-16
"""Levels, at most, that one unit of a bias stands for."""
COARSE = 2.0**-3
"""The same where float32 cannot hold the sums in a finer unit."""
FLOAT32_BITS, VALUE_BITS, TOTAL_BITS, MAX_SHIFT = 24, 30, 51, 50
MULTIPLIER_BITS = 30
"""Where there is a second input: such sums are no float32 ones."""
TRIES = 256
MOST_LEVELS = 2**10
"""Of a node whose multipliers are moved; no float32 runtime has more than 8 bits."""
MOVE = 2.0**-9
DOUBLE_BITS = 31
BYTE, MOST_MOVES, ROOM = 255, 40, 26
CLEAR = 2.0**-18
"""Of the largest sum: kernels add bytes with multipliers of 21 bits."""


@dataclass(frozen=True)
class Line:
    """slope·x + offset for each channel, (C,) float64, clamped to ``low`` and ``high``."""

    slope: Tensor
    offset: Tensor
    low: float = -torch.inf
    high: float = torch.inf

    @classmethod
    def of(cls, slope: Tensor) -> "Line":
        """Return slope·x."""
        return cls(slope, torch.zeros_like(slope))

    def __call__(self, x: Tensor) -> Tensor:
        """Return what a line that is not clamped has for x, (N, C, …), in float32."""
        slope, offset = (
            values.reshape(-1, *[1] * (x.dim() - 2)) for values in (self.slope, self.offset)
        )
        return (x.double() * slope + offset).float()

    def then(self, slope: Tensor, offset: Tensor) -> "Line | None":
        """Return slope·line + offset, or None if the line is clamped."""
        if self.is_clamped:
            return None
        return Line(self.slope * slope, self.offset * slope + offset)

    @property
    def is_clamped(self) -> bool:
        """Whether anything is cut off."""
        return (self.low, self.high) != (-torch.inf, torch.inf)

    def in_levels(self, quantum: float, threshold: float, level: int) -> "Line":
        """Return what rounds to the level of a stair with steps of ``quantum``, whose lowest
        ``level`` ends at ``threshold``."""
        scale = lambda y: (y - threshold) / quantum + level + 0.5
        return Line(self.slope / quantum, scale(self.offset), scale(self.low), scale(self.high))


def requantise(
    node: Requantise,
    line: Line,
    least: Tensor,
    greatest: Tensor,
    beside: Tensor | None = None,
    reach: int = 0,
    parts: Tensor | None = None,
) -> Requantise:
    """Return the node with the numbers of a line, whose result is in levels.

    Args:
        node: Its name, inputs, range, axis and rounding.
        line: Levels per unit of the sum, and at the sum 0; not clamped, or within the range.
        least: The least sum of each channel, (C,) int64.
        greatest: The greatest.
        beside: Levels per unit of the second input, (C,).
        reach: The largest magnitude of the second input.
        parts: In INT8 arithmetic, the factor of the sums, (C,).
    """
    if not bool(line.slope.isfinite().all() and line.offset.isfinite().all()):
        raise ArithmeticError("its scale or bias is not finite")
    largest = torch.maximum(least.abs(), greatest.abs()).double()
    if parts is not None:
        return _of_int8(node, line, least, greatest, parts)
    if beside is not None:
        return _beside(node, line, largest, beside, reach)
    factor, bias, ratio = _sums(line, largest, node.rounding)
    constant = factor == 0
    magnitude = torch.where(constant, bias.abs(), largest * factor + bias.abs())
    if node.rounding == "double":
        multiplier, shift = _normalised(ratio)
    else:
        multiplier, shift = _scaled(ratio, magnitude)
    found = replace(
        node,
        factor=factor.int(),
        bias=bias.int(),
        multiplier=multiplier.int(),
        shift=shift.int(),
    )
    is_moved = node.rounding == "once" and node.high - node.low < MOST_LEVELS
    return _moved(found, least, greatest) if is_moved else found


def _sums(line: Line, largest: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor, Tensor]:
    """Return factor, bias and the levels that one unit of v stands for."""
    slope = line.slope.abs()
    ratio = torch.where(slope > 0, line.offset / line.slope, torch.inf)
    is_constant = ratio.abs() >= 2.0**30
    ratio = torch.where(is_constant, 0.0, ratio)
    parts = lambda size: (slope / size).clamp(min=1).log2().ceil()
    room = lambda bits: (2.0**bits / (largest + ratio.abs()).clamp(min=1)).clamp(min=1)
    fine = torch.minimum(parts(FINE), room(FLOAT32_BITS).log2().floor())
    coarse = torch.minimum(parts(COARSE), room(VALUE_BITS).log2().floor())
    factor = 2.0 ** torch.maximum(fine, coarse)
    if rounding == "double" and bool((slope >= factor).any()):
        raise ArithmeticError("a unit of its sums is more than a level, and the sums are too large")
    limit = INT32_LIMIT - 1 - largest * factor
    bias = (ratio * factor).round().clamp(-limit, limit)
    # A channel that hardly depends on its sum is its offset, in halves.
    level = (line.offset + 0.5).floor().clamp(-(2.0**20), 2.0**20)
    factor = torch.where(is_constant, 0.0, factor)
    bias = torch.where(is_constant, 2 * level, bias)
    levels = torch.where(is_constant, 0.5, line.slope / factor.clamp(min=1))
    return factor, bias, levels


def _beside(
    node: Requantise, line: Line, largest: Tensor, beside: Tensor, reach: int
) -> Requantise:
    """Return the node of a line and of a second input, with as many bits as products have room for.

    Every term stays below 2⁵¹, so that float64 holds their sum.
    """
    room = lambda most: (TOTAL_BITS - _bits(torch.as_tensor(most))).clamp(max=MULTIPLIER_BITS)
    own, other = room(largest), room(float(reach))
    shift = torch.minimum(own - _bits(line.slope), other - _bits(beside))
    shift = torch.minimum(shift, TOTAL_BITS - _bits(line.offset)).clamp(0, MAX_SHIFT)
    scaled = lambda x, bits: (x * 2.0**shift).round().clamp(-(2.0**bits), 2.0**bits)
    ones = torch.ones(len(shift), dtype=torch.int32)
    return replace(
        node,
        factor=ones,
        bias=0 * ones,
        multiplier=scaled(line.slope, own).int(),
        shift=shift.int(),
        beside=scaled(beside, other).int(),
        rest=scaled(line.offset, torch.tensor(TOTAL_BITS)).long(),
        rounding="once",
    )


def _of_int8(
    node: Requantise, line: Line, least: Tensor, greatest: Tensor, parts: Tensor
) -> Requantise:
    """Return the node with a bias in the unit of sums times ``parts``, and a scale of float32.

    Both are moved until all roundings of INT8 runtimes give the same levels, or those of a family.
    """
    slope = line.slope.abs().clamp(min=1e-30)
    largest = torch.maximum(least.abs(), greatest.abs()).double()
    room = 2.0**ROOM / (largest + (line.offset / slope).abs())
    factor = torch.minimum(parts.double(), room.floor())
    level = (line.offset + 0.5).floor().clamp(-(2.0**20), 2.0**20)
    is_constant = (factor < 1) | (line.slope == 0)
    bias = torch.where(is_constant, 2 * level, (line.offset / slope * factor).round())
    scale = torch.where(is_constant, 0.5, slope / factor.clamp(min=1)).float().double()
    factor = torch.where(is_constant, 0.0, factor)
    numbers = (factor.long().numpy(), bias.long().numpy(), scale.numpy())
    ends = (least.long().numpy(), greatest.long().numpy(), node.low, node.high)
    found = settled(Fit(*numbers), *ends, node.rounding)
    scale = torch.from_numpy(found.scale)
    if node.rounding == "double":
        if bool((scale >= 1).any()):
            raise ArithmeticError("a unit of its sums is more than a level")
        multiplier, shift = _normalised(scale)
    else:
        shift = (FLOAT32_BITS - torch.frexp(scale)[1]).clamp(0, MAX_SHIFT)
        multiplier = (scale * 2.0 ** shift.double()).round()
    tensors = [torch.from_numpy(values).int() for values in (found.factor, found.bias)]
    own: Any = dict(zip(("factor", "bias"), tensors, strict=True))
    return replace(node, **own, multiplier=multiplier.int(), shift=shift.int())


def unit_of_bytes(least: float, greatest: float, is_signed: bool) -> tuple[float, int]:
    """Return the unit and the least of bytes that hold a range, in levels of what they add to.

    It is a power of two, but where halves would be rounded to signed levels.
    """
    power = math.ceil(math.log2(max(greatest - least, 1e-30) / (BYTE - 2)))
    unit = 2.0**power * (1 - 2.0**-10) if is_signed and power < 0 else 2.0**power
    return unit, min(max(math.floor(least / unit), -BYTE), 0)


def added(
    node: Requantise, unit: float, other: float, a: tuple[int, int], b: tuple[int, int]
) -> Requantise:
    """Return the node that adds two bytes, moved until all kernels round all sums alike."""
    for move in sorted(range(-MOST_MOVES, MOST_MOVES + 1), key=abs):
        moved = other * (1 + move * 2.0**-13)
        shift = MULTIPLIER_BITS - max(math.frexp(max(unit, abs(moved)))[1], 0)
        whole = [round(value * 2.0**shift) for value in (unit, moved)]
        first, second = (value / 2.0**shift for value in whole)
        if is_clear(first, second, a, b, node.low, node.high):
            ones = torch.ones_like(node.factor)
            facts: Any = {"multiplier": whole[0] * ones, "beside": whole[1] * ones}
            return replace(node, **facts, shift=shift * ones)
    raise ArithmeticError("bytes that are added lie on halves")


def is_clear(
    unit: float, other: float, a: tuple[int, int], b: tuple[int, int], low: int, high: int
) -> bool:
    """Return whether no sum of two bytes is so near to a half that kernels round it differently.

    They agree on exact halves where levels are not negative.
    """
    rows, columns = (torch.arange(ends[0], ends[1] + 1).double() for ends in (a, b))
    total = unit * rows[:, None] + other * columns
    reach = float(total.abs().max())
    distance = (total - total.floor() - 0.5).abs()
    is_exact = (columns == 0) & (low >= 0) & (math.frexp(unit)[0] == 0.5)
    matters = (total > low - 1) & (total < high + 1) & ~is_exact
    return not bool((matters & (distance < max(reach, 1.0) * CLEAR)).any())


def _scaled(ratio: Tensor, magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """Return multipliers and shifts with all the bits that their products have room for."""
    room = (TOTAL_BITS - _bits(magnitude)).clamp(max=FLOAT32_BITS)
    shift = (room - _bits(ratio)).clamp(0, MAX_SHIFT)
    limit = 2.0**room - 1
    return torch.minimum(torch.maximum((ratio * 2.0**shift).round(), -limit), limit), shift


def _normalised(ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Return multipliers from 2³⁰ to 2³¹, and shifts from 31 on."""
    mantissa, exponent = torch.frexp(ratio)
    multiplier = (mantissa * 2.0**DOUBLE_BITS).round()
    is_over = multiplier >= 2.0**DOUBLE_BITS
    multiplier, exponent = torch.where(is_over, multiplier / 2, multiplier), exponent + is_over
    return multiplier, (DOUBLE_BITS - exponent).clamp(DOUBLE_BITS, 62)


def _bits(values: Tensor) -> Tensor:
    """Return the number of bits before the point: the exponent of the next power of two."""
    return torch.frexp(values.abs().clamp(min=2.0**-80))[1].double()


def _moved(node: Requantise, least: Tensor, greatest: Tensor) -> Requantise:
    """Return the node with multipliers moved until float32 gives the same levels."""
    best = node.multiplier.clone()
    wrong = (~_agreeing(node, least, greatest)).nonzero().flatten()
    for move in chain.from_iterable((step, -step) for step in count(1)):
        if not len(wrong) or abs(move) > TRIES // 2:
            return replace(node, multiplier=best)
        rows: Any = {name: tensor[wrong] for name, tensor in node.tensors.items()}
        part = replace(node, **rows)
        moved = part.multiplier + move
        allowed = (abs(move) <= part.multiplier.abs() * MOVE) & (moved.abs() < 2**FLOAT32_BITS)
        part = replace(part, multiplier=moved)
        found = allowed & _agreeing(part, least[wrong], greatest[wrong])
        best[wrong[found]] = moved[found]
        wrong = wrong[~found]
    raise AssertionError("the moves have no end")


def _agreeing(node: Requantise, least: Tensor, greatest: Tensor) -> Tensor:
    """Return for each channel whether float32 gives the same levels, (C,) bool.

    Both are monotone in the sum, so they agree if they do on both sides of every step.
    """
    factor, multiplier, shift = (
        values.long()[:, None] for values in (node.factor, node.multiplier, node.shift)
    )
    bias = node.bias.long()[:, None]
    level = torch.arange(node.low + 1, node.high + 1)
    # The first v of a level, about: its neighbours are compared as well.
    divisor = torch.where(multiplier == 0, 1, multiplier)
    edge = (level - 0.5) * 2.0 ** shift.double() / divisor
    middle = ((edge - bias) / factor.clamp(min=1)).clamp(-(2.0**40), 2.0**40).round().long()
    sums = torch.cat([middle + step for step in (-2, -1, 0, 1, 2)], 1)
    sums = torch.minimum(torch.maximum(sums, least[:, None]), greatest[:, None])
    value = sums * factor + bias
    exact = (value * multiplier + ((1 << shift) >> 1)) >> shift
    product = value.float() * (multiplier.double() * 2.0 ** -shift.double()).float()
    same = exact.clamp(node.low, node.high) == product.round().clamp(node.low, node.high).long()
    return same.all(1)
