"""Backward pass of pooling, stair and batch normalisation, in two passes over memory.

    dz = dy·slope(z)    dβ = Σdz    dγ = Σdz·ĉ    dc = γ/√(v + ε)·(dz − dβ/n − ĉ·dγ/n)

with ĉ = (c − μ)/√(v + ε) and z = γ·ĉ + β recomputed from c. The first pass makes the sums; then
dc = s·dz + a·c + b with three coefficients per channel, and the second pass writes it. Of four
elements that were pooled, only the largest has a dz. A shortcut that was added to z, without
pooling, has the gradient dz.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from softstair._accelerate.batchnorm import (
    ELEMENTS,
    IMAGES,
    images_last,
    store_transposed,
    tile_rows,
)
from softstair._accelerate.moments import (
    ADDED,
    WARPS,
    add_partials,
    is_last,
    reduction,
    store_coefficients,
    store_partial,
    tile_constants,
    window_row,
)
from softstair._accelerate.stairs import PreparedStair, prepare_from_row
from softstair.kernels.triton import evaluator

__all__ = ["backward", "reduce_dz", "stair_backward"]

FLAT_BLOCK = 2048


@triton.jit
def _load_dz(
    dy_ptr, argmax_ptr, sums_ptr, shortcut_ptr, row, channel, mask, scale, shift, prepared,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
    COUNT: tl.constexpr, FAMILY: tl.constexpr, POOL: tl.constexpr, SHORTCUT: tl.constexpr,
):  # fmt: skip
    """Load one tile and return (dz, sums, argmax).

    dz = dy·slope(scale·sums + shift + shortcut). With POOL, each pooled element reads the one of
    its four inputs that won (argmax); the other three have dz = 0.
    """
    offsets = row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0).to(tl.float32)
    if POOL:
        argmax = tl.load(argmax_ptr + offsets, mask=mask, other=0)
        source = window_row(row, 0, HEIGHT, WIDTH)
        offsets = source.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        sums = tl.load(sums_ptr + offsets, mask=mask, other=0)
        for j in tl.static_range(1, 4):
            step = (j // 2 * WIDTH + j % 2) * CHANNELS
            other = tl.load(sums_ptr + offsets + step, mask=mask, other=0)
            sums = tl.where(argmax == j, other, sums)
    else:
        argmax = dy
        sums = tl.load(sums_ptr + offsets, mask=mask, other=0)
    sums = sums.to(tl.float32)
    z = sums * scale + shift
    if SHORTCUT:
        z += tl.load(shortcut_ptr + offsets, mask=mask, other=0).to(tl.float32)
    slope = evaluator.slope(z, prepared, COUNT, FAMILY)
    return dy * slope, sums, argmax


@triton.jit
def _reduce_dz(
    dy_ptr, argmax_ptr, sums_ptr, shortcut_ptr, stats_ptr, table, row_ptr, partial_ptr,
    coefficients_ptr, zeros_ptr, rows, count, per_unit,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, COUNT: tl.constexpr, FAMILY: tl.constexpr, POOL: tl.constexpr,
    SHORTCUT: tl.constexpr, SUMS: tl.constexpr, LOADED: tl.constexpr,
):  # fmt: skip
    """Sum dz, dz·(c − μ) and, of three SUMS, dz² over the rows of this program's tiles. The last
    program stores the coefficients."""
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel_mask = channel < CHANNELS
    mean = tl.load(stats_ptr + channel, mask=channel_mask, other=0)[None, :]
    scale = tl.load(stats_ptr + 2 * CHANNELS + channel, mask=channel_mask, other=0)[None, :]
    shift = tl.load(stats_ptr + 3 * CHANNELS + channel, mask=channel_mask, other=0)[None, :]
    prepared = prepare_from_row(row_ptr, table, COUNT, FAMILY, "slope")
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    weighted = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    squares = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in tl.range(
        tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=LOADED
    ):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None]
        if CHANNELS % BLOCK != 0:
            mask = mask & channel_mask[None, :]
        dz, sums, _ = _load_dz(
            dy_ptr, argmax_ptr, sums_ptr, shortcut_ptr, row, channel, mask, scale, shift, prepared,
            HEIGHT, WIDTH, CHANNELS, ROWS, COUNT, FAMILY, POOL, SHORTCUT,
        )  # fmt: skip
        total += dz
        weighted += dz * (sums - mean)
        if SUMS == 3:
            squares += dz * dz
    store_partial(
        partial_ptr, channel, channel_mask, tl.sum(total, 0), tl.sum(weighted, 0),
        tl.sum(squares, 0), CHANNELS, SUMS,
    )  # fmt: skip
    tiles, blocks = tl.num_programs(0), tl.num_programs(1)
    if is_last(zeros_ptr + 2 * CHANNELS + blocks + tl.program_id(1), tiles):
        sums = add_partials(partial_ptr, tiles, channel, CHANNELS, ADDED // BLOCK, BLOCK, SUMS)
        store_coefficients(
            coefficients_ptr, stats_ptr, sums[0], sums[1], sums[2], channel, channel_mask, count,
            per_unit, CHANNELS, SUMS,
        )  # fmt: skip


@triton.jit
def _power_of_two(sizes_ptr, CHANNELS: tl.constexpr):
    """The power of two that brings the largest of the sizes to [1, 2)."""
    channel = tl.arange(0, triton.next_power_of_2(CHANNELS))
    largest = tl.max(tl.load(sizes_ptr + channel, mask=channel < CHANNELS, other=0), 0)
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    return ((254 - tl.minimum(tl.maximum(exponent, 2), 252)) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _backward(
    dy_ptr, argmax_ptr, sums_ptr, shortcut_ptr, stats_ptr, table, row_ptr, coefficients_ptr, dc_ptr,
    transposed_ptr, factor_ptr, dz_ptr, rows, images,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, COUNT: tl.constexpr, FAMILY: tl.constexpr, POOL: tl.constexpr,
    SHORTCUT: tl.constexpr, TRANSPOSE: tl.constexpr,
):  # fmt: skip
    positions: tl.constexpr = HEIGHT * WIDTH // (4 if POOL else 1)
    row, image, position, row_mask = tile_rows(rows, images, 0, positions, ROWS, 1, TRANSPOSE)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel_mask = channel < CHANNELS
    scale = tl.load(stats_ptr + 2 * CHANNELS + channel, mask=channel_mask, other=0)[None, :]
    shift = tl.load(stats_ptr + 3 * CHANNELS + channel, mask=channel_mask, other=0)[None, :]
    s = tl.load(coefficients_ptr + 2 * CHANNELS + channel, mask=channel_mask, other=0)[None, :]
    a = tl.load(coefficients_ptr + 3 * CHANNELS + channel, mask=channel_mask, other=0)[None, :]
    b = tl.load(coefficients_ptr + 4 * CHANNELS + channel, mask=channel_mask, other=0)[None, :]
    mask = row_mask[:, None]
    if CHANNELS % BLOCK != 0:
        mask = mask & channel_mask[None, :]
    prepared = prepare_from_row(row_ptr, table, COUNT, FAMILY, "slope")
    dz, sums, argmax = _load_dz(
        dy_ptr, argmax_ptr, sums_ptr, shortcut_ptr, row, channel, mask, scale, shift, prepared,
        HEIGHT, WIDTH, CHANNELS, ROWS, COUNT, FAMILY, POOL, SHORTCUT,
    )  # fmt: skip
    power = 1.0
    if TRANSPOSE:  # after the loads, which do not wait for the maximum then
        power = _power_of_two(coefficients_ptr + 5 * CHANNELS, CHANNELS)
        tl.store(factor_ptr, 1 / power)
    if SHORTCUT:
        offsets = row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        tl.store(dz_ptr + offsets, dz.to(dz_ptr.dtype.element_ty), mask=mask)
    dz = s * dz
    source = window_row(row, 0, HEIGHT, WIDTH) if POOL else row
    offsets = source.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    for j in tl.static_range(4 if POOL else 1):
        step = (j // 2 * WIDTH + j % 2) * CHANNELS
        if POOL:
            sums = tl.load(sums_ptr + offsets + step, mask=mask, other=0).to(tl.float32)
        dc = power * (a * sums + b + (tl.where(argmax == j, dz, 0.0) if POOL else dz))
        tl.store(dc_ptr + offsets + step, dc.to(dc_ptr.dtype.element_ty), mask=mask)
        if TRANSPOSE:
            pixel = window_row(position, j, HEIGHT, WIDTH) if POOL else position
            index = pixel * images + image
            # ptxas 12.8 loses bytes of a value that is rounded to FP8 once and stored both ways.
            dc += 0.0  # rounded again: the compiler must keep the addition
            store_transposed(transposed_ptr, dc, channel, index, mask, images * HEIGHT * WIDTH)


@triton.jit
def _stair_backward(
    dy_ptr, x_ptr, table, row_ptr, dx_ptr, size,
    BLOCK: tl.constexpr, COUNT: tl.constexpr, FAMILY: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    x = tl.load(x_ptr + offsets, mask=mask, other=0).to(tl.float32)
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0).to(tl.float32)
    prepared = prepare_from_row(row_ptr, table, COUNT, FAMILY, "slope")
    slope = evaluator.slope(x, prepared, COUNT, FAMILY)
    tl.store(dx_ptr + offsets, (dy * slope).to(dx_ptr.dtype.element_ty), mask=mask)


def reduce_dz(
    dy: Tensor,
    sums: Tensor,
    stats: Tensor,
    stair: PreparedStair,
    argmax: Tensor | None,
    unit: float,
    zeros: Tensor,
    shortcut: Tensor | None = None,
    sizes: bool = False,
) -> Tensor:
    """Return (dβ, dγ, s, a, b), (5, channels): the gradient of unit·c is s·dz + a·c + b.

    With ``sizes`` there is a sixth row, √(Σ(s·dz)²/n). The ``zeros`` are a row of
    :func:`~softstair._accelerate.moments.zeros_for`.
    """
    channels = sums.shape[1]
    count = sums.numel() // channels
    rows, number = count if argmax is None else count // 4, 3 if sizes else 2
    others = [tensor for tensor in (dy, argmax, shortcut) if tensor is not None]
    grid, constants = reduction(sums, rows, argmax is not None, others)
    partial = torch.empty((grid[0], number, channels), device=sums.device)
    coefficients = torch.empty((3 + number, channels), device=sums.device)
    _reduce_dz[grid](
        dy, dy if argmax is None else argmax, sums, sums if shortcut is None else shortcut, stats,
        stair.table, stair.row, partial, coefficients, zeros, rows, count, 1 / unit, **constants,
        **stair.constants, POOL=argmax is not None, SHORTCUT=shortcut is not None, SUMS=number,
        num_warps=WARPS, enable_fp_fusion=True,
    )  # fmt: skip
    return coefficients


class SumGradient(NamedTuple):
    """Gradients of the sums, of the shortcut and, in FP8, those of the sums with images last,
    (C, H, W, N), and the scalar by which both are to be multiplied."""

    dc: Tensor
    shortcut: Tensor | None
    transposed: Tensor | None
    factor: Tensor | None

    @property
    def for_weights(self) -> tuple[Tensor | None, ...]:
        """The tensors from which the gradient of the weights is computed."""
        return self.dc if self.transposed is None else self.transposed, self.factor


def backward(
    dy: Tensor,
    sums: Tensor,
    stats: Tensor,
    stair: PreparedStair,
    argmax: Tensor | None,
    coefficients: Tensor,
    shortcut: Tensor | None = None,
) -> SumGradient:
    """Return the gradients of the sums and of the shortcut, in dy's dtype and its own.

    With six rows of coefficients, the gradient of the sums is rounded to FP8 (E5M2). A power of two
    brings the largest size of a channel to [1, 2), so that no element can be too large for it: it
    is at most √n times the size.
    """
    constants = tile_constants(sums.shape)
    rows = dy.numel() // dy.shape[1]
    tile = ELEMENTS // constants["BLOCK"] * (2 if argmax is None else 1)
    count, float8 = triton.cdiv(rows, tile), len(coefficients) == 6
    transposed = factor = None
    if float8:
        tile, constants["BLOCK"] = IMAGES, min(IMAGES, constants["BLOCK"])
        count = triton.cdiv(len(dy), tile) * (rows // len(dy))
        transposed = images_last(sums, torch.float8_e5m2)
        factor = torch.empty((), device=dy.device)
    dc = torch.empty_like(sums, dtype=torch.float8_e5m2 if float8 else dy.dtype)
    dz = None if shortcut is None else torch.empty_like(shortcut)
    _backward[(count, triton.cdiv(sums.shape[1], constants["BLOCK"]))](
        dy, dy if argmax is None else argmax, sums, sums if shortcut is None else shortcut, stats,
        stair.table, stair.row, coefficients, dc, dc if transposed is None else transposed,
        stats if factor is None else factor, dc if dz is None else dz, rows, len(dy), **constants,
        **stair.constants, ROWS=tile, POOL=argmax is not None, SHORTCUT=dz is not None,
        TRANSPOSE=float8, num_warps=4 if float8 or argmax is not None else 8, enable_fp_fusion=True,
    )  # fmt: skip
    return SumGradient(dc, dz, transposed, factor)


def stair_backward(dy: Tensor, x: Tensor, stair: PreparedStair) -> Tensor:
    """Return dy·slope(x), for weights; dy has the memory layout of x."""
    dx, size = torch.empty_like(x), x.numel()
    _stair_backward[(triton.cdiv(size, FLAT_BLOCK),)](
        dy, x, stair.table, stair.row, dx, size, BLOCK=FLAT_BLOCK, **stair.constants,
        enable_fp_fusion=True,
    )  # fmt: skip
    return dx
