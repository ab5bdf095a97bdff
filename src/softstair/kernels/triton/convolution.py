"""The convolution of integers, which leaves with the statistics of its sums.

Quantised features and weights are small integers times a quantum: int8 operands with int32 sums on
the tensor cores give an exact convolution, with half the bytes of bfloat16 and twice its rate. Sums
are stored as int16 where they fit. A tile of the output is a box of pixels; shifted by a tap of the
kernel it is a box of the input, which the copy engine loads with zeros beyond the border, so that
nothing is padded in memory. The copy engine loads short rows slowly and has no stride: few
channels, and those of a convolution with a stride, are gathered by the threads. Moments of integers
are integers: programs add theirs to the same two numbers per channel, and the result does not
depend on their order.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from softstair.kernels.triton.moments import (
    REDUCED_CHANNELS,
    Normalisation,
    is_last,
    load_pivot,
    partial_statistics,
    store_statistics,
)

__all__ = [
    "NARROW",
    "convolve_int8",
    "gather",
    "output_sides",
    "pixel_box",
    "supports_int8",
    "window_row",
]

PIXELS, NARROW = 128, 32
"""Pixels of a tile of the integer convolution, twice as many if it has at most NARROW outputs.
Inputs are gathered if there are at most NARROW of them, or if there is a stride."""


@triton.jit
def _convolve_int8(
    features, weights, sums_ptr, partial_ptr, images, stats_ptr, gamma_ptr, beta_ptr,
    running_mean_ptr, running_var_ptr, tracked_ptr, quanta_ptr, rows, unit, per_unit, eps, momentum,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    TAPS_DOWN: tl.constexpr, TAPS_ACROSS: tl.constexpr, PADDING: tl.constexpr,
    BOX_IMAGES: tl.constexpr, BOX_HEIGHT: tl.constexpr, BOX_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, GATHER: tl.constexpr, SOURCE_HEIGHT: tl.constexpr,
    SOURCE_WIDTH: tl.constexpr, STRIDE: tl.constexpr, MOMENTS: tl.constexpr, FINISH: tl.constexpr,
):  # fmt: skip
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
    if MOMENTS == "exact":
        values = tl.where(mask, total, 0)
        squares = values * values  # below 2³⁰; their sum is not
        second = tl.sum(squares >> 15, 0).to(tl.int64) * 32768 + tl.sum(squares & 32767, 0)
        pointers = partial_ptr + outputs
        first = tl.sum(values, 0).to(tl.int64)
        tl.atomic_add(pointers, first, mask=output_mask, sem="relaxed")
        tl.atomic_add(pointers + OUTPUTS, second, mask=output_mask, sem="relaxed")
    elif MOMENTS == "partial":
        pivot = load_pivot(running_mean_ptr, quanta_ptr, outputs, output_mask, per_unit)
        values = tl.where(mask, total.to(tl.float32) - pivot[None, :], 0.0)
        pointers = partial_ptr + tile * 2 * OUTPUTS + outputs
        tl.store(pointers, tl.sum(values, 0), mask=output_mask)
        tl.store(pointers + OUTPUTS, tl.sum(values * values, 0), mask=output_mask)
    if FINISH:
        last = is_last(partial_ptr + 2 * OUTPUTS + channel // BLOCK, tl.num_programs(0) // blocks)
        if last:
            first = tl.load(pointers, mask=output_mask, cache_modifier=".cg")
            second = tl.load(pointers + OUTPUTS, mask=output_mask, cache_modifier=".cg")
            store_statistics(
                first.to(tl.float64), second.to(tl.float64), tl.zeros((BLOCK,), dtype=tl.float32),
                outputs, output_mask, stats_ptr, gamma_ptr, beta_ptr, running_mean_ptr,
                running_var_ptr, tracked_ptr, quanta_ptr, rows, unit, eps, momentum, OUTPUTS,
            )  # fmt: skip


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


@triton.jit
def window_row(row, j, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """The row of c that is the j-th pixel of the 2×2 window of a pooled row."""
    across: tl.constexpr = WIDTH // 2
    down: tl.constexpr = HEIGHT // 2
    image, y, x = row // (across * down), row // across % down, row % across
    return (image * HEIGHT + 2 * y + j // 2) * WIDTH + 2 * x + j % 2


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


def convolve_int8(
    features: Tensor,
    weights: Tensor,
    padding: int,
    dtype: torch.dtype,
    norm: Normalisation | None = None,
    unit: float = 1.0,
    stride: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """Convolve int8 features with int8 weights, both channels-last.

    Returns:
        The sums, (N, C, H, W) channels-last in an integer ``dtype`` that must hold them, and what
        :func:`~softstair.kernels.triton.moments.batch_statistics` returns, if a normalisation is
        given.

    Raises:
        ValueError: If the kernel is larger than the padded image.
    """
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
    rows, stats = images * new_height * new_width, None
    sides = ((images, box_images), (new_height, box_height), (new_width, box_width))
    gathered = inputs <= NARROW or stride > 1
    tiles = math.prod(triton.cdiv(side, box) for side, box in sides)
    tiles = triton.cdiv(rows, pixels) if gathered else tiles
    block = min(128, max(16 if gathered else 64, triton.next_power_of_2(outputs)))
    partial, arguments = sums, (sums,) * 6 + (None, rows, unit, 1 / unit, 1.0, 1.0)
    how, finish = None, False
    if norm is not None:
        stats, arguments = norm.arguments(rows, unit)
        how = "exact" if dtype == torch.int16 else "partial"
        # Of programs with few channels, a multiprocessor runs others while one waits for the count.
        finish = how == "exact" and block <= REDUCED_CHANNELS
        partial = norm.zeros[: 2 * outputs].view(1, 2, outputs)
        if how == "partial":
            partial = torch.empty((tiles, 2, outputs), device=features.device)
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
    _convolve_int8[(tiles * triton.cdiv(outputs, block),)](
        boxes, matrix, sums, partial, images, *arguments, new_height, new_width, inputs, outputs,
        down, across, padding, box_images, box_height, box_width, block, depth, gathered,
        height, width, stride, MOMENTS=how, FINISH=finish, num_warps=4, num_stages=3,
        enable_fp_fusion=True,
    )  # fmt: skip
    if norm is not None and not finish:
        stats = partial_statistics(partial, norm, rows, unit)
    return sums, stats


def pixel_box(height: int, width: int, pixels: int = PIXELS) -> tuple[int, int, int]:
    """Return images, height and width of a tile of so many pixels, for images of this size."""
    box_width = min(16, triton.next_power_of_2(width))
    box_height = min(pixels // box_width, triton.next_power_of_2(height))
    return pixels // (box_width * box_height), box_height, box_width


def _channels_last(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device, memory_format=torch.channels_last)
