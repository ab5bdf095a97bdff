"""Backward pass of pooling, stair and batch normalisation, in two passes over memory.

    dz = dy·slope(z)    dβ = Σdz    dγ = Σdz·ĉ    dc = γ/√(v + ε)·(dz − dβ/n − ĉ·dγ/n)

with ĉ = (c − μ)/√(v + ε) and z = γ·ĉ + β recomputed from c. The first pass makes the sums; then
dc = s·dz + a·c + b with three coefficients per channel, and the second pass writes it. Of four
elements that were pooled, only the largest has a dz.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from softstair.kernels.triton import evaluator
from softstair.kernels.triton.batchnorm import (
    FEW_CHANNELS,
    ROWS,
    TILES,
    add_partials,
    reduction_grid,
    source_row,
    store_partial,
    tile_constants,
)
from softstair.kernels.triton.prepare import PreparedStair, load

__all__ = ["backward", "coefficients", "load_dz", "reduce_dz", "stair_backward"]

FLAT_BLOCK = 2048


@triton.jit
def load_dz(
    dy_ptr, argmax_ptr, sums_ptr, row, channel, mask, scale, shift, prepared,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
    COUNT: tl.constexpr, FAMILY: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """Load one tile and return (dz, sums, argmax).

    dz = dy·slope(scale·sums + shift). With POOL, each pooled element reads the one of its four
    inputs that won (argmax); the other three have dz = 0.
    """
    offsets = row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0).to(tl.float32)
    if POOL:
        argmax = tl.load(argmax_ptr + offsets, mask=mask, other=0)
        source = source_row(row, 0, HEIGHT, WIDTH, ROWS, 4, POOL)
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
    slope = evaluator.slope(sums * scale + shift, prepared, COUNT, FAMILY, 1, False)
    return dy * slope, sums, argmax


@triton.jit
def _reduce_dz(
    dy_ptr, argmax_ptr, sums_ptr, stats_ptr, table, row_ptr, partial_ptr, rows,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, COUNT: tl.constexpr, FAMILY: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel_mask = channel < CHANNELS
    mean = tl.load(stats_ptr + channel, mask=channel_mask, other=0)[None, :]
    scale = tl.load(stats_ptr + 2 * CHANNELS + channel, mask=channel_mask, other=0)[None, :]
    shift = tl.load(stats_ptr + 3 * CHANNELS + channel, mask=channel_mask, other=0)[None, :]
    prepared = load(row_ptr, table, COUNT, FAMILY, "slope")
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    weighted = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None]
        if CHANNELS % BLOCK != 0:
            mask = mask & channel_mask[None, :]
        dz, sums, _ = load_dz(
            dy_ptr, argmax_ptr, sums_ptr, row, channel, mask, scale, shift, prepared,
            HEIGHT, WIDTH, CHANNELS, ROWS, COUNT, FAMILY, POOL,
        )  # fmt: skip
        total += dz
        weighted += dz * (sums - mean)
    store_partial(
        partial_ptr, channel, channel_mask, tl.sum(total, 0), tl.sum(weighted, 0), CHANNELS
    )


@triton.jit
def _coefficients(
    partial_ptr, stats_ptr, out_ptr, tiles, rows, per_unit,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < CHANNELS
    d_beta, weighted = add_partials(partial_ptr, tiles, channel, CHANNELS, ROWS, BLOCK)
    mean = tl.load(stats_ptr + channel, mask=mask, other=0).to(tl.float64)
    inverse = tl.load(stats_ptr + CHANNELS + channel, mask=mask, other=0).to(tl.float64)
    scale = tl.load(stats_ptr + 2 * CHANNELS + channel, mask=mask, other=0).to(tl.float64)
    d_gamma = inverse * weighted
    s = scale * per_unit
    a = -s * inverse * d_gamma / rows
    b = -s * d_beta / rows - a * mean
    tl.store(out_ptr + channel, d_beta.to(tl.float32), mask=mask)
    tl.store(out_ptr + CHANNELS + channel, d_gamma.to(tl.float32), mask=mask)
    tl.store(out_ptr + 2 * CHANNELS + channel, s.to(tl.float32), mask=mask)
    tl.store(out_ptr + 3 * CHANNELS + channel, a.to(tl.float32), mask=mask)
    tl.store(out_ptr + 4 * CHANNELS + channel, b.to(tl.float32), mask=mask)


@triton.jit
def _backward(
    dy_ptr, argmax_ptr, sums_ptr, stats_ptr, table, row_ptr, coefficients_ptr, dc_ptr, rows,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, COUNT: tl.constexpr, FAMILY: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel_mask = channel < CHANNELS
    scale = tl.load(stats_ptr + 2 * CHANNELS + channel, mask=channel_mask, other=0)[None, :]
    shift = tl.load(stats_ptr + 3 * CHANNELS + channel, mask=channel_mask, other=0)[None, :]
    s = tl.load(coefficients_ptr + 2 * CHANNELS + channel, mask=channel_mask, other=0)[None, :]
    a = tl.load(coefficients_ptr + 3 * CHANNELS + channel, mask=channel_mask, other=0)[None, :]
    b = tl.load(coefficients_ptr + 4 * CHANNELS + channel, mask=channel_mask, other=0)[None, :]
    mask = (row < rows)[:, None]
    if CHANNELS % BLOCK != 0:
        mask = mask & channel_mask[None, :]
    prepared = load(row_ptr, table, COUNT, FAMILY, "slope")
    dz, sums, argmax = load_dz(
        dy_ptr, argmax_ptr, sums_ptr, row, channel, mask, scale, shift, prepared,
        HEIGHT, WIDTH, CHANNELS, ROWS, COUNT, FAMILY, POOL,
    )  # fmt: skip
    dz = s * dz
    if POOL:
        source = source_row(row, 0, HEIGHT, WIDTH, ROWS, 4, POOL)
        offsets = source.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        for j in tl.static_range(4):
            step = (j // 2 * WIDTH + j % 2) * CHANNELS
            sums = tl.load(sums_ptr + offsets + step, mask=mask, other=0).to(tl.float32)
            dc = a * sums + b + tl.where(argmax == j, dz, 0.0)
            tl.store(dc_ptr + offsets + step, dc.to(dc_ptr.dtype.element_ty), mask=mask)
    else:
        offsets = row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        dc = dz + a * sums + b
        tl.store(dc_ptr + offsets, dc.to(dc_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _stair_backward(
    dy_ptr, x_ptr, table, row_ptr, dx_ptr, size,
    BLOCK: tl.constexpr, COUNT: tl.constexpr, FAMILY: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    x = tl.load(x_ptr + offsets, mask=mask, other=0).to(tl.float32)
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0).to(tl.float32)
    prepared = load(row_ptr, table, COUNT, FAMILY, "slope")
    slope = evaluator.slope(x, prepared, COUNT, FAMILY, 1, False)
    tl.store(dx_ptr + offsets, (dy * slope).to(dx_ptr.dtype.element_ty), mask=mask)


def reduce_dz(
    dy: Tensor,
    sums: Tensor,
    stats: Tensor,
    stair: PreparedStair,
    argmax: Tensor | None,
    unit: float,
) -> Tensor:
    """Return the :func:`coefficients` of the backward pass."""
    count = sums.numel() // sums.shape[1]
    rows = count if argmax is None else count // 4
    grid = reduction_grid(rows, sums.shape[1])
    partial = torch.empty((grid[0], 2, sums.shape[1]), dtype=torch.float32, device=sums.device)
    _reduce_dz[grid](
        dy, dy if argmax is None else argmax, sums, stats, stair.table, stair.row, partial, rows,
        **tile_constants(sums), **stair.constants, ROWS=ROWS, POOL=argmax is not None,
        num_warps=2, enable_fp_fusion=True,
    )  # fmt: skip
    return coefficients(partial, stats, count, unit)


def coefficients(partial: Tensor, stats: Tensor, rows: int, unit: float) -> Tensor:
    """Return (dβ, dγ, s, a, b), (5, channels), from Σdz and Σdz·(c − μ) per channel and tile.

    The gradient of unit·c is s·dz + a·c + b.
    """
    tiles, _, channels = partial.shape
    out = torch.empty((5, channels), dtype=torch.float32, device=partial.device)
    _coefficients[(triton.cdiv(channels, FEW_CHANNELS),)](
        partial, stats, out, tiles, rows, 1 / unit, channels, TILES, FEW_CHANNELS,
        enable_fp_fusion=True,
    )  # fmt: skip
    return out


def backward(
    dy: Tensor,
    sums: Tensor,
    stats: Tensor,
    stair: PreparedStair,
    argmax: Tensor | None,
    coefficients: Tensor,
) -> Tensor:
    """Return the gradient of the sums, in dy's dtype."""
    constants = tile_constants(sums)
    rows = dy.numel() // dy.shape[1]
    tile = 2 * ROWS if argmax is None else ROWS
    dc = torch.empty_like(sums, dtype=dy.dtype)
    grid = (triton.cdiv(rows, tile), triton.cdiv(sums.shape[1], constants["BLOCK"]))
    _backward[grid](
        dy, dy if argmax is None else argmax, sums, stats, stair.table, stair.row, coefficients,
        dc, rows, **constants, **stair.constants, ROWS=tile, POOL=argmax is not None,
        num_warps=8 if argmax is None else 4, enable_fp_fusion=True,
    )  # fmt: skip
    return dc


def stair_backward(dy: Tensor, x: Tensor, stair: PreparedStair) -> Tensor:
    """Return dy·slope(x), for weights; both tensors have one memory layout."""
    dx = torch.empty_like(x)
    _stair_backward[(triton.cdiv(x.numel(), FLAT_BLOCK),)](
        dy, x, stair.table, stair.row, dx, x.numel(), BLOCK=FLAT_BLOCK, **stair.constants,
        enable_fp_fusion=True,
    )  # fmt: skip
    return dx
