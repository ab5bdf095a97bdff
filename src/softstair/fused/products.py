"""Sums of products in float, and their gradients: by torch's libraries, or in FP8."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softstair.kernels.triton.batchnorm_backward import SumGradient
from softstair.kernels.triton.gradients import feature_gradient, weight_gradient

__all__ = ["float8_gradients", "gradients", "quantum_gradient", "sums_of"]


def sums_of(layer: nn.Conv2d | nn.Linear, x: Tensor, weight: Tensor) -> Tensor:
    """Return the sums of products of features and weights."""
    if isinstance(layer, nn.Linear):
        # Integers in bfloat16 (if the quantum is a power of two) stay exact in float32 sums.
        half = x.dtype in (torch.bfloat16, torch.float16) and x.is_cuda
        return torch.mm(x, weight.t(), out_dtype=torch.float32) if half else x @ weight.t()
    return F.conv2d(x, weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)


def gradients(
    layer: nn.Conv2d | nn.Linear, dc: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the features and of the weights that multiply them."""
    if isinstance(layer, nn.Linear):
        return dc @ weight if needed[0] else None, dc.t() @ x if needed[1] else None
    settings = (layer.stride, layer.padding, layer.dilation, False, [0, 0], layer.groups)
    dx, dw, _ = torch.ops.aten.convolution_backward(
        dc, x, weight, None, *settings, [*needed, False]
    )
    # In the layout of the weights; a library may prefer another one.
    return dx, None if dw is None else dw.contiguous(memory_format=torch.channels_last)


def float8_gradients(
    layer: nn.Conv2d,
    gradient: SumGradient,
    features: Tensor,
    weights: Tensor,
    needed: tuple[bool, bool],
    units: tuple[float, float],
    dtype: torch.dtype,
    zeros: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the features, in a dtype, and of the weights, in float32.

    Features and weights count in these ``units``; the ``zeros`` are the layer's row of counters.
    """
    dx = dw = None
    padding, (down, across) = int(layer.padding[0]), layer.kernel_size
    assert gradient.factor is not None
    if needed[1]:
        assert gradient.transposed is not None
        dw = weight_gradient(
            gradient.transposed, features, gradient.factor, (down, across), padding, units[0], zeros
        )
    if needed[0]:
        dx = feature_gradient(gradient.dc, weights, gradient.factor, padding, dtype, units[1])
    return dx, dw


def quantum_gradient(
    gradient: Tensor | None, values: Tensor, quantum: Tensor | None
) -> Tensor | None:
    """Return the gradient of the quantum of values, or of the quanta of their outputs."""
    if gradient is None or quantum is None:
        return None
    axes = tuple(range(quantum.dim(), gradient.dim()))
    return (gradient * values).sum(axes, dtype=torch.float32) / quantum
