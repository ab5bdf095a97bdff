"""What a network computes in training, in order of execution, and what feeds what.

The graph comes from symbolic tracing (torch.fx) where that works, and from one recorded run on
example inputs where it does not. Either way it is a list of steps; a step names the module it
calls, or the function, and the earlier steps whose results it takes.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

__all__ = ["Graph", "Step", "record", "steps_of", "trace"]


@dataclass(frozen=True)
class Step:
    """One operation. ``module`` is the qualified name of the module it calls, if it calls one;
    ``function`` the name of the function or method otherwise."""

    module: str | None
    function: str | None
    inputs: tuple[int, ...]
    writes: bool = False
    """Works in place: its result may be read where no step says so."""
    has_numbers: bool = False
    """Takes plain numbers besides the results of other steps."""


@dataclass(frozen=True)
class Graph:
    """Steps in order of execution, and those whose results leave the network."""

    steps: tuple[Step, ...]
    outputs: frozenset[int]
    complete: bool = True
    """Whether this is all that training can ever compute, not only what one run did."""
    attributes: frozenset[str] = frozenset()
    """Parameters and buffers that the code takes by name, not through a module."""

    @classmethod
    def of(cls, steps: list[Step], outputs: set[int], **settings: Any) -> "Graph":
        """The graph of these steps. What is written in place and not taken from the step that wrote
        it leaves the network unseen, and counts as an output."""
        graph = cls(tuple(steps), frozenset(outputs), **settings)
        unseen = {n for n, step in enumerate(steps) if step.writes and graph.is_read_elsewhere(n)}
        return replace(graph, outputs=graph.outputs | unseen)

    def is_read_elsewhere(self, number: int) -> bool:
        """Whether what a step may have written into is read again other than as its result."""
        readers = self.consumers()
        sources = self.steps[number].inputs
        again = any(reader > number for source in sources for reader in readers[source])
        return again or not readers[number]

    def consumers(self) -> list[list[int]]:
        """For each step, the steps that take its result."""
        consumers: list[list[int]] = [[] for _ in self.steps]
        for number, step in enumerate(self.steps):
            for source in step.inputs:
                consumers[source].append(number)
        return consumers

    def reaching_output(
        self, is_wall: Callable[[Step], bool], also: Iterable[int] = ()
    ) -> set[int]:
        """The steps from which some path leads to an output (or to one of ``also``) without passing
        a wall; the walls that close the other paths are among them."""
        reached: set[int] = set()
        waiting = [*self.outputs, *also]
        while waiting:
            number = waiting.pop()
            if number not in reached:
                reached.add(number)
                if not is_wall(self.steps[number]):
                    waiting.extend(self.steps[number].inputs)
        return reached


@contextmanager
def mode(model: nn.Module, training: bool) -> Iterator[None]:
    """The model in training or evaluation; afterwards each module is in its own mode again."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, own in before:
            module.training = own


class Tracer(fx.Tracer):
    """torch.fx's tracer; the layers of a stair network are leaves, as torch's own are."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        from softstair.nn import StairLayer, StairModule

        stair = isinstance(m, StairModule | StairLayer)
        return stair or super().is_leaf_module(m, module_qualified_name)


def optional_arguments(model: nn.Module) -> dict[str, None]:
    """The arguments of the forward pass that may be left out and are None then. Tracing decides
    ``if mask is not None`` once and for all, so it is shown the shorter call."""
    parameters = inspect.signature(type(model).forward).parameters
    return {name: None for name, p in parameters.items() if p.default is None}


def trace(model: nn.Module, training: bool = True) -> tuple[Graph, fx.Graph]:
    """The graph by symbolic tracing, and torch.fx's own."""
    left_out = optional_arguments(model)
    before = {module: dict(vars(module)) for module in model.modules()}
    with mode(model, training):
        traced = Tracer().trace(model, concrete_args=left_out or None)
    kept = not left_out and not _restore(before)
    return steps_of(traced, model, complete=kept), traced


def _restore(before: dict[nn.Module, dict[str, Any]]) -> bool:
    """Undoes what the forward pass, fed with proxies, has set on its modules. What it sets is taken
    elsewhere, so that the graph is not all there is to know; returns whether there was any."""
    changed = False
    for module, attributes in before.items():
        for name, value in list(vars(module).items()):
            if name.startswith("_tensor_constant") or value is attributes.get(name, module):
                continue
            changed = True
            if name in attributes:
                module.__dict__[name] = attributes[name]
            else:
                del module.__dict__[name]
    return changed


def steps_of(traced: fx.Graph, model: nn.Module, complete: bool = True) -> Graph:
    """The graph of a traced one."""
    numbers = {node: number for number, node in enumerate(traced.nodes)}
    steps, outputs, attributes = [], set(), set()
    for number, node in enumerate(traced.nodes):
        inputs = tuple(numbers[source] for source in node.all_input_nodes)
        module = str(node.target) if node.op == "call_module" else None
        leaves = tree_leaves((node.args, node.kwargs))
        has_numbers = any(isinstance(leaf, int | float) for leaf in leaves)
        writes = _writes(_raw_name(node), node.kwargs)
        if module is not None:
            writes = bool(getattr(model.get_submodule(module), "inplace", False))
        steps.append(Step(module, _name(node), inputs, writes, has_numbers))
        if node.op == "output":
            outputs.add(number)
        if node.op == "get_attr":
            attributes.add(str(node.target))
    return Graph.of(steps, outputs, complete=complete, attributes=frozenset(attributes))


def _raw_name(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target)) if node.op == "call_function" else ""


def _name(node: fx.Node) -> str | None:
    """The bare name of the function or method a node calls: relu for F.relu, torch.relu, x.relu."""
    return _raw_name(node).strip("_") or None


def _writes(name: str, named: Any) -> bool:
    in_place = name.endswith("_") and not name.endswith("__")
    named = named or {}
    return (
        in_place
        or name.strip("_") == "setitem"
        or bool(named.get("inplace", False))
        or named.get("out") is not None
    )


def record(model: nn.Module, example_inputs: Sequence[Any]) -> Graph:
    """The graph of one run, by watching which tensor goes where; evaluation mode, for a run in
    training would change the statistics of batch-norms."""
    recorder = _Recorder()
    handles = []
    leaf = Tracer().is_leaf_module
    for name, module in model.named_modules():
        if name and leaf(module, name):
            handles.append(module.register_forward_pre_hook(recorder.enter))
            handles.append(module.register_forward_hook(recorder.leave(name), with_kwargs=True))
    try:
        with mode(model, training=False), torch.no_grad(), recorder:
            result = model(*example_inputs)
    finally:
        for handle in handles:
            handle.remove()
    return Graph.of(recorder.steps, {*recorder.sources(tree_leaves(result))}, complete=False)


class _Recorder(TorchFunctionMode):
    """Notes each function call outside of leaf modules, and each leaf module's call."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.maker: dict[int, int] = {}
        self.kept: list[Tensor] = []  # an id stays true only while its tensor lives
        self.depth = 0

    def sources(self, values: Iterable[Any]) -> list[int]:
        found = (self.maker.get(id(v)) for v in values if isinstance(v, Tensor))
        return list(dict.fromkeys(number for number in found if number is not None))

    def note(
        self, module: str | None, function: str | None, writes: bool, inputs: Any, result: Any
    ) -> None:
        leaves = tree_leaves(inputs)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in self.maker:
                # The network's input, a parameter, a constant: a source, and no feature.
                self.kept.append(leaf)
                self.maker[id(leaf)] = len(self.steps)
                self.steps.append(Step(None, None, ()))
        taken = self.sources(leaves)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.kept.append(tensor)
                self.maker[id(tensor)] = len(self.steps)
        has_numbers = any(isinstance(leaf, int | float) for leaf in leaves)
        self.steps.append(Step(module, function, tuple(taken), writes, has_numbers))

    def enter(self, *_: Any) -> None:
        self.depth += 1

    def leave(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, named: Any, result: Any) -> None:
            self.depth -= 1
            if self.depth == 0:
                writes = bool(getattr(module, "inplace", False))
                self.note(name, None, writes, (inputs, named), result)

        return hook

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if self.depth == 0:
            full = resolve_name(function) or getattr(function, "__name__", "")
            name = full.rsplit(".", 1)[-1]
            self.note(None, name.strip("_"), _writes(name, kwargs), (args, kwargs), result)
        return result
