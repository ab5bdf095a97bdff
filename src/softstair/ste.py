"""Straight-through estimators by name: the stair forward, a density backward.

On the Heaviside each is the derivative of the function it is called after: the clipped ReLU
max(0, min(x, 1)), the hard sigmoid max(0, min(x + ½, 1)), Bi-Real's piecewise polynomial, the error
function, the sigmoid. Identity and ReLU are limits, no probability measures, and have a
slope of their own: 1 everywhere, and 1 where x ≥ 0.

>>> import torch
>>> x = torch.tensor([-0.4, 0.4, 1.4], requires_grad=True)
>>> clipped_relu()(x, Stair.heaviside()).sum().backward()
>>> x.grad
tensor([0., 1., 0.])
"""

import math
from dataclasses import dataclass

from torch import Tensor

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
    """A density for the backward pass of the hard stair; mean and std in quanta.

    :func:`softstair.quantise` takes one in the place of a family of noise.
    """

    noise: Noise
    mean: float
    std: float

    def __call__(self, x: Tensor, stair: Stair) -> Tensor:
        """σ(x), with Σₖ (qₖ − qₖ₋₁)·μ(x − θₖ) as its derivative."""
        if isinstance(stair.quantum, tuple):
            raise ValueError(
                "stair must have one quantum for an estimator called by itself, but it has "
                f"{len(stair.quantum)}; give the estimator to softstair.quantise instead."
            )
        mean, std = self.mean * stair.quantum, self.std * stair.quantum
        return regularise(x, stair, self.noise, mean, std, forward="hard")


class Identity(Noise):
    """Slope 1 everywhere: the limit of ever wider uniform noise on an ever longer stair."""

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
    """Uniform over [0, 1]: mean ½, std 1/(2√3)."""
    return Estimator(Uniform(), 0.5, 0.5 / math.sqrt(3))


def hard_sigmoid() -> Estimator:
    """Uniform over [−½, ½]."""
    return Estimator(Uniform(), 0.0, 0.5 / math.sqrt(3))


def piecewise_polynomial() -> Estimator:
    """Triangular of half-width 1, the estimator of Bi-Real networks."""
    return Estimator(Triangular(), 0.0, 1 / math.sqrt(6))


def error_function() -> Estimator:
    """Normal of std 1/√2: (1 + erf x)/2."""
    return Estimator(Normal(), 0.0, math.sqrt(0.5))


def sigmoid() -> Estimator:
    """Logistic of scale 1, that is std π/√3: 1/(1 + e⁻ˣ)."""
    return Estimator(Logistic(), 0.0, math.pi / math.sqrt(3))


def identity() -> Estimator:
    """The plain straight-through estimator: the gradient passes as it is."""
    return Estimator(Identity(), 0.0, 1.0)


def relu() -> Estimator:
    """The gradient passes where x ≥ 0."""
    return Estimator(Ramp(), 0.0, 1.0)
