"""Sums over the rows of a tensor of channels, tile by tile, and the statistics that come of them.

What is summed is c − shift, the shift being the running mean: a variance is then no difference of
large numbers. The tiles are added up in their order, in float64: the same in every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

__all__ = ["finish", "moments", "size_of", "turn"]

ROWS, CHANNELS = 16, 128
"""Of a tile."""
TILES, NARROW = 128, 8
"""What is added up at a time: so many tiles of so few channels."""
PROGRAMS = 1056
"""Eight for each of the 132 multiprocessors of a large GPU."""


@triton.jit
def _moments(
    c, running_mean, partial, rows, CHANNELS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = channel < CHANNELS
    shift = tl.load(running_mean + channel, mask=there, other=0)[None, :]
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    squares = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & there[None, :]
        at = row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        value = tl.load(c + at, mask=mask, other=0).to(tl.float32)
        value = tl.where(mask, value - shift, 0.0)
        total += value
        squares += value * value
    at = partial + tl.program_id(0) * 2 * CHANNELS + channel
    tl.store(at, tl.sum(total, 0), mask=there)
    tl.store(at + CHANNELS, tl.sum(squares, 0), mask=there)


@triton.jit
def _sums(partial, tiles, channel, CHANNELS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Both rows of the tiles' sums, added up."""
    first = tl.zeros((ROWS, BLOCK), dtype=tl.float64)
    second = tl.zeros((ROWS, BLOCK), dtype=tl.float64)
    for start in range(0, tiles, ROWS):
        tile = start + tl.arange(0, ROWS)
        mask = (tile < tiles)[:, None] & (channel < CHANNELS)[None, :]
        at = partial + tile[:, None] * 2 * CHANNELS + channel[None, :]
        first += tl.load(at, mask=mask, other=0).to(tl.float64)
        second += tl.load(at + CHANNELS, mask=mask, other=0).to(tl.float64)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def _turn(
    partial,
    statistics,
    turned,
    tiles,
    rows,
    per_unit,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = channel < CHANNELS
    total, weighted = _sums(partial, tiles, channel, CHANNELS, ROWS, BLOCK)
    centre = tl.load(statistics + channel, mask=there, other=0).to(tl.float64)
    inverse = tl.load(statistics + CHANNELS + channel, mask=there, other=0).to(tl.float64)
    slope = tl.load(statistics + 2 * CHANNELS + channel, mask=there, other=0).to(tl.float64)
    gamma = inverse * weighted
    share = slope * per_unit
    by_sums = -share * inverse * gamma / rows
    constant = -share * total / rows - by_sums * centre
    tl.store(turned + channel, total.to(tl.float32), mask=there)
    tl.store(turned + CHANNELS + channel, gamma.to(tl.float32), mask=there)
    tl.store(turned + 2 * CHANNELS + channel, share.to(tl.float32), mask=there)
    tl.store(turned + 3 * CHANNELS + channel, by_sums.to(tl.float32), mask=there)
    tl.store(turned + 4 * CHANNELS + channel, constant.to(tl.float32), mask=there)


@triton.jit
def _finish(
    partial,
    statistics,
    gamma,
    beta,
    running_mean,
    running_var,
    tracked,
    tiles,
    rows,
    unit,
    per_unit,
    eps,
    momentum,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = channel < CHANNELS
    total, squares = _sums(partial, tiles, channel, CHANNELS, ROWS, BLOCK)
    before = tl.load(running_mean + channel, mask=there, other=0)
    shift = before * per_unit
    beyond = total / rows
    mean = shift.to(tl.float64) + beyond
    variance = tl.maximum(squares / rows - beyond * beyond, 0.0)
    # c counts in units: the statistics of unit·c are unit·mean and unit²·variance.
    inverse = 1 / tl.sqrt(variance + eps / unit / unit)
    slope = tl.load(gamma + channel, mask=there, other=0).to(tl.float64) * inverse
    offset = tl.load(beta + channel, mask=there, other=0).to(tl.float64) - mean * slope
    tl.store(statistics + channel, mean.to(tl.float32), mask=there)
    tl.store(statistics + CHANNELS + channel, inverse.to(tl.float32), mask=there)
    tl.store(statistics + 2 * CHANNELS + channel, slope.to(tl.float32), mask=there)
    tl.store(statistics + 3 * CHANNELS + channel, offset.to(tl.float32), mask=there)
    now = before + momentum * ((mean * unit).to(tl.float32) - before)
    tl.store(running_mean + channel, now, mask=there)
    before = tl.load(running_var + channel, mask=there, other=0)
    unbiased = (variance * unit * unit * (rows / (rows - 1.0))).to(tl.float32)
    tl.store(running_var + channel, before + momentum * (unbiased - before), mask=there)
    if tl.program_id(0) == 0:
        tl.store(tracked, tl.load(tracked) + 1)


def moments(c: Tensor, running_mean: Tensor) -> Tensor:
    """Σ(c − shift) and Σ(c − shift)² of each channel by tile, (tiles, 2, channels)."""
    rows, channels = size_of(c)
    block = min(CHANNELS, triton.next_power_of_2(channels))
    wide = triton.cdiv(channels, block)
    tiles = max(1, min(triton.cdiv(rows, ROWS), PROGRAMS // wide))
    partial = torch.empty((tiles, 2, channels), dtype=torch.float32, device=c.device)
    _moments[(tiles, wide)](
        c, running_mean, partial, rows, channels, ROWS, block, enable_fp_fusion=True
    )
    return partial


def turn(partial: Tensor, statistics: Tensor, rows: int, unit: float) -> Tensor:
    """(dβ, dγ, s, a, b), (5, channels), from Σdz and Σdz·(c − μ) of each channel by tile; the
    gradient of unit·c is s·dz + a·c + b."""
    tiles, _, channels = partial.shape
    turned = torch.empty((5, channels), dtype=torch.float32, device=partial.device)
    _turn[(triton.cdiv(channels, NARROW),)](
        partial,
        statistics,
        turned,
        tiles,
        rows,
        1 / unit,
        channels,
        TILES,
        NARROW,
        enable_fp_fusion=True,
    )
    return turned


def finish(partial: Tensor, norm: nn.Module, rows: int, unit: float) -> Tensor:
    """(mean, 1/deviation, slope, offset) of each channel, (4, channels), from what the tiles have
    seen; the running statistics of unit·c move on."""
    channels = partial.shape[2]
    statistics = torch.empty((4, channels), dtype=torch.float32, device=partial.device)
    _finish[(triton.cdiv(channels, NARROW),)](
        partial,
        statistics,
        norm.weight,
        norm.bias,
        norm.running_mean,
        norm.running_var,
        norm.num_batches_tracked,
        len(partial),
        rows,
        unit,
        1 / unit,
        norm.eps,
        norm.momentum,
        channels,
        TILES,
        NARROW,
        enable_fp_fusion=True,
    )
    return statistics


def size_of(c: Tensor) -> tuple[int, int]:
    """(rows, channels) as they lie in memory."""
    return c.numel() // c.shape[1], c.shape[1]
