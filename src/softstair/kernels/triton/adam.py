"""Adam's step for latent weights, in one pass over memory.

    g = Σ parts·slope(w)    m ← β₁·m + (1 − β₁)·g    v ← β₂·v + (1 − β₂)·g²
    w ← clip((1 − rate·decay)·w − rate·(m/(1 − β₁ᵗ)) / (√(v/(1 − β₂ᵗ)) + ε))

The gradient of the quantised weights comes in parts, which are added in order. The slope of their
stair, the step of torch's AdamW (or Adam, without decay) and the clipping of latent weights follow
in registers.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from softstair.kernels.triton import evaluator
from softstair.kernels.triton.prepare import PreparedStair, prepare_from_row

__all__ = ["adam_step"]

BLOCK = 1024


@triton.jit
def _adam(
    parts_ptr, weight_ptr, mean_ptr, square_ptr, rate_ptr, step_ptr, table, row_ptr, size, decay,
    low, high, eps,
    BETA_1: tl.constexpr, BETA_2: tl.constexpr, LOG_1: tl.constexpr, LOG_2: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr, FAMILY: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0)
    gradient = tl.load(parts_ptr + offsets, mask=mask, other=0).to(tl.float32)
    for part in range(1, PARTS):
        gradient += tl.load(parts_ptr + part * size + offsets, mask=mask, other=0).to(tl.float32)
    prepared = prepare_from_row(row_ptr, table, COUNT, FAMILY, "slope")
    gradient *= evaluator.slope(weight, prepared, COUNT, FAMILY, 1, False)
    mean = tl.load(mean_ptr + offsets, mask=mask, other=0)
    square = tl.load(square_ptr + offsets, mask=mask, other=0)
    mean = BETA_1 * mean + (1 - BETA_1) * gradient
    square = BETA_2 * square + (1 - BETA_2) * gradient * gradient
    step, rate = tl.load(step_ptr).to(tl.float64), tl.load(rate_ptr)
    correction = tl.sqrt(1 - tl.exp2(step * LOG_2)).to(tl.float32)
    rate_now = (rate / (1 - tl.exp2(step * LOG_1))).to(tl.float32)
    weight -= weight * rate * decay
    weight -= rate_now * mean / (tl.sqrt(square) / correction + eps)
    weight = tl.maximum(weight, low, propagate_nan=tl.PropagateNan.ALL)
    weight = tl.minimum(weight, high, propagate_nan=tl.PropagateNan.ALL)
    tl.store(weight_ptr + offsets, weight, mask=mask)
    tl.store(mean_ptr + offsets, mean, mask=mask)
    tl.store(square_ptr + offsets, square, mask=mask)


def adam_step(
    parts: Tensor,
    weight: Tensor,
    mean: Tensor,
    square: Tensor,
    rate: Tensor,
    step: Tensor,
    stair: PreparedStair,
    decay: float,
    bounds: tuple[float, float],
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Change weights and both moments in place; all have the memory layout of the parts.

    Args:
        parts: Gradient of the quantised weights, as one or several summands.
        weight: Latent weights.
        mean: First moment.
        square: Second moment.
        rate: Learning rate, a scalar tensor.
        step: Number of this step, from 1, a scalar tensor.
        stair: Stair of the weights.
        decay: Decoupled weight decay.
        bounds: Smallest and largest latent weight.
        betas: Decay rates of the moments.
        eps: Added to the root of the second moment.
    """
    size = weight.numel()
    _adam[(triton.cdiv(size, BLOCK),)](
        parts, weight, mean, square, rate, step, stair.table, stair.row, size, decay, *bounds, eps,
        *betas, *map(math.log2, betas), PARTS=parts.numel() // size, BLOCK=BLOCK,
        **stair.constants, enable_fp_fusion=True,
    )  # fmt: skip
