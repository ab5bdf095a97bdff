"""Graphs of PyTorch networks: shortcuts that broadcast, in-place operations, axes of channels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from random_modules import SCALE, ZERO, as_floats
from torch import Tensor, nn

import softstair as ss
from softstair.deploy import ExportError, IntegerNetwork, integerise, quantise_last_layer, verify
from softstair.deploy.c import write

TERNARY = ss.Stair.ternary()
SHAPE = (2, 4, 5)


def quantised(model: nn.Module, skip: str | tuple[str, ...] = ()) -> Any:
    """A ternary network whose channels have thresholds and biases of their own."""
    torch.manual_seed(0)
    net = ss.quantise(model, TERNARY, TERNARY, skip=skip).eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.weight.data = 2 * torch.rand(module.num_features) - 1
            module.bias.data = torch.rand(module.num_features) - 0.5
            module.running_mean = torch.randn(module.num_features)
            module.running_var = 4 * torch.rand(module.num_features) + 1
        elif isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
            module.bias.data = torch.randn(len(module.bias))
    return net


def random_bytes(shape: tuple[int, ...] = SHAPE) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (40, *shape), dtype=torch.uint8, generator=generator)


def exported(net: nn.Module, shape: tuple[int, ...] = SHAPE) -> IntegerNetwork:
    """The integer network, after a comparison with the trained one."""
    network, x = integerise(net, shape, ZERO, SCALE), random_bytes(shape)
    found = verify(net, network, x)["integer network"]
    assert found.mismatches == 0, str(found)
    with torch.no_grad():
        scores = net(as_floats(x))
    assert torch.equal(network(x), scores)
    assert len(network.features(x)[network.stairs[-1]].unique()) > 1
    return network


class InPlace(nn.Module):
    """Features h and a sum t, of which ``body`` makes what the last stair takes."""

    def __init__(self, body: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.act0 = nn.Conv2d(2, 3, 1), nn.ReLU()
        self.second, self.norm, self.act = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()
        self.relu, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True)
        self.body = body
        self.last = nn.Linear(3 * 4 * 5, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act0(self.first(x))
        t = self.norm(self.second(h))
        return self.last(self.act(self.body(self, h, t)).flatten(1))


def _add_to(target: Tensor, other: Tensor) -> Tensor:
    target += other
    return target


def _both(first: Tensor, second: Tensor) -> Tensor:
    """The second; the first is computed and not read."""
    return second


CHANGED = {
    "an alias": lambda net, h, t: _both(_add_to(t, h), t),
    "a dropout's input": lambda net, h, t: _both(_add_to(net.drop(t), h), t),
    "contiguous": lambda net, h, t: _both(_add_to(t.contiguous(), h), t),
    "a module's input": lambda net, h, t: _both(net.relu(t), t),
    "a function's input": lambda net, h, t: _both(F.relu(t, True), t),
    "a method's input": lambda net, h, t: _both(t.relu_(), t),
    "torch.relu_": lambda net, h, t: _both(torch.relu_(t), t),
    "a shortcut": lambda net, h, t: _both(_add_to(h, h), t + h),
    "a view": lambda net, h, t: _both(_add_to(h.flatten(1), h.flatten(1)), t + h),
}
UNCHANGED = {
    "an alias": lambda net, h, t: _add_to(t, h),
    "a dropout that writes nothing": lambda net, h, t: _both(net.drop(t), t) + h,
    "the features that a dropout takes": lambda net, h, t: t + _both(net.drop(h), h),
    "a module": lambda net, h, t: net.relu(t) + h,
    "a function": lambda net, h, t: F.relu(t, True) + h,
    "a method": lambda net, h, t: t.relu_(),
    "a shortcut": lambda net, h, t: _add_to(h, t),
}
FLOAT = ("relu", "*stair_relu*")


def _in_place(body: Callable[..., Tensor], uses_function: bool) -> Any:
    return quantised(InPlace(body), skip=FLOAT if uses_function else FLOAT[:1])


@pytest.mark.parametrize("kind", CHANGED)
def test_what_was_changed_in_place_is_not_read_as_it_was(kind: str) -> None:
    net = _in_place(CHANGED[kind], "function" in kind or "method" in kind or "torch" in kind)
    with pytest.raises(ExportError, match="changed in place: read the result"):
        integerise(net, SHAPE, ZERO, SCALE)


@pytest.mark.parametrize("kind", UNCHANGED)
def test_the_result_of_an_operation_in_place_is_exact(kind: str) -> None:
    exported(_in_place(UNCHANGED[kind], kind in ("a function", "a method")))


class Heads(nn.Module):
    def __init__(self, returned: str) -> None:
        super().__init__()
        self.flat, self.first, self.act = nn.Flatten(), nn.Linear(40, 6), nn.ReLU()
        self.a, self.b, self.act_b = nn.Linear(6, 3), nn.Linear(6, 3), nn.ReLU()
        self.returned = returned

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.first(self.flat(x)))
        a, b = self.a(h), self.b(h)
        if self.returned == "b, with a stair":
            self.act_b(b)
        return a if self.returned == "a" else b


@pytest.mark.parametrize("skip", [("a", "b"), ()])
@pytest.mark.parametrize("returned", ["a", "b"])
def test_the_head_that_is_returned_gives_the_scores(
    returned: str, skip: tuple[str, ...], tmp_path: Path
) -> None:
    net = quantised(Heads(returned), skip)
    for parameter in (net.a.weight, net.a.bias, net.b.weight, net.b.bias):
        parameter.data = torch.randint(-8, 9, parameter.shape) / 8
    network = exported(net)
    write(network, tmp_path)
    if skip:
        assert isinstance(quantise_last_layer(net, SHAPE, ZERO, SCALE).get_submodule(returned),
                          ss.nn.StairLinear)  # fmt: skip


def test_a_sum_that_is_the_scores_and_has_a_stair_is_refused() -> None:
    """The stair may turn the sign of its weights round."""
    with pytest.raises(ExportError, match="sum of b, which a stair takes too"):
        integerise(quantised(Heads("b, with a stair")), SHAPE, ZERO, SCALE)
