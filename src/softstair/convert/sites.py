"""What a float model computes, and its sites: what ``quantise`` replaces or reports.

A model is traced by torch.fx. Of one that torch.fx cannot trace, a run on example inputs tells
which modules it calls; their order is all that is known of its code.

A quantised layer is an activation and all the weights that feed it. Weights without an activation
of their own join the next one downstream; weights with none downstream are a layer of their own.
Layers are numbered in order of execution. Weights that run several times belong to their first use.
Each call of an activation is a site of its own: that of a module ``relu`` which is called twice is
named ``relu``, then ``relu.2``. A stair that is added to a sum counts as an activation.
"""

import copy
import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from softstair import _check
from softstair._errors import first_line
from softstair._grouped import Group
from softstair._projections import TokenAttention
from softstair._tokens import TokenName
from softstair.convert.conversion import copy_of
from softstair.convert.graph import (
    Graph,
    GraphStep,
    Tracer,
    Traces,
    traces_or_why,
    training_mode,
    unused_name,
)
from softstair.convert.ops import COMPOSITES, Effect, Operator, called, operator_of
from softstair.convert.options import PER_LAYER, LayerOptions, hint, matches
from softstair.nn import StairActivation, StairLayer, StairModule
from softstair.stair import Stair

Inputs: TypeAlias = Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True)
class Model:
    """A copy of a float model, and what it computes."""

    net: nn.Module
    graph: Graph
    traces: Traces | str  # or why torch.fx cannot trace it
    call_names: list[str]  # of a module in place of each step, if it was traced


def read_model(model: nn.Module, example_inputs: object, by_module: bool = False) -> Model:
    """Return a copy of a model, in which each name of an activation has a module of its own, and
    what it computes: by tracing, or else the modules that a run on the inputs calls.

    With ``by_module`` the modules are all that is asked for: nothing is traced or run.
    """
    if not isinstance(model, nn.Module):
        raise _check.wrong("model", model, "a torch.nn.Module")
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
    if inputs is not None and not isinstance(inputs, list | tuple | Mapping):
        allowed = "a tensor, or a tuple or a mapping of the arguments of one forward pass"
        raise _check.wrong("example_inputs", inputs, allowed)
    net = copy_of(model, "model")
    _separate_activations(net)
    has_composites = any(isinstance(module, COMPOSITES) for module in net.modules())
    if by_module:
        return Model(net, _listed(net), "it was quantised by modules, with features per token", [])
    if has_composites and inputs is not None:
        traces: Traces | str = "its blocks of torch.nn have control flow"
    else:
        traces = traces_or_why(net)
    if isinstance(traces, Traces):
        return Model(net, traces.train_steps, traces, _call_names(traces.train, net))
    if inputs is None:
        raise _check.invalid("example_inputs", _missing_inputs(net, traces))
    try:
        return Model(net, _called(net, inputs), traces, [])
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
        f"cannot trace the model: {why}; its modules then train with stairs, but functions stay in "
        "float, and nothing exports, for which write torch.where instead of if, and numbers "
        "instead of sizes"
    )


def _separate_activations(net: nn.Module) -> None:
    """Give each name of an activation without state a module of its own: it computes the same."""
    seen = set[nn.Module]()
    for parent in list(net.modules()):
        for name, child in parent._modules.items():
            if child is None or operator_of(child).effect is not Effect.ACTIVATION:
                continue
            if type(child) not in operator_of(child).modules or child.state_dict():
                continue
            if child in seen:
                parent._modules[name] = copy.deepcopy(child)
            seen.add(child)


def _call_names(traced: fx.Graph, net: nn.Module) -> list[str]:
    """Return a new name for a module in place of each node, in the module whose code calls it."""
    names, taken = [], {name for name, _ in net.named_modules(remove_duplicate=False)}
    for node in traced.nodes:
        stack = list(node.meta.get("nn_module_stack", {}).values())
        owner = f"{stack[-1][0]}." if stack and stack[-1][0] else ""
        names.append(unused_name(f"{owner}stair_{node.name}", taken))
    return names


def _called(net: nn.Module, inputs: Inputs) -> Graph:
    """Return the modules that one run calls, each as if it read the result of the one before.

    Activations in place count as writing if the result of the network depends on it.
    """
    activations: list[Any] = [
        m for m in net.modules() if operator_of(m).effect is Effect.ACTIVATION
    ]
    in_place = [module for module in activations if getattr(module, "inplace", False)]
    names, result = _run(net, inputs)
    for module in in_place:
        module.inplace = False
    same = not in_place or all(map(torch.equal, result, _run(net, inputs)[1]))
    for module in in_place:
        module.inplace = True
    writing = set() if same else {id(module) for module in in_place}
    return _chain(net, names, writing)


def _listed(net: nn.Module) -> Graph:
    """Return the innermost modules in the order of their registration, as a chain."""
    names = list[str]()
    for name, module in net.named_modules():
        inside = tuple(f"{leaf}." for leaf in names)
        is_whole = operator_of(module).grouped is not None or not any(module.children())
        if name and is_whole and _is_leaf(module, name) and not name.startswith(inside):
            names.append(name)
    return _chain(net, names, set())


def _is_leaf(module: nn.Module, name: str) -> bool:
    """Return whether a module is one operation: it is torch's, or can be quantised as it is."""
    is_leaf = Tracer().is_leaf_module(module, name) and not isinstance(module, COMPOSITES)
    return is_leaf or operator_of(module).grouped is not None


def _chain(net: nn.Module, names: Sequence[str], writing: set[int]) -> Graph:
    """Return calls of modules, each as if it read the result of the one before."""
    steps = []
    for number, name in enumerate(names):
        writes = id(net.get_submodule(name)) in writing
        before, written = range(max(0, number - 1), number), [number] if writes else []
        steps.append(GraphStep(name, None, tuple(before), written=frozenset(written)))
    return Graph(tuple(steps), frozenset({len(steps) - 1}), complete=False)


def _run(net: nn.Module, inputs: Inputs) -> tuple[list[str], list[Tensor]]:
    """Return the names of the innermost modules that a run calls, and the tensors that it returns.

    It runs in evaluation: training would change running statistics.
    """
    names, inside = list[str](), list[str]()

    def leave(name: str) -> None:
        inside.pop()
        if not inside:
            names.append(name)

    with training_mode(net, training=False), ExitStack() as hooks, torch.no_grad():
        for name, module in net.named_modules():
            if name and _is_leaf(module, name):
                before = lambda *_, name=name: inside.append(name)
                after = lambda *_, name=name: leave(name)
                hooks.enter_context(module.register_forward_pre_hook(before))
                hooks.enter_context(module.register_forward_hook(after))
        result = net(**inputs) if isinstance(inputs, Mapping) else net(*inputs)
    return names, [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


@dataclass(eq=False)
class Site:
    """A module or a function call that is quantised or reported as float."""

    step: int  # the first that uses it
    name: str
    operator: Operator
    module: nn.Module | None  # None for a function call
    uses: list[int] = field(default_factory=list)
    is_call: bool = False  # a call is replaced: of a function, or not the first of a module
    is_added: bool = False  # a stair is added after the step, which stays
    is_shortcut: bool = False  # its features are added to others
    source: "Site | None" = None  # the stair of a shortcut, whose features it quantises again
    place: int = -1  # the step after which such a stair is called
    readers: tuple[int, ...] = ()  # the steps that read its result; empty: all
    why_float: str = ""  # empty if it is quantised
    layer: int = -1
    weights: list[str] = field(default_factory=list)  # before it, whose names are its own too
    stair: Stair | None = None
    noise: dict[str, Any] = field(default_factory=dict)  # the keywords of its stair about noise
    margin: int = 0  # levels of its stair beyond each end, in the backward pass
    group: Group | None = None  # the weights that share a quantum, if they are in groups
    tokens: TokenName | None = None  # the rounding of the features that its weights read
    replacement: StairLayer | StairActivation | None = None

    @property
    def kind(self) -> str:
        """The class of the module or the name of the function."""
        return self.operator.name if self.module is None else type(self.module).__name__

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which mappings find it."""
        return self.name, *self.weights

    @property
    def is_weights(self) -> bool:
        return self.operator.effect is Effect.WEIGHTS

    @property
    def is_activation(self) -> bool:
        return self.operator.effect is Effect.ACTIVATION

    @property
    def option(self) -> str:
        """The option of ``quantise`` that holds its stair."""
        return "weights" if self.is_weights else "features"


def find_sites(model: Model, options: LayerOptions) -> list[Site]:
    """Return the sites of a float network in order of first use."""
    sites: dict[object, Site] = {}
    calls: Counter[str] = Counter()
    consumers = model.graph.consumers()
    for number, step in enumerate(model.graph.steps):
        module, operator = called(model.net, step)
        if operator.is_gate and not consumers[number]:
            continue  # the sigmoid of x * sigmoid(x)
        if step.module is None:
            name = model.call_names[number]
            if operator.effect is not Effect.ACTIVATION:  # no module takes its place
                name = name.rpartition("stair_")[2]
            sites[number] = Site(number, name, operator, None, [number], True)
            continue
        new = Site(number, step.module, operator, module)
        calls[step.module] += 1
        if new.is_activation and model.graph.complete and calls[step.module] > 1:
            name = f"{step.module}.{calls[step.module]}"
            sites[number] = replace(new, name=name, uses=[number], is_call=True)
        else:
            sites.setdefault(module, new).uses.append(number)
    reported = []
    for site in sites.values():
        why = why_float(site, model.graph, options)
        if not why and site.operator.name == "Embedding" and not _is_own(site, model.net, options):
            why = site.operator.why
        if why is not None:
            site.why_float = why
            reported.append(site)
    return reported


def why_float(site: Site, graph: Graph, options: LayerOptions) -> str | None:
    """Return "" for a site to quantise, why it stays in float, or None if nothing is reported."""
    operator, module = site.operator, site.module
    if isinstance(module, StairModule | StairLayer):
        raise _check.invalid("model", "must be a float network, but it holds stairs already")
    if site.is_weights and module is None:
        return "weights used by a function; make it a module"
    is_left = operator.is_gate and not (options.may_keep and not graph.is_at_end(site.step))
    is_layer = operator.replacement is not None or operator.grouped is not None
    if is_left or not (site.is_activation or is_layer):
        has_parameters = module is not None and any(True for _ in module.parameters())
        return operator.why or ("not a layer that can be quantised" if has_parameters else None)
    if operator.replacement is None and operator.grouped and not options.is_named:
        return operator.why
    if isinstance(module, nn.MultiheadAttention) and (why := TokenAttention.why_float(module)):
        return why
    if module is not None and type(module) not in (operator.modules or [type(module)]):
        return f"a subclass of {operator.modules[0].__name__} with code of its own"
    if any(matches(pattern, site.name) for pattern in options.skip):
        return "skipped"
    if not _may_have_stair(site, options):
        return f"no stair for {site.option}"
    if module is None:
        incomplete = "a function in code that cannot be traced whole; make it a module"
        return "" if graph.complete else incomplete
    name = operator.grouped.weight_name if operator.grouped else "weight"
    if site.is_weights and not isinstance(module._parameters.get(name), nn.Parameter):
        return "its weight is computed, not a parameter"
    return ""


def _may_have_stair(site: Site, options: LayerOptions) -> bool:
    """Return False if a site has no stair, whatever the number of its layer will be."""
    stairs = getattr(options, site.option)
    fitting = (key for key in stairs if isinstance(key, int) or matches(key, site.name))
    first = next(fitting, None)
    is_numbered, by_weights = isinstance(first, int), options.is_named and len(stairs) > 1
    return is_numbered or by_weights or stairs.get(first) is not None


def _is_own(site: Site, net: nn.Module, options: LayerOptions) -> bool:
    """Return whether an embedding is named by a pattern that fits no other layer."""
    key = next((key for key in options.weights if matches(key, site.name)), "*")
    others = [
        name
        for name, module in net.named_modules()
        if operator_of(module).effect is Effect.WEIGHTS and not isinstance(module, nn.Embedding)
    ]
    return not any(matches(key, name) for name in others)


def entry_for(site: Site, option: str, options: LayerOptions) -> Any:
    """Return the value of an option for a site whose layer has a number."""
    value = getattr(options, option)
    for key, entry in value.items():
        if key == site.layer or matches(key, *site.names):
            return entry
    raise _check.invalid(
        option,
        f"must say what module {site.name} in layer {site.layer} gets, but its keys are "
        f"{', '.join(map(repr, value))}; add the name, the number or '*'",
    )


def check_names(sites: Sequence[Site], options: LayerOptions) -> None:
    """Raise ValueError if a mapping has a key that is no number and fits no name of a site."""
    for option in PER_LAYER:
        is_stair = option in ("weights", "features")
        is_any = options.is_named or not is_stair
        names = [site.name for site in sites if is_any or option == site.option]
        for key in getattr(options, option):
            if key != "*" and not isinstance(key, int) and not matches(key, *names):
                problem = f"must name layers, but {_check.shortened(key)} fits none"
                name = "bits" if options.is_named and is_stair else option
                raise _check.invalid(name, f"{problem}; {hint(key, names)}")


def number_layers(graph: Graph, sites: Sequence[Site]) -> None:
    """Set the ``layer`` of each site, all of which are quantised."""
    stairs = {use: site for site in sites if site.is_activation for use in site.uses}
    steps = {}
    for site in sites:
        steps[site] = site.step
        if site.is_weights and site.step not in stairs:  # else one is added after it
            reached = graph.following(site.step, walls=stairs) & stairs.keys()
            steps[site] = stairs[min(reached)].step if reached else site.step
    set_ranks(steps)


def set_ranks(keys: Mapping[Site, int]) -> None:
    """Set the ``layer`` of each site to the rank of its key."""
    ranks = {key: rank for rank, key in enumerate(sorted(set(keys.values())))}
    for site, key in keys.items():
        site.layer = ranks[key]
