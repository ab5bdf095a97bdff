"""LSQ: learned step sizes (Esser et al., Learned Step Size Quantization, 2020, arXiv:1902.08153).

    v -> s · round(clip(v / s, -n, p))

With b bits n = 2^(b-1), p = n - 1 for weights, and n = 0, p = 2^b - 1 for features.
The step s is learned: its gradient is that of a straight-through round times 1/√(N p), N the number
of weights, or of features of an example. It begins at 2 mean |v| / √p, for features of a batch.
"""

import math

from torch import Tensor, nn, zeros

from benchmarks.baselines.harness import Run, rounded

RATES, WEIGHT_DECAY = {"int2": 1e-3, "int4": 1e-3}, 1e-4


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


def train(run: Run, bits: str) -> None:
    half = 2 ** int(bits[-1]) // 2
    run.quantised(
        lambda weight: LearnedStep(-half, half - 1, weight), lambda: LearnedStep(0, 2 * half - 1)
    )
    run.fit(run.adamw())
