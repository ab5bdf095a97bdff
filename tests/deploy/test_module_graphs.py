"""Export of PyTorch networks with in-place operations, several heads and other channel axes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from random_modules import SCALE, ZERO, as_floats
from torch import Tensor, nn

import networks
import softstair as ss
from networks import Code
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
    comparison = verify(net, network, x)["integer network"]
    assert comparison.mismatches == 0, str(comparison)
    with torch.no_grad():
        scores = net(as_floats(x))
    assert torch.equal(network(x), scores)
    assert len(network.features(x)[network.stairs[-1]].unique()) > 1
    return network


def _unpacked(x: Tensor) -> Tensor:
    images, channels, height, width = x.shape
    return x.reshape(images, channels * height * width)


def _asserted(x: Tensor) -> Tensor:
    torch._assert(x.ndim == 4, f"expected 4 dimensions, got {x.ndim}")
    return x.contiguous().flatten(1)


HEADS: dict[str, Callable[[Tensor], Tensor]] = {
    "view, size": lambda x: x.view(x.size(0), -1),
    "view, -1": lambda x: x.view(-1, 6 * 4 * 4),
    "view, shape": lambda x: x.view((x.shape[0], x.shape[1:].numel())),
    "reshape, list": lambda x: x.reshape([x.shape[0], -1]),
    "reshape, function": lambda x: torch.reshape(x, (x.size()[0], -1)),
    "reshape, unpacked shape": _unpacked,
    "flatten, names": lambda x: torch.flatten(x, start_dim=1, end_dim=3),
    "view, twice": lambda x: x.view(-1, 6, 16).flatten(1),
    "ndim": _asserted,
    "mean": lambda x: x.mean([2, 3]),
    "mean, keepdim": lambda x: torch.mean(x, dim=(-1, -2), keepdim=True).squeeze(3).squeeze(2),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2, stride=1).flatten(1),
    "avg_pool2d, size": lambda x: F.avg_pool2d(x, x.size()[2:]).squeeze(),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, [1, 1]).flatten(1),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, stride=2, padding=1).flatten(1),
}


@pytest.mark.parametrize("head", HEADS)
def test_functions_and_methods_export_as_modules_do(head: str) -> None:
    network = exported(quantised(networks.LeNet(HEADS[head]), skip="fc"), (3, 10, 10))
    assert network.stairs == ("stair_relu", "stair_relu_1")


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (lambda x: x.view(x.size(0) * 6, -1).view(-1, 96), "the batch"),
        (lambda x: x.view(-1, 6, 16).max(2)[0], "max is not supported"),
        (lambda x: x.mean(3).mean(2), "a mean over axes [3] is not supported. Use x.mean([2, 3])"),
        (lambda x: x.amax((2, 3)), "amax is not supported. Use nn.AdaptiveMaxPool2d(1) instead."),
        (lambda x: x[:, :, 0, 0], "getitem is not supported. To drop axes of length 1, use x.fl"),
        (lambda x: F.pad(x, (1, 1)).flatten(1), "pad is not supported. Use nn.ZeroPad2d instead."),
        (lambda x: x.flatten(1) * x.size(1), "mul is a product"),
        (lambda x: x.flatten(1) / x.size(0), "truediv is not supported"),
        (lambda x: (0 + x + x).flatten(1), "Python's sum begins with 0"),
        (lambda x: F.max_pool2d(x, 2, return_indices=True)[0].flatten(1), "indices is not"),
    ],
)
def test_other_functions_raise(head: Callable[[Tensor], Tensor], reason: str) -> None:
    with pytest.raises(ExportError, match=re.escape(reason)):
        integerise(quantised(networks.LeNet(head), skip="fc"), (3, 10, 10), ZERO, SCALE)


def test_a_normalisation_that_is_a_function_exports() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), networks.NormAct(3), nn.Flatten(), nn.Linear(18, 3))
    assert exported(quantised(model, skip="3")).stairs == ("1.act",)


def test_an_activation_that_is_called_twice_exports() -> None:
    network = exported(quantised(networks.PlainResNet(), skip="fc"), (3, 8, 8))
    blocks = [f"blocks.{number}.relu{call}" for number in (0, 1) for call in ("", ".2")]
    assert network.stairs == ("relu", *blocks)


def linear_over_rows(**between: nn.Module) -> nn.Module:
    """A linear layer that is applied to matrices: its outputs are the last axis."""
    modules = {"norm": nn.Identity(), "pool": nn.Identity(), "last": nn.LazyLinear(4), **between}
    code = lambda m, x: m.last(m.r(m.pool(m.norm(m.b(m.first(m.a(x)))))).flatten(1))
    model = Code(code, a=nn.Conv2d(2, 3, 1), b=nn.Linear(5, 5), first=nn.ReLU(), **modules)
    model(torch.zeros(2, *SHAPE))
    return model


@pytest.mark.parametrize("between", [{"norm": nn.BatchNorm2d(3)}, {"pool": nn.MaxPool2d(2)}])
def test_norm_or_pooling_over_another_axis_than_the_channels_raises(
    between: dict[str, nn.Module], tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match="linear layer over positions"):
        write(exported(quantised(linear_over_rows())), tmp_path)
    (kind,) = between
    with pytest.raises(ExportError, match=rf"'{kind}': (.* on axis 3|it pools over the channels)"):
        integerise(quantised(linear_over_rows(**between)), SHAPE, ZERO, SCALE)


class InPlace(nn.Module):
    """``body`` computes the input of the last stair from features h and a sum t."""

    def __init__(self, body: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.act0 = nn.Conv2d(2, 3, 1), nn.ReLU()
        self.second, self.norm, self.act = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()
        self.side, self.small = nn.Linear(3 * 4 * 5, 3), nn.Conv2d(3, 3, (4, 5))
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
    "contiguous": lambda net, h, t: _both(_add_to(t.contiguous(), h), t),
    "features": lambda net, h, t: _both(_add_to(h.flatten(1), h.flatten(1)), t + h),
    "flattened view": lambda net, h, t: net.side(_flat_and_doubled(h)),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_reading_a_tensor_changed_through_another_view_raises(kind: str) -> None:
    with pytest.raises(ExportError, match="in place through another view"):
        integerise(quantised(InPlace(VIEWS[kind])), SHAPE, ZERO, SCALE)


def test_in_place_addition_that_must_broadcast_its_target_raises() -> None:
    """The float network raises an error too: (3, 1, 1) cannot hold the sum."""
    body = lambda net, h, t: _add_to(net.small(h), h)
    with pytest.raises(ExportError, match="Write x = x"):
        integerise(quantised(InPlace(body)), SHAPE, ZERO, SCALE)


def heads(returned: str) -> nn.Module:
    """Two heads, of which one is returned; the sums of b may have a stair too."""

    def code(m: Any, x: Tensor) -> Tensor:
        h = m.r(m.first(x.flatten(1)))
        a, b = m.a(h), m.b(h)
        if returned == "b, with a stair":
            m.stair(b)
        return a if returned == "a" else b

    ends = {name: nn.Linear(6, 3) for name in "ab"}
    return Code(code, first=nn.Linear(40, 6), stair=nn.ReLU(), **ends)


@pytest.mark.parametrize("skip", [("a", "b"), ()])
@pytest.mark.parametrize("returned", ["a", "b"])
def test_scores_come_from_the_head_that_is_returned(
    returned: str, skip: tuple[str, ...], tmp_path: Path
) -> None:
    net = quantised(heads(returned), skip)
    for parameter in (net.a.weight, net.a.bias, net.b.weight, net.b.bias):
        parameter.data = torch.randint(-8, 9, parameter.shape) / 8
    network = exported(net)
    write(network, tmp_path)
    if skip:
        assert isinstance(quantise_last_layer(net, SHAPE, ZERO, SCALE).get_submodule(returned),
                          ss.nn.StairLinear)  # fmt: skip


def test_scores_that_a_stair_also_reads_raise() -> None:
    """The stair may negate the weights."""
    with pytest.raises(ExportError, match="'b': a stair reads it"):
        integerise(quantised(heads("b, with a stair")), SHAPE, ZERO, SCALE)


def test_features_of_another_quantum_than_the_layer_expects_raise() -> None:
    net = quantised(nn.Sequential(nn.Conv2d(2, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 1)))
    net[2].input_quantum = 0.5
    with pytest.raises(ExportError, match=r"quantum 1\.0, not 0\.5"):
        integerise(net, SHAPE, ZERO, SCALE)


def test_convolution_over_matrices_raises() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2))
    with pytest.raises(ExportError, match="its input has shape \\(3, 4\\)"):
        integerise(quantised(model), (3, 4), ZERO, SCALE)


def test_features_of_another_shape_raise() -> None:
    code = lambda m, x: m.last(m.b(m.s(m.a(x)).flatten(2)).flatten(1))
    layers = {"a": nn.Conv2d(2, 3, 1), "b": nn.Conv1d(3, 2, 1), "last": nn.Linear(40, 4)}
    net = quantised(Code(code, **layers, s=nn.ReLU()))
    with pytest.raises(ExportError, match=r"'b': .* reshaped to \(3, 20\).* kernels \(1, k\)\.$"):
        integerise(net, SHAPE, ZERO, SCALE)


def two_branches() -> nn.Module:
    """Two quantised branches and a stair on their sum."""

    def code(m: Any, x: Tensor) -> Tensor:
        a = m.r(m.a(x))
        return m.last(m.both(m.s(m.b(a)) + a).flatten(1))

    convolutions = {"a": nn.Conv2d(2, 3, 1), "b": nn.Conv2d(3, 3, 3, padding=1)}
    return Code(code, **convolutions, s=nn.ReLU(), both=nn.ReLU(), last=nn.Linear(60, 4))


@pytest.mark.parametrize("thresholds", ["midpoint", "floor"])
def test_stair_on_quantised_features_is_exact_or_raises(thresholds: Any) -> None:
    """Sums of multiples of 0.3 round, which matters only if thresholds are multiples of it."""
    stair = ss.Stair.linear(4, quantum=0.3, thresholds=thresholds)
    net = ss.quantise(two_branches(), TERNARY, stair).eval()
    if thresholds == "floor":
        with pytest.raises(ExportError, match="rounding decides"):
            integerise(net, SHAPE, ZERO, SCALE)
    else:
        assert len(exported(net).stairs) == 3
