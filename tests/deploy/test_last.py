"""The last layer in INT8: what it becomes, and that every export gives the bits of it."""

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
from softstair.deploy import qonnx as for_fpgas
from softstair.models import digits, dscnn
from softstair.nn import StairLinear

TERNARY = ss.Stair.ternary()
INT4 = ss.Stair.linear(4, signed=True, quantum=0.1, thresholds="midpoint")
UINT4 = ss.Stair.linear(4, quantum=0.07, thresholds="midpoint")
INPUT = (128, 64.0)
NETWORKS: dict[str, Any] = {
    "digits": (digits, TERNARY, TERNARY, (1, 8, 8)),
    # Averages over 125 places, none of which float32 has exactly.
    "dscnn": (dscnn, INT4, UINT4, (1, 49, 10)),
}


def network(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """A network with the statistics of no training."""
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


def some(shape: tuple[int, ...], count: int) -> Tensor:
    return torch.randint(256, (count, *shape), dtype=torch.uint8)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_way_gives_its_bits(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    net, shape = network(name)
    whole = quantise_last_layer(net, shape, *INPUT)
    integer = integerise(whole, shape, *INPUT)
    others = {"onnx": onnx_runner(integer, tmp_path)}
    if shutil.which("cc") is not None:
        others["c"] = c_runner(integer, tmp_path)
    x = some(shape, 8)
    for way, found in verify(whole, integer, x, others).items():
        assert found.mismatches == 0, (way, str(found))
        assert found.compared["classifier.scores"] == 8 * integer.sizes["classifier"][0]
    cost = costs(integer)[-1]
    assert (cost.name, cost.weight_bits) == ("classifier", 8)
    assert cost.bytes == cost.weights


@pytest.mark.parametrize("name", NETWORKS)
def test_qonnx_has_it_behind_a_quant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    wrapper = pytest.importorskip("qonnx.core.modelwrapper", reason="qonnx is not installed")
    from qonnx.core.onnx_exec import execute_onnx

    monkeypatch.setattr(onnx, "IR_VERSION", 8)  # as test_qonnx.py has it
    net, shape = network(name)
    whole = quantise_last_layer(net, shape, *INPUT)
    made = for_fpgas.model(integerise(whole, shape, *INPUT))
    model = wrapper.ModelWrapper(made)
    assert str(model.get_tensor_datatype("classifier_weight")) == "INT8"
    x = some(shape, 1)
    got = execute_onnx(model, {"bytes": x.numpy().astype(np.float32)})
    with torch.no_grad():
        np.testing.assert_array_equal(got["scores"], whole((x.float() - 128) / 64).numpy())


def test_weights_are_those_of_the_network_to_half_a_quantum() -> None:
    """By hand, in double precision: the nearest multiples of each class's quantum, and no other
    number of the network is touched."""
    net, shape = network("digits")
    before = copy.deepcopy(net.state_dict())
    whole = quantise_last_layer(net, shape, *INPUT)
    layer = whole.get_submodule("classifier")
    assert isinstance(layer, StairLinear)
    assert type(net.get_submodule("classifier")) is nn.Linear
    for key, value in before.items():
        assert torch.equal(net.state_dict()[key], value)
        assert torch.equal(whole.state_dict()[key], value)
    quanta = np.array(layer.weight_stair.stair.quantum)
    assert quanta.shape == (10,)
    weight = before["classifier.weight"].double().numpy()
    nearest = np.clip(np.round(weight / quanta[:, None]), -127, 127)
    found = layer.weight_stair.integers(layer.weight)
    assert found is not None
    np.testing.assert_array_equal(found.numpy(), nearest)
    assert np.abs(nearest * quanta[:, None] - weight).max() < 0.02 * np.abs(weight).max()
    # The scores are those of these weights.
    x = some(shape, 20)
    features = integerise(net, shape, *INPUT).features(x)["features.9"].double().numpy()
    expected = features @ (nearest * quanta[:, None]).T + before["classifier.bias"].numpy()
    with torch.no_grad():
        scores = whole((x.float() - 128) / 64)
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-5, atol=1e-6)
    table = {row.name: row for row in ss.report(whole).rows}["classifier"]
    assert (table.layer, table.became, table.stair) == (3, "stair weights", "255 levels, 10 quanta")


def test_c_holds_bytes_and_no_floats_but_scales_and_bias(tmp_path: Path) -> None:
    net, shape = network("digits")
    before = c.write(integerise(net, shape, *INPUT), tmp_path / "float")
    whole = quantise_last_layer(net, shape, *INPUT)
    after = c.write(integerise(whole, shape, *INPUT), tmp_path / "int8")
    *_, last, scores = after.rows
    assert (last.names, last.flash) == (("classifier",), (2560, 0))
    assert "8 bits a weight" in last.how
    assert scores.flash == (0, 2 * 4 * 10)
    assert after.flash == before.flash - 3 * 2560 + 4 * 10
    assert after.ram <= before.ram
    text = (tmp_path / "int8" / "network_weights.h").read_text()
    floats = [line for line in text.splitlines() if line.startswith("static const float")]
    assert len(floats) == 2
    assert all("[10]" in line for line in floats)


def test_a_layer_under_two_names_is_quantised_under_both() -> None:
    net, shape = network("digits")
    whole = quantise_last_layer(Named(net), shape, *INPUT)
    assert isinstance(whole.get_submodule("last"), StairLinear)
    assert whole.get_submodule("last") is whole.get_submodule("net.classifier")


class Named(nn.Module):
    """A network whose last layer has a second name."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.last, self.net = net.get_submodule("classifier"), net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def pooled(features: ss.Stair, size: int, last: nn.Module) -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 1, bias=False), nn.BatchNorm2d(2), nn.ReLU(),
        nn.AvgPool2d(size), nn.Flatten(), last,
    )  # fmt: skip
    return ss.quantise(model, TERNARY, features, skip="5").eval()


def spoilt() -> nn.Module:
    net = pooled(TERNARY, 64, nn.Linear(2, 2))
    net.get_parameter("5.weight").data[0, 0] = torch.nan
    return net


WIDE = ss.Stair.linear(8, quantum=0.01)
REFUSED: dict[str, Any] = {
    "'5': this last layer is already quantised": lambda: ss.quantise(
        nn.Sequential(*(copy.deepcopy(one) for one in REST), nn.Linear(2, 2)), TERNARY, TERNARY
    ).eval(),
    "'1': it reads the input, which has no stair": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64 * 64, 2)
    ),
    "float32 cannot average 1044480 quanta": lambda: pooled(
        WIDE, 64, nn.Linear(2, 2)
    ),
    "'5': its ParametrizedLinear is no Linear": lambda: pooled(
        TERNARY, 64, nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    ),
    "'5': its Linear is no Linear of finite weights": spoilt,
    "it follows the scores": lambda: ss.quantise(
        nn.Sequential(*(copy.deepcopy(one) for one in REST), nn.Linear(2, 2), nn.Softmax(1)),
        TERNARY, TERNARY, skip="5",
    ).eval(),
}  # fmt: skip
REST: tuple[nn.Module, ...] = (
    nn.Conv2d(1, 2, 64, bias=False),
    nn.BatchNorm2d(2),
    nn.ReLU(),
    nn.Identity(),
    nn.Flatten(),
)


@pytest.mark.parametrize("words", list(REFUSED))
def test_refusals_are_one_sentence(words: str) -> None:
    with pytest.raises(ExportError, match=words) as caught:
        quantise_last_layer(REFUSED[words](), (1, 64, 64))
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def test_the_largest_average_that_is_taken_is_exact() -> None:
    """UINT8 features over 144 places, of which float32 makes a few thousandths of a quantum."""
    net = pooled(WIDE, 12, nn.Linear(2, 3))
    nn.init.normal_(net.get_parameter("1.bias"), 1.0)
    whole = quantise_last_layer(net, (1, 12, 12), 100, 64.0)
    x = some((1, 12, 12), 200)
    found = verify(whole, integerise(whole, (1, 12, 12), 100, 64.0), x)["integer network"]
    assert found.mismatches == 0, str(found)
    with pytest.raises(ExportError, match="float32 cannot average"):
        quantise_last_layer(pooled(WIDE, 14, nn.Linear(2, 3)), (1, 14, 14))
