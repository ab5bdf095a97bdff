"""Export of PyTorch networks with in-place operations, several heads and other channel axes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from freezes import frozen_of
from torch import Tensor, nn

import networks
import softstair as ss
from networks import Code
from softstair.deploy import ExportError, FrozenNetwork

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


def frozen(net: nn.Module, shape: tuple[int, ...] = SHAPE) -> FrozenNetwork:
    """The frozen network, after a comparison with the trained one and with numpy."""
    x = random_bytes(shape)
    network = frozen_of(net, shape, x)
    assert len(network.features(x)[network.stairs[-1]].unique()) > 1
    return network


def assert_refused(net: nn.Module, sentence: str, shape: tuple[int, ...] = SHAPE) -> None:
    with pytest.raises(ExportError, match=f"^cannot export {sentence}"):
        ss.freeze(net, shape, zero=121, scale=64.0)


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
def test_functions_and_methods_are_frozen_as_modules_are(head: str) -> None:
    network = frozen(quantised(networks.LeNet(HEADS[head]), skip="fc"), (3, 10, 10))
    assert network.stairs == ("stair_relu", "stair_relu_1")


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (lambda x: x.view(x.size(0) * 6, -1).view(-1, 96), "'view': a change of the batch"),
        (lambda x: x.view(-1, 6, 16).max(2)[0], "'max_1': max is not supported"),
        (lambda x: x.mean(3).mean(2), "'mean': a mean over axes [3] is not supported"),
        (lambda x: x.amax((2, 3)), "'amax': amax is not supported. Use nn.AdaptiveMaxPool2d"),
        (
            lambda x: F.pad(x, (1, 1), value=1.0).flatten(1),
            "'pad': pad_with_a_number is not supported. Pad with zeros",
        ),
        (
            lambda x: F.max_pool2d(x, 2, return_indices=True)[0].flatten(1),
            "'max_pool2d_with_indices': ",
        ),
    ],
)
def test_other_functions_are_refused(head: Callable[[Tensor], Tensor], reason: str) -> None:
    assert_refused(quantised(networks.LeNet(head), skip="fc"), re.escape(reason), (3, 10, 10))


def test_a_normalisation_that_is_a_function_is_frozen() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), networks.NormAct(3), nn.Flatten(), nn.Linear(18, 3))
    assert frozen(quantised(model, skip="3")).stairs == ("1.act",)


def test_an_activation_that_is_called_twice_is_frozen() -> None:
    network = frozen(quantised(networks.PlainResNet(), skip="fc"), (3, 8, 8))
    blocks = [f"blocks.{number}.relu{call}" for number in (0, 1) for call in ("", ".2")]
    assert network.stairs == ("relu", *blocks)


def linear_over_rows(**between: nn.Module) -> nn.Module:
    """A linear layer that is applied to matrices: its outputs are the last axis."""
    modules = {"norm": nn.Identity(), "pool": nn.Identity(), "last": nn.LazyLinear(4), **between}
    code = lambda m, x: m.last(m.r(m.pool(m.norm(m.b(m.first(m.a(x)))))).flatten(1))
    model = Code(code, a=nn.Conv2d(2, 3, 1), b=nn.Linear(5, 5), first=nn.ReLU(), **modules)
    model(torch.zeros(2, *SHAPE))
    return model


@pytest.mark.parametrize(
    ("between", "reason"),
    [({"norm": nn.BatchNorm2d(3)}, "'norm': its channels are on axis 3"),
     ({"pool": nn.MaxPool2d(2)}, "'pool': it pools over the channels")],
)  # fmt: skip
def test_norm_or_pooling_over_another_axis_than_the_channels_is_refused(
    between: dict[str, nn.Module], reason: str
) -> None:
    frozen(quantised(linear_over_rows()))
    assert_refused(quantised(linear_over_rows(**between)), reason)


class InPlace(nn.Module):
    """``body`` computes the input of the last stair from features h and a sum t."""

    def __init__(self, body: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.act0 = nn.Conv2d(2, 3, 1), nn.ReLU()
        self.second, self.norm, self.act = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()
        self.side = nn.Linear(3 * 4 * 5, 3 * 4 * 5)
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


VIEWS: dict[str, tuple[Any, str]] = {
    "contiguous": (lambda net, h, t: _both(_add_to(t.contiguous(), h), t), "act"),
    "features": (lambda net, h, t: _both(_add_to(h.flatten(1), h.flatten(1)), t + h), "add"),
    "flattened view": (lambda net, h, t: net.side(_flat_and_doubled(h)), "side"),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_reading_a_tensor_changed_through_another_view_is_refused(kind: str) -> None:
    body, name = VIEWS[kind]
    assert_refused(quantised(InPlace(body)), f"'{name}': .* in place through another view")


def heads(returned: str) -> nn.Module:
    """Two heads, of which one is returned; a stair of the sums of b is never read."""

    def code(m: Any, x: Tensor) -> Tensor:
        h = m.r(m.first(x.flatten(1)))
        a, b = m.a(h), m.b(h)
        m.stair(b)
        return a if returned == "a" else b

    ends = {name: nn.Linear(6, 3) for name in "ab"}
    return Code(code, first=nn.Linear(40, 6), stair=nn.ReLU(), **ends)


@pytest.mark.parametrize("skip", [("a", "b"), ("a",), ()])
@pytest.mark.parametrize("returned", ["a", "b"])
def test_scores_come_from_the_head_that_is_returned(returned: str, skip: Any) -> None:
    net = quantised(heads(returned), skip)
    assert ss.report(net, SHAPE).freezes
    network = frozen(net)
    assert network.last.name == f"{returned}.scores"
    assert network.report is not None
    assert network.report.last_bits in ((8, 16) if returned in skip else (None,))
    assert network.stairs == ("r",)


def test_features_of_another_quantum_than_the_layer_expects_are_refused() -> None:
    net = quantised(nn.Sequential(nn.Conv2d(2, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 1)))
    net[2].input_quantum = 0.5
    assert_refused(net, r"'2': it reads quantum 1\.0, not 0\.5")


def test_features_of_another_shape_are_refused() -> None:
    code = lambda m, x: m.last(m.b(m.s(m.a(x)).flatten(2)).flatten(1))
    layers = {"a": nn.Conv2d(2, 3, 1), "b": nn.Conv1d(3, 2, 1), "last": nn.Linear(40, 4)}
    net = quantised(Code(code, **layers, s=nn.ReLU()))
    assert_refused(net, r"'b': .* reshaped to \(3, 20\).* kernels \(1, k\)\.$")
