"""Integer networks against the trained networks that they were converted from."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor, nn

import softstair as ss
from softstair._errors import SoftstairError
from softstair.deploy import (
    ExportError,
    IntegerNetwork,
    costs,
    integerise,
    quantise_last_layer,
    verify,
)
from softstair.deploy.nodes import Steps, Sum
from softstair.nn import StairActivation

pytestmark = pytest.mark.quick

STAIRS = {
    "heaviside": ss.Stair.heaviside(),
    "sign": ss.Stair.sign(),
    "ternary": ss.Stair.ternary(),
    "ternary, 0.3": ss.Stair.ternary(quantum=0.3),
    "int4, 0.07": ss.Stair.linear(4, signed=True, quantum=0.07, thresholds="midpoint"),
    "uint4, 0.07": ss.Stair.linear(4, signed=False, quantum=0.07, thresholds="midpoint"),
    "int3, floor": ss.Stair.linear(3, signed=True, quantum=0.25, thresholds="floor"),
    "uneven": ss.Stair((-3.0, 0.0, 1.0, 5.0), (-1.5, 0.4, 2.0)),
}
TERNARY = STAIRS["ternary"]


class Residual(nn.Module):
    """A block whose shortcut is added before or after its last stair."""

    def __init__(self, channels: int, before: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm, self.act = nn.BatchNorm2d(channels), nn.ReLU()
        self.second = nn.Conv2d(channels, channels, 1, bias=True)
        self.norm2, self.act2 = nn.BatchNorm2d(channels), nn.ReLU()
        self.before = before

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.second(self.act(self.norm(self.first(x)))))
        return self.act2(y + x) if self.before else self.act2(y) + x


def network(
    seed: int, weights: str, features: str, kind: str, zero: int = 121, scale: float = 64.0
) -> nn.Module:
    """A stair network with unusual statistics."""
    torch.manual_seed(seed)
    channels = 6
    body: list[nn.Module] = {
        "pool after": [nn.ReLU(), nn.MaxPool2d(2)],
        "pool before": [nn.MaxPool2d(3, 2, 1), nn.ReLU()],
        "depthwise": [
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, stride=2, padding=1, groups=channels, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        ],
        "residual before": [nn.ReLU(), Residual(channels, before=True)],
        "residual after": [nn.ReLU(), Residual(channels, before=False)],
        "average": [nn.ReLU(), nn.AvgPool2d(2)],
    }[kind]
    model = nn.Sequential(
        nn.Conv2d(2, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), *body
    )
    size = model(torch.zeros(1, 2, 8, 8)).flatten(1).shape[1]
    model.append(nn.Flatten())
    if kind != "average":
        model.extend([nn.Linear(size, 9, bias=False), nn.BatchNorm1d(9), nn.ReLU()])
        size = 9
    model.append(nn.Linear(size, 4))
    net = ss.quantise(
        model, STAIRS[weights], STAIRS[features], skip=str(len(model) - 1),
        example_inputs=torch.zeros(2, 2, 8, 8),
    ).eval()  # fmt: skip
    norms: list[Any] = [
        module for module in net.modules() if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)
    ]
    for norm in norms:  # weights of either sign, tiny and 0
        norm.momentum = 1.0
        norm.weight.data = torch.randn(norm.num_features)
        norm.weight.data[:3] = torch.tensor([0.0, 1e-6, -1.0])
        norm.bias.data = torch.randn(norm.num_features) * 0.3
        norm.bias.data[2] = 0.0
    # The statistics of real sums, so that every level is reached.
    net.train()((torch.randint(256, (64, 2, 8, 8)) - zero) / scale)
    for norm in norms:
        norm.running_mean.mul_(64).round_().div_(64)
    return net.eval()


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize(
    "kind",
    ["residual before", "pool after", "pool before", "residual after", "depthwise", "average"],
)
@given(
    seed=st.integers(0, 10**6),
    weights=st.sampled_from([name for name in STAIRS if name != "uint4, 0.07"]),
    features=st.sampled_from(list(STAIRS)),
    zero=st.integers(0, 255),
    scale=st.sampled_from([1.0, 16.0, 64.0, 128.0]),
    int8=st.booleans(),
)
def test_integer_network_equals_the_trained_one(
    kind: str, seed: int, weights: str, features: str, zero: int, scale: float, int8: bool
) -> None:
    net = network(seed, weights, features, kind, zero, scale)
    net = quantise_last_layer(net, (2, 8, 8), zero, scale) if int8 else net
    integer = integerise(net, (2, 8, 8), zero, scale)
    x = torch.randint(256, (12, 2, 8, 8), dtype=torch.uint8)
    comparison = verify(net, integer, x)["integer network"]
    assert comparison.mismatches == 0, str(comparison)
    assert comparison.compared["class"] == 12
    stairs = sum(isinstance(module, StairActivation) for module in net.modules())
    assert len(comparison.compared) == 1 + stairs + int8  # of INT8 the scores too
    assert_sums_stay_within_their_bounds(integer, x)


def assert_sums_stay_within_their_bounds(integer: IntegerNetwork, x: Tensor) -> None:
    results = integer.features(x)
    for node in integer.nodes:
        if isinstance(node, Sum):
            sums = results[node.name].transpose(0, 1).flatten(1)
            assert bool((sums >= node.least[:, None]).all())
            assert bool((sums <= node.greatest[:, None]).all())


def test_sums_on_a_threshold_have_the_level_of_the_float_network() -> None:
    """Every sum that can occur, compared with the float network's level."""
    net = linear_network()
    net.get_parameter("1.weight").data = torch.tensor([[1.0], [1.0], [-1.0]])
    norm: Any = net.get_submodule("2")
    norm.weight.data = torch.tensor([1.0, -1.0, 0.5])
    norm.running_mean = torch.tensor([7.5, 7.5, 7.0])
    norm.running_var = torch.ones(3) - norm.eps
    integer = integerise(net, (1, 1, 1), zero=100, scale=1.0)
    x = torch.arange(256, dtype=torch.uint8).reshape(-1, 1, 1, 1)
    assert verify(net, integer, x)["integer network"].mismatches == 0
    (steps,) = (node for node in integer.nodes if isinstance(node, Steps))
    assert steps.thresholds[0].tolist() == [7, 8]  # −½ and ½ of s − 7.5, each met exactly


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_steps_count_the_thresholds_that_are_reached(
    seed: int, channels: int, values: int, steps: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    table = torch.randint(-20, 20, (channels, values, steps), generator=draw)
    table[torch.rand(table.shape, generator=draw) < 0.1] = 2**62  # never reached
    table[torch.rand(table.shape, generator=draw) < 0.1] = -(2**62)  # always
    table = table.sort(-1).values
    sums = torch.randint(-25, 25, (2, channels, 3, 2), generator=draw)
    shortcut = torch.randint(-7, -7 + values, sums.shape, generator=draw)
    levels = tuple(range(-1, steps))
    node = Steps("steps", (), -1, steps - 1, table, levels, first=-7)
    alone = replace(node, thresholds=table[:, 0])
    for n, c, y, x in np.ndindex(*sums.shape):
        rows = table[c, shortcut[n, c, y, x] + 7], table[c, 0]
        wide, narrow = (levels[int((sums[n, c, y, x] >= row).sum())] for row in rows)
        assert node.run(sums, shortcut)[n, c, y, x] == wide
        assert alone.run(sums)[n, c, y, x] == narrow
        assert replace(alone, axis=3).run(sums.movedim(1, 3))[n, y, x, c] == narrow
    assert node.run(sums[:0], shortcut[:0]).shape == sums[:0].shape


def test_a_mismatch_is_counted_and_located() -> None:
    net = network(3, "ternary", "ternary", "pool after")
    integer = integerise(net, (2, 8, 8), 121, 64.0)
    x = torch.randint(256, (4, 2, 8, 8), dtype=torch.uint8)
    steps = next(node for node in integer.nodes if isinstance(node, Steps))
    steps.thresholds[2:] += 40
    comparison = verify(net, integer, x)["integer network"]
    assert comparison.mismatches > 0
    assert comparison.first is not None
    layer, example, place, expected, actual = comparison.first
    assert layer == steps.name
    assert place[0] >= 2
    assert expected != actual
    assert f"the first in {layer}, example {example}" in str(comparison)
    with pytest.raises(ValueError, match="silent must give the result of"):
        verify(net, integer, x, {"silent": lambda _: {}})


def linear_network(inputs: int = 1) -> nn.Module:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, 3, bias=False), nn.BatchNorm1d(3), nn.ReLU(),
        nn.Linear(3, 2),
    )  # fmt: skip
    return ss.quantise(model, TERNARY, TERNARY, skip="4").eval()


@pytest.mark.parametrize(
    ("zero", "scale", "field"),
    [(120.7, 64.0, "zero"), (256, 64.0, "zero"), (True, 1.0, "zero"), (0, 63.8, "scale"),
     (0, -2.0, "scale"), (0, float("inf"), "scale")],
)  # fmt: skip
def test_inputs_that_cannot_be_exact_raise_an_error(zero: Any, scale: Any, field: str) -> None:
    with pytest.raises(ExportError, match=f"^{field} must be") as caught:
        integerise(linear_network(4), (1, 2, 2), zero, scale)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "x",
    [torch.zeros(1, 1, 2, 2), torch.zeros(1, 2, 2, 2, dtype=torch.uint8),
     np.zeros((1, 1, 2, 2), np.uint8)],
)  # fmt: skip
def test_only_bytes_of_the_right_shape_are_accepted(x: Any) -> None:
    net = linear_network(4)
    integer = integerise(net, (1, 2, 2))
    with pytest.raises(SoftstairError, match=r"x must be uint8 of shape \(N, 1, 2, 2\)"):
        integer(x)
    with pytest.raises(SoftstairError, match=r"x must be uint8 of shape \(N, 1, 2, 2\)"):
        verify(net, integer, x)


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 9, 9), (2, 1, 1), 8, "abc", (2, 8.0, 8), (0, 8)])
def test_a_wrong_shape_is_said_in_a_sentence(shape: Any) -> None:
    net = network(0, "ternary", "ternary", "depthwise")
    with pytest.raises(SoftstairError, match="shape") as caught:
        integerise(net, shape)
    assert len(str(caught.value)) < 120


def test_an_integer_network_prints_a_line_for_each_node() -> None:
    net = network(0, "ternary", "ternary", "depthwise")
    integer = integerise(net, (2, 8, 8), 100, 64.0)
    first, *lines = repr(integer).splitlines()
    assert first.split() == ["name", "node", "inputs", "shape", "from", "to"]
    assert [line.split()[0] for line in lines] == [node.name for node in integer.nodes]
    assert lines[0].split() == ["input", "Input", "2×8×8", "-100", "155"]
    assert "tensor" not in repr(integer)


def test_costs_are_those_of_the_layers() -> None:
    net = network(0, "ternary", "ternary", "depthwise")
    by_name = {cost.name: cost for cost in costs(integerise(net, (2, 8, 8)))}
    first = by_name["0"]
    assert (first.weights, first.weight_bits, first.bytes) == (108, 2, 27)
    assert first.products == 6 * 8 * 8 * 2 * 9
    assert by_name["3"].products == 6 * 4 * 4 * 9  # depthwise, stride 2
    assert first.sum_bits == 1 + max(first.high.bit_length(), (-first.low - 1).bit_length())


def test_a_norm_without_statistics_raises_an_error() -> None:
    net: Any = linear_network(4)
    net[2].running_mean = None
    with pytest.raises(ExportError, match="cannot export '2': it has no running statistics"):
        integerise(net, (1, 2, 2))


def test_sums_that_float32_rounds_raise_an_error() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4096, 2, bias=False), nn.BatchNorm1d(2),
                          nn.ReLU(), nn.Linear(2, 2))  # fmt: skip
    net = ss.quantise(
        model, ss.Stair.linear(8, signed=True, thresholds="floor"), TERNARY, skip="4"
    ).eval()
    net.get_parameter("1.weight").data.fill_(127.0)
    with pytest.raises(ExportError, match="'1': its sums reach 2²⁴"):
        integerise(net, (1, 64, 64), 0, 1.0)


def test_a_norm_without_weights_after_a_pooling_is_exact() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 3, 1, bias=False), nn.MaxPool2d(2), nn.BatchNorm2d(3, affine=False),
        nn.ReLU(), nn.Flatten(), nn.Linear(12, 2),
    )  # fmt: skip
    net = ss.quantise(model, TERNARY, TERNARY, skip="5").eval()
    x = torch.randint(256, (9, 1, 4, 4), dtype=torch.uint8)
    integer = integerise(net, (1, 4, 4), 100, 64.0)
    assert verify(net, integer, x)["integer network"].mismatches == 0


def test_float_network_is_named_as_such() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    net = ss.quantise(model, ss.Stair.ternary(), ss.Stair.ternary(), skip="3").eval()
    integer = integerise(net, (1, 2, 2))
    x = torch.zeros(3, 1, 2, 2, dtype=torch.uint8)
    for call in (lambda: verify(model, integer, x), lambda: integerise(model, (1, 2, 2))):
        with pytest.raises(ValueError, match=r"nothing in it is quantised.*: pass the") as error:
            call()
        assert error.value.field == "net"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"integer must be the integer network of .*integerise"):
        verify(net, net, x)  # type: ignore[arg-type]
    other = nn.Sequential(*list(net)[:2], nn.Identity(), net[2], net[3])
    with pytest.raises(ValueError, match=r"net must be the network .*'2' is not an activation"):
        verify(other, integer, x)


def diverged(name: str, value: float) -> nn.Module:
    net = linear_network(4)
    tensor = dict([*net.named_parameters(), *net.named_buffers()])[name]
    tensor.data.view(-1)[0] = value
    return net


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["1.weight", "2.weight", "2.bias", "2.running_mean", "2.running_var", "4.weight",
             "4.bias"],
)  # fmt: skip
def test_a_diverged_network_is_refused_by_name(name: str, value: float) -> None:
    layer, _, part = name.partition(".")
    net = diverged(name, value)
    for call in (integerise, quantise_last_layer):
        with pytest.raises(ExportError, match=f"cannot export '{layer}': its {part} has NaN"):
            call(net, (1, 2, 2))
    summary = ss.report(net, (1, 2, 2))
    assert summary.exports_exactly is False
    assert part in summary.conclusion


@pytest.mark.parametrize(
    ("name", "shown"), [("1", "1"), ("3", "3"), ("4", "4"), ("", "the network")]
)
@pytest.mark.parametrize("before", [False, True])
def test_forward_hooks_are_refused_by_name(name: str, shown: str, before: bool) -> None:
    """They may change the result of evaluation, and no integer network runs them."""
    net = linear_network(4)
    module = net.get_submodule(name)
    handle = (
        module.register_forward_pre_hook(lambda *_: None)
        if before
        else module.register_forward_hook(lambda module, x, y: -y)
    )
    with pytest.raises(ExportError, match=f"cannot export '{shown}': it has a forward hook"):
        integerise(net, (1, 2, 2))
    assert "forward hook" in ss.report(net, (1, 2, 2)).conclusion
    handle.remove()
    integerise(net, (1, 2, 2))


def test_hooks_of_an_annealer_are_not_refused() -> None:
    net = linear_network(4).train()
    schedule = ss.Schedule(layers=1, period=2)
    annealer = ss.Annealer(net, schedule)
    for _ in range(3):
        annealer.step()
    assert net._forward_hooks
    assert any(module._forward_pre_hooks for module in net.modules())
    integerise(net.eval(), (1, 2, 2))


class Dropping(nn.Module):
    """A dropout after the last layer: as a function, by the mode or always."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU())
        self.last, self.always = nn.Linear(3, 2), always

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.last(self.body(x)), 0.5, self.always or self.training)


@pytest.mark.parametrize("skip", ["last", ()])
def test_a_dropout_that_is_always_on_is_refused(skip: Any) -> None:
    x = torch.randint(256, (9, 1, 2, 2), dtype=torch.uint8)
    for always in (False, True):
        net = ss.quantise(Dropping(always), TERNARY, TERNARY, skip=skip).eval()
        if always:
            with pytest.raises(ExportError, match="'dropout'"):
                integerise(net, (1, 2, 2))
        else:
            integer = integerise(net, (1, 2, 2))
            assert verify(net, integer, x)["integer network"].mismatches == 0


def test_levels_far_apart_are_refused_at_once() -> None:
    """A table of every integer between them took all of the memory."""
    far = ss.Stair((0.0, 1000.0, 1000.00001), (500.0, 1000.000005), quantum=0.00001)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    net = ss.quantise(model, TERNARY, far, skip="3").eval()
    with pytest.raises(ExportError, match=r"cannot export '2': .*65,536"):
        integerise(net, (1, 2, 2))
    assert "65,536" in ss.report(net, (1, 2, 2)).conclusion
    for stair in (ss.Stair.linear(16), ss.Stair((0, 2**16 - 1), (1,))):
        integerise(ss.quantise(model, TERNARY, stair, skip="3").eval(), (1, 2, 2))
