"""Which stair belongs to which layer, and where features are whole multiples of a quantum.

A layer is a stair activation with all the weights that feed it. Weights without one of their own
join the next activation downstream; weights with none downstream are a layer of their own. Layers
are numbered by order of execution, and a module that runs more than once belongs to its first use.
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from softstair.graph import Graph, Step
from softstair.stair import Stair

__all__ = ["ACTIVATION_FUNCTIONS", "ACTIVATION_MODULES", "Unit", "input_units", "number_layers"]

ACTIVATION_MODULES: tuple[type[nn.Module], ...] = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.RReLU,
    nn.ELU,
    nn.CELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Softplus,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Tanh,
)
"""What a stair replaces. Sigmoids and softmaxes make gates and probabilities: left alone."""

ACTIVATION_FUNCTIONS = frozenset(
    "relu relu6 leaky_relu elu celu selu gelu silu mish softplus hardswish hardtanh tanh".split()
)

# Whatever picks, moves or adds multiples of a quantum, or pads them with 0, gives multiples of it.
KEEPING_MODULES: tuple[type[nn.Module], ...] = (
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.ZeroPad1d,
    nn.ZeroPad2d,
    nn.ReflectionPad2d,
    nn.ReplicationPad2d,
    nn.PixelShuffle,
    nn.ChannelShuffle,
    nn.ReLU,
)
MOVING_FUNCTIONS = frozenset(
    "flatten reshape view permute transpose squeeze unsqueeze contiguous clone getitem chunk split "
    "narrow max_pool1d max_pool2d adaptive_max_pool2d relu roll flip expand repeat".split()
)
JOINING_FUNCTIONS = frozenset("cat concat stack".split())
ADDING_FUNCTIONS = frozenset("add iadd sub isub neg".split())


def number_layers(
    graph: Graph, weights: Mapping[int, int], activations: Mapping[int, int]
) -> dict[int, int]:
    """The layer of each first-use step.

    ``weights`` and ``activations`` map every step that runs a quantised one to the step of its
    first use.
    """
    consumers = graph.consumers()
    keys: dict[int, int] = {first: first for first in activations.values()}
    for step, first in weights.items():
        if step == first:
            found = _next_activation(consumers, step, activations)
            keys[step] = step if found is None else activations[found]
    order = {key: number for number, key in enumerate(sorted(set(keys.values())))}
    return {step: order[key] for step, key in keys.items()}


def _next_activation(
    consumers: list[list[int]], start: int, activations: Mapping[int, int]
) -> int | None:
    """The first activation to run that takes from ``start``, through anything else."""
    waiting, seen, found = list(consumers[start]), set(), []
    while waiting:
        step = waiting.pop()
        if step in activations:
            found.append(step)
        elif step not in seen:
            seen.add(step)
            waiting.extend(consumers[step])
    return min(found, default=None)


class Unit(NamedTuple):
    """Features are whole multiples of ``quantum``, of at most ``widest`` quanta either way."""

    quantum: float
    widest: int


def input_units(
    graph: Graph, net: nn.Module, features: Mapping[int, Stair], weights: Mapping[int, int]
) -> dict[int, Unit | None]:
    """For each first use of quantised weights, the unit of what all its uses take, if any."""
    unit: list[Unit | None] = []
    taken: dict[int, set[Unit | None]] = {}
    for number, step in enumerate(graph.steps):
        if number in weights:
            # A layer called as a module takes its features first.
            incoming = unit[step.inputs[0]] if step.inputs else None
            taken.setdefault(weights[number], set()).add(incoming)
        if number in features:
            unit.append(_unit(features[number]))
        else:
            unit.append(_kept(net, step, [unit[source] for source in step.inputs]))
            # All that shares the memory holds the old values, the new ones, or some of each.
            for source in step.written:
                unit[source] = _common([unit[source], unit[number]])
    return {first: _common(list(units)) for first, units in taken.items()}


def _unit(stair: Stair) -> Unit | None:
    if stair.integers is None or isinstance(stair.quantum, tuple):
        return None
    return Unit(stair.quantum, max(map(abs, stair.integers)))


def _common(units: list[Unit | None], summed: bool = False) -> Unit | None:
    known = [unit for unit in units if unit is not None]
    if len(known) < len(units) or len({unit.quantum for unit in known}) != 1:
        return None
    widths = [unit.widest for unit in known]
    return Unit(known[0].quantum, sum(widths) if summed else max(widths))


def _kept(net: nn.Module, step: Step, incoming: list[Unit | None]) -> Unit | None:
    """The unit of a step's result, given those of what it takes."""
    if not incoming:
        return None
    if step.module is not None:
        keeps = isinstance(net.get_submodule(step.module), KEEPING_MODULES)
        return incoming[0] if keeps else None
    if step.function in MOVING_FUNCTIONS:
        return incoming[0]  # the others are sizes
    if step.function in JOINING_FUNCTIONS:
        return _common(incoming)
    if step.function in ADDING_FUNCTIONS and not step.has_numbers:
        # x + x is one source taken twice.
        return _common(incoming * 2 if len(incoming) == 1 else incoming, summed=True)
    return None
