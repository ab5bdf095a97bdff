"""What the conversion knows of a value: integers, or a sum whose stair is still to come."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from softstair.deploy.nodes import MaxPool
from softstair.deploy.requantise import Line
from softstair.deploy.thresholds import Function
from softstair.nn import StairLayer


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
    pools: tuple[MaxPool, ...] = ()  # exchanged with the stair, which is monotone
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
        count = self.layer.weight.shape[0]
        scale = torch.as_tensor(scale, dtype=torch.float64).expand(count) * self.factor
        scale = scale * (self.layer.input_quantum or 1.0)
        bias = self.layer.bias
        return Line(scale, torch.zeros_like(scale) if bias is None else bias.detach().double())


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
        case nn.ReLU():
            ends = (0.0, torch.inf)
        case nn.Hardtanh():  # and ReLU6
            ends = (float(function.min_val), float(function.max_val))
        case _:
            return None
    low, high = (min(max(end, ends[0]), ends[1]) for end in (line.low, line.high))
    return Line(line.slope, line.offset, low, high)


def scale_and_shift(norm: nn.modules.batchnorm._BatchNorm) -> tuple[Tensor, Tensor]:
    """Return what a normalisation multiplies by and adds, (C,) float64."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()
    shift = -norm.running_mean.double() * scale
    return scale, shift if norm.bias is None else shift + norm.bias.detach().double()
