"""Nodes that multiply, subtract and scale features."""

from dataclasses import dataclass

from torch import Tensor

from softstair.deploy.nodes import Node


@dataclass(frozen=True, eq=False)
class Multiply(Node):
    """The product of two features of any units, of one shape or (N, C, 1, 1) and (N, C, H, W)."""

    def run(self, *x: Tensor) -> Tensor:
        return x[0] * x[1]


@dataclass(frozen=True, eq=False)
class Subtract(Node):
    """The difference of two features of the same unit and shape, or the negative of one."""

    def run(self, *x: Tensor) -> Tensor:
        return x[0] - x[1] if len(x) == 2 else -x[0]


@dataclass(frozen=True, eq=False)
class Scale(Node):
    """Features times integers that broadcast over examples and channels."""

    factor: Tensor  # (1, H, W) or (1, L) int32

    def run(self, *x: Tensor) -> Tensor:
        return x[0] * self.factor
