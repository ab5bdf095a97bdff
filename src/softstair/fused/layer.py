"""One fused layer of a stair network: sums, normalisation, stair and pooling.

The sums are read once by normalisation, stair and pooling together. In residual networks a shortcut
is added before the stair. Where features and weights are integers times a quantum (mode, random and
hard forwards, and every annealed layer) the sums are exact, from int8. The backward pass keeps the
sums and the features; of a first layer, whose sums are computed again, only the input.

Features with a learned quantum ε are ε·S(z/ε), with the stair S in quanta: γ and β are divided by
ε before, and the levels of S multiplied. Sums of learned layers are in float. Weights whose quanta
q are learned, or one per channel, are divided by them, so that the sums count in q. Of these sums
the normalisation has mean m and variance v: it divides by √(v + eps/q²), and its running statistics
are those of q·m and q²·v.
"""

import math

import torch
from torch import Tensor, nn

from softstair.fused.integers import is_in_quanta, learns
from softstair.fused.parts import Context, LayerParts
from softstair.fused.passes import LayerFunction, as_rows, by_output, evaluate, train

__all__ = ["Average", "FusedLayer"]


class FusedLayer(LayerParts):
    """What [convolution or linear layer, batch normalisation, stair, max-pooling] compute."""

    def forward(self, context: Context, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        shapes_fit = x.dim() == (4 if isinstance(self.sums, nn.Conv2d) else 2)
        if shapes_fit and shortcut is not None:
            shapes_fit = shortcut.shape == (len(x), self.norm.num_features, *self.sides(x))
            shortcut = as_rows(shortcut) if shapes_fit else shortcut
        if shapes_fit and self.can_evaluate(x) and self.modes == {False}:
            y = evaluate(self, x, shortcut, context)
        elif not (shapes_fit and self.modes == {True}):
            y = self.norm(self.sums(x))
            y = self.stair(y if shortcut is None else y + shortcut)
            return y if self.pool is None else self.pool(y)
        else:
            weight: Tensor = self.sums.weight
            gamma: Tensor = self.norm.weight
            beta: Tensor = self.norm.bias
            weight_quantum = quantum = None
            weight_stair = self.weight_stair
            if weight_stair is not None and is_in_quanta(weight_stair):
                weight_quantum = weight_stair.quantum
                if learns(weight_stair):
                    weight_quantum = weight_stair.scaled_quantum(weight.numel())
                weight = weight / by_output(weight_quantum, weight)
            if learns(self.stair):
                area = math.prod(self.sides(x))
                quantum = self.stair.scaled_quantum(self.norm.num_features * area)
                gamma, beta = gamma / quantum, beta / quantum
                shortcut = None if shortcut is None else shortcut / quantum
            given = (weight, gamma, beta, shortcut, weight_quantum)
            if self.stair.annealed:
                with torch.no_grad():
                    y = train(self, x, *given, context).y
            else:
                y = LayerFunction.apply(x, *given, quantum, self, context)
        return y if self.pool is None or self.pools_here(x) else self.pool(y)


class Average(nn.Module):
    """An average pooling. Over whole images it is a mean in training: on a GPU the gradient of
    torch's pooling takes longer."""

    def __init__(self, pool: nn.AvgPool2d) -> None:
        super().__init__()
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        pool = self.pool
        is_plain = pool.padding in (0, (0, 0)) and pool.divisor_override is None
        if is_plain and x.requires_grad and _pair(pool.kernel_size) == tuple(x.shape[2:]):
            return x.mean((2, 3), keepdim=True)
        return pool(x)


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)
