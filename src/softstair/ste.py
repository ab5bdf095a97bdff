"""Straight-through estimators: the stair in the forward pass, a density in the backward pass.

On the Heaviside function, the slope of each is the derivative of the function that it is named
after. Identity and ReLU are limits and no probability measures.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from softstair import _check
from softstair.noise import Logistic, Noise, Normal, Triangular, Uniform
from softstair.regularise import regularise
from softstair.stair import Stair

__all__ = [
    "Estimator",
    "clipped_relu",
    "error_function",
    "hard_sigmoid",
    "identity",
    "piecewise_polynomial",
    "relu",
    "sigmoid",
]


@dataclass(frozen=True)
class Estimator:
    """A density for the backward pass of the stair.

    >>> import torch
    >>> x = torch.tensor([-0.4, 0.4, 1.4], requires_grad=True)
    >>> hard_sigmoid()(x, Stair.heaviside()).sum().backward()
    >>> x.grad
    tensor([1., 1., 0.])

    :func:`softstair.quantise` takes an estimator as its ``noise``.

    Args:
        noise: The family of noise with that density.
        mean: Its mean, in quanta.
        std: Its standard deviation, in quanta.
    """

    noise: Noise
    mean: float
    std: float

    def __call__(self, x: Tensor, stair: Stair) -> Tensor:
        """Return σ(x), with the derivative Σₖ (qₖ − qₖ₋₁)·μ(x − θₖ).

        Raises:
            ValueError: If the stair has a quantum per channel.
        """
        if isinstance(stair.quantum, tuple):
            raise _check.invalid(
                "stair",
                f"must have one quantum, but has {len(stair.quantum)}; pass the estimator to "
                "softstair.quantise instead",
            )
        mean, std = self.mean * stair.quantum, self.std * stair.quantum
        return regularise(x, stair, self.noise, mean, std, forward="hard")


class Identity(Noise):
    """Slope 1 everywhere: the limit of ever wider uniform noise on ever more levels."""

    name = "identity"
    proper = False

    def pdf(self, z: Tensor) -> Tensor:
        return z.new_ones(()).expand_as(z)


class Ramp(Noise):
    """Slope 1 where x ≥ 0: the ReLU's."""

    name = "relu"
    proper = False

    def pdf(self, z: Tensor) -> Tensor:
        return (z >= 0).to(z.dtype)


def clipped_relu() -> Estimator:
    """Return the estimator max(0, min(x, 1)): uniform noise on [0, 1]."""
    return Estimator(Uniform(), 0.5, 0.5 / math.sqrt(3))


def hard_sigmoid() -> Estimator:
    """Return the estimator max(0, min(x + ½, 1)): uniform noise on [−½, ½]."""
    return Estimator(Uniform(), 0.0, 0.5 / math.sqrt(3))


def piecewise_polynomial() -> Estimator:
    """Return the estimator of Bi-Real networks: triangular noise on [−1, 1]."""
    return Estimator(Triangular(), 0.0, 1 / math.sqrt(6))


def error_function() -> Estimator:
    """Return the estimator (1 + erf x)/2: normal noise of std 1/√2."""
    return Estimator(Normal(), 0.0, math.sqrt(0.5))


def sigmoid() -> Estimator:
    """Return the estimator 1/(1 + e⁻ˣ): logistic noise of scale 1, that is of std π/√3."""
    return Estimator(Logistic(), 0.0, math.pi / math.sqrt(3))


def identity() -> Estimator:
    """Return the plain straight-through estimator: slope 1 everywhere."""
    return Estimator(Identity(), 0.0, 1.0)


def relu() -> Estimator:
    """Return the estimator with slope 1 where x ≥ 0."""
    return Estimator(Ramp(), 0.0, 1.0)
