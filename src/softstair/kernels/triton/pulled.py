"""The way back through pooling, stair and normalisation, in two passes over memory.

    dz = dy·slope(z)    dβ = Σdz    dγ = Σdz·ĉ    dc = γ/√(v + ε)·(dz − dβ/n − ĉ·dγ/n)

with ĉ = (c − μ)/√(v + ε) and z = γ·ĉ + β worked out anew from c. The first pass makes the sums; by
channel dc is then s·dz + a·c + b with three numbers, and the second pass writes it. Of the four
that were pooled into one only the largest has a dz.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from softstair.kernels.triton.moments import PROGRAMS, size_of, turn
from softstair.kernels.triton.normalised import ROWS, Steps, block_of, picture_of, row_of
from softstair.kernels.triton.ready import steepness

__all__ = ["pull", "pull_plain", "pull_sums", "risen"]

FLAT = 2048


@triton.jit
def risen(
    gradient,
    place,
    c,
    row,
    channel,
    mask,
    slope,
    offset,
    table,
    ready,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    COUNT: tl.constexpr,
    FAMILY: tl.constexpr,
    KIND: tl.constexpr,
    POOL: tl.constexpr,
):
    """(dz, the sums it belongs to, and which of four they are) for the rows of a tile."""
    here = row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    above = tl.load(gradient + here, mask=mask, other=0).to(tl.float32)
    if POOL:
        winner = tl.load(place + here, mask=mask, other=0)
        source = row_of(row, 0, HEIGHT, WIDTH, ROWS, 4, POOL)
        at = source.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        value = tl.load(c + at, mask=mask, other=0)
        for j in tl.static_range(1, 4):
            step = (j // 2 * WIDTH + j % 2) * CHANNELS
            other = tl.load(c + at + step, mask=mask, other=0)
            value = tl.where(winner == j, other, value)
    else:
        winner = above
        value = tl.load(c + here, mask=mask, other=0)
    value = value.to(tl.float32)
    steep = steepness(value * slope + offset, ready, table, COUNT, FAMILY, KIND)
    return above * steep, value, winner


@triton.jit
def _pull_sums(
    gradient,
    place,
    c,
    statistics,
    table,
    ready,
    partial,
    rows,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    FAMILY: tl.constexpr,
    KIND: tl.constexpr,
    POOL: tl.constexpr,
):
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = channel < CHANNELS
    centre = tl.load(statistics + channel, mask=there, other=0)[None, :]
    slope = tl.load(statistics + 2 * CHANNELS + channel, mask=there, other=0)[None, :]
    offset = tl.load(statistics + 3 * CHANNELS + channel, mask=there, other=0)[None, :]
    first = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    second = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None]
        if CHANNELS % BLOCK != 0:
            mask = mask & there[None, :]
        dz, value, _ = risen(
            gradient, place, c, row, channel, mask, slope, offset, table, ready,
            HEIGHT, WIDTH, CHANNELS, ROWS, COUNT, FAMILY, KIND, POOL,
        )  # fmt: skip
        first += dz
        second += dz * (value - centre)
    at = partial + tl.program_id(0) * 2 * CHANNELS + channel
    tl.store(at, tl.sum(first, 0), mask=there)
    tl.store(at + CHANNELS, tl.sum(second, 0), mask=there)


@triton.jit
def _pull(
    gradient,
    place,
    c,
    statistics,
    table,
    ready,
    turned,
    pulled,
    rows,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    FAMILY: tl.constexpr,
    KIND: tl.constexpr,
    POOL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = channel < CHANNELS
    slope = tl.load(statistics + 2 * CHANNELS + channel, mask=there, other=0)[None, :]
    offset = tl.load(statistics + 3 * CHANNELS + channel, mask=there, other=0)[None, :]
    share = tl.load(turned + 2 * CHANNELS + channel, mask=there, other=0)[None, :]
    by_sums = tl.load(turned + 3 * CHANNELS + channel, mask=there, other=0)[None, :]
    constant = tl.load(turned + 4 * CHANNELS + channel, mask=there, other=0)[None, :]
    mask = (row < rows)[:, None]
    if CHANNELS % BLOCK != 0:
        mask = mask & there[None, :]
    dz, value, winner = risen(
        gradient, place, c, row, channel, mask, slope, offset, table, ready,
        HEIGHT, WIDTH, CHANNELS, ROWS, COUNT, FAMILY, KIND, POOL,
    )  # fmt: skip
    dz = share * dz
    if POOL:
        source = row_of(row, 0, HEIGHT, WIDTH, ROWS, 4, POOL)
        at = source.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        for j in tl.static_range(4):
            step = (j // 2 * WIDTH + j % 2) * CHANNELS
            value = tl.load(c + at + step, mask=mask, other=0).to(tl.float32)
            result = by_sums * value + constant + tl.where(winner == j, dz, 0.0)
            tl.store(pulled + at + step, result.to(pulled.dtype.element_ty), mask=mask)
    else:
        at = row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        result = dz + by_sums * value + constant
        tl.store(pulled + at, result.to(pulled.dtype.element_ty), mask=mask)


@triton.jit
def _pull_plain(
    gradient,
    x,
    table,
    ready,
    pulled,
    count,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    FAMILY: tl.constexpr,
    KIND: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0).to(tl.float32)
    above = tl.load(gradient + at, mask=at < count, other=0).to(tl.float32)
    steep = steepness(value, ready, table, COUNT, FAMILY, KIND)
    tl.store(pulled + at, (above * steep).to(pulled.dtype.element_ty), mask=at < count)


def pull_sums(
    gradient: Tensor,
    c: Tensor,
    statistics: Tensor,
    steps: Steps,
    place: Tensor | None,
    unit: float,
) -> Tensor:
    """What :func:`turn <softstair.kernels.triton.moments.turn>` makes of Σdz and Σdz·(c − μ)."""
    (count, channels), (height, width) = size_of(c), picture_of(c)
    block = block_of(channels)
    rows = count if place is None else count // 4
    wide = triton.cdiv(channels, block)
    tiles = max(1, min(triton.cdiv(rows, ROWS), PROGRAMS // wide))
    partial = torch.empty((tiles, 2, channels), dtype=torch.float32, device=c.device)
    _pull_sums[(tiles, wide)](
        gradient,
        gradient if place is None else place,
        c,
        statistics,
        steps.table,
        steps.ready,
        partial,
        rows,
        height,
        width,
        channels,
        ROWS,
        block,
        steps.number,
        steps.family,
        steps.kind,
        place is not None,
        num_warps=2,
        enable_fp_fusion=True,
    )
    return turn(partial, statistics, count, unit)


def pull(
    gradient: Tensor,
    c: Tensor,
    statistics: Tensor,
    steps: Steps,
    place: Tensor | None,
    turned: Tensor,
) -> Tensor:
    """The gradient of the sums, in the gradient's dtype."""
    (count, channels), (height, width) = size_of(c), picture_of(c)
    block = block_of(channels)
    rows = count if place is None else count // 4
    tile = 2 * ROWS if place is None else ROWS
    pulled = torch.empty_like(c, dtype=gradient.dtype)
    _pull[(triton.cdiv(rows, tile), triton.cdiv(channels, block))](
        gradient,
        gradient if place is None else place,
        c,
        statistics,
        steps.table,
        steps.ready,
        turned,
        pulled,
        rows,
        height,
        width,
        channels,
        tile,
        block,
        steps.number,
        steps.family,
        steps.kind,
        place is not None,
        num_warps=8 if place is None else 4,
        enable_fp_fusion=True,
    )
    return pulled


def pull_plain(gradient: Tensor, x: Tensor, steps: Steps) -> Tensor:
    """The gradient of what a stair took, from that of what it made, both laid out alike."""
    pulled = torch.empty_like(x)
    _pull_plain[(triton.cdiv(x.numel(), FLAT),)](
        gradient,
        x,
        steps.table,
        steps.ready,
        pulled,
        x.numel(),
        FLAT,
        steps.number,
        steps.family,
        steps.kind,
        enable_fp_fusion=True,
    )
    return pulled
