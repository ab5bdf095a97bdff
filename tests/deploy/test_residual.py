"""Frozen residual networks: shortcuts with weights, linear bottlenecks, INT8."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import pytest
import torch
from freezes import formats, frozen_of
from torch import nn

import softstair as ss
from networks import Code, make
from softstair.convert.options import Sums
from softstair.convert.units import set_input_units
from softstair.deploy import ExportError, FrozenNetwork, onnx
from softstair.deploy.c.program import sources
from softstair.models import ResidualBlock, last_layer
from softstair.nn import StairActivation, stair_modules

TERNARY, UINT4 = ss.Stair.ternary(), ss.Stair.linear(4, quantum=0.25)
UINT6 = ss.Stair.linear(6, quantum=0.07)
SHAPE = (3, 8, 8)
SUMS: tuple[Sums, ...] = ("sum", "branches")


def ends(*blocks: nn.Module, channels: int = 4) -> nn.Module:
    """Blocks of four channels, between a stem and a last layer that is an average."""
    stem = (nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    last = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 5))
    return nn.Sequential(*stem, *blocks, *last)


def sum_of(*branches: nn.Module) -> nn.Module:
    """The sum of branches, in float."""
    code = lambda m, x: reduce(operator.add, [branch(x) for branch in m.branches])
    return Code(code, branches=nn.ModuleList(branches))


def conv(outputs: int = 4) -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs))


def conv3() -> tuple[nn.Module, ...]:
    return nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet": lambda: make("resnet")[0],
    "mobilenetv2": lambda: make("mobilenetv2")[0],
    # MLPerf Tiny's blocks: bn(conv(y)) + conv1x1(x), whose convolution has a bias.
    "resnet8": lambda: ends(ResidualBlock(4, 4, 1, True), ResidualBlock(4, 6, 2, True), channels=6),
    "three sums": lambda: ends(sum_of(conv(), conv(), nn.Conv2d(4, 4, 1, 2)), nn.ReLU()),
    "no activation at the end": lambda: nn.Sequential(*conv3(), nn.Flatten(), nn.Linear(144, 5)),
    "no activation": lambda: ends(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3), nn.MaxPool2d(2)),
}


def quantised(
    model: nn.Module, features: ss.Stair, sums: Sums | None, shortcuts: ss.Stair | None = None
) -> nn.Module:
    """A network after a few steps of training, with normalisations as after many."""
    torch.manual_seed(1)
    options = ss.QuantiseOptions(sums=sums, shortcuts=shortcuts)
    net = ss.quantise(model, TERNARY, features, skip=last_layer(model), options=options)
    schedule = ss.Schedule.for_network(net, period=1.0)
    annealer = ss.Annealer(net, schedule)
    optimiser = torch.optim.SGD(net.parameters(), 0.01)
    for _ in range(math.ceil(schedule.end)):
        annealer.step()
        net(torch.randn(8, *SHAPE)).square().mean().backward()
        optimiser.step()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)  # some are negative
            nn.init.normal_(module.bias)
    return net.eval()


CASES = [(name, sums) for name in NETWORKS for sums in SUMS]


def assert_equal_everywhere(net: nn.Module, size: int, folder: Path) -> FrozenNetwork:
    """Freeze a network, and compare it with ``eval()``, numpy, ONNX, QONNX and C."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (9, 3, size, size), dtype=torch.uint8, generator=draw)
    frozen = frozen_of(net, (3, size, size), x, 128, 64.0, exact=False)
    assert any(len(frozen.features(x)[stair].unique()) > 4 for stair in frozen.stairs)
    assert formats(frozen, x, folder) == [True] * 3
    return frozen


# In the default lane each network has one kind of sums, and each kind is that of three networks.
@pytest.mark.parametrize(
    ("name", "sums"),
    [case if number % 4 in (0, 3) else pytest.param(*case, marks=pytest.mark.nightly)
     for number, case in enumerate(CASES)],
)  # fmt: skip
def test_sums_without_an_activation_are_frozen(name: str, sums: Sums, tmp_path: Path) -> None:
    assert_equal_everywhere(quantised(NETWORKS[name](), UINT4, sums), 8, tmp_path)


def test_weights_read_shortcuts_of_more_levels_through_a_second_stair(tmp_path: Path) -> None:
    net = quantised(NETWORKS["resnet"](), UINT4, "sum", UINT6)
    frozen = assert_equal_everywhere(net, 8, tmp_path)
    assert "layer1.0.conv1.input_stair" in frozen.stairs


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("name", NETWORKS)
def test_sums_without_a_stair_are_refused(name: str) -> None:
    with pytest.raises(ExportError, match=r"^cannot export '.+': it.*unquantised|not quantised"):
        ss.freeze(quantised(NETWORKS[name](), UINT4, None), SHAPE, zero=128, scale=64.0)


def fitted(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """An INT8 network with what training leaves: quanta of their own, and normalisations."""
    torch.manual_seed(2)
    model(torch.randn(64, *shape) * 2)
    int8, features = ss.Stair.linear(8, signed=True), ss.Stair.linear(8, quantum=1 / 32)
    last = last_layer(model)
    options = ss.QuantiseOptions(init="keep", fit="channel")
    net = ss.quantise(model, int8, features, skip=last, options=options)
    for _, stair in stair_modules(net):
        if isinstance(stair, StairActivation):
            stair.set_quantum(float(torch.empty(()).uniform_(0.02, 0.05)))
    set_input_units(net)
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm2d):
            sign = torch.where(torch.rand(norm.num_features) < 0.2, -1, 1)
            norm.weight.data = sign * torch.empty(norm.num_features).uniform_(0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.3)
    return net.eval()


@pytest.mark.parametrize(
    ("build", "size", "constants", "file"),
    [
        (lambda: ends(ResidualBlock(4, 6, 2, True), channels=6), 8, 1_300, 11_000),
        pytest.param(ss.models.resnet8, 32, 90_000, 190_000, marks=pytest.mark.nightly),
    ],
)
def test_int8_residual_network_with_fitted_quanta_is_small_and_equal(
    build: Callable[[], nn.Module], size: int, constants: int, file: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    frozen = assert_equal_everywhere(fitted(build(), (3, size, size)), size, tmp_path)
    plan = sources(frozen, "network")[1]
    assert plan.flash <= constants
    assert onnx.model(frozen).ByteSize() <= file
