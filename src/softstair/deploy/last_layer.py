"""Conversion of a float last layer to INT8."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from softstair._quantum import fit_quantum
from softstair.convert.conversion import ATTRIBUTE, copy_of, stair_row, swap_modules
from softstair.deploy import nodes
from softstair.deploy.integer import integerise
from softstair.deploy.nodes import ExportError, IntegerNetwork
from softstair.nn import StairLinear, StairWeight, layer_count
from softstair.stair import Stair

INT8 = Stair(tuple(range(-127, 128)), tuple(number - 0.5 for number in range(-126, 128)))
HALF_UNIT = 2**23  # so many roundings of 1 to float32, by at most 2⁻²⁴ each, come to one half


def quantise_last_layer(
    net: nn.Module,
    shape: Sequence[int],
    zero: int = 0,
    scale: float = 1.0,
    dtype: torch.dtype = torch.uint8,
) -> nn.Module:
    """Return a copy of a trained network whose float last layer has INT8 weights.

    The weights become −127 … 127 times a quantum that is fitted to the weights of each class. The
    bias stays in float. The copy is the reference of everything exported from it: its last layer
    sums integers, scales the sums once and adds the bias in float.

    Args:
        net: A trained stair network that ends in a float ``torch.nn.Linear``.
        shape: Shape of one example, as in :func:`integerise`.
        zero: Zero point of the input.
        scale: Scale of the input.
        dtype: Type of the input.

    Returns:
        A network in float32 and ``eval()``, for :func:`integerise` and :func:`verify`.

    Raises:
        ExportError: If the last layer cannot be exact in INT8.

    >>> import softstair as ss
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3),
    ...                       nn.ReLU(), nn.Linear(3, 2))
    >>> net = ss.quantise(model, ss.Stair.ternary(), ss.Stair.ternary(), skip="4").eval()
    >>> int8 = quantise_last_layer(net, shape=(1, 2, 2), zero=128, scale=64.0)
    >>> type(int8[4]).__name__, len(int8[4].weight_stair.stair)
    ('StairLinear', 255)
    >>> integer = integerise(int8, shape=(1, 2, 2), zero=128, scale=64.0)
    >>> x = torch.randint(256, (5, 1, 2, 2), dtype=torch.uint8)
    >>> torch.equal(integer(x), int8((x.float() - 128) / 64))
    True
    """
    net = copy_of(net).cpu().float().eval()
    network = integerise(net, shape, zero, scale, dtype)
    last = network.last
    if not isinstance(last, nodes.Scores):
        raise ExportError.of(last.inputs[0], "this last layer is already quantised")
    module = net.get_submodule(last.name)
    if type(module) is not nn.Linear:
        raise ExportError.of(last.name, f"its {type(module).__name__} is not a Linear layer")
    widest = _widest_input(network, last)
    stair = fit_quantum(module.weight, INT8, per_channel=True)
    weight = StairWeight(stair, layer=layer_count(net))
    layer: StairLinear = StairLinear.from_float(module, weight, last.unit)
    layer.widest_input = widest
    swap_modules(net, {module: layer})
    table = getattr(net, ATTRIBUTE, None)
    if table is not None:
        rows = (
            row if row.name != last.name else stair_row(row.name, row.kind, layer)
            for row in table.rows
        )
        setattr(net, ATTRIBUTE, replace(table, rows=tuple(rows)))
    return net


def _widest_input(network: IntegerNetwork, last: nodes.Scores) -> int:
    """Return the largest integer that a feature of the last layer stands for.

    Features of the float network are rounded levels, or rounded averages of them. Those that are
    off by less than half a unit are rounded to the integers that they stand for.
    """
    source = network.node(last.inputs[0])
    widest = max(abs(source.low), abs(source.high), 1)
    # Three more: of the unit, of the quotient by it, and of the remainder.
    if (_roundings(network, last.name, source) + 3) * widest >= HALF_UNIT:
        raise ExportError.of(last.name, f"float32 cannot average {widest} quanta exactly")
    return widest


def _roundings(network: IntegerNetwork, name: str, node: nodes.Node) -> int:
    """Return how often the features of a node were rounded since their stair, at most."""
    match node:
        case nodes.Steps():
            return 1
        case nodes.Input():
            raise ExportError.of(name, "it reads the input, which has no stair")
        case nodes.SumPool():
            more = math.prod(node.kernel) + 1
        case _:
            more = len(node.inputs) - 1
    return more + max(_roundings(network, name, network.node(source)) for source in node.inputs)
