"""Sums of products and their gradients.

Sums of int8 and gradients in FP8 are computed by Triton kernels, the others by torch. The
convolution of integers leaves with the statistics of its sums. Moments of integers are integers:
programs add theirs to the same two numbers per channel, and the result does not depend on their
order.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from softstair._accelerate import gradients
from softstair._accelerate.batchnorm_backward import SumGradient
from softstair._accelerate.moments import (
    REDUCED_CHANNELS,
    Normalisation,
    batch_statistics,
    is_last,
    load_pivot,
    partial_statistics,
    store_statistics,
)
from softstair._accelerate.parts import LayerParts, is_depthwise
from softstair._accelerate.stairs import quantum_of
from softstair.kernels.triton.convolution import arrange, convolve_int8, convolve_tile

__all__ = [
    "convolve_with_statistics",
    "feature_gradient",
    "int8_sums",
    "quantum_gradient",
    "sums_of",
    "weight_gradient",
]


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


def sums_of(layer: nn.Conv2d | nn.Linear, x: Tensor, weight: Tensor) -> Tensor:
    """Return the sums of products of features and weights."""
    if isinstance(layer, nn.Linear):
        # Integers in bfloat16 (if the quantum is a power of two) stay exact in float32 sums.
        half = x.dtype in (torch.bfloat16, torch.float16) and x.is_cuda
        return torch.mm(x, weight.t(), out_dtype=torch.float32) if half else x @ weight.t()
    return F.conv2d(x, weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)


def int8_sums(
    layer: LayerParts, x: Tensor, weight: Tensor, norm: Normalisation | None = None
) -> tuple[Tensor, Any, float]:
    """Return the exact sums of features and weights in quanta, in the narrowest dtype that holds
    them all, their statistics if there is a normalisation, and their unit."""
    sums: Any = layer.sums
    stairs = layer.factor_stairs
    widest = [max(map(abs, stair.stair.integers or ())) for stair in stairs]
    largest = math.prod(widest) * math.prod(weight.shape[1:])
    dtype = torch.int16 if largest < 2**15 else torch.int32
    unit = math.prod(map(quantum_of, stairs))
    if is_depthwise(sums):
        # Few products of two bytes: float32 holds every sum.
        found = sums_of(sums, x.float(), weight.float())
        found = found.to(dtype, memory_format=torch.channels_last)
        return found, None if norm is None else batch_statistics(found, norm, unit), unit
    padding, stride = sums.padding[0], sums.stride[0]
    if norm is None:
        return convolve_int8(x, weight, padding, dtype, stride), None, unit
    return *convolve_with_statistics(x, weight, padding, dtype, norm, unit, stride), unit


def feature_gradient(
    layer: LayerParts, gradient: SumGradient, x: Tensor, weight: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of the features from that of the sums. ``dtype`` is that of the result of
    FP8 products; other results have the dtype of ``gradient.dc``."""
    sums: Any = layer.sums
    dc, factor = gradient.dc, gradient.factor
    if factor is not None:
        unit = quantum_of(layer.factor_stairs[1])
        return gradients.feature_gradient(dc, weight, factor, sums.padding[0], dtype, unit)
    if isinstance(sums, nn.Linear):
        return dc @ weight
    return _convolution_backward(sums, dc, x, weight, 0)


def weight_gradient(
    layer: LayerParts, gradient: SumGradient, x: Tensor, weight: Tensor, zeros: Tensor
) -> Tensor:
    """Return the gradient of the weights that multiply the features, from that of the sums; in
    float32 if it is in FP8."""
    sums: Any = layer.sums
    transposed, factor = gradient.transposed, gradient.factor
    if transposed is not None:
        assert factor is not None
        taps, padding, unit = sums.kernel_size, sums.padding[0], quantum_of(layer.factor_stairs[0])
        return gradients.weight_gradient(transposed, x, factor, taps, padding, unit, zeros)
    if isinstance(sums, nn.Linear):
        return gradient.dc.t() @ x
    dw = _convolution_backward(sums, gradient.dc, x, weight, 1)
    # In the layout of the weights; a library may prefer another one.
    return dw.contiguous(memory_format=torch.channels_last)


def _convolution_backward(
    layer: nn.Conv2d, dc: Tensor, x: Tensor, weight: Tensor, factor: int
) -> Tensor:
    """Return the gradient of the first or the second factor: features or weights."""
    settings = (layer.stride, layer.padding, layer.dilation, False, [0, 0], layer.groups)
    needed = [factor == 0, factor == 1, False]
    found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
        dc, x, weight, None, *settings, needed
    )
    return found[factor]


def quantum_gradient(
    gradient: Tensor | None, values: Tensor, quantum: Tensor | None
) -> Tensor | None:
    """Return the gradient of the quantum of values, or of the quanta of their outputs."""
    if gradient is None or quantum is None:
        return None
    axes = tuple(range(quantum.dim(), gradient.dim()))
    return (gradient * values).sum(axes, dtype=torch.float32) / quantum
