"""Training and evaluation at the speed of the hardware: a network's layers, each in as few passes
over memory as can be. For CUDA with Triton; elsewhere there is nothing to fuse, and a network runs
as it is."""

from typing import TYPE_CHECKING, Optional

from torch import nn

from softstair.kernels import triton

if TYPE_CHECKING:
    from softstair.fused.rewrite import Fused

__all__ = ["fused"]


def fused(net: nn.Module) -> Optional["Fused"]:
    """The forward pass of a network with its layers fused; None where none can be.

    Its parameters and buffers are the network's, whose weights are laid out anew in memory; it
    does what the network does in ``train()`` and, where it says that it ``evaluates``, in
    ``eval()``, whichever that is in. Hooks that come to the network later do not see it.
    """
    device = next((one.device for one in net.parameters()), None)
    if device is None or triton.lacking(device) is not None:
        return None
    from softstair.fused import rewrite

    return rewrite.fused(net)
