"""Networks that are only evaluated, such as teachers, in fewer operations."""

import copy
import math
import operator
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from softstair.convert.graph import trace

FOLDS: dict[Any, Callable[[Any, Any], nn.Module]] = {
    nn.Linear: fuse_linear_bn_eval,
    nn.Conv1d: fuse_conv_bn_eval,
    nn.Conv2d: fuse_conv_bn_eval,
}


class ConvolutionReLU(nn.Module):
    """A convolution, the sum with a shortcut if there is one, and a ReLU: one kernel of cuDNN."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.convolution = convolution

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        layer = self.convolution
        if not x.is_cuda or torch.version.cuda is None:
            sums = layer(x)
            return F.relu(sums if shortcut is None else sums + shortcut)
        rest: tuple[Any, ...] = (
            layer.bias,
            layer.stride,
            layer.padding,
            layer.dilation,
            layer.groups,
        )
        if shortcut is None:
            return torch.cudnn_convolution_relu(x, layer.weight, *rest)
        return torch.cudnn_convolution_add_relu(x, layer.weight, shortcut, 1.0, *rest)


@torch.no_grad()
def optimised_for_inference(network: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """Return a network in evaluation with fewer operations, and the same scores up to rounding.

    Batch normalisations are folded into the layers before them, and a ReLU is joined with the
    convolution before it. A network whose forward pass cannot be traced is returned as it is, and
    so is one that would give other scores for examples of ``shape``.
    """
    try:
        copied = copy.deepcopy(network)
        _, graph = trace(copied, training=False)
        optimised = fx.GraphModule(copied, graph).eval()
    except Exception:  # whatever the model's code raises for torch.fx's proxies
        return network
    calls = Counter(node.target for node in graph.nodes)

    def module_of(node: Any, most_calls: int = 1) -> nn.Module | None:
        """Return the module of a node; None if there is none, or if it is called too often."""
        is_module = isinstance(node, fx.Node) and node.op == "call_module"
        is_module = is_module and calls[node.target] <= most_calls
        return optimised.get_submodule(str(node.target)) if is_module else None

    for node in list(graph.nodes):
        norm: Any = module_of(node)
        source: Any = node.args[0] if node.args else None
        layer = module_of(source)
        is_norm = isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d)
        is_folded = is_norm and norm.running_mean is not None and type(layer) in FOLDS
        if is_folded and len(source.users) == 1:
            optimised.set_submodule(source.target, FOLDS[type(layer)](layer, norm))
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    for node in list(graph.nodes):
        if type(module_of(node, sys.maxsize)) is nn.ReLU and len(node.args[0].users) == 1:
            _join(node, graph, optimised, module_of)
    optimised.recompile()
    optimised.delete_all_unused_submodules()
    example = torch.linspace(-2, 2, 2 * math.prod(shape)).reshape(2, *shape)
    device = next((parameter.device for parameter in network.parameters()), None)
    scores, expected = (net(example.to(device)) for net in (optimised, network))
    return optimised if torch.allclose(scores, expected, rtol=1e-3, atol=1e-3) else network


def _join(
    relu: fx.Node, graph: fx.Graph, network: nn.Module, module_of: Callable[[Any], nn.Module | None]
) -> None:
    """Replace a ReLU and the convolution before it, or before a sum before it, by one module."""
    source: Any = relu.args[0]
    summands = list(source.args) if source.target in (operator.add, operator.iadd) else [source]
    for number, node in enumerate(summands):
        layer = module_of(node)
        if type(layer) is not nn.Conv2d or layer.groups > 1 or len(node.users) > 1:
            continue
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            continue
        shortcuts = summands[:number] + summands[number + 1 :]
        if not all(isinstance(shortcut, fx.Node) for shortcut in shortcuts):
            continue
        network.set_submodule(node.target, ConvolutionReLU(layer))
        with graph.inserting_before(relu):
            joined = graph.call_module(node.target, (*node.args, *shortcuts))
        relu.replace_all_uses_with(joined)
        for unused in dict.fromkeys((relu, source, node)):
            graph.erase_node(unused)
        return
