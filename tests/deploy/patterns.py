"""Small networks of the patterns that people write, quantised and trained for two steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import softstair as ss

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


PATTERNS = {
    "Conv1d": Pattern(
        lambda: sound(nn.Conv1d(4, 6, 3, 2, 2, 2, groups=2), nn.BatchNorm1d(6), nn.ReLU()), SOUND
    ),
    "Conv1d, same": Pattern(
        lambda: sound(
            nn.Conv1d(4, 40, 5, padding="same"), nn.ReLU(), nn.Conv1d(40, 4, 1), nn.ReLU()
        ),
        SOUND,
    ),
    "pooling in one dimension": Pattern(
        lambda: sound(nn.MaxPool1d(2, padding=1), nn.Conv1d(4, 6, 3), nn.ReLU(), nn.AvgPool1d(2)),
        SOUND,
    ),
    "cat": Pattern(lambda: Concatenated("abx")),
    "cat in bits": Pattern(lambda: Concatenated("xxx", width=30)),
    "cat of vectors": Pattern(lambda: Concatenated("ab", -1, flat=True)),
    "cat of other ranges": Pattern(
        lambda: Concatenated("ax"),
        settings={"features": {"a.*": ss.Stair.linear(4, signed=False, quantum=1.0), "*": TERNARY}},
    ),
    "ZeroPad2d": Pattern(lambda: nn.Sequential(nn.ZeroPad2d((0, 1, 2, 0)), image(layer()))),
    "ZeroPad2d of bits": Pattern(lambda: image(layer(30), nn.ZeroPad2d(1), layer())),
    "ZeroPad1d": Pattern(lambda: sound(nn.ZeroPad1d((2, 0)), nn.Conv1d(4, 4, 3), nn.ReLU()), SOUND),
    "AvgPool2d with padding": Pattern(
        lambda: image(nn.AvgPool2d(2, padding=1), layer(), nn.AvgPool2d((3, 2), 1, 1))
    ),
    "AvgPool2d with a divisor": Pattern(
        lambda: image(nn.AvgPool2d(3, 1, divisor_override=4), layer())
    ),
    "AdaptiveMaxPool2d": Pattern(lambda: image(nn.AdaptiveMaxPool2d((3, None)), layer())),
    "AdaptiveMaxPool2d of sums": Pattern(
        lambda: image(
            nn.Conv2d(4, 4, 3, padding=1), nn.MaxPool2d(2), nn.AdaptiveMaxPool2d(1), nn.ReLU()
        )
    ),
    "AdaptiveMaxPool1d": Pattern(lambda: sound(nn.AdaptiveMaxPool1d(4)), SOUND),
    "AdaptiveAvgPool1d": Pattern(lambda: sound(nn.AdaptiveAvgPool1d(6)), SOUND),
    "AdaptiveAvgPool2d": Pattern(lambda: image(nn.AdaptiveAvgPool2d(3), layer())),
    "convolutional head": Pattern(
        lambda: image(head=nn.Sequential(nn.Conv2d(4, 3, 6), nn.Flatten()))
    ),
    "convolutional head in one dimension": Pattern(
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Conv1d(4, 3, 10), nn.Flatten()),
        SOUND,
    ),
    "convolutional head in float": Pattern(
        lambda: image(nn.AdaptiveAvgPool2d(1), head=nn.Conv2d(4, 3, 1)), settings={"skip": "4"}
    ),
    "averages as scores": Pattern(
        lambda: image(layer(3), head=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    ),
    "softmax": Pattern(
        lambda: image(head=nn.Sequential(nn.Conv2d(4, 3, 6), nn.Flatten(), nn.Softmax(1)))
    ),
    "softmax of floats": Pattern(
        lambda: nn.Sequential(image(), nn.Identity(), nn.LogSoftmax(-1)), settings={"skip": "0.3.1"}
    ),
    "ReLU6 and Hardtanh": Pattern(
        lambda: image(
            nn.Conv2d(4, 8, 1),
            nn.BatchNorm2d(8),
            nn.ReLU6(),
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
            nn.BatchNorm2d(8),
            nn.Hardtanh(),
        )
    ),
    "kept ReLU6 before a stair": Pattern(
        lambda: image(nn.Conv2d(4, 4, 1), nn.ReLU6(), nn.ReLU()), settings={"skip": "4"}
    ),
    "pooling used twice": Pattern(PooledTwice),
    "int8 input": Pattern(image, dtype=torch.int8, zero=0),
    "int8 input with a zero point": Pattern(
        lambda: image(layer(padding=1)), dtype=torch.int8, zero=-7
    ),
    "int16 input": Pattern(sound, SOUND, dtype=torch.int16, zero=300, scale=2.0**14),
    "int16 input in INT4": Pattern(
        sound, SOUND, {"weights": INT4}, dtype=torch.int16, zero=0, scale=2.0**14
    ),
}
