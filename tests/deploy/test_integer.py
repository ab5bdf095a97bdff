"""Integer networks beside the trained ones, on networks that nobody has seen before."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import softstair as ss
from softstair.deploy import (
    ExportError,
    IntegerNetwork,
    costs,
    integerise,
    quantise_last_layer,
    verify,
)
from softstair.deploy.nodes import Steps, Sum
from softstair.deploy.thresholds import search
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


class Residual(nn.Module):
    """A block whose shortcut is added before, or after, its last stair."""

    def __init__(self, channels: int, before: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.act = nn.ReLU()
        self.second = nn.Conv2d(channels, channels, 1, bias=True)
        self.norm2 = nn.BatchNorm2d(channels)
        self.act2 = nn.ReLU()
        self.before = before

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.second(self.act(self.norm(self.first(x)))))
        return self.act2(y + x) if self.before else self.act2(y) + x


def network(
    seed: int, weights: str, features: str, kind: str, zero: int = 121, scale: float = 64.0
) -> nn.Module:
    """A stair network with statistics as no training would leave them."""
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
    norms = [one for one in net.modules() if isinstance(one, nn.BatchNorm1d | nn.BatchNorm2d)]
    for norm in norms:
        spoil(norm)
    # The statistics of real sums, so that every level is reached.
    net.train()((torch.randint(256, (64, 2, 8, 8)) - zero) / scale)
    for norm in norms:
        norm.running_mean.mul_(64).round_().div_(64)
    return net.eval()


def spoil(norm: Any) -> None:
    """Weights of either sign, tiny and 0."""
    norm.momentum = 1.0
    norm.weight.data = torch.randn(norm.num_features)
    norm.weight.data[0], norm.weight.data[1], norm.weight.data[2] = 0.0, 1e-6, -1.0
    norm.bias.data = torch.randn(norm.num_features) * 0.3
    norm.bias.data[2] = 0.0


@pytest.mark.parametrize(
    "kind",
    ["pool after", "pool before", "depthwise", "residual before", "residual after", "average"],
)
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    weights=st.sampled_from([name for name in STAIRS if name != "uint4, 0.07"]),
    features=st.sampled_from(list(STAIRS)),
    zero=st.integers(0, 255),
    scale=st.sampled_from([1.0, 16.0, 64.0, 128.0]),
    last_layer=st.sampled_from(["float", "int8"]),
)
def test_integers_are_the_network(
    kind: str, seed: int, weights: str, features: str, zero: int, scale: float, last_layer: str
) -> None:
    net = network(seed, weights, features, kind, zero, scale)
    whole = last_layer == "int8"
    net = quantise_last_layer(net, (2, 8, 8), zero, scale) if whole else net
    integer = integerise(net, (2, 8, 8), zero, scale)
    x = torch.randint(256, (12, 2, 8, 8), dtype=torch.uint8)
    found = verify(net, integer, x)["integer network"]
    assert found.mismatches == 0, str(found)
    assert found.compared["class"] == 12
    stairs = sum(isinstance(module, StairActivation) for module in net.modules())
    assert len(found.compared) == 1 + stairs + whole  # whose scores are compared as well
    sums_stay_within(integer, x)


def sums_stay_within(integer: IntegerNetwork, x: Tensor) -> None:
    """No sum leaves the range that was promised for its channel."""
    known = integer.features(x)
    for node in integer.nodes:
        if isinstance(node, Sum):
            sums = known[node.name].transpose(0, 1).flatten(1)
            assert bool((sums >= node.least[:, None]).all())
            assert bool((sums <= node.greatest[:, None]).all())


def test_sums_on_the_threshold_itself() -> None:
    """Every whole sum of a layer, those on a threshold too, beside the float network's level."""
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(1, 3, bias=False), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2)
    )
    net = ss.quantise(model, STAIRS["ternary"], STAIRS["ternary"], skip="4").eval()
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


def test_thresholds_are_the_first_sums_that_reach() -> None:
    """Against all sums of a range, one by one."""
    torch.manual_seed(0)
    scale, shift = torch.randn(40) * 0.1, torch.randn(40)
    scale[0] = 0.0
    probe = lambda sums: STAIRS["int4, 0.07"].index(sums.float() * scale + shift)
    least, greatest = torch.full((40,), -200), torch.full((40,), 150)
    found = search(probe, least, greatest, levels=16)
    every = torch.arange(-200, 151)[:, None].expand(-1, 40)
    sign = torch.where(found.decreasing, -1, 1)
    index = ((sign * every)[..., None] >= found.thresholds).sum(-1)
    assert torch.equal(index, probe(every))


def test_a_difference_is_found_and_named() -> None:
    net = network(3, "ternary", "ternary", "pool after")
    integer = integerise(net, (2, 8, 8), 121, 64.0)
    x = torch.randint(256, (4, 2, 8, 8), dtype=torch.uint8)
    steps = next(node for node in integer.nodes if isinstance(node, Steps))
    steps.thresholds[2:] += 40
    found = verify(net, integer, x)["integer network"]
    assert found.mismatches > 0
    assert found.first is not None
    layer, example, place, wanted, given_ = found.first
    assert layer == steps.name
    assert place[0] >= 2
    assert wanted != given_
    assert f"the first in {layer}, example {example}" in str(found)


def build(*modules: nn.Module) -> nn.Module:
    return ss.quantise(
        nn.Sequential(*modules), STAIRS["ternary"], STAIRS["ternary"], skip=str(len(modules) - 1)
    ).eval()


class Twice(nn.Module):
    """One sum that two stairs take."""

    def __init__(self) -> None:
        super().__init__()
        self.sum, self.norm = nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3)
        self.a, self.b, self.last = nn.ReLU(), nn.ReLU(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.sum(x.flatten(1)))
        return self.last(self.a(y) + self.b(y))


LINEAR = (nn.Flatten(), nn.Linear(4, 3, bias=False))
REFUSED = {
    "sigmoid": lambda: build(*LINEAR, nn.BatchNorm1d(3), nn.Sigmoid(), nn.ReLU(), nn.Linear(3, 2)),
    "3": lambda: build(*LINEAR, nn.BatchNorm1d(3), nn.Softmax(1), nn.ReLU(), nn.Linear(3, 2)),
    "2": lambda: build(*LINEAR, nn.Linear(3, 2)),
    "sum": lambda: ss.quantise(
        Twice(), STAIRS["ternary"], STAIRS["ternary"], skip="last"
    ).eval(),
    "4": lambda: ss.quantise(
        nn.Sequential(*LINEAR, nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2), nn.ReLU()),
        STAIRS["ternary"], STAIRS["ternary"], skip="4",
    ).eval(),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_exact_is_refused_by_name(name: str) -> None:
    with pytest.raises(ExportError) as caught:
        integerise(REFUSED[name](), (1, 2, 2))
    said = str(caught.value)
    assert said.endswith(".")
    assert "\n" not in said


@pytest.mark.parametrize(
    ("zero", "scale", "word"),
    [(120.7, 64.0, "zero"), (-1, 64.0, "zero"), (256, 64.0, "zero"), (True, 1.0, "zero"),
     (0, 63.8, "scale"), (0, 0.0, "scale"), (0, -2.0, "scale"), (0, float("inf"), "scale")],
)  # fmt: skip
def test_input_that_integers_cannot_have(zero: Any, scale: Any, word: str) -> None:
    net = build(*LINEAR, nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))
    with pytest.raises(ExportError, match=rf"^{word} must be"):
        integerise(net, (1, 2, 2), zero, scale)


def test_bytes_alone_are_taken() -> None:
    net = build(*LINEAR, nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))
    integer = integerise(net, (1, 2, 2))
    with pytest.raises(ValueError, match="x must be uint8"):
        integer(torch.zeros(1, 1, 2, 2))
    with pytest.raises(ValueError, match="x must be uint8"):
        integer(torch.zeros(1, 2, 2, 2, dtype=torch.uint8))


def test_costs_are_those_of_the_layers() -> None:
    net = network(0, "ternary", "ternary", "depthwise")
    found = {one.name: one for one in costs(integerise(net, (2, 8, 8)))}
    first = found["0"]
    assert (first.weights, first.weight_bits, first.bytes) == (108, 2, 27)
    assert first.products == 6 * 8 * 8 * 2 * 9
    assert found["3"].products == 6 * 4 * 4 * 9  # depthwise, stride 2
    assert first.sum_bits == 1 + max(first.high.bit_length(), (-first.low - 1).bit_length())


def test_a_last_layer_of_whole_weights_after_an_average() -> None:
    """Its features are no whole multiples of a quantum, but of a quarter of one."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(24, 4, bias=True),
    )  # fmt: skip
    net = ss.quantise(model, STAIRS["ternary"], STAIRS["ternary"]).eval()
    nn.init.normal_(net.get_parameter("5.bias"))
    integer = integerise(net, (1, 4, 4), 121, 64.0)
    x = torch.randint(256, (50, 1, 4, 4), dtype=torch.uint8)
    with torch.no_grad():
        assert torch.equal(integer(x), net((x.float() - 121) / 64))


def test_sums_beyond_float32_are_refused() -> None:
    wide = ss.Stair.linear(8, signed=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4096, 2, bias=False), nn.BatchNorm1d(2),
                          nn.ReLU(), nn.Linear(2, 2))  # fmt: skip
    net = ss.quantise(model, wide, STAIRS["ternary"], skip="4").eval()
    net.get_parameter("1.weight").data.fill_(127.0)
    with pytest.raises(ExportError, match=r"'1': its sums reach 2²⁴"):
        integerise(net, (1, 64, 64), 0, 1.0)


def test_norms_that_cannot_be_folded() -> None:
    pooled = (nn.Conv2d(1, 3, 1, bias=False), nn.MaxPool2d(2))
    rest = (nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))
    plain = build(*pooled, nn.BatchNorm2d(3, affine=False), *rest)
    x = torch.randint(256, (9, 1, 4, 4), dtype=torch.uint8)
    integer = integerise(plain, (1, 4, 4), 100, 64.0)
    assert verify(plain, integer, x)["integer network"].mismatches == 0
    without = build(*pooled, nn.BatchNorm2d(3), *rest)
    without[2].running_mean = None
    with pytest.raises(ExportError, match="'2': it has no running statistics"):
        integerise(without, (1, 4, 4))


def test_a_way_that_leaves_a_layer_out_is_no_proof() -> None:
    net = network(3, "ternary", "ternary", "pool after")
    integer = integerise(net, (2, 8, 8), 121, 64.0)
    x = torch.zeros(2, 2, 8, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="silent must give the result of"):
        verify(net, integer, x, {"silent": lambda _: {}})


def test_a_last_layer_of_whole_weights() -> None:
    model = nn.Sequential(*LINEAR, nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))
    net = ss.quantise(model, STAIRS["int4, 0.07"], STAIRS["uint4, 0.07"]).eval()
    integer = integerise(net, (1, 2, 2), 100, 32.0)
    x = torch.randint(256, (50, 1, 2, 2), dtype=torch.uint8)
    with torch.no_grad():
        assert torch.equal(integer(x), net((x.float() - 100) / 32))
