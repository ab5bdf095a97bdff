"""A float last layer quantised to INT8: what it becomes, and equal bits in every export."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import softstair as ss
from softstair.deploy import (
    ExportError,
    c,
    c_runner,
    costs,
    integerise,
    onnx_runner,
    quantise_last_layer,
    verify,
)
from softstair.models import digits, dscnn
from softstair.nn import StairLinear

TERNARY = ss.Stair.ternary()
INT4 = ss.Stair.linear(4, signed=True, quantum=0.1, thresholds="midpoint")
UINT4 = ss.Stair.linear(4, quantum=0.07, thresholds="midpoint")
WIDE = ss.Stair.linear(8, quantum=0.01, thresholds="floor")
INPUT = (128, 64.0)
NETWORKS: dict[str, Any] = {
    "digits": (digits, TERNARY, TERNARY, (1, 8, 8)),
    # Averages over 125 positions, which float32 rounds.
    "dscnn": (dscnn, INT4, UINT4, (1, 49, 10)),
}


def network(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """A network with random statistics, and the shape of its input."""
    torch.manual_seed(5)
    make, weights, features, shape = NETWORKS[name]
    net = ss.quantise(make(), weights, features, skip="classifier")
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
            module.momentum = 1.0
    if net.get_submodule("classifier").bias is not None:
        nn.init.normal_(net.get_parameter("classifier.bias"))
    net(torch.randn(40, *shape))
    return net.eval(), shape


def random_bytes(shape: tuple[int, ...], count: int) -> Tensor:
    return torch.randint(256, (count, *shape), dtype=torch.uint8)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_export_has_equal_bits(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    net, shape = network(name)
    int8 = quantise_last_layer(net, shape, *INPUT)
    integer = integerise(int8, shape, *INPUT)
    others = {"onnx": onnx_runner(integer, tmp_path)}
    if shutil.which("cc") is not None:
        others["c"] = c_runner(integer, tmp_path)
    for runner, comparison in verify(int8, integer, random_bytes(shape, 8), others).items():
        assert comparison.mismatches == 0, (runner, str(comparison))
        assert comparison.compared["classifier.scores"] == 8 * integer.sizes["classifier"][0]
    cost = costs(integer)[-1]
    assert (cost.name, cost.weight_bits, cost.bytes) == ("classifier", 8, cost.weights)


def test_weights_are_the_nearest_multiples_of_each_class_quantum() -> None:
    """By hand, in double precision; no other parameter changes."""
    net, shape = network("digits")
    before = copy.deepcopy(net.state_dict())
    int8 = quantise_last_layer(net, shape, *INPUT)
    layer = int8.get_submodule("classifier")
    assert isinstance(layer, StairLinear)
    assert type(net.get_submodule("classifier")) is nn.Linear
    for key, value in before.items():
        assert torch.equal(net.state_dict()[key], value)
        assert torch.equal(int8.state_dict()[key], value)
    quanta = np.array(layer.weight_stair.stair.quantum)
    assert quanta.shape == (10,)
    weight = before["classifier.weight"].double().numpy()
    nearest = np.clip(np.round(weight / quanta[:, None]), -127, 127)
    integers = layer.weight_stair.integers(layer.weight)
    assert integers is not None
    np.testing.assert_array_equal(integers.numpy(), nearest)
    assert np.abs(nearest * quanta[:, None] - weight).max() < 0.02 * np.abs(weight).max()
    x = random_bytes(shape, 20)
    features = integerise(net, shape, *INPUT).features(x)["features.9"].double().numpy()
    expected = features @ (nearest * quanta[:, None]).T + before["classifier.bias"].numpy()
    with torch.no_grad():
        scores = int8((x.float() - 128) / 64)
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-5, atol=1e-6)
    row = {row.name: row for row in ss.report(int8).rows}["classifier"]
    assert (row.layer, row.became) == (3, "stair weights")
    assert row.stair == "255 levels -127…127, 10 quanta"


def test_c_stores_bytes_and_one_scale_and_bias_per_class(tmp_path: Path) -> None:
    net, shape = network("digits")
    before = c.write(integerise(net, shape, *INPUT), tmp_path / "float")
    int8 = quantise_last_layer(net, shape, *INPUT)
    after = c.write(integerise(int8, shape, *INPUT), tmp_path / "int8")
    *_, last, scores = after.rows
    assert (last.names, last.flash) == (("classifier",), (2560, 0))
    assert scores.flash == (0, 2 * 4 * 10)
    assert after.flash == before.flash - 3 * 2560 + 4 * 10
    assert after.ram <= before.ram
    text = (tmp_path / "int8" / "network_weights.h").read_text()
    floats = [line for line in text.splitlines() if line.startswith("static const float")]
    assert len(floats) == 2
    assert all("[10]" in line for line in floats)


def test_a_layer_with_two_names_is_replaced_under_both() -> None:
    class Wrapper(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.last, self.net = net.get_submodule("classifier"), net

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    net, shape = network("digits")
    int8 = quantise_last_layer(Wrapper(net), shape, *INPUT)
    assert isinstance(int8.get_submodule("last"), StairLinear)
    assert int8.get_submodule("last") is int8.get_submodule("net.classifier")


def pooled(features: ss.Stair, size: int, last: nn.Module, skip: str = "5") -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 1, bias=False), nn.BatchNorm2d(2), nn.ReLU(),
        nn.AvgPool2d(size), nn.Flatten(), last,
    )  # fmt: skip
    return ss.quantise(model, TERNARY, features, skip=skip or ()).eval()


def not_finite() -> nn.Module:
    net = pooled(TERNARY, 64, nn.Linear(2, 2))
    net.get_parameter("5.weight").data[0, 0] = torch.nan
    return net


RAISING: dict[str, Any] = {
    "'5': this last layer is already": lambda: pooled(TERNARY, 64, nn.Linear(2, 2), skip=""),
    "'1': it reads the input": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64 * 64, 2)),
    "'5': float32 cannot average 1044480": lambda: pooled(WIDE, 64, nn.Linear(2, 2)),
    "'5': its ParametrizedLinear is not a Linear": lambda: pooled(
        TERNARY, 64, nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    ),
    "'5': its weight has NaN": not_finite,
}


@pytest.mark.parametrize("message", RAISING)
def test_what_cannot_be_int8_raises_an_error_that_names_the_layer(message: str) -> None:
    with pytest.raises(ExportError, match=message):
        quantise_last_layer(RAISING[message](), (1, 64, 64))


def test_the_largest_average_that_is_accepted_is_exact() -> None:
    """UINT8 features over 144 positions, which float32 averages to thousandths of a quantum."""
    net = pooled(WIDE, 12, nn.Linear(2, 3))
    nn.init.normal_(net.get_parameter("1.bias"), 1.0)
    int8 = quantise_last_layer(net, (1, 12, 12), 100, 64.0)
    x = random_bytes((1, 12, 12), 200)
    comparison = verify(int8, integerise(int8, (1, 12, 12), 100, 64.0), x)["integer network"]
    assert comparison.mismatches == 0, str(comparison)
    with pytest.raises(ExportError, match="float32 cannot average"):
        quantise_last_layer(pooled(WIDE, 14, nn.Linear(2, 3)), (1, 14, 14))


def test_averages_of_sequences_are_exact() -> None:
    layers = [nn.Conv1d(1, 4, 3, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.AvgPool1d(6)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 2))
    net = ss.quantise(model, TERNARY, TERNARY, skip="5").eval()
    int8 = quantise_last_layer(net, (1, 8), *INPUT)
    integer, x = integerise(int8, (1, 8), *INPUT), random_bytes((1, 8), 20)
    assert verify(int8, integer, x)["integer network"].mismatches == 0
