"""Find the groups of modules in a traced network that fused layers replace."""

import operator
from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from softstair._accelerate.layer import Average, FusedLayer, quantise_ahead
from softstair._accelerate.moments import zeros_for
from softstair._accelerate.parts import Context
from softstair._accelerate.stairs import kernel_stair, prepare_stairs
from softstair._accelerate.update import LatentSteps
from softstair._errors import SoftstairError
from softstair._projections import Projection
from softstair.anneal import Truncation
from softstair.convert.conversion import traces_of
from softstair.convert.graph import Graph, Traces
from softstair.convert.rewrite import call_operators, hooked_blocks
from softstair.kernels.bound import FEW_LEVELS
from softstair.kernels.triton import FAMILIES, is_native
from softstair.nn import StairActivation, StairModule, StairWeight

__all__ = ["FusedNetwork", "fused", "not_fused"]


ADDITIONS = (operator.add, torch.add)
PREFIX = "softstair_fused_"
"""Prefix of the names of modules that are added to the code of a network."""
FLOAT8_CHANNELS = 128
"""Fewest channels of a product for which FP8 was measured against bfloat16."""


class FusedNetwork:
    """The forward pass of a network, some of whose layers run fused.

    It shares the network's parameters and buffers. ``evaluates`` says that the network calls the
    same modules in evaluation as in training, so that this can evaluate it.
    """

    def __init__(self, code: fx.GraphModule, layers: list[FusedLayer], evaluates: bool) -> None:
        self.code, self.layers, self.evaluates = code, layers, evaluates
        self._channels = max(layer.norm.num_features for layer in layers)

    def multiplies_float8(self, images: int) -> bool:
        """Whether a product of the backward pass is in FP8, with batches of so many images."""
        return bool(self._float8_layers(images))

    def gains_from_float8(self, images: int) -> bool:
        """Whether there are such products, and all have at least ``FLOAT8_CHANNELS`` inputs and
        outputs."""
        shapes = [layer.sums.weight.shape[:2] for layer in self._float8_layers(images)]
        return bool(shapes) and min(map(min, shapes)) >= FLOAT8_CHANNELS

    def attach_latent_steps(self) -> LatentSteps:
        """Attach a new :class:`LatentSteps` to the layers whose weights nothing else reads.

        It updates their latent weights during the backward pass.
        """
        nodes = [node for node in self.code.graph.nodes if node.op == "get_attr"]
        others = [operator.attrgetter(str(node.target))(self.code) for node in nodes]
        names = self.code.named_parameters(remove_duplicate=False)
        counts = Counter[Tensor](x for name, x in names if not name.startswith(PREFIX))
        counts.update(x for x in others if isinstance(x, Tensor))
        steps = LatentSteps()
        for layer in self.layers:
            layer.steps = steps if counts[layer.sums.weight] <= 1 else None
        return steps

    def _float8_layers(self, images: int) -> list[FusedLayer]:
        return [layer for layer in self.layers if layer.float8_format(images) is not None]

    def __call__(self, x: Tensor) -> Tensor:
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            seeds = torch.empty((len(self.layers), 2), dtype=torch.int64, device=x.device)
            if any(layer.draws for layer in self.layers):  # otherwise no seed is read
                # One draw per step from torch's generator seeds the numbers of every layer.
                seeds.random_(2**63 - 1)
            # New ones for each pass, which may run in any stream or be captured.
            zeros = zeros_for(len(self.layers), self._channels, x.device)
            sites = [site for layer in self.layers for site in (layer.stair, layer.weight_stair)]
            stairs, trains = prepare_stairs(filter(None, sites)), torch.is_grad_enabled()
            context = Context(stairs, seeds, zeros, trains)
            if x.dim() == 4:
                x = x.contiguous(memory_format=torch.channels_last)
            if trains:
                later = [layer for layer in self.layers[1:] if not layer.reads_integers]
                half = torch.is_autocast_enabled("cuda")
                dtype = torch.get_autocast_dtype("cuda") if half else x.dtype
                quantise_ahead(later, dtype, None, context)
            y: Tensor = self.code(context, x)
            context.stream.join()  # layers that fell back to torch did not take their weights
            return y


def fused(net: nn.Module, float8: bool = False) -> FusedNetwork | None:
    """Return the network with its layers fused; None if none can be, or if its trace does not show
    all that it may compute. With ``float8``, backward products are in FP8 where possible."""
    traces = _traced(net)
    if isinstance(traces, str):
        return None
    known, graph = traces.train_steps, traces.train
    evaluates = traces.eval_steps.complete and _calls(traces.evaluation) == _calls(graph)
    call_operators(known, graph)
    # Features that are changed in place are not those that their layer made.
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    written = frozenset[int]().union(*(step.written for step in known.steps))
    modules, writes = dict(net.named_modules()), _writes(known, graph)
    calls = [node.target for node in graph.nodes if node.op == "call_module"]
    layers: list[FusedLayer] = []
    sources: dict[fx.Node, FusedLayer] = {}
    code = fx.GraphModule(net, graph)
    nodes = list(graph.nodes)
    with graph.inserting_before(nodes[0]):
        context = graph.placeholder("context")
    for node in nodes:
        group = _group(node, modules, calls, writes)
        if group is None:
            continue
        replaced, parts, shortcut = group
        features: Any = node.args[0]
        layer = FusedLayer(len(layers), *parts, sources.get(features), float8)
        name, last = f"{PREFIX}{layer.number}", replaced[-1]
        code.add_submodule(name, layer)
        with graph.inserting_after(last):
            given = (features,) if shortcut is None else (features, shortcut)
            call = graph.call_module(name, (context, *given))
        last.replace_all_uses_with(call)
        for old in reversed(replaced):
            graph.erase_node(old)
        layers.append(layer)
        if numbers[last] not in written:
            sources[call] = layer
    if not layers:
        return None
    for node in graph.nodes:
        pool = modules.get(str(node.target)) if node.op == "call_module" else None
        if type(pool) is nn.AvgPool2d and not (node.kwargs or _has_hooks(pool)):
            node.target = f"{PREFIX}average_{node.name}"
            code.add_submodule(node.target, Average(pool))
    order = {node.target: place for place, node in enumerate(graph.nodes)}
    for call, layer in sources.items():
        layer.readers.sort(key=lambda reader: order[f"{PREFIX}{reader.number}"])
        users = [user.args for user in call.users]
        # By one fused layer, without a shortcut.
        layer.read_once = bool(layer.readers) and users == [(context, call)]
    code.recompile()
    return FusedNetwork(code, layers, evaluates)


def _traced(net: nn.Module) -> Traces | str:
    """Return the graphs of a quantised network, or why it runs as it is."""
    try:
        traces = traces_of(net)
    except SoftstairError as error:
        return str(error)
    others = [hook for hook in net._forward_hooks.values() if not isinstance(hook, Truncation)]
    if others or net._forward_pre_hooks or hooked_blocks(net, traces.train):
        return "it has forward hooks"
    if not traces.train_steps.complete:
        return "its trace does not show all that it may compute"
    return traces


def not_fused(net: nn.Module) -> str:
    """Return which stairs :func:`fused` leaves as they are; empty if there are none."""
    if not any(isinstance(module, StairActivation) for module in net.modules()):
        return ""
    traces = _traced(net)
    if isinstance(traces, str):
        return f"no layer is fused: {traces}"
    known, graph = traces.train_steps, traces.train
    call_operators(known, graph)
    modules, writes = dict(net.named_modules()), _writes(known, graph)
    calls = [node.target for node in graph.nodes if node.op == "call_module"]
    groups = [_group(node, modules, calls, writes) for node in graph.nodes]
    replaced = {node for group in groups if group is not None for node in group[0]}
    stairs = [n for n in graph.nodes if isinstance(modules.get(str(n.target)), StairActivation)]
    left = [str(node.target) for node in stairs if node not in replaced]
    return f"{len(left)} of {len(stairs)} stairs are not fused: {', '.join(left)}" if left else ""


def _calls(graph: fx.Graph) -> list[tuple[str, ...]]:
    return [(node.op, str(node.target), str(node.args), str(node.kwargs)) for node in graph.nodes]


def _writes(known: Graph, graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that change a tensor in place."""
    return {node for node, step in zip(graph.nodes, known.steps, strict=True) if step.written}


def _group(
    node: fx.Node, modules: dict[str, nn.Module], calls: list[Any], writes: set[fx.Node]
) -> tuple[list[fx.Node], tuple[Any, Any, Any, Any], fx.Node | None] | None:
    """Return the nodes that a fused layer replaces, beginning with this one, their modules, and
    the shortcut that is added before the stair, if there is one."""
    nodes = [node]
    while len(nodes) < 5 and len(nodes[-1].users) == 1:
        nodes.extend(nodes[-1].users)
    shortcut, path = None, nodes
    if len(nodes) > 2 and nodes[2].op == "call_function" and nodes[2].target in ADDITIONS:
        summands = [arg for arg in nodes[2].args if arg is not nodes[1]]
        if nodes[2].kwargs or len(summands) != 1 or not isinstance(summands[0], fx.Node):
            return None
        shortcut, path = summands[0], nodes[:2] + nodes[3:]
    parts = [modules.get(str(n.target)) if n.op == "call_module" else None for n in path]
    sums, norm, stair, pool = (parts + [None] * 4)[:4]
    if not (_is_sum(sums) and _is_norm(norm, sums) and _is_stair(stair, StairActivation)):
        return None
    if shortcut is not None or not (isinstance(sums, nn.Conv2d) and _is_pool(pool)):
        pool = None
    count = 3 + (pool is not None)
    once = all(calls.count(n.target) == 1 for n in path[:count])
    free = not any(_has_hooks(part) for part in (sums, norm, stair, pool) if part is not None)
    replaced = nodes[: count + (shortcut is not None)]
    # The fused layer runs in the place of the last node: its input must be the same there.
    later = node
    while later is not replaced[-1]:
        later = later.next
        free = free and (later in replaced or later not in writes)
    return (replaced, (sums, norm, stair, pool), shortcut) if once and free else None


def _is_sum(module: Any) -> bool:
    plain = isinstance(module, nn.Conv2d | nn.Linear) and module.bias is None
    plain = plain and not isinstance(module, Projection)
    if isinstance(module, nn.Conv2d):
        plain = plain and module.padding_mode == "zeros" and isinstance(module.padding, tuple)
    stair = getattr(module, "weight_stair", None)
    return plain and (stair is None or _is_stair(stair, StairWeight))


def _is_norm(module: Any, sums: Any) -> bool:
    conv = isinstance(sums, nn.Conv2d)
    return (
        isinstance(module, nn.BatchNorm2d if conv else nn.BatchNorm1d)
        and module.num_features == (sums.out_channels if conv else sums.out_features)
        and module.affine
        and module.track_running_stats
        and module.momentum is not None
    )


def _is_stair(module: Any, of: type[StairModule]) -> bool:
    """Whether bins have one width, thresholds are few or on a line, there is one quantum (weights
    may have one per output), and the noise is one of the paper's."""
    if not isinstance(module, of) or type(module.noise) not in FAMILIES:
        return False
    if getattr(module, "function", None) is not None:
        return False
    stair, axis = kernel_stair(module), module.stair.axis
    longer = module.longer_stair(in_quanta=True)
    if longer is not None and (axis is not None or len(longer) > FEW_LEVELS + 1):
        return False
    known = len(stair) <= FEW_LEVELS + 1 or is_native(stair)
    known = known and (axis is None or (axis == 0 and of is StairWeight))
    return known and stair.spacing is not None


def _is_pool(module: Any) -> bool:
    if not isinstance(module, nn.MaxPool2d) or module.return_indices or module.ceil_mode:
        return False
    plain = module.padding in (0, (0, 0)) and module.dilation in (1, (1, 1))
    return plain and all(value in (2, (2, 2)) for value in (module.kernel_size, module.stride))


def _has_hooks(module: nn.Module) -> bool:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(part, name) for part in module.modules() for name in names)
