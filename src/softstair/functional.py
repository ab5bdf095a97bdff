"""Activations called as functions: a forward pass in which they are modules.

The network keeps its class, its modules and its attributes; only its forward pass is replaced, by
the code of a traced graph, which calls the innermost modules (a block called by itself still runs
its own code, in float). Tracing freezes what a forward pass decides or makes in
Python, the training mode above all: a ``F.dropout(x, training=self.training)`` would drop for ever.
The graph is therefore traced in both modes; such a dropout becomes a module, and any other
difference is refused.
"""

import importlib
import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from softstair.graph import Graph, call_operators, steps_of, trace

__all__ = ["names", "rewrite"]

DROPOUTS: dict[Any, type[nn.Module]] = {
    F.dropout: nn.Dropout,
    F.dropout1d: nn.Dropout1d,
    F.dropout2d: nn.Dropout2d,
    F.dropout3d: nn.Dropout3d,
    F.alpha_dropout: nn.AlphaDropout,
    F.feature_alpha_dropout: nn.FeatureAlphaDropout,
}


def names(traced: fx.Graph) -> list[str]:
    """For each node the name of a module in its place, inside the module whose code calls it."""
    found = []
    for node in traced.nodes:
        stack = list(node.meta.get("nn_module_stack", {}).values())
        owner = stack[-1][0] if stack else ""
        found.append(f"{owner}.stair_{node.name}" if owner else f"stair_{node.name}")
    return found


def rewrite(net: nn.Module, replacements: Mapping[int, tuple[str, nn.Module]]) -> Graph:
    """Makes the numbered function calls of ``net`` the given modules; returns its graph."""
    _, learning = trace(net, training=True)
    _, evaluating = trace(net, training=False)
    _check_hooks(net, learning)
    dropouts = _differences(net, learning, evaluating)
    places = names(learning)
    for number, node in enumerate(list(learning.nodes)):
        node.type = None  # annotations may be text, which is no code
        if number in replacements:
            _replace(learning, node, net, *replacements[number])
        elif node in dropouts:
            share = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
            module = DROPOUTS[node.target](share).train(net.training)
            _replace(learning, node, net, places[number].replace("stair_", "module_"), module)
    _hold_constants(net, learning)
    graph = steps_of(learning, net)
    call_operators(graph, learning)
    net.forward = Rewritten(net, learning)
    return graph


class Rewritten:
    """The forward pass of one network, as code. An attribute of the network, it shadows the method
    of its class, and is copied and pickled with it: the code, not the function made of it."""

    def __init__(self, net: nn.Module, traced: fx.Graph) -> None:
        code = traced.python_code("self")
        self.net, self.source, self.names = net, code.src, dict(code.globals)
        self.__signature__ = inspect.signature(net.forward)
        self._build()

    def _build(self) -> None:
        space = dict(self.names)
        exec(self.source, space)
        self.function = space["forward"]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.function(self.net, *arguments, **named)

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "names": {k: _portable(v) for k, v in self.names.items()}}
        del state["function"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.names = {k: _restored(v) for k, v in state["names"].items()}
        self._build()


class _Module(str):
    """The name of a Python module, which cannot itself be pickled."""


def _portable(value: Any) -> Any:
    return _Module(value.__name__) if isinstance(value, ModuleType) else value


def _restored(value: Any) -> Any:
    return importlib.import_module(value) if isinstance(value, _Module) else value


def _replace(traced: fx.Graph, node: fx.Node, net: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    net.get_submodule(owner).add_module(leaf, module)
    source = node.args[0] if node.args else node.kwargs["input"]
    with traced.inserting_after(node):
        call = traced.call_module(name, (source,))
    node.replace_all_uses_with(call)
    traced.erase_node(node)


def _differences(net: nn.Module, learning: fx.Graph, evaluating: fx.Graph) -> set[fx.Node]:
    """The functional dropouts that follow the training mode; nothing else may differ."""
    dropouts = set()
    same = len(learning.nodes) == len(evaluating.nodes)
    place = {n: i for traced in (learning, evaluating) for i, n in enumerate(traced.nodes)}
    for a, b in zip(learning.nodes, evaluating.nodes, strict=False):
        if a.op == "get_attr" and b.op == "get_attr":
            _check_constants(net, str(a.target), str(b.target))
        elif _call(a, place) != _call(b, place):
            same = same and a.target == b.target and a.target in DROPOUTS
            dropouts.add(a)
    if not same:
        raise ValueError(
            "model must compute the same in training and in evaluation for its activations to be "
            f"found in its code, but the forward pass of {type(net).__name__} depends on "
            "self.training; make its activations modules (nn.ReLU instead of F.relu)."
        )
    return dropouts


def _call(node: fx.Node, place: Mapping[fx.Node, int]) -> tuple[Any, ...]:
    """What a node does, operands by their place: each trace names its constants anew."""
    operands = fx.map_arg((node.args, node.kwargs), lambda operand: place[operand])
    return node.op, node.target, str(operands)


def _check_hooks(net: nn.Module, traced: fx.Graph) -> None:
    """The rewritten code calls the innermost modules alone; a hook on a block would never run."""
    called = {str(node.target) for node in traced.nodes if node.op == "call_module"}
    for name, module in net.named_modules():
        inside = any(name == leaf or name.startswith(leaf + ".") for leaf in called)
        if name and not inside and (module._forward_hooks or module._forward_pre_hooks):
            raise ValueError(
                "model must have no hooks on blocks for activations to be found in its code, but "
                f"{name} has one; make the activations modules, or add the hook afterwards."
            )


def _attribute(net: nn.Module, name: str) -> Any:
    owner, _, leaf = name.rpartition(".")
    return getattr(net.get_submodule(owner), leaf)


def _check_constants(net: nn.Module, first: str, second: str) -> None:
    a, b = _attribute(net, first), _attribute(net, second)
    if isinstance(a, Tensor) and isinstance(b, Tensor) and not torch.equal(a, b):
        raise ValueError(
            f"model must not draw random tensors for its activations to be found in its code, but "
            f"the forward pass of {type(net).__name__} makes another one at each call; "
            "make its activations modules (nn.ReLU instead of F.relu)."
        )


def _hold_constants(net: nn.Module, traced: fx.Graph) -> None:
    """Tensors made in the forward pass become buffers, outside of checkpoints, and move with it."""
    used = {str(node.target) for node in traced.nodes if node.op == "get_attr"}
    for name in [key for key in vars(net) if key.startswith("_tensor_constant")]:
        constant = net.__dict__.pop(name)
        if name in used:
            net.register_buffer(name, constant, persistent=False)
