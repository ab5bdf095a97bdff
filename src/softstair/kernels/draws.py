"""Draws of standardised noise.

An eager CPU draw takes one number from the torch generator as the seed of a NumPy stream, which is
filled block by block: two to three times cheaper than torch's own uniform numbers, and just as
reproducible. A Triton kernel numbers its draws itself, from a seed that torch draws on the device.
Everywhere else (a transform, a compiled graph, the reference) torch draws.
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
    """Return a function that fills a flat CPU tensor with the next draws of mean + std·Z, or with
    uniform numbers for a family that cannot invert its cdf."""
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    bits = np.random.Generator(np.random.SFC64(seed))
    numpy_dtype = np.float64 if dtype == torch.float64 else np.float32

    def draw(target: Tensor) -> Tensor:
        if isinstance(noise, Normal):
            bits.standard_normal(out=target.numpy(), dtype=numpy_dtype)
            return target.mul_(std).add_(mean)
        bits.random(out=target.numpy(), dtype=numpy_dtype)
        if not noise.has_ppf:
            return target
        if isinstance(noise, Uniform):
            half = std * noise.support
            return target.mul_(2 * half).add_(mean - half)
        return target.copy_(noise.ppf(target.clamp_(min=SMALLEST))).mul_(std).add_(mean)

    return draw


def like(x: Tensor, noise: Noise, dtype: torch.dtype, generator: torch.Generator | None) -> Tensor:
    """Return one draw of Z (or a uniform number, as above) for each element of x."""
    is_normal = isinstance(noise, Normal)
    # Compilers and vmap know the functions without a generator; only the others take one.
    if generator is None:
        draw = torch.randn_like(x, dtype=dtype) if is_normal else torch.rand_like(x, dtype=dtype)
    else:
        function = torch.randn if is_normal else torch.rand
        draw = function(x.shape, dtype=dtype, device=x.device, generator=generator)
    if is_normal or not noise.has_ppf:
        return draw
    return noise.ppf(draw.clamp(min=SMALLEST))


def seed(device: torch.device, generator: torch.Generator | None) -> Tensor:
    """Return a seed that stays on the device: a captured graph draws another at each replay."""
    return torch.randint(2**63 - 1, (1,), device=device, generator=generator)
