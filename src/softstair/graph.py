"""What a network computes, in order of execution, and what feeds what.

The graph comes from symbolic tracing (torch.fx) where that works, and from one recorded run on
example inputs where it does not. Either way it is a list of steps; a step names the module it
calls, or the function, and the earlier steps whose results it takes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

__all__ = ["Graph", "Step", "record", "trace"]


@dataclass(frozen=True)
class Step:
    """One operation. ``module`` is the qualified name of the module it calls, if it calls one;
    ``function`` the name of the function or method otherwise."""

    module: str | None
    function: str | None
    inputs: tuple[int, ...]


@dataclass(frozen=True)
class Graph:
    """Steps in order of execution, and those whose results leave the network."""

    steps: tuple[Step, ...]
    outputs: frozenset[int]

    def consumers(self) -> list[list[int]]:
        """For each step, the steps that take its result."""
        consumers: list[list[int]] = [[] for _ in self.steps]
        for number, step in enumerate(self.steps):
            for source in step.inputs:
                consumers[source].append(number)
        return consumers

    def reaching_output(self, is_wall: Callable[[Step], bool]) -> set[int]:
        """The steps from which some path leads to an output without passing a wall; the walls
        that close the other paths are among them."""
        reached: set[int] = set()
        waiting = list(self.outputs)
        while waiting:
            number = waiting.pop()
            if number not in reached:
                reached.add(number)
                if not is_wall(self.steps[number]):
                    waiting.extend(self.steps[number].inputs)
        return reached


class Tracer(fx.Tracer):
    """torch.fx's tracer; module-level so that what it traced can be pickled."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        from softstair.nn import StairModule

        return isinstance(m, StairModule) or super().is_leaf_module(m, module_qualified_name)


def trace(model: nn.Module) -> tuple[Graph, fx.Graph]:
    """The graph by symbolic tracing, and torch.fx's own."""
    traced = Tracer().trace(model)
    numbers = {node: number for number, node in enumerate(traced.nodes)}
    steps, outputs = [], set()
    for node in traced.nodes:
        inputs = tuple(numbers[source] for source in node.all_input_nodes)
        module = str(node.target) if node.op == "call_module" else None
        steps.append(Step(module, function_name(node), inputs))
        if node.op == "output":
            outputs.add(numbers[node])
    return Graph(tuple(steps), frozenset(outputs)), traced


def function_name(node: fx.Node) -> str | None:
    """The bare name of the function or method a node calls: relu for F.relu, torch.relu, x.relu."""
    if node.op == "call_method":
        return str(node.target).strip("_")
    if node.op == "call_function":
        return getattr(node.target, "__name__", str(node.target)).strip("_")
    return None


def record(model: nn.Module, example_inputs: Sequence[Any]) -> Graph:
    """The graph of one run in evaluation mode, by watching which tensor goes where."""
    recorder = _Recorder()
    handles = []
    for name, module in model.named_modules():
        if not any(module.children()) and name:
            handles.append(module.register_forward_pre_hook(recorder.enter))
            handles.append(module.register_forward_hook(recorder.leave(name), with_kwargs=True))
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad(), recorder:
            result = model(*example_inputs)
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes:
            module.training = mode
    outputs = frozenset(recorder.sources(tree_leaves(result)))
    return Graph(tuple(recorder.steps), outputs)


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

    def note(self, module: str | None, function: str | None, inputs: Any, result: Any) -> None:
        taken = self.sources(tree_leaves(inputs))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.kept.append(tensor)
                self.maker[id(tensor)] = len(self.steps)
        self.steps.append(Step(module, function, tuple(taken)))

    def enter(self, *_: Any) -> None:
        self.depth += 1

    def leave(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, named: Any, result: Any) -> None:
            self.depth -= 1
            if self.depth == 0:
                self.note(name, None, (inputs, named), result)

        return hook

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if self.depth == 0:
            name = resolve_name(function) or getattr(function, "__name__", "")
            self.note(None, name.rsplit(".", 1)[-1].strip("_"), (args, kwargs), result)
        return result
