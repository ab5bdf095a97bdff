"""What fused training leaves as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import softstair as ss
from softstair._accelerate.fuse import fused, not_fused
from softstair.models import build, last_layer

pytestmark = pytest.mark.quick
TERNARY = ss.Stair.ternary()


def quantised(model: nn.Module) -> nn.Module:
    return ss.quantise(model, TERNARY, TERNARY, skip=last_layer(model))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("vgg8", (3, 32, 32)), ("dscnn", (1, 49, 10)), ("mobilenet-16", (3, 16, 16)),
     ("resnet20", (3, 32, 32))],
)  # fmt: skip
def test_all_stairs_of_plain_depthwise_and_residual_networks_are_fused(
    name: str, shape: tuple[int, ...]
) -> None:
    assert not_fused(quantised(build(name, 10, shape))) == ""


class Doubled(nn.Module):
    """A sum of three: what is added to the normalisation is no shortcut of the stair."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.act = nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.a(x)) + x + 1)


def test_stairs_after_another_operation_are_named() -> None:
    net = ss.quantise(Doubled(), TERNARY, TERNARY)
    assert not_fused(net) == "1 of 1 stairs are not fused: act"


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.act = nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.a(x))) if bool(x.sum() < 1e9) else x


def test_a_network_that_cannot_be_traced_is_said_to_run_as_it_is() -> None:
    net = ss.quantise(Untraceable(), TERNARY, TERNARY, example_inputs=torch.zeros(2, 6))
    assert "torch.fx" in not_fused(net)
    assert fused(net) is None


def test_stairs_without_a_fused_layer_are_named() -> None:
    def layers(bias: bool) -> nn.Module:
        norm = (nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
        return nn.Sequential(nn.Linear(6, 4, bias=bias), *norm)

    assert not_fused(quantised(layers(bias=True))) == "1 of 1 stairs are not fused: 2"
    uneven = ss.Stair((0.0, 1.0, 4.0), (0.5, 2.5))
    net = ss.quantise(layers(bias=False), TERNARY, uneven, skip="3")
    assert not_fused(net) == "1 of 1 stairs are not fused: 2"
    net = quantised(layers(bias=False))
    assert not_fused(net) == ""
    net.register_forward_hook(lambda *_: None)
    assert not_fused(net) == "no layer is fused: it has forward hooks"


def in_a_block() -> nn.Module:
    block = nn.Sequential(nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU())
    return quantised(nn.Sequential(block, nn.Linear(4, 2)))


def _hook(net: nn.Module) -> None:
    net.get_submodule("0").register_forward_hook(lambda module, x, y: -y)


def _replace(net: nn.Module) -> None:
    net.add_module("0", nn.Sequential(*net.get_submodule("0"), nn.Tanh()))


def _override(net: nn.Module) -> None:
    net.get_submodule("0").forward = lambda x: -x  # type: ignore[method-assign]


@pytest.mark.parametrize("change", [_hook, _replace, _override])
def test_a_network_that_was_changed_is_not_fused(change: Callable[[nn.Module], None]) -> None:
    """The graphs of quantise no longer say what it computes."""
    net = in_a_block()
    assert not_fused(net) == ""
    change(net)
    assert fused(net) is None
    assert "no layer is fused" in not_fused(net)


def test_a_float_network_and_one_made_by_hand() -> None:
    assert not_fused(nn.Linear(2, 2)) == ""
    assert "softstair.quantise" in not_fused(nn.Sequential(ss.nn.StairActivation(TERNARY)))
