"""The convolution of integers.

Quantised features and weights are small integers times a quantum: int8 operands with int32 sums on
the tensor cores give an exact convolution, with half the bytes of bfloat16 and twice its rate. Sums
are stored as int16 where they fit. A tile of the output is a box of pixels; shifted by a tap of the
kernel it is a box of the input, which the copy engine loads with zeros beyond the border, so that
nothing is padded in memory. The copy engine loads short rows slowly and has no stride: few
channels, and those of a convolution with a stride, are gathered by the threads.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = [
    "NARROW",
    "Arrangement",
    "arrange",
    "convolve_int8",
    "convolve_tile",
    "gather",
    "output_sides",
    "pixel_box",
    "supports_int8",
]

PIXELS, NARROW = 128, 32
"""Pixels of a tile of the integer convolution, twice as many if it has at most NARROW outputs.
Inputs are gathered if there are at most NARROW of them, or if there is a stride."""


@triton.jit
def _convolve_int8(
    features, weights, sums_ptr, images, rows,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    TAPS_DOWN: tl.constexpr, TAPS_ACROSS: tl.constexpr, PADDING: tl.constexpr,
    BOX_IMAGES: tl.constexpr, BOX_HEIGHT: tl.constexpr, BOX_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, GATHER: tl.constexpr, SOURCE_HEIGHT: tl.constexpr,
    SOURCE_WIDTH: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    convolve_tile(
        features, weights, sums_ptr, images, rows, HEIGHT, WIDTH, INPUTS, OUTPUTS, TAPS_DOWN,
        TAPS_ACROSS, PADDING, BOX_IMAGES, BOX_HEIGHT, BOX_WIDTH, BLOCK, DEPTH, GATHER,
        SOURCE_HEIGHT, SOURCE_WIDTH, STRIDE,
    )  # fmt: skip


@triton.jit
def convolve_tile(
    features, weights, sums_ptr, images, rows,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    TAPS_DOWN: tl.constexpr, TAPS_ACROSS: tl.constexpr, PADDING: tl.constexpr,
    BOX_IMAGES: tl.constexpr, BOX_HEIGHT: tl.constexpr, BOX_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, GATHER: tl.constexpr, SOURCE_HEIGHT: tl.constexpr,
    SOURCE_WIDTH: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Store a tile of sums, (pixels, BLOCK outputs); return them and which of them exist."""
    down: tl.constexpr = (HEIGHT + BOX_HEIGHT - 1) // BOX_HEIGHT
    across: tl.constexpr = (WIDTH + BOX_WIDTH - 1) // BOX_WIDTH
    blocks: tl.constexpr = (OUTPUTS + BLOCK - 1) // BLOCK
    pixels: tl.constexpr = BOX_IMAGES * BOX_HEIGHT * BOX_WIDTH
    chunks: tl.constexpr = (INPUTS + DEPTH - 1) // DEPTH
    length: tl.constexpr = TAPS_DOWN * TAPS_ACROSS * INPUTS
    tile = tl.program_id(0) // blocks
    channel = tl.program_id(0) % blocks * BLOCK
    outputs = channel + tl.arange(0, BLOCK)
    output_mask = outputs < OUTPUTS
    pixel = tl.arange(0, pixels)
    if GATHER:
        row = tile * pixels + pixel
        inside = row < rows
        total = tl.zeros((pixels, BLOCK), dtype=tl.int32)
        for i in range((length + DEPTH - 1) // DEPTH):
            k = i * DEPTH + tl.arange(0, DEPTH)
            box = gather(
                features, row, inside, k, HEIGHT, WIDTH, SOURCE_HEIGHT, SOURCE_WIDTH, INPUTS,
                TAPS_DOWN, TAPS_ACROSS, PADDING, PADDING, STRIDE,
            )  # fmt: skip
            matrix = tl.load(
                weights + outputs[None, :] * length + k[:, None],
                mask=output_mask[None, :] & (k < length)[:, None],
                other=0,
            )
            total = tl.dot(box, matrix, total, out_dtype=tl.int32)
    else:
        image = tile // (down * across) * BOX_IMAGES
        top = tile // across % down * BOX_HEIGHT
        left = tile % across * BOX_WIDTH
        # The first factor is two-dimensional in memory: Triton 3.6 would load a reshaped box into
        # registers first.
        total = tl.zeros((BLOCK, pixels), dtype=tl.int32)
        for i in range(TAPS_DOWN * TAPS_ACROSS * chunks):
            tap, inputs = i // chunks, i % chunks * DEPTH
            y, x = top + tap // TAPS_ACROSS - PADDING, left + tap % TAPS_ACROSS - PADDING
            box = features.load([image, y, x, inputs]).reshape(pixels, DEPTH)
            # Beyond the last input of a tap come those of the next one: they meet zeros of the box.
            matrix = weights.load([channel, tap * INPUTS + inputs])
            total = tl.dot(matrix, box.T, total, out_dtype=tl.int32)
        total = tl.trans(total)
        image += pixel // (BOX_HEIGHT * BOX_WIDTH)
        y, x = top + pixel // BOX_WIDTH % BOX_HEIGHT, left + pixel % BOX_WIDTH
        inside = (image < images) & (y < HEIGHT) & (x < WIDTH)
        row = (image * HEIGHT + y) * WIDTH + x
    mask = inside[:, None] & output_mask[None, :]
    pointers = sums_ptr + row.to(tl.int64)[:, None] * OUTPUTS + outputs[None, :]
    tl.store(pointers, total.to(sums_ptr.dtype.element_ty), mask=mask)
    return total, mask


@triton.jit
def gather(
    x_ptr, row, row_mask, k, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    SOURCE_HEIGHT: tl.constexpr, SOURCE_WIDTH: tl.constexpr, INPUTS: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, PADDING_DOWN: tl.constexpr,
    PADDING_ACROSS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Columns k of rows of X: the inputs of all taps of a pixel of the output, then zeros."""
    tap, channel = k // INPUTS, k % INPUTS
    image, y, x = row // (HEIGHT * WIDTH), row // WIDTH % HEIGHT, row % WIDTH
    y = y[:, None] * STRIDE + (tap // ACROSS - PADDING_DOWN)[None, :]
    x = x[:, None] * STRIDE + (tap % ACROSS - PADDING_ACROSS)[None, :]
    mask = (y >= 0) & (y < SOURCE_HEIGHT) & (x >= 0) & (x < SOURCE_WIDTH)
    mask = mask & row_mask[:, None] & (tap < DOWN * ACROSS)[None, :]
    source = (image.to(tl.int64)[:, None] * SOURCE_HEIGHT + y) * SOURCE_WIDTH + x
    return tl.load(x_ptr + source * INPUTS + channel[None, :], mask=mask, other=0.0)


def supports_int8(
    inputs: int, stride: object, dilation: object, groups: int, padding: object
) -> bool:
    """Whether :func:`convolve_int8` computes a convolution; it loads 16 bytes at a time."""
    plain = dilation in (1, (1, 1)) and groups == 1 and inputs % 16 == 0
    pairs = [given if isinstance(given, tuple) else (given,) for given in (stride, padding)]
    return plain and all(len(set(pair)) == 1 and isinstance(pair[0], int) for pair in pairs)


def output_sides(
    sides: Sequence[int],
    taps: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1, 1),
) -> list[int]:
    """Return the height and the width of the output of a convolution.

    Raises:
        ValueError: If the kernel is larger than the padded image.
    """
    spans = [step * (count - 1) + 1 for step, count in zip(dilation, taps, strict=True)]
    padded = [side + 2 * pad for side, pad in zip(sides, padding, strict=True)]
    if any(span > side for span, side in zip(spans, padded, strict=True)):
        given = " × ".join(map(str, padded))
        kernel = " × ".join(map(str, spans))
        raise ValueError(f"a kernel of {kernel} does not fit into {given} padded pixels.")
    triples = zip(padded, spans, strides, strict=True)
    return [(side - span) // stride + 1 for side, span, stride in triples]


class Arrangement(NamedTuple):
    """How programs share a convolution, and what its kernel reads and writes."""

    sums: Tensor
    tiles: int
    outputs: int
    block: int  # outputs of a program
    rows: int  # pixels of the output
    operands: tuple[Any, ...]
    constants: dict[str, int]

    @property
    def grid(self) -> tuple[int]:
        return (self.tiles * triton.cdiv(self.outputs, self.block),)


def convolve_int8(
    features: Tensor, weights: Tensor, padding: int, dtype: torch.dtype, stride: int = 1
) -> Tensor:
    """Return the convolution of int8 features with int8 weights, both channels-last: (N, C, H, W)
    channels-last in an integer ``dtype`` that must hold the sums.

    Raises:
        ValueError: If the kernel is larger than the padded image.
    """
    plan = arrange(features, weights, padding, dtype, stride)
    _convolve_int8[plan.grid](
        *plan.operands, plan.rows, **plan.constants, num_warps=4, num_stages=3,
        enable_fp_fusion=True,
    )  # fmt: skip
    return plan.sums


def arrange(
    features: Tensor, weights: Tensor, padding: int, dtype: torch.dtype, stride: int
) -> Arrangement:
    """Arrange a convolution: the sums are empty."""
    images, inputs, height, width = features.shape
    outputs, _, down, across = weights.shape
    new_height, new_width = output_sides(
        (height, width), (down, across), (stride, stride), (padding, padding)
    )
    sums = _channels_last((images, outputs, new_height, new_width), dtype, features.device)
    if down == across == stride == 1 and padding == 0:  # no neighbours: each pixel is an image
        images, height, width = images * height * width, 1, 1
        new_height, new_width = 1, 1
    pixels = PIXELS * (2 if outputs <= NARROW else 1)
    box_images, box_height, box_width = pixel_box(new_height, new_width, pixels)
    depth = max(32, min(128, triton.next_power_of_2(inputs)))  # of a product: at least 32 bytes
    rows = images * new_height * new_width
    sides = ((images, box_images), (new_height, box_height), (new_width, box_width))
    gathered = inputs <= NARROW or stride > 1
    tiles = math.prod(triton.cdiv(side, box) for side, box in sides)
    tiles = triton.cdiv(rows, pixels) if gathered else tiles
    block = min(128, max(16 if gathered else 64, triton.next_power_of_2(outputs)))
    length = down * across * inputs
    boxes, matrix = features, weights
    if not gathered:
        boxes = TensorDescriptor(
            features,
            [images, height, width, inputs],
            [height * width * inputs, width * inputs, inputs, 1],
            [box_images, box_height, box_width, depth],
        )
        matrix = TensorDescriptor(weights, [outputs, length], [length, 1], [block, depth])
    constants = dict(
        HEIGHT=new_height, WIDTH=new_width, INPUTS=inputs, OUTPUTS=outputs, TAPS_DOWN=down,
        TAPS_ACROSS=across, PADDING=padding, BOX_IMAGES=box_images, BOX_HEIGHT=box_height,
        BOX_WIDTH=box_width, BLOCK=block, DEPTH=depth, GATHER=gathered, SOURCE_HEIGHT=height,
        SOURCE_WIDTH=width, STRIDE=stride,
    )  # fmt: skip
    operands = (boxes, matrix, sums, images)
    return Arrangement(sums, tiles, outputs, block, rows, operands, constants)


def pixel_box(height: int, width: int, pixels: int = PIXELS) -> tuple[int, int, int]:
    """Return images, height and width of a tile of so many pixels, for images of this size."""
    box_width = min(16, triton.next_power_of_2(width))
    box_height = min(pixels // box_width, triton.next_power_of_2(height))
    return pixels // (box_width * box_height), box_height, box_width


def _channels_last(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device, memory_format=torch.channels_last)
