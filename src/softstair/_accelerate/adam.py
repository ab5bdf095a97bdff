"""Adam's step for the latent weights of several layers, in one pass over memory and one launch.

    g = dw·slope(w)    m ← β₁·m + (1 − β₁)·g    v ← β₂·v + (1 − β₂)·g²
    w ← clip((1 − rate·decay)·w − rate·(m/(1 − β₁ᵗ)) / (√(v/(1 − β₂ᵗ)) + ε))

dw is the gradient of the quantised weights. The slope of their stair, the step of torch's AdamW (or
Adam, without decay) and the clipping of latent weights follow in registers.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from softstair._accelerate.prepared import PreparedStair, prepare_from_row
from softstair.kernels.triton import evaluator

__all__ = ["Weights", "adam_steps"]

BLOCK = 1024
LAYERS = 24
"""Most layers of a launch: their addresses are arguments, of which CUDA 12.0 takes 4 KB."""


class Weights(NamedTuple):
    """The weights of a layer and what their step needs; the tensors have one memory layout."""

    gradient: Tensor
    """Gradient of the quantised weights."""
    weight: Tensor
    """Latent weights."""
    mean: Tensor
    """First moment."""
    square: Tensor
    """Second moment."""
    rate: Tensor
    """Learning rate, a scalar."""
    step: Tensor
    """Number of this step, from 1, a scalar."""
    stair: PreparedStair
    decay: float
    """Decoupled weight decay."""
    bounds: tuple[float, float]
    """Smallest and largest latent weight."""
    betas: tuple[float, float]
    """Decay rates of the moments."""
    eps: float
    """Added to the root of the second moment."""


@triton.jit
def _own(values, first, COUNT: tl.constexpr):
    """Return the value of this program's layer: the last whose first program is not after it."""
    value = values[0]
    for layer in tl.static_range(1, COUNT):
        value = tl.where(tl.program_id(0) >= first[layer], values[layer], value)
    return value


@triton.jit
def _adam(
    first, gradient_ptrs, weight_ptrs, mean_ptrs, square_ptrs, rate_ptrs, step_ptrs, tables,
    row_ptrs, sizes, decays, lows, highs, eps,
    BETA_1: tl.constexpr, BETA_2: tl.constexpr, LOG_1: tl.constexpr, LOG_2: tl.constexpr,
    LAYERS: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr, FAMILY: tl.constexpr,
):  # fmt: skip
    offsets = (tl.program_id(0) - _own(first, first, LAYERS)) * BLOCK + tl.arange(0, BLOCK)
    size = _own(sizes, first, LAYERS)
    mask = offsets < size
    weight_ptr = _own(weight_ptrs, first, LAYERS)
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0)
    gradient_ptr = _own(gradient_ptrs, first, LAYERS)
    gradient = tl.load(gradient_ptr + offsets, mask=mask, other=0).to(tl.float32)
    row_ptr, table = _own(row_ptrs, first, LAYERS), _own(tables, first, LAYERS)
    prepared = prepare_from_row(row_ptr, table, COUNT, FAMILY, "slope")
    gradient *= evaluator.slope(weight, prepared, COUNT, FAMILY)
    mean_ptr, square_ptr = _own(mean_ptrs, first, LAYERS), _own(square_ptrs, first, LAYERS)
    mean = tl.load(mean_ptr + offsets, mask=mask, other=0)
    square = tl.load(square_ptr + offsets, mask=mask, other=0)
    mean = BETA_1 * mean + (1 - BETA_1) * gradient
    square = BETA_2 * square + (1 - BETA_2) * gradient * gradient
    step = tl.load(_own(step_ptrs, first, LAYERS)).to(tl.float64)
    rate = tl.load(_own(rate_ptrs, first, LAYERS))
    correction = tl.sqrt(1 - tl.exp2(step * LOG_2)).to(tl.float32)
    rate_now = (rate / (1 - tl.exp2(step * LOG_1))).to(tl.float32)
    weight -= weight * rate * _own(decays, first, LAYERS)
    weight -= rate_now * mean / (tl.sqrt(square) / correction + eps)
    low, high = _own(lows, first, LAYERS), _own(highs, first, LAYERS)
    weight = tl.maximum(weight, low, propagate_nan=tl.PropagateNan.ALL)
    weight = tl.minimum(weight, high, propagate_nan=tl.PropagateNan.ALL)
    tl.store(weight_ptr + offsets, weight, mask=mask)
    tl.store(mean_ptr + offsets, mean, mask=mask)
    tl.store(square_ptr + offsets, square, mask=mask)


def adam_steps(layers: Sequence[Weights]) -> None:
    """Change weights and both moments in place, in one launch for layers with one kind of stair,
    dtype of the gradient and setting of Adam."""
    groups: dict[object, list[Weights]] = {}
    for layer in layers:
        kind = (tuple(layer.stair.constants.items()), layer.gradient.dtype, layer.betas, layer.eps)
        groups.setdefault(kind, []).append(layer)
    for group in groups.values():
        for start in range(0, len(group), LAYERS):
            _launch(group[start : start + LAYERS])


def _launch(layers: list[Weights]) -> None:
    sizes = tuple(layer.weight.numel() for layer in layers)
    *first, programs = accumulate((triton.cdiv(size, BLOCK) for size in sizes), initial=0)
    gradients, weights, means, squares, rates, steps, stairs, decays, bounds, betas, eps = zip(
        *layers, strict=True
    )
    lows, highs = zip(*bounds, strict=True)
    _adam[(programs,)](
        tuple(first), gradients, weights, means, squares, rates, steps,
        tuple(stair.table for stair in stairs), tuple(stair.row for stair in stairs), sizes,
        decays, lows, highs, eps[0], *betas[0], *map(math.log2, betas[0]), LAYERS=len(layers),
        BLOCK=BLOCK, **stairs[0].constants, enable_fp_fusion=True,
    )  # fmt: skip
