"""A stair under noise as one record, and the same bound to a tensor's dtype and channels.

Thresholds are numbered 0 … K−2 here, levels 0 … K−1. What a bound stair returns is a Python float
or a tensor that broadcasts against x, in the dtype of computation.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from softstair.noise import Noise, Uniform
from softstair.stair import Line, Stair, check_channels

Scalar = float | Tensor

# Up to this many levels a sum over the thresholds is cheaper than arithmetic on their line.
FEW_LEVELS = 8
# Beyond this many a search is cheaper than that sum, where there is no line.
MANY_LEVELS = 64


class SoftStair(NamedTuple):
    """A stair and its noise ν = mean + std·Z; without noise unless given.

    ``mean`` and ``std`` are absolute: numbers, or tensors that broadcast against x.
    """

    stair: Stair
    noise: Noise = Uniform()
    mean: Scalar = 0.0
    std: Scalar = 0.0


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for the half precisions, else the dtype itself."""
    return torch.promote_types(dtype, torch.float32)


class BoundStair:
    """The thresholds, levels and noise of a soft stair for tensors like ``x``."""

    def __init__(self, soft: SoftStair, x: Tensor) -> None:
        self.stair, self.noise, self.mean, self.std = soft
        self.compute = compute_dtype(x.dtype)
        self.rounded = self.stair.rounded(self.compute)
        self.count = len(self.stair) - 1
        self.quanta = channel_quanta(self.stair, x)
        lines = (self.rounded.level_line, self.rounded.threshold_line)
        self.is_line = len(self.stair) > FEW_LEVELS and None not in lines
        self.is_regular = self.is_line and self.rounded.is_regular
        self.is_table = len(self.stair) > MANY_LEVELS and not self.is_line and self.quanta is None

    def threshold(self, k: int) -> Scalar:
        return self._value(self.stair.thresholds[k], self.rounded.thresholds[k])

    def level(self, k: int) -> Scalar:
        return self._value(self.stair.levels[k], self.rounded.levels[k])

    def rise(self, k: int) -> Scalar:
        """qₖ₊₁ − qₖ, the height of the step at threshold k."""
        return self._scaled(self.stair.levels[k + 1] - self.stair.levels[k])

    @property
    def spacing(self) -> Scalar:
        """The distance of neighbouring thresholds on a line."""
        assert self.rounded.threshold_line is not None
        return self._scaled(self.rounded.threshold_line.unit)

    def _value(self, exact: float, rounded: float) -> Scalar:
        return rounded if self.quanta is None else self._scaled(exact)

    def _scaled(self, value: float) -> Scalar:
        return value if self.quanta is None else (self.quanta * value).to(self.compute)

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
        guess = ((x - self.threshold(0)) / self.spacing).floor().clamp(0, self.count - 1)
        index = guess + (x >= self.threshold_at(guess)) + (x >= self.threshold_at(guess + 1))
        return index.clamp(max=self.count)

    def threshold_at(self, number: Tensor) -> Tensor:
        """θ of each number, exactly the rounded one; on a line alone."""
        return self._on_line(self.rounded.threshold_line, number)

    def level_at(self, index: Tensor) -> Tensor:
        """q of each index, exactly the rounded one; on a line alone."""
        return self._on_line(self.rounded.level_line, index)

    def _on_line(self, line: Line | None, number: Tensor) -> Tensor:
        assert line is not None
        if self.quanta is None and line.native:
            product = (number + line.first) * line.unit
        else:
            product = (number.double() + line.first) * line.unit
            if self.quanta is not None:
                product = product * self.quanta
        return product.to(self.compute)

    def hard(self, x: Tensor) -> Tensor:
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
    """Return the quanta of a per-channel stair, shaped to broadcast against x, or None.

    Raises:
        ValueError: If x has another number of channels.
    """
    if not isinstance(stair.quantum, tuple):
        return None
    assert stair.axis is not None
    axis = stair.axis
    check_channels(x, len(stair.quantum), axis)
    trailing = -axis - 1 if axis < 0 else x.dim() - axis - 1
    make = _quanta_tensor if torch.compiler.is_compiling() else cached_quanta_tensor
    return make(stair.quantum, x.device, trailing)


def _quanta_tensor(quanta: tuple[float, ...], device: torch.device, trailing: int) -> Tensor:
    tensor = torch.tensor(quanta, dtype=torch.float64, device=device)
    return tensor.reshape(-1, *[1] * trailing)


# Not limited: a captured graph reads the tensor where it is.
cached_quanta_tensor = cache(_quanta_tensor)
