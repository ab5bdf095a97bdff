"""What a walk through a network knows of a value: whole numbers, or a sum on its way to a stair."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from softstair.deploy import nodes
from softstair.nn import StairLayer

__all__ = ["ExportError", "Pending", "Value", "Whole"]


class ExportError(ValueError):
    """What cannot be computed exactly in whole numbers, in one sentence that names the layer."""


@dataclass(frozen=True)
class Whole:
    """A node's result: whole numbers, each worth ``unit``; ``values`` are the floats that the
    network has for them, from ``low`` on, where each has one."""

    node: str
    unit: float
    low: int
    high: int
    values: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Pending:
    """A whole sum, what the float network makes of it, and poolings that wait for the stair."""

    source: str
    chain: tuple[Callable[[Tensor], Tensor], ...]
    layer: StairLayer | None = None
    """Whose sum it is, as long as nothing else has happened to it."""
    factor: float = 1.0
    """What the sum is multiplied by before the layer's own scale."""
    pools: tuple[nodes.MaxPool, ...] = ()
    beside: Whole | None = None
    after: tuple[Callable[[Tensor], Tensor], ...] = ()
    """What comes after the shortcut ``beside`` was added."""


Value = Whole | Pending
