"""Sums of whole numbers by the tensor cores' integers, where there are such; the same bits as in
float32, which holds every sum that is asked for here."""

from contextlib import nullcontext
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from softstair.kernels import triton

__all__ = ["can_convolve", "convolve", "has_fused"]


def has_fused(device: torch.device) -> bool:
    """Whether the fused layers of :mod:`softstair.fused` run there."""
    from softstair.kernels import asked

    there = device.type == "cuda" and triton.lacking(device) is None
    return there and asked() != "reference" and _is_recent()


@lru_cache
def _is_recent() -> bool:
    """Tensor descriptors came with Triton 3.4, half-precision products with float32 sums with torch
    2.8; before them only the operator itself runs in Triton."""
    torch_version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return torch_version >= (2, 8) and find_spec("triton.tools.tensor_descriptor") is not None


def can_convolve(
    features: Tensor, stride: object, padding: object, dilation: object, groups: int
) -> bool:
    """Whether :func:`convolve` computes a convolution of this kind of these features."""
    from softstair.kernels import is_transformed

    plain = type(features) in (Tensor, torch.nn.Parameter)
    if is_transformed() or not plain or not has_fused(features.device):
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
    with torch.cuda.device(features.device) if features.is_cuda else nullcontext():
        sums, _ = convolution.convolve(whole[0], whole[1], padding[0], torch.int32, nothing)
    return sums.float()
