"""Which stair belongs to which layer, and where features are whole multiples of a quantum.

A layer is a stair activation with all the weights that feed it. Weights without one of their own
join the next activation downstream; weights with none downstream are a layer of their own. Layers
are numbered by order of execution, and a module that runs more than once belongs to its first use.
"""

from collections.abc import Mapping

from torch import nn

from softstair.graph import Graph, Step
from softstair.stair import Stair

__all__ = ["ACTIVATION_FUNCTIONS", "ACTIVATION_MODULES", "input_quanta", "number_layers"]

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

IN_PLACE = frozenset("iadd isub imul itruediv".split())

Key = int
"""The step of first use: of an activation, or of weights that have no activation downstream."""


def number_layers(
    graph: Graph, weights: Mapping[int, int], activations: Mapping[int, int]
) -> dict[int, int]:
    """The layer of each first-use step.

    ``weights`` and ``activations`` map every step that runs a quantised one to the step of its
    first use.
    """
    consumers = graph.consumers()
    keys: dict[int, Key] = {first: first for first in activations.values()}
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


def input_quanta(
    graph: Graph, net: nn.Module, features: Mapping[int, Stair], weights: Mapping[int, int]
) -> dict[int, float | None]:
    """For each first use of quantised weights, the quantum of what all its uses take, if any."""
    unit: list[float | None] = []
    for number, step in enumerate(graph.steps):
        if number in features:
            unit.append(_unit(features[number]))
        else:
            unit.append(_kept(net, step, [unit[source] for source in step.inputs]))
            if step.writes or (step.function in IN_PLACE and unit[-1] is None):
                for source in step.inputs:  # what was written into is no multiple any more
                    unit[source] = None
    taken: dict[int, set[float | None]] = {}
    for number, first in weights.items():
        sources = graph.steps[number].inputs
        # A layer called as a module takes its features first.
        taken.setdefault(first, set()).add(unit[sources[0]] if sources else None)
    return {first: units.pop() if len(units) == 1 else None for first, units in taken.items()}


def _unit(stair: Stair) -> float | None:
    whole = stair.integers is not None and isinstance(stair.quantum, float)
    return stair.quantum if whole and isinstance(stair.quantum, float) else None


def _kept(net: nn.Module, step: Step, incoming: list[float | None]) -> float | None:
    """The unit of a step's result, given those of what it takes."""
    if not incoming:
        return None
    if step.module is not None:
        keeps = isinstance(net.get_submodule(step.module), KEEPING_MODULES)
        return incoming[0] if keeps else None
    if step.function in MOVING_FUNCTIONS:
        return incoming[0]  # the others are sizes
    adds = step.function in ADDING_FUNCTIONS and not step.has_numbers
    if adds or step.function in JOINING_FUNCTIONS:
        return incoming[0] if len(set(incoming)) == 1 else None
    return None
