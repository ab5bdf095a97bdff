"""Convolutions of whole numbers from int8 beside the library's of bfloat16, which any network has.

Both make what a batch normalisation needs besides, the moments of each channel. The sums from int8
are counted against those of float64: none may differ.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softstair.bench.clock import Times, race
from softstair.bench.effort import Effort
from softstair.bench.operator import INNER, own_stream, repeated
from softstair.kernels import exact

__all__ = ["LAYERS", "Row", "measure"]

LAYERS = ((128, 256, 16), (256, 256, 16), (256, 512, 8), (512, 512, 8))
"""(inputs, outputs, side) of VGG8's convolutions of quantised features, 3×3."""


@dataclass(frozen=True)
class Row:
    """One convolution: seconds from int8 and from bfloat16, and how many sums are wrong."""

    inputs: int
    outputs: int
    side: int
    whole: Times
    half: Times
    wrong: int
    sums: int

    @property
    def ratio(self) -> float:
        """How many times as fast int8 is."""
        return self.half.median / self.whole.median

    def to_json(self) -> dict[str, Any]:
        """Plain data; times in seconds."""
        plain = ("inputs", "outputs", "side", "ratio", "wrong", "sums")
        times = {"int8": self.whole.to_json(), "bfloat16": self.half.to_json()}
        return {**{name: getattr(self, name) for name in plain}, **times}


def measure(
    device: torch.device | str,
    batch: int = 256,
    effort: Effort | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """A row for each convolution; none where nothing computes them from int8.

    >>> measure("cpu")
    []
    """
    device = torch.device(device)
    effort = effort or Effort.on(device)
    if not exact.has_fused(device):
        return []
    rows = []
    with own_stream(device):
        for inputs, outputs, side in LAYERS:
            tell(f"exact: {inputs} to {outputs}")
            rows.append(_row(batch, inputs, outputs, side, device, effort))
    return rows


def _row(
    batch: int, inputs: int, outputs: int, side: int, device: torch.device, effort: Effort
) -> Row:
    from softstair.kernels.triton import convolution, moments

    x = _ternary((batch, inputs, side, side), device)
    weight = _ternary((outputs, inputs, 3, 3), device)
    mean = torch.zeros(outputs, device=device)
    features, weights = x.to(torch.int8), weight.to(torch.int8)

    def by_library() -> Tensor:
        return moments.moments(F.conv2d(x, weight, padding=1), mean)

    def by_integers() -> tuple[Tensor, Tensor]:
        return convolution.convolve(features, weights, 1, torch.int16, mean)

    contestants = {
        "whole": repeated(by_integers, device),
        "half": repeated(by_library, device),
    }
    times = race(contestants, device, effort, each=INNER)
    wanted = F.conv2d(x.double(), weight.double(), padding=1)
    wrong = int((by_integers()[0].double() != wanted).sum())
    return Row(inputs, outputs, side, times["whole"], times["half"], wrong, wanted.numel())


def _ternary(shape: tuple[int, ...], device: torch.device) -> Tensor:
    numbers = torch.randint(-1, 2, shape, device=device).to(torch.bfloat16)
    return numbers.contiguous(memory_format=torch.channels_last)
