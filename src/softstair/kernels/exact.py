"""Sums of whole numbers by the tensor cores' integers, where there are such; the same bits as in
float32, which holds every sum that is asked for here."""

import torch
from torch import Tensor

from softstair.kernels import triton

__all__ = ["can_convolve", "convolve", "has_fused"]


def has_fused(device: torch.device) -> bool:
    """Whether the fused layers of :mod:`softstair.fused` run there."""
    from softstair.kernels import asked

    return device.type == "cuda" and asked() != "reference" and triton.lacking(device) is None


def can_convolve(
    features: Tensor, stride: object, padding: object, dilation: object, groups: int
) -> bool:
    """Whether :func:`convolve` computes a convolution of this kind of these features."""
    if not has_fused(features.device) or torch.compiler.is_compiling():
        return False
    from softstair.kernels.triton import convolution

    return convolution.fits(features.shape[1], stride, dilation, groups, padding)


def convolve(features: Tensor, weight: Tensor, padding: tuple[int, ...]) -> Tensor:
    """The convolution, in float32, of whole numbers from −128 to 127 held as floats."""
    from softstair.kernels.triton import convolution

    whole = [
        one.to(torch.int8).contiguous(memory_format=torch.channels_last)
        for one in (features, weight)
    ]
    nothing = torch.zeros(len(weight), device=weight.device)
    sums, _ = convolution.convolve(whole[0], whole[1], padding[0], torch.int32, nothing)
    return sums.float()
