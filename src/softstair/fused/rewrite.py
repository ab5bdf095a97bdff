"""Which modules of a network a fused layer stands for, found in its traced graph."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from softstair.anneal import Truncation
from softstair.convert.graph import trace
from softstair.convert.rewrite import call_operators
from softstair.fused.layer import FusedLayer
from softstair.kernels.triton import FAMILIES
from softstair.kernels.triton import kind as kind_of
from softstair.kernels.triton import table as table_of
from softstair.kernels.triton.normalised import Steps
from softstair.kernels.triton.ready import FEW, make_ready
from softstair.nn import StairActivation, StairModule, StairWeight
from softstair.noise import Noise
from softstair.stair import Stair

__all__ = ["Fused", "fused"]


class Fused:
    """The forward pass of a network, some of whose layers run fused.

    It shares the network's parameters and buffers; of the network itself only the layout of its
    convolutions' weights in memory changes. ``evaluates`` says that the network does in
    evaluation what it does in training, module by module; then so does this.
    """

    def __init__(self, code: fx.GraphModule, layers: list[FusedLayer], evaluates: bool) -> None:
        self.code, self.layers, self.evaluates = code, layers, evaluates

    def __call__(self, x: Tensor) -> Tensor:
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        if any(layer.draws for layer in self.layers):
            # One draw a step from torch's generator is the key of every layer's own numbers.
            seeds = torch.randint(2**63 - 1, (len(self.layers), 2), device=x.device)
        else:
            seeds = torch.zeros((len(self.layers), 2), dtype=torch.int64, device=x.device)
        for layer, pair in zip(self.layers, seeds, strict=True):
            layer.seeds = pair
        self._make_ready()
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return self.code(x)

    @torch.no_grad()
    def _make_ready(self) -> None:
        """Every stair for its present noise, those that are alike in one go."""
        alike: dict[tuple[Stair, Noise], list[tuple[FusedLayer, str]]] = {}
        for layer in self.layers:
            for name in ("stair", "weight_stair"):
                if (module := getattr(layer, name)) is not None:
                    alike.setdefault((module.stair, module.noise), []).append((layer, name))
        for (stair, noise), places in alike.items():
            modules = [getattr(layer, name) for layer, name in places]
            means = torch.stack([module.mean for module in modules])
            stds = torch.stack([module.std for module in modules])
            if isinstance(stair.quantum, float) and stair.quantum != 1.0:
                means, stds = means * stair.quantum, stds * stair.quantum
            table = table_of(stair, torch.float32, means.device)
            kind, count = kind_of(stair, torch.float32), len(stair) - 1
            rows = make_ready(table, means, stds, count, noise.name)
            for (layer, name), row in zip(places, rows, strict=True):
                steps = Steps(table, row, count, noise.name, kind)
                setattr(layer, "steps" if name == "stair" else "weight_steps", steps)


def fused(net: nn.Module) -> Fused | None:
    """The network with its layers fused; None where none can be, or where its trace is not all that
    it may compute."""
    try:
        known, graph = trace(net)
    except Exception:  # whatever tracing trips over, the network runs as it is
        return None
    others = [hook for hook in net._forward_hooks.values() if not isinstance(hook, Truncation)]
    if not known.complete or others or net._forward_pre_hooks:
        return None
    evaluates = _is_alike(net, graph)
    call_operators(known, graph)
    # Features that are changed in place are not those that their layer made.
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    written = frozenset[int]().union(*(step.written for step in known.steps))
    modules = dict(net.named_modules())
    calls = [node.target for node in graph.nodes if node.op == "call_module"]
    made: list[FusedLayer] = []
    sources: dict[fx.Node, FusedLayer] = {}
    code = fx.GraphModule(net, graph)
    for node in list(graph.nodes):
        group = _group(node, modules, calls)
        if group is None:
            continue
        nodes, parts = group
        taken: Any = nodes[0].args[0]
        layer = FusedLayer(*parts, sources.get(taken))
        name = f"fused_{len(made)}"
        code.add_submodule(name, layer)
        last = nodes[-1]
        with graph.inserting_after(last):
            new = graph.call_module(name, (taken,))
        last.replace_all_uses_with(new)
        for old in reversed(nodes):
            graph.erase_node(old)
        made.append(layer)
        if numbers[last] not in written:
            sources[new] = layer
    if not made:
        return None
    code.recompile()
    return Fused(code, made, evaluates)


def _is_alike(net: nn.Module, graph: fx.Graph) -> bool:
    """Whether evaluation runs what training does, which is this graph: code may ask which it is."""
    try:
        known, other = trace(net, training=False)
    except Exception:  # as above
        return False
    return known.complete and _calls(other) == _calls(graph)


def _calls(graph: fx.Graph) -> list[tuple[str, ...]]:
    return [(node.op, str(node.target), str(node.args), str(node.kwargs)) for node in graph.nodes]


def _group(
    node: fx.Node, modules: dict[str, nn.Module], calls: list[Any]
) -> tuple[list[fx.Node], tuple[Any, Any, Any, Any]] | None:
    """The nodes that one fused layer replaces, the first being this one, and their modules."""
    nodes = [node]
    for _ in range(3):
        (user, *others) = nodes[-1].users or [None]
        if user is None or others:
            break
        nodes.append(user)
    parts = [modules.get(str(one.target)) if one.op == "call_module" else None for one in nodes]
    parts += [None] * (4 - len(parts))
    sums, norm, stair, pool = parts
    if not (_is_sum(sums) and _is_norm(norm, sums) and _is_stair(stair, StairActivation)):
        return None
    if not (isinstance(sums, nn.Conv2d) and _is_pool(pool)):
        pool = None
    nodes = nodes[: 3 if pool is None else 4]
    once = all(calls.count(one.target) == 1 for one in nodes)
    free = not any(_is_watched(part) for part in (sums, norm, stair, pool) if part is not None)
    return (nodes, (sums, norm, stair, pool)) if once and free else None


def _is_sum(module: Any) -> bool:
    plain = isinstance(module, nn.Conv2d | nn.Linear) and module.bias is None
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


def _is_stair(module: Any, kind: type[StairModule]) -> bool:
    """Steps of one width, few or on a line, one quantum, and noise of the paper's."""
    if not isinstance(module, kind) or type(module.noise) not in FAMILIES:
        return False
    stair = module.stair
    known = len(stair) <= FEW.value + 1 or kind_of(stair, torch.float32) == "line"
    return known and stair.spacing is not None and isinstance(stair.quantum, float)


def _is_pool(module: Any) -> bool:
    if not isinstance(module, nn.MaxPool2d) or module.return_indices or module.ceil_mode:
        return False
    pairs = (module.kernel_size, module.stride), (2, (2, 2))
    plain = module.padding in (0, (0, 0)) and module.dilation in (1, (1, 1))
    return plain and all(value in pairs[1] for value in pairs[0])


def _is_watched(module: nn.Module) -> bool:
    """Somebody's hook wants to see what the module computes."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(part, kind) for part in module.modules() for kind in kinds)
