"""PACT: learned clipping of features (Choi et al., 2018, arXiv:1805.06085).

    y = clip(x, 0, a),    features (a / n) round(n y / a),    n = 2^bits - 1

The gradient of a is 1 where x >= a and 0 elsewhere, that of x is 1 between 0 and a. A decay keeps a
small; here it is decoupled, as that of the weights. The weights are those of DoReFa, as in the
paper. The paper begins with a = 10; with 2 bits nearly all features of a network with batch
normalisation would then be 0, so it begins with 3.
"""

import torch
from torch import Tensor, nn

from benchmarks.baselines.dorefa import Weights
from benchmarks.baselines.harness import Run

RATES, WEIGHT_DECAY = {"int2": 1e-3, "int4": 1e-3}, 1e-4
FIRST_BOUND, BOUND_DECAY = 3.0, 1e-2


class Clipped(nn.Module):
    """x between 0 and a learned bound."""

    def __init__(self, bits: int, bound: float = FIRST_BOUND) -> None:
        super().__init__()
        self.steps = 2**bits - 1
        self.bound = nn.Parameter(torch.tensor(bound))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.where(x < self.bound, x.float().relu(), self.bound)
        quantised = torch.round(self.steps * y / self.bound) * self.bound / self.steps
        return (y + (quantised - y).detach()).to(x.dtype)


def train(run: Run, bits: str) -> None:
    width = int(bits[-1])
    run.quantised(lambda weight: Weights(width), lambda: Clipped(width))
    run.fit(run.adamw({"bound": BOUND_DECAY}))
