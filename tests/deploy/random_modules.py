"""Random small PyTorch networks with shortcuts, views, slices and in-place operations."""

from __future__ import annotations

import math
import operator
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import softstair as ss
from softstair.convert.ops import OPERATORS, Effect
from softstair.nn import StairActivation

ZERO, SCALE, BATCH = 121, 64.0, 24
Shape = tuple[int, ...]
Functions = dict[str, Callable[..., Any]]

WEIGHTS = {
    "ternary": ss.Stair.ternary(),
    "sign": ss.Stair.sign(),
    "int4": ss.Stair.linear(4, signed=True, quantum=0.07, thresholds="midpoint"),
}
FEATURES = {
    "ternary": ss.Stair.ternary(),
    "ternary, 0.25": ss.Stair.ternary(quantum=0.25),
    "uint3": ss.Stair.linear(3, signed=False, quantum=0.5, thresholds="midpoint"),
    "uneven": ss.Stair((-3.0, 0.0, 1.0, 5.0), (-1.5, 0.4, 2.0)),
    "ternary, 0.3": ss.Stair.ternary(quantum=0.3),
}
"""The quanta of all but the last are powers of two."""


class Program(nn.Module):
    """A network that runs a list of operations: (name of the result, function, names read).

    It returns the last result, and ``more`` before it.
    """

    def __init__(
        self, layers: dict[str, nn.Module], lines: Sequence[tuple[Any, ...]], more: Sequence[str]
    ) -> None:
        super().__init__()
        self.layers, self.lines, self.more = nn.ModuleDict(layers), tuple(lines), tuple(more)

    def forward(self, x: Tensor) -> Any:
        values = {"x": x}
        for result, function, names in self.lines:
            call = self.layers[function] if isinstance(function, str) else function
            values[result] = call(*[values[name] for name in names])
        last = values[self.lines[-1][0]]
        return ([values[name] for name in self.more], last) if self.more else last


PARTS: Functions = dict(
    first_channel=lambda x: x[:, :1],
    every_second=lambda x: x[:, ::2],
    chunk=lambda x: x.chunk(2, 1)[-1],
    split=lambda x: torch.split(x, 1, 1)[0],
    narrow=lambda x: x.narrow(1, 0, 1),
    unbind=lambda x: x.unbind(1)[0],
)
VIEWS: Functions = dict(
    view=lambda x: x.view(x.size(0), -1),
    reshape=lambda x: x.reshape(x.shape[0], -1),
    transpose=lambda x: x.transpose(1, -1),
    permute=lambda x: torch.permute(x, (0, 2, 3, 1)),
    unsqueeze=lambda x: x.unsqueeze(1),
    squeeze=lambda x: x.unsqueeze(-1).squeeze(-1),
    detach=lambda x: x.detach(),
    data=lambda x: x.data,
    movedim=lambda x: x.movedim(1, -1),
    expand_as=lambda x: x.expand_as(x),
    flatten=lambda x: x.flatten(1),
)
GATES = [row.modules[0] for row in OPERATORS if row.is_gate]
ACTIVATIONS = [
    row.modules[0] for row in OPERATORS if row.effect is Effect.ACTIVATION and not row.is_gate
]
PASSING = [row.modules[0] for row in OPERATORS if row.passes]
PROBABILITIES = [row.modules[0] for row in OPERATORS if row.keeps_order]
FLATTENINGS = [
    *(VIEWS[name] for name in ("flatten", "view", "reshape")),
    lambda x: x.unsqueeze(1).flatten(1),
    lambda x: x.unsqueeze(-1).squeeze(-1).flatten(1),
    lambda x: x.unflatten(1, (1, -1)).flatten(1),
]
ALIASES: Functions = dict(same=lambda x: x, contiguous=lambda x: x.contiguous())
WRITES: Functions = dict(
    mul_=lambda x: x.mul_(0.375),
    imul=lambda x: operator.imul(x, 0.375),
    mul_out=lambda x: torch.mul(x, 0.375, out=x),
    mul_overload=lambda x: torch.ops.aten.mul_.Tensor(x, 0.375),
    add_number=lambda x: x.add_(0.125),
    clamp_=lambda x: torch.clamp_(x, -0.125, 0.375),
    fill_=lambda x: x.fill_(0.125),
    double=lambda x: operator.iadd(x, x),
)
RELUS: Functions = dict(
    relu_method=lambda x: x.relu_(),
    relu_=lambda x: torch.relu_(x),
    relu_function=lambda x: F.relu(x, inplace=True),
)
IADD: Callable[..., Any] = lambda x, y: operator.iadd(x, y)
IN_PLACE_ADDITIONS: list[Callable[..., Any]] = [IADD] * 5
IN_PLACE_ADDITIONS += [lambda x, y: x.add_(y), lambda x, y: torch.add(x, y, out=x)]
ADDITIONS: Functions = dict(add=lambda x, y: x + y, torch_add=lambda x, y: torch.add(x, y))


@dataclass
class Generated:
    """A random float network, the options of ``quantise``, and the constructs it contains."""

    seed: int
    shape: Shape
    model: Program
    settings: dict[str, Any]
    constructs: frozenset[str]
    exact_sums: bool
    """Whether every quantum of a feature is a power of two, so that float32 sums are exact."""
    biased: dict[str, tuple[str, int]] = field(default_factory=dict)
    """For each stair, the layer whose bias moves its input, and the axis of the channels."""

    def quantised(self, x: Tensor) -> nn.Module:
        """The stair network in ``eval()``; the inputs of its stairs lie on thresholds."""
        torch.manual_seed(self.seed)
        net = ss.quantise(self.model, **self.settings).eval()
        rng = random.Random(self.seed)
        norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
        for norm in norms:
            norm.weight.data = torch.randn(norm.num_features)
            norm.weight.data[rng.randrange(norm.num_features)] *= rng.choice([0.0, 1e-6, -1.0])
            norm.momentum = 1.0
            norm.train()
        with torch.no_grad():
            net(as_floats(x))
            for norm in norms:
                norm.eval()
            for stair, (layer, axis) in self.biased.items():
                self._move(net, stair, layer, axis, x, rng)
        return net

    def _move(
        self, net: nn.Module, stair: str, layer: str, axis: int, x: Tensor, rng: random.Random
    ) -> None:
        """Change a bias so that in each channel one input is a threshold, or an ulp beside it."""
        module, bias = dict(net.named_modules()).get(stair), net.get_parameter(f"{layer}.bias")
        if not isinstance(module, StairActivation):  # a gate that stays in float
            return
        seen: list[Tensor] = []
        hook = module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
        net(as_floats(x))
        hook.remove()
        channels = seen[0].movedim(axis, 0).flatten(1)
        if len(channels) != len(bias):  # the sum has one channel, and was broadcast
            channels = channels.reshape(1, -1)
        for channel, values in enumerate(channels):
            value = float(values[rng.randrange(len(values))])
            moved = bias.data[channel] + rng.choice(module.stair.thresholds) - value
            for _ in range(rng.randrange(3)):
                moved = torch.nextafter(moved, torch.tensor(rng.choice([-100.0, 100.0])))
            bias.data[channel] = moved


def inputs(generated: Generated, number: int = 0) -> Tensor:
    """Bytes for a network, the same for the same seed and number."""
    random_bytes = torch.Generator().manual_seed(generated.seed + number * 10**6)
    shape = (BATCH, *generated.shape)
    return torch.randint(256, shape, dtype=torch.uint8, generator=random_bytes)


def as_floats(x: Tensor) -> Tensor:
    """Bytes as the network sees them."""
    return (x.float() - ZERO) / SCALE


class _Builder:
    """The lines of a Program as they are added; ``shapes`` has no batch."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.layers: dict[str, nn.Module] = {}
        self.lines: list[tuple[Any, ...]] = []
        self.shapes: dict[str, Shape] = {}
        self.example: dict[str, Tensor] = {}
        self.constructs: set[str] = set()
        self.skip: list[str] = []
        self.biased: dict[str, tuple[str, int]] = {}
        self.bias_of: dict[str, tuple[str, int]] = {}
        self.stairs: Counter[str] = Counter()
        """How often each ReLU that becomes a stair is called."""
        self.exact_averages = True
        self.turn: int | None = seed // len(BLOCKS)

    def run(self, function: Callable[..., Tensor] | nn.Module, *names: str) -> str:
        """Add an operation and return the name of its result."""
        result = f"v{len(self.lines)}"
        called: Any = function
        if isinstance(function, nn.Module):
            names_of = {module: name for name, module in self.layers.items()}
            called = names_of.get(function, f"m{len(self.layers)}")
            self.layers[called] = function
        self.lines.append((result, called, names))
        call = function.eval() if isinstance(function, nn.Module) else function
        with torch.no_grad():
            value = call(*[self.example[name] for name in names])
        self.example[result] = value
        self.shapes[result] = tuple(value.shape[1:])
        biased = next((self.bias_of[name] for name in names if name in self.bias_of), None)
        if biased is not None:
            self.bias_of[result] = biased
        return result

    def pick(self, kinds: list[Any]) -> Any:
        """One of these; over many seeds the first choice of a network goes round through all."""
        turn, self.turn = self.turn, None
        return self.rng.choice(kinds) if turn is None else kinds[turn % len(kinds)]

    def start(self, shape: Shape) -> str:
        self.example["x"], self.shapes["x"] = torch.randn(2, *shape), shape
        return "x"

    def last_module(self) -> str:
        return f"layers.{[*self.layers][-1]}"

    def sum(self, x: str, module: nn.Module, norm: bool | None = None) -> str:
        """A layer with weights, and a normalisation at random; either has a bias."""
        axis = len(self.shapes[x]) if isinstance(module, nn.Linear) else 1
        y = self.run(module, x)
        assert isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
        self.bias_of[y] = (self.last_module(), axis)
        norm = self.rng.random() < 0.7 if norm is None else norm
        if norm:
            channels = self.shapes[y][0]
            kind = nn.BatchNorm2d if len(self.shapes[y]) == 3 else nn.BatchNorm1d
            y = self.run(kind(channels), y)
            self.bias_of[y] = (self.last_module(), axis)
        return y

    def conv(self, x: str, channels: int, kernel: Any = 1, norm: bool | None = None) -> str:
        padding = 1 if kernel == 3 else 0
        return self.sum(x, nn.Conv2d(self.shapes[x][0], channels, kernel, 1, padding), norm)

    def stair(self, x: str) -> str:
        """An activation: a module of its own, one that was called before, or a function."""
        kind = self.rng.choice(["new", "new", "again", "function"])
        if kind == "again" and self.stairs:
            stair = self.rng.choice([*self.stairs])
            y = self.run(self.layers[stair], x)
        elif kind == "function":
            y, stair = self.run(F.relu, x), ""
        else:
            kinds = [nn.ReLU, *(GATES if self.rng.random() < 0.05 else ACTIVATIONS)]
            y = self.run(self.rng.choice(kinds)(), x)
            stair = [*self.layers][-1]
        self.stairs[stair] += 1
        if stair and x in self.bias_of:
            call = self.stairs[stair]
            self.biased[f"layers.{stair}{f'.{call}' if call > 1 else ''}"] = self.bias_of[x]
        self.stairs.pop("", None)
        self.bias_of.pop(y, None)
        return y

    def float_relu(self, x: str) -> str:
        """An in-place ReLU that stays in float."""
        if self.rng.random() < 0.4:
            y = self.run(nn.ReLU(inplace=True), x)
            self.skip.append(self.last_module())
            return y
        if "*stair_relu*" not in self.skip:
            self.skip.append("*stair_relu*")
        return self.run(self.rng.choice([*RELUS.values()]), x)

    def small(self, x: str) -> str:
        """A sum of one value a channel, a row, a column, or of one channel."""
        channels, height, width = self.shapes[x]
        kind = self.rng.choice(["position", "row", "column", "channel", "value"])
        kernel = {"position": (height, width), "row": (height, 1), "column": (1, width),
                  "channel": 1, "value": (height, width)}[kind]  # fmt: skip
        return self.conv(x, 1 if kind in ("channel", "value") else channels, kernel)


def _equal_shortcut(b: _Builder, h: str) -> str:
    y = b.conv(h, b.shapes[h][0], 3)
    if b.rng.random() < 0.3:
        total = b.run(ADDITIONS["add"], b.stair(y), h)
        return b.stair(total) if b.rng.random() < 0.5 else total
    names = (y, h) if b.rng.random() < 0.7 else (h, y)
    return b.stair(b.run(b.rng.choice([*ADDITIONS.values(), IADD]), *names))


def _broadcasting_shortcut(b: _Builder, h: str) -> str:
    small = b.small(h)
    kind = b.rng.choice(["small sum", "features", "sum", "sum"])
    if kind == "small sum":
        names = [small, h]
        b.rng.shuffle(names)
        return b.stair(b.run(b.rng.choice([*ADDITIONS.values()]), *names))
    small = b.stair(small)
    large = h if kind == "features" else b.conv(h, b.shapes[h][0], 3)
    if b.rng.random() < 0.3:
        y = b.run(IADD, large, small)
    else:
        names = [large, small]
        b.rng.shuffle(names)
        y = b.run(b.rng.choice([*ADDITIONS.values()]), *names)
    return y if kind == "features" else b.stair(y)


def _relu_in_place(b: _Builder, h: str) -> str:
    y = b.conv(h, b.shapes[h][0], 3)
    result = b.float_relu(y)
    read = b.rng.choice([result, result, result, y])
    if b.rng.random() < 0.4:
        read = b.run(ADDITIONS["add"], read, h)
    return b.stair(read)


def _alias(b: _Builder, h: str) -> str:
    y = b.conv(h, b.shapes[h][0], 3)
    kinds = [*ALIASES.values(), nn.Dropout(0.5, inplace=True)]
    kinds += [kind() for kind in PASSING if kind is not nn.Dropout1d]
    alias = b.run(b.pick(kinds), y)
    result = b.run(b.rng.choice(IN_PLACE_ADDITIONS), alias, h)
    return b.stair(b.rng.choice([result, result, result, alias, y]))


def _written_features(b: _Builder, h: str) -> str:
    if b.rng.random() < 0.75:  # another feature is added to h
        g = b.stair(b.conv(h, b.shapes[h][0], 3))
        result = b.run(b.rng.choice(IN_PLACE_ADDITIONS), h, g)
    else:
        result = b.run(b.rng.choice([*WRITES.values()]), h)
    read = b.rng.choice([result, result, result, h])
    return b.stair(b.conv(read, b.shapes[h][0], 3))


def _slice_read(b: _Builder, h: str) -> str:
    part = b.run(b.rng.choice([*PARTS.values()][:-1]), h)
    return b.stair(b.conv(part, b.shapes[h][0], 3))


def _view_written(b: _Builder, h: str) -> str:
    """Something is written into a view of h, or into a view of a view; then h is read."""
    view = b.run(b.rng.choice([*PARTS.values(), *VIEWS.values()]), h)
    if len(b.shapes[view]) > 1 and b.rng.random() < 0.3:
        view = b.run(
            b.rng.choice([PARTS["first_channel"], VIEWS["unsqueeze"], VIEWS["detach"]]), view
        )
    b.run(b.rng.choice([*WRITES.values()]), view)
    return b.stair(b.conv(h, b.shapes[h][0], 3))


def _view_read(b: _Builder, h: str) -> str:
    """h is read through a view that was made before, or after, h was written."""
    before = b.rng.random() < 0.5
    kind = b.rng.choice(
        [VIEWS[k] for k in ("unsqueeze", "squeeze", "detach", "transpose", "expand_as")]
    )
    view = b.run(kind, h) if before else ""
    y = h
    if b.rng.random() < 0.5:
        y = b.run(b.rng.choice([*WRITES.values()]), h)
    view = view or b.run(kind, y)
    if kind is VIEWS["unsqueeze"]:
        view = b.run(lambda x: x[:, 0], view)
    if kind is VIEWS["transpose"]:
        view = b.run(kind, view)
    return b.stair(b.conv(view, b.shapes[h][0], 3))


def _linear_over_rows(b: _Builder, h: str) -> str:
    width = b.shapes[h][-1]
    outputs = width if b.rng.random() < 0.4 else b.rng.choice([3, 5])
    y = b.sum(h, nn.Linear(width, outputs), norm=b.rng.random() < 0.15)
    if outputs == width and b.rng.random() < 0.6:
        y = b.run(b.rng.choice([ADDITIONS["add"], IADD]), y, h)
    if len(b.shapes[y]) == 3 and b.rng.random() < 0.15:
        y = b.run(nn.MaxPool2d(2), y)
    return b.stair(y)


def _flattened(b: _Builder, h: str) -> str:
    """A view as the exporter knows it; perhaps it is written into, and h read once more."""
    flat = b.run(b.rng.choice([*FLATTENINGS, nn.Flatten()]), h)
    size = b.shapes[flat][0]
    if b.rng.random() < 0.6:
        y = b.stair(b.sum(flat, nn.Linear(size, size)))
        read = b.run(b.rng.choice(IN_PLACE_ADDITIONS[:1]), flat, y)
        if b.rng.random() < 0.4:
            read = b.run(VIEWS["flatten"], h)
    else:
        read = b.run(
            ADDITIONS["add"], flat, b.run(VIEWS["flatten"], b.stair(b.conv(h, b.shapes[h][0], 3)))
        )
    return b.stair(b.sum(read, nn.Linear(size, 6)))


def _pooled(b: _Builder, h: str) -> str:
    """Any pooling, of features or before the stair, then a layer."""
    height, width = b.shapes[h][1:]
    before = b.conv(h, 3, 1) if b.rng.random() < 0.3 else ""
    maxima = [
        nn.MaxPool2d((2, 3), b.rng.choice([1, 2]), 1, ceil_mode=b.rng.random() < 0.5),
        nn.AdaptiveMaxPool2d((height, None)),
        nn.AdaptiveMaxPool2d(1),
        lambda x: F.max_pool2d(x, 2, 1),
    ]
    if before:
        return b.stair(b.run(b.rng.choice(maxima[:3]), before))
    thirds = (
        nn.AvgPool2d(3, 1, 1),
        nn.AvgPool2d((1, 3), 1, divisor_override=5),
        nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    )
    averages = [
        nn.AvgPool2d(2, 1, b.rng.choice([0, 1])),
        nn.AvgPool2d(2, 2, 1, ceil_mode=True),
        nn.AdaptiveAvgPool2d((height, width)),
        lambda x: F.avg_pool2d(x, (1, 4)),
        *thirds,
    ]
    small = min(height, width) < 4
    pool = nn.AdaptiveAvgPool2d((height, width)) if small else b.pick([*maxima, *averages])
    b.exact_averages &= pool not in thirds
    return b.stair(b.conv(b.run(pool, h), 3, 1))


def _multiplied(b: _Builder, h: str) -> str:
    """Products, differences and constants of features and sums, and gates over all places."""
    channels = b.shapes[h][0]
    y = b.stair(b.conv(h, channels, 3))
    constant = torch.randint(1, 9, (channels, 1, 1)) / 8
    kinds: list[Callable[..., Tensor]] = [
        lambda x, y: x * y,
        lambda x, y: x - y,
        lambda x, y: x * y.mean([2, 3], keepdim=True),
        lambda x, y: (-x) * 0.75 + y,
        lambda x, y: x * constant - y,
        lambda x, y: 1 - torch.mul(x, y) / 4,
    ]
    kind = b.pick(kinds)
    b.exact_averages &= kind is kinds[1]
    z = b.run(kind, h, y)
    if b.rng.random() < 0.4:
        z = b.run(nn.Hardsigmoid(), b.conv(z, channels, 1))
        return b.stair(b.conv(b.run(lambda x, y: torch.multiply(x, y), z, h), 3, 1))
    return b.stair(b.conv(z, 3, b.rng.choice([1, 3])))


def _concatenated(b: _Builder, h: str) -> str:
    """Features side by side, along the channels or the rows, perhaps the same ones twice."""
    parts = [h, b.stair(b.conv(h, b.shapes[h][0], 3)), b.stair(b.conv(h, b.shapes[h][0], 1))]
    parts = b.rng.sample(parts, b.rng.choice([2, 3])) + [h] * (b.rng.random() < 0.2)
    axis = b.rng.choice([1, 1, 1, -3, 2])
    y = b.run(lambda *x: torch.cat(x, axis).contiguous(), *parts)
    return b.stair(b.conv(y, 3, 3))


SELECTIONS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.chunk(2, 1)[0],
    lambda x: x.split(1, 1)[0],
    lambda x: x.narrow(3, 0, 2),
    lambda x: x[:, :, ::2],
    lambda x: x.flip(2),
    lambda x: x.roll(1, 3),
    lambda x: x.repeat(1, 2, 1, 1),
    lambda x: x.clone(),
    lambda x: x.expand(-1, -1, -1, -1),
]


def _padded(b: _Builder, h: str) -> str:
    """Zeros around features, or features from other places."""
    kinds: list[Any] = [nn.ReflectionPad2d(1), nn.Upsample(scale_factor=2), *SELECTIONS]
    kinds += [nn.ChannelShuffle(b.shapes[h][0])]
    zeros = nn.ZeroPad2d([b.rng.randrange(3) for _ in range(4)])
    y = b.run(b.rng.choice([zeros, b.rng.choice(kinds)]), h)
    return b.stair(b.conv(y, 3, b.rng.choice([2, 3])))


def _larger(b: _Builder, h: str) -> str:
    """More positions: copies, zeros, interpolations, pixels, and sums of phases."""
    channels = b.shapes[h][0]
    kinds: list[Any] = [
        lambda x: F.interpolate(x, scale_factor=(2, 1)),
        lambda x: F.interpolate(x, size=(5, 7), mode="nearest"),
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        lambda x: F.pad(x, (1, 0, 2, 1)),
        lambda x: F.pad(x, (1, 2, 0, 1), "circular"),
        lambda x: x.permute(0, 2, 3, 1).flip(2).permute(0, 3, 1, 2),
        "shuffled",
        "pixels",
    ]
    kind = b.pick([*kinds, *["transposed"] * 5])
    if kind in ("shuffled", "pixels"):
        y = b.stair(b.conv(h, 4, 1)) if kind == "shuffled" or b.rng.random() < 0.5 else b.conv(h, 4)
        if kind == "pixels":
            y = b.run(nn.PixelShuffle(2), y)
        else:
            y = b.run(lambda x: x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2), y)
        y = y if kind == "shuffled" else b.stair(y)
        return b.stair(b.conv(y, 3, 3))
    if kind != "transposed":
        return b.stair(b.conv(b.run(kind, h), 3, b.rng.choice([2, 3])))
    stride, dilation = b.rng.choice([(1, 2), (2, 1), 2, 3]), b.rng.choice([1, (1, 2)])
    padding, groups = b.rng.choice([0, 1]), b.rng.choice([1, channels])
    facts: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation}
    if isinstance(stride, int) and b.rng.random() < 0.5:
        facts["output_padding"] = 1
    outputs = groups * b.rng.choice([1, 2])
    conv = nn.ConvTranspose2d(channels, outputs, b.rng.choice([2, 3, 4]), groups=groups, **facts)
    y = b.sum(h, conv)
    if b.rng.random() < 0.3:
        y = b.run(ADDITIONS["add"], y, b.stair(b.conv(y, outputs)) if b.rng.random() < 0.5 else y)
    elif b.rng.random() < 0.3:
        y = b.run(nn.MaxPool2d(2, 1), y)
    return b.stair(b.conv(b.stair(y), 3))


def _in_one_dimension(b: _Builder, h: str) -> str:
    """Convolutions, poolings and zeros along one axis."""
    for _ in range(2):
        channels, length = b.shapes[h]
        kinds = [nn.MaxPool1d(3, 2, 1), nn.AvgPool1d(2, padding=1), nn.ZeroPad1d((2, 1))]
        kinds += [nn.Dropout1d(), nn.AdaptiveMaxPool1d(1), nn.AdaptiveAvgPool1d(length)]
        y = b.run(b.pick(kinds), h)
        options = {"stride": b.rng.choice([1, 2]), "dilation": b.rng.choice([1, 2])}
        padding, groups = b.rng.choice([2, 4]), b.rng.choice([1, channels])
        conv: nn.Module
        conv = nn.Conv1d(channels, 2 * channels, 3, padding=padding, groups=groups, **options)
        if b.rng.random() < 0.3:
            sizes = b.rng.choice([(4, 2, 1), (3, 2, 1), (5, 3)])
            conv = nn.ConvTranspose1d(channels, 2 * channels, *sizes, groups=groups)
        h = b.stair(b.sum(y, conv))
    return h


BLOCKS: dict[str, Callable[[_Builder, str], str]] = {
    "equal shortcut": _equal_shortcut,
    "broadcasting shortcut": _broadcasting_shortcut,
    "ReLU in place": _relu_in_place,
    "alias": _alias,
    "written features": _written_features,
    "slice": _slice_read,
    "written view": _view_written,
    "view": _view_read,
    "Linear on (N, L, C)": _linear_over_rows,
    "flattened": _flattened,
    "pooled": _pooled,
    "concatenated": _concatenated,
    "padded": _padded,
    "in one dimension": _in_one_dimension,
    "multiplied": _multiplied,
    "larger": _larger,
}
HIDDEN = {"slice", "view", "written view"}
"""Not exported, so that the others are not combined with them."""
HEADS = ("linear", "integer linear", "integer linear on (N, L, C)", "convolutional head", "mean")


def generate(seed: int) -> Generated:
    """The random network of a seed; the first block goes round through all kinds."""
    torch.manual_seed(seed)
    b = _Builder(seed)
    rng = b.rng
    kinds = [*BLOCKS]
    kind = kinds[seed % len(kinds)]
    flat = kind == "in one dimension" or (kind == "Linear on (N, L, C)" and rng.random() < 0.3)
    shape = (4, 5) if flat else (rng.choice([1, 2]), 4, rng.choice([4, 5]))
    if kind == "in one dimension":
        shape = (2, 9)
    h = b.start(shape)
    if not flat:
        h = b.conv(h, rng.choice([2, 3]), 3)
        if rng.random() < 0.2:
            h = b.run(nn.MaxPool2d(2, 1), h)
        h = b.stair(h)
    blocks = [kind]
    if not flat and rng.random() < 0.4:
        more = [other for other in kinds if kind in HIDDEN or other not in HIDDEN]
        blocks.insert(rng.randrange(2), rng.choice(more))
    for name in blocks:
        needed = {"in one dimension": (2,), "Linear on (N, L, C)": (1, 2, 3)}.get(name, (3,))
        if len(b.shapes[h]) not in needed:
            continue
        h = BLOCKS[name](b, h)
        b.constructs.add(name)
    features = rng.choice([*FEATURES])
    settings: dict[str, Any] = {"features": FEATURES[features]}
    settings["weights"] = WEIGHTS[rng.choice([*WEIGHTS])]
    if rng.random() < 0.15:
        fit = rng.choice(["layer", "channel"])
        settings["options"] = ss.QuantiseOptions(init="keep", fit=fit)
    exact = features != "ternary, 0.3" and b.exact_averages
    if rng.random() < 0.3:
        settings = {"weights": rng.choice(["int8", "int4", "ternary/uint8", "int4/int3"])}
        exact = False
    elif rng.random() < 0.2:
        settings["activation"] = "keep"
    _head(b, h, exact)
    more = [h] if rng.random() < 0.1 else []
    model, constructs = Program(b.layers, b.lines, more), frozenset(b.constructs)
    settings["skip"] = tuple(b.skip)
    return Generated(seed, shape, model, settings, constructs, exact, b.biased)


def _head(b: _Builder, h: str, exact: bool) -> None:
    """The last layer. Scores of float weights have equal bits everywhere if they are exact."""
    size = b.shapes[h]
    kinds = ["linear", "integer linear"] if exact else ["integer linear"]
    if len(size) == 3:
        kinds += ["convolutional head"]
    if len(size) == 3 and exact and math.prod(size[1:]) in (1, 2, 4, 8, 16):
        kinds += ["mean"] * 6
    if len(size) > 1:
        kinds += ["integer linear on (N, L, C)"]
    kind = b.rng.choice(kinds)
    b.constructs.add(kind)
    if kind == "convolutional head":
        kernel = b.rng.choice([1, size[1:], size[1:]])
        h = b.run(nn.Conv2d(size[0], 4, kernel, bias=b.rng.random() < 0.7), h)
        if b.shapes[h] == (4, 1, 1):
            b.run(b.rng.choice([*FLATTENINGS, nn.Flatten()]), h)
        return
    if kind == "integer linear on (N, L, C)":
        b.run(nn.Linear(size[-1], 4), h)
        return
    if kind == "mean":
        h = b.run(lambda x: x.mean([2, 3]), h)
    elif len(size) > 1:
        h = b.run(b.rng.choice([*FLATTENINGS, nn.Flatten()]), h)
    linear = nn.Linear(b.shapes[h][0], 4)
    b.run(linear, h)
    if kind == "linear":
        b.skip.append(b.last_module())
        for parameter in (linear.weight, linear.bias):
            parameter.data = torch.randint(-16, 17, parameter.shape) / 8
    if b.rng.random() < 0.3:
        probability: Any = b.rng.choice(PROBABILITIES)
        is_softmax = probability in (nn.Softmax, nn.LogSoftmax)
        b.run(probability(1) if is_softmax else probability(), b.lines[-1][0])
