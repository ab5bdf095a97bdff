"""Graphs of PyTorch networks: shortcuts that broadcast, in-place operations, axes of channels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled import needs_compiler
from random_modules import SCALE, ZERO, as_floats
from torch import Tensor, nn

import softstair as ss
from softstair.deploy import (
    ExportError,
    IntegerNetwork,
    c_runner,
    integerise,
    onnx_runner,
    quantise_last_layer,
    verify,
)
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


class Places(nn.Module):
    """A linear layer that is applied to matrices: its outputs are the last axis."""

    def __init__(self, *, norm: bool = False, pool: bool = False) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(5, 5), nn.ReLU()
        self.first, self.act0 = nn.Conv2d(2, 3, 1), nn.ReLU()
        self.norm = nn.BatchNorm2d(3) if norm else nn.Identity()
        self.pool = nn.MaxPool2d(2) if pool else nn.Identity()
        self.last = nn.Linear(3 * 4 if pool else 3 * 4 * 5, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act0(self.first(x))
        y = self.pool(self.norm(self.linear(h)))
        return self.last(self.act(y).flatten(1))


@pytest.mark.parametrize("kind", ["norm", "pool"])
def test_what_works_on_another_axis_than_the_weights_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="linear layer over positions"):
        write(exported(quantised(Places())), tmp_path)
    with pytest.raises(ExportError, match=rf"'{kind}': (.* on axis 3|it pools over the channels)"):
        integerise(quantised(Places(**{kind: True})), SHAPE, ZERO, SCALE)


class Convolutional(nn.Module):
    def __init__(self, kernel: tuple[int, int], bias: bool) -> None:
        super().__init__()
        self.first, self.act = nn.Conv2d(2, 6, 1), nn.ReLU()
        self.last = nn.Conv2d(6, 4, kernel, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.first(x)))


@needs_compiler
@pytest.mark.parametrize(
    ("kernel", "bias", "fit"),
    [((4, 5), True, "channel"), ((4, 5), False, "layer"), ((1, 1), True, "layer"),
     ((1, 2), False, "channel")],
)  # fmt: skip
def test_a_convolution_gives_scores(
    kernel: tuple[int, int], bias: bool, fit: Any, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model = Convolutional(kernel, bias)
    net = ss.quantise(model, TERNARY, TERNARY, init="keep", fit=fit).eval()
    network, x = exported(net), random_bytes()
    runners = {"onnx": onnx_runner(network, tmp_path)}
    if kernel == (4, 5):
        runners["c"] = c_runner(network, tmp_path)
    else:
        with pytest.raises(ExportError, match="scores for each position"):
            write(network, tmp_path)
    found = verify(net, network, x, runners)
    assert all(comparison.mismatches == 0 for comparison in found.values())
    assert all("last.scores" in comparison.compared for comparison in found.values())


class InPlace(nn.Module):
    """Features h and a sum t, of which ``body`` makes what the last stair takes."""

    def __init__(self, body: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.act0 = nn.Conv2d(2, 3, 1), nn.ReLU()
        self.second, self.norm, self.act = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()
        self.relu, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True)
        self.third, self.side = nn.Conv2d(3, 3, 1), nn.Linear(3 * 4 * 5, 3)
        self.small = nn.Conv2d(3, 3, (4, 5))
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


def _flat_and_doubled(h: Tensor) -> Tensor:
    """A view of features that are changed afterwards."""
    flat = h.flatten(1)
    h += h
    return flat


VIEWS = {
    "a copy, perhaps": lambda net, h, t: _both(_add_to(t.contiguous(), h), t),
    "the features": lambda net, h, t: _both(_add_to(h.flatten(1), h.flatten(1)), t + h),
    "a view": lambda net, h, t: net.side(_flat_and_doubled(h)),
}
EXACT = {
    "its result": lambda net, h, t: _add_to(t, h),
    "what it changed": lambda net, h, t: _both(_add_to(t, h), t),
    "a dropout's input": lambda net, h, t: _both(_add_to(net.drop(t), h), t),
    "twice": lambda net, h, t: _both(net.relu(_add_to(t, h)), t),
    "through another name": lambda net, h, t: _both(net.relu(_both(_add_to(t, h), t)), t),
    "a dropout that writes nothing": lambda net, h, t: _both(net.drop(t), t) + h,
    "the features that a dropout takes": lambda net, h, t: t + _both(net.drop(h), h),
    "the result of a module": lambda net, h, t: net.relu(t) + h,
    "the input of a module": lambda net, h, t: _both(net.relu(t), t) + h,
    "the result of a function": lambda net, h, t: F.relu(t, True) + h,
    "the input of a function": lambda net, h, t: _both(F.relu(t, True), t) + h,
    "the input of a method": lambda net, h, t: _both(t.relu_(), t),
    "the input of torch.relu_, a function": lambda net, h, t: _both(torch.relu_(t), t),
    "the input of add_": lambda net, h, t: _both(t.add_(h), t),
    "the result of add": lambda net, h, t: t.add(h),
    "features": lambda net, h, t: _add_to(h, t),
    "features under their first name": lambda net, h, t: net.third(_both(_add_to(h, h), h)),
}
FLOAT = ("relu", "*stair_relu*")


def _in_place(body: Callable[..., Tensor], kind: str) -> Any:
    uses_function = "function" in kind or "method" in kind
    return quantised(InPlace(body), skip=FLOAT if uses_function else FLOAT[:1])


@pytest.mark.parametrize("kind", EXACT)
def test_what_an_operation_in_place_changes_is_exact(kind: str) -> None:
    exported(_in_place(EXACT[kind], kind))


@pytest.mark.parametrize("kind", VIEWS)
def test_what_was_changed_through_another_view_is_not_read(kind: str) -> None:
    with pytest.raises(ExportError, match="in place through another view"):
        integerise(_in_place(VIEWS[kind], kind), SHAPE, ZERO, SCALE)


def test_an_addition_in_place_that_does_not_fit_is_refused() -> None:
    """The float network raises an error too: (3, 1, 1) cannot hold the sum."""
    body = lambda net, h, t: _add_to(net.small(h), h)
    with pytest.raises(ExportError, match="Write x = x"):
        integerise(_in_place(body, ""), SHAPE, ZERO, SCALE)


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
    with pytest.raises(ExportError, match="'b': a stair reads it"):
        integerise(quantised(Heads("b, with a stair")), SHAPE, ZERO, SCALE)


def test_features_of_another_quantum_than_a_layer_sums_are_refused() -> None:
    net = quantised(Convolutional((1, 1), True))
    net.last.input_quantum = 0.5
    with pytest.raises(ExportError, match=r"quantum 1\.0, not 0\.5"):
        integerise(net, SHAPE, ZERO, SCALE)


def test_a_convolution_over_matrices_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2))
    with pytest.raises(ExportError, match="its input has shape \\(3, 4\\)"):
        integerise(quantised(model), (3, 4), ZERO, SCALE)
