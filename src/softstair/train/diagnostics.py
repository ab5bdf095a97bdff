"""Is training still alive? Where the weights and features lie on their stairs, layer by layer.

A stair whose inputs all lie outside the noise around its thresholds passes no gradient, and one
whose inputs all lie in one bin computes a constant: both are silent failures of quantised training.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from softstair import kernels
from softstair.nn import StairLayer, StairModule, StairWeight, stair_modules

__all__ = ["Health", "examine"]

NEARLY_ALL = 0.995
NARROW = 0.05
"""In quanta; noise that is narrower is about to go, and its gradient with it."""
FEW = 16
"""Levels: so many are counted one by one, which a GPU does faster than a histogram of few bins."""


@dataclass(frozen=True)
class Health:
    """One stair: the share of its inputs at each level, and the share that passes no gradient
    (None once the noise is gone, since then none does, by design)."""

    name: str
    layer: int
    std: float
    occupancy: tuple[float, ...]
    dead: float | None

    def to_json(self) -> dict[str, Any]:
        """Plain data, in four digits, for a line of metrics."""
        dead = None if self.dead is None else round(self.dead, 4)
        levels = [round(share, 4) for share in self.occupancy]
        return {"name": self.name, "layer": self.layer, "levels": levels, "dead": dead}

    def complaint(self, fading: bool) -> str | None:
        """What is wrong, in words; None if nothing is. ``fading`` noise passes less and less, until
        none is left: that is how it should be."""
        expected = fading and self.std <= NARROW
        if self.dead is not None and self.dead >= NEARLY_ALL and not expected:
            return f"{self.dead:.1%} of the inputs of {self.name} pass no gradient"
        if max(self.occupancy) >= NEARLY_ALL:
            return f"{max(self.occupancy):.1%} of the inputs of {self.name} lie at one level"
        return None


@torch.no_grad()
def examine(network: nn.Module, x: Tensor) -> list[Health]:
    """The health of every stair of a network, for some inputs; draws no random number."""
    was_training = network.training
    network.eval()
    inputs: dict[str, Tensor] = {}
    hooks = []
    for name, module in stair_modules(network):
        if not isinstance(module, StairWeight):
            keep = lambda _, given, name=name: inputs.__setitem__(name, given[0])
            hooks.append(module.register_forward_pre_hook(keep))
    try:
        network(x)
    finally:
        for hook in hooks:
            hook.remove()
        network.train(was_training)
    for name, module in network.named_modules():
        if isinstance(module, StairLayer):
            inputs[f"{name}.weight_stair"] = module.weight
    known = [(name, module) for name, module in stair_modules(network) if name in inputs]
    # Everything at once: a device is waited for once, and not three times a stair.
    measured = [_measure(module, inputs[name]) for name, module in known]
    lengths = [len(numbers) for numbers in measured]
    lists = torch.cat(measured).cpu().split(lengths) if measured else ()
    return [
        _health(name, module, numbers.tolist())
        for (name, module), numbers in zip(known, lists, strict=True)
    ]


def _measure(module: StairModule, x: Tensor) -> Tensor:
    """(std, share that passes no gradient, share of each level …), where x is."""
    index = module.stair.index(x).flatten()
    levels = len(module.stair)
    if levels <= FEW:
        counts = torch.stack([(index == level).sum() for level in range(levels)])
    else:
        counts = torch.bincount(index, minlength=levels)
    mean, std = module._absolute(module.mean, x), module._absolute(module.std, x)
    dead = (kernels.slope(x.float(), module.stair, module.noise, mean, std) == 0).sum()
    shares = torch.cat([dead[None], counts]).double() / x.numel()
    return torch.cat([module.std.double().reshape(1), shares])


def _health(name: str, module: StairModule, numbers: list[float]) -> Health:
    std, dead, *occupancy = numbers
    name = name.removesuffix(".weight_stair") + (
        " weights" if isinstance(module, StairWeight) else ""
    )
    return Health(name, module.layer, std, tuple(occupancy), dead if std > 0 else None)
