"""The graph of a network: its operations in order of execution, and the results that each takes.

:func:`trace` derives it by symbolic tracing (torch.fx).
"""

import hashlib
import inspect
import operator
import pkgutil
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from softstair._errors import first_line
from softstair.nn import StairLayer, StairModule

IN_PLACE_OPERATORS = frozenset(
    "iadd isub imul imatmul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift".split()
)
"""Augmented assignments such as ``x += y``."""

WRITING_FUNCTIONS = IN_PLACE_OPERATORS | {"set", "setitem", "set_data"}
"""Functions without a trailing ``_`` that write into their first argument."""

REPLACING_FUNCTIONS = frozenset({"set", "set_data"})
"""Functions that give their first argument the memory of another, such as ``x.data = y``."""

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
"""Functions, methods and attributes whose result may share memory with their input."""

SHARING_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd)

SIZE_FUNCTIONS = frozenset(
    "size shape dim ndim ndimension numel nelement stride dtype device is_cuda layout "
    "is_floating_point is_contiguous get_device element_size len".split()
)
"""Functions, methods and attributes that do not read the values of their input."""


@dataclass(frozen=True)
class GraphStep:
    """One operation: a call of a module or of a function."""

    module: str | None  # qualified name
    function: str | None  # bare name of a function or method
    inputs: tuple[int, ...]  # the steps whose results it takes
    has_numbers: bool = False  # whether it also takes Python numbers
    is_off: bool = False  # whether it is a function that is told not to train, such as a dropout
    # Earlier steps whose results may share memory with a tensor that it writes into.
    written: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Graph:
    """The steps of a network in order of execution."""

    steps: tuple[GraphStep, ...]
    outputs: frozenset[int]  # the steps whose results leave the network
    # Whether training computes nothing else; a recorded run may have taken one of two branches.
    complete: bool = True
    # Parameters and buffers that the code reads by name, not through a module.
    attributes: frozenset[str] = frozenset()

    def is_read_elsewhere(self, number: int) -> bool:
        """Return whether the memory that a step writes is read other than through its result."""
        readers = self.consumers()
        written = self.steps[number].written
        again = any(
            reader > number and self.steps[reader].function not in SIZE_FUNCTIONS
            for source in written
            for reader in readers[source]
        )
        return again or not readers[number] or not written.isdisjoint(self.outputs)

    def is_at_end(self, number: int) -> bool:
        """Return whether no module reads the result of a step, or what functions make of it."""
        modules = {number for number, step in enumerate(self.steps) if step.module}
        return self.following(number, modules).isdisjoint(modules)

    def consumers(self) -> list[list[int]]:
        """Return, for each step, the steps that take its result."""
        consumers: list[list[int]] = [[] for _ in self.steps]
        for number, step in enumerate(self.steps):
            for source in step.inputs:
                consumers[source].append(number)
        return consumers

    def following(self, number: int, walls: Container[int]) -> set[int]:
        """Return the steps, walls included, that the result of a step reaches without a further
        wall between them."""
        consumers = self.consumers()
        return _connected(consumers[number], consumers, walls)

    def reaching_output(self, walls: Container[int], also: Iterable[int] = ()) -> set[int]:
        """Return the steps, walls included, from which a path without a further wall leads to an
        output or to a step of ``also``."""
        return _connected([*self.outputs, *also], [step.inputs for step in self.steps], walls)


def _connected(
    start: Iterable[int], links: Sequence[Iterable[int]], walls: Container[int]
) -> set[int]:
    """Return the steps that links lead to; those of a wall lead no farther."""
    reached, waiting = set[int](), [*start]
    while waiting:
        number = waiting.pop()
        if number not in reached:
            reached.add(number)
            if number not in walls:
                waiting.extend(links[number])
    return reached


def unused_name(name: str, names: set[str]) -> str:
    """Return a name that is in no set, with underscores at its end; it is then in that set."""
    while name in names:
        name += "_"
    names.add(name)
    return name


@contextmanager
def training_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Set the model to training or evaluation, and each module back to its own mode afterwards."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)  # a learned quantum may be invalid
        yield
    finally:
        for module, own in before:
            module.training = own


class _Proxy(fx.Proxy):
    """A value of a traced network; ``x += y`` is in place, and not ``x = x + y`` as in torch.fx."""

    def __getattr__(self, name: str) -> Any:
        return _Attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "data":
            raise TypeError("an assignment to x.data cannot be traced")
        super().__setattr__(name, value)


class _Attribute(fx.proxy.Attribute, _Proxy):
    """An attribute of a traced value, such as ``x.data``."""


def _in_place(name: str) -> Callable[..., Any]:
    function = getattr(operator, name)

    def method(self: fx.Proxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return method


for _operator in IN_PLACE_OPERATORS:
    setattr(_Proxy, f"__{_operator}__", _in_place(_operator))


class Tracer(fx.Tracer):
    """torch.fx's tracer with softstair's layers as leaf modules."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_stair = isinstance(m, StairModule | StairLayer)
        return is_stair or super().is_leaf_module(m, module_qualified_name)


def trace(model: nn.Module, training: bool = True) -> tuple[Graph, fx.Graph]:
    """Return the graph by symbolic tracing, and torch.fx's own.

    Arguments of the forward pass that default to None are left out: tracing would take
    ``if mask is not None`` for true.
    """
    if "forward" in vars(model):
        raise TypeError("torch.fx reads the forward pass of the class, not one set on the model")
    parameters = inspect.signature(type(model).forward).parameters
    omitted = {name: None for name, p in parameters.items() if p.default is None}
    before = {module: dict(vars(module)) for module in model.modules()}
    with training_mode(model, training):
        traced = Tracer().trace(model, concrete_args=omitted or None)
    was_changed = _restore(before)
    return steps_of(traced, model, complete=not omitted and not was_changed), traced


Rows: TypeAlias = list[tuple[Any, ...]]
"""A graph of torch.fx as data: of each node, what it calls with which arguments, and its meta."""


@dataclass(frozen=True)
class Traces:
    """What a network computes in training and in evaluation, as graphs of torch.fx and as steps.

    Each graph runs as ``fx.GraphModule(net, graph)``. It copies and pickles with ``node.meta``.
    """

    train: fx.Graph
    evaluation: fx.Graph
    train_steps: Graph
    eval_steps: Graph

    def __reduce__(self) -> tuple[Any, ...]:
        rows = (_rows_of(self.train), _rows_of(self.evaluation))
        return _unpickled, (*rows, self.train_steps, self.eval_steps)


def _unpickled(train: Rows, evaluation: Rows, *steps: Graph) -> Traces:
    return Traces(_graph_of(train), _graph_of(evaluation), *steps)


@dataclass(frozen=True)
class _Place:
    """A node of a pickled graph, by its number; or a function, by its name."""

    of: Any


def _rows_of(graph: fx.Graph) -> Rows:
    """Return a graph of torch.fx as data; pickle does not find functions such as F.max_pool2d."""
    places: Any = {node: _Place(number) for number, node in enumerate(graph.nodes)}
    rows = []
    for node in graph.nodes:
        target: Any = node.target
        name = f"{getattr(target, '__module__', None)}:{getattr(target, '__name__', None)}"
        with suppress(ImportError, AttributeError, ValueError):
            if node.op == "call_function" and pkgutil.resolve_name(name) is target:
                target = _Place(name)
        args, kwargs = fx.map_arg((node.args, node.kwargs), places.__getitem__)
        rows.append((node.op, target, args, kwargs, node.name, node.meta))
    return rows


def _graph_of(rows: Rows) -> fx.Graph:
    """Return the graph that :func:`_rows_of` was given."""
    graph, nodes = fx.Graph(), list[fx.Node]()
    here = lambda x: nodes[x.of] if isinstance(x, _Place) else x
    for op, target, args, kwargs, name, meta in rows:
        function = pkgutil.resolve_name(target.of) if isinstance(target, _Place) else target
        args, kwargs = fx.node.map_aggregate((args, kwargs), here)
        nodes.append(graph.create_node(op, function, args, kwargs, name))
        nodes[-1].meta = meta
    return graph


def traces_or_why(net: nn.Module) -> Traces | str:
    """Return the graphs of a network in both modes, or why torch.fx cannot trace it."""
    try:
        (train_steps, train), (eval_steps, evaluation) = trace(net), trace(net, training=False)
    except Exception as error:  # whatever the model's code raises for torch.fx's proxies
        return why_untraceable(error, net)
    return Traces(train, evaluation, train_steps, eval_steps)


def why_untraceable(error: Exception, model: nn.Module) -> str:
    """Return why :func:`trace` raised an error, with the module and the line if they are known."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame for frame in frames if not frame.filename.startswith((*ours, "<"))]
    names = {id(module): name for name, module in model.named_modules() if name}
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [owner for owner in owners if id(owner) in names]
    reason = f"{type(error).__name__}: {first_line(error)}"
    if isinstance(error, fx.proxy.TraceError) and "control flow" in str(error):
        reason = "its control flow depends on a tensor or its size"
    elif "co_varnames" in str(error):
        reason = "its forward pass is decorated"
    if modules:
        reason = f"in {names[id(modules[-1])]!r} ({type(modules[-1]).__name__}), {reason}"
    if not lines:
        return reason
    code = f" ({lines[-1].line})" if lines[-1].line else ""
    return f"{reason}, at line {lines[-1].lineno} of {lines[-1].filename}{code}"


def code_of(net: nn.Module, name: str = "") -> str:
    """Return a digest of the code that a trace goes through: of the blocks around the innermost
    modules, and the names of these. Attributes that the code reads are left out."""
    code: Any = getattr(net.forward, "__code__", None)
    own = [code.co_code, code.co_names, code.co_firstlineno] if code else []
    blocks = [
        (key, child)
        for key, child in net.named_children()
        if not Tracer().is_leaf_module(child, key)
    ]
    text = [
        name,
        type(net).__qualname__,
        own,
        list(net._modules),
        [code_of(child, key) for key, child in blocks],
    ]
    return hashlib.sha256(repr(text).encode()).hexdigest()[:16]


def _restore(before: dict[nn.Module, dict[str, Any]]) -> bool:
    """Undo the attributes that the traced forward pass has set; return whether there were any."""
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
    """Return the graph of a graph of torch.fx."""
    numbers = {node: number for number, node in enumerate(traced.nodes)}
    steps, outputs, attributes = [], set(), set()
    # For each step, the steps that allocated the memory of its result.
    allocated_by: list[frozenset[int]] = []

    def allocators(sources: Iterable[int]) -> frozenset[int]:
        return frozenset[int]().union(*(allocated_by[source] for source in sources))

    for number, node in enumerate(traced.nodes):
        inputs = tuple(numbers[source] for source in node.all_input_nodes)
        module = str(node.target) if node.op == "call_module" else None
        called = None if module is None else model.get_submodule(module)
        # The bare name: relu for F.relu, torch.relu, x.relu and x.relu_.
        name = _raw_name(node).strip("_") or None
        leaves = tree_leaves((node.args, node.kwargs))
        has_numbers = any(isinstance(leaf, int | float) for leaf in leaves)
        targets = [numbers[target] for target in _targets(node, called)]
        memory = allocators(targets)
        written = {n for n in range(number) if not memory.isdisjoint(allocated_by[n])}
        if name in REPLACING_FUNCTIONS:
            for n in written:
                allocated_by[n] |= allocators(inputs)
        if name in ("interpolate", "pad"):
            name = by_mode(name, *_mode_and_value(node))
        if name in ("mul", "imul") and (x := _swish_input(node, model)) is not None:
            name, inputs = "silu", (numbers[x],)
        shared = inputs if _shares_memory(node, called) else targets
        allocated_by.append(allocators(shared) or frozenset({number}))
        is_off = node.kwargs.get("training") is False
        steps.append(GraphStep(module, name, inputs, has_numbers, is_off, frozenset(written)))
        if node.op == "output":
            outputs.add(number)
        if node.op == "get_attr":
            attributes.add(str(node.target))
    graph = Graph(tuple(steps), frozenset(outputs), complete, frozenset(attributes))
    # A write into a tensor that is read elsewhere is an output too.
    writes = (number for number, step in enumerate(steps) if step.written)
    return replace(graph, outputs=graph.outputs.union(filter(graph.is_read_elsewhere, writes)))


def by_mode(name: str, mode: Any, value: Any = None) -> str:
    """Return the name of F.interpolate or F.pad with a mode and a value: their own names are those
    of a copy of features, or of zeros between them."""
    if name == "pad":
        return name if mode != "constant" or not value else "pad_with_a_number"
    kind = str(mode).replace("bilinear", "linear")
    return name if kind in ("nearest", "nearest-exact") else f"{name}_{kind}"


def _mode_and_value(node: fx.Node) -> tuple[Any, ...]:
    """Return the mode of F.interpolate, or the mode and the value of F.pad."""
    names = ("input", "size", "scale_factor", "mode")
    if _raw_name(node) == "pad":
        names = ("input", "pad", "mode", "value")
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    if _raw_name(node) == "pad":
        return given.get("mode", "constant"), given.get("value")
    return (given.get("mode", "nearest"),)


def _swish_input(product: fx.Node, model: nn.Module) -> fx.Node | None:
    """Return x if a product is x · sigmoid(x), which is SiLU."""
    for x, gate in permutations(product.all_input_nodes, 2):
        called = model.get_submodule(str(gate.target)) if gate.op == "call_module" else None
        is_sigmoid = isinstance(called, nn.Sigmoid) or _raw_name(gate) == "sigmoid"
        if is_sigmoid and gate.all_input_nodes == [x]:
            return x if len(gate.users) == 1 else None
    return None


def _raw_name(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    if node.target is getattr:
        return str(node.args[1])
    return getattr(node.target, "__name__", str(node.target))


def _targets(node: fx.Node, module: nn.Module | None) -> list[fx.Node]:
    """Return the arguments that a call writes into."""
    args, named = node.args, node.kwargs
    name = _raw_name(node).partition(".")[0]  # of an overload: mul_.Tensor
    in_place = name.endswith("_") and not name.endswith("__")
    in_place = in_place or name.strip("_") in WRITING_FUNCTIONS
    in_place = in_place or bool(named.get("inplace", False))
    in_place = in_place or bool(getattr(module, "inplace", False))
    first = args[0] if args else named.get("input", named.get("self"))
    leaves = tree_leaves(([first] if in_place else [], named.get("out")))
    return [leaf for leaf in leaves if isinstance(leaf, fx.Node)]


def _shares_memory(node: fx.Node, module: nn.Module | None) -> bool:
    """Return whether the result of a call may be its input, or a view of it."""
    if module is not None:
        return isinstance(module, SHARING_MODULES)
    if node.op == "call_function":
        package = str(getattr(node.target, "__module__", None)).partition(".")[0]
        if package not in ("None", "torch", "_operator", "builtins", "math"):
            return True  # nothing is known about the user's own functions
    return _raw_name(node).partition(".")[0].strip("_") in SHARING_FUNCTIONS
