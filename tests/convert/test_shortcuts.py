"""Stairs for sums that no activation quantises, and for shortcuts: where, and which."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    branches = ss.quantise(model, TERNARY, UINT4, options=BRANCHES)
    assert added(branches) == {
        "layer1.0.bn2.stair": 2,
        "layer2.0.downsample.1.stair": 4,
        "layer2.0.bn2.stair": 6,
    }
    assert not added(ss.quantise(model, TERNARY, UINT4, options=ss.QuantiseOptions(sums=None)))
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
    assert len(added(ss.quantise(model, TERNARY, UINT4, options=BRANCHES))) == 4


@pytest.mark.parametrize("name", ["mobilenet", "mlp", "transformer", "shared", "branching"])
def test_other_networks_get_no_stairs(name: str) -> None:
    model, x = make(name)
    skip = "attention" if name == "transformer" else ()
    assert not added(ss.quantise(model, TERNARY, UINT4, skip=skip, example_inputs=x))


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


UINT8 = ss.Stair.linear(8, quantum=0.05)
BYTES, WIDE = ss.QuantiseOptions(shortcuts="uint8"), ss.QuantiseOptions(shortcuts=UINT8)
BRANCHES = ss.QuantiseOptions(sums="branches")


def stairs(net: nn.Module) -> dict[str, tuple[int, ss.Stair]]:
    """The layer and the stair of each activation, by name."""
    modules = net.named_modules()
    return {name: (m.layer, m.stair) for name, m in modules if isinstance(m, StairActivation)}


class Block(nn.Module):
    """A pooled activation, which two convolutions read, and to which one of them is added."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.left, self.right = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.last = nn.Conv2d(4, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(x)), 2)
        x = F.relu(self.left(x) + x) + F.relu(self.right(x))
        return self.last(F.relu(x))


def test_weights_read_shortcuts_through_a_second_stair() -> None:
    torch.manual_seed(0)
    model = Block()
    net = ss.quantise(model, TERNARY, UINT4, options=WIDE, skip="last").eval()
    x = torch.randn(2, 3, 8, 8)
    ternary = lambda name: TERNARY(net.get_submodule(name).weight)
    sums = lambda name, y: F.conv2d(y, ternary(name), net.get_submodule(name).bias, padding=1)
    wide = F.max_pool2d(UINT8(sums("stem", x)), 2)
    left = UINT8(sums("left", UINT4(wide)) + wide)
    total = left + UINT8(sums("right", UINT4(wide)))
    expected = F.conv2d(UINT4(total), net.last.weight, net.last.bias)
    torch.testing.assert_close(net(x), expected, rtol=1e-5, atol=1e-5)
    # Both convolutions read one stair, of the layer whose features it quantises again.
    assert stairs(net) == {
        "stair_relu": (0, UINT8),
        "left.input_stair": (0, UINT4),
        "stair_relu_1": (1, UINT8),
        "stair_relu_2": (2, UINT8),
        "stair_relu_3": (3, UINT4),
    }
    assert [row.name for row in ss.report(net).rows].count("left.input_stair") == 1


def test_shortcuts_follow_the_bits_of_their_layers() -> None:
    model = make("resnet")[0]
    plain = stairs(ss.quantise(model, "int2", skip="fc"))
    net = ss.quantise(model, "int2", skip="fc", options=BYTES)
    wide = {name: len(stair) for name, (_, stair) in stairs(net).items()}
    # Features that are added, the shortcut with weights, and what the first block reads.
    assert wide == {
        **dict.fromkeys(plain, 4),
        "relu": 256,
        "layer1.0.conv1.input_stair": 4,
        "layer2.0.downsample.1.stair": 256,
    }
    assert {name: layer for name, (layer, _) in stairs(net).items() if name in plain} == {
        name: layer for name, (layer, _) in plain.items()
    }
    assert ss.Schedule.for_network(net, 1.0).layers == 6
    # A layer that has as many levels needs no second stair; one in float has none.
    for bits, count in (("int8/uint8", 256), ("int8/float", 0)):
        mixed = stairs(ss.quantise(model, {"conv1": bits, "*": "int2"}, options=BYTES))
        assert "layer1.0.conv1.input_stair" not in mixed
        assert len(mixed["relu"][1] if "relu" in mixed else ()) == count
    signs = stairs(ss.quantise(model, "ternary", options=BYTES))
    assert signs["relu"][1].integers == tuple(range(-128, 128))
    names = {"layer1.0.conv1.input_stair": "int8", "*": "int2"}
    with pytest.raises(ValueError, match="fits none"):
        ss.quantise(model, names, options=BYTES)


def test_second_stairs_load_copy_and_learn() -> None:
    torch.manual_seed(0)
    model, batches = Block(), [torch.randn(8, 3, 8, 8) for _ in range(2)]
    build = lambda: ss.quantise(model, "int3", options=BYTES, quanta="learned", skip="last")
    net = build()
    quanta = ss.calibrate(net, batches)
    assert quanta["left.input_stair"] > 10 * quanta["stair_relu"]
    net(batches[0]).square().mean().backward()
    for stair in ("left.input_stair", "stair_relu"):
        assert net.get_submodule(stair).log_ratio.grad.abs() > 0
    other = build()
    other.load_state_dict(net.state_dict())
    for same in (other, copy.deepcopy(net)):
        assert torch.equal(same.eval()(batches[0]), net.eval()(batches[0]))


def test_features_that_are_concatenated_or_added_to_such_keep_their_stair() -> None:
    class Joined(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.stem(x))
            y = F.relu(self.left(x) + x)
            y = F.relu(self.right(y)) + torch.cat([x[:, :2], y[:, 2:]], 1)
            z = F.relu(self.last(F.relu(y)))
            return z + F.relu(self.last(F.relu(y)))

    net = ss.quantise(Joined(), TERNARY, UINT4, options=WIDE)
    wide = [name for name, (_, stair) in stairs(net).items() if stair == UINT8]
    assert wide == ["stair_relu_4", "stair_relu_6"]


@pytest.mark.parametrize("form", ["iadd", "add_", "alias"])
def test_values_that_are_written_later_are_read_as_they_are_then(form: str) -> None:
    class Written(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.stem(x))
            y = x
            if form == "add_":
                x.add_(F.relu(self.left(x)))
            else:
                x += F.relu(self.left(x))
            return self.last(F.relu(self.right(y if form == "alias" else x)))

    torch.manual_seed(0)
    net = ss.quantise(Written(), TERNARY, UINT4, options=WIDE, skip="last").eval()
    x = torch.randn(2, 3, 8, 8)
    ternary = lambda name: TERNARY(net.get_submodule(name).weight)
    sums = lambda name, y: F.conv2d(y, ternary(name), net.get_submodule(name).bias, padding=1)
    wide = UINT8(sums("stem", x))
    total = wide + UINT8(sums("left", UINT4(wide)))
    expected = F.conv2d(UINT4(sums("right", total)), net.last.weight, net.last.bias)
    torch.testing.assert_close(net(x), expected, rtol=1e-5, atol=1e-5)


def test_each_place_has_a_second_stair_and_the_noise_of_its_layer() -> None:
    class Twice(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.stem(x))
            x = F.relu(self.left(x) + x)
            return self.last(F.relu(self.left(x) + x))

    forward = ["random", "mode", "mode"]
    net = ss.quantise(Twice(), TERNARY, UINT4, options=WIDE, skip="last", forward=forward)
    second = {n: m for n, m in net.named_modules() if "input_stair" in n}
    assert {n: (m.layer, m.strategy) for n, m in second.items()} == {
        "left.input_stair": (0, "random"),
        "left.input_stair_": (1, "mode"),
    }


@pytest.mark.parametrize("skip", ["left", ()])
def test_layers_in_float_read_shortcuts_as_they_are(skip: str) -> None:
    bits = {"*": "int2"} if skip else {"left": "float/uint2", "*": "int2"}
    net = ss.quantise(Block(), bits, options=BYTES, skip=skip).eval()
    features: list[Tensor] = []
    for layer in (net.left, net.right):
        layer.register_forward_pre_hook(lambda _, x: features.append(x[0]))
    net(torch.randn(2, 3, 8, 8))
    assert [len(x.unique()) <= 4 for x in features] == [False, True]


def test_wrong_shortcuts_raise() -> None:
    for value in ("uint9", 8, [UINT8], "uint4", "int8"):
        with pytest.raises(ValueError, match="shortcuts must be"):
            ss.quantise(Block(), "int4", options=ss.QuantiseOptions(shortcuts=value))
    with pytest.raises(ValueError, match="skip must name modules"):
        ss.quantise(Block(), "int4", options=BYTES, skip="*.input_stair")

    class Hidden(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() < 1e9 else x

    with pytest.raises(ValueError, match=r"shortcuts must be None, since torch\.fx cannot trace"):
        ss.quantise(Hidden(), "int4", options=BYTES, example_inputs=torch.randn(2, 3, 8, 8))
    with pytest.raises(ValueError, match="adds no quantised features"):
        ss.quantise(make("mlp")[0], "int4", options=BYTES)
