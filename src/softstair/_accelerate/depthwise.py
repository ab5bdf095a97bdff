"""Depthwise convolutions: sums of integers, and the gradient of the features.

Each channel has a kernel of its own, so a sum has few products, and memory traffic dominates the
cost. A program computes some channels of some pixels; it loads the inputs that neighbouring pixels
share from the cache. Sums of integers are exact. The gradient of the features is the convolution of
the gradient of the sums with the same kernels, their taps in reverse order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from softstair._accelerate.moments import channel_block
from softstair.kernels.triton.convolution import output_sides

__all__ = ["depthwise_gradient", "depthwise_int8", "is_depthwise"]

MOST_TAPS = 25
"""Most taps of a kernel: the loop over them is unrolled."""
ELEMENTS = 4096
"""Elements of a tile."""


@triton.jit
def _depthwise(
    x_ptr, weight_ptr, out_ptr, rows,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SOURCE_HEIGHT: tl.constexpr,
    SOURCE_WIDTH: tl.constexpr, CHANNELS: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    PADDING_DOWN: tl.constexpr, PADDING_ACROSS: tl.constexpr, STRIDE: tl.constexpr,
    REVERSE: tl.constexpr, INTEGERS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    taps: tl.constexpr = DOWN * ACROSS
    dtype: tl.constexpr = tl.int32 if INTEGERS else tl.float32
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel_mask, row_mask = channel < CHANNELS, row < rows
    image = row.to(tl.int64) // (HEIGHT * WIDTH)
    top, left = row // WIDTH % HEIGHT * STRIDE - PADDING_DOWN, row % WIDTH * STRIDE - PADDING_ACROSS
    total = tl.zeros((ROWS, BLOCK), dtype=dtype)
    for tap in tl.static_range(taps):
        y, x = top + tap // ACROSS, left + tap % ACROSS
        inside = row_mask & (y >= 0) & (y < SOURCE_HEIGHT) & (x >= 0) & (x < SOURCE_WIDTH)
        source = (image * SOURCE_HEIGHT + y) * SOURCE_WIDTH + x
        pointers = x_ptr + source[:, None] * CHANNELS + channel[None, :]
        values = tl.load(pointers, mask=inside[:, None] & channel_mask[None, :], other=0)
        place = channel * taps + (taps - 1 - tap if REVERSE else tap)
        weights = tl.load(weight_ptr + place, mask=channel_mask, other=0)
        total += values.to(dtype) * weights.to(dtype)[None, :]
    pointers = out_ptr + row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    mask = row_mask[:, None] & channel_mask[None, :]
    tl.store(pointers, total.to(out_ptr.dtype.element_ty), mask=mask)


def is_depthwise(layer: nn.Module) -> bool:
    """Whether the kernel computes the sums of this layer: a convolution of each channel alone, with
    one stride and few taps."""
    if not isinstance(layer, nn.Conv2d) or not isinstance(layer.padding, tuple):
        return False
    own = 1 < layer.groups == layer.in_channels == layer.out_channels
    plain = layer.dilation == (1, 1) and len({*layer.stride}) == 1
    return own and plain and layer.weight[0].numel() <= MOST_TAPS


def depthwise_int8(
    features: Tensor, weights: Tensor, layer: nn.Conv2d, dtype: torch.dtype
) -> Tensor:
    """Return the sums of int8 features and weights, in an integer ``dtype`` that must hold them."""
    padding = _padding(layer)
    sides = output_sides(features.shape[2:], weights.shape[2:], layer.stride, padding)
    shape = (*features.shape[:2], *sides)
    return _convolve(features, weights, shape, padding, layer.stride[0], False, dtype)


def depthwise_gradient(dc: Tensor, weights: Tensor, layer: nn.Conv2d, shape: torch.Size) -> Tensor:
    """Return the gradient of features with this shape. The stride of the layer must be 1."""
    pads = zip(weights.shape[2:], _padding(layer), strict=True)
    padding = tuple(taps - 1 - pad for taps, pad in pads)
    return _convolve(dc, weights, shape, padding, 1, True, dc.dtype)


def _padding(layer: nn.Conv2d) -> tuple[int, ...]:
    assert not isinstance(layer.padding, str)
    return tuple(map(int, layer.padding))


def _convolve(
    x: Tensor,
    weights: Tensor,
    shape: tuple[int, ...],
    padding: tuple[int, ...],
    stride: int,
    reverse: bool,
    dtype: torch.dtype,
) -> Tensor:
    images, channels, height, width = shape
    out = torch.empty(shape, dtype=dtype, device=x.device, memory_format=torch.channels_last)
    block, rows = channel_block(channels), images * height * width
    tile = ELEMENTS // block
    _depthwise[(triton.cdiv(rows, tile), triton.cdiv(channels, block))](
        x, weights, out, rows, height, width, *x.shape[2:], channels, *weights.shape[2:], *padding,
        stride, reverse, not x.is_floating_point(), tile, block, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out
