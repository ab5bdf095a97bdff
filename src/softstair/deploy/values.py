"""What the conversion knows of a value: integers, or a sum whose stair is still to come."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from softstair.deploy.nodes import MaxPool, PixelShuffle, Scores, Select
from softstair.deploy.requantise import Line
from softstair.deploy.thresholds import Function
from softstair.nn import StairLayer

SCORE_BITS, SCORE_SHIFT, ORDER_BITS = 30, 8, 30


@dataclass(frozen=True)
class IntegerFeatures:
    """The integers n that a node gives, which stand for n · unit."""

    node: str
    unit: float
    low: int
    high: int


@dataclass(frozen=True)
class PendingSum:
    """The integers of node ``source``, and what the float network does with them before a stair."""

    source: str
    least: Tensor  # of each channel, (C,) int64
    greatest: Tensor
    before: tuple[Function, ...]  # applied to the integers
    axes: int  # after the channels, of what is applied
    # Exchanged with the stair, which is monotone: poolings and shuffles of pixels. With these the
    # source has more channels, of which number i is one of number i modulo C.
    pools: tuple[MaxPool | PixelShuffle | Select, ...] = ()
    shortcut: IntegerFeatures | None = None  # added next
    after: tuple[Function, ...] = ()  # applied after the addition


Value = IntegerFeatures | PendingSum


@dataclass(frozen=True)
class Rescaled:
    """The output of a quantised layer for sums over integers, of which 1 stands for ``factor``."""

    layer: StairLayer
    factor: float

    def __call__(self, sums: Tensor) -> Tensor:
        return self.layer.rescale(sums.float() * self.factor)

    def line(self) -> Line:
        """Return the same as a line."""
        scale = self.layer.weight_stair.scale(self.layer.weight, 0)
        count = getattr(self.layer, "out_channels", self.layer.weight.shape[0])
        scale = torch.as_tensor(scale, dtype=torch.float64).expand(count) * self.factor
        scale = scale * (self.layer.input_quantum or 1.0)
        bias = self.layer.bias
        return Line(scale, torch.zeros_like(scale) if bias is None else bias.detach().double())


@dataclass(frozen=True)
class Affine:
    """slope·x + offset of each channel, (C,) float64, as the float network computes it."""

    function: Function
    slope: Tensor
    offset: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x)


def line_of(functions: Sequence[Function]) -> Line | None:
    """Return the line that functions form, the first of which has one; None if they form none."""
    first, *others = functions
    assert isinstance(first, Rescaled | Line)
    return followed(first.line() if isinstance(first, Rescaled) else first, others)


def followed(line: Line | None, functions: Sequence[Function]) -> Line | None:
    """Return the line after more functions: normalisations, and at the end clamps."""
    for function in functions:
        if line is not None:
            line = _next(line, function)
    return line


def _next(line: Line, function: Function) -> Line | None:
    match function:
        case nn.modules.batchnorm._BatchNorm():
            return line.then(*scale_and_shift(function))
        case Affine():
            return line.then(function.slope, function.offset)
        case nn.ReLU():
            ends = (0.0, torch.inf)
        case nn.Hardtanh():  # and ReLU6
            ends = (float(function.min_val), float(function.max_val))
        case _:
            return None
    low, high = (min(max(end, ends[0]), ends[1]) for end in (line.low, line.high))
    return Line(line.slope, line.offset, low, high)


def byte_range(low: float, high: float) -> tuple[float, int, int]:
    """Return a unit, and the least and the greatest of the integers of 8 bits for a range."""
    if low >= 0:
        return max(high, 1e-30) / 255, 0, 255
    return max(-low / 128, high / 127), -128, 127


def scale_and_shift(norm: nn.modules.batchnorm._BatchNorm) -> tuple[Tensor, Tensor]:
    """Return what a normalisation multiplies by and adds, (C,) float64."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()
    shift = -norm.running_mean.double() * scale
    return scale, shift if norm.bias is None else shift + norm.bias.detach().double()


def integer_weights(
    weight: Tensor, bits: int, largest_input: int, sum_bits: int
) -> tuple[Tensor, Tensor]:
    """Return weights of so many bits, and what 1 stands for in each output, (O,) float64.

    They have fewer levels where sums would not fit into ``sum_bits``.
    """
    weight = weight.detach().double()
    largest = weight.flatten(1).abs().amax(1).clamp(min=1e-30)
    total = weight.flatten(1).abs().sum(1) / largest * max(largest_input, 1)
    room = int((2.0**sum_bits / total.clamp(min=1)).min())
    quanta = largest / max(min(2 ** (bits - 1) - 1, room), 1)
    return (weight / quanta.reshape(-1, *[1] * (weight.dim() - 1))).round(), quanta


def scores_of(x: PendingSum, line: Line, axis: int) -> Scores:
    """Return the node of the scores that stand for a line of sums."""
    largest = torch.maximum(x.least.abs(), x.greatest.abs()).double()
    # Where the weights are 0, or as good as 0, the unit is one that can hold the bias.
    slope = torch.where(line.slope == 0, 2.0**-100, line.slope)
    is_constant = (line.offset / slope).abs() > 2.0**SCORE_BITS
    slope = torch.where(is_constant, line.offset.abs() / 2.0 ** (SCORE_BITS - 2), slope)
    bias = line.offset / slope
    room = (2.0**SCORE_BITS / (largest + bias.abs()).clamp(min=1)).min()
    shift = max(0, min(SCORE_SHIFT, math.floor(math.log2(float(room)))))
    shift = shift if bool(bias.any()) else 0
    scale, whole = slope / 2**shift, (bias * 2**shift).round()
    order = (scale / scale.abs().max() * 2.0**ORDER_BITS).round()
    if bool((scale == scale[0]).all()):
        order = torch.ones_like(order)
    low = int(((x.least << shift) + whole.long()).min())
    high = int(((x.greatest << shift) + whole.long()).max())
    facts = (whole.int(), scale, order.int(), shift, axis)
    return Scores(f"{x.source}.scores", (x.source,), low, high, *facts)
