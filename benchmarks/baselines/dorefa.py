"""DoReFa-Net (Zhou et al., 2016, arXiv:1606.06160), with gradients in float.

    weights     2 q(tanh w / (2 max |tanh w|) + 1/2) - 1
    features    q(clip(x, 0, 1))
    q(x) = round(n x) / n,    n = 2^bits - 1

The gradient passes each round as it is. max is that of a layer.
"""

from torch import Tensor, nn

from benchmarks.baselines.harness import Run, rounded

RATES, WEIGHT_DECAY = {"int2": 1e-3, "int4": 1e-3}, 1e-4


class Weights(nn.Module):
    """tanh w, relative to the largest."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.steps = 2**bits - 1

    def forward(self, w: Tensor) -> Tensor:
        bent = w.tanh()
        share = bent / (2 * bent.abs().max()) + 0.5
        return 2 * rounded(self.steps * share) / self.steps - 1


class Features(nn.Module):
    """x between 0 and 1."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.steps = 2**bits - 1

    def forward(self, x: Tensor) -> Tensor:
        return rounded(self.steps * x.clamp(0, 1)) / self.steps


def train(run: Run, bits: str) -> None:
    width = int(bits[-1])
    run.quantised(lambda weight: Weights(width), lambda: Features(width))
    run.fit(run.adamw())
