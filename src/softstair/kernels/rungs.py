"""A stair as one tensor meets it: thresholds and levels as numbers, or as tensors by channel.

Thresholds are numbered 0 … K−2 here, levels 0 … K−1. Everything returned is a Python float or a
tensor that broadcasts against x, in the dtype in which the operator computes.
"""

from functools import lru_cache

import torch
from torch import Tensor

from softstair.stair import Line, Stair

# Up to this many levels a sum over the thresholds is cheaper than arithmetic on their line.
FEW_LEVELS = 8
# Beyond this many a search is cheaper than that sum, where there is no line.
MANY_LEVELS = 64


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for the half precisions, else the dtype itself: products and sums happen there."""
    return torch.promote_types(dtype, torch.float32)


class Rungs:
    """The thresholds and levels of ``stair`` for a tensor like ``x``."""

    def __init__(self, stair: Stair, x: Tensor) -> None:
        self.stair, self.dtype = stair, x.dtype
        self.working = working_dtype(x.dtype)
        self.rounded = stair.rounded(x.dtype)
        self.count = len(stair) - 1
        self.quanta = channel_quanta(stair, x)
        lines = (self.rounded.level_line, self.rounded.threshold_line)
        self.is_line = len(stair) > FEW_LEVELS and None not in lines
        self.is_table = len(stair) > MANY_LEVELS and not self.is_line and self.quanta is None

    def threshold(self, k: int) -> float | Tensor:
        return self._value(self.stair.thresholds[k], self.rounded.thresholds[k])

    def level(self, k: int) -> float | Tensor:
        return self._value(self.stair.levels[k], self.rounded.levels[k])

    @property
    def lowest(self) -> float | Tensor:
        """q₀ as it was given, for sums to begin with: rounded to 16 bits it would move every level
        above it."""
        lowest = self.stair.levels[0]
        return lowest if self.quanta is None else (self.quanta * lowest).to(self.working)

    def rise(self, k: int) -> float | Tensor:
        """qₖ₊₁ − qₖ, the height of the step at threshold k."""
        rise = self.stair.levels[k + 1] - self.stair.levels[k]
        return rise if self.quanta is None else (self.quanta * rise).to(self.working)

    def _value(self, exact: float, rounded: float) -> float | Tensor:
        if self.quanta is None:
            return rounded
        return (self.quanta * exact).to(self.dtype).to(self.working)

    def index(self, x: Tensor) -> Tensor:
        """#{k : x ≥ θₖ} as a float tensor."""
        if self.is_line:
            return self._index_on_line(x)
        if self.is_table:
            table = torch.tensor(self.rounded.thresholds, dtype=x.dtype, device=x.device)
            return torch.bucketize(x.contiguous(), table, right=True).to(x.dtype)
        index = torch.zeros_like(x)
        for k in range(self.count):
            index = index + (x >= self.threshold(k))
        return index

    def _index_on_line(self, x: Tensor) -> Tensor:
        # Dividing finds the threshold to within one; comparing with its neighbours decides.
        guess = self.nearest_below(x)
        index = guess + (x >= self.threshold_at(guess)) + (x >= self.threshold_at(guess + 1))
        return index.clamp(max=self.count)

    def nearest_below(self, x: Tensor) -> Tensor:
        """The number, within one, of the last threshold not above x."""
        position = (x - self.threshold(0)) / self.spacing
        return position.floor().clamp(0, self.count - 1)

    @property
    def spacing(self) -> float | Tensor:
        """The distance of neighbouring thresholds of a stair on a line."""
        assert self.rounded.threshold_line is not None
        unit = self.rounded.threshold_line.unit
        return unit if self.quanta is None else (self.quanta * unit).to(self.working)

    def threshold_at(self, number: Tensor) -> Tensor:
        """θ of each number in the tensor, exactly the rounded one."""
        return self._on_line(self.rounded.threshold_line, number)

    def level_at(self, index: Tensor) -> Tensor:
        """q of each index in the tensor, exactly the rounded one."""
        return self._on_line(self.rounded.level_line, index)

    def _on_line(self, line: Line | None, number: Tensor) -> Tensor:
        assert line is not None
        if self.quanta is not None:
            product = (number.double() + line.first) * line.unit * self.quanta
        elif line.native:
            return ((number + line.first) * line.unit).to(self.dtype).to(self.working)
        else:
            product = (number.double() + line.first) * line.unit
        return product.to(self.dtype).to(self.working)

    def value(self, x: Tensor) -> Tensor:
        """σ(x): the level itself, looked up and never summed; NaN stays NaN."""
        if self.is_line:
            value = self.level_at(self._index_on_line(x))
        elif self.is_table:
            table = torch.tensor(self.rounded.levels, dtype=x.dtype, device=x.device)
            value = table[self.index(x).long()]
        else:
            value = torch.zeros_like(x) + self.level(0)
            for k in range(self.count):
                value = torch.where(x >= self.threshold(k), self.level(k + 1), value)
        return torch.where(x.isnan(), x, value)


def channel_quanta(stair: Stair, x: Tensor) -> Tensor | None:
    """The quanta of a per-channel stair, shaped to broadcast against x; None where there is one."""
    if not isinstance(stair.quantum, tuple):
        return None
    assert stair.axis is not None
    channels, axis = len(stair.quantum), stair.axis
    if not -x.dim() <= axis < x.dim() or x.shape[axis] != channels:
        raise ValueError(
            f"x must have {channels} channels along dimension {axis}, as many as the stair has "
            f"quanta, but its shape is {tuple(x.shape)}."
        )
    behind = -axis - 1 if axis < 0 else x.dim() - axis - 1
    make = _quanta_tensor if torch.compiler.is_compiling() else _cached_quanta_tensor
    return make(stair.quantum, x.device, behind)


def _quanta_tensor(quanta: tuple[float, ...], device: torch.device, behind: int) -> Tensor:
    tensor = torch.tensor(quanta, dtype=torch.float64, device=device)
    return tensor.reshape(-1, *[1] * behind)


_cached_quanta_tensor = lru_cache(maxsize=4096)(_quanta_tensor)
