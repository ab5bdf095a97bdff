"""Activations called as functions: a traced graph in which they are modules.

Tracing freezes what a forward pass decides in Python, the training mode above all: a
``F.dropout(x, training=self.training)`` would drop for ever. The graph is therefore traced in both
modes; functional dropout becomes a module, and any other difference is refused.
"""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from softstair.graph import Tracer, trace

__all__ = ["names", "with_modules"]

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


def with_modules(
    net: nn.Module, replacements: Mapping[int, tuple[str, nn.Module]]
) -> fx.GraphModule:
    """``net`` as a traced module in which the numbered function calls are the given modules."""
    training = net.training
    traced = _same_in_both_modes(net)
    for number, node in enumerate(list(traced.nodes)):
        if number in replacements:
            _replace(traced, node, net, *replacements[number])
        elif node.op == "call_function" and node.target in DROPOUTS:
            share = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
            owner, _, leaf = names(traced)[number].rpartition(".")
            name = f"{owner}.{leaf.removeprefix('stair_')}_module".lstrip(".")
            _replace(traced, node, net, name, DROPOUTS[node.target](share))
    module = fx.GraphModule(net, traced, class_name=type(net).__name__)
    module._tracer_cls = Tracer
    _keep_unused(module, net)
    return module.train(training)


def _replace(traced: fx.Graph, node: fx.Node, net: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    net.get_submodule(owner).add_module(leaf, module)
    source = node.args[0] if node.args else node.kwargs["input"]
    with traced.inserting_after(node):
        call = traced.call_module(name, (source,))
    node.replace_all_uses_with(call)
    traced.erase_node(node)


def _same_in_both_modes(net: nn.Module) -> fx.Graph:
    """The traced graph, provided that training changes nothing in it but functional dropout."""
    training = net.training
    evaluating = trace(net.eval())[1]
    learning = trace(net.train())[1]
    net.train(training)
    pairs = zip(learning.nodes, evaluating.nodes, strict=False)
    same = len(learning.nodes) == len(evaluating.nodes) and all(_alike(a, b) for a, b in pairs)
    if not same:
        raise ValueError(
            f"model must compute the same in training and in evaluation for its activations to be "
            f"found in its code, but the forward pass of {type(net).__name__} depends on "
            "self.training; make its activations modules (nn.ReLU instead of F.relu)."
        )
    return learning


def _alike(a: fx.Node, b: fx.Node) -> bool:
    if a.op == "call_function" and a.target in DROPOUTS:
        return a.target == b.target
    return (a.op, a.target, str(a.args), str(a.kwargs)) == (
        b.op,
        b.target,
        str(b.args),
        str(b.kwargs),
    )


def _keep_unused(module: nn.Module, net: nn.Module) -> None:
    """Modules, parameters and buffers that the forward pass does not reach stay in the network, so
    that its checkpoints keep their names."""
    for name, child in net.named_children():
        if name not in module._modules:
            module.add_module(name, child)
        elif module._modules[name] is not child:
            _keep_unused(module._modules[name] or nn.Module(), child)
    for name, parameter in net.named_parameters(recurse=False):
        if name not in module._parameters:
            module.register_parameter(name, parameter)
    for name, buffer in net.named_buffers(recurse=False):
        if name not in module._buffers:
            keep = name not in net._non_persistent_buffers_set
            module.register_buffer(name, buffer, persistent=keep)
