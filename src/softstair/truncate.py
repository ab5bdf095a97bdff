"""The end of the backward pass at annealed layers.

A stair whose noise is a Dirac passes no gradient. Once a layer's noise is gone its stairs yield
outputs without one, so that autograd prunes whatever feeds nothing else; modules from which every
path to the output meets such a stair run without recording. Their parameters receive gradients of
zero all the same, unless they are to be frozen: an optimiser with momentum, and DDP, then do
exactly what they would have done.
"""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from softstair.graph import Graph, Step
from softstair.nn import StairActivation, StairLayer, stair_modules
from softstair.report import ATTRIBUTE

__all__ = ["Truncation"]


class Truncation:
    """A forward hook of the network: ties its parameters to its output, once a layer is annealed.

    p[:0].sum() is an empty sum: 0 in value whatever p holds, and a gradient of zeros for p. Added
    to a gradient it changes nothing, so that no parameter has to be known to have lost its own.
    """

    def __init__(self) -> None:
        self.tied: list[tuple[nn.Module, str]] = []
        self.handles: list[Any] = []

    @classmethod
    def of(cls, net: nn.Module) -> "Truncation":
        """The network's own; a second annealer finds the first one's."""
        for hook in net._forward_hooks.values():
            if isinstance(hook, cls):
                return hook
        hook = cls()
        net.register_forward_hook(hook)
        return hook

    def update(self, net: nn.Module, freeze: bool) -> None:
        """Finds out anew what lies behind annealed stairs."""
        for handle in self.handles:
            handle.remove()
        quiet = _behind_walls(net)
        self.handles = [handle for module in quiet for handle in _without_recording(module)]
        annealed = any(stair.annealed for _, stair in stair_modules(net))
        self.tied = _taught(net) if annealed and not freeze else []
        if freeze:
            for module in net.modules():
                if isinstance(module, StairLayer) and module.weight_stair.annealed:
                    module.weight.grad = None
            for module in quiet:
                module.zero_grad(set_to_none=True)

    def __call__(self, net: nn.Module, inputs: Any, output: Any) -> Any:
        if not net.training or not torch.is_grad_enabled() or not self.tied:
            return None
        empty = [getattr(module, name).reshape(-1)[:0].sum() for module, name in self.tied]
        zero = torch.stack(empty).sum()
        tied, found = _tie(output, zero)
        if not found:
            raise TypeError(
                "the network must return a tensor, or tuples, lists, dictionaries or dataclasses "
                "of tensors, for its backward pass to be truncated, but it returned "
                f"{type(output).__name__}; give Annealer truncate=False or freeze=True."
            )
        return tied


def _tie(output: Any, zero: Tensor) -> tuple[Any, bool]:
    """The output with zero added to each of its tensors, and whether there is any."""
    found = False

    def tie(value: Any) -> Any:
        nonlocal found
        if isinstance(value, Tensor) and value.is_floating_point():
            found = True
            return value + zero.to(value.dtype)
        if is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in fields(value) if field.init]
            return replace(value, **{name: tree_map(tie, getattr(value, name)) for name in names})
        return value

    return tree_map(tie, output), found


def _taught(net: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where the parameters are that training uses; one that no code takes has no gradient at all,
    and not one of zeros."""
    listed: set[int] = set()
    taken: set[int] = set()
    for part in net.modules():
        conversion = getattr(part, ATTRIBUTE, None)
        if conversion is not None and conversion.graph.complete:
            called = {step.module for step in conversion.graph.steps if step.module}
            for name, parameter in part.named_parameters(remove_duplicate=False):
                owners = [name[:i] for i, letter in enumerate(name) if letter == "."]
                listed.add(id(parameter))
                if name in conversion.graph.attributes or not called.isdisjoint(owners):
                    taken.add(id(parameter))
    seen = listed - taken  # idle ones, and those found before
    found = []
    for module in net.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                found.append((module, name))
    return found


def _behind_walls(net: nn.Module) -> list[nn.Module]:
    """The modules with parameters from which every path to the output meets an annealed stair.

    Known only where the graph is known whole; autograd prunes the rest all the same.
    """
    quiet: dict[int, nn.Module] = {}
    for part in net.modules():
        conversion = getattr(part, ATTRIBUTE, None)
        if conversion is not None and conversion.graph.complete:
            for module in _behind_walls_of(part, conversion.graph):
                quiet[id(module)] = module
    return list(quiet.values())


def _behind_walls_of(net: nn.Module, graph: Graph) -> list[nn.Module]:
    modules = [net.get_submodule(step.module) if step.module else None for step in graph.steps]

    def is_wall(step: Step) -> bool:
        module = net.get_submodule(step.module) if step.module else None
        return isinstance(module, StairActivation) and module.annealed

    # Somebody's hook may take a result elsewhere, into the loss perhaps.
    watched = [n for n, module in enumerate(modules) if module is not None and _is_watched(module)]
    alive = {id(modules[number]) for number in graph.reaching_output(is_wall, watched)}
    return [
        module
        for module in modules
        if module is not None and id(module) not in alive and any(True for _ in module.parameters())
    ]


def _is_watched(module: nn.Module) -> bool:
    return any(hook is not _resume_recording for hook in module._forward_hooks.values())


def _without_recording(module: nn.Module) -> tuple[Any, Any]:
    """Hooks that run the module as under torch.no_grad(). A compiler needs none: it prunes."""
    return (
        module.register_forward_pre_hook(_stop_recording),
        module.register_forward_hook(_resume_recording, always_call=True),
    )


def _stop_recording(module: nn.Module, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        module.__dict__["_recording"] = torch.is_grad_enabled()
        torch.set_grad_enabled(False)


def _resume_recording(module: nn.Module, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        torch.set_grad_enabled(module.__dict__.pop("_recording", True))
