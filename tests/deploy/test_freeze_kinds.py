"""Kinds of networks that need requantisations, equal in every format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from freezes import formats, frozen_of
from torch import Tensor, nn

import softstair as ss
from networks import Code
from softstair.deploy.modules import table_of
from softstair.deploy.nodes import Requantise, Steps

SHAPE, BATCH = (2, 6, 10), 24
TERNARY = ss.Stair.ternary()
UINT8 = ss.Stair.linear(8, quantum=1 / 40)
UNEVEN = ss.Stair((-3.0, 0.0, 1.0, 5.0), (-1.5, 0.4, 2.0))


def conv(outputs: int = 4, inputs: int = 4, **options: Any) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False, **options), nn.BatchNorm2d(outputs)
    )


def block(end: nn.Module, shortcut: nn.Module | None = None) -> nn.Module:
    """Two convolutions and a shortcut, and what follows their sum."""
    code = lambda m, x: m.end(m.second(m.act(m.first(x))) + m.shortcut(x))
    parts = {"first": conv(), "act": nn.ReLU(), "second": conv(), "end": end}
    return Code(code, **parts, shortcut=shortcut or nn.Identity())


def before() -> list[nn.Module]:
    """A normalisation and an activation before the weights that read them."""
    return [nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()]


def early() -> nn.Module:
    """A residual block that normalises first."""
    part = lambda: nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
    return Code(lambda m, x: x + m.second(m.first(x)), first=part(), second=part())


def joined(join: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """Two branches of other quanta, joined, and a layer that reads both."""
    parts = {"left": nn.Sequential(conv(), nn.ReLU()), "right": nn.Sequential(conv(), nn.ReLU())}
    after = nn.Sequential(nn.LazyConv2d(5, 3), nn.ReLU())
    return Code(lambda m, x: m.after(join(m.left(x), m.right(x))), **parts, after=after)


def image(*body: nn.Module) -> nn.Sequential:
    """A first layer, others, and a linear one."""
    return nn.Sequential(*conv(inputs=2), nn.ReLU(), *body, nn.Flatten(), nn.LazyLinear(3))


def parameter(*shape: int) -> nn.Parameter:
    """A constant of each channel, of at least ½."""
    return nn.Parameter(torch.rand(shape) + 0.5)


def activated(activation: nn.Module) -> nn.Sequential:
    return image(conv(), activation, conv(3), nn.MaxPool2d(2), activation)


def sound(*body: nn.Module) -> nn.Sequential:
    first = (nn.Conv1d(2, 4, 3, padding=2, dilation=2), nn.BatchNorm1d(4), nn.ReLU())
    return nn.Sequential(*first, *body, nn.Flatten(), nn.LazyLinear(3))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.act = conv(), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y += x
        return self.act(y)


ADD: Callable[[Tensor, Tensor], Tensor] = lambda a, b: a + b
CAT = lambda a, b: torch.cat([a, b], 1)
QUANTA = {"*left*": ss.Stair.linear(4, quantum=0.3), "*right*": ss.Stair.linear(4, quantum=0.17)}
SEVERAL = {"features": {**QUANTA, "*": ss.Stair.linear(4, quantum=0.25)}}
INT8 = {"weights": "int8", "features": None}
KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "adds of several quanta": (lambda: image(joined(ADD)), SEVERAL),
    "concatenated quanta": (lambda: image(joined(CAT)), SEVERAL),
    "concatenated quanta, of bytes": (lambda: image(joined(CAT)), INT8),
    "average before a layer": (
        lambda: image(nn.AvgPool2d((3, 5)), nn.Conv2d(4, 5, 1), nn.ReLU()), {}),
    "average of 25 x 5": (
        lambda: nn.Sequential(*conv(inputs=1), nn.ReLU(), nn.AvgPool2d((25, 5)), nn.Flatten(),
                              nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), {"shape": (1, 25, 5)}),
    "global average": (
        lambda: image(nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 5, 1), nn.ReLU()), {}),
    "global average of bytes": (
        lambda: image(nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 5, 1), nn.ReLU()), INT8),
    "mean": (lambda: image(Code(lambda m, x: x.mean([2, 3])), nn.Linear(4, 5), nn.ReLU()), {}),
    "byte shortcuts": (
        lambda: image(block(nn.ReLU()), block(nn.ReLU())),
        {"options": ss.QuantiseOptions(sums="sum", shortcuts=UINT8)}),
    "residual": (lambda: image(block(nn.ReLU()), block(nn.ReLU())), {}),
    "residual of bytes": (lambda: image(block(nn.ReLU()), block(nn.ReLU())), INT8),
    "residual, norm": (
        lambda: image(block(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()))), {}),
    "residual, norm, of bytes": (
        lambda: image(block(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()))), INT8),
    "residual, weights": (lambda: image(block(nn.ReLU(), conv())), {}),
    "residual, weights, of bytes": (lambda: image(block(nn.ReLU(), conv())), INT8),
    "residual, ReLU6": (lambda: image(block(nn.ReLU6())), INT8),
    "residual, Tanh": (lambda: image(block(nn.Tanh())), INT8),
    "binary": (
        lambda: image(conv(), nn.ReLU()),
        {"weights": ss.Stair.sign(), "features": ss.Stair.sign()}),
    "heaviside": (lambda: image(block(nn.ReLU())), {"features": ss.Stair.heaviside()}),
    "uneven, with shortcuts": (
        lambda: image(block(nn.ReLU()), block(nn.ReLU())), {"features": UNEVEN}),
    "norms before the weights": (lambda: image(*before(), *before()), {}),
    "norms before the weights, of bytes": (lambda: image(*before(), *before()), INT8),
    "residual, norms before the weights": (
        lambda: image(early(), early(), nn.BatchNorm2d(4), nn.ReLU()),
        {"weights": "int4", "features": None,
         "options": ss.QuantiseOptions(sums="sum", shortcuts=UINT8)}),
    "Tanh": (lambda: activated(nn.Tanh()), INT8),
    "GELU": (lambda: activated(nn.GELU()), INT8),
    "SiLU of few levels": (lambda: activated(nn.SiLU()), {"weights": "int4", "features": None}),
    "residual, Mish": (lambda: image(block(nn.Mish()), block(nn.Mish())), INT8),
    "residual, norm, Hardswish": (
        lambda: image(block(nn.Sequential(nn.BatchNorm2d(4), nn.Hardswish()))), INT8),
    "PReLU below 0": (lambda: activated(nn.PReLU(init=-0.2)), INT8),
    "PReLU": (lambda: activated(nn.PReLU(init=0.1)), INT8),
    "LeakyReLU": (lambda: activated(nn.LeakyReLU(0.2)), INT8),
    "Softplus": (lambda: activated(nn.Softplus()), {"weights": "int4", "features": None}),
    "maximum before the activation": (
        lambda: image(conv(), nn.MaxPool2d(3, 2, 1), nn.ReLU()), INT8),
    "averages without the padding": (
        lambda: image(nn.AvgPool2d(3, 2, 1, count_include_pad=False), conv(), nn.ReLU()), {}),
    "averages without the padding, of bytes": (
        lambda: image(nn.AvgPool2d((3, 2), 1, 1, count_include_pad=False), conv(), nn.ReLU()),
        INT8),
    "averages of incomplete windows": (
        lambda: image(nn.AvgPool2d(4, 3, 1, ceil_mode=True), conv(), nn.ReLU()), {}),
    "averages of complete windows": (
        lambda: image(nn.AvgPool2d(2, ceil_mode=True, count_include_pad=False), conv(),
                      nn.ReLU()), {}),
    "averages of sequences": (
        lambda: sound(nn.AvgPool1d(4, 3, 1, ceil_mode=True, count_include_pad=False),
                      nn.Conv1d(4, 4, 3), nn.ReLU(), nn.MaxPool1d(2, ceil_mode=True)),
        {"shape": (2, 24)}),
    "maxima of incomplete windows": (
        lambda: image(conv(), nn.MaxPool2d(3, 2, ceil_mode=True), nn.ReLU(),
                      nn.MaxPool2d(2, ceil_mode=True)), INT8),
    "products": (lambda: image(joined(torch.mul)), SEVERAL),
    "products of bytes": (lambda: image(joined(torch.mul)), INT8),
    "products without a stair": (
        lambda: image(joined(torch.mul)), INT8 | {"options": ss.QuantiseOptions(sums=None)}),
    "products of ternary features": (
        lambda: image(joined(torch.mul)), {"features": TERNARY}),
    "products over rows": (
        lambda: image(joined(lambda a, b: a * b.narrow(2, 0, 1) + b)), INT8),
    "differences": (lambda: image(joined(torch.sub)), {}),
    "differences of several quanta": (lambda: image(joined(torch.sub)), SEVERAL),
    "sums minus features": (
        lambda: image(Code(lambda m, x: m.r(m.body(x) - x), body=conv()),
                      Code(lambda m, x: m.r(x - m.body(x)), body=conv())), INT8),
    "negatives": (
        lambda: image(Code(lambda m, x: m.r(m.body(-x)) - m.r(-m.other(x)), body=conv(),
                           other=conv())), {}),
    "constants": (
        lambda: image(Code(lambda m, x: m.r(m.body(x * 3 / 4) * m.c + 0.5) - m.c,
                           body=conv(), c=parameter(4, 1, 1)),
                      Code(lambda m, x: m.r(1 - m.body(x)) / m.c, body=conv(),
                           c=parameter(1, 4, 1, 1))), INT8),
    "constants of vectors": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(120, 6), Code(
            lambda m, x: m.r((x + m.c) * m.c), c=parameter(6)), nn.Linear(6, 3)), INT8),
    "constants, then a maximum, without stairs": (
        lambda: image(Code(lambda m, x: x * m.c + m.c, c=parameter(4, 1, 1)), nn.MaxPool2d(2),
                      conv(), nn.ReLU()),
        INT8 | {"options": ss.QuantiseOptions(sums=None)}),
    "hard-swish as it was written": (
        lambda: image(conv(), Code(lambda m, x: x * F.relu6(x + 3) / 6), conv(), nn.ReLU()), INT8),
    "a normalisation without a layer": (
        lambda: image(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.ReLU()), INT8),
    "one dimension": (
        lambda: sound(nn.MaxPool1d(2), nn.Conv1d(4, 4, 3, groups=4), nn.ReLU(), nn.AvgPool1d(3)),
        {"shape": (2, 24)}),
    "one dimension, of bytes": (
        lambda: sound(nn.AvgPool1d(3), nn.Conv1d(4, 4, 3), nn.ReLU()), INT8 | {"shape": (2, 24)}),
    "sequences": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), {"shape": (5, 6)}),
    "sequences of bytes": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)),
        INT8 | {"shape": (5, 6)}),
    "a last layer in a function": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(120, 40), nn.ReLU(), Code(
            lambda m, x: F.linear(x, m.last.weight, m.last.bias), last=nn.Linear(40, 3))),
        INT8),
    "layers over the columns": (
        lambda: image(nn.Linear(10, 5), nn.ReLU(), nn.Linear(5, 6), nn.ReLU(),
                      nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()), {}),
    "layers over the columns, of bytes": (
        lambda: image(Code(lambda m, x: m.r(m.body(x) + x), body=nn.Linear(10, 10)),
                      nn.Linear(10, 7), nn.GELU(), nn.MaxPool2d(2)), INT8),
    "layers over sequences": (
        lambda: nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(),
                              nn.Flatten(), nn.Linear(80, 3)), INT8 | {"shape": (5, 24)}),
    "gates over sequences": (
        lambda: nn.Sequential(nn.Linear(24, 16), nn.ReLU(), Code(
            lambda m, x: m.r(m.body(x * torch.sigmoid(m.gate(x)))), body=nn.Linear(16, 9),
            gate=nn.Linear(16, 16)), nn.Flatten(), nn.LazyLinear(3)),
        INT8 | {"shape": (5, 24)}),
    "bits over sequences": (
        lambda: nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(),
                              nn.Flatten(), nn.LazyLinear(3)), {"features": TERNARY,
                              "shape": (5, 24)}),
    "dropout": (lambda: image(conv(), nn.Dropout2d(), nn.ReLU(), nn.Dropout()), {}),
    "in place": (lambda: image(InPlace(), InPlace()), {}),
    "in place, of bytes": (lambda: image(InPlace(), InPlace()), INT8),
    "depthwise": (lambda: image(conv(groups=4), nn.ReLU6(), conv(8), nn.ReLU6()), INT8),
    "int16 input": (lambda: image(conv(), nn.ReLU()), {"dtype": torch.int16, "scale": 2.0**13}),
    "int8 input": (lambda: image(conv(), nn.ReLU()), INT8 | {"dtype": torch.int8, "scale": 32.0}),
    "norm after the scores": (
        lambda: nn.Sequential(*image(conv(), nn.ReLU()), nn.BatchNorm1d(3)), {}),
}  # fmt: skip

WRITTEN = {
    "sequences": [True, False, False],
    "sequences of bytes": [True, True, False],
    "layers over the columns": [True, False, True],
    "layers over sequences": [True, False, True],
    "bits over sequences": [True, False, True],
    "gates over sequences": [True, False, True],
}
"""Whether a kind is written as ONNX, QONNX and C; all others are."""


def trained(model: nn.Module, x: Tensor, settings: dict[str, Any]) -> nn.Module:
    """A network after a few steps, with norms of either sign."""
    model.train()(x)
    settings = {"weights": TERNARY, "features": ss.Stair.linear(4, quantum=0.25)} | settings
    net = ss.quantise(model, **settings)
    ss.calibrate(net, [x])
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d):
            norm.weight.data.uniform_(-1.5, 1.5)
            norm.bias.data.normal_(std=0.4)
            norm.weight.data[0] = 1e-6
    optimiser = torch.optim.SGD(net.parameters(), 0.02)
    for _ in range(6):
        optimiser.zero_grad()
        y = net(x).flatten(1)
        F.cross_entropy(y, torch.arange(len(x)) % y.shape[1]).backward()
        optimiser.step()
    return net.eval()


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    ends, draw = torch.iinfo(dtype), torch.Generator().manual_seed(3)
    return torch.randint(ends.min, ends.max + 1, (BATCH, *shape), generator=draw).to(dtype)


@pytest.mark.nightly(keep=8)
@pytest.mark.parametrize("last", ["quantised", "float"])
@pytest.mark.parametrize("kind", KINDS)
def test_kind_is_frozen(kind: str, last: str, tmp_path: Path) -> None:
    build, settings = KINDS[kind]
    settings = dict(settings)
    shape, dtype = settings.pop("shape", SHAPE), settings.pop("dtype", torch.uint8)
    zero, scale = 121 if dtype == torch.uint8 else 0, settings.pop("scale", 64.0)
    x = inputs(shape, dtype)
    torch.manual_seed(1)
    model = build()
    floats = (x.float() - zero) / scale
    with torch.no_grad():
        model(floats)
    if last == "float":
        layers = [n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        settings["skip"] = layers[-1]
    net = trained(model, floats, settings)
    rounding = "double" if last == "float" else "once"
    frozen = frozen_of(net, shape, x, zero, scale, exact=False, rounding=rounding)
    kinds = {type(node) for node in frozen.nodes}
    assert kinds & {Steps, Requantise}
    assert len(frozen(x).unique()) > 1
    with torch.no_grad():
        expected = net(floats).reshape(frozen(x).shape).argmax(frozen.last.axis)
    assert (frozen.predict(x) == expected).float().mean() >= 0.75
    assert formats(frozen, x, tmp_path) == WRITTEN.get(kind, [True] * 3)


def test_a_table_over_a_single_input_has_its_level() -> None:
    stair = ss.Stair.linear(4, quantum=0.25)
    for value in (0.0, 3.0, -3e6):
        unit, first, table = table_of(nn.GELU(), stair, value, value)
        place = round(value / unit) - first
        expected = stair.integers[int(stair.index(F.gelu(torch.tensor(value))))]
        assert 0 <= place < len(table)
        assert int(table[place]) == expected
