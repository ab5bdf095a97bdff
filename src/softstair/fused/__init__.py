"""Layers of a network as single kernels, for training and evaluation on CUDA with Triton.

Elsewhere there is nothing to fuse, and a network runs as it is.
"""

from typing import TYPE_CHECKING, Optional

from torch import nn

from softstair.kernels import triton

if TYPE_CHECKING:
    from softstair.fused.fuse import FusedNetwork

__all__ = ["fused"]


def fused(net: nn.Module, float8: bool = False) -> Optional["FusedNetwork"]:
    """Return the forward pass of a network with its layers fused, or None if none can be.

    It has the network's parameters and buffers (weights get another memory layout) and does what
    the network does in ``train()`` and, if ``evaluates`` is set, in ``eval()``. Hooks that are
    added to the network later are not called.

    With ``float8``, the gradient of sums of integers is rounded to FP8 (E5M2) before it is
    multiplied by features and weights, where the device can multiply FP8.
    """
    device = next((parameter.device for parameter in net.parameters()), None)
    if device is None or triton.unavailable(device) is not None:
        return None
    from softstair.fused import fuse

    return fuse.fused(net, float8)
