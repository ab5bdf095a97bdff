"""What a network computes in training, in order of execution, and what feeds what.

The graph comes from symbolic tracing (torch.fx) where that works, and from one recorded run on
example inputs where it does not. Either way it is a list of steps; a step names the module it
calls, or the function, and the earlier steps whose results it takes.
"""

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

__all__ = ["Graph", "Step", "call_operators", "record", "steps_of", "trace"]

IN_PLACE_OPERATORS = frozenset(
    "iadd isub imul imatmul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift".split()
)
"""Augmented assignments, ``x += y`` and its like."""

WRITING_FUNCTIONS = IN_PLACE_OPERATORS | {"set", "setitem", "set_data"}
"""Functions that write into their first argument although their name does not end in ``_``."""

SHARING_FUNCTIONS = frozenset(
    "adjoint alias align_as align_to alpha_dropout as_strided as_subclass as_tensor asarray "
    "atleast_1d atleast_2d atleast_3d bfloat16 broadcast_tensors broadcast_to cartesian_prod chunk "
    "coalesce conj contiguous cpu cuda data dequantize detach diagonal double dropout dropout1d "
    "dropout2d dropout3d dsplit einsum expand expand_as feature_alpha_dropout feature_dropout "
    "flatten float getitem H half hsplit imag indices iter lift_fresh linalg_diagonal matrix_H "
    "meshgrid mH moveaxis movedim mT narrow neg_view next numpy_T permute pin_memory pos positive "
    "ravel real refine_names rename reshape reshape_alias reshape_as resolve_conj resolve_neg "
    "select slice slice_inverse split split_with_sizes squeeze sum_to_size swapaxes swapdims T t "
    "tensor_split to to_dense transpose type type_as unbind unflatten unfold unsafe_chunk "
    "unsafe_split unsafe_split_with_sizes unsafe_view unsqueeze values view view_as "
    "view_as_complex view_as_real vsplit".split()
)
"""Functions, methods and attributes whose result may share the memory of what they take."""

SHARING_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd)

SIZE_FUNCTIONS = frozenset(
    "size shape dim ndim ndimension numel nelement stride dtype device is_cuda layout "
    "is_floating_point is_contiguous get_device element_size len".split()
)
"""Functions, methods and attributes that read no values of the tensor that they take."""


@dataclass(frozen=True)
class Step:
    """One operation. ``module`` is the qualified name of the module it calls, if it calls one;
    ``function`` the name of the function or method otherwise."""

    module: str | None
    function: str | None
    inputs: tuple[int, ...]
    has_numbers: bool = False
    """Takes plain numbers besides the results of other steps."""
    written: frozenset[int] = frozenset()
    """The earlier steps whose results it may change, if it works in place: all those that may share
    memory with the tensor it writes into."""


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
        unseen = {n for n, step in enumerate(steps) if step.written and graph.is_read_elsewhere(n)}
        return replace(graph, outputs=graph.outputs | unseen)

    def is_read_elsewhere(self, number: int) -> bool:
        """Whether what a step may have written into is read again other than as its result."""
        readers = self.consumers()
        written = self.steps[number].written
        again = any(
            reader > number and self.steps[reader].function not in SIZE_FUNCTIONS
            for source in written
            for reader in readers[source]
        )
        return again or not readers[number] or not written.isdisjoint(self.outputs)

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


class _InPlaceOperators:
    """Records ``x += y`` as in place, where torch.fx's own proxies record ``x = x + y``."""

    tracer: fx.proxy.TracerBase

    def __getattr__(self, name: str) -> Any:
        return _Attribute(self, name)  # type: ignore[arg-type]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "data":
            raise TypeError("an assignment to x.data cannot be traced")
        super().__setattr__(name, value)


def _in_place(name: str) -> Callable[..., Any]:
    function = getattr(operator, name)

    def method(self: _InPlaceOperators, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return method


for _operator in IN_PLACE_OPERATORS:
    setattr(_InPlaceOperators, f"__{_operator}__", _in_place(_operator))


class _Proxy(_InPlaceOperators, fx.Proxy):
    """A value of a traced network."""


class _Attribute(_InPlaceOperators, fx.proxy.Attribute):
    """An attribute of one, such as x.data."""


class Tracer(fx.Tracer):
    """torch.fx's tracer; the layers of a stair network are leaves, as torch's own are."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

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
    # For each step, the steps that allocated the memory its result may lie in.
    allocated_by: list[frozenset[int]] = []
    for number, node in enumerate(traced.nodes):
        inputs = tuple(numbers[source] for source in node.all_input_nodes)
        module = str(node.target) if node.op == "call_module" else None
        leaves = tree_leaves((node.args, node.kwargs))
        has_numbers = any(isinstance(leaf, int | float) for leaf in leaves)
        called = None if module is None else model.get_submodule(module)
        targets = [
            numbers[target]
            for target in _targets(_raw_name(node), called, node.args, node.kwargs)
            if isinstance(target, fx.Node)
        ]
        memory = frozenset[int]().union(*(allocated_by[target] for target in targets))
        written = {n for n in range(number) if not memory.isdisjoint(allocated_by[n])}
        shared = inputs if _shares_memory(node, called) else targets
        allocators = frozenset[int]().union(*(allocated_by[source] for source in shared))
        allocated_by.append(allocators or frozenset({number}))
        steps.append(Step(module, _name(node), inputs, has_numbers, frozenset(written)))
        if node.op == "output":
            outputs.add(number)
        if node.op == "get_attr":
            attributes.add(str(node.target))
    return Graph.of(steps, outputs, complete=complete, attributes=frozenset(attributes))


def _raw_name(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    if node.target is getattr:
        return str(node.args[1])
    return getattr(node.target, "__name__", str(node.target))


def _name(node: fx.Node) -> str | None:
    """The bare name of the function or method a node calls: relu for F.relu, torch.relu, x.relu."""
    return _raw_name(node).strip("_") or None


def _targets(name: str, module: nn.Module | None, args: Any, named: Any) -> list[Any]:
    """The arguments that a call writes into."""
    named = named or {}
    name = name.partition(".")[0]  # of an overload: mul_.Tensor
    in_place = name.endswith("_") and not name.endswith("__")
    in_place = in_place or name.strip("_") in WRITING_FUNCTIONS
    in_place = in_place or bool(named.get("inplace", False))
    in_place = in_place or bool(getattr(module, "inplace", False))
    first = args[0] if args else named.get("input", named.get("self"))
    return tree_leaves(([first] if in_place else [], named.get("out")))


def _shares_memory(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether the result of a call may be its input, or a view of it."""
    if module is not None:
        return isinstance(module, SHARING_MODULES)
    if node.op == "call_function":
        package = str(getattr(node.target, "__module__", None)).partition(".")[0]
        if package not in ("None", "torch", "_operator", "builtins", "math"):
            return True  # a function of the user's own, of which nothing is known
    return _raw_name(node).partition(".")[0].strip("_") in SHARING_FUNCTIONS


def apply_operator(name: str, x: Any, y: Any) -> Any:
    """What ``x += y`` and its like leave in x: the same tensor, or another number."""
    return getattr(operator, name)(x, y)


def call_operators(graph: Graph, traced: fx.Graph) -> None:
    """Makes the augmented assignments of a traced graph calls, before code is generated from it.

    For ``y = x; y += 1`` torch.fx would write ``x += 1``, which is another value of x if that is a
    number. Where nothing reads x again, y = x + 1 is as good, and autograd keeps what it needs.
    """
    for number, node in enumerate(traced.nodes):
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name in IN_PLACE_OPERATORS and node.target is getattr(operator, name):
            if graph.is_read_elsewhere(number):
                node.target, node.args = apply_operator, (name, *node.args)
            else:
                plain = name.removeprefix("i")
                node.target = getattr(operator, plain, None) or getattr(operator, f"{plain}_")


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
        self.memory: list[set[int]] = []
        """For each step, the addresses of the tensors that it gave."""
        self.kept: list[Tensor] = []  # an id, or an address, stays true only while its tensor lives
        self.depth = 0

    def sources(self, values: Iterable[Any]) -> list[int]:
        found = (self.maker.get(id(v)) for v in values if isinstance(v, Tensor))
        return list(dict.fromkeys(number for number in found if number is not None))

    def note(
        self, module: str | None, function: str | None, targets: list[Any], inputs: Any, result: Any
    ) -> None:
        leaves = tree_leaves(inputs)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in self.maker:
                # The network's input, a parameter, a constant: a source, and no feature.
                self.add(Step(None, None, ()), [leaf])
        taken = self.sources(leaves)
        targets = [target for target in targets if isinstance(target, Tensor)]
        for target in targets:  # it may have other memory now
            self.memory[self.maker[id(target)]].add(_address(target))
        places = set[int]().union(*(self.memory[number] for number in self.sources(targets)))
        written = {n for n, memory in enumerate(self.memory) if not memory.isdisjoint(places)}
        has_numbers = any(isinstance(leaf, int | float) for leaf in leaves)
        step = Step(module, function, tuple(taken), has_numbers, frozenset(written))
        self.add(step, tree_leaves(result))

    def add(self, step: Step, results: list[Any]) -> None:
        tensors = [result for result in results if isinstance(result, Tensor)]
        for tensor in tensors:
            self.kept.append(tensor)
            self.maker[id(tensor)] = len(self.steps)
        self.memory.append({_address(tensor) for tensor in tensors})
        self.steps.append(step)

    def enter(self, *_: Any) -> None:
        self.depth += 1

    def leave(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, named: Any, result: Any) -> None:
            if self.depth == 1:  # not yet 0: what note() itself calls is not recorded
                targets = _targets("", module, inputs, named)
                self.note(name, None, targets, (inputs, named), result)
            self.depth -= 1

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
            targets = _targets(name, None, args, kwargs)
            self.note(None, name.strip("_"), targets, (args, kwargs), result)
        return result


def _address(tensor: Tensor) -> int:
    """The address of a tensor's memory, the same for all its views."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.untyped_storage().data_ptr() or id(tensor)
