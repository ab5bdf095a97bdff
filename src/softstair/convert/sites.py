"""Sites: the modules and function calls of a network that ``quantise`` replaces or reports.

A quantised layer is an activation and all the weights that feed it. Weights without an activation
of their own join the next one downstream; weights with none downstream are a layer of their own.
Layers are numbered in order of execution. Weights that run several times belong to their first use.
Each call of an activation is a site of its own: that of a module ``relu`` which is called twice is
named ``relu``, then ``relu.2``. A stair that is added to a sum counts as an activation.
"""

import fnmatch
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from torch import nn

from softstair import _check
from softstair.convert.bits import name_of
from softstair.convert.conversion import graph_of
from softstair.convert.graph import Graph, GraphStep
from softstair.convert.ops import Effect, Operator, operator_named, operator_of
from softstair.nn import StairActivation, StairLayer, StairModule, stair_modules
from softstair.noise import Noise
from softstair.regularise import Forward
from softstair.stair import Quantum, Stair
from softstair.ste import Estimator

Value = TypeVar("Value")
PerLayer: TypeAlias = (
    Value | Sequence[Value] | Mapping[int, Value] | Mapping[str, Value] | Mapping[int | str, Value]
)
"""A value for all layers, a sequence with one per layer, or a mapping from layer numbers and
patterns of module names."""
OPTIONS = ("weights", "features", "noise", "forward")


@dataclass(frozen=True)
class LayerOptions:
    """The options of ``quantise`` that may differ from layer to layer, and what it skips.

    If the stairs were given as names of bits, the names of weights stand for their activation too.
    """

    weights: PerLayer[Stair | None]
    features: PerLayer[Stair | None]
    noise: PerLayer[Noise | str | Estimator]
    forward: PerLayer[Forward]
    skip: tuple[str, ...] = ()
    is_named: bool = False
    activation: Literal["auto", "keep", "replace"] = "auto"

    def entry(self, option: str, site: "Site") -> Any:
        """Return the value of an option for a site whose layer has a number."""
        value = getattr(self, option)
        if not isinstance(value, Mapping):
            return value[site.layer] if isinstance(value, list | tuple) else value
        for key, entry in value.items():
            fits = isinstance(key, str) and any(matches(key, name) for name in site.names)
            if key == site.layer or fits:
                return entry
        raise _check.invalid(
            option,
            f"must say what module {site.name} in layer {site.layer} gets, but its keys are "
            f"{', '.join(map(repr, value))}; add the name, the number or '*'",
        )

    def may_have_stair(self, site: "Site") -> bool:
        """Return False if a site has no stair, whatever the number of its layer will be."""
        stairs = getattr(self, site.option)
        if not isinstance(stairs, Mapping):
            return stairs is not None
        if self.is_named:
            return True
        for key, stair in stairs.items():
            if isinstance(key, int):
                return True
            if isinstance(key, str) and matches(key, site.name):
                return stair is not None
        return False

    def keeps(self, stair: Stair | None) -> bool:
        """Return whether an activation is kept before a stair."""
        by_bits = self.is_named and stair is not None and "int" in (name_of(stair) or "")
        return by_bits if self.activation == "auto" else self.activation == "keep"

    @property
    def may_keep(self) -> bool:
        """Whether it may keep the activation of some layer."""
        stairs = self.features.values() if isinstance(self.features, Mapping) else self.features
        return any(map(self.keeps, stairs if isinstance(stairs, Iterable) else [stairs]))

    def check_names(self, sites: Sequence["Site"]) -> None:
        """Raise ValueError if a mapping has a key that is no number and fits no name of a site."""
        for option in OPTIONS:
            is_stair = option in ("weights", "features")
            is_any = self.is_named or not is_stair
            names = [site.name for site in sites if is_any or option == site.option]
            value = getattr(self, option)
            for key in value if isinstance(value, Mapping) else ():
                fits = isinstance(key, str) and any(matches(key, name) for name in names)
                if not fits and not isinstance(key, int):
                    problem = f"must name layers, but {_check.shortened(key)} fits none"
                    name = "bits" if self.is_named and is_stair else option
                    raise _check.invalid(name, f"{problem}; {hint(key, names)}")

    def check_counts(self, layers: int) -> None:
        """Raise ValueError if a sequence or the numbers in a mapping do not fit the layers."""
        for option in OPTIONS:
            value = getattr(self, option)
            if isinstance(value, list | tuple) and len(value) != layers:
                raise _check.invalid(
                    option,
                    f"must have one entry for each of the network's {layers} layers, but "
                    f"{len(value)} were given",
                )
            for key in value if isinstance(value, Mapping) else ():
                if isinstance(key, int) and not 0 <= key < layers:
                    raise _check.invalid(
                        option, f"must have layers from 0 to {layers - 1} as keys, but has {key}"
                    )


def hint(key: object, names: Sequence[str]) -> str:
    """Return a question with the names that are like ``key``, or some of all names."""
    return _check.suggestion(key, names) or f"use {', '.join(names[:12])}"


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern fits the name of a module, or of a module that contains it."""
    inside = name.startswith(f"{pattern}.")
    return name == pattern or inside or fnmatch.fnmatchcase(name, pattern)


class FeatureUnit(NamedTuple):
    """Features are integer multiples of ``quantum``, at most ``widest`` quanta from 0.

    Their floats were rounded at most ``roundings`` times. They hold the values of ``stairs``,
    divided by ``divisors`` one after another.
    """

    quantum: float
    widest: int
    roundings: int = 1
    stairs: frozenset[StairActivation] = frozenset()
    divisors: tuple[int, ...] = ()

    @property
    def identity(self) -> tuple[float, frozenset[object]]:
        """What units that are equal have in common; learned quanta are equal if they are tied."""
        learned = {(s.log_ratio, self.divisors) for s in self.stairs if s.log_ratio is not None}
        return self.quantum, frozenset(learned)


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
    function: nn.Module | None = None  # the activation that is kept
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


def find_sites(
    net: nn.Module, graph: Graph, options: LayerOptions, call_names: Sequence[str] | None
) -> list[Site]:
    """Return the sites of a float network in order of first use.

    ``call_names`` holds a name for each step that calls a function; None if it was recorded.
    """
    sites: dict[nn.Module | int, Site] = {}
    calls: Counter[str] = Counter()
    consumers = graph.consumers()
    for number, step in enumerate(graph.steps):
        if step.module is None:
            operator = operator_named(step.function)
            if operator.is_gate and not consumers[number]:
                continue  # the sigmoid of x * sigmoid(x)
            name = call_names[number] if call_names else f"{step.function} (function)"
            if operator.effect is not Effect.ACTIVATION:  # no module takes its place
                name = name.rpartition("stair_")[2]
            sites[number] = Site(number, name, operator, None, [number], True)
            continue
        module = net.get_submodule(step.module)
        new = Site(number, step.module, operator_of(module), module)
        if new.operator.is_gate and not consumers[number]:
            continue
        calls[step.module] += 1
        if new.is_activation and graph.complete and calls[step.module] > 1:
            name = f"{step.module}.{calls[step.module]}"
            sites[number] = replace(new, name=name, uses=[number], is_call=True)
        else:
            sites.setdefault(module, new).uses.append(number)
    reported = []
    for site in sites.values():
        if (why := why_float(site, graph, options)) is not None:
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
    if is_left or (not site.is_activation and operator.replacement is None):
        has_parameters = module is not None and any(True for _ in module.parameters())
        return operator.why or ("not a layer that can be quantised" if has_parameters else None)
    if module is not None and type(module) not in operator.modules:
        return f"a subclass of {operator.modules[0].__name__} with code of its own"
    if any(matches(pattern, site.name) for pattern in options.skip):
        return "skipped"
    if not options.may_have_stair(site):
        return f"no stair for {site.option}"
    if module is None:
        incomplete = "a function in code that cannot be traced whole; make it a module"
        return "" if graph.complete else incomplete
    if site.is_weights and not isinstance(module._parameters.get("weight"), nn.Parameter):
        return "its weight is computed, not a parameter"
    return ""


def number_layers(graph: Graph, sites: Sequence[Site]) -> None:
    """Set the ``layer`` of each site, all of which are quantised."""
    activations = {use: site for site in sites if site.is_activation for use in site.uses}
    consumers = graph.consumers()
    layer_steps = {}
    for site in sites:
        owner = _next_activation(consumers, site.step, activations) if site.is_weights else None
        layer_steps[site] = (owner or site).step
    set_ranks(layer_steps)


def set_ranks(keys: Mapping[Site, int]) -> None:
    """Set the ``layer`` of each site to the rank of its key."""
    ranks = {key: rank for rank, key in enumerate(sorted(set(keys.values())))}
    for site, key in keys.items():
        site.layer = ranks[key]


def _next_activation(
    consumers: list[list[int]], start: int, activations: Mapping[int, Site]
) -> Site | None:
    """Return the first stair to run among those that take the result of step ``start``."""
    waiting, seen, reached = list(consumers[start]), set(), []
    if start in activations:  # a stair that is added after it
        return activations[start]
    while waiting:
        step = waiting.pop()
        if step in activations:
            reached.append(step)
        elif step not in seen:
            seen.add(step)
            waiting.extend(consumers[step])
    return activations[min(reached)] if reached else None


def set_input_units(net: nn.Module, *_: object) -> None:
    """Give the layers of a quantised network the quantum of their inputs, where there is one."""
    for layer, unit in _feature_units(net)[1].items():
        layer.input_quantum = None if unit is None else unit.quantum
        layer.widest_input = type(layer).widest_input if unit is None else unit.widest
        if unit is not None and (stairs := [s for s in unit.stairs if s.log_ratio is not None]):
            layer.follow(stairs[0], unit.divisors)


def tied_stairs(net: nn.Module) -> list[list[StairActivation]]:
    """Return the activations of a quantised network, in groups that must share one quantum.

    The values of a group are added or concatenated, or read by the same weights: they are integer
    multiples of a quantum only if it is the same for all. An activation by itself is a group too.
    Groups and their members are in order of execution.
    """
    units, inputs = _feature_units(net, quantum=1.0)
    names = dict.fromkeys(step.module for step in graph_of(net).steps if step.module is not None)
    modules = dict.fromkeys(map(net.get_submodule, names))
    groups = {stair: [stair] for stair in modules if isinstance(stair, StairActivation)}
    rank = {stair: number for number, stair in enumerate(groups)}
    for unit in (*units, *inputs.values()):
        stairs = () if unit is None else unit.stairs
        merged = {member for stair in stairs for member in groups[stair]}
        groups |= dict.fromkeys(merged, sorted(merged, key=lambda stair: rank[stair]))
    return [group for stair, group in groups.items() if group[0] is stair]


def learn_quanta(net: nn.Module) -> None:
    """Make the quanta of a quantised network parameters, shared where they must stay equal."""
    for group in tied_stairs(net):
        shared: dict[Quantum, nn.Parameter] = {}
        for stair in group:
            quantum = stair.stair.quantum
            shared[quantum] = stair.learn_quantum(shared.get(quantum))
    for _, module in stair_modules(net):
        if module.log_ratio is None:  # weights
            module.learn_quantum()


def _feature_units(
    net: nn.Module, quantum: float | None = None
) -> tuple[list[FeatureUnit | None], dict[StairLayer, FeatureUnit | None]]:
    """Return the units of the steps' results, and of the layers' inputs.

    With ``quantum``, as if it were that of all activations.
    """
    units: list[FeatureUnit | None] = []
    inputs: dict[StairLayer, list[FeatureUnit | None]] = {}
    for number, step in enumerate(graph_of(net).steps):
        module = None if step.module is None else net.get_submodule(step.module)
        if isinstance(module, StairActivation):
            units.append(_unit(module, quantum))
            continue
        incoming = [units[source] for source in step.inputs]
        if isinstance(module, StairLayer):  # it takes its features first
            inputs.setdefault(module, []).append(incoming[0] if incoming else None)
        units.append(_result_unit(module, step, incoming))
        # What shares the memory holds the old values, the new ones, or some of each.
        for source in step.written:
            units[source] = _common([units[source], units[number]])
    return units, {layer: _common(units_of_calls) for layer, units_of_calls in inputs.items()}


def _unit(activation: StairActivation, quantum: float | None) -> FeatureUnit | None:
    integers, own = activation.stair.integers, activation.stair.quantum
    if integers is None or isinstance(own, tuple):
        return None
    return FeatureUnit(quantum or own, max(map(abs, integers)), stairs=frozenset({activation}))


def _common(units: Sequence[FeatureUnit | None], summed: bool = False) -> FeatureUnit | None:
    known = [unit for unit in units if unit is not None]
    if len(known) < len(units) or len({unit.identity for unit in known}) != 1:
        return None
    widest = (sum if summed else max)(unit.widest for unit in known)
    roundings = max(unit.roundings for unit in known) + summed
    stairs = frozenset[StairActivation]().union(*(unit.stairs for unit in known))
    return FeatureUnit(known[0].quantum, widest, roundings, stairs, known[0].divisors)


def _average(module: Any, axes: int, unit: FeatureUnit | None) -> FeatureUnit | None:
    """Return the unit of averages, or None if windows differ or float32 is not precise enough."""
    padded = module.padding not in (0, (0,), (0, 0)) and not module.count_include_pad
    if unit is None or module.ceil_mode or padded:
        return None
    kernel = module.kernel_size
    area = kernel**axes if isinstance(kernel, int) else prod(kernel)
    widest, roundings = unit.widest * area, unit.roundings + area + 1
    # Each rounding is by at most 2⁻²⁴ of a value; two more precede the rounding to integers.
    if (roundings + 2) * widest >= 2**23:
        return None
    divisor = getattr(module, "divisor_override", None) or area
    divisors = (*unit.divisors, divisor)
    return FeatureUnit(unit.quantum / divisor, widest, roundings, unit.stairs, divisors)


def _result_unit(
    module: nn.Module | None, step: GraphStep, incoming: list[FeatureUnit | None]
) -> FeatureUnit | None:
    """Return the unit of a step's result, given those of its inputs."""
    operator = operator_named(step.function) if module is None else operator_of(module)
    if not incoming:
        return None
    effect = operator.effect_if_kept if operator.effect is Effect.ACTIVATION else operator.effect
    if effect in (Effect.PASS, Effect.MOVE) or (effect is Effect.DROPOUT and step.module):
        return incoming[0]  # other inputs are sizes
    if effect is Effect.JOIN:
        return _common(incoming)
    if effect is Effect.AVERAGE and module is not None:
        return _average(module, operator.axes, incoming[0])
    if effect is Effect.ADD and not step.has_numbers:
        # x + x has one input.
        return _common(incoming * 2 if len(incoming) == 1 else incoming, summed=True)
    return None


def readers(net: nn.Module) -> dict[StairLayer, frozenset[StairActivation]]:
    """Return the layers that read values of activations, neither added nor averaged, and these."""
    inputs = _feature_units(net, quantum=1.0)[1]
    return {layer: unit.stairs for layer, unit in inputs.items() if unit and unit.roundings == 1}
