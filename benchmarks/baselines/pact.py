"""PACT: learned clipping of features (Choi et al., 2018, arXiv:1805.06085), with 2 bits.

    y = clip(x, 0, a),    features (a / 3) round(3 y / a)

The gradient of a is 1 where x >= a and 0 elsewhere, that of x is 1 between 0 and a. A decay keeps a
small; here it is decoupled, as that of the weights. The weights are those of DoReFa, as in the
paper. The paper begins with a = 10; with 2 bits nearly all features of a network with batch
normalisation would then be 0, so it begins with 3.
"""

import torch
from torch import Tensor, nn

from dorefa import STEPS, Weights
from harness import Run

LEVELS = {
    "weights": "2 bits: -1, -1/3, 1/3, 1",
    "features": "2 bits: 0, 1/3, 2/3, 1 times a learned bound",
    "weight_bits": 2,
    "feature_bits": 2,
}
RATE, WEIGHT_DECAY = 1e-3, 1e-4
FIRST_BOUND, BOUND_DECAY = 3.0, 1e-2


class Clipped(nn.Module):
    """2 bits of x between 0 and a learned bound."""

    def __init__(self, bound: float = FIRST_BOUND) -> None:
        super().__init__()
        self.bound = nn.Parameter(torch.tensor(bound))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.where(x < self.bound, x.float().relu(), self.bound)
        quantised = torch.round(STEPS * y / self.bound) * self.bound / STEPS
        return (y + (quantised - y).detach()).to(x.dtype)


def train(run: Run) -> None:
    run.quantised(lambda weight: Weights(), Clipped)
    optimiser = run.adamw({"bound": BOUND_DECAY})

    def step(indices: Tensor) -> None:
        optimiser.zero_grad()
        run.loss(indices).backward()
        optimiser.step()

    step = run.captured(step)
    for share, indices in run.batches():
        run.set_cosine_rate(optimiser, share)
        step(indices)
