"""Which stairs make integers in fused layers, those that they made, and their sums."""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from softstair.kernels.triton.convolution import convolve_int8
from softstair.kernels.triton.depthwise import depthwise_int8, is_depthwise
from softstair.kernels.triton.moments import Normalisation, batch_statistics
from softstair.nn import StairModule
from softstair.stair import Stair

__all__ = [
    "Integers",
    "is_in_quanta",
    "kernel_stair",
    "learns",
    "makes_int8",
    "quantum_of",
    "strategy_of",
    "sum_int8",
]


class Integers(NamedTuple):
    """Features or weights in quanta: as int8, and in FP8 with images or outputs last."""

    int8: Tensor
    float8: Tensor | None


def strategy_of(stair: StairModule) -> str:
    """Return the forward of a stair: without noise, in evaluation or annealed, a simpler one."""
    if not stair.training:
        return "hard"
    return "mode" if stair.annealed and stair.strategy != "hard" else stair.strategy


def learns(stair: StairModule) -> bool:
    """Whether the quantum of the stair is the parameter, which in evaluation it is not."""
    return stair.log_ratio is not None and stair.training


def makes_int8(stair: StairModule) -> bool:
    """Whether the values of the stair are integers times a quantum that fit into int8."""
    levels = stair.stair.integers
    fits = levels is not None and min(levels) >= -128 and max(levels) <= 127
    return fits and strategy_of(stair) != "expectation" and not learns(stair)


def quantum_of(stair: StairModule) -> float:
    """Return the quantum that kernels use: 1 for a stair with one per channel."""
    quantum = stair.stair.quantum
    return quantum if isinstance(quantum, float) else 1.0


def is_in_quanta(stair: StairModule) -> bool:
    """Whether kernels evaluate the stair in quanta: those that are learned or one per channel."""
    return learns(stair) or stair.stair.axis is not None


def kernel_stair(stair: StairModule) -> Stair:
    """Return the stair that kernels evaluate."""
    if not is_in_quanta(stair):
        return stair.stair
    return _in_quanta(stair.stair) if stair.log_ratio is None else stair.unit_stair


@cache
def _in_quanta(stair: Stair) -> Stair:
    return stair.with_quantum(1.0)


def sum_int8(
    layer: nn.Conv2d,
    stairs: tuple[StairModule, StairModule],
    features: Tensor,
    weights: Tensor,
    norm: Normalisation | None,
) -> tuple[Tensor, Tensor | None, float]:
    """Return the exact sums of a layer in the narrowest dtype that holds them all, their statistics
    if there is a normalisation, and their unit."""
    widest = [max(map(abs, stair.stair.integers or ())) for stair in stairs]
    largest = math.prod(widest) * math.prod(weights.shape[1:])
    dtype = torch.int16 if largest < 2**15 else torch.int32
    unit = math.prod(map(quantum_of, stairs))
    if is_depthwise(layer):
        sums = depthwise_int8(features, weights, layer, dtype)
        return sums, None if norm is None else batch_statistics(sums, norm, unit), unit
    padding, stride = int(layer.padding[0]), layer.stride[0]
    return *convolve_int8(features, weights, padding, dtype, norm, unit, stride), unit
