"""The quanta of which features are integer multiples, and the stairs that must share one."""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from torch import nn

from softstair.convert.conversion import graph_of, is_traced
from softstair.convert.graph import GraphStep
from softstair.convert.ops import Effect, Operator, called
from softstair.nn import StairActivation, StairLayer, stair_modules
from softstair.stair import Quantum


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
    """Return the units of the steps' results, and of the layers' inputs, if torch.fx traced them.

    With ``quantum``, as if it were that of all activations.
    """
    units: list[FeatureUnit | None] = []
    inputs: dict[StairLayer, list[FeatureUnit | None]] = {}
    if not is_traced(net):
        return [], {}
    for number, step in enumerate(graph_of(net, training=False).steps):
        module, operator = called(net, step)
        if isinstance(module, StairActivation):
            units.append(_unit(module, quantum))
            continue
        incoming = [units[source] for source in step.inputs]
        if isinstance(module, StairLayer):  # it takes its features first
            inputs.setdefault(module, []).append(incoming[0] if incoming else None)
        units.append(_result_unit(module, operator, step, incoming))
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
    module: nn.Module | None,
    operator: Operator,
    step: GraphStep,
    incoming: list[FeatureUnit | None],
) -> FeatureUnit | None:
    """Return the unit of a step's result, given those of its inputs."""
    if not incoming:
        return None
    effect = operator.effect_if_kept if operator.effect is Effect.ACTIVATION else operator.effect
    if effect in (Effect.PASS, Effect.MOVE) or (
        effect is Effect.DROPOUT and (step.module or step.is_off)
    ):
        return incoming[0]  # other inputs are sizes
    if effect is Effect.JOIN:
        return _common(incoming)
    if effect is Effect.AVERAGE and module is not None:
        return _average(module, operator.axes, incoming[0])
    if effect is Effect.ADD and not step.has_numbers:
        # x + x has one input.
        return _common(incoming * 2 if len(incoming) == 1 else incoming, summed=True)
    return None
