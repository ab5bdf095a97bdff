"""Layers of a network as single kernels, for training and evaluation on CUDA with Triton.

Elsewhere there is nothing to fuse, and a network runs as it is.
"""

from typing import TYPE_CHECKING, Optional

import torch
from torch import nn

from softstair import _check, kernels
from softstair.kernels import triton

if TYPE_CHECKING:
    from softstair._accelerate.fuse import FusedNetwork

__all__ = ["can_fuse", "fused"]


def can_fuse(device: torch.device) -> bool:
    """Whether fused layers and batches from one kernel run on the device."""
    runs = device.type == "cuda" and triton.unavailable(device) is None
    # Half-precision products with float32 sums came with torch 2.8.
    return runs and kernels.selected() != "reference" and "dtype" in torch.ops.aten.mm.overloads()


def fused(net: nn.Module, float8: bool = False) -> Optional["FusedNetwork"]:
    """Return the forward pass of a network with its layers fused, or None if none can be.

    It has the network's parameters and buffers (weights get another memory layout) and does what
    the network does in ``train()`` and, if ``evaluates`` is set, in ``eval()``. Hooks that are
    added to the network later are not called.

    With ``float8``, the gradient of integer sums is rounded to FP8 (E5M2) before it is multiplied
    by features and weights; a GPU needs compute capability 9.0.
    """
    device = next((parameter.device for parameter in net.parameters()), None)
    if device is None or triton.unavailable(device) is not None:
        return None
    if float8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        problem = f"must be False on {device}: FP8 needs a GPU of compute capability 9.0"
        raise _check.invalid("float8", problem)
    from softstair._accelerate import fuse

    return fuse.fused(net, float8)
