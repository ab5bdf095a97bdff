"""Networks that users bring: quantised, calibrated, frozen, and equal in C and ONNX."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled import needs_compiler
from freezes import formats, frozen_of
from torch import Tensor, nn

import softstair as ss
from networks import Code
from softstair.convert.conversion import conversion_of
from softstair.nn import StairActivation

ZERO, SCALE, COUNT, TRAINED = 128, 64.0, 96, 256
MOST_ERROR, KEPT = 0.03, 0.97


def float_of(x: Tensor) -> Tensor:
    return (x.float() - ZERO) / SCALE


def images(count: int, *shape: int) -> Tensor:
    """Bytes of smooth images with noise, whose classes a network can learn."""
    draw = torch.Generator().manual_seed(count)
    coarse = torch.randn(
        count, shape[0], *[max(size // 3, 2) for size in shape[1:]], generator=draw
    )
    size = shape[1:]
    kind = "linear" if len(size) == 1 else "bilinear"
    fine = F.interpolate(coarse, size=size, mode=kind, align_corners=False)
    noise = torch.randn(fine.shape, generator=draw)
    return (fine * 40 + noise * 20 + 128).clamp(0, 255).to(torch.uint8)


def trained(model: nn.Module, x: Tensor, steps: int = 60) -> nn.Module:
    """The float network after some steps: classes by the brightest part of each image."""
    parts = F.adaptive_avg_pool1d(x.float().flatten(2).mean(1, keepdim=True), 3).flatten(1)
    y = (parts - parts.mean(0)).argmax(1)
    optimiser = torch.optim.Adam(model.parameters(), 5e-3)
    for step in range(steps):
        part = slice(step * 32 % len(x), step * 32 % len(x) + 32)
        loss = F.cross_entropy(model(float_of(x[part])), y[part])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


def check_kept_activations(net: nn.Module, x: Tensor) -> list[str]:
    """Compare features after each kept activation with float, given the same sums."""
    kinds = {row.name: row.kind for row in conversion_of(net).rows}
    errors: dict[str, float] = {}

    def note(name: str) -> Any:
        def hook(stair: Any, inputs: Any, y: Tensor) -> None:
            exact = stair.function(inputs[0])
            errors[name] = float((y - exact).norm() / exact.norm())

        return hook

    handles = [
        module.register_forward_hook(note(name))
        for name, module in net.named_modules()
        if isinstance(module, StairActivation) and module.function is not None
    ]
    with torch.no_grad():
        net(float_of(x))
    for handle in handles:
        handle.remove()
    assert all(error <= MOST_ERROR for error in errors.values()), errors
    return [kinds[name] for name in errors]


def bring(
    build: Callable[[], nn.Module], shape: tuple[int, ...], folder: Path, qonnx: bool = True
) -> list[str]:
    """Take a network from float to C and ONNX; return the activations that were kept."""
    torch.manual_seed(0)
    model = build()
    x, new = images(TRAINED, *shape), images(COUNT, *shape)
    with torch.no_grad():
        model(float_of(x))  # lazy layers
    model = trained(model, x)
    net = ss.quantise(model, "int8").eval()
    ss.calibrate(net, float_of(x).split(64))
    kept = check_kept_activations(net, new)
    frozen = frozen_of(net, shape, new, ZERO, SCALE, exact=False)
    with torch.no_grad():
        expected = model(float_of(new)).argmax(1)
    assert len(expected.unique()) > 1
    assert (frozen.predict(new) == expected).float().mean() >= KEPT
    assert formats(frozen, new[:24], folder) == [True, qonnx, True]
    return kept


def squeeze_excite(channels: int, gate: nn.Module) -> nn.Module:
    """A gate for each channel, of the average over all places."""
    code = lambda m, x: x * m.gate(m.b(m.r(m.a(x.mean((2, 3), keepdim=True)))))
    return Code(code, a=nn.Conv2d(channels, 4, 1), b=nn.Conv2d(4, channels, 1), gate=gate)


def norm_of(layer: Any, *act: nn.Module) -> nn.Sequential:
    kind = nn.BatchNorm1d if isinstance(layer, nn.Conv1d) else nn.BatchNorm2d
    return nn.Sequential(layer, kind(layer.out_channels), *act)


def inverted(channels: int, gate: nn.Module) -> nn.Module:
    """A block of MobileNetV3, with its shortcut."""
    depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
    last = norm_of(nn.Conv2d(channels, channels, 1, bias=False))
    body = nn.Sequential(norm_of(depthwise, nn.Hardswish()), squeeze_excite(channels, gate), last)
    return Code(lambda m, x: x + m.body(x), body=body)


def mobile(gate: type[nn.Module]) -> nn.Module:
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3))
    first = norm_of(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Hardswish())
    wide = norm_of(nn.Conv2d(8, 12, 3, 2, bias=False), nn.Hardswish())
    return nn.Sequential(first, inverted(8, gate()), wide, head)


@needs_compiler
@pytest.mark.parametrize(
    "gate", [nn.Hardsigmoid, pytest.param(nn.Sigmoid, marks=pytest.mark.nightly)]
)
def test_squeeze_and_excite_with_hardswish(gate: type[nn.Module], tmp_path: Path) -> None:
    kept = bring(lambda: mobile(gate), (3, 8, 8), tmp_path)
    assert kept == ["Hardswish", "Hardswish", gate.__name__, "Hardswish"]


@needs_compiler
@pytest.mark.nightly
def test_an_average_over_25_by_5_before_a_layer(tmp_path: Path) -> None:
    def build() -> nn.Module:
        depthwise = norm_of(nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.ReLU())
        head = nn.Sequential(nn.AvgPool2d((25, 5)), nn.Flatten(), nn.Linear(8, 12), nn.ReLU())
        first = norm_of(nn.Conv2d(1, 8, (10, 4), (2, 2), (5, 1), bias=False), nn.ReLU())
        return nn.Sequential(first, depthwise, head, nn.Linear(12, 3))

    # The sums of the layer exceed what float32 holds.
    assert bring(build, (1, 49, 10), tmp_path, qonnx=False) == []


@needs_compiler
@pytest.mark.nightly
def test_a_network_with_gelu_and_prelu(tmp_path: Path) -> None:
    def build() -> nn.Module:
        first = norm_of(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.GELU(), nn.MaxPool2d(2))
        second = norm_of(nn.Conv2d(8, 12, 3, padding=1), nn.PReLU(12))
        third = nn.Sequential(nn.Conv2d(12, 12, 3), nn.GELU(approximate="tanh"))
        head = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.PReLU(init=-0.1), nn.Linear(16, 3))
        return nn.Sequential(first, second, third, head)

    assert bring(build, (3, 8, 8), tmp_path) == ["GELU", "PReLU", "GELU", "PReLU"]


def gated(channels: int, dilation: int) -> nn.Module:
    """A causal layer of a temporal network: tanh · sigmoid, and a shortcut."""
    conv = lambda: nn.Conv1d(channels, channels, 3, dilation=dilation)
    modules = {"pad": nn.ZeroPad1d((2 * dilation, 0)), "filter": conv(), "gate": conv()}

    def code(m: nn.Module, x: Tensor) -> Tensor:
        y = m.pad(x)
        return x + m.mix(torch.tanh(m.filter(y)) * torch.sigmoid(m.gate(y)))

    return Code(code, **modules, mix=nn.Conv1d(channels, channels, 1))


@needs_compiler
def test_a_temporal_network_with_gates(tmp_path: Path) -> None:
    def build() -> nn.Module:
        first = nn.Sequential(nn.Conv1d(2, 12, 1), nn.Tanh())
        last = nn.Sequential(nn.AvgPool1d(16), nn.Flatten(), nn.Linear(24, 3))
        return nn.Sequential(first, *(gated(12, 2**n) for n in range(3)), last)

    assert sorted(bring(build, (2, 32), tmp_path)) == ["Tanh"] + ["sigmoid"] * 3 + ["tanh"] * 3
