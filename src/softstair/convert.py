"""quantise(model, …): a float network becomes a stair network."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from softstair import functional
from softstair.fit import fit_quantum
from softstair.graph import Graph, record, trace
from softstair.layers import (
    ACTIVATION_FUNCTIONS,
    ACTIVATION_MODULES,
    Unit,
    input_units,
    number_layers,
)
from softstair.nn import (
    StairActivation,
    StairConv1d,
    StairConv2d,
    StairLayer,
    StairLinear,
    StairModule,
    StairWeight,
)
from softstair.report import ATTRIBUTE, Conversion, Row
from softstair.settings import Settings, check, matches, names
from softstair.stair import Stair

__all__ = ["quantise"]

QUANTISED: dict[type[nn.Module], type[StairLayer]] = {
    nn.Linear: StairLinear,
    nn.Conv1d: StairConv1d,
    nn.Conv2d: StairConv2d,
}
FUNCTIONAL_WEIGHTS = frozenset({"linear", "conv1d", "conv2d", "bilinear"})


def quantise(
    model: nn.Module,
    weights: Any = None,
    features: Any = None,
    noise: Any = "uniform",
    forward: Any = "mode",
    skip: str | Sequence[str] = (),
    example_inputs: Any = None,
    init: Literal["thresholds", "keep"] = "thresholds",
    fit: Literal["layer", "channel"] | None = "layer",
) -> nn.Module:
    """A copy of ``model`` whose weights and features are stairs; ``model`` is left as it was.

    weights, features   a :class:`Stair`, or None to leave them in float
    noise               a family or its name, or an estimator of :mod:`softstair.ste`
    forward             expectation, mode, random or hard
    skip                names of modules (and all inside), or patterns of names, to leave in float
    example_inputs      what the model takes, where symbolic tracing cannot follow it
    init                ``"thresholds"``: the weights start at thresholds, as in the paper;
                        ``"keep"``: they stay, and ``fit`` gives each layer (or channel) the quantum
                        that suits them; ``fit=None`` keeps the stair's own

    Each of the first four may also differ from layer to layer: a sequence with one entry a layer,
    or a mapping from layer numbers and patterns of module names, the first that fits counting.

    :func:`softstair.report` gives the table of what became of every layer.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    >>> net = quantise(model, Stair.ternary(), Stair.ternary(), skip="3")
    >>> [type(layer).__name__ for layer in net]
    ['StairLinear', 'BatchNorm1d', 'StairActivation', 'Linear']
    """
    check(model, weights, features, init, fit)
    settings = Settings(weights, features, noise, forward, names(skip), init, fit)
    net = copy.deepcopy(model)
    graph, traced = _graph(net, example_inputs)
    survey = _survey(net, graph, traced, settings)
    asked = _numbers(graph, survey, settings)
    order = {n: i for i, n in enumerate(sorted(set(asked.values())))}
    numbers = {step: order[number] for step, number in asked.items()}
    activations = {
        step: _activation(settings, survey.names[step], asked[step], numbers[step])
        for step in dict.fromkeys(survey.activations.values())
    }
    for activation in activations.values():
        activation.to(_device(net))
    features_of = {step: activations[first].stair for step, first in survey.activations.items()}
    units = input_units(graph, net, features_of, survey.weights)
    swaps: dict[int, nn.Module] = {}
    calls: dict[int, tuple[str, nn.Module]] = {}
    for step, unit in units.items():
        module = net.get_submodule(survey.names[step])
        place = asked[step], numbers[step]
        swaps[id(module)] = _layer(settings, survey.names[step], module, *place, unit)
    for step, activation in activations.items():
        name = survey.names[step]
        if graph.steps[step].module is None:
            calls[step] = (name, activation.train(net.training))
        else:
            swaps[id(net.get_submodule(name))] = activation
    rows = _rows(net, graph, survey, numbers, activations, swaps)
    _swap(net, swaps)
    if calls:
        graph = functional.rewrite(net, calls)
    setattr(net, ATTRIBUTE, Conversion(rows, graph))
    return net


@dataclass
class Survey:
    """Which steps run what: quantised weights and activations by first use, and the rest."""

    names: dict[int, str] = field(default_factory=dict)
    weights: dict[int, int] = field(default_factory=dict)
    activations: dict[int, int] = field(default_factory=dict)
    floats: dict[int, str] = field(default_factory=dict)
    """Why a step was left in float."""


def _survey(net: nn.Module, graph: Graph, traced: fx.Graph | None, settings: Settings) -> Survey:
    survey, first_use = Survey(), dict[int, int]()
    places = functional.names(traced) if traced is not None else None
    for number, step in enumerate(graph.steps):
        if step.module is not None:
            module = net.get_submodule(step.module)
            first = first_use.setdefault(id(module), number)
            survey.names.setdefault(number, survey.names.get(first, step.module))
            kind = type(module)
            if kind in QUANTISED:
                why = _why_float(settings, "weights", survey.names[first])
                if not isinstance(module._parameters.get("weight"), nn.Parameter):
                    why = "float: its weight is computed, not a parameter"
                target: dict[int, int] | None = survey.weights
            elif kind in ACTIVATION_MODULES:
                why = _why_float(settings, "features", survey.names[first])
                target = survey.activations
            else:
                why, target = _why_foreign(module), None
        elif step.function in ACTIVATION_FUNCTIONS:
            first = number
            survey.names[number] = places[number] if places else f"{step.function} (function)"
            why = _why_float(settings, "features", survey.names[number])
            target = survey.activations
            if not graph.complete and not why:
                why = "float: a function in code that cannot be traced whole; make it a module"
        elif step.function in FUNCTIONAL_WEIGHTS:
            first, target = number, None
            survey.names[number] = places[number] if places else step.function
            why = "float: weights used by a function; make it a module"
        else:
            continue
        if target is not None and not why:
            target[number] = first
            if target is survey.activations:
                _check_in_place(graph, number, survey.names[number])
        elif first == number and why:
            survey.floats[number] = why
    _check_survey(net, survey, settings)
    return survey


def _numbers(graph: Graph, survey: Survey, settings: Settings) -> dict[int, int]:
    """The layer of each first use, as the caller counts; what the layer's entry leaves in float is
    taken out, and a layer of which nothing is left stays without a number of its own."""
    numbers = number_layers(graph, survey.weights, survey.activations)
    settings.check_length(1 + max(numbers.values()))
    for option, group in (("weights", survey.weights), ("features", survey.activations)):
        for step in dict.fromkeys(group.values()):
            if settings.at(option, survey.names[step], numbers[step]) is None:
                survey.floats[step] = f"float: no stair for {option}"
                for use in [use for use, first in group.items() if first == step]:
                    del group[use]
    kept = {*survey.weights.values(), *survey.activations.values()}
    if not kept:
        raise ValueError("weights and features must not be None for every layer, but they are.")
    return {step: numbers[step] for step in kept}


def _why_float(settings: Settings, option: str, name: str) -> str:
    if settings.skips(name):
        return "float: skipped"
    return "" if settings.wants(option, name) else f"float: no stair for {option}"


def _why_foreign(module: nn.Module) -> str:
    if isinstance(module, StairModule | StairLayer):
        raise ValueError("model must be a float network, but it holds stairs already.")
    if isinstance(module, (*QUANTISED, *ACTIVATION_MODULES)):
        return f"float: a subclass of {type(module).__mro__[1].__name__} with code of its own"
    if isinstance(module, nn.Sigmoid | nn.Hardsigmoid | nn.Softmax | nn.LogSigmoid):
        return "float: a gate or a probability, no feature"
    if any(True for _ in module.parameters()):
        normalises = "Norm" in type(module).__name__
        return "float: a normalisation" if normalises else "float: not a Linear, Conv1d or Conv2d"
    return ""


def _check_in_place(graph: Graph, number: int, name: str) -> None:
    """An activation that writes into its input, where that is read, is more than its result."""
    if graph.steps[number].written and graph.is_read_elsewhere(number):
        raise ValueError(
            f"model must take the results of its activations, but {name} works in place on a "
            "tensor that is used again; write y = activation(x), without inplace."
        )


def _check_survey(net: nn.Module, survey: Survey, settings: Settings) -> None:
    known = [name for name, _ in net.named_modules(remove_duplicate=False)]
    known += survey.names.values()
    for pattern in settings.skip:
        if not any(matches(pattern, name) for name in known):
            candidates = ", ".join(dict.fromkeys(survey.names.values()))
            raise ValueError(
                f"skip must name modules of the model, but nothing in it is called {pattern!r}; "
                f"there are {candidates}."
            )
    if not survey.weights and not survey.activations:
        reasons = ", ".join(f"{survey.names[n]} ({why})" for n, why in survey.floats.items())
        raise ValueError(
            f"model must have something to quantise, but {type(net).__name__} has no Linear, "
            f"Conv1d, Conv2d or activation that is not left in float{reasons and ': ' + reasons}."
        )


def _graph(net: nn.Module, example_inputs: Any) -> tuple[Graph, fx.Graph | None]:
    given = _inputs(example_inputs)
    try:
        return trace(net)
    except Exception as failure:  # whatever a model's own code raises when fed with proxies
        if given is None:
            reason = str(failure).strip().split("\n")[0]
            raise ValueError(
                f"model could not be traced symbolically ({type(failure).__name__}: {reason}); "
                "give example_inputs, the arguments of one forward pass."
            ) from None
    try:
        return record(net, given), None
    except Exception as failure:
        reason = str(failure).strip().split("\n")[0]
        raise ValueError(
            "example_inputs must be the arguments of one forward pass of the model, but with "
            f"those given it raised {type(failure).__name__} ({reason.rstrip('.')})."
        ) from None


def _inputs(example_inputs: Any) -> tuple[Any, ...] | None:
    if example_inputs is None or isinstance(example_inputs, Tensor):
        return None if example_inputs is None else (example_inputs,)
    if not isinstance(example_inputs, list | tuple):
        raise ValueError(
            "example_inputs must be a tensor or a tuple of the arguments of one forward pass, "
            f"but {example_inputs!r} was given."
        )
    return tuple(example_inputs)


def _activation(settings: Settings, name: str, asked: int, layer: int) -> StairActivation:
    stair = _stair(settings, "features", name, asked)
    return StairActivation(stair, layer=layer, **settings.shape(name, asked))


def _layer(
    settings: Settings, name: str, module: nn.Module, asked: int, layer: int, unit: Unit | None
) -> StairLayer:
    stair = _stair(settings, "weights", name, asked)
    weight = module.get_parameter("weight")
    if settings.init == "keep" and settings.fit is not None:
        stair = fit_quantum(weight, stair, per_channel=settings.fit == "channel")
    if isinstance(stair.quantum, tuple) and len(stair.quantum) != weight.shape[0]:
        raise ValueError(
            f"weights must have one quantum for each of the {weight.shape[0]} output channels of "
            f"{name}, but {len(stair.quantum)} were given."
        )
    shape = StairWeight(stair, layer=layer, **settings.shape(name, asked))
    quantised: StairLayer = QUANTISED[type(module)].from_float(module, shape)
    if unit is not None:
        quantised.input_quantum, quantised.widest_input = unit.quantum, unit.widest
    if settings.init == "thresholds":
        quantised.start_at_thresholds()
    return quantised


def _device(net: nn.Module) -> torch.device:
    """Where the network is, and its noise must be: that of its first parameter."""
    return next((parameter.device for parameter in net.parameters()), torch.device("cpu"))


def _stair(settings: Settings, option: str, name: str, layer: int) -> Stair:
    stair = settings.at(option, name, layer)
    if not isinstance(stair, Stair):
        raise ValueError(f"{option} must be a softstair.Stair or None, but {stair!r} was given.")
    return stair


def _swap(net: nn.Module, swaps: Mapping[int, nn.Module]) -> None:
    for parent in list(net.modules()):
        for name, child in parent._modules.items():
            if id(child) in swaps:
                assert child is not None
                parent._modules[name] = swaps[id(child)].train(child.training)


def _rows(
    net: nn.Module,
    graph: Graph,
    survey: Survey,
    numbers: Mapping[int, int],
    activations: Mapping[int, StairActivation],
    swaps: Mapping[int, nn.Module],
) -> tuple[Row, ...]:
    rows, called = [], set()
    for number, name in survey.names.items():
        step = graph.steps[number]
        kind = step.function or type(net.get_submodule(name)).__name__
        called.add(name)
        if number in numbers:
            stair = activations.get(number) or _weight_stair(swaps[id(net.get_submodule(name))])
            became = "stair activation" if number in activations else "stair weights"
            shape = (_shape(stair.stair), repr(stair.noise), str(stair.strategy))
            rows.append(Row(name, kind, numbers[number], became, *shape))
        elif number in survey.floats:
            rows.append(Row(name, kind, None, survey.floats[number]))
    for name, module in net.named_modules():
        if type(module) in QUANTISED and name not in called:
            rows.append(Row(name, type(module).__name__, None, "float: never called as a module"))
    return tuple(rows)


def _shape(stair: Stair) -> str:
    if isinstance(stair.quantum, tuple):
        return f"{len(stair)} levels, {len(stair.quantum)} quanta"
    return f"{len(stair)} levels, quantum {stair.quantum:.4g}"


def _weight_stair(layer: nn.Module) -> StairModule:
    assert isinstance(layer, StairLayer)
    return layer.weight_stair
