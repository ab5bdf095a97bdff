"""The networks against the paper's description, written with bare functions."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import softstair as ss
from softstair.models import build, last_layer

pytestmark = pytest.mark.quick

TERNARY = ss.Stair.ternary()
INT4 = ss.Stair.linear(4, signed=True, quantum=0.07, thresholds="midpoint")
UINT4 = ss.Stair.linear(4, quantum=0.07, thresholds="midpoint")
SHAPES = {"vgg8": (3, 32, 32), "dscnn": (1, 49, 10), "digits": (1, 8, 8)}
CLASSES = {"vgg8": 10, "dscnn": 12, "digits": 10}
STAIRS = {"vgg8": (TERNARY, TERNARY), "dscnn": (INT4, UINT4), "digits": (TERNARY, TERNARY)}
PARAMETERS = {"vgg8": 13_881_994, "dscnn": 23_168}
NAMES = list(SHAPES)


@pytest.fixture(scope="module")
def floats() -> dict[str, nn.Module]:
    """One network of each kind, in eval() and with batch-norm statistics that are not trivial."""
    torch.manual_seed(0)
    nets = {name: build(name, CLASSES[name], SHAPES[name]) for name in NAMES}
    for net in nets.values():
        for module in net.eval().modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.running_mean.normal_(std=0.1)
                module.running_var.uniform_(0.5, 2.0)
    return nets


@pytest.fixture(scope="module")
def stairs(floats: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The same, quantised as in the paper but for the last layer."""
    return {
        name: ss.quantise(net, *STAIRS[name], skip=last_layer(net)) for name, net in floats.items()
    }


def examples(name: str, count: int) -> Tensor:
    return torch.randn(count, *SHAPES[name], generator=torch.Generator().manual_seed(1))


class ByHand:
    """Takes a network's tensors one after the other, as a description in words goes along."""

    def __init__(self, net: nn.Module) -> None:
        kinds = (nn.Conv2d, nn.Linear, nn.BatchNorm1d, nn.BatchNorm2d)
        self.left = [module for module in net.modules() if isinstance(module, kinds)]

    def weight(self, *shape: int) -> Tensor:
        weight = self.left.pop(0).weight
        assert weight.shape == shape
        return weight

    def normalised(self, x: Tensor) -> Tensor:
        norm = self.left.pop(0)
        column = lambda v: v.reshape(1, -1, *[1] * (x.dim() - 2))
        x = (x - column(norm.running_mean)) / column(norm.running_var + 1e-5).sqrt()
        return (x * column(norm.weight) + column(norm.bias)).clamp(min=0)


def vgg8_by_hand(net: nn.Module, x: Tensor) -> Tensor:
    hand = ByHand(net)
    inputs = 3
    for outputs, pools in ((128, True), (256, False), (256, True), (512, False), (512, True)):
        weight = hand.weight(outputs, inputs, 3, 3)
        x = hand.normalised(F.conv2d(F.pad(x, (1, 1, 1, 1)), weight))
        inputs = outputs
        if pools:
            x = torch.stack([x[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)]).amax(0)
    x = x.reshape(len(x), 8192)
    for inputs in (8192, 1024):
        x = hand.normalised(x @ hand.weight(1024, inputs).T)
    bias = hand.left[0].bias
    return x @ hand.weight(10, 1024).T + bias


def dscnn_by_hand(net: nn.Module, x: Tensor) -> Tensor:
    hand = ByHand(net)
    padded = x.new_zeros(len(x), 1, 5 + 49 + 5, 1 + 10 + 1)
    padded[:, :, 5:54, 1:11] = x
    x = hand.normalised(F.conv2d(padded, hand.weight(64, 1, 10, 4), stride=2))
    assert x.shape[1:] == (64, 25, 5)
    for _ in range(4):
        weight = hand.weight(64, 1, 3, 3)
        x = F.pad(x, (1, 1, 1, 1))
        channels = [F.conv2d(x[:, [c]], weight[[c]]) for c in range(64)]
        x = hand.normalised(torch.cat(channels, 1))
        x = hand.normalised(torch.einsum("nchw,oc->nohw", x, hand.weight(64, 64, 1, 1)[:, :, 0, 0]))
    assert hand.left[0].bias is None
    return x.mean((2, 3)) @ hand.weight(12, 64).T


@pytest.mark.parametrize(("name", "by_hand"), [("vgg8", vgg8_by_hand), ("dscnn", dscnn_by_hand)])
def test_the_network_is_the_papers(floats, name, by_hand):
    x = examples(name, 1)
    with torch.no_grad():
        torch.testing.assert_close(floats[name](x), by_hand(floats[name], x), rtol=1e-4, atol=1e-5)
    assert sum(p.numel() for p in floats[name].parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", NAMES)
def test_initialisation(floats, name):
    net = floats[name]
    last = net.get_submodule(last_layer(net))
    assert isinstance(last, nn.Linear)
    deviations = 4 / math.sqrt(2 * last.weight.numel())  # of the estimate, relative
    assert float(last.weight.detach().std()) == pytest.approx(0.01, rel=deviations)
    assert last.bias is None or not last.bias.any()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            assert bool((module.weight == 1).all())
            assert not module.bias.any()
        elif isinstance(module, nn.Conv2d | nn.Linear) and module is not last:
            assert module.bias is None
        assert not isinstance(module, nn.Dropout)


@pytest.mark.parametrize(("name", "layers"), [("vgg8", 7), ("dscnn", 9), ("digits", 3)])
def test_layers_of_the_stair_network_in_order(floats, stairs, name, layers):
    rows = ss.report(stairs[name]).rows
    weights = [row for row in rows if row.became == "stair weights"]
    features = [row for row in rows if row.became.endswith(("stair activation", "instead of ReLU"))]
    assert [row.layer for row in weights] == list(range(layers))
    assert [row.layer for row in features] == list(range(layers))
    kinds = (nn.Conv2d, nn.Linear)
    order = [n for n, module in floats[name].named_modules() if isinstance(module, kinds)]
    assert [row.name for row in weights] == order[:-1]
    assert type(stairs[name].get_submodule(order[-1])) is nn.Linear
    assert ss.Schedule.for_network(stairs[name], period=1).layers == layers


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(
    ("name", "forward"),
    [("dscnn", "expectation"), ("vgg8", "mode"), ("digits", "random"), ("dscnn", "mode")],
)
def test_gradient_reaches_every_parameter(floats, name, forward):
    torch.manual_seed(0)
    net = ss.quantise(floats[name], *STAIRS[name], forward=forward, skip=last_layer(floats[name]))
    F.cross_entropy(net.train()(examples(name, 2)), torch.arange(2)).backward()
    for parameter_name, parameter in net.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert bool(parameter.grad.isfinite().all()), parameter_name
        assert bool(parameter.grad.any()), parameter_name


def test_sums_run_over_integers_behind_the_first_layer(stairs):
    """The pooling keeps levels, and the input is the one thing that is not quantised."""
    for name, (_, features) in STAIRS.items():
        layers = [m for m in stairs[name].modules() if isinstance(m, ss.nn.StairLayer)]
        quanta = [layer.input_quantum for layer in layers]
        assert quanta == [None] + [features.quantum] * (len(layers) - 1)
