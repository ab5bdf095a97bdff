"""The two products of a convolution's backward pass, in FP8.

The gradient dc of the sums was rounded to E5M2. Features f and weights w are small integers, which
FP8 holds exactly. With p the padding and t a tap of the kernel,

    dx[n, y, i] = Σ dc[n, y + p − t, o]·w[o, t, i]        over taps and outputs o
    dw[o, t, i] = Σ dc[n, y, o]·f[n, y + t − p, i]        over images n and pixels y

The tensor cores multiply rows of FP8 that are contiguous along the sum: dx takes (N, H, W, C), and
dw takes dc and f with images last, (C, H, W, N). As for the integer convolution, a tile shifted by
a tap is a box that the copy engine loads, with zeros beyond the border. The first factor of each
product must be two-dimensional in memory: Triton 3.6 would load a reshaped box into registers and
overwrite them while they are read (triton-lang/triton issue 9433). If there are few outputs, rows
of dc are gathered instead, as for the integer convolution.

The tensor cores add products of FP8 with fewer bits than float32 has; beside the rounding of dc
this is negligible (3e-4 of dw, as norms). Sums of dw are split over pixels, so that all
multiprocessors have work. The last program of a tile adds the parts of the tile if they are few;
torch adds many, since one multiprocessor would read them slowly. Both add in a fixed order: every
run gives the same bits.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from softstair._accelerate.moments import PROGRAMS, SHARED_TILES, is_last
from softstair.kernels.triton.convolution import NARROW, gather, pixel_box

__all__ = ["FORMATS", "feature_gradient", "float8_for", "supports_float8", "weight_gradient"]

FORMATS = FLOAT8, PRECISE = torch.float8_e5m2, torch.float8_e4m3fn
"""Formats of FP8 with two and with three digits after the first."""
BLOCK, DEPTH = 128, 128
"""Of a tile: channels, and products that are added at a time."""
FEW_PARTS = 3
"""Most parts of a sum that the last program of a tile adds. More are added by torch: on an H200,
the last program takes as long as torch for 5 parts, and longer for 11."""


@triton.jit
def _feature_gradient(
    gradients, weights, factor_ptr, dx_ptr, images, unit,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, PADDING: tl.constexpr, BOX_IMAGES: tl.constexpr,
    BOX_HEIGHT: tl.constexpr, BOX_WIDTH: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
    GATHER: tl.constexpr,
):  # fmt: skip
    high: tl.constexpr = (HEIGHT + BOX_HEIGHT - 1) // BOX_HEIGHT
    wide: tl.constexpr = (WIDTH + BOX_WIDTH - 1) // BOX_WIDTH
    blocks: tl.constexpr = (INPUTS + BLOCK - 1) // BLOCK
    pixels: tl.constexpr = BOX_IMAGES * BOX_HEIGHT * BOX_WIDTH
    chunks: tl.constexpr = (OUTPUTS + DEPTH - 1) // DEPTH
    taps: tl.constexpr = DOWN * ACROSS
    tile = tl.program_id(0) // blocks
    channel = tl.program_id(0) % blocks * BLOCK
    inputs = channel + tl.arange(0, BLOCK)
    pixel = tl.arange(0, pixels)
    if GATHER:
        row = tile * pixels + pixel
        inside = row < images * HEIGHT * WIDTH
        total = tl.zeros((pixels, BLOCK), dtype=tl.float32)
        for i in range((taps * OUTPUTS + DEPTH - 1) // DEPTH):
            k = i * DEPTH + tl.arange(0, DEPTH)
            box = gather(
                gradients, row, inside, k, HEIGHT, WIDTH, HEIGHT + 2 * PADDING - DOWN + 1,
                WIDTH + 2 * PADDING - ACROSS + 1, OUTPUTS, DOWN, ACROSS, DOWN - 1 - PADDING,
                ACROSS - 1 - PADDING, 1,
            )  # fmt: skip
            # The taps of dc are those of the weights in the other direction.
            column = (taps - 1 - k // OUTPUTS) * OUTPUTS + k % OUTPUTS
            matrix = tl.load(
                weights + inputs[None, :] * (taps * OUTPUTS) + column[:, None],
                mask=(inputs < INPUTS)[None, :] & (k < taps * OUTPUTS)[:, None],
                other=0.0,
            )
            total = tl.dot(box, matrix, total)
    else:
        image = tile // (high * wide) * BOX_IMAGES
        top = tile // wide % high * BOX_HEIGHT
        left = tile % wide * BOX_WIDTH
        total = tl.zeros((BLOCK, pixels), dtype=tl.float32)
        for i in range(taps * chunks):
            tap, outputs = i // chunks, i % chunks * DEPTH
            y, x = top + PADDING - tap // ACROSS, left + PADDING - tap % ACROSS
            box = gradients.load([image, y, x, outputs]).reshape(pixels, DEPTH)
            rows = weights.load([channel, tap * OUTPUTS + outputs])
            total = tl.dot(rows, box.T, total)
        total = tl.trans(total)
        image += pixel // (BOX_HEIGHT * BOX_WIDTH)
        y, x = top + pixel // BOX_WIDTH % BOX_HEIGHT, left + pixel % BOX_WIDTH
        inside = (image < images) & (y < HEIGHT) & (x < WIDTH)
        row = (image * HEIGHT + y) * WIDTH + x
    total *= tl.load(factor_ptr) * unit
    tl.store(
        dx_ptr + row.to(tl.int64)[:, None] * INPUTS + inputs[None, :],
        total.to(dx_ptr.dtype.element_ty),
        mask=inside[:, None] & (inputs < INPUTS)[None, :],
    )


@triton.jit
def _weight_gradient(
    gradients, features, factor_ptr, parts_ptr, dw_ptr, counters_ptr, images, unit,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, PADDING: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, DEPTH: tl.constexpr, TAPS: tl.constexpr,
    FINISH: tl.constexpr,
):  # fmt: skip
    """One part of the sums for TAPS neighbouring taps, 1 or 3, which share the gradients. With
    FINISH, the last program of a tile adds the parts of the tile, in order."""
    groups: tl.constexpr = DOWN * ACROSS // TAPS
    blocks: tl.constexpr = (INPUTS + BLOCK_IN - 1) // BLOCK_IN
    part = tl.program_id(0) % PARTS
    tap = tl.program_id(0) // PARTS % groups * TAPS
    first_in = tl.program_id(0) // (PARTS * groups) % blocks * BLOCK_IN
    first_out = tl.program_id(0) // (PARTS * groups * blocks) * BLOCK_OUT
    chunks = tl.cdiv(images, DEPTH)
    count = tl.cdiv(HEIGHT * WIDTH * chunks, PARTS)
    down, right = tap // ACROSS - PADDING, tap % ACROSS - PADDING
    total_0 = tl.zeros((BLOCK_OUT, BLOCK_IN), dtype=tl.float32)
    total_1, total_2 = total_0, total_0
    start, stop = part * count, tl.minimum((part + 1) * count, HEIGHT * WIDTH * chunks)
    # Without this, ptxas 12.8 serialises the products (C7515), since the loop might not run.
    tl.assume(start < stop)
    for k in range(start, stop):
        pixel, image = k // chunks, k % chunks * DEPTH
        y, x = pixel // WIDTH, pixel % WIDTH + right
        # Columns past the last image are of the next pixel; the features are 0 there.
        dc = gradients.load([first_out, pixel * images + image])
        f = features.load([first_in, y + down, x, image]).reshape(BLOCK_IN, DEPTH)
        total_0 = tl.dot(dc, f.T, total_0)
        if TAPS == 3:
            f = features.load([first_in, y + down, x + 1, image]).reshape(BLOCK_IN, DEPTH)
            total_1 = tl.dot(dc, f.T, total_1)
            f = features.load([first_in, y + down, x + 2, image]).reshape(BLOCK_IN, DEPTH)
            total_2 = tl.dot(dc, f.T, total_2)
    scale = tl.load(factor_ptr) * unit
    outputs = first_out + tl.arange(0, BLOCK_OUT)
    inputs = first_in + tl.arange(0, BLOCK_IN)
    offsets = (outputs[:, None] * (DOWN * ACROSS) + tap) * INPUTS + inputs[None, :]
    mask = (outputs < OUTPUTS)[:, None] & (inputs < INPUTS)[None, :]
    size: tl.constexpr = OUTPUTS * DOWN * ACROSS * INPUTS
    pointers = parts_ptr + part.to(tl.int64) * size + offsets
    tl.store(pointers, total_0 * scale, mask=mask)
    if TAPS == 3:
        tl.store(pointers + INPUTS, total_1 * scale, mask=mask)
        tl.store(pointers + 2 * INPUTS, total_2 * scale, mask=mask)
    if FINISH:
        last = is_last(counters_ptr + tl.program_id(0) // PARTS, PARTS)
        if last:
            for i in tl.range(TAPS, num_stages=1):
                total = tl.zeros((BLOCK_OUT, BLOCK_IN), dtype=tl.float32)
                for j in tl.static_range(PARTS):
                    pointers = parts_ptr + j * size + offsets + i * INPUTS
                    total += tl.load(pointers, mask=mask, cache_modifier=".cg")
                tl.store(dw_ptr + offsets + i * INPUTS, total, mask=mask)


def float8_for(integers: tuple[int, ...] | None) -> torch.dtype | None:
    """Return the FP8 format that holds these integers exactly; None if there is none."""
    largest = max(map(abs, integers)) if integers else math.inf
    return FLOAT8 if largest <= 8 else PRECISE if largest <= 16 else None


def supports_float8(
    images: int, inputs: int, outputs: int, stride: object, dilation: object, groups: int
) -> bool:
    """Whether the products of a convolution are computed here; the copy engine needs 16 bytes."""
    plain = all(value in (1, (1, 1)) for value in (stride, dilation)) and groups == 1
    return plain and all(count % 16 == 0 for count in (images, inputs, outputs))


def feature_gradient(
    dc: Tensor, weights: Tensor, factor: Tensor, padding: int, dtype: torch.dtype, unit: float
) -> Tensor:
    """Return the gradient of the features, channels-last.

    Args:
        dc: Gradient of the sums, (N, O, H, W), channels-last, in FP8.
        weights: Weights in quanta, (I, taps down, taps across, O), in FP8.
        factor: Scalar by which ``dc`` is to be multiplied.
        padding: Of the convolution, on each side.
        dtype: Of the result.
        unit: Quantum of the weights.
    """
    images, outputs, height, width = dc.shape
    inputs, down, across, _ = weights.shape
    new_height, new_width = height + down - 1 - 2 * padding, width + across - 1 - 2 * padding
    box_images, box_height, box_width = pixel_box(new_height, new_width)
    depth = _power(outputs, 32, DEPTH)
    gathered = outputs <= NARROW and down == across
    block = _power(inputs, 16 if gathered else 64, BLOCK)
    sides = ((images, box_images), (new_height, box_height), (new_width, box_width))
    tiles = math.prod(triton.cdiv(side, box) for side, box in sides)
    if gathered:
        tiles = triton.cdiv(images * new_height * new_width, box_images * box_height * box_width)
    shape = (images, inputs, new_height, new_width)
    dx = torch.empty(shape, dtype=dtype, device=dc.device, memory_format=torch.channels_last)
    boxes, rows = dc, weights
    if not gathered:
        boxes = _descriptor(dc.permute(0, 2, 3, 1), [box_images, box_height, box_width, depth])
        rows = _descriptor(weights.reshape(inputs, -1), [block, depth])
    _feature_gradient[(tiles * triton.cdiv(inputs, block),)](
        boxes, rows, factor, dx, images, unit, new_height, new_width, outputs, inputs, down, across,
        padding, box_images, box_height, box_width, block, depth, gathered, num_warps=4,
        num_stages=3,
    )  # fmt: skip
    return dx


def weight_gradient(
    dc: Tensor,
    features: Tensor,
    factor: Tensor,
    taps: tuple[int, int],
    padding: int,
    unit: float,
    zeros: Tensor,
) -> Tensor:
    """Return the gradient of the weights in float32, (O, down, across, I).

    Args:
        dc: Gradient of the sums with images last, (O, H, W, N), in FP8.
        features: Features in quanta with images last, (I, H, W, N), in FP8.
        factor: Scalar by which ``dc`` is to be multiplied.
        taps: Height and width of the kernel.
        padding: Of the convolution, on each side.
        unit: Quantum of the features.
        zeros: A row of :func:`~softstair._accelerate.moments.zeros_for`.
    """
    outputs, height, width, images = dc.shape
    inputs, (down, across) = len(features), taps
    block_out, block_in = _power(outputs, 64, BLOCK), _power(inputs, 16, BLOCK)
    depth, together = _power(images, 32, DEPTH), 3 if across == 3 else 1
    tiles = triton.cdiv(outputs, block_out) * triton.cdiv(inputs, block_in)
    tiles *= down * across // together
    parts = part_count(tiles, height * width * triton.cdiv(images, depth))
    finish = 1 < parts <= FEW_PARTS
    sums = torch.empty((parts, outputs, down, across, inputs), device=dc.device)
    dw = torch.empty_like(sums[0]) if finish else sums[0]
    _weight_gradient[(tiles * parts,)](
        _descriptor(dc.flatten(1), [block_out, depth]),
        _descriptor(features, [block_in, 1, 1, depth]), factor, sums, dw, zeros[-SHARED_TILES:],
        images, unit, height, width, outputs, inputs, down, across, padding, parts, block_out,
        block_in, depth, together, finish, num_warps=8, num_stages=3,
    )  # fmt: skip
    return sums.sum(0) if parts > FEW_PARTS else dw


def part_count(tiles: int, steps: int) -> int:
    """Return into how many parts the steps of each tile are split; none of them is empty."""
    most = max(1, min(PROGRAMS // tiles, steps))
    return triton.cdiv(steps, triton.cdiv(steps, most))


def _power(count: int, low: int, high: int) -> int:
    """Return the power of two that holds a count, within bounds."""
    return max(low, min(high, triton.next_power_of_2(count)))


def _descriptor(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    assert tensor.stride(-1) == 1
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)
