"""What a float model computes: traced by torch.fx, or recorded from one run on example inputs."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves, tree_map_only

from softstair import _check
from softstair._errors import first_line
from softstair.convert.conversion import copy_of
from softstair.convert.graph import Graph, Tracer, Traces, steps_of, traces_or_why, training_mode
from softstair.convert.ops import Effect, operator_of
from softstair.convert.rewrite import call_names


@dataclass(frozen=True)
class Model:
    """A copy of a float model, and what it computes."""

    net: nn.Module
    copies: list[list[nn.Module]]  # activations that were one module
    graph: Graph
    traces: Traces | str  # or why torch.fx cannot trace it
    call_names: list[str] | None  # of a module in place of each step; None if it was recorded


def read_model(model: nn.Module, example_inputs: object) -> Model:
    """Return a copy of a model, in which each name of an activation has a module of its own, and
    what it computes: by tracing, or else in a run on the inputs."""
    if not isinstance(model, nn.Module):
        raise _check.wrong("model", model, "a torch.nn.Module")
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
    if inputs is not None and not isinstance(inputs, list | tuple | Mapping):
        allowed = "a tensor, or a tuple or a mapping of the arguments of one forward pass"
        raise _check.wrong("example_inputs", inputs, allowed)
    net = copy_of(model, "model")
    copies, traces = _separate_activations(net), traces_or_why(net)
    if isinstance(traces, Traces):
        return Model(net, copies, traces.train_steps, traces, call_names(traces.train, net))
    if inputs is None:
        raise _check.invalid("example_inputs", _missing_inputs(net, traces))
    try:
        return Model(net, copies, record(net, inputs), traces, None)
    except Exception as error:
        raise _check.invalid(
            "example_inputs",
            "must be the arguments of one forward pass of the model, but with those given it "
            f"raised {type(error).__name__} ({first_line(error)})",
        ) from None


def _missing_inputs(net: nn.Module, why: str) -> str:
    given = inspect.signature(net.forward).parameters.values()
    names = [p.name for p in given if p.default is p.empty and p.kind <= p.KEYWORD_ONLY]
    values = ", ".join(f"{name!r}: …" for name in names or [p.name for p in given][:1])
    return (
        f"must be given to softstair.quantise, such as example_inputs={{{values}}}, since torch.fx "
        f"cannot trace the model: {why}; it then trains, but does not export, for which write "
        "torch.where instead of if, and numbers instead of sizes"
    )


def _separate_activations(net: nn.Module) -> list[list[nn.Module]]:
    """Give each name of an activation a module of its own; return those that were one module.

    One without state is copied: the copy computes the same.
    """
    copies: dict[nn.Module, list[nn.Module]] = {}
    for parent in list(net.modules()):
        for name, child in parent._modules.items():
            if child is None or operator_of(child).effect is not Effect.ACTIVATION:
                continue
            if type(child) not in operator_of(child).modules or child.state_dict():
                continue
            if child in copies:
                parent._modules[name] = copy.deepcopy(child)
            copies.setdefault(child, []).append(parent.get_submodule(name))
    return list(copies.values())


def record(model: nn.Module, inputs: Sequence[Any] | Mapping[str, Any]) -> Graph:
    """Return the graph of one run, in evaluation: training would change batch-norm statistics."""
    recorder, is_leaf = _Recorder(), Tracer().is_leaf_module
    with training_mode(model, training=False), ExitStack() as hooks:
        for name, module in model.named_modules():
            if name and is_leaf(module, name):
                leave = recorder.leave(name)
                hooks.enter_context(module.register_forward_pre_hook(recorder.enter))
                hooks.enter_context(module.register_forward_hook(leave, with_kwargs=True))
        with torch.no_grad(), recorder:
            result = model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
    results = [recorder.node(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return steps_of(recorder.graph, model, complete=False, results=results)


class _Recorder(TorchFunctionMode):
    """Records the calls of leaf modules, and of functions outside of them, as nodes of torch.fx.

    Functions are recorded as methods: only their names are read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.nodes: dict[int, fx.Node] = {}
        """The node that returned each tensor, by id."""
        self.alive: list[Tensor] = []  # ids are unique only while tensors live
        self.depth = 0

    def add(self, op: str, target: str, args: Any, kwargs: Any, result: Any) -> None:
        args, kwargs = tree_map_only(Tensor, self.node, (args, kwargs))
        self._set_node(self.graph.create_node(op, target, args, kwargs), result)

    def node(self, tensor: Tensor) -> fx.Node:
        if id(tensor) not in self.nodes:  # the network's input, a parameter or a constant
            self._set_node(self.graph.placeholder("tensor"), tensor)
        return self.nodes[id(tensor)]

    def _set_node(self, node: fx.Node, result: Any) -> None:
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.alive.append(tensor)
                self.nodes[id(tensor)] = node

    def enter(self, *_: Any) -> None:
        self.depth += 1

    def leave(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            self.depth -= 1
            if self.depth == 0:
                self.add("call_module", name, args, kwargs, result)

        return hook

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if self.depth == 0:
            full = resolve_name(function) or getattr(function, "__name__", "")
            name = full.removesuffix(".__get__").rsplit(".", 1)[-1]
            if isinstance(function, torch._ops.OpOverload):
                name = function.__name__
            self.add("call_method", name, args, kwargs or {}, result)
        return result
