"""freeze: the largest sums, tables of the input, last layers, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from freezes import assert_equals_numpy, frozen_of
from largest import LARGEST, largest
from torch import Tensor, nn

import softstair as ss
from softstair._errors import SoftstairError
from softstair.deploy.freezing import freeze
from softstair.deploy.frozen import load_frozen
from softstair.deploy.nodes import ExportError, Steps, Sum

TERNARY = ss.Stair.ternary()
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.parametrize("kind", LARGEST)
def test_the_largest_sums_are_exact(kind: str) -> None:
    frozen, x = largest(kind)
    sums = torch.cat([y.flatten() for name, y in frozen.features(x).items() if "sum" in name])
    assert int(sums.abs().max()) > 0.9 * 2**31
    assert_equals_numpy(frozen, x)


def linear_network(inputs: int = 4) -> Any:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, 3, bias=False), nn.BatchNorm1d(3), nn.ReLU(),
        nn.Linear(3, 2),
    )  # fmt: skip
    return ss.quantise(model, TERNARY, TERNARY, skip="4").eval()


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def convolutional(last: nn.Module, *after: nn.Module, features: Any = None) -> nn.Module:
    """A network with statistics of real sums."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AvgPool2d(4), nn.Flatten(), last, *after,
    )  # fmt: skip
    stair = features or ss.Stair.linear(4, quantum=0.25)
    net = ss.quantise(model, TERNARY, stair, skip="8")
    with torch.no_grad():
        for _ in range(30):
            net((random_bytes(60, 3, 8, 8).float() - 120) / 60)
    return net.eval()


def test_every_sum_has_the_level_of_the_float_network() -> None:
    """All bytes through one weight; thresholds that some meet exactly."""
    net = linear_network(1)
    net.get_parameter("1.weight").data = torch.tensor([[1.0], [1.0], [-1.0]])
    norm = net.get_submodule("2")
    norm.weight.data = torch.tensor([1.0, -1.0, 0.5])
    norm.running_mean = torch.tensor([7.5, 7.5, 7.0])
    norm.running_var = torch.ones(3) - norm.eps
    x = torch.arange(256, dtype=torch.uint8).reshape(-1, 1, 1, 1)
    frozen = frozen_of(net, (1, 1, 1), x, zero=100, scale=1.0)
    (steps,) = (node for node in frozen.nodes if isinstance(node, Steps))
    assert steps.thresholds[0].tolist() == [7, 8]


def test_mean_and_std_of_each_channel_are_a_table() -> None:
    net, x = convolutional(nn.Linear(32, 5)), random_bytes(200, 3, 8, 8)
    frozen = freeze(net, (3, 8, 8), mean=MEAN, std=STD, examples=x)
    assert_equals_numpy(frozen, x)
    floats = (x.double() / 255 - torch.tensor(MEAN).reshape(3, 1, 1)) / torch.tensor(STD).reshape(
        3, 1, 1
    )
    entry = frozen.input
    assert entry.table is not None
    seen = entry.run(x).double() * entry.unit
    bits = 8 * entry.table.element_size()
    assert float((seen - floats).abs().max()) <= 0.51 * entry.unit
    assert bits == frozen.report.input_bits
    assert entry.unit == pytest.approx(float(floats.abs().max()) / (2 ** (bits - 1) - 1), rel=0.02)
    with torch.no_grad():
        expected = net(floats.float()).argmax(1)
    assert float((frozen.predict(x) != expected).double().mean()) <= 0.02
    # Padding is exactly 0: what the network sees at the border.
    border = x.clone()
    border[:, :, 1:-1, 1:-1] = 0
    assert_equals_numpy(frozen, border)


def test_tables_of_16_bits_are_chosen_where_8_cost_accuracy() -> None:
    """One channel has a far larger range than the one that decides."""
    net = linear_network(2)
    net.get_parameter("1.weight").data = torch.tensor([[0.0, 1.0], [0.0, -1.0], [0.0, 1.0]])
    net.get_parameter("4.weight").data = torch.tensor([[1.0, -1.0, 0.1], [-1.0, 1.0, 0.0]])
    x = random_bytes(400, 2, 1, 1)
    options: Any = {"mean": (0.0, 0.5), "std": (0.0005, 0.1), "examples": x}
    frozen = freeze(net, (2, 1, 1), **options)
    assert frozen.report.input_bits == 16
    assert frozen.report.changed == 0
    options |= {"std": (1.0, 0.25)}
    assert freeze(net, (2, 1, 1), **options).report.input_bits == 8


@pytest.mark.parametrize(
    "options",
    [{"mean": (0.5,)}, {"std": (0.5,) * 3}, {"mean": MEAN}, {"mean": MEAN, "std": (1.0, 0.0, 1.0)},
     {"mean": MEAN, "std": (1.0, float("nan"), 1.0)}, {"mean": MEAN, "std": STD, "zero": 1},
     {"mean": MEAN, "std": STD, "dtype": torch.int8}, {"zero": 120.7}, {"zero": 256},
     {"zero": True}, {"scale": -2.0}, {"scale": float("inf")}, {"scale": 0}, {"scale": "a"},
     {"dtype": torch.int32}, {"outputs": "scores"}, {"rounding": "up"}, {"classes": ("a",)},
     {"examples": torch.zeros(3, 3, 8, 8)}, {"examples": torch.zeros(0, 3, 8, 8).byte()},
     {"examples": torch.zeros(3, 3, 8, 7).byte()}, {"examples": "x"}, {"mean": "abc", "std": STD},
     {"mean": 0.5, "std": 0.5}, {"mean": torch.ones(3), "std": None}],
    ids=str,
)  # fmt: skip
def test_wrong_arguments_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SoftstairError) as caught:
        freeze(convolutional(nn.Linear(32, 5)), (3, 8, 8), **options)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("shape", [(2, 8, 8), (3, 1, 1), 8, "abc", (3, 8.0, 8), (0, 8)])
def test_wrong_shapes_are_refused(shape: Any) -> None:
    for options in ({}, {"mean": MEAN, "std": STD}):
        with pytest.raises(SoftstairError) as caught:
            freeze(convolutional(nn.Linear(32, 5)), shape, **options)
        assert len(str(caught.value)) < 200


def test_a_scale_that_is_no_power_of_two_is_taken() -> None:
    x = random_bytes(100, 3, 8, 8)
    frozen_of(convolutional(nn.Linear(32, 5)), (3, 8, 8), x, 77, 63.8, exact=False)


def test_the_last_layer_has_8_bits_where_no_class_changes_and_16_where_one_does() -> None:
    net, x = convolutional(nn.Linear(32, 5)), random_bytes(300, 3, 8, 8)
    frozen = frozen_of(net, (3, 8, 8), x, 120, 60.0, exact=False)
    last = net.get_submodule("8")
    assert frozen.report.last_bits == 8 * weight_of(frozen).element_size()
    # Two outputs that differ by less than 8 bits can hold.
    last.weight.data[0] = last.weight.data[1] * (1 + 1e-3)
    last.weight.data[0, 0] += 1e-3
    last.bias.data[:2], last.bias.data[2:] = 0.0, -100.0
    frozen = freeze(net, (3, 8, 8), zero=120, scale=60.0, examples=x)
    assert frozen.report.last_bits == 16
    assert weight_of(frozen).dtype == torch.int16
    assert_equals_numpy(frozen, x)


def test_weights_of_a_last_layer_are_the_nearest_multiples_of_each_quantum() -> None:
    net, x = convolutional(nn.Linear(32, 5)), random_bytes(100, 3, 8, 8)
    frozen = freeze(net, (3, 8, 8), zero=120, scale=60.0, examples=x)
    weight = net.get_parameter("8.weight").detach().double().numpy()
    quanta = np.abs(weight).max(1) / 127
    np.testing.assert_array_equal(weight_of(frozen), np.rint(weight / quanta[:, None]))
    features = frozen.features(x)["7"].double().numpy() * 0.25 / 16
    expected = features @ (weight_of(frozen).numpy() * quanta[:, None]).T
    expected += net.get_parameter("8.bias").detach().numpy()
    np.testing.assert_allclose(frozen.values(x), expected, rtol=1e-4, atol=1e-4)


def test_a_last_layer_with_a_weight_norm_is_frozen_as_the_weights_that_it_computes() -> None:
    last = nn.utils.parametrizations.weight_norm(nn.Linear(32, 5))
    net, x = convolutional(last), random_bytes(60, 3, 8, 8)
    frozen = frozen_of(net, (3, 8, 8), x, 120, 60.0, exact=False)
    with torch.no_grad():
        expected = net((x.float() - 120) / 60).double()
    torch.testing.assert_close(frozen.values(x), expected, atol=0.02, rtol=0.02)


def weight_of(frozen: Any) -> Tensor:
    return [node for node in frozen.nodes if isinstance(node, Sum)][-1].weight


def test_without_examples_the_report_says_so() -> None:
    frozen = freeze(linear_network(), (1, 2, 2))
    assert (frozen.report.examples, frozen.report.changed) == (0, None)
    assert weight_of(frozen).dtype == torch.int8
    assert "INT8" in str(frozen.report)
    assert "no examples were given" in str(frozen.report)


def test_values_are_within_half_a_percent() -> None:
    net, x = convolutional(nn.Linear(32, 2)), random_bytes(200, 3, 8, 8)
    options: Any = {"zero": 120, "scale": 60.0, "outputs": "values"}
    frozen = freeze(net, (3, 8, 8), examples=x, **options)
    assert_equals_numpy(frozen, x)
    with torch.no_grad():
        expected = net((x.float() - 120) / 60).double()
    error = (frozen.values(x) - expected).square().mean().sqrt() / expected.std()
    assert float(error) <= 0.006
    assert frozen.report.changed is None
    assert freeze(net, (3, 8, 8), **options).report.last_bits == 8


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_scores_after_a_norm_may_have_negative_scales(sign: float) -> None:
    net, x = convolutional(nn.Linear(32, 5), nn.BatchNorm1d(5)), random_bytes(200, 3, 8, 8)
    norm: Any = net.get_submodule("9")
    norm.weight.data = sign * torch.tensor([1.0, -0.7, 0.0, 1e-6, 2.0])
    norm.bias.data = torch.tensor([0.1, 0.0, 0.3, 0.2, -0.1])
    frozen = frozen_of(net, (3, 8, 8), x, 120, 60.0, exact=False)
    with torch.no_grad():
        expected = net((x.float() - 120) / 60).double()
    torch.testing.assert_close(frozen.values(x), expected, atol=0.02, rtol=0.02)
    assert float((frozen.predict(x) != expected.argmax(1)).double().mean()) <= 0.01


@pytest.mark.parametrize("weight", [0.0, 1e-30, 1e30])
def test_extreme_last_layers_keep_their_bias(weight: float) -> None:
    net, x = linear_network(), random_bytes(50, 1, 2, 2)
    net.get_parameter("4.weight").data.fill_(weight)
    net.get_parameter("4.weight").data[0] = 0.0
    net.get_parameter("4.bias").data = torch.tensor([0.25, -3.0])
    frozen = freeze(net, (1, 2, 2), zero=128, scale=64.0, examples=x)
    assert_equals_numpy(frozen, x)
    with torch.no_grad():
        expected = net((x.float() - 128) / 64).double()
    size = expected.abs().amax(0)
    assert ((frozen.values(x) - expected).abs() <= 0.01 * size).all()


def hooked(net: Any) -> nn.Module:
    net[3].register_forward_hook(lambda module, x, y: -y)
    return net


def other_forward(net: Any) -> nn.Module:
    net[3].forward = lambda x: x * 2
    return net


def replaced(net: Any) -> nn.Module:
    net[2] = nn.BatchNorm1d(3, affine=False)
    net[2].running_mean += 1
    net[3] = nn.Tanh()
    return net.eval()


def diverged(net: Any) -> nn.Module:
    net[1].weight.data[0, 0] = torch.nan
    return net


class Wrapper(nn.Module):
    """As DistributedDataParallel: the network under another name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "a hook": hooked,
    "another forward": other_forward,
    "a replaced layer": replaced,
    "NaN": diverged,
    "a wrapper": Wrapper,
    "DataParallel": nn.DataParallel,
    "a float network": lambda net: nn.Sequential(nn.Flatten(), nn.Linear(4, 2)),
    "no network": lambda net: "net",
    "None": lambda net: None,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_the_network_that_was_quantised_is_refused(kind: str) -> None:
    net = REFUSED[kind](linear_network())
    with pytest.raises(SoftstairError) as caught:
        freeze(net, (1, 2, 2), zero=128, scale=64.0)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["1.weight", "2.weight", "2.bias", "2.running_mean", "2.running_var", "4.weight",
             "4.bias"],
)  # fmt: skip
def test_a_diverged_network_is_refused_by_name(name: str, value: float) -> None:
    net, (layer, _, part) = linear_network(), name.partition(".")
    dict([*net.named_parameters(), *net.named_buffers()])[name].data.view(-1)[0] = value
    with pytest.raises(ExportError, match=f"cannot export '{layer}': its {part} has NaN"):
        freeze(net, (1, 2, 2))


def test_hooks_of_an_annealer_are_not_refused() -> None:
    net = linear_network().train()
    annealer = ss.Annealer(net, ss.Schedule(layers=1, period=2))
    for _ in range(3):
        annealer.step()
    assert any(module._forward_pre_hooks for module in net.modules())
    freeze(net.eval(), (1, 2, 2))


def test_freezing_leaves_the_network_as_it_is() -> None:
    net = linear_network().train().double()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    freeze(net, (1, 2, 2))
    assert net.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


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
    nets = [ss.quantise(Dropping(on), TERNARY, TERNARY, skip=skip).eval() for on in (False, True)]
    frozen_of(nets[0], (1, 2, 2), random_bytes(9, 1, 2, 2))
    with pytest.raises(ExportError):
        freeze(nets[1], (1, 2, 2))


def test_levels_far_apart_are_refused_at_once() -> None:
    far = ss.Stair((0.0, 1000.0, 1000.00001), (500.0, 1000.000005), quantum=0.00001)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    net = ss.quantise(model, TERNARY, far, skip="3").eval()
    with pytest.raises(ExportError, match=r"cannot export '2': .*65,536"):
        freeze(net, (1, 2, 2))
    for stair in (ss.Stair.linear(16), ss.Stair((0, 2**16 - 1), (1,))):
        net = ss.quantise(model, TERNARY, stair, skip="3").eval()
        frozen_of(net, (1, 2, 2), random_bytes(60, 1, 2, 2), exact=False)


def test_sums_beyond_32_bits_are_refused() -> None:
    stair = ss.Stair.linear(16, signed=True, quantum=1.0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4096, 2), nn.ReLU(), nn.Linear(2, 2))
    net = ss.quantise(model, stair, TERNARY).eval()
    net.get_parameter("1.weight").data = 32767.0 * (1 - 2 * (torch.arange(8192) % 2)).view(2, 4096)
    with pytest.raises(ExportError, match="'1': its sums do not fit into 32 bits"):
        freeze(net, (1, 64, 64))


def test_frozen_networks_are_the_same_for_the_same_arguments(tmp_path: Any) -> None:
    net, x = convolutional(nn.Linear(32, 5)), random_bytes(60, 3, 8, 8)
    options: Any = {"zero": 120, "scale": 64.0, "examples": x, "classes": tuple("abcde")}
    first, second = (freeze(net, (3, 8, 8), **options) for _ in range(2))
    assert first.digest == second.digest
    assert load_frozen(first.save(tmp_path / "f")).classes == tuple("abcde")
    doubled = freeze(net, (3, 8, 8), rounding="double", **options)
    np.testing.assert_array_equal(doubled(x).numpy(), first(x).numpy())  # no multiplications
