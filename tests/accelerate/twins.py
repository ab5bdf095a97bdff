"""A small network with one layer of every kind that is fused, and its float64 twin."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import softstair as ss

TERNARY = ss.Stair.ternary()
STAIRS = {
    "ternary": (TERNARY, TERNARY),
    "heaviside": (ss.Stair.sign(), ss.Stair.heaviside()),
    "INT4": (
        ss.Stair.linear(4, signed=True, quantum=0.07, thresholds="midpoint"),
        ss.Stair.linear(4, quantum=0.07, thresholds="midpoint"),
    ),
    "INT8 first": (
        {"0": ss.Stair.linear(8, signed=True, quantum=2**-7, thresholds="midpoint"), "*": TERNARY},
        TERNARY,
    ),
    "float first": ({"0": None, "*": TERNARY}, TERNARY),
    "by channel": ("int4", None),
    "ternary by channel": ("ternary", None),
    "ternary weights": (TERNARY, ss.Stair.linear(2, quantum=0.5, thresholds="floor")),
}


def model(side: int = 8, channels: int = 3) -> nn.Module:
    """Convolutions of few channels and of many, pooled and not, then linear layers.

    One channel takes the interpreter a third of the time of three in the first layer.
    """
    last = 16 * (side // 4) ** 2
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(last, 24, bias=False), nn.BatchNorm1d(24), nn.ReLU(),
        nn.Linear(24, 5),
    )  # fmt: skip


def pair(
    stairs: str,
    noise: str,
    forward: str,
    side: int = 8,
    quanta: Any = "fixed",
    make: Callable[[], nn.Module] | None = None,
    channels: int = 3,
    shortcuts: Any = None,
    gradient_margin: Any = "auto",
) -> tuple[nn.Module, nn.Module]:
    """A stair network and the same in float64; normalisations with weights of either sign."""
    torch.manual_seed(0)
    weights, features = STAIRS[stairs]
    network, last = (model(side, channels), "15") if make is None else (make(), "fc")
    rare = ss.QuantiseOptions(shortcuts=shortcuts, gradient_margin=gradient_margin)
    options = {"skip": last, "quanta": quanta, "options": rare}
    net = ss.quantise(network, weights, features, noise, forward, **options)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    for _, stair in ss.nn.stair_modules(net):
        if stair.log_ratio is not None:
            nn.init.uniform_(stair.log_ratio, -0.3, 0.3)
    return net, copy.deepcopy(net).double()


def batch(side: int = 8, images: int = 6, channels: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(images, channels, side, side), torch.randint(5, (images,))


def learn(run: object, x: Tensor, y: Tensor) -> Tensor:
    """Scores, after a backward pass."""
    scores = run(x)  # type: ignore[operator]
    F.cross_entropy(scores, y).backward()
    return scores.detach()


def differences(net: nn.Module, twin: nn.Module) -> dict[str, float]:
    """How far each gradient and statistic is from the twin's, in shares of the twin's largest."""
    found = {}
    twins = dict(twin.named_parameters())
    for name, parameter in net.named_parameters():
        found[name] = distance(parameter.grad, twins[name].grad)
    buffers = dict(twin.named_buffers())
    for name, value in net.named_buffers():
        if "running" in name or "tracked" in name:
            found[name] = distance(value, buffers[name])
    return found


def distance(value: Tensor, wanted: Tensor) -> float:
    wanted = wanted.detach().double().cpu()
    gap = (value.detach().double().cpu() - wanted).abs().amax()
    return float(gap / wanted.abs().amax().clamp(min=1e-12)) if wanted.abs().amax() else float(gap)
