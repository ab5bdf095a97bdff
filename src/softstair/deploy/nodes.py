"""What an integer network is made of: operations on whole numbers, each with a name.

A node names the nodes whose results it takes, and says how small and how large its own can get. All
tensors have a batch in front: (N, C, H, W), or (N, C) behind a flattening; a linear layer that is
applied to more than a vector has its channels last.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "Add",
    "Expand",
    "Flatten",
    "Input",
    "MaxPool",
    "Node",
    "Rescaled",
    "Scores",
    "Steps",
    "Sum",
    "SumPool",
]

Pair = tuple[int, int]


@dataclass(frozen=True)
class Node(ABC):
    """An operation; ``low`` and ``high`` are the least and the greatest that it can give."""

    name: str
    inputs: tuple[str, ...]
    low: int
    high: int

    @abstractmethod
    def run(self, *x: Tensor) -> Tensor:
        """On whole numbers held in int64."""


@dataclass(frozen=True)
class Input(Node):
    """Bytes less their zero point; one unit is worth 1/scale to the float network."""

    shape: tuple[int, ...] = ()
    zero: int = 0
    scale: float = 1.0

    def run(self, *x: Tensor) -> Tensor:
        return x[0].long() - self.zero


@dataclass(frozen=True)
class Sum(Node):
    """A convolution, or a linear layer (kernel 1×1 without places), of whole weights.

    weight  (O, I/groups, kh, kw) or (O, I), int64
    least, greatest  of each channel, (O,) int64
    """

    weight: Tensor = field(default_factory=lambda: torch.zeros(0))
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    least: Tensor = field(default_factory=lambda: torch.zeros(0))
    greatest: Tensor = field(default_factory=lambda: torch.zeros(0))

    def run(self, *x: Tensor) -> Tensor:
        # float64 holds every whole number up to 2⁵³, and has the kernels that int64 has not.
        wide, weight = x[0].double(), self.weight.double()
        if weight.dim() == 2:
            return F.linear(wide, weight).long()
        how = (None, self.stride, self.padding, self.dilation, self.groups)
        return F.conv2d(wide, weight, *how).long()


@dataclass(frozen=True)
class Steps(Node):
    """A stair after a batch normalisation, on sums: how many thresholds of its channel a sum has
    reached, and the whole level that belongs to that number.

    thresholds  (C, K − 1) int64, not decreasing; with a second input ``beside`` (C, M, K − 1), a
                row for each of its values from ``first`` on
    levels      (K,) whole numbers, increasing
    axis        of the channels, in a tensor with a batch in front
    """

    thresholds: Tensor = field(default_factory=lambda: torch.zeros(0))
    levels: tuple[int, ...] = ()
    first: int = 0
    axis: int = 1

    def run(self, *x: Tensor) -> Tensor:
        sums = x[0]
        behind = sums.dim() - 1 - self.axis
        channel = torch.arange(sums.shape[self.axis]).reshape(-1, *[1] * behind)
        if len(x) == 1:
            limits = self.thresholds[channel.expand_as(sums)]
        else:
            limits = self.thresholds[channel.expand_as(sums), x[1] - self.first]
        index = (sums[..., None] >= limits).sum(-1)
        return torch.tensor(self.levels)[index]


@dataclass(frozen=True)
class MaxPool(Node):
    """The largest in each window; beyond the edge there is nothing."""

    kernel: Pair = (2, 2)
    stride: Pair = (2, 2)
    padding: Pair = (0, 0)

    def run(self, *x: Tensor) -> Tensor:
        return F.max_pool2d(x[0].double(), self.kernel, self.stride, self.padding).long()


@dataclass(frozen=True)
class SumPool(Node):
    """The sum of each window, of which an average is a share."""

    kernel: Pair = (1, 1)
    stride: Pair = (1, 1)

    def run(self, *x: Tensor) -> Tensor:
        total = F.avg_pool2d(x[0].double(), self.kernel, self.stride, divisor_override=1)
        return total.long()


@dataclass(frozen=True)
class Expand(Node):
    """Features repeated along axes of length 1, to ``shape`` (without the batch)."""

    shape: tuple[int, ...] = ()

    def run(self, *x: Tensor) -> Tensor:
        return x[0].expand(-1, *self.shape)


@dataclass(frozen=True)
class Add(Node):
    """Two features of one unit and of one shape."""

    def run(self, *x: Tensor) -> Tensor:
        return x[0] + x[1]


@dataclass(frozen=True)
class Flatten(Node):
    """(N, C, H, W) becomes (N, C·H·W), the places of a channel together."""

    def run(self, *x: Tensor) -> Tensor:
        return x[0].flatten(1)


@dataclass(frozen=True)
class Scores(Node):
    """The last layer, in float, over whole features; ``unit`` is what a 1 of them is worth."""

    weight: Tensor = field(default_factory=lambda: torch.zeros(0))
    bias: Tensor | None = None
    unit: float = 1.0

    def run(self, *x: Tensor) -> Tensor:
        features = x[0].to(torch.float32) * self.unit
        return F.linear(features, self.weight, self.bias)


@dataclass(frozen=True)
class Rescaled(Node):
    """The scores of a last layer whose weights are whole: its sums times ``scale``, and ``bias``,
    (C,) float32 each; ``axis`` is that of the channels, in a tensor with a batch in front."""

    scale: Tensor = field(default_factory=lambda: torch.zeros(0))
    bias: Tensor = field(default_factory=lambda: torch.zeros(0))
    axis: int = 1

    def run(self, *x: Tensor) -> Tensor:
        sums = x[0].to(torch.float32)
        shape = (-1, *[1] * (sums.dim() - 1 - self.axis))
        return sums * self.scale.reshape(shape) + self.bias.reshape(shape)
