"""LSQ: learned step sizes (Esser et al., Learned Step Size Quantization, 2020, arXiv:1902.08153).

    v -> s · round(clip(v / s, -n, p)),    n = 2, p = 1 for weights; n = 0, p = 3 for features

The step s is learned: its gradient is that of a straight-through round times 1/√(N p), N the number
of weights, or of features of an example. It begins at 2 mean |v| / √p, for features of a batch.
"""

import math

from torch import Tensor, nn, zeros

from harness import Run, rounded

LEVELS = {
    "weights": "2 bits: -2, -1, 0, 1 times a step",
    "features": "2 bits: 0, 1, 2, 3 times a step",
    "weight_bits": 2,
    "feature_bits": 2,
}
RATE, WEIGHT_DECAY = 1e-3, 1e-4


class LearnedStep(nn.Module):
    """Quantises weights, if they are given, or features, after their ReLU."""

    def __init__(self, lowest: int, highest: int, weight: Tensor | None = None) -> None:
        super().__init__()
        self.lowest, self.highest = lowest, highest
        self.is_weight = self.is_fitted = weight is not None
        self.step = nn.Parameter(zeros(()))
        if weight is not None:
            self.fit(weight)

    def fit(self, v: Tensor) -> None:
        self.step.data.fill_(2 * v.detach().abs().mean() / math.sqrt(self.highest))

    def forward(self, v: Tensor) -> Tensor:
        if not self.is_fitted:
            self.fit(v.relu())
            self.is_fitted = True
        scaled = self.step / math.sqrt((v if self.is_weight else v[0]).numel() * self.highest)
        step = scaled + (self.step - scaled).detach()  # its value, with the gradient scaled
        quotient = (v.float() / step).clamp(self.lowest, self.highest)
        return (rounded(quotient) * step).to(v.dtype)


def train(run: Run) -> None:
    run.quantised(lambda weight: LearnedStep(-2, 1, weight), lambda: LearnedStep(0, 3))
    optimiser = run.adamw()

    def step(indices: Tensor) -> None:
        optimiser.zero_grad()
        run.loss(indices).backward()
        optimiser.step()

    step = run.captured(step)
    for share, indices in run.batches():
        run.set_cosine_rate(optimiser, share)
        step(indices)
