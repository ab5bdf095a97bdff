"""TWN: ternary weights (Li and Liu, Ternary Weight Networks, 2016, arXiv:1605.04711).

    d = 0.7 mean |w|,    a = mean of |w| where |w| > d,    weights a · {-1, 0, 1}

d and a are those of a layer, computed anew in each forward pass. The gradient of the ternary
weights goes to the float ones as it is. The method leaves the features in float.
"""

from torch import Tensor, nn

from harness import Run

LEVELS = {
    "weights": "ternary: -a, 0, a",
    "features": "float",
    "weight_bits": 1.58,
    "feature_bits": 32,
}
RATE, WEIGHT_DECAY = 1e-3, 1e-4


def ternary(w: Tensor) -> Tensor:
    """Return a · {-1, 0, 1}, without a gradient."""
    is_large = w.abs() > 0.7 * w.abs().mean()
    scale = (w.abs() * is_large).sum() / is_large.sum()
    return scale * w.sign() * is_large


class Ternary(nn.Module):
    """The weights of a layer; the gradient is that of w."""

    def forward(self, w: Tensor) -> Tensor:
        return w + (ternary(w) - w).detach()


def train(run: Run, features: type[nn.Module] = nn.ReLU) -> None:
    run.quantised(lambda weight: Ternary(), features)
    optimiser = run.adamw()

    def step(indices: Tensor) -> None:
        optimiser.zero_grad()
        run.loss(indices).backward()
        optimiser.step()

    step = run.captured(step)
    for share, indices in run.batches():
        run.set_cosine_rate(optimiser, share)
        step(indices)
