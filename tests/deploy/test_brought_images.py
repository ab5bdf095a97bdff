"""Networks that users bring whose outputs are several, positions, features or images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled import needs_compiler
from freezes import formats, frozen_of
from test_brought import COUNT, KEPT, SCALE, TRAINED, ZERO, float_of, images, norm_of
from torch import Tensor, nn

import softstair as ss
from networks import Code
from softstair.deploy.frozen import leaves

Loss = Callable[[Any, Tensor], Tensor]


@dataclass
class Brought:
    """A float network, what it learns, and what its outputs are."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    loss: Loss
    outputs: str = "classes"
    count: int = 1
    steps: int = 120


def areas(x: Tensor) -> Tensor:
    """The class of each position: dark, middle or bright."""
    kernel = (5,) * (x.dim() - 2)
    pool: Any = F.avg_pool1d if x.dim() == 3 else F.avg_pool2d
    smooth = pool(x.mean(1, keepdim=True), kernel, 1, 2, count_include_pad=False)[:, 0]
    return (smooth > -0.15).long() + (smooth > 0.15).long()


def by_area(y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(y, areas(x))


def brightest(x: Tensor) -> Tensor:
    parts = F.adaptive_avg_pool1d(x.flatten(2).mean(1, keepdim=True), 3).flatten(1)
    return (parts - parts.mean(0)).argmax(1)


def block(inputs: int, outputs: int, **options: int) -> nn.Sequential:
    return norm_of(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False, **options), nn.ReLU())


def unet(up: Callable[[], nn.Module], deep: int = 12) -> nn.Module:
    """Two levels, whose features are concatenated as in U-Net."""

    def code(m: nn.Module, x: Tensor) -> Tensor:
        skip = m.a(x)
        y = m.up(m.b(m.pool(skip)))
        return m.head(m.c(torch.cat([skip, y], 1)))

    ends = {"c": block(8 + deep, 8), "head": nn.Conv2d(8, 3, 1)}
    return Code(code, a=block(1, 8), pool=nn.MaxPool2d(2), b=block(8, deep), up=up(), **ends)


def two_heads() -> nn.Module:
    """A mask at the first depth, and a class at the second."""

    def code(m: nn.Module, x: Tensor) -> dict[str, Tensor]:
        y = m.a(x)
        return {"mask": m.mask(y), "label": m.label(m.c(m.b(y)).flatten(1))}

    deep = {"b": block(8, 8, stride=2), "c": block(8, 8, stride=2)}
    return Code(code, a=block(1, 8), mask=nn.Conv2d(8, 3, 1), label=nn.Linear(32, 3), **deep)


def autoencoder() -> nn.Module:
    """An image from a quarter of its positions."""
    body = [block(1, 8, stride=2), block(8, 8, stride=2)]
    for outputs in (8, 4):
        up = nn.ConvTranspose2d(8, outputs, 4, 2, 1, bias=False)
        body.append(nn.Sequential(up, nn.BatchNorm2d(outputs), nn.ReLU()))
    return nn.Sequential(*body, nn.Conv2d(4, 1, 3, padding=1), nn.Sigmoid())


def shuffle(x: Tensor) -> Tensor:
    """As in torchvision's ShuffleNet V2."""
    batch, channels, height, width = x.size()
    x = x.view(batch, 2, channels // 2, height, width)
    return torch.transpose(x, 1, 2).contiguous().view(batch, channels, height, width)


def shuffle_unit() -> nn.Module:
    def code(m: nn.Module, x: Tensor) -> Tensor:
        left, right = m.first(x).chunk(2, dim=1)
        y = shuffle(torch.cat((left, m.branch(right)), dim=1))
        return m.fc(m.last(y).mean([2, 3]))

    depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
    points = [norm_of(nn.Conv2d(8, 8, 1, bias=False), nn.ReLU()) for _ in range(2)]
    branch = nn.Sequential(points[0], norm_of(depthwise), points[1])
    ends = {"last": block(16, 16, stride=2), "fc": nn.Linear(16, 3)}
    return Code(code, first=block(1, 16, stride=2), branch=branch, **ends)


def sequence() -> nn.Module:
    layers = [norm_of(nn.Conv1d(c, 8, 5, padding=2, bias=False), nn.ReLU()) for c in (2, 8)]
    return nn.Sequential(*layers, nn.Conv1d(8, 3, 1))


UPS: dict[str, Callable[[], nn.Module]] = {
    "nearest": lambda: nn.Sequential(nn.Upsample(scale_factor=2), block(12, 12)),
    "bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "transposed": lambda: nn.ConvTranspose2d(12, 12, 2, 2),
}
IMAGE = (1, 16, 16)
BROUGHT = {
    **{
        f"U-Net, {name}": Brought(lambda up=up: unet(up), IMAGE, by_area)
        for name, up in UPS.items()
    },
    "two heads": Brought(
        two_heads,
        (1, 8, 8),
        lambda y, x: by_area(y["mask"], x) + F.cross_entropy(y["label"], brightest(x)),
        count=2,
    ),
    "autoencoder": Brought(
        autoencoder, IMAGE, lambda y, x: F.mse_loss(y, x / 4 + 0.5) * 10, "values"
    ),
    "scores per position": Brought(sequence, (2, 24), by_area),
    "shuffle unit": Brought(
        shuffle_unit, (1, 12, 12), lambda y, x: F.cross_entropy(y, brightest(x)), steps=300
    ),
}
DEFAULT = ("scores per position",)


def trained(model: nn.Module, x: Tensor, loss_of: Loss, steps: int) -> nn.Module:
    optimiser = torch.optim.Adam(model.parameters(), 5e-3)
    for step in range(steps):
        part = float_of(x[step * 32 % len(x) :][:32])
        loss = loss_of(model(part), part)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


def kept(outputs: str, actual: Any, values: Any, expected: Any) -> list[float]:
    """Return the share of classes that are equal, or R² of the values, of each output."""
    shares = []
    parts: list[Sequence[Tensor]] = [leaves(tree) for tree in (actual, values, expected)]
    for found, value, y in zip(*parts, strict=True):
        if outputs == "classes":
            assert len(y.argmax(1).unique()) > 1
            shares.append(float((found == y.argmax(1)).double().mean()))
        else:
            shares.append(1 - float((value - y).square().sum() / (y - y.mean()).square().sum()))
    return shares


@needs_compiler
@pytest.mark.parametrize(
    "name", [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.nightly) for n in BROUGHT]
)
def test_outputs_of_networks_that_users_bring(name: str, tmp_path: Path) -> None:
    brought = BROUGHT[name]
    torch.manual_seed(0)
    x, new = images(TRAINED, *brought.shape), images(COUNT, *brought.shape)
    model = trained(brought.build(), x, brought.loss, brought.steps)
    net = ss.quantise(model, "int8").eval()
    ss.calibrate(net, float_of(x).split(64), outputs=brought.outputs)
    frozen = frozen_of(net, brought.shape, new, ZERO, SCALE, exact=False, outputs=brought.outputs)
    with torch.no_grad():
        expected = model(float_of(new))
    shares = kept(brought.outputs, frozen.predict(new), frozen.values(new), expected)
    assert len(shares) == brought.count
    assert min(shares) >= KEPT
    assert formats(frozen, new[:24], tmp_path) == [True, brought.count == 1, True]
