"""Integer networks: nodes that compute with integers, and the network that they form.

A node names the nodes whose results it reads and the range of its own results. Tensors have shape
(N, C, H, W), (N, C, L), or (N, C) after a Flatten; a linear layer applied to more than a vector has
its channels last. Windows have one or two axes, as the tensors.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softstair._errors import SoftstairError

Shape = tuple[int, ...]
FLOAT32_EXACT = 2**24  # below it float32 holds every integer
INT32_LIMIT = 2**31


class ExportError(SoftstairError):
    """A network that has no exact integer form, or that a format cannot express."""

    @classmethod
    def of(cls, layer: str, reason: str, advice: str = "") -> "ExportError":
        """Return the error about a layer: what is wrong, and what to do."""
        return cls(f"cannot export {layer!r}: {reason}.{f' {advice}.' if advice else ''}")


@dataclass(frozen=True)
class Node(ABC):
    """An operation whose results lie between ``low`` and ``high``."""

    name: str
    inputs: tuple[str, ...]
    low: int
    high: int

    @abstractmethod
    def run(self, *x: Tensor) -> Tensor:
        """Compute the result from int64 inputs."""


@dataclass(frozen=True)
class Input(Node):
    """Integers of ``dtype`` minus their zero point; 1 stands for 1/scale in the float network."""

    shape: Shape
    zero: int
    scale: float
    dtype: torch.dtype = torch.uint8

    @property
    def type_name(self) -> str:
        """The name of its type: uint8, int8 or int16."""
        return str(self.dtype).removeprefix("torch.")

    def run(self, *x: Tensor) -> Tensor:
        return x[0].long() - self.zero


@dataclass(frozen=True)
class Sum(Node):
    """A convolution or a linear layer with integer weights."""

    weight: Tensor  # (O, I/groups, kh, kw), (O, I/groups, k) or (O, I), int64
    least: Tensor  # bounds of each channel's sums, (O,) int64
    greatest: Tensor
    stride: Shape = (1, 1)
    padding: Shape = (0, 0)
    dilation: Shape = (1, 1)
    groups: int = 1

    def run(self, *x: Tensor) -> Tensor:
        # float64 holds every integer up to 2⁵³, and has the kernels that int64 lacks.
        wide, weight = x[0].double(), self.weight.double()
        if weight.dim() == 2:
            return F.linear(wide, weight).long()
        convolve = F.conv1d if weight.dim() == 3 else F.conv2d
        windows = (self.stride, self.padding, self.dilation, self.groups)
        return convolve(wide, weight, None, *windows).long()


@dataclass(frozen=True)
class FloatSteps:
    """What the float network computes from sums to levels, with every result rounded to float32.

    Each stage multiplies by a factor and adds an addend; the result of the last one is y. The level
    is the number of limits that y + value reaches, for one of M values of the shortcut.
    """

    factors: Tensor  # (S, C) float32, of S stages
    addends: Tensor  # (S, C)
    is_fused: bool  # whether the last stage rounds once, after its addition
    values: Tensor  # (M,), of consecutive integers; NaN for those that do not occur
    limits: Tensor  # (K − 1,)
    quantum: float  # the distance between two limits, before rounding to float32

    def rescaled(self, sums: Tensor) -> Tensor:
        """Return y, (C, n) float32, of sums (C, n)."""
        y, last = sums.float(), len(self.factors) - 1
        for stage in range(last + 1):
            factor, addend = self.factors[stage, :, None], self.addends[stage, :, None]
            if stage == last and self.is_fused:
                y = (y.double() * factor.double() + addend.double()).float()
            else:
                y = y * factor + addend
        return y

    def of_channels(self, channels: Tensor) -> "FloatSteps":
        """Return the same for a choice of channels."""
        return replace(self, factors=self.factors[:, channels], addends=self.addends[:, channels])


@dataclass(frozen=True)
class Steps(Node):
    """A stair, with all that precedes it since the sum: levels[how many thresholds s reaches].

    thresholds  (C, K − 1) int64, not decreasing; with a second input (a shortcut that was added to
                the sum) (C, M, K − 1), one row for each of its values from ``first`` on
    levels      (K,) integers, increasing
    axis        axis of the channels; the batch is axis 0
    floats      the float operations that the thresholds stand for, if known (see affine.py)
    """

    thresholds: Tensor
    levels: tuple[int, ...]
    first: int = 0
    axis: int = 1
    floats: FloatSteps | None = None

    def run(self, *x: Tensor) -> Tensor:
        sums = x[0]
        row = torch.arange(sums.shape[self.axis])
        row = row.reshape(-1, *[1] * (sums.dim() - 1 - self.axis))
        if len(x) > 1:
            row = row * self.thresholds.shape[1] + x[1] - self.first
        # Row r is shifted by r·span, so that all rows are one sorted list.
        least, greatest = (int(end) for end in sums.aminmax()) if sums.numel() else (0, 0)
        span = greatest - least + 2
        table = self.thresholds.flatten(0, -2).clamp(least, greatest + 1) - least
        table += span * torch.arange(len(table))[:, None]
        places = (sums - least + span * row).contiguous()
        reached = torch.searchsorted(table.flatten(), places, right=True)
        return torch.tensor(self.levels)[reached - row * table.shape[1]]


@dataclass(frozen=True)
class MaxPool(Node):
    """The maximum of each window; padding never is the maximum."""

    kernel: Shape
    stride: Shape
    padding: Shape

    def run(self, *x: Tensor) -> Tensor:
        pool = F.max_pool1d if len(self.kernel) == 1 else F.max_pool2d
        return pool(x[0].double(), self.kernel, self.stride, self.padding).long()


@dataclass(frozen=True)
class SumPool(Node):
    """The sum of each window: an average times its number of elements."""

    kernel: Shape
    stride: Shape
    padding: Shape = (0, 0)

    def run(self, *x: Tensor) -> Tensor:
        if len(self.kernel) == 1:  # avg_pool1d cannot leave out the division
            rows = ((1, *self.kernel), (1, *self.stride), (0, *self.padding[-1:]))
            return SumPool("", (), 0, 0, *rows).run(x[0].unsqueeze(-2)).squeeze(-2)
        windows = (self.kernel, self.stride, self.padding)
        return F.avg_pool2d(x[0].double(), *windows, divisor_override=1).long()


@dataclass(frozen=True)
class Expand(Node):
    """Features repeated along axes of length 1, to ``shape`` (without the batch)."""

    shape: Shape

    def run(self, *x: Tensor) -> Tensor:
        return x[0].expand(-1, *self.shape)


@dataclass(frozen=True)
class Add(Node):
    """The sum of two features of the same unit and shape."""

    def run(self, *x: Tensor) -> Tensor:
        return x[0] + x[1]


@dataclass(frozen=True)
class Concat(Node):
    """Features of the same unit side by side; the batch is axis 0."""

    axis: int

    def run(self, *x: Tensor) -> Tensor:
        return torch.cat(x, self.axis)


@dataclass(frozen=True)
class Pad(Node):
    """Features between zeros: so many before and after each axis, the last axis first."""

    padding: Shape

    def run(self, *x: Tensor) -> Tensor:
        return F.pad(x[0], self.padding)


@dataclass(frozen=True)
class Flatten(Node):
    """(N, C, H, W) → (N, C·H·W)."""

    def run(self, *x: Tensor) -> Tensor:
        return x[0].flatten(1)


@dataclass(frozen=True)
class Scores(Node):
    """The last layer in float: weight @ (unit · x) + bias."""

    weight: Tensor
    bias: Tensor | None
    unit: float

    def run(self, *x: Tensor) -> Tensor:
        return F.linear(x[0].to(torch.float32) * self.unit, self.weight, self.bias)


@dataclass(frozen=True)
class Rescaled(Node):
    """The scores of a last layer with integer weights: scale · s + bias, (C,) float32 each."""

    scale: Tensor
    bias: Tensor
    axis: int = 1

    def run(self, *x: Tensor) -> Tensor:
        sums = x[0].to(torch.float32)
        shape = (-1, *[1] * (sums.dim() - 1 - self.axis))
        return sums * self.scale.reshape(shape) + self.bias.reshape(shape)


@dataclass(frozen=True, repr=False, eq=False)
class IntegerNetwork:
    """A network that computes with integers from the input to the scores.

    :func:`softstair.deploy.integerise` creates it.

    Attributes:
        nodes: In order of execution; the first is the input, the last gives the scores.
        sizes: Shape of each node's result, without the batch.
        stairs: Nodes that give the outputs of the trained network's stairs, under their names.
        head: The module whose output the scores are, if a softmax that is left out follows it.
    """

    nodes: tuple[Node, ...]
    sizes: Mapping[str, Shape]
    stairs: tuple[str, ...] = ()
    head: str = ""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the scores, (N, classes) float32, of integers (N, C, H, W)."""
        return self.features(x)[self.last.name]

    def features(self, x: Tensor) -> dict[str, Tensor]:
        """Return the result of every node, by its name.

        Raises:
            SoftstairError: If the type or the shape of ``x`` is not the input's.
        """
        self.check_input(x)
        results: dict[str, Tensor] = {}
        for node in self.nodes:
            results[node.name] = node.run(*[results[name] for name in node.inputs] or [x])
        return results

    def check_input(self, x: object) -> None:
        """Raise SoftstairError if the type or the shape of ``x`` is not the input's."""
        given = (
            f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        )
        shape, dtype = self.input.shape, self.input.dtype
        if not isinstance(x, Tensor) or x.dtype != dtype or tuple(x.shape[1:]) != shape:
            allowed = f"{self.input.type_name} of shape (N, {', '.join(map(str, shape))})"
            raise SoftstairError(f"x must be {allowed}, but {given} was given.", field="x")

    def __repr__(self) -> str:
        rows = [("name", "node", "inputs", "shape", "from", "to")]
        for node in self.nodes:
            shape = "×".join(map(str, self.sizes[node.name]))
            is_float = isinstance(node, Scores | Rescaled)
            ends = ("", "") if is_float else (str(node.low), str(node.high))
            rows.append((node.name, type(node).__name__, ", ".join(node.inputs), shape, *ends))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        cells = [map(str.ljust, row, widths) for row in rows]
        return "\n".join("  ".join(row).rstrip() for row in cells)

    @property
    def input(self) -> Input:
        """The first node."""
        first = self.nodes[0]
        assert isinstance(first, Input)
        return first

    @property
    def last(self) -> Node:
        """The node that gives the scores."""
        return self.nodes[-1]

    @property
    def digest(self) -> str:
        """The SHA-256 of its weights and thresholds."""
        tensors = (each for node in self.nodes for each in vars(node).values())
        parts = (each.numpy().tobytes() for each in tensors if isinstance(each, Tensor))
        return hashlib.sha256(b"".join(parts)).hexdigest()

    def node(self, name: str) -> Node:
        """Return the node of that name."""
        return next(node for node in self.nodes if node.name == name)

    def users(self, name: str) -> list[Node]:
        """Return the nodes that read the result of a node."""
        return [node for node in self.nodes if name in node.inputs]


def bits(low: int, high: int) -> int:
    """Return the width of a signed integer that holds ``low`` to ``high``."""
    return 1 + max((-low - 1).bit_length() if low < 0 else 0, max(high, 0).bit_length())


def narrowest(values: npt.NDArray[Any]) -> npt.NDArray[np.signedinteger]:
    """Return integers in the fewest of 8, 16, 32 or 64 bits that hold them."""
    reach = max(-int(values.min(initial=0)), int(values.max(initial=0)) + 1)
    return values.astype(np.min_scalar_type(-reach))


def largest_sum(weight: npt.NDArray[Any], low: int, high: int) -> int:
    """Return the largest magnitude of a partial sum over features from ``low`` to ``high``."""
    flat = weight.reshape(len(weight), -1)
    ends = np.stack([flat * low, flat * high, np.zeros_like(flat)])
    return int(max(ends.max(0).sum(1).max(), -ends.min(0).sum(1).min()))


def window(size: Any, axes: int) -> Shape:
    """Return a size along each axis."""
    return (size,) * axes if isinstance(size, int) else tuple(map(int, size))


def zero_padding(name: str, layer: nn.Conv1d | nn.Conv2d) -> Shape:
    """Return the zeros before and after each axis of a convolution's input."""
    # Last axis first, before and after.
    padding = layer._reversed_padding_repeated_twice[::-1]
    if layer.padding_mode != "zeros" or padding[::2] != padding[1::2]:
        reason = f"it pads with {layer.padding_mode!r} ({layer.padding!r})"
        raise ExportError.of(name, reason, "Pad by as many zeros on both sides")
    return tuple(padding[::2])


def pooling_windows(name: str, module: Any, axes: int, shape: Shape) -> tuple[Shape, Shape, Shape]:
    """Return the kernel, stride and padding of a pooling over features of that shape."""
    if len(shape) not in (axes + 1, 2):  # for PyTorch, (H, W) is one image per channel
        raise ExportError.of(name, f"it pools features of shape {shape}", "Give it (C, H, W)")
    if not hasattr(module, "output_size"):
        windows = (module.kernel_size, module.stride, module.padding)
        kernel, stride, padding = (window(size, axes) for size in windows)
        return kernel, stride, padding
    sizes, outputs = shape[-axes:], module.output_size
    outputs = (outputs,) * axes if isinstance(outputs, int) else outputs
    outputs = [output or size for output, size in zip(outputs, sizes, strict=True)]
    if any(size % output for size, output in zip(sizes, outputs, strict=True)):
        reason = f"its windows over {sizes} differ in size"
        raise ExportError.of(name, reason, "Choose an output size that divides it")
    kernel = tuple(size // output for size, output in zip(sizes, outputs, strict=True))
    return kernel, kernel, (0,) * axes
