"""How training steps run: by fused kernels, compiled, or as they are; captured or not.

With ``captured.py`` this is all that a training calls of ``_accelerate``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from softstair import _accelerate, _check
from softstair._errors import SoftstairError, first_line
from softstair.anneal import Annealer
from softstair.data.batches import Examples
from softstair.train.recipe import Recipe

WORTH_COMPILING = 20_000
"""Steps that save about as much time as one compilation takes, by one comparison on an H200."""


class Compiled:
    """``torch.compile(network)``, which raises SoftstairError if the compiler fails."""

    def __init__(self, network: nn.Module) -> None:
        self._run = torch.compile(network)

    def __call__(self, x: Tensor) -> Tensor:
        from torch._dynamo.exc import TorchDynamoException

        try:
            return self._run(x)
        except TorchDynamoException as error:
            raise SoftstairError(
                f"torch.compile cannot compile this network here ({type(error).__name__}: "
                f"{first_line(error)}): pass `compile=never`.",
                field="compile",
            ) from None


@dataclass(frozen=True)
class Execution:
    """How training steps run; ``forward`` is the network as they call it."""

    forward: Callable[[Tensor], Tensor]
    precision: str
    fused: bool = False
    compiled: bool = False
    captured: bool = False
    not_fused: str = ""
    """Which stairs fused kernels do not compute although they might, and why."""

    @property
    def eval_forward(self) -> Callable[[Tensor], Tensor] | None:
        """The network as it is evaluated, if not as it is."""
        return self.forward if self.fused and getattr(self.forward, "evaluates", False) else None

    def to_json(self) -> dict[str, Any]:
        """Return plain data for config.json."""
        names = ("precision", "fused", "compiled", "captured", "not_fused")
        return {name: getattr(self, name) for name in names}


def choose_execution(
    recipe: Recipe,
    network: nn.Module,
    annealer: Annealer | None,
    device: torch.device,
    steps: int,
    own: bool,
    processes: int = 1,
) -> Execution:
    """Return the fastest execution that the recipe allows, for ``steps`` per epoch.

    A model of the user's own may compute what no trace or capture shows. Several processes sum
    their gradients in each step, which no graph can capture.
    """
    if processes > 1 and recipe.run.capture == "always":
        problem = "must be auto or never with several processes, but 'always' was given"
        raise _check.invalid("capture", problem)
    precision = recipe.run.precision_on(device)
    captured = recipe.run.capture == "always" or (recipe.run.capture == "auto" and not own)
    captured = captured and device.type == "cuda" and processes == 1
    remark = ""
    fusible = recipe.run.compile != "always" and (recipe.run.kernels == "triton" or not own)
    if fusible and annealer is not None and _accelerate.can_fuse(device):
        from softstair._accelerate import fuse, fused  # which need Triton

        remark, images = fuse.not_fused(network), recipe.run.batch // processes
        # FP8 on Hopper, where it was measured.
        is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
        if recipe.run.precision == "fast" and is_hopper:
            rounded = fused(network, float8=True)
            if rounded is not None and rounded.gains_from_float8(images):
                return Execution(rounded, "float8", True, False, captured, remark)
        if (fused_network := fused(network, precision == "float8")) is not None:
            if precision == "float8" and not fused_network.multiplies_float8(images):
                remark = f"{remark + '; ' if remark else ''}no product can be in FP8"
                precision = "bfloat16"
            return Execution(fused_network, precision, True, False, captured, remark)
    precision = "bfloat16" if precision == "float8" else precision
    if _compiles(recipe, annealer, device, steps):
        return Execution(Compiled(network), precision, False, True, captured, remark)
    return Execution(network, precision, False, False, captured, remark)


def use_batch_kernel(examples: Examples) -> Examples:
    """Let one kernel make the batches, where there is one; return the examples."""
    if examples.x.dim() == 4 and _accelerate.can_fuse(examples.x.device):
        from softstair._accelerate.augment_triton import batch

        examples.kernel = batch
    return examples


def _compiles(recipe: Recipe, annealer: Annealer | None, device: torch.device, steps: int) -> bool:
    if recipe.run.compile != "auto" or recipe.run.kernels == "triton":
        return recipe.run.compile == "always"
    compilations = 1
    if annealer is not None and recipe.noise.truncate and not recipe.noise.static_std:
        compilations += annealer.layers  # each annealed layer changes the backward pass
    return device.type == "cuda" and recipe.run.epochs * steps >= WORTH_COMPILING * compilations
