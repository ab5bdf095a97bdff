"""Draws of standardised noise.

An eager CPU draw takes one number from the torch generator as the seed of a numpy stream, which is
filled block by block: two to three times cheaper than torch's own uniforms, and just as
reproducible. A kernel of Triton numbers its draws itself, from a seed that torch draws on the
device. Everywhere else (a transform, a compiled graph, the reference) torch draws.
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
) -> Callable[[Tensor], Tensor]:
    """A function that fills a flat CPU tensor of the dtype with the next draws of mean + std·Z, or
    with uniforms where the family has no inverse cdf."""
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    bits = np.random.Generator(np.random.SFC64(seed))
    kind = np.float64 if dtype == torch.float64 else np.float32

    def draw(target: Tensor) -> Tensor:
        if isinstance(noise, Normal):
            bits.standard_normal(out=target.numpy(), dtype=kind)
            return target.mul_(std).add_(mean)
        bits.random(out=target.numpy(), dtype=kind)
        if not noise.has_ppf:
            return target
        if isinstance(noise, Uniform):
            half = std * noise.support
            return target.mul_(2 * half).add_(mean - half)
        return target.copy_(noise.ppf(target.clamp_(min=SMALLEST))).mul_(std).add_(mean)

    return draw


def like(x: Tensor, noise: Noise, dtype: torch.dtype, generator: torch.Generator | None) -> Tensor:
    """One draw of Z (or uniform, as above) for each element of x, on its device."""
    if isinstance(noise, Normal):
        return _fresh(torch.randn, torch.randn_like, x, dtype, generator)
    uniform = _fresh(torch.rand, torch.rand_like, x, dtype, generator)
    return noise.ppf(uniform.clamp(min=SMALLEST)) if noise.has_ppf else uniform


def seed(device: torch.device, generator: torch.Generator | None) -> Tensor:
    """A seed that stays on the device: a captured graph draws another at each replay."""
    return torch.randint(2**63 - 1, (1,), device=device, generator=generator)


def _fresh(
    shaped: Callable[..., Tensor],
    alike: Callable[..., Tensor],
    x: Tensor,
    dtype: torch.dtype,
    generator: torch.Generator | None,
) -> Tensor:
    # Compilers and vmap understand the function without a generator; only the other takes one.
    if generator is None:
        return alike(x, dtype=dtype)
    return shaped(x.shape, dtype=dtype, device=x.device, generator=generator)
