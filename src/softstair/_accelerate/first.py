"""A first layer: a convolution of few channels, whose input needs no gradient.

Its sums have too few products for the tensor cores of a library. A row of the matrix X contains the
inputs of one pixel, at all taps; kernels gather it from the image, which the cache holds. The sums
c = X·W, the largest tensor of many networks, are not stored: every kernel that needs them computes
them again. In the forward pass, one kernel computes their moments and XᵀX, and another the features
(:mod:`softstair._accelerate.batchnorm`). The backward pass computes the gradient of the weights,

    Xᵀdc = s·Xᵀdz + a·(XᵀX)·W + b·Xᵀ1

with the coefficients of :mod:`softstair._accelerate.batchnorm_backward`. Only Xᵀdz needs a pass
over memory, the same that sums dz; dc is not computed. X has a column of ones, so that XᵀX contains
Xᵀ1.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from softstair._accelerate.moments import (
    Normalisation,
    add_partials,
    load_pivot,
    partial_statistics,
    store_coefficients,
    store_partial,
    tile_constants,
    window_row,
)
from softstair._accelerate.stairs import PreparedStair, prepare_from_row
from softstair.kernels.triton import evaluator
from softstair.kernels.triton.convolution import gather, output_sides

__all__ = [
    "First",
    "first_statistics",
    "first_sums",
    "first_weight_gradient",
    "load_matrix",
    "supports_first",
]

LONGEST = 63
"""Most products per sum of a first layer: with the column of ones, X has at most 64 columns."""
ROWS, MOMENT_PROGRAMS, GRADIENT_PROGRAMS = 16, 528, 264
"""Rows of a tile, and most programs of the kernels that sum over rows: of moments, of gradients."""
LENGTH_AT, PRECISION_AT = tl.constexpr(8), tl.constexpr(9)
"""Places of the columns of X and of the precision in FIRST, see :meth:`First.constants`."""
TILES, FEW_CHANNELS = 64, 32
"""Tiles and channels whose partial sums of the gradient are added at a time."""


class First(NamedTuple):
    """A first layer: its quantised weights, channels-last, and the settings of the convolution."""

    weight: Tensor
    stride: int
    padding: tuple[int, int]

    def shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of the sums of an input."""
        outputs, inputs, *taps = self.weight.shape
        if x.shape[1] != inputs:
            problem = f"must have {inputs} channels, but {x.shape[1]} were given"
            raise ValueError(f"the input of a convolution {problem}.")
        strides = (self.stride, self.stride)
        return len(x), outputs, *output_sides(x.shape[2:], taps, strides, self.padding)

    def constants(self, x: Tensor) -> dict[str, Any]:
        """Return the constants of a kernel: those of the sums, and what it needs to compute them.

        FIRST is (height, width and channels of x, taps down and across, padding down and across,
        stride, columns of X, precision).
        """
        _, inputs, *taps = self.weight.shape
        length = max(16, triton.next_power_of_2(self.weight[0].numel() + 1))
        settings = (*taps, *self.padding, self.stride, length, _precision())
        return {**tile_constants(self.shape(x)), "FIRST": (*x.shape[2:], inputs, *settings)}


@triton.jit
def load_taps(x_ptr, row, rows, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr):
    """Rows of X in float32: the taps, a one, and zeros to the length of a row."""
    k, mask = tl.arange(0, FIRST[LENGTH_AT]), row < rows
    taps = gather(
        x_ptr, row, mask, k, HEIGHT, WIDTH, FIRST[0], FIRST[1], FIRST[2], FIRST[3], FIRST[4],
        FIRST[5], FIRST[6], FIRST[7],
    )  # fmt: skip
    ones = mask[:, None] & (k == FIRST[2] * FIRST[3] * FIRST[4])[None, :]
    return tl.where(ones, 1.0, taps.to(tl.float32))


@triton.jit
def load_matrix(weight_ptr, channel, CHANNELS: tl.constexpr, FIRST: tl.constexpr):
    """Columns of W for some channels, with zeros to the length of a row of X."""
    k, products = tl.arange(0, FIRST[LENGTH_AT]), FIRST[2] * FIRST[3] * FIRST[4]
    mask = (channel < CHANNELS)[None, :] & (k < products)[:, None]
    return tl.load(weight_ptr + channel[None, :] * products + k[:, None], mask=mask, other=0)


@triton.jit
def first_sums(
    x_ptr, weights, row, rows, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr
):  # fmt: skip
    """Rows of c in float32, and those of X."""
    taps = load_taps(x_ptr, row, rows, HEIGHT, WIDTH, FIRST).to(weights.dtype)
    return tl.dot(taps, weights, input_precision=FIRST[PRECISION_AT]), taps


@triton.jit
def _first_moments(
    x_ptr, weight_ptr, running_mean_ptr, quanta_ptr, partial_ptr, squares_ptr, rows,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, FIRST: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    LENGTH: tl.constexpr = FIRST[LENGTH_AT]
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel_mask = channel < CHANNELS
    weights = load_matrix(weight_ptr, channel, CHANNELS, FIRST)
    pivot = load_pivot(running_mean_ptr, quanta_ptr, channel, channel_mask, 1.0)[None, :]
    first = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    second = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    squares = tl.zeros((LENGTH, LENGTH), dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        sums, taps = first_sums(x_ptr, weights, row, rows, HEIGHT, WIDTH, FIRST)
        centred = tl.where((row < rows)[:, None], sums - pivot, 0.0)
        first += centred
        second += centred * centred
        if tl.program_id(1) == 0:
            squares = tl.dot(tl.trans(taps), taps, squares, input_precision=FIRST[PRECISION_AT])
    second = tl.sum(second, 0)
    store_partial(partial_ptr, channel, channel_mask, tl.sum(first, 0), second, second, CHANNELS, 2)
    if tl.program_id(1) == 0:
        k = tl.arange(0, LENGTH)
        offsets = (tl.program_id(0) * LENGTH + k[:, None]) * LENGTH + k[None, :]
        tl.store(squares_ptr + offsets, squares)


@triton.jit
def _first_dz(
    products, dy_ptr, argmax_ptr, x_ptr, weights, row, count, channel, mask, scale, shift, prepared,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, COUNT: tl.constexpr,
    FAMILY: tl.constexpr, POOL: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Return dz and the sums of a first layer, computed from its input, and add Xᵀdz.

    With POOL, the sums are those of the pixel of each window that won (argmax).
    """
    pixels: tl.constexpr = 4 if POOL else 1
    offsets = row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0).to(tl.float32)
    if POOL:
        argmax = tl.load(argmax_ptr + offsets, mask=mask, other=0)
    sums, taps = dy, ()
    for j in tl.static_range(pixels):
        source = window_row(row, j, HEIGHT, WIDTH) if POOL else row
        found, own = first_sums(x_ptr, weights, source, count, HEIGHT, WIDTH, FIRST)
        sums = tl.where(argmax == j, found, sums) if j > 0 else found
        taps += (own,)  # type: ignore[assignment]
    dz = dy * evaluator.slope(sums * scale + shift, prepared, COUNT, FAMILY)
    for j in tl.static_range(pixels):
        part = (tl.where(argmax == j, dz, 0.0) if POOL else dz).to(weights.dtype)
        products = tl.dot(tl.trans(taps[j]), part, products, input_precision=FIRST[PRECISION_AT])
    return dz, sums, products


@triton.jit
def _reduce_first(
    dy_ptr, argmax_ptr, x_ptr, weight_ptr, stats_ptr, table, row_ptr, partial_ptr, products_ptr,
    rows, count,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, COUNT: tl.constexpr, FAMILY: tl.constexpr, POOL: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """Sum dz, dz·(c − μ) and Xᵀdz over the rows of this program's tiles."""
    LENGTH: tl.constexpr = FIRST[LENGTH_AT]
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel_mask = channel < CHANNELS
    mean = tl.load(stats_ptr + channel, mask=channel_mask, other=0)[None, :]
    scale = tl.load(stats_ptr + 2 * CHANNELS + channel, mask=channel_mask, other=0)[None, :]
    shift = tl.load(stats_ptr + 3 * CHANNELS + channel, mask=channel_mask, other=0)[None, :]
    prepared = prepare_from_row(row_ptr, table, COUNT, FAMILY, "slope")
    weights = load_matrix(weight_ptr, channel, CHANNELS, FIRST)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    weighted = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    products = tl.zeros((LENGTH, BLOCK), dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & channel_mask[None, :]
        dz, sums, products = _first_dz(
            products, dy_ptr, argmax_ptr, x_ptr, weights, row, count, channel, mask, scale, shift,
            prepared, HEIGHT, WIDTH, CHANNELS, COUNT, FAMILY, POOL, FIRST,
        )  # fmt: skip
        total += dz
        weighted += dz * (sums - mean)
    weighted = tl.sum(weighted, 0)
    store_partial(
        partial_ptr, channel, channel_mask, tl.sum(total, 0), weighted, weighted, CHANNELS, 2
    )
    k = tl.arange(0, LENGTH)
    offsets = (tl.program_id(0) * LENGTH + k[:, None]) * CHANNELS + channel[None, :]
    tl.store(products_ptr + offsets, products, mask=channel_mask[None, :])


@triton.jit
def _first_gradient(
    partial_ptr, stats_ptr, products_ptr, squares_ptr, weight_ptr, coefficients_ptr, out_ptr, tiles,
    square_tiles, rows,
    CHANNELS: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of s·Xᵀdz + a·(XᵀX)·W + b·Xᵀ1 for some channels; tiles are added in float64."""
    LENGTH: tl.constexpr = FIRST[LENGTH_AT]
    k, count, j = tl.program_id(0), tl.num_programs(0), tl.arange(0, LENGTH)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < CHANNELS
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float64)
    for start in range(0, tiles, ROWS):
        tile = start + tl.arange(0, ROWS)[:, None]
        pointers = products_ptr + (tile * LENGTH + k) * CHANNELS + channel[None, :]
        total += tl.load(pointers, mask=(tile < tiles) & mask[None, :], other=0).to(tl.float64)
    squares = tl.zeros((ROWS, LENGTH), dtype=tl.float64)
    for start in range(0, square_tiles, ROWS):
        tile = start + tl.arange(0, ROWS)[:, None]
        pointers = squares_ptr + (tile * LENGTH + k) * LENGTH + j[None, :]
        squares += tl.load(pointers, mask=tile < square_tiles, other=0).to(tl.float64)
    row = tl.sum(squares, 0)
    weights = load_matrix(weight_ptr, channel, CHANNELS, FIRST).to(tl.float64)
    d_beta, weighted, _ = add_partials(partial_ptr, tiles, channel, CHANNELS, ROWS, BLOCK, 2)
    s, a, b = store_coefficients(  # all programs of these channels store the same
        coefficients_ptr, stats_ptr, d_beta, weighted, weighted, channel, mask, rows, 1.0, CHANNELS,
        2,
    )  # fmt: skip
    gradient = s * tl.sum(total, 0) + a * tl.sum(row[:, None] * weights, 0)
    gradient += b * tl.sum(tl.where(j == count, row, 0.0), 0)
    tl.store(out_ptr + channel * count + k, gradient.to(tl.float32), mask=mask)


def supports_first(
    weight: Tensor, stride: object, padding: object, dilation: object, groups: int
) -> bool:
    """Whether the kernels compute such a convolution: one of short sums, with one stride."""
    plain = dilation == (1, 1) and groups == 1 and isinstance(padding, tuple)
    plain = plain and isinstance(stride, tuple) and len({*stride}) == 1
    return plain and weight[0].numel() <= LONGEST and len(weight) >= 16


def first_statistics(x: Tensor, first: First, norm: Normalisation) -> tuple[Tensor, Tensor]:
    """Return the statistics of a first layer's sums, and XᵀX per tile."""
    constants, (images, outputs, *sides) = first.constants(x), first.shape(x)
    rows, length = images * math.prod(sides), constants["FIRST"][LENGTH_AT.value]
    tiles = min(triton.cdiv(rows, ROWS), MOMENT_PROGRAMS)
    partial = torch.empty((tiles, 2, outputs), dtype=torch.float32, device=x.device)
    squares = torch.empty((tiles, length, length), dtype=torch.float32, device=x.device)
    _first_moments[(tiles, triton.cdiv(outputs, constants["BLOCK"]))](
        x, first.weight, norm.module.running_mean, norm.quanta, partial, squares, rows, **constants,
        ROWS=ROWS, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return partial_statistics(partial, norm, rows, 1.0), squares


def first_weight_gradient(
    x: Tensor,
    dy: Tensor,
    first: First,
    stats: Tensor,
    stair: PreparedStair,
    argmax: Tensor | None,
    squares: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the coefficients of the backward pass, and the gradient of the quantised weights in
    float32, in their memory layout."""
    constants, (images, outputs, *sides) = first.constants(x), first.shape(x)
    weight, length = first.weight, constants["FIRST"][LENGTH_AT.value]
    count = images * math.prod(sides)
    rows = dy.numel() // outputs
    tiles = min(triton.cdiv(rows, ROWS), GRADIENT_PROGRAMS)
    partial = torch.empty((tiles, 2, outputs), dtype=torch.float32, device=x.device)
    products = torch.empty((tiles, length, outputs), dtype=torch.float32, device=x.device)
    _reduce_first[(tiles, triton.cdiv(outputs, constants["BLOCK"]))](
        dy, dy if argmax is None else argmax, x, weight, stats, stair.table, stair.row, partial,
        products, rows, count, **constants, **stair.constants, ROWS=ROWS, POOL=argmax is not None,
        num_warps=4, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip
    coefficients = torch.empty((5, outputs), device=x.device)
    gradient = torch.empty_like(weight, dtype=torch.float32)
    _first_gradient[(weight[0].numel(), triton.cdiv(outputs, FEW_CHANNELS))](
        partial, stats, products, squares, weight, coefficients, gradient, tiles, len(squares),
        count, outputs, constants["FIRST"], TILES, FEW_CHANNELS, num_warps=8,
        enable_fp_fusion=True,
    )  # fmt: skip
    return coefficients, gradient


def _precision() -> str:
    """Return the precision of float32 products that torch uses for its own convolutions."""
    cudnn: Any = torch.backends.cudnn
    try:
        tf32 = cudnn.allow_tf32
    except RuntimeError:  # it was set per operation
        tf32 = cudnn.conv.fp32_precision == "tf32"
    return "tf32" if tf32 else "ieee"
