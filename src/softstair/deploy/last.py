"""The last layer in INT8, where it was trained in float.

What comes of it is a stair network like any other, and the reference of all that is made of it: its
last layer has whole weights too, whose sums are exact, scaled once, and given their bias in float.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from softstair.convert.report import ATTRIBUTE
from softstair.deploy import nodes
from softstair.deploy.integer import integerise
from softstair.deploy.values import ExportError
from softstair.nn import StairLinear, StairWeight, layer_count
from softstair.stair import Stair, fit_quantum

__all__ = ["quantise_last_layer"]

INT8 = Stair(tuple(range(-127, 128)), tuple(number - 0.5 for number in range(-126, 128)))
HALF_A_UNIT = 2**23
"""So many roundings of 1 to float32, each by 2⁻²⁴ at most, make a half of it."""


def quantise_last_layer(
    net: nn.Module, shape: Sequence[int], zero: int = 0, scale: float = 1.0
) -> nn.Module:
    """A copy of a trained network, in float32 and ``eval()``, whose last layer has INT8 weights.

    They are −127 … 127 times a quantum that is fitted to the weights of each class; the bias stays
    as it is. ``shape``, ``zero`` and ``scale`` are those of :func:`integerise`, which takes what
    this returns, as :func:`verify` does.

    >>> import softstair as ss
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3),
    ...                       nn.ReLU(), nn.Linear(3, 2))
    >>> net = ss.quantise(model, ss.Stair.ternary(), ss.Stair.ternary(), skip="4").eval()
    >>> whole = quantise_last_layer(net, shape=(1, 2, 2), zero=128, scale=64.0)
    >>> type(whole[4]).__name__, len(whole[4].weight_stair.stair)
    ('StairLinear', 255)
    >>> integer = integerise(whole, shape=(1, 2, 2), zero=128, scale=64.0)
    >>> x = torch.randint(256, (5, 1, 2, 2), dtype=torch.uint8)
    >>> torch.equal(integer(x), whole((x.float() - 128) / 64))
    True
    """
    net = copy.deepcopy(net).cpu().float().eval()
    made = {node.name: node for node in integerise(net, shape, zero, scale).nodes}
    last = [*made.values()][-1]
    if not isinstance(last, nodes.Scores):
        raise ExportError(
            f"net must end in a layer in float to have it in int8, but {last.inputs[0]} has a "
            "stair for its weights already: export it as it is."
        )
    module = net.get_submodule(last.name)
    if type(module) is not nn.Linear or not bool(torch.isfinite(module.weight).all()):
        raise ExportError(
            f"net must end in a torch.nn.Linear of finite weights to have it in int8, but "
            f"{last.name} is none ({type(module).__name__}): keep its last layer in float."
        )
    widest = _widest(made, last.name, last.inputs[0])
    layer = _quantised(module, layer_count(net), last.unit, widest)
    for parent in net.modules():
        for name, child in parent._modules.items():
            if child is module:
                parent._modules[name] = layer
    _report(net, last.name, layer)
    return net


def _quantised(module: nn.Linear, number: int, unit: float, widest: int) -> StairLinear:
    stair = fit_quantum(module.weight, INT8, per_channel=True)
    layer: StairLinear = StairLinear.from_float(module, StairWeight(stair, layer=number), unit)
    layer.widest_input = widest
    return layer


def _widest(made: Mapping[str, nodes.Node], name: str, source: str) -> int:
    """The most units that a feature of the last layer holds.

    Features of the float network are levels that were rounded, or averages of them, which were
    rounded on their way: those that are off by less than half a unit are found to be the whole
    numbers that they stand for.
    """
    roundings = _roundings(made, name, source) + 3  # its unit, the quotient by it, and what is left
    widest = max(abs(made[source].low), abs(made[source].high), 1)
    if roundings * widest >= HALF_A_UNIT:
        raise ExportError(
            f"the features that {name} takes are sums of up to {widest} quanta, which float32 does "
            "not average exactly enough for int8: average over fewer places, or keep the last "
            "layer in float."
        )
    return widest


def _roundings(made: Mapping[str, nodes.Node], name: str, source: str) -> int:
    """How often the features of a node have been rounded since their stair, at most."""
    match node := made[source]:
        case nodes.Steps():
            return 1
        case nodes.Input():
            raise ExportError(
                f"net must have a stair before its last layer to have that in int8, but {name} "
                "takes the bytes of the input: keep it in float."
            )
        case nodes.SumPool():
            more = node.kernel[0] * node.kernel[1] + 1
        case _:
            more = len(node.inputs) - 1
    return more + max(_roundings(made, name, one) for one in node.inputs)


def _report(net: nn.Module, name: str, layer: StairLinear) -> None:
    """The table of :func:`softstair.report`, as it is now."""
    table = getattr(net, ATTRIBUTE, None)
    if table is not None:
        stair = layer.weight_stair
        told = {"became": "stair weights", "layer": stair.layer, "forward": str(stair.strategy)}
        told |= {"stair": f"{len(stair.stair)} levels, {len(layer.weight)} quanta"}
        told |= {"noise": repr(stair.noise)}
        rows = (replace(row, **told) if row.name == name else row for row in table.rows)
        setattr(net, ATTRIBUTE, replace(table, rows=tuple(rows)))
