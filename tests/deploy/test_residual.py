"""Integer networks of residual networks: shortcuts with weights, linear bottlenecks."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import pytest
import torch
from compiled import BUILDS, needs_compiler, program_of, run_in_program
from test_random_modules import by_onnx
from torch import Tensor, nn

import softstair as ss
from networks import Code, InvertedBottleneck, make
from softstair.convert.options import Sums
from softstair.convert.units import set_input_units
from softstair.deploy import ExportError, IntegerNetwork, integerise, onnx, verify
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


def exported(net: nn.Module, x: Tensor) -> IntegerNetwork:
    """The integer network, after a comparison with the trained one."""
    network = integerise(net, SHAPE, 128, 64.0)
    comparison = verify(net, network, x)["integer network"]
    assert comparison.mismatches == 0, str(comparison)
    assert any(len(network.features(x)[stair].unique()) > 4 for stair in network.stairs)
    return network


CASES = [(build, sums) for build in NETWORKS.values() for sums in SUMS]


# In the default lane each network has one kind of sums, and each kind is that of three networks.
@needs_compiler
@pytest.mark.parametrize(
    "builds", [CASES[::4] + CASES[3::4], pytest.param(CASES, marks=pytest.mark.nightly)]
)
def test_sums_without_an_activation_export_exactly(
    builds: list[tuple[Callable[[], nn.Module], Sums]], tmp_path: Path
) -> None:
    x = torch.randint(256, (9, *SHAPE), dtype=torch.uint8)
    nets = [quantised(build(), UINT4, sums) for build, sums in builds]
    # Shortcuts of more levels, which weights read through a second stair.
    nets += [quantised(build(), UINT4, sums, UINT6) for build, sums in builds[:1]]
    networks = {number: exported(net, x) for number, net in enumerate(nets)}
    program = program_of(networks, tmp_path)
    for number, network in networks.items():
        expected = network.features(x)
        for actual in (by_onnx(network, x), run_in_program(program, number, network, x)):
            *hidden, last = expected
            assert all(torch.equal(expected[name], actual[name]) for name in hidden)
            torch.testing.assert_close(expected[last], actual[last])


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("name", NETWORKS)
def test_sums_without_a_stair_raise(name: str) -> None:
    with pytest.raises(ExportError):
        integerise(quantised(NETWORKS[name](), UINT4, None), SHAPE, 128, 64.0)


@pytest.mark.parametrize(
    ("sums", "bits"), [("branches", 8), pytest.param("sum", 8, marks=pytest.mark.nightly)]
)
def test_bottlenecks_of_many_levels_export_exactly(sums: Sums, bits: int) -> None:
    features = ss.Stair.linear(bits, quantum=0.05)
    net = quantised(ends(InvertedBottleneck(4, 4), InvertedBottleneck(4, 4)), features, sums)
    exported(net, torch.randint(256, (12, *SHAPE), dtype=torch.uint8))


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


@needs_compiler
@pytest.mark.parametrize(
    ("build", "size", "constants", "file"),
    [
        (lambda: ends(ResidualBlock(4, 6, 2, True), channels=6), 8, 7_000, 24_000),
        # In ONNX, layers with a weight of -128 in a channel that decreases have words as weights.
        pytest.param(ss.models.resnet8, 32, 120_000, 215_000, marks=pytest.mark.nightly),
    ],
)
def test_int8_residual_network_with_fitted_quanta_is_small_and_equal(
    build: Callable[[], nn.Module], size: int, constants: int, file: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net, x = fitted(build(), (3, size, size)), torch.randint(256, (4, 3, size, size))
    network, x = integerise(net, (3, size, size), 128, 64.0), x.to(torch.uint8)
    assert verify(net, network, x)["integer network"].mismatches == 0
    expected = network.features(x)
    del expected[network.last.name]  # sums of floats, in another order
    program = program_of({0: network}, tmp_path, BUILDS["native"])
    for actual in (by_onnx(network, x), run_in_program(program, 0, network, x)):
        assert all(torch.equal(expected[name], actual[name]) for name in expected)
    texts, plan = sources(network, "network")
    assert plan.flash <= constants
    assert "ss_store_wide" in texts["network.c"]
    assert "ss_store_with_shortcut" not in texts["network.c"]
    assert onnx.model(network).ByteSize() <= file
