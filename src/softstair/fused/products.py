"""Sums of products in float, and their gradients, by torch's libraries if no kernel is faster."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softstair.kernels.triton.depthwise import depthwise_gradient, is_depthwise

__all__ = ["feature_gradient", "quantum_gradient", "sums_of", "weight_gradient"]


def sums_of(layer: nn.Conv2d | nn.Linear, x: Tensor, weight: Tensor) -> Tensor:
    """Return the sums of products of features and weights."""
    if isinstance(layer, nn.Linear):
        # Integers in bfloat16 (if the quantum is a power of two) stay exact in float32 sums.
        half = x.dtype in (torch.bfloat16, torch.float16) and x.is_cuda
        return torch.mm(x, weight.t(), out_dtype=torch.float32) if half else x @ weight.t()
    return F.conv2d(x, weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)


def feature_gradient(layer: nn.Conv2d | nn.Linear, dc: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the features."""
    if isinstance(layer, nn.Linear):
        return dc @ weight
    if is_depthwise(layer) and layer.stride == (1, 1):
        return depthwise_gradient(dc, weight, layer, x.shape)
    return _convolution_backward(layer, dc, x, weight, 0)


def weight_gradient(layer: nn.Conv2d | nn.Linear, dc: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the weights that multiply the features."""
    if isinstance(layer, nn.Linear):
        return dc.t() @ x
    dw = _convolution_backward(layer, dc, x, weight, 1)
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
