"""The convolution of integers that leaves with the statistics of its sums.

Moments of integers are integers: programs add theirs to the same two numbers per channel, and the
result does not depend on their order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from softstair._accelerate.moments import (
    REDUCED_CHANNELS,
    Normalisation,
    is_last,
    load_pivot,
    partial_statistics,
    store_statistics,
)
from softstair.kernels.triton.convolution import arrange, convolve_tile

__all__ = ["convolve_with_statistics"]


@triton.jit
def _convolve_moments(
    features, weights, sums_ptr, images, rows, partial_ptr, stats_ptr, gamma_ptr, beta_ptr,
    running_mean_ptr, running_var_ptr, tracked_ptr, quanta_ptr, unit, per_unit, eps, momentum,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    TAPS_DOWN: tl.constexpr, TAPS_ACROSS: tl.constexpr, PADDING: tl.constexpr,
    BOX_IMAGES: tl.constexpr, BOX_HEIGHT: tl.constexpr, BOX_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, GATHER: tl.constexpr, SOURCE_HEIGHT: tl.constexpr,
    SOURCE_WIDTH: tl.constexpr, STRIDE: tl.constexpr, EXACT: tl.constexpr, FINISH: tl.constexpr,
):  # fmt: skip
    total, mask = convolve_tile(
        features, weights, sums_ptr, images, rows, HEIGHT, WIDTH, INPUTS, OUTPUTS, TAPS_DOWN,
        TAPS_ACROSS, PADDING, BOX_IMAGES, BOX_HEIGHT, BOX_WIDTH, BLOCK, DEPTH, GATHER,
        SOURCE_HEIGHT, SOURCE_WIDTH, STRIDE,
    )  # fmt: skip
    blocks: tl.constexpr = (OUTPUTS + BLOCK - 1) // BLOCK
    channel = tl.program_id(0) % blocks * BLOCK
    outputs = channel + tl.arange(0, BLOCK)
    output_mask = outputs < OUTPUTS
    if EXACT:
        values = tl.where(mask, total, 0)
        squares = values * values  # below 2³⁰; their sum is not
        second = tl.sum(squares >> 15, 0).to(tl.int64) * 32768 + tl.sum(squares & 32767, 0)
        pointers = partial_ptr + outputs
        first = tl.sum(values, 0).to(tl.int64)
        tl.atomic_add(pointers, first, mask=output_mask, sem="relaxed")
        tl.atomic_add(pointers + OUTPUTS, second, mask=output_mask, sem="relaxed")
    else:
        pivot = load_pivot(running_mean_ptr, quanta_ptr, outputs, output_mask, per_unit)
        values = tl.where(mask, total.to(tl.float32) - pivot[None, :], 0.0)
        pointers = partial_ptr + tl.program_id(0) // blocks * 2 * OUTPUTS + outputs
        tl.store(pointers, tl.sum(values, 0), mask=output_mask)
        tl.store(pointers + OUTPUTS, tl.sum(values * values, 0), mask=output_mask)
    if FINISH:
        last = is_last(partial_ptr + 2 * OUTPUTS + channel // BLOCK, tl.num_programs(0) // blocks)
        if last:
            first = tl.load(pointers, mask=output_mask, cache_modifier=".cg")
            second = tl.load(pointers + OUTPUTS, mask=output_mask, cache_modifier=".cg")
            store_statistics(
                first.to(tl.float64), second.to(tl.float64), tl.zeros((BLOCK,), dtype=tl.float32),
                outputs, output_mask, stats_ptr, gamma_ptr, beta_ptr, running_mean_ptr,
                running_var_ptr, tracked_ptr, quanta_ptr, rows, unit, eps, momentum, OUTPUTS,
            )  # fmt: skip


def convolve_with_statistics(
    features: Tensor,
    weights: Tensor,
    padding: int,
    dtype: torch.dtype,
    norm: Normalisation,
    unit: float = 1.0,
    stride: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return the sums of :func:`~softstair.kernels.triton.convolution.convolve_int8` and what
    :func:`~softstair._accelerate.moments.batch_statistics` returns of them."""
    plan = arrange(features, weights, padding, dtype, stride)
    stats, (*arguments, rows, unit, per_unit, eps, momentum) = norm.arguments(plan.rows, unit)
    exact = dtype == torch.int16
    # Of programs with few channels, a multiprocessor runs others while one waits for the count.
    finish = exact and plan.block <= REDUCED_CHANNELS
    partial = norm.zeros[: 2 * plan.outputs].view(1, 2, plan.outputs)
    if not exact:
        partial = torch.empty((plan.tiles, 2, plan.outputs), device=features.device)
    _convolve_moments[plan.grid](
        *plan.operands, rows, partial, *arguments, unit, per_unit, eps, momentum,
        **plan.constants, EXACT=exact, FINISH=finish, num_warps=4, num_stages=3,
        enable_fp_fusion=True,
    )  # fmt: skip
    if not finish:
        stats = partial_statistics(partial, norm, rows, unit)
    return plan.sums, stats
