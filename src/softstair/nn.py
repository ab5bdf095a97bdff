"""Layers of a quantised network: activations and weights that carry their noise.

:class:`StairActivation` replaces an activation. :class:`StairLinear`, :class:`StairConv2d` and the
other layers are torch's with a :class:`StairWeight` between the parameter and the sum. Parameters
keep their names, so that float checkpoints load.

In ``train()`` they compute :func:`softstair.regularise`. In ``eval()`` they compute the stair
without noise and sum over integers, which the quanta multiply afterwards. The sums are exact if the
incoming features are integer multiples of a quantum too.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softstair import _check, kernels
from softstair._projections import (
    TokenAttention,
    TokenConv1D,
    TokenEmbedding,
    TokenLinear,
)
from softstair._stair_layer import StairLayer
from softstair._stair_module import StairActivation, StairModule, StairWeight

__all__ = [
    "StairActivation",
    "StairConv1d",
    "StairConv2d",
    "StairConv3d",
    "StairConvTranspose1d",
    "StairConvTranspose2d",
    "StairLayer",
    "StairLinear",
    "StairModule",
    "StairWeight",
    "TokenAttention",
    "TokenConv1D",
    "TokenEmbedding",
    "TokenLinear",
    "layer_count",
    "stair_modules",
]


class StairLinear(StairLayer, nn.Linear):
    """:class:`torch.nn.Linear` with quantised weights."""

    def _sum(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)


class StairConv1d(StairLayer, nn.Conv1d):
    """:class:`torch.nn.Conv1d` with quantised weights."""

    sum_dimensions = 1


class StairConv2d(StairLayer, nn.Conv2d):
    """:class:`torch.nn.Conv2d` with quantised weights."""

    sum_dimensions = 2

    def _int8_sum(self, features: Tensor, weight: Tensor) -> Tensor | None:
        levels = self.weight_stair.stair.integers or (128,)
        small = max(-levels[0], levels[-1]) < 128
        has_gradient = torch.is_grad_enabled() and (features.requires_grad or weight.requires_grad)
        if has_gradient or not small or self.widest_input > 127 or self.padding_mode != "zeros":
            return None
        geometry = (self.stride, self.padding, self.dilation, self.groups)
        if features.dim() != 4 or not kernels.can_convolve_int8(features, *geometry):
            return None
        quanta = (features / (self.input_quantum or 1.0)).round()
        return kernels.convolve_int8(quanta, weight, int(self.padding[0]), self.stride[0])


class StairConv3d(StairLayer, nn.Conv3d):
    """:class:`torch.nn.Conv3d` with quantised weights."""

    sum_dimensions = 3


class _StairConvTranspose(StairLayer):
    """A transposed convolution with quantised weights."""

    output_axis = None
    groups: int

    @property
    def inputs_per_sum(self) -> int:
        return int(self.weight[:, 0].numel()) // self.groups

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if output_size is not None:
            raise _check.wrong("output_size", output_size, "None; set output_padding")
        return StairLayer.forward(self, input)

    def _sum(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding: Any = self.padding
        more: Any = (self.output_padding, self.groups, self.dilation)
        convolve: Any = F.conv_transpose1d if self.sum_dimensions == 1 else F.conv_transpose2d
        return convolve(x, weight, bias, self.stride, padding, *more)


class StairConvTranspose1d(_StairConvTranspose, nn.ConvTranspose1d):
    """:class:`torch.nn.ConvTranspose1d` with quantised weights, which have one quantum."""

    sum_dimensions = 1


class StairConvTranspose2d(_StairConvTranspose, nn.ConvTranspose2d):
    """:class:`torch.nn.ConvTranspose2d` with quantised weights, which have one quantum."""

    sum_dimensions = 2


def stair_modules(net: nn.Module) -> Iterator[tuple[str, StairModule]]:
    """Yield each stair of a network, of weights and of features, with its name."""
    for name, module in net.named_modules():
        if isinstance(module, StairModule):
            yield name, module


@contextmanager
def hooked(modules: Mapping[Any, nn.Module], hook: Callable[..., Any]) -> Iterator[None]:
    """Call ``hook(name, arguments, result)`` after the modules with these names; what it returns
    replaces the result, unless it is None."""
    with ExitStack() as hooks:
        for name, module in modules.items():
            after = lambda _, arguments, result, name=name: hook(name, arguments, result)
            hooks.enter_context(module.register_forward_hook(after))
        yield


def layer_count(net: nn.Module) -> int:
    """Return the number of quantised layers of a network.

    Raises:
        ValueError: If there are none.
    """
    layers = [module.layer for _, module in stair_modules(net)]
    if not layers:
        raise _check.invalid(
            "net", f"must be a quantised network, but {type(net).__name__} has no stairs"
        )
    return max(layers) + 1
