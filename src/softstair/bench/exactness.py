"""Convolutions of integers in int8 beside those in bfloat16.

Both include what a batch normalisation needs, the moments of each channel. The int8 sums are
compared with those of float64: none may differ.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from softstair.bench.clock import GRAPH_CALLS, Effort, Record, Times, graph_of, own_stream, race
from softstair.kernels import exact

__all__ = ["LAYERS", "ConvolutionRow", "measure_exact"]

LAYERS = ((128, 256, 16), (256, 256, 16), (256, 512, 8), (512, 512, 8))
"""(input channels, output channels, side) of VGG8's 3×3 convolutions of quantised features."""


@dataclass(frozen=True)
class ConvolutionRow(Record):
    """Seconds of a convolution in int8 and in bfloat16, and how many of its sums are wrong."""

    inputs: int
    outputs: int
    side: int
    int8: Times
    bfloat16: Times
    wrong: int
    sums: int

    @property
    def ratio(self) -> float:
        """Speed of int8 relative to bfloat16."""
        return self.bfloat16.median / self.int8.median


def measure_exact(
    device: torch.device | str,
    batch: int = 256,
    effort: Effort | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> list[ConvolutionRow]:
    """Measure the convolutions of VGG8 in int8 and in bfloat16.

    Args:
        device: Device to measure on.
        batch: Batch size.
        effort: How much to measure; None: ``Effort.on(device)``.
        progress: Called with a line before each measurement.

    Returns:
        One row per convolution; empty if the device has no int8 kernels.

    Example:
        >>> measure_exact("cpu")
        []
    """
    device = torch.device(device)
    effort = effort or Effort.on(device)
    rows = []
    with own_stream(device):
        for inputs, outputs, side in LAYERS if exact.has_fused(device) else ():
            progress(f"exact: {inputs} to {outputs}")
            x = _random_ternary((batch, inputs, side, side), device)
            weight = _random_ternary((outputs, inputs, 3, 3), device)
            rows.append(_row(x, weight, effort))
    return rows


def _row(x: Tensor, weight: Tensor, effort: Effort) -> ConvolutionRow:
    from softstair.kernels.triton import convolution, moments

    mean = torch.zeros(len(weight), device=x.device)
    features, weights = x.to(torch.int8), weight.to(torch.int8)
    int8 = lambda: convolution.convolve(features, weights, 1, torch.int16, mean)
    bfloat16 = lambda: moments.moments(F.conv2d(x, weight, padding=1), mean)
    functions = {"int8": graph_of(int8, x.device), "bfloat16": graph_of(bfloat16, x.device)}
    times = race(functions, x.device, effort, each=GRAPH_CALLS)
    expected = F.conv2d(x.double(), weight.double(), padding=1)
    wrong = int((int8()[0].double() != expected).sum())
    return ConvolutionRow(
        inputs=x.shape[1],
        outputs=len(weight),
        side=x.shape[2],
        int8=times["int8"],
        bfloat16=times["bfloat16"],
        wrong=wrong,
        sums=expected.numel(),
    )


def _random_ternary(shape: tuple[int, ...], device: torch.device) -> Tensor:
    values = torch.randint(-1, 2, shape, device=device).to(torch.bfloat16)
    return values.contiguous(memory_format=torch.channels_last)
