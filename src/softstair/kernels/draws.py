"""Draws of standardised noise.

An eager CPU draw takes one number from the torch generator as the seed of a numpy stream, which is
filled block by block: two to three times cheaper than torch's own uniforms, and just as
reproducible. Everywhere else (another device, a transform, a compiled graph) torch draws.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from softstair.noise import Noise, Normal, Uniform

# No draw may be 0, which is −∞ for unbounded noise; 2⁻²⁵ is half of the smallest one above it.
SMALLEST = 2.0**-25


def stream(
    noise: Noise, mean: float, std: float, dtype: torch.dtype, generator: torch.Generator | None
) -> Callable[[Tensor], None]:
    """A function that fills a flat CPU tensor of the dtype with the next draws of mean + std·Z."""
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    bits = np.random.Generator(np.random.SFC64(seed))
    kind = np.float64 if dtype == torch.float64 else np.float32

    def draw(target: Tensor) -> None:
        if isinstance(noise, Normal):
            bits.standard_normal(out=target.numpy(), dtype=kind)
            target.mul_(std).add_(mean)
            return
        bits.random(out=target.numpy(), dtype=kind)
        if isinstance(noise, Uniform):
            half = std * noise.support
            target.mul_(2 * half).add_(mean - half)
        else:
            target.copy_(noise.ppf(target.clamp_(min=SMALLEST))).mul_(std).add_(mean)

    return draw


def like(x: Tensor, noise: Noise, dtype: torch.dtype, generator: torch.Generator | None) -> Tensor:
    """One draw for each element of x, on its device."""
    if generator is None:
        shaped = x.to(dtype)
        if isinstance(noise, Normal):
            return torch.randn_like(shaped)
        return noise.ppf(torch.rand_like(shaped).clamp(min=SMALLEST))
    place = {"dtype": dtype, "device": x.device, "generator": generator}
    if isinstance(noise, Normal):
        return torch.randn(x.shape, **place)
    return noise.ppf(torch.rand(x.shape, **place).clamp(min=SMALLEST))
