"""Other ways to train a quantised network of the same topology: written naively, and Brevitas."""

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from softstair.models import last_layer
from softstair.stair import Stair

__all__ = ["Rival", "brevitas_network", "has_brevitas", "naive_network"]

Rival = Callable[[nn.Module, Stair, Stair], nn.Module]
"""Makes a rival of a float network, for the stairs of its weights and of its features."""


class _Rounded(torch.autograd.Function):
    """Rounding to whole numbers of quanta, and a straight-through gradient: as one writes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantum: float, low: int, high: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bounds = (low - 0.5) * quantum, (high + 0.5) * quantum
        return torch.clamp(torch.round(x / quantum), low, high) * quantum

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        low, high = ctx.bounds
        return grad * ((x >= low) & (x <= high)), None, None, None


class _Rounding(nn.Module):
    def __init__(self, stair: Stair) -> None:
        super().__init__()
        levels, quantum = stair.integers, stair.quantum
        if levels is None or not isinstance(quantum, float):
            raise ValueError(f"stair must have levels of whole quanta, but {stair!r} was given.")
        self.settings = quantum, min(levels), max(levels)

    def forward(self, x: Tensor) -> Tensor:
        return _Rounded.apply(x, *self.settings)


def naive_network(network: nn.Module, weights: Stair, features: Stair) -> nn.Module:
    """The network with every ReLU and every weight but the last layer's rounded to its stair, by an
    autograd.Function of three operations each way; changes it.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> net = naive_network(net, Stair.ternary(), Stair.ternary())
    >>> net[0].weight.detach().abs().unique().tolist(), net[1](torch.tensor([0.6, -9.0])).tolist()
    ([0.0], [1.0, -1.0])
    """
    last = last_layer(network)
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.ReLU):
            _put(network, name, _Rounding(features))
        elif isinstance(module, nn.Conv2d | nn.Linear) and name != last:
            parametrize.register_parametrization(module, "weight", _Rounding(weights))
    return network


def has_brevitas() -> bool:
    """Whether Brevitas is installed."""
    return importlib.util.find_spec("brevitas") is not None


def brevitas_network(network: nn.Module, weights: Stair, features: Stair) -> nn.Module:
    """The network in layers of Brevitas, of as many levels; the last layer stays. Changes it."""
    layers = importlib.import_module("brevitas.nn")
    quantisers = importlib.import_module("brevitas.quant")
    of_weights = {"weight_quant": quantisers.SignedTernaryWeightPerTensorConst}
    if len(weights.levels) != 3:
        bits = _bits(weights)
        of_weights = {"weight_quant": quantisers.Int8WeightPerTensorFloat, "weight_bit_width": bits}
    last = last_layer(network)
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.ReLU) and len(features.levels) == 3:
            ternary = quantisers.SignedTernaryActPerTensorConst
            _put(network, name, layers.QuantIdentity(act_quant=ternary))
        elif isinstance(module, nn.ReLU):
            kind, bits = quantisers.Uint8ActPerTensorFloat, _bits(features)
            _put(network, name, layers.QuantReLU(act_quant=kind, bit_width=bits))
        elif name == last:
            continue
        elif isinstance(module, nn.Conv2d):
            sizes = (module.in_channels, module.out_channels, module.kernel_size)
            names = ("stride", "padding", "dilation", "groups")
            rest = {name: getattr(module, name) for name in names}
            bias = module.bias is not None
            _put(network, name, layers.QuantConv2d(*sizes, bias=bias, **rest, **of_weights))
        elif isinstance(module, nn.Linear):
            sides, bias = (module.in_features, module.out_features), module.bias is not None
            _put(network, name, layers.QuantLinear(*sides, bias=bias, **of_weights))
    return network


def _bits(stair: Stair) -> int:
    return math.ceil(math.log2(len(stair.levels)))


def _put(network: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(network.get_submodule(parent), own, module)
