"""Which layers work on small whole numbers, and what their sums count in."""

import math

import torch
from torch import nn

from softstair.kernels.triton import convolution
from softstair.nn import StairModule

__all__ = ["fits_bytes", "forward_of", "quantum_of", "takes_whole", "unit_of"]


def forward_of(stair: StairModule) -> str:
    """How the stair is climbed: an annealed one has no noise left to take an expectation of, and
    in evaluation none has."""
    if not stair.training:
        return "hard"
    return "mode" if stair.annealed and stair.strategy != "hard" else stair.strategy


def fits_bytes(stair: StairModule) -> bool:
    """Whether what the stair makes are whole numbers of quanta that fit into int8."""
    levels = stair.stair.integers
    fits = levels is not None and min(levels) >= -128 and max(levels) <= 127
    return fits and forward_of(stair) != "expectation"


def quantum_of(stair: StairModule) -> float:
    """The stair's one quantum."""
    quantum = stair.stair.quantum
    assert isinstance(quantum, float)  # as whoever fuses has seen to
    return quantum


def takes_whole(sums: nn.Module) -> bool:
    """Whether there is a convolution of whole numbers that does what this layer does."""
    if not isinstance(sums, nn.Conv2d) or getattr(sums, "weight_stair", None) is None:
        return False
    return convolution.fits(sums.in_channels, sums.stride, sums.dilation, sums.groups, sums.padding)


def unit_of(
    sums: nn.Module, weights: StairModule, features: StairModule
) -> tuple[float, torch.dtype]:
    """The unit of a layer's sums of whole numbers, and the narrowest dtype that holds every one."""
    stairs = (weights, features)
    widest = [max(map(abs, stair.stair.integers or ())) for stair in stairs]
    largest = math.prod(widest) * math.prod(sums.get_parameter("weight").shape[1:])
    unit = math.prod(map(quantum_of, stairs))
    return unit, torch.int16 if largest < 2**15 else torch.int32
