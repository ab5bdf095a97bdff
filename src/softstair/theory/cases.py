"""One layer of one schedule with one family: all that a verdict on a hypothesis depends on."""

import math
from dataclasses import dataclass

import torch

from softstair.noise import Noise
from softstair.schedule import Schedule
from softstair.theory.limits import Limit, Tail
from softstair.theory.verdicts import Holds

__all__ = ["Case", "Finding"]


@dataclass(frozen=True)
class Case:
    """One layer with all that its verdicts depend on."""

    limit: Limit
    input_is_exact: bool
    schedule: Schedule
    noise: Noise
    tail: Tail

    @property
    def rate(self) -> str:
        """r_ℓ: one power for all layers where tails are light, and λ^(3d_ℓ/2) by Chebyshev."""
        if self.tail == "unknown":
            return f"λ^{1.5 * self.schedule.exponent(self.limit.layer):g}"
        return f"λ^{self.schedule.layers + 1}"

    @property
    def mean_at_end(self) -> float:
        return 0.0 if self.limit.mean.vanishes else self.limit.mean.coefficient

    @property
    def reach_at_end(self) -> float:
        """Half-width of the support that a static std leaves: √3·β for uniform noise."""
        return self.noise.support * self.limit.std.coefficient

    @property
    def below_zero(self) -> float:
        """How far below 0 the support of a static bounded noise ends; 0 where it ends there."""
        return self.settle(-self.mean_at_end - self.reach_at_end)

    def settle(self, edge: float) -> float:
        """An end of the support, 0 where it is nothing but rounding."""
        # −0.5 + √3·(0.5/√3) is 0 to a reader and a few ulp to a machine.
        return 0.0 if math.isclose(edge, 0.0, abs_tol=1e-12 * self.reach_at_end) else edge

    def cdf(self, z: float) -> float:
        return float(self.noise.cdf(torch.tensor(z, dtype=torch.float64)))


@dataclass(frozen=True)
class Finding:
    """A verdict without its name and layer; see :class:`softstair.theory.Verdict`."""

    holds: Holds
    rate: str
    reason: str
    repair: str = ""
