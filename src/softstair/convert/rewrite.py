"""Forward passes in which each call of an activation is a module of its own.

It is needed for activations that are functions, for a module that is called several times, and for
stairs that are added to sums or to the inputs of weights. The network keeps its modules and
attributes. Its class becomes a subclass, whose forward pass is the code of the traced graph. That
code calls the innermost modules; a block that is called by itself still runs its own code. Tracing
fixes what a forward pass decides in Python, such as the training mode: ``F.dropout(x,
training=self.training)`` would always drop. The network is therefore traced in both modes. Such
dropouts become modules, other arguments that are the mode read it, and any other difference raises
ValueError.
"""

import copy
import inspect
import operator
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from softstair import _check
from softstair.convert.graph import (
    IN_PLACE_OPERATORS,
    Graph,
    Rows,
    Traces,
    graph_of_rows,
    rows_of,
    steps_of,
)
from softstair.convert.ops import OPERATORS, Effect

DROPOUTS = {
    getattr(F, row.name): row.modules[0] for row in OPERATORS if row.effect is Effect.DROPOUT
}
ADVICE = (
    "give each activation an nn.Module of its own, called once (nn.ReLU instead of F.relu), and "
    "pass sums=None and shortcuts=None"
)
MODE = "training"
CASE = "if its activations are functions or are called several times, or if stairs are added"


def call_names(traced: fx.Graph, net: nn.Module, prefix: str = "stair") -> list[str]:
    """Return a new name for a module in place of each node, in the module whose code calls it."""
    names, taken = [], {name for name, _ in net.named_modules(remove_duplicate=False)}
    for node in traced.nodes:
        stack = list(node.meta.get("nn_module_stack", {}).values())
        owner = stack[-1][0] if stack else ""
        name = f"{owner}.{prefix}_{node.name}" if owner else f"{prefix}_{node.name}"
        while name in taken:
            name += "_"
        names.append(name)
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
    graphs = (traces.train, traces.evaluation)
    if calls:
        code = _rewritten(net, calls, traces)
        net.__class__ = _with_forward(type(net), code)
        graphs = (_in_mode(code, True), _in_mode(code, False))
    _register_constants(net, *graphs)
    before = (traces.train_steps, traces.eval_steps)
    steps = (steps_of(x, net, old.complete) for x, old in zip(graphs, before, strict=True))
    return Traces(*graphs, *steps)


def _rewritten(net: nn.Module, calls: Mapping[int, Sequence[NewCall]], traces: Traces) -> fx.Graph:
    """Return the graph of the new forward pass; where it reads the mode, it is an attribute."""
    train_graph, eval_graph = traces.train, traces.evaluation
    for name in hooked_blocks(net, train_graph):
        problem = f"must have no hooks on blocks {CASE}, but {name} has one, which would not run"
        raise _check.invalid("model", f"{problem}; {ADVICE}")
    replaced = {number for number, new in calls.items() if not all(call.is_added for call in new)}
    nodes, names = list(train_graph.nodes), call_names(train_graph, net, "module")
    dropouts = _differing_dropouts(net, train_graph, eval_graph, replaced)
    first_inputs = [
        node.all_input_nodes.index(nodes[step.inputs[0]]) if step.inputs else 0
        for node, step in zip(nodes, traces.train_steps.steps, strict=True)
    ]
    for number, node in enumerate(nodes):
        node.type = None  # annotations may be strings, which are no code
        new = list(calls.get(number, ()))
        if node in dropouts:
            p = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
            new.insert(0, NewCall(names[number], DROPOUTS[node.target](p), False))
        for call in new:
            readers = [nodes[reader] for reader in call.readers]
            node = _insert(train_graph, node, net, call, first_inputs[number], readers)
    call_operators(steps_of(train_graph, net), train_graph)
    return train_graph


def _in_mode(code: fx.Graph, training: bool) -> fx.Graph:
    """Return the graph that a trace of rewritten code in one mode would give."""
    graph = copy.deepcopy(code)
    is_mode = lambda node: node.op == "get_attr" and node.target == MODE
    for node in list(graph.nodes):
        if is_mode(node):
            continue
        values = fx.map_arg((node.args, node.kwargs), lambda x: training if is_mode(x) else x)
        node.args, node.kwargs = values
        if node.target is apply_operator:
            name, *operands = node.args
            node.target, node.args = getattr(operator, name), tuple(operands)
    for mode in filter(is_mode, list(graph.nodes)):
        graph.erase_node(mode)
    return graph


def _with_forward(base: type[nn.Module], code: fx.Graph) -> type[nn.Module]:
    """Return a subclass whose forward pass is the code of a graph, with which it copies and
    pickles."""
    source = code.python_code("self")
    namespace = dict(source.globals)
    exec(source.src, namespace)
    forward = namespace["forward"]
    forward.__signature__ = inspect.signature(base.forward)

    def reduce(net: nn.Module, protocol: object) -> tuple[Any, ...]:
        return _new, (base, rows_of(code)), net.__getstate__()

    # A base class such as fx.GraphModule would copy its own forward pass.
    members = {"forward": forward, "__reduce_ex__": reduce, "__deepcopy__": None}
    names = {key: getattr(base, key) for key in ("__module__", "__qualname__", "__doc__")}
    return type(base.__name__, (base,), {**members, **names})


def _new(base: type[nn.Module], rows: Rows) -> nn.Module:
    """Return a network without its state, to copy or unpickle one."""
    # fx.GraphModule's own __new__ replaces the class.
    return object.__new__(_with_forward(base, graph_of_rows(rows)))


def _insert(
    traced: fx.Graph,
    node: fx.Node,
    net: nn.Module,
    new: NewCall,
    first_input: int,
    readers: Sequence[fx.Node],
) -> fx.Node:
    """Call a new module, and return the call; of the inputs that it may take, take the first."""
    owner, _, leaf = new.name.rpartition(".")
    net.get_submodule(owner).add_module(leaf, new.module.train(net.training))
    inputs = node.all_input_nodes
    with traced.inserting_after(node):
        call = traced.call_module(new.name, (node if new.is_added else inputs[first_input],))
    stack = node.meta.get("nn_module_stack", {})
    call.meta["nn_module_stack"] = {**stack, new.name: (new.name, type(new.module))}
    takes = lambda user: user in readers if readers else user is not call
    node.replace_all_uses_with(call, delete_user_cb=takes)
    if not new.is_added:
        traced.erase_node(node)
        for other in [other for other in inputs if not other.users]:
            traced.erase_node(other)  # the sigmoid of x * sigmoid(x)
    return call


def _differing_dropouts(
    net: nn.Module, train_graph: fx.Graph, eval_graph: fx.Graph, replaced: Container[int]
) -> set[fx.Node]:
    """Return the dropouts that follow the training mode; raise if anything else differs.

    An argument ``training=self.training``, as of F.batch_norm, reads the mode of the network.
    """
    dropouts = set()
    is_same = len(train_graph.nodes) == len(eval_graph.nodes)
    numbers = {n: i for traced in (train_graph, eval_graph) for i, n in enumerate(traced.nodes)}
    for a, b in zip(list(train_graph.nodes), eval_graph.nodes, strict=False):
        if a.op == "get_attr" and b.op == "get_attr":
            _check_constants(net, str(a.target), str(b.target))
        elif _call(a, numbers) != _call(b, numbers):
            if a.target == b.target and a.target in DROPOUTS:
                dropouts.add(a)
            elif numbers[a] not in replaced:
                is_same = is_same and _read_mode(train_graph, a, b, numbers)
    if not is_same:
        raise _check.invalid(
            "model",
            f"must compute the same in training and in evaluation {CASE}, "
            f"but {type(net).__name__} reads self.training; {ADVICE}",
        )
    return dropouts


def _read_mode(
    train_graph: fx.Graph, a: fx.Node, b: fx.Node, numbers: Mapping[fx.Node, int]
) -> bool:
    """Replace arguments that are True in training and False in evaluation by ``self.training``.

    Returns:
        Whether nothing else differs.
    """
    (mine, form), (theirs, other) = (tree_flatten((node.args, node.kwargs)) for node in (a, b))
    if (a.op, a.target, form) != (b.op, b.target, other):
        return False
    modes = [x is True and y is False for x, y in zip(mine, theirs, strict=True)]
    for x, y, follows in zip(mine, theirs, modes, strict=True):
        first, second = (numbers[v] if isinstance(v, fx.Node) else v for v in (x, y))
        if not follows and first != second:
            return False
    with train_graph.inserting_before(a):
        mode = train_graph.get_attr(MODE)
    leaves = [mode if follows else leaf for follows, leaf in zip(modes, mine, strict=True)]
    a.args, a.kwargs = tree_unflatten(leaves, form)
    return True


def _call(node: fx.Node, numbers: Mapping[fx.Node, int]) -> tuple[Any, ...]:
    """Return what a node does; operands by number, as each trace names its constants anew."""
    operands = fx.map_arg((node.args, node.kwargs), lambda operand: numbers[operand])
    return node.op, node.target, str(operands)


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


def _check_constants(net: nn.Module, first: str, second: str) -> None:
    a, b = (operator.attrgetter(name)(net) for name in (first, second))
    if isinstance(a, Tensor) and isinstance(b, Tensor) and not torch.equal(a, b):
        raise _check.invalid(
            "model",
            f"must not draw random tensors {CASE}, but {type(net).__name__} does; {ADVICE}",
        )


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

    For ``y = x; y += 1`` torch.fx would write ``x += 1``, which changes x if it is a number. Where
    nothing reads x again, ``y = x + 1`` is used, and autograd keeps what it needs.
    """
    for number, node in enumerate(traced.nodes):
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name in IN_PLACE_OPERATORS and node.target is getattr(operator, name):
            if graph.is_read_elsewhere(number):
                node.target, node.args = apply_operator, (name, *node.args)
            else:
                plain = name.removeprefix("i")
                node.target = getattr(operator, plain, None) or getattr(operator, f"{plain}_")
