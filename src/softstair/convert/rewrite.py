"""The modules of stairs, and forward passes that call them.

Stairs take the places of modules. A forward pass is rewritten for activations that are functions,
for a module that is called several times, and for stairs that are added to sums or to the inputs of
weights. The network keeps its modules and attributes. Its class becomes a subclass, whose forward
pass is the code of the two traced graphs: one in training and one in evaluation, as tracing fixes
what a forward pass decides in Python, such as ``F.dropout(x, training=self.training)``. Both must
call the same operations. The code calls the innermost modules; a block that is called by itself
still runs its own code.
"""

import copy
import inspect
import operator
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from softstair import _check
from softstair._quantum import fit_quantum, fit_range
from softstair.convert.conversion import swap_modules
from softstair.convert.graph import IN_PLACE_OPERATORS, Graph, Traces, steps_of
from softstair.convert.options import LayerOptions
from softstair.convert.shortcuts import PRODUCT
from softstair.convert.sites import Model, Site
from softstair.nn import StairActivation, StairLayer, StairWeight

ADVICE = (
    "give each activation an nn.Module of its own, called once (nn.ReLU instead of F.relu), and "
    "pass sums=None and shortcuts=None"
)
CASE = "if its activations are functions or are called several times, or if stairs are added"
SUMS_TRIED = 4096
"""Quantiles of a normal distribution to which the first range of a kept activation is fitted."""


class NewCall(NamedTuple):
    """A module that replaces a call, or that is called with its result."""

    name: str
    module: nn.Module
    is_added: bool  # with its result
    readers: tuple[int, ...] = ()  # the steps that read its result; empty: all


def replace_modules(model: Model, sites: Sequence[Site], options: LayerOptions) -> Traces | str:
    """Put stairs in the places of the sites; return the graphs of the network that it then is."""
    net = model.net
    device = next((parameter.device for parameter in net.parameters()), None)
    quantised = [site for site in sites if not site.why_float]
    for site in quantised:
        if site.is_weights:
            site.replacement = _layer(site, options)
        else:
            site.replacement = _activation(site, model, options).to(device)
    replacements = {s.module: s.replacement for s in quantised if s.module and not s.is_call}
    swap_modules(net, replacements)
    if isinstance(model.traces, str):
        return model.traces
    calls: dict[int, list[NewCall]] = {}
    for site in quantised:
        if site.is_call and site.replacement is not None:
            new = NewCall(site.name, site.replacement, site.is_added, site.readers)
            calls.setdefault(site.place if site.source else site.step, []).append(new)
    return rewrite(net, calls, model.traces)


def _layer(site: Site, options: LayerOptions) -> StairLayer:
    module, stair, kind, rare = site.module, site.stair, site.operator.replacement, options.rare
    assert module is not None
    assert stair is not None
    settings = {"layer": site.layer, "gradient_margin": site.margin, **site.noise}
    if site.group is not None:
        settings |= {"group": site.group, "half": rare.half, "fitted": rare.fit is not None}
        assert site.operator.grouped is not None
        grouped: StairLayer = site.operator.grouped.grouped(
            module, site.tokens, stair=stair, **settings
        )
        return grouped
    assert kind is not None
    weight, fit = module.get_parameter("weight"), rare.fit
    if fit == "auto":
        fit = "layer" if kind.output_axis is None else "channel"
    if rare.init != "keep":
        fit = None
    if fit is not None:
        stair = fit_quantum(weight, stair, per_channel=fit == "channel")
    if isinstance(stair.quantum, tuple) and len(stair.quantum) != weight.shape[0]:
        raise _check.invalid(
            "weights",
            f"must have one quantum for each of the {weight.shape[0]} output channels of "
            f"{site.name}, but {len(stair.quantum)} were given",
        )
    weight_stair = StairWeight(stair, **settings)
    weight_stair.fit = fit
    layer: StairLayer = kind.from_float(module, weight_stair)
    if rare.init == "thresholds":
        layer.start_at_thresholds()
    return layer


def _activation(site: Site, model: Model, options: LayerOptions) -> StairActivation:
    """Return the stair of features; of uintN by name after a kept activation, it begins at the
    least value that this has for normally distributed sums."""
    assert site.stair is not None
    is_relu = site.operator.name == "relu" and site.stair.levels[0] >= 0
    is_kept = options.keeps(site.stair) and not is_relu and not site.is_added
    function = _function_of(site, model) if is_kept else None
    settings = {"layer": site.layer, "gradient_margin": site.margin, **site.noise}
    activation = StairActivation(site.stair, function=function, **settings)
    if site.source and isinstance(site.source.replacement, StairActivation):
        function = site.source.replacement.function
    if (function or site.operator is PRODUCT) and options.follows(site.stair):
        y = torch.special.ndtri(torch.arange(0.5, SUMS_TRIED) / SUMS_TRIED)[:, None]
        if function:
            channels = sum(parameter.numel() for parameter in function.parameters())
            kept = copy.deepcopy(function).cpu().float().eval()
            y = kept(y.expand(-1, max(channels, 1)))
        activation.follows_range = True
        if fitted := fit_range(y.detach(), len(activation.stair)):
            activation.set_range(*fitted)
    if site.module is not None and not site.is_added:
        vars(activation).update(
            {k: copy.copy(v) for k, v in vars(site.module).items() if "_hook" in k}
        )
    return activation


def _function_of(site: Site, model: Model) -> Any:
    """Return the module of an activation that is kept."""

    def parameter(source: fx.Node) -> nn.Parameter:
        value = attrgetter(str(source.target))(model.net) if source.op == "get_attr" else None
        if not isinstance(value, nn.Parameter):
            problem = f"must give numbers or parameters to {site.name}, but gives {source.name!r}"
            raise _check.invalid("model", f"{problem}; pass activation='replace' or `skip` it")
        return value

    function: Any = copy.copy(site.module)
    if function is not None:  # its hooks are those of the stair
        hooks = {k: v for k, v in vars(function).items() if "_hook" in k and isinstance(v, dict)}
        vars(function).update({name: type(each)() for name, each in hooks.items()})
        function._modules = {}  # the module may get the stairs of other calls
    if site.operator.name == "silu":
        function = nn.SiLU()  # of x * sigmoid(x) too
    elif function is None:
        assert isinstance(model.traces, Traces)
        assert site.operator.module_of_call is not None
        node = list(model.traces.train.nodes)[site.step]
        named = {name: value for name, value in node.kwargs.items() if name != "input"}
        args, settings = fx.map_arg((node.args[1:], named), parameter)
        function = site.operator.module_of_call(*args, **settings)
    if hasattr(function, "inplace"):
        function.inplace = False
    return function


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
    names: dict[str, Any] = {"train": _forward_of(traces.train, traces.train_steps)}
    names["evaluate"] = _forward_of(traces.evaluation, traces.eval_steps)
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


def _forward_of(graph: fx.Graph, steps: Graph) -> Any:
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
