"""Forward passes in which each call of an activation is a module of its own.

It is needed for activations that are functions, for a module that is called several times, and for
stairs that are added to sums or to the inputs of weights. The network keeps its modules and
attributes. Its class becomes a subclass, whose forward pass is the code of the two traced graphs:
one in training and one in evaluation, as tracing fixes what a forward pass decides in Python, such
as ``F.dropout(x, training=self.training)``. Both must call the same operations. The code calls the
innermost modules; a block that is called by itself still runs its own code.
"""

import copy
import inspect
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from softstair import _check
from softstair.convert.graph import IN_PLACE_OPERATORS, Graph, Traces, steps_of, unused_name

ADVICE = (
    "give each activation an nn.Module of its own, called once (nn.ReLU instead of F.relu), and "
    "pass sums=None and shortcuts=None"
)
CASE = "if its activations are functions or are called several times, or if stairs are added"


def call_names(traced: fx.Graph, net: nn.Module) -> list[str]:
    """Return a new name for a module in place of each node, in the module whose code calls it."""
    names, taken = [], {name for name, _ in net.named_modules(remove_duplicate=False)}
    for node in traced.nodes:
        stack = list(node.meta.get("nn_module_stack", {}).values())
        owner = f"{stack[-1][0]}." if stack and stack[-1][0] else ""
        names.append(unused_name(f"{owner}stair_{node.name}", taken))
    return names


class NewCall(NamedTuple):
    """A module that replaces a call, or that is called with its result."""

    name: str
    module: nn.Module
    is_added: bool  # with its result
    readers: tuple[int, ...] = ()  # the steps that read its result; empty: all


def rewrite(net: nn.Module, calls: Mapping[int, Sequence[NewCall]], traces: Traces) -> Traces:
    """Call new modules in a network, by the numbers of steps of ``traces``, which it changes;
    return the graphs of the network with all modules that have been replaced."""
    graphs, before = (traces.train, traces.evaluation), (traces.train_steps, traces.eval_steps)
    if calls:
        _check_code(net, *graphs)
        for new in [new for group in calls.values() for new in group]:
            owner, _, leaf = new.name.rpartition(".")
            net.get_submodule(owner).add_module(leaf, new.module.train(net.training))
        for graph, old in zip(graphs, before, strict=True):
            _insert_calls(graph, old, calls)
            plain_operators(steps_of(graph, net), graph)
    _register_constants(net, *graphs)
    steps = (steps_of(x, net, old.complete) for x, old in zip(graphs, before, strict=True))
    traces = Traces(*graphs, *steps)
    if calls:
        net.__class__ = _with_forward(type(net), traces)
    return traces


def _check_code(net: nn.Module, train: fx.Graph, evaluation: fx.Graph) -> None:
    """Raise SoftstairError if the graphs cannot be the forward pass."""
    for name in hooked_blocks(net, train):
        problem = f"must have no hooks on blocks {CASE}, but {name} has one, which would not run"
        raise _check.invalid("model", f"{problem}; {ADVICE}")
    calls = [
        [(node.op, node.op == "get_attr" or node.target) for node in graph.nodes]
        for graph in (train, evaluation)
    ]
    problem, name = "", type(net).__name__
    if calls[0] != calls[1]:
        problem = f"must call the same in training and in evaluation {CASE}, but {name} reads "
        raise _check.invalid("model", f"{problem}self.training; {ADVICE}")
    for pair in zip(train.nodes, evaluation.nodes, strict=True):
        if pair[0].op == "get_attr":
            a, b = (operator.attrgetter(str(node.target))(net) for node in pair)
            if isinstance(a, Tensor) and isinstance(b, Tensor) and not torch.equal(a, b):
                problem = f"must not draw random tensors {CASE}, but {name} does; {ADVICE}"
                raise _check.invalid("model", problem)


def _insert_calls(traced: fx.Graph, steps: Graph, calls: Mapping[int, Sequence[NewCall]]) -> None:
    """Insert the calls of new modules; of the inputs that one may take, it takes the first."""
    nodes = list(traced.nodes)
    firsts = {
        number: nodes[number].all_input_nodes.index(nodes[steps.steps[number].inputs[0]])
        for number, group in calls.items()
        if not group[0].is_added
    }
    for number, group in calls.items():
        node = nodes[number]
        for new in group:
            inputs = node.all_input_nodes
            with traced.inserting_after(node):
                first = node if new.is_added else inputs[firsts[number]]
                call = traced.call_module(new.name, (first,))
            stack = node.meta.get("nn_module_stack", {})
            call.meta["nn_module_stack"] = {**stack, new.name: (new.name, type(new.module))}
            only = [nodes[reader] for reader in new.readers]
            takes = lambda user, call=call, only=only: user in only if only else user is not call
            node.replace_all_uses_with(call, delete_user_cb=takes)
            if not new.is_added:
                traced.erase_node(node)
                for other in [other for other in inputs if not other.users]:
                    traced.erase_node(other)  # the sigmoid of x * sigmoid(x)
            node = call


def _with_forward(base: type[nn.Module], traces: Traces) -> type[nn.Module]:
    """Return a subclass whose forward pass is the code of the graphs, with which it copies and
    pickles."""
    names: dict[str, Any] = {"train": _function_of(traces.train, traces.train_steps)}
    names["evaluate"] = _function_of(traces.evaluation, traces.eval_steps)
    given, parameters = ["self"], ["self"]
    for node in traces.train.find_nodes(op="placeholder"):
        given.append(str(node.target))
        names |= {f"default_{node.name}": value for value in node.args}
        parameters.append(f"{node.target} = default_{node.name}" if node.args else given[-1])
    text = f"(train if self.training else evaluate)({', '.join(given)})"
    forward = eval(f"lambda {', '.join(parameters)}: {text}", names)
    forward.__signature__ = inspect.signature(base.forward)

    def reduce(net: nn.Module, protocol: object) -> tuple[Any, ...]:
        return _new, (base, traces), net.__getstate__()

    # A base class such as fx.GraphModule would copy its own forward pass.
    members = {"forward": forward, "__reduce_ex__": reduce, "__deepcopy__": None}
    about = {key: getattr(base, key) for key in ("__module__", "__qualname__", "__doc__")}
    return type(base.__name__, (base,), {**members, **about})


def _function_of(graph: fx.Graph, steps: Graph) -> Any:
    """Return the function of a network that a graph describes."""
    code = copy.deepcopy(graph)
    call_operators(steps, code)
    for node in code.nodes:
        node.type = None  # annotations may be strings, which are no code
    source = code.python_code("self")
    namespace = dict(source.globals)
    exec(source.src, namespace)
    return namespace["forward"]


def _new(base: type[nn.Module], traces: Traces) -> nn.Module:
    """Return a network without its state, to copy or unpickle one."""
    # fx.GraphModule's own __new__ replaces the class.
    return object.__new__(_with_forward(base, traces))


def hooked_blocks(net: nn.Module, traced: fx.Graph) -> list[str]:
    """Return the names of blocks with hooks: the code of a graph calls only innermost modules."""
    called = {str(node.target) for node in traced.nodes if node.op == "call_module"}
    inside = tuple(f"{leaf}." for leaf in called)
    blocks = [(f"{name}.", module) for name, module in net.named_modules() if name]
    return [
        name[:-1]
        for name, module in blocks
        if not name.startswith(inside) and (module._forward_hooks or module._forward_pre_hooks)
    ]


def _register_constants(net: nn.Module, *graphs: fx.Graph) -> None:
    """Register tensors made in the forward pass as buffers that checkpoints do not hold."""
    used = {str(node.target) for graph in graphs for node in graph.nodes if node.op == "get_attr"}
    for name in [key for key in vars(net) if key.startswith("_tensor_constant")]:
        constant = net.__dict__.pop(name)
        if name in used:
            net.register_buffer(name, constant, persistent=False)


def apply_operator(name: str, x: Any, y: Any) -> Any:
    """Return the value of x after ``x += y`` or another augmented assignment."""
    return getattr(operator, name)(x, y)


def call_operators(graph: Graph, traced: fx.Graph) -> None:
    """Replace the augmented assignments of a traced graph by calls, before code generation.

    For ``y = x; y += 1`` torch.fx would write ``x += 1``, which changes x if it is a number.
    """
    plain_operators(graph, traced)
    for node in filter(_is_in_place, traced.nodes):
        node.args = (getattr(node.target, "__name__", ""), *node.args)
        node.target = apply_operator


def plain_operators(graph: Graph, traced: fx.Graph) -> None:
    """Use ``y = x + 1`` for ``y = x; y += 1`` where nothing reads x again: autograd then keeps what
    it needs."""
    for number, node in enumerate(traced.nodes):
        if _is_in_place(node) and not graph.is_read_elsewhere(number):
            plain = getattr(node.target, "__name__", "").removeprefix("i")
            node.target = getattr(operator, plain, None) or getattr(operator, f"{plain}_")


def _is_in_place(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return name in IN_PLACE_OPERATORS and node.target is getattr(operator, name)
