"""Sums of products and their gradients.

Sums of int8 and gradients in FP8 are computed by Triton kernels, the others by torch.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softstair._accelerate import gradients
from softstair._accelerate.batchnorm_backward import SumGradient
from softstair._accelerate.integer_sums import convolve_with_statistics
from softstair._accelerate.moments import Normalisation, batch_statistics
from softstair._accelerate.parts import LayerParts, is_depthwise
from softstair._accelerate.stairs import quantum_of
from softstair.kernels.triton.convolution import convolve_int8

__all__ = ["feature_gradient", "int8_sums", "quantum_gradient", "sums_of", "weight_gradient"]


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
