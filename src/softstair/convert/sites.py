"""Sites: the modules and function calls of a network that ``quantise`` replaces or reports.

A quantised layer is an activation and all the weights that feed it. Weights without an activation
of their own join the next one downstream; weights with none downstream are a layer of their own.
Layers are numbered in order of execution. Weights that run several times belong to their first use.
Each call of an activation is a site of its own: that of a module ``relu`` which is called twice is
named ``relu``, then ``relu.2``. A stair that is added to a sum counts as an activation.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from softstair import _check
from softstair.convert.graph import Graph
from softstair.convert.ops import Effect, Operator, called
from softstair.convert.options import PER_LAYER, LayerOptions, hint, matches
from softstair.convert.read import Model
from softstair.nn import StairActivation, StairLayer, StairModule
from softstair.stair import Stair


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
            name = model.call_names[number] if model.call_names else f"{step.function} (function)"
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
        if (why := why_float(site, model.graph, options)) is not None:
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
    if not _may_have_stair(site, options):
        return f"no stair for {site.option}"
    if module is None:
        incomplete = "a function in code that cannot be traced whole; make it a module"
        return "" if graph.complete else incomplete
    if site.is_weights and not isinstance(module._parameters.get("weight"), nn.Parameter):
        return "its weight is computed, not a parameter"
    return ""


def _may_have_stair(site: Site, options: LayerOptions) -> bool:
    """Return False if a site has no stair, whatever the number of its layer will be."""
    stairs = getattr(options, site.option)
    if not isinstance(stairs, Mapping):
        return stairs is not None
    fitting = (key for key in stairs if isinstance(key, int) or matches(key, site.name))
    first = next(fitting, None)
    return options.is_named or isinstance(first, int) or stairs.get(first) is not None


def entry_for(site: Site, option: str, options: LayerOptions) -> Any:
    """Return the value of an option for a site whose layer has a number."""
    value = getattr(options, option)
    if not isinstance(value, Mapping):
        return value[site.layer] if isinstance(value, list | tuple) else value
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
        value = getattr(options, option)
        for key in value if isinstance(value, Mapping) else ():
            if not isinstance(key, int) and not matches(key, *names):
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
