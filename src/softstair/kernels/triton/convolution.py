"""Convolutions of whole numbers, exactly: int8 operands, int32 sums on the tensor cores.

Features and weights on a stair are small whole numbers times a quantum, so their convolution is an
integer product: no rounding, half the bytes of bfloat16 and twice its rate. The sums leave as int16
where they fit, together with their moments by channel, which the normalisation
behind would otherwise read everything once more for.

A tile of the output is a box of pixels; shifted by a tap of the kernel it is a box of the input,
which the copy engine brings whole, zeros where it hangs over the border: no padding in memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["convolve", "fits"]

PIXELS = 128
"""Of a tile; its channels are as many."""


@triton.jit
def _convolve(
    features,
    weights,
    running_mean,
    sums,
    partial,
    images,
    per_unit,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TAPS_DOWN: tl.constexpr,
    TAPS_ACROSS: tl.constexpr,
    PADDING: tl.constexpr,
    BOX_IMAGES: tl.constexpr,
    BOX_HEIGHT: tl.constexpr,
    BOX_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    down: tl.constexpr = (HEIGHT + BOX_HEIGHT - 1) // BOX_HEIGHT
    across: tl.constexpr = (WIDTH + BOX_WIDTH - 1) // BOX_WIDTH
    wide: tl.constexpr = (OUTPUTS + BLOCK - 1) // BLOCK
    pixels: tl.constexpr = BOX_IMAGES * BOX_HEIGHT * BOX_WIDTH
    chunks: tl.constexpr = (INPUTS + DEPTH - 1) // DEPTH
    tile = tl.program_id(0) // wide
    channel = tl.program_id(0) % wide * BLOCK
    image = tile // (down * across) * BOX_IMAGES
    top = tile // across % down * BOX_HEIGHT
    left = tile % across * BOX_WIDTH
    total = tl.zeros((pixels, BLOCK), dtype=tl.int32)
    for i in range(TAPS_DOWN * TAPS_ACROSS * chunks):
        tap, inputs = i // chunks, i % chunks * DEPTH
        y, x = top + tap // TAPS_ACROSS - PADDING, left + tap % TAPS_ACROSS - PADDING
        box = features.load([image, y, x, inputs]).reshape(pixels, DEPTH)
        # Beyond the last input of a tap come those of the next one: they meet zeros of the box.
        rows = weights.load([channel, tap * INPUTS + inputs])
        total = tl.dot(box, rows.T, total, out_dtype=tl.int32)
    place = tl.arange(0, pixels)
    image += place // (BOX_HEIGHT * BOX_WIDTH)
    y, x = top + place // BOX_WIDTH % BOX_HEIGHT, left + place % BOX_WIDTH
    inside = (image < images) & (y < HEIGHT) & (x < WIDTH)
    outputs = channel + tl.arange(0, BLOCK)
    there = outputs < OUTPUTS
    at = ((image.to(tl.int64) * HEIGHT + y) * WIDTH + x) * OUTPUTS
    mask = inside[:, None] & there[None, :]
    tl.store(sums + at[:, None] + outputs[None, :], total.to(sums.dtype.element_ty), mask=mask)
    shift = tl.load(running_mean + outputs, mask=there, other=0) * per_unit
    values = tl.where(mask, total.to(tl.float32) - shift[None, :], 0.0)
    moments = partial + tile * 2 * OUTPUTS + outputs
    tl.store(moments, tl.sum(values, 0), mask=there)
    tl.store(moments + OUTPUTS, tl.sum(values * values, 0), mask=there)


def fits(inputs: int, stride: object, dilation: object, groups: int, padding: object) -> bool:
    """Whether a convolution of this kind is computed here; the copy engine counts in 16 bytes."""
    plain = all(value in (1, (1, 1)) for value in (stride, dilation)) and groups == 1
    square = isinstance(padding, int) or (isinstance(padding, tuple) and len(set(padding)) == 1)
    return plain and square and inputs % 16 == 0


def convolve(
    features: Tensor,
    weights: Tensor,
    padding: int,
    dtype: torch.dtype,
    running_mean: Tensor,
    unit: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The sums, (N, C, H, W) channels-last in an integer dtype that holds them, and their moments
    by tile, (tiles, 2, C), about the running mean of unit·sums; features and weights are int8 and
    channels-last."""
    images, inputs, height, width = features.shape
    outputs, _, down, across = weights.shape
    new_height, new_width = height + 2 * padding - down + 1, width + 2 * padding - across + 1
    box_width = min(16, triton.next_power_of_2(new_width))
    box_height = min(PIXELS // box_width, triton.next_power_of_2(new_height))
    box_images = PIXELS // (box_width * box_height)
    depth = max(32, min(128, triton.next_power_of_2(inputs)))  # of a product: 32 bytes at least
    tiles = (
        triton.cdiv(images, box_images)
        * triton.cdiv(new_height, box_height)
        * triton.cdiv(new_width, box_width)
    )
    block = min(128, max(16, triton.next_power_of_2(outputs)))
    sums = torch.empty(
        (images, outputs, new_height, new_width),
        dtype=dtype,
        device=features.device,
        memory_format=torch.channels_last,
    )
    partial = torch.empty((tiles, 2, outputs), dtype=torch.float32, device=features.device)
    boxes = TensorDescriptor(
        features,
        [images, height, width, inputs],
        [height * width * inputs, width * inputs, inputs, 1],
        [box_images, box_height, box_width, depth],
    )
    length = down * across * inputs
    rows = TensorDescriptor(weights, [outputs, length], [length, 1], [block, depth])
    _convolve[(tiles * triton.cdiv(outputs, block),)](
        boxes,
        rows,
        running_mean,
        sums,
        partial,
        images,
        1 / unit,
        new_height,
        new_width,
        inputs,
        outputs,
        down,
        across,
        padding,
        box_images,
        box_height,
        box_width,
        block,
        depth,
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=True,
    )
    return sums, partial
