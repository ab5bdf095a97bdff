"""Stairs for sums that no activation quantises: where, which, and in which layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import softstair as ss
from networks import make
from softstair.convert.shortcuts import signed
from softstair.nn import StairActivation

TERNARY, UINT4 = ss.Stair.ternary(), ss.Stair.linear(4, quantum=0.25)


def added(net: nn.Module) -> dict[str, int]:
    """The names and layers of the stairs that were added to sums."""
    return {row.name: row.layer for row in ss.report(net).rows if row.kind == "sum" and row.layer}


def test_stairs_are_layers_in_order_of_execution() -> None:
    model = make("resnet")[0]
    net = ss.quantise(model, TERNARY, UINT4)
    # The stem, two stairs of each block, and the shortcut with weights, which runs first in it.
    assert added(net) == {"layer2.0.downsample.1.stair": 3}
    assert ss.Schedule.for_network(net, 1.0).layers == 7
    layers = {row.name: row.layer for row in ss.report(net).rows}
    assert layers["layer2.0.downsample.0"] == 3
    assert layers["layer2.0.conv1"] == layers["layer2.0.relu"] == 4
    assert layers["layer2.0.conv2"] == layers["layer2.0.relu.2"] == 5
    assert layers["fc"] == 6
    branches = ss.quantise(model, TERNARY, UINT4, sums="branches")
    assert added(branches) == {
        "layer1.0.bn2.stair": 2,
        "layer2.0.downsample.1.stair": 4,
        "layer2.0.bn2.stair": 6,
    }
    assert not added(ss.quantise(model, TERNARY, UINT4, sums=None))
    assert not added(ss.quantise(model, TERNARY, None))
    assert not added(ss.quantise(model, TERNARY, UINT4, skip="layer2.0.downsample.1.stair"))


def test_bottlenecks_have_one_stair_each() -> None:
    model = make("mobilenetv2")[0]
    names = [*added(ss.quantise(model, TERNARY, UINT4))]
    assert [name.rpartition(".")[2][:9] for name in names] == [
        "stair",
        "stair_add",
        "stair_add",
        "stair",
    ]
    assert len(added(ss.quantise(model, TERNARY, UINT4, sums="branches"))) == 4


@pytest.mark.parametrize("name", ["mobilenet", "mlp", "transformer", "shared", "branching"])
def test_other_networks_get_no_stairs(name: str) -> None:
    model, x = make(name)
    assert not added(ss.quantise(model, TERNARY, UINT4, example_inputs=x))


def test_stairs_of_sums_are_signed_and_may_be_chosen() -> None:
    model = make("resnet")[0]
    name, int8 = "layer2.0.downsample.1.stair", ss.Stair.linear(8, signed=True, quantum=0.125)
    stair = ss.quantise(model, TERNARY, UINT4).get_submodule(name)
    assert isinstance(stair, StairActivation)
    assert stair.stair == ss.Stair(
        tuple(n / 4 for n in range(-15, 16)), tuple((n - 0.5) / 4 for n in range(-14, 16)), 0.25
    )
    net = ss.quantise(model, TERNARY, {"*.stair": int8, "*": UINT4})
    stair = net.get_submodule(name)
    assert isinstance(stair, StairActivation)
    assert stair.stair == int8
    for given, levels in (
        (ss.Stair.linear(8), (-128.0, 127.0)),
        (ss.Stair.heaviside(), (-1.0, 1.0)),
        (ss.Stair.sign(), (-1.0, 1.0)),
        (ss.Stair((1.0, 3.0), (2.0,)), (-3.0, 3.0)),
        (ss.Stair((0.5, 2.0, 4.0), (1.0, 3.0)), (-4.0, 4.0)),
        (ss.Stair.linear(2, quantum=[0.5, 2.0], axis=1), (-3.0, 3.0)),
    ):
        both = signed(given)
        assert (both.levels[0], both.levels[-1]) == levels
        x = torch.linspace(0.01, levels[1], 50)
        if given.axis is None and given.thresholds[0] > 0:
            assert torch.equal(both(x), given(x).clamp(max=levels[1]))
    with pytest.raises(ValueError, match="thresholds must increase"):
        signed(ss.Stair((0.0, 1.0, 4.0), (0.0, 2.5)))
