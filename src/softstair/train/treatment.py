"""How the training steps of a recipe run: fused, compiled, captured, and in which precision."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from softstair.anneal import Annealer
from softstair.kernels import exact
from softstair.train.compiled import Compiled
from softstair.train.recipe import Recipe

__all__ = ["Treatment", "treat"]

WORTH_COMPILING = 1500
"""Steps that save as much time as a compilation takes; there is one for each annealed layer too,
since the backward pass then ends elsewhere."""


@dataclass(frozen=True)
class Treatment:
    """``forward`` is the network as its training steps run it."""

    forward: Callable[[Tensor], Tensor]
    precision: str
    fused: bool
    compiled: bool
    captured: bool

    @property
    def judged(self) -> Callable[[Tensor], Tensor] | None:
        """How the network is evaluated; None: as it is."""
        return self.forward if self.fused and getattr(self.forward, "evaluates", False) else None

    def to_json(self) -> dict[str, Any]:
        """Plain data, for config.json."""
        names = ("precision", "fused", "compiled", "captured")
        return {name: getattr(self, name) for name in names}


def treat(
    recipe: Recipe,
    network: nn.Module,
    annealer: Annealer | None,
    device: torch.device,
    steps: int,
    own: bool,
    processes: int = 1,
) -> Treatment:
    """What is fastest, of what the recipe allows; ``steps`` are those of an epoch, and ``own`` says
    that the model is the user's: its code may compute what no trace or capture of it shows. The
    steps of several processes meet in a sum, which is no part of a graph."""
    cuda = device.type == "cuda"
    if processes > 1 and recipe.capture == "always":
        raise ValueError(
            "capture must be auto or never where several processes train a run, whose steps are "
            "no graph, but 'always' was given."
        )
    precision = recipe.precision_on(device)
    captured = recipe.capture == "always" or (recipe.capture == "auto" and not own)
    captured = captured and cuda and processes == 1
    known = recipe.kernels == "triton" or not own
    if known and recipe.compile != "always" and annealer is not None and exact.has_fused(device):
        from softstair.fused import fused  # which needs Triton

        if (fast := fused(network)) is not None:
            return Treatment(fast, precision, True, False, captured)
    if _compiles(recipe, annealer, device, steps):
        return Treatment(Compiled(network), precision, False, True, captured)
    return Treatment(network, precision, False, False, captured)


def _compiles(recipe: Recipe, annealer: Annealer | None, device: torch.device, steps: int) -> bool:
    if recipe.compile != "auto" or recipe.kernels == "triton":
        return recipe.compile == "always"
    compilations = 1
    if annealer is not None and recipe.truncate and not recipe.static_std:
        compilations += annealer.layers
    worth = recipe.epochs * steps >= WORTH_COMPILING * compilations
    return device.type == "cuda" and worth
