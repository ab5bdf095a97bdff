"""TWN: ternary weights (Li and Liu, Ternary Weight Networks, 2016, arXiv:1605.04711).

    d = 0.7 mean |w|,    a = mean of |w| where |w| > d,    weights a · {-1, 0, 1}

d and a are those of a layer, computed anew in each forward pass. The gradient of the ternary
weights goes to the float ones as it is. The method leaves the features in float; ``ternary/uint2``
has those of DoReFa.
"""

from torch import Tensor, nn

from benchmarks.baselines.dorefa import Features
from benchmarks.baselines.harness import Run

RATES, WEIGHT_DECAY = {"ternary/float": 1e-3, "ternary/uint2": 1e-3}, 1e-4


def ternary(w: Tensor) -> Tensor:
    """Return a · {-1, 0, 1}, without a gradient."""
    is_large = w.abs() > 0.7 * w.abs().mean()
    scale = (w.abs() * is_large).sum() / is_large.sum()
    return scale * w.sign() * is_large


class Ternary(nn.Module):
    """The weights of a layer; the gradient is that of w."""

    def forward(self, w: Tensor) -> Tensor:
        return w + (ternary(w) - w).detach()


def train(run: Run, bits: str) -> None:
    features = nn.ReLU if bits == "ternary/float" else lambda: Features(2)
    run.quantised(lambda weight: Ternary(), features)
    run.fit(run.adamw())
