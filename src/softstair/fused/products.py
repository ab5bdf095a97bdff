"""Sums of products in float, and their gradients, by torch's libraries."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["gradients", "sums_of"]


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
