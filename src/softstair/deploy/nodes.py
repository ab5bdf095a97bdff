"""The nodes of a frozen network: operations that take integers and give integers.

A node names the nodes whose results it reads and the range of its own results. Tensors are int32 of
shape (N, C, H, W), (N, C, L), or (N, C) after a Flatten; a linear layer applied to more than a
vector has its channels last. Windows have one or two axes, as the tensors.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from softstair._errors import SoftstairError

Shape = tuple[int, ...]
Rounding = Literal["once", "double"]
Arithmetic = Literal["fine", "int8"]
INT32_LIMIT = 2**31
EXACT_PRODUCT = 2**53
"""Below it float64 holds every integer."""


class ExportError(SoftstairError):
    """A network that has no integer form, or that a format cannot express."""

    @classmethod
    def of(cls, layer: str, reason: str, advice: str = "") -> Self:
        """Return the error about a layer: what is wrong, and what to do."""
        return cls(f"cannot export {layer!r}: {reason}.{f' {advice}.' if advice else ''}")


class NeedsInt8(ExportError):
    """A network that a format has only as INT8 runtimes compute: freeze it so."""


@dataclass(frozen=True, eq=False)
class Node(ABC):
    """An operation whose results lie between ``low`` and ``high``."""

    name: str
    inputs: tuple[str, ...]
    low: int
    high: int

    @abstractmethod
    def run(self, *x: Tensor) -> Tensor:
        """Compute the result, int32, from int32 inputs."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its weights, thresholds and the like, by the names of their fields."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    @property
    def plain(self) -> dict[str, Any]:
        """Its other fields."""
        return {name: value for name, value in vars(self).items() if not isinstance(value, Tensor)}


@dataclass(frozen=True, eq=False)
class Input(Node):
    """What the device reads: integers minus ``zero``, or what a table has for each of 256.

    The float network sees the result times ``unit``.
    """

    shape: Shape
    unit: float
    zero: int = 0
    dtype: str = "uint8"
    table: Tensor | None = None  # (C, 256) int8 or int16, of the values of each channel

    def run(self, *x: Tensor) -> Tensor:
        if self.table is None:
            return x[0].int() - self.zero
        row = torch.arange(len(self.table), device=x[0].device)
        return self.table[row.reshape(-1, *[1] * (x[0].dim() - 2)), x[0].long()].int()

    def check(self, x: Any, name: str = "x") -> None:
        """Raise SoftstairError if the type or the shape of ``x`` is not the input's."""
        is_right = isinstance(x, Tensor) and x.dtype == getattr(torch, self.dtype)
        if not is_right or tuple(x.shape[1:]) != self.shape:
            is_tensor, kind = isinstance(x, Tensor), type(x).__name__
            given = f"{x.dtype} of shape {tuple(x.shape)}" if is_tensor else kind
            allowed = f"{self.dtype} of shape (N, {', '.join(map(str, self.shape))})"
            raise SoftstairError(f"{name} must be {allowed}, but {given} was given.", field=name)

    def random(self, count: int) -> Tensor:
        """Return random integers that the device may read, always the same."""
        dtype = getattr(torch, self.dtype)
        ends, draw = torch.iinfo(dtype), torch.Generator().manual_seed(0)
        size = (count, *self.shape)
        return torch.randint(ends.min, ends.max + 1, size, generator=draw, dtype=dtype)


@dataclass(frozen=True, eq=False)
class Sum(Node):
    """A convolution or a linear layer with integer weights."""

    weight: Tensor  # (O, I/groups, kh, kw), (O, I/groups, k) or (O, I), int8, int16 or int32
    stride: Shape = (1, 1)
    padding: Shape = (0, 0)
    dilation: Shape = (1, 1)
    groups: int = 1

    def run(self, *x: Tensor) -> Tensor:
        # float64 holds every sum below 2⁵³, whatever the order of its terms.
        wide, weight = x[0].double(), self.weight.double()
        if weight.dim() == 2:
            return F.linear(wide, weight).round_().int()
        convolve = F.conv1d if weight.dim() == 3 else F.conv2d
        windows = (self.stride, self.padding, self.dilation, self.groups)
        return convolve(wide, weight, None, *windows).round_().int()

    def bounds(self, low: int, high: int) -> tuple[Tensor, Tensor]:
        """Return the least and the greatest sum of each channel, (O,) int64, over inputs from
        ``low`` to ``high``."""
        if any(self.padding):
            low, high = min(low, 0), max(high, 0)
        flat = self.weight.flatten(1).long()
        above, below = flat.clamp(min=0).sum(1), flat.clamp(max=0).sum(1)
        return above * low + below * high, above * high + below * low


@dataclass(frozen=True, eq=False)
class Steps(Node):
    """A stair: levels[how many thresholds of its channel an integer reaches]."""

    thresholds: Tensor  # (C, K − 1) int32, not decreasing
    levels: tuple[int, ...]  # K, increasing
    axis: int = 1  # of the channels; the batch is axis 0

    def run(self, *x: Tensor) -> Tensor:
        rows = x[0].movedim(self.axis, 0)
        flat = rows.reshape(len(rows), math.prod(rows.shape[1:])).contiguous()
        index = torch.searchsorted(self.thresholds, flat, right=True, out_int32=True)
        if self.levels[-1] - self.levels[0] == len(self.levels) - 1:
            result = index + self.levels[0]
        else:
            result = torch.tensor(self.levels, dtype=torch.int32, device=index.device)[index]
        return result.reshape(rows.shape).movedim(0, self.axis)


@dataclass(frozen=True, eq=False)
class Requantise(Node):
    """Integers in another unit: clamp(round((v·multiplier + y·beside + rest) / 2^shift)), where
    v = x·factor + bias and y is the second input; without one there is no ``beside`` and ``rest``.

    Each channel has its own numbers, (C,) int32, and int64 in ``rest``. "once" rounds once, halves
    up, in 64 bits. "double" is gemmlowp's arithmetic: the high half of 2·v·multiplier, rounded,
    then a rounding shift; it has no second input.
    """

    factor: Tensor
    bias: Tensor
    multiplier: Tensor
    shift: Tensor
    beside: Tensor | None = None
    rest: Tensor | None = None
    axis: int = 1
    rounding: Rounding = "once"

    def run(self, *x: Tensor) -> Tensor:
        row = lambda t: t.reshape(-1, *[1] * (x[0].dim() - 1 - self.axis)).long()
        value, shift = x[0].long() * row(self.factor) + row(self.bias), row(self.shift)
        if self.rounding == "double":
            level = doubly_rounded(value, row(self.multiplier), shift)
        else:
            total = value * row(self.multiplier)
            if self.beside is not None and self.rest is not None:
                total = total + x[1].long() * row(self.beside) + row(self.rest)
            level = (total + ((1 << shift) >> 1)) >> shift
        return level.clamp(self.low, self.high).int()


@dataclass(frozen=True, eq=False)
class Lookup(Node):
    """What a table has for each integer from 0 to 255."""

    table: Tensor  # (256,) int8, int16 or int32

    def run(self, *x: Tensor) -> Tensor:
        return self.table[x[0].long()].int()


Stair = Steps | Requantise


def doubly_rounded(value: Tensor, multiplier: Tensor, shift: Tensor) -> Tensor:
    """Return value·multiplier / 2^shift as gemmlowp rounds it, for multipliers from 2³⁰ to 2³¹."""
    product = value * multiplier
    nudge = torch.where(product >= 0, 1 << 30, 1 - (1 << 30))
    high = torch.div(product + nudge, 1 << 31, rounding_mode="trunc")
    right = shift - 31
    mask = (1 << right) - 1
    remainder, limit = high & mask, (mask >> 1) + (high < 0).long()
    return (high >> right) + (remainder > limit).long()


@dataclass(frozen=True, eq=False)
class MaxPool(Node):
    """The maximum of each window; padding never is the maximum.

    The last windows of an axis may reach ``beyond`` its padding.
    """

    kernel: Shape
    stride: Shape
    padding: Shape
    beyond: Shape = ()

    def run(self, *x: Tensor) -> Tensor:
        pool = F.max_pool1d if len(self.kernel) == 1 else F.max_pool2d
        wide = F.pad(x[0].double(), _pairs(self.padding, self.beyond), value=-torch.inf)
        return pool(wide, self.kernel, self.stride).int()


@dataclass(frozen=True, eq=False)
class SumPool(Node):
    """The sum of each window: an average times its number of elements.

    The last windows of an axis may reach ``beyond`` its padding.
    """

    kernel: Shape
    stride: Shape
    padding: Shape = (0, 0)
    beyond: Shape = ()

    def run(self, *x: Tensor) -> Tensor:
        if len(self.kernel) == 1:  # avg_pool1d cannot leave out the division
            ends = ((0, *self.padding[-1:]), (0, *(self.beyond or (0,))))
            rows = ((1, *self.kernel), (1, *self.stride), *ends)
            return SumPool("", (), 0, 0, *rows).run(x[0].unsqueeze(-2)).squeeze(-2)
        wide = F.pad(x[0].double(), _pairs(self.padding, self.beyond))
        windows = (self.kernel, self.stride)
        return F.avg_pool2d(wide, *windows, divisor_override=1).round_().int()


def _pairs(padding: Shape, beyond: Shape) -> list[int]:
    """Return what F.pad takes: the last axis first."""
    more = beyond or (0,) * len(padding)
    axes = zip(reversed(padding), reversed(more), strict=True)
    return [size for before, extra in axes for size in (before, before + extra)]


@dataclass(frozen=True, eq=False)
class Select(Node):
    """Features from other channels, rows and columns: y[c, i, j] = x[channels[c], rows[i],
    columns[j]], each int32."""

    channels: Tensor
    rows: Tensor | None = None
    columns: Tensor | None = None

    def run(self, *x: Tensor) -> Tensor:
        result = x[0]
        for axis, places in enumerate(self.tensors.values(), 1):
            result = result.index_select(axis, places)
        return result


@dataclass(frozen=True, eq=False)
class PixelShuffle(Node):
    """Channels as pixels: y[c, f·i + p, g·j + q] = x[(p·g + q)·C + c, i, j] for ``factor`` (f, g),
    or with ``channels_first`` x[c·f·g + p·g + q, i, j]."""

    factor: Shape
    channels_first: bool = False

    def run(self, *x: Tensor) -> Tensor:
        size = x[0].shape
        parts = x[0].reshape(size[0], *self.split(size[1]), *size[2:])
        return parts.permute(*self.order).reshape(size[0], *self.shape(size[1:]))

    def split(self, channels: int) -> Shape:
        """Return the lengths of the channels' parts."""
        count = channels // math.prod(self.factor)
        return (count, *self.factor) if self.channels_first else (*self.factor, count)

    @property
    def order(self) -> Shape:
        """The axes of the parts, then of the positions, in the order of the result."""
        axes = len(self.factor)
        first = 1 if self.channels_first else 1 + axes
        phases = [axis for axis in range(1, 2 + axes) if axis != first]
        pairs = ((2 + axes + axis, phases[axis]) for axis in range(axes))
        return (0, first, *(axis for pair in pairs for axis in pair))

    def shape(self, size: Shape) -> Shape:
        """Return the shape of the result for features of a shape, without the batch."""
        channels, *sizes = size
        larger = (n * factor for n, factor in zip(sizes, self.factor, strict=True))
        return (channels // math.prod(self.factor), *larger)


@dataclass(frozen=True, eq=False)
class Add(Node):
    """The sum of two features of the same unit and shape."""

    def run(self, *x: Tensor) -> Tensor:
        return x[0] + x[1]


@dataclass(frozen=True, eq=False)
class Concat(Node):
    """Features of the same unit side by side; the batch is axis 0."""

    axis: int

    def run(self, *x: Tensor) -> Tensor:
        return torch.cat(x, self.axis)


@dataclass(frozen=True, eq=False)
class Pad(Node):
    """Features between zeros: so many before and after each axis, the last axis first."""

    padding: Shape

    def run(self, *x: Tensor) -> Tensor:
        return F.pad(x[0], self.padding)


@dataclass(frozen=True, eq=False)
class Flatten(Node):
    """(N, C, H, W) → (N, C·H·W)."""

    def run(self, *x: Tensor) -> Tensor:
        return x[0].flatten(1)


@dataclass(frozen=True, eq=False)
class Scores(Node):
    """The outputs: x·2^shift + bias, each of which stands for itself times its ``scale``.

    ``order`` are integers in proportion to the scales: the class is that of the largest score times
    order, which 64 bits hold.
    """

    bias: Tensor  # (C,) int32
    scale: Tensor  # (C,) float64
    order: Tensor  # (C,) int32
    shift: int = 0
    axis: int = 1

    def run(self, *x: Tensor) -> Tensor:
        return (x[0] << self.shift) + self._row(self.bias, x[0])

    def classes(self, scores: Tensor) -> Tensor:
        """Return the class of each example or position, int64; of equal scores the first."""
        return (scores.long() * self._row(self.order, scores).long()).argmax(self.axis)

    def values(self, scores: Tensor) -> Tensor:
        """Return what the scores stand for, float64."""
        return scores.double() * self._row(self.scale, scores)

    def _row(self, values: Tensor, x: Tensor) -> Tensor:
        return values.reshape(-1, *[1] * (x.dim() - 1 - self.axis))


def bits(low: int, high: int) -> int:
    """Return the width of a signed integer that holds ``low`` to ``high``."""
    return 1 + max((-low - 1).bit_length() if low < 0 else 0, max(high, 0).bit_length())


def narrowest(values: npt.NDArray[Any]) -> npt.NDArray[np.signedinteger]:
    """Return integers in the fewest of 8, 16, 32 or 64 bits that hold them."""
    reach = max(-int(values.min(initial=0)), int(values.max(initial=0)) + 1)
    return values.astype(np.min_scalar_type(-reach))


def narrow(weight: Tensor) -> Tensor:
    """Return whole weights in the fewest bits that hold them."""
    return torch.from_numpy(narrowest(weight.long().numpy()))


def largest_sum(weight: npt.NDArray[Any], low: int, high: int) -> int:
    """Return the largest magnitude of a partial sum over features from ``low`` to ``high``."""
    flat = weight.reshape(len(weight), -1).astype(np.int64)
    ends = np.stack([flat * low, flat * high, np.zeros_like(flat)])
    return int(max(ends.max(0).sum(1).max(), -ends.min(0).sum(1).min()))
