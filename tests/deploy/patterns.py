"""Small networks of the patterns that people write, quantised and trained for two steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import softstair as ss
from networks import Code
from softstair.convert.ops import OPERATORS, Effect

IMAGE, SOUND = (2, 6, 6), (2, 12)
ZERO, SCALE, BATCH = 121, 64.0, 6
TERNARY = ss.Stair.ternary()
INT4 = ss.Stair.linear(4, signed=True, quantum=0.125)


@dataclass
class Pattern:
    """A float network, the shape of its input and the options of ``quantise``."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = IMAGE
    settings: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.uint8
    zero: int = ZERO
    scale: float = SCALE

    @property
    def is_exact(self) -> bool:
        """Whether its sums are exact in float32."""
        return not isinstance(self.settings.get("weights"), str)

    def inputs(self) -> Tensor:
        """Random integers of its type, with both ends of the range."""
        ends, generator = torch.iinfo(self.dtype), torch.Generator().manual_seed(1)
        x = torch.randint(ends.min, ends.max + 1, (BATCH, *self.shape), generator=generator)
        x[0].view(-1)[:2] = torch.tensor([ends.min, ends.max])
        return x.to(self.dtype)

    def floats(self, x: Tensor) -> Tensor:
        return (x.float() - self.zero) / self.scale

    def quantised(self) -> nn.Module:
        """The stair network as it is before training."""
        torch.manual_seed(0)
        model = self.build()
        model(self.floats(self.inputs()))  # lazy layers
        return ss.quantise(model, **{"weights": TERNARY, "features": TERNARY} | self.settings)

    def trained(self, net: nn.Module | None = None) -> nn.Module:
        """The stair network after two steps, in ``eval()``."""
        net, x = net or self.quantised(), self.floats(self.inputs())
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            scores = net(x).flatten(1)
            F.cross_entropy(scores, torch.arange(BATCH) % scores.shape[1]).backward()
            optimizer.step()
        return net.eval()


def image(*middle: nn.Module, head: nn.Module | None = None) -> nn.Sequential:
    """A convolution with a stair, some modules, and a linear head over what they return."""
    first = (nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    return nn.Sequential(*first, *middle, head or nn.Sequential(nn.Flatten(), nn.LazyLinear(3)))


def sound(*middle: nn.Module) -> nn.Sequential:
    """The same in one dimension."""
    first = (nn.Conv1d(2, 4, 3, padding=1, bias=False), nn.BatchNorm1d(4), nn.ReLU())
    return nn.Sequential(*first, *middle, nn.Flatten(), nn.LazyLinear(3))


def layer(outputs: int = 4, kernel: int = 3, **options: Any) -> nn.Sequential:
    """A convolution with normalisation and activation."""
    conv = nn.LazyConv2d(outputs, kernel, bias=False, **options)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


class Concatenated(nn.Module):
    """Branches side by side; ``names`` says which: x is what they read."""

    def __init__(self, names: str, dim: int = 1, width: int = 3, *, flat: bool = False) -> None:
        super().__init__()
        self.x, self.a, self.b = layer(width, padding=1), layer(padding=1), layer(4, 1)
        self.names, self.dim, self.flat = names, dim, flat
        self.flatten, self.act, self.last = nn.Flatten(), nn.ReLU(), nn.LazyLinear(3)
        self.after = nn.LazyLinear(5) if flat else nn.LazyConv2d(5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.x(x)
        branches = {"x": x, "a": self.a(x), "b": self.b(x)}
        parts = [branches[name] for name in self.names]
        if self.flat:
            parts = [self.flatten(part) for part in parts]
        return self.last(self.flatten(self.act(self.after(torch.cat(parts, self.dim)))))


class PooledTwice(nn.Module):
    """One pooling and one Flatten for several calls, as in PyTorch's tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.pool = layer(padding=1), layer(), nn.MaxPool2d(2)
        self.flat, self.last = nn.Flatten(), nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.a(x))
        return self.last(torch.cat([self.flat(self.b(x)), self.flat(self.pool(x))], 1))


class Called(nn.Module):
    """Features, a function of a module and of them, and a linear layer."""

    def __init__(self, function: Callable[..., Tensor], module: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.function, self.module = layer(4, padding=1), function, module
        self.last = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.function(x) if self.module is None else self.function(self.module, x)
        return self.last(y.flatten(1))


def called(function: Callable[..., Tensor], module: Any = None) -> Pattern:
    build = lambda: Called(function, None if module is None else module())
    return Pattern(build, settings={"skip": ("last", *(() if module is None else ("module",)))})


def among(*modules: Callable[[], nn.Module]) -> Pattern:
    return Pattern(lambda: image(*(module() for module in modules)))


def in_one_dimension(*modules: Callable[[], nn.Module]) -> Pattern:
    return Pattern(lambda: sound(*(module() for module in modules)), SOUND)


def squeeze_excite() -> nn.Module:
    """A gate for each channel, in functions."""
    gate = lambda m, x: m.b(m.r(m.a(x.mean([2, 3], keepdim=True))))
    modules = {"a": nn.Conv2d(4, 4, 1), "b": nn.Conv2d(4, 4, 1)}
    return Code(lambda m, x: x * torch.sigmoid(gate(m, x)), **modules)


def attention() -> nn.Module:
    """Attention whose projections are Linear modules."""
    weights = lambda m, x: (m.query(x) @ m.key(x).transpose(1, 2)).softmax(-1)
    names = ("query", "key", "value", "a")
    modules = {name: nn.Linear(12, 12) for name in names} | {"b": nn.Linear(12, 3)}
    return Code(lambda m, x: m.b(m.r(m.a(weights(m, x) @ m.value(x))).mean(1)), **modules)


def broadcasting() -> nn.Module:
    def code(m: nn.Module, x: Tensor) -> Tensor:
        x = m.a(x)
        return m.b(m.r(m.small(x) + x).flatten(1))

    return Code(code, a=layer(4, padding=1), small=nn.Conv2d(4, 4, 6), b=nn.LazyLinear(3))


def two_sums() -> nn.Module:
    modules = {name: nn.Conv2d(2, 4, 1) for name in "ac"} | {"d": nn.Conv2d(4, 4, 1)}
    code = lambda m, x: m.b(m.r(m.d(m.a(x) + m.c(x))).flatten(1))
    return Code(code, **modules, b=nn.LazyLinear(3))


def residual(x: Tensor) -> Tensor:
    x += x
    return x


def over_rows(*norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 5), *norm, nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))


def averages() -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "chunk": lambda x: x.chunk(2, 1)[0],
    "clone": lambda x: x.clone(),
    "expand": lambda x: x.expand(-1, 4, 6, 6),
    "flip": lambda x: x.flip(2),
    "getitem": lambda x: x[:, :2],
    "narrow": lambda x: x.narrow(1, 0, 2),
    "permute": lambda x: x.unflatten(1, (2, 2)).permute(0, 2, 1, 3, 4).flatten(1, 2),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "reshape": lambda x: x.reshape(x.size(0), -1),
    "roll": lambda x: x.roll(1, 2),
    "split": lambda x: x.split(2, 1)[0],
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "transpose": lambda x: x.transpose(1, 2).flatten(1),
    "unsqueeze": lambda x: x.unsqueeze(1).squeeze(1),
    "view": lambda x: x.view(x.size(0), -1),
    "glu": lambda x: F.glu(x, 1),
    "stack": lambda x: torch.stack([x, x], 1),
    "add": lambda x: x + x,
    "sub": lambda x: x - F.max_pool2d(x, 3, 1, 1),
    "neg": lambda x: -x,
    "mean": lambda x: x.mean([2, 3]),
    "mul": lambda x: x * F.max_pool2d(x, 3, 1, 1),
    "div": lambda x: x / 4,
}
ROWS: dict[str, Pattern] = {
    "linear": among(nn.Flatten, lambda: nn.LazyLinear(5), nn.ReLU),
    "conv1d": in_one_dimension(lambda: nn.Conv1d(4, 4, 3), nn.ReLU),
    "conv2d": among(layer),
    "conv3d": Pattern(
        lambda: nn.Sequential(nn.Conv3d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)),
        (2, 4, 5, 5),
    ),
    "conv_transpose1d": in_one_dimension(lambda: nn.ConvTranspose1d(4, 4, 4, 2, 1), nn.ReLU),
    "conv_transpose2d": among(lambda: nn.ConvTranspose2d(4, 4, 2, 2), nn.ReLU),
    "bilinear": called(lambda module, x: module(x, x), lambda: nn.Bilinear(6, 6, 5)),
    **{
        row.name: among(lambda: nn.Conv2d(4, 4, 1), row.modules[0])
        for row in OPERATORS
        if row.effect is Effect.ACTIVATION
    },
    **{row.name: among(row.modules[0]) for row in OPERATORS if row.passes},
    "dropout1d": in_one_dimension(nn.Dropout1d),
    "flatten": among(nn.Flatten),
    "unflatten": among(lambda: nn.Unflatten(1, (2, 2)), nn.Flatten),
    **{name: called(function) for name, function in FUNCTIONS.items()},
    "pixel_shuffle": among(lambda: nn.PixelShuffle(2)),
    "channel_shuffle": among(lambda: nn.ChannelShuffle(2)),
    "pad": called(lambda x: F.pad(x, (1, 0, 2, 1))),
    "interpolate": called(lambda x: F.interpolate(x, scale_factor=2)),
    "interpolate_linear": among(lambda: nn.Upsample(scale_factor=2, mode="bilinear")),
    "CopyingPad": among(lambda: nn.ReflectionPad2d(1)),
    "max_pool1d": in_one_dimension(lambda: nn.MaxPool1d(2)),
    "max_pool2d": among(lambda: nn.MaxPool2d(2)),
    "adaptive_max_pool1d": in_one_dimension(lambda: nn.AdaptiveMaxPool1d(3)),
    "adaptive_max_pool2d": among(lambda: nn.AdaptiveMaxPool2d(3)),
    "cat": Pattern(lambda: Concatenated("ab")),
    "avg_pool1d": in_one_dimension(lambda: nn.AvgPool1d(3)),
    "avg_pool2d": among(lambda: nn.AvgPool2d(3, 1, 1)),
    "adaptive_avg_pool1d": in_one_dimension(lambda: nn.AdaptiveAvgPool1d(6)),
    "adaptive_avg_pool2d": among(lambda: nn.AdaptiveAvgPool2d(3)),
    "batch_norm": among(layer),
    "OtherNorm": among(lambda: nn.Conv2d(4, 4, 1), lambda: nn.GroupNorm(2, 4), nn.ReLU),
    "multi_head_attention_forward": called(
        lambda module, x: module(*[x.flatten(2)] * 3)[0],
        lambda: nn.MultiheadAttention(36, 2, batch_first=True),
    ),
    **{
        row.name: Pattern(
            lambda kind=row.modules[0]: nn.Sequential(  # type: ignore[misc]
                image(), kind(1) if "softmax" in kind.__name__.lower() else kind()
            )
        )
        for row in OPERATORS
        if row.keeps_order
    },
    # Gates are quantised in networks of bytes.
    **{
        row.name: Pattern(
            lambda gate=row.modules[0]: image(nn.Conv2d(4, 4, 1), gate()),  # type: ignore[misc]
            settings={"weights": "int8", "features": None},
        )
        for row in OPERATORS
        if row.is_gate
    },
}
"""A network for each row of the operator table."""


QUARTER = ss.Stair.ternary(quantum=0.25)
SEVERAL = {"features": {"a.*": QUARTER, "*": TERNARY}}
PAGE: dict[str, list[Pattern]] = {
    "`Conv1d` on (N, C, L)": [ROWS["conv1d"]],
    "an input of int8 or int16": [
        Pattern(image, dtype=torch.int8, zero=0),
        Pattern(lambda: image(layer(padding=1)), dtype=torch.int8, zero=-7),
        Pattern(sound, SOUND, dtype=torch.int16, zero=300, scale=2.0**14),
        Pattern(sound, SOUND, {"weights": INT4}, dtype=torch.int16, zero=0, scale=2.0**14),
    ],
    "a bottleneck with `ReLU6`": [
        Pattern(
            lambda: image(
                *(nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8), nn.ReLU6()),
                *(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.Hardtanh()),
            )
        )
    ],
    "a shortcut that is added": [called(residual), ROWS["add"]],
    "two sums that are added": [Pattern(two_sums)],
    "the same, quantised with": [
        Pattern(two_sums, settings={"options": ss.QuantiseOptions(sums=None)})
    ],
    "a shortcut that broadcasts": [Pattern(broadcasting)],
    "features concatenated along the channels": [
        ROWS["cat"],
        Pattern(lambda: Concatenated("abx")),
        Pattern(lambda: Concatenated("xxx", width=30)),
        Pattern(lambda: Concatenated("ab", -1, flat=True)),
        Pattern(lambda: Concatenated("ab"), settings=SEVERAL),
        Pattern(
            lambda: Concatenated("ax"),
            settings={"features": {"a.*": ss.Stair.linear(4, quantum=1.0), "*": TERNARY}},
        ),
    ],
    "features concatenated along another axis": [Pattern(lambda: Concatenated("ab", 2))],
    "a normalisation and an activation before": [
        Pattern(lambda: image(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU())),
        Pattern(lambda: sound(nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 4, 3), nn.ReLU()), SOUND),
    ],
    "a squeeze-excite block": [
        Pattern(lambda: image(squeeze_excite()), settings={"weights": "int8", "features": None}),
        Pattern(lambda: image(squeeze_excite()), settings={"weights": "int4", "features": None}),
    ],
    "the same, with gates in float": [among(squeeze_excite)],
    "`GroupNorm` or `LayerNorm`": [ROWS["OtherNorm"]],
    "a layer after `AvgPool2d`": [
        ROWS["avg_pool2d"],
        Pattern(lambda: image(nn.AdaptiveAvgPool2d(1), nn.Flatten())),
        Pattern(lambda: image(nn.AdaptiveAvgPool2d(1), nn.Flatten()), settings={"skip": "5.1"}),
        Pattern(lambda: image(nn.AvgPool2d(2, padding=1), layer(), nn.AvgPool2d((3, 2), 1, 1))),
        Pattern(lambda: image(nn.AvgPool2d(3, 1, divisor_override=4), layer())),
    ],
    "a convolution as the last layer, one score": [
        Pattern(lambda: image(head=nn.Sequential(nn.Conv2d(4, 3, 6), nn.Flatten()))),
        Pattern(
            lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Conv1d(4, 3, 10), nn.Flatten()),
            SOUND,
        ),
        Pattern(
            lambda: image(nn.AdaptiveAvgPool2d(1), head=nn.Conv2d(4, 3, 1)),
            settings={"skip": "4"},
        ),
    ],
    "a convolution as the last layer, scores for each": [
        Pattern(lambda: image(head=nn.Conv2d(4, 3, 1)))
    ],
    "averages of features as the scores": [
        Pattern(lambda: image(layer(3), head=averages())),
        Pattern(lambda: image(head=averages())),
    ],
    "a softmax at the end": [
        Pattern(lambda: image(head=nn.Sequential(nn.Conv2d(4, 3, 6), nn.Flatten(), nn.Softmax(1)))),
        Pattern(
            lambda: nn.Sequential(image(), nn.Identity(), nn.LogSoftmax(-1)),
            settings={"skip": "0.3.1"},
        ),
    ],
    "`Linear` applied to more than a vector": [Pattern(over_rows, SOUND)],
    "the same, followed by a batch normalisation": [
        Pattern(lambda: over_rows(nn.BatchNorm1d(2)), SOUND)
    ],
    "the `Linear` layers of attention": [Pattern(attention, SOUND)],
}
"""The patterns of docs/layers.md, by the first words of their rows."""
OTHERS: dict[str, Pattern] = {
    "parts of a vector": Pattern(
        lambda: image(head=Code(lambda m, x: m.b(x.flatten(1)[:, 4:24]), b=nn.LazyLinear(3)))
    ),
    "zeros in modules": among(lambda: nn.ZeroPad2d((1, 0, 2, 1))),
    "copies around features": called(lambda x: F.pad(x, (1, 2, 0, 1), "circular")),
    "Upsample": among(lambda: nn.Upsample(scale_factor=3, mode="nearest")),
    "linear in one dimension": in_one_dimension(
        lambda: nn.Upsample(scale_factor=2, mode="linear"), lambda: nn.Conv1d(4, 4, 3), nn.ReLU
    ),
    "bytes to twice the size": Pattern(
        lambda: image(nn.Upsample(scale_factor=2, mode="bilinear"), layer()),
        settings={"weights": "int8", "features": None},
    ),
    "channels last and back": called(lambda x: x.permute(0, 2, 3, 1).permute(0, 3, 1, 2)),
    "sums as pixels": among(lambda: nn.Conv2d(4, 16, 1), lambda: nn.PixelShuffle(2), nn.ReLU),
    **{
        f"transposed, {name}": Pattern(
            lambda options=options: image(  # type: ignore[misc]
                nn.ConvTranspose2d(4, 4, **options), nn.BatchNorm2d(4), nn.ReLU(), layer()
            )
        )
        for name, options in {
            "ends that differ": dict(kernel_size=3, stride=2, padding=1, output_padding=1),
            "cut": dict(kernel_size=3, stride=2),
            "with holes": dict(kernel_size=(2, 3), stride=(3, 1), dilation=(1, 2)),
            "in groups": dict(kernel_size=4, stride=2, padding=1, groups=2),
            "groups of stride 1": dict(kernel_size=3, padding=1, groups=2),
        }.items()
    },
    "transposed and added": among(
        lambda: Code(
            lambda m, x: m.r(m.up(x) + F.interpolate(x, scale_factor=2)),
            up=nn.ConvTranspose2d(4, 4, 2, 2),
            r=nn.ReLU(),
        )
    ),
    "transposed, pooled": among(
        lambda: nn.ConvTranspose2d(4, 4, 2, 2), lambda: nn.MaxPool2d(2), nn.ReLU
    ),
    "transposed as the last": Pattern(lambda: image(head=nn.ConvTranspose2d(4, 3, 3, 2))),
    "Conv1d, same": Pattern(
        lambda: sound(
            nn.Conv1d(4, 40, 5, padding="same"), nn.ReLU(), nn.Conv1d(40, 4, 1), nn.ReLU()
        ),
        SOUND,
    ),
    "grouped Conv1d": Pattern(
        lambda: sound(nn.Conv1d(4, 6, 3, 2, 2, 2, groups=2), nn.BatchNorm1d(6), nn.ReLU()), SOUND
    ),
    "zeros around the input": Pattern(
        lambda: nn.Sequential(nn.ZeroPad2d((0, 1, 2, 0)), image(layer()))
    ),
    "zeros around bits": Pattern(lambda: image(layer(30), nn.ZeroPad2d(1), layer())),
    "maximum of rows": Pattern(lambda: image(nn.AdaptiveMaxPool2d((3, None)), layer())),
    "maximum of sums": Pattern(
        lambda: image(
            nn.Conv2d(4, 4, 3, padding=1), nn.MaxPool2d(2), nn.AdaptiveMaxPool2d(1), nn.ReLU()
        )
    ),
    "kept ReLU6 before a stair": Pattern(
        lambda: image(nn.Conv2d(4, 4, 1), nn.ReLU6(), nn.ReLU()), settings={"skip": "4"}
    ),
    "pooling used twice": Pattern(PooledTwice),
    "parts of a chunk": Pattern(
        lambda: image(
            Code(lambda m, x: torch.cat(x.chunk(4, 1), 1)),
            Code(lambda m, x: torch.cat(x.chunk(4, 1)[1:3], 1)),
        )
    ),
}
"""What else people write."""
