"""One layer of a stair network in evaluation: no noise, and the statistics that training has seen.

The sums of whole numbers are exact, as those of the network itself are; normalisation, stair and
pooling read them once. What is normalised is rounded otherwise than by torch, so a feature can
differ where that decides on which side of a threshold it lies. A NaN does not get through a stair:
it comes of parameters alone, and whoever trains looks at these.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from softstair.fused.whole import fits_bytes, quantum_of, unit_of
from softstair.kernels.triton import convolution, normalised

if TYPE_CHECKING:
    from softstair.fused.layer import FusedLayer

__all__ = ["evaluate"]


def evaluate(layer: "FusedLayer", x: Tensor) -> Tensor:
    """The features of a convolution; in quanta too, for a layer that wants them so."""
    c, unit = _sums(layer, x)
    c = c.contiguous(memory_format=normalised.format_of(c))
    stair, pool = layer.stair, layer.tiles(x)
    hands_on = layer.hands_on and fits_bytes(stair) and (pool or layer.pool is None)
    y, layer.whole, _ = normalised.climb(
        c,
        _statistics(layer.norm, unit),
        layer.steps,
        "hard",
        layer.seeds[1:],
        x.dtype,
        pool=pool,
        quantum=quantum_of(stair) if hands_on else None,
    )
    return y if layer.pool is None or pool else layer.pool(y)


def _sums(layer: "FusedLayer", x: Tensor) -> tuple[Tensor, float]:
    """The layer's sums, and their unit."""
    whole, stair, sums = layer.taken(), layer.weight_stair, layer.sums
    if whole is None or stair is None or not fits_bytes(stair):
        return sums(x), 1.0
    assert isinstance(sums, nn.Conv2d)
    assert layer.source is not None
    weight = sums.weight.contiguous(memory_format=torch.channels_last)
    integers = normalised.climb(
        weight,
        None,
        layer.weight_steps,
        "hard",
        layer.seeds[:1],
        weight.dtype,
        quantum=quantum_of(stair),
    ).whole
    assert integers is not None
    unit, dtype = unit_of(sums, stair, layer.source.stair)
    nothing = torch.zeros(len(weight), device=weight.device)
    c, _ = convolution.convolve(whole, integers, int(sums.padding[0]), dtype, nothing)
    return c, unit


def _statistics(norm: nn.BatchNorm1d | nn.BatchNorm2d, unit: float) -> Tensor:
    """(mean, 1/deviation, slope, offset) of each channel, (4, channels), for sums in such units."""
    mean, variance = norm.get_buffer("running_mean"), norm.get_buffer("running_var")
    inverse = (variance.double() + norm.eps).rsqrt()
    slope = norm.get_parameter("weight").double() * inverse
    offset = norm.get_parameter("bias").double() - mean * slope
    rows = (mean.double() / unit, inverse * unit, slope * unit, offset)
    return torch.stack(rows).float()
