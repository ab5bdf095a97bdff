"""DoReFa-Net (Zhou et al., 2016, arXiv:1606.06160), with 2 bits and gradients in float.

    weights     2 q(tanh w / (2 max |tanh w|) + 1/2) - 1
    features    q(clip(x, 0, 1))
    q(x) = round(3 x) / 3

The gradient passes each round as it is. max is that of a layer.
"""

from torch import Tensor, nn

from harness import Run, rounded

LEVELS = {
    "weights": "2 bits: -1, -1/3, 1/3, 1",
    "features": "2 bits: 0, 1/3, 2/3, 1",
    "weight_bits": 2,
    "feature_bits": 2,
}
RATE, WEIGHT_DECAY = 1e-3, 1e-4
STEPS = 3  # 2² - 1


class Weights(nn.Module):
    """2 bits of tanh w, relative to the largest."""

    def forward(self, w: Tensor) -> Tensor:
        bent = w.tanh()
        share = bent / (2 * bent.abs().max()) + 0.5
        return 2 * rounded(STEPS * share) / STEPS - 1


class Features(nn.Module):
    """2 bits of x between 0 and 1."""

    def forward(self, x: Tensor) -> Tensor:
        return rounded(STEPS * x.clamp(0, 1)) / STEPS


def train(run: Run) -> None:
    run.quantised(lambda weight: Weights(), Features)
    optimiser = run.adamw()

    def step(indices: Tensor) -> None:
        optimiser.zero_grad()
        run.loss(indices).backward()
        optimiser.step()

    step = run.captured(step)
    for share, indices in run.batches():
        run.set_cosine_rate(optimiser, share)
        step(indices)
