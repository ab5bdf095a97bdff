"""Moments and statistics of the sums of a layer, for batch normalisation.

Moments are those of c − m with m the running mean, so that the variance is no difference of large
numbers; integers are summed exactly, with m = 0. Every program stores the sums of its tiles, and
the last one to do so adds them all in order, in float64: every run gives the same bits. For the
exact sums, and to count the programs that have stored theirs, each layer has a row of zeros.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

__all__ = [
    "Normalisation",
    "batch_statistics",
    "partial_statistics",
    "running_statistics",
    "tile_constants",
    "zeros_for",
]

CHANNELS = 128
"""Most channels of a tile."""
TILES, FEW_CHANNELS = 512, 4
"""Partial sums that are added at a time: so many tiles of so few channels."""
REDUCED, REDUCED_CHANNELS, PROGRAMS, WARPS = 4096, 64, 132, 4
"""For kernels that sum over rows: elements of a tile, most channels of a tile, most programs (one
per multiprocessor of a large GPU; the last program adds what all have stored) and warps."""
SHARED_TILES = PROGRAMS // 2
"""Most tiles of a gradient of weights that have at least two of these programs each."""
FEW_ROWS, LEAST_CHANNELS = 512, 16
"""With at most so many rows, a tile has at most so many channels: more programs have work then."""
LOADED, SHARED = 4, 99 * 1024
"""Most tiles that these kernels load at a time, and the bytes of shared memory that all of them but
one may take: GPUs of compute capability 8.6, 8.9 and 12.0 have no more for a program."""
ADDED = tl.constexpr(1024)
"""Partial sums of tiles and channels that the last program, alone, adds at a time."""


class Normalisation(NamedTuple):
    """A batch normalisation in training; γ and β may be divided by a quantum."""

    module: nn.BatchNorm1d | nn.BatchNorm2d
    gamma: Tensor
    beta: Tensor
    zeros: Tensor
    """A row of :func:`zeros_for`."""
    quanta: Tensor | None = None
    """Quanta of the weights, one per channel, if the sums count in them."""

    def arguments(self, rows: int, unit: float) -> tuple[Tensor, tuple[Any, ...]]:
        """Return a tensor for (mean, 1/deviation, scale, shift) per channel, (4, channels), and the
        arguments of a kernel that computes them, for so many sums per channel in a ``unit``."""
        norm = self.module
        stats = torch.empty((4, norm.num_features), dtype=torch.float32, device=self.gamma.device)
        tensors = (self.gamma, self.beta, norm.running_mean, norm.running_var)
        numbers = (rows, unit, 1 / unit, norm.eps, norm.momentum)
        return stats, (stats, *tensors, norm.num_batches_tracked, self.quanta, *numbers)


def zeros_for(layers: int, channels: int, device: torch.device) -> Tensor:
    """Return rows of zeros for layers of at most so many channels: two exact sums per channel, two
    counters per block of channels, for the forward and the backward pass, and, at the end, one per
    tile of the gradient of the weights."""
    size = 2 * channels + 2 * triton.cdiv(channels, LEAST_CHANNELS) + SHARED_TILES
    return torch.zeros((layers, size), dtype=torch.int64, device=device)


@triton.jit
def is_last(counter_ptr, programs):
    """Return whether this is the last program to arrive. What the others stored before can then be
    loaded, but not from this multiprocessor's own cache. The last one resets the counter to 0."""
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit
def _moments(
    sums_ptr, partial_ptr, zeros_ptr, stats_ptr, gamma_ptr, beta_ptr, running_mean_ptr,
    running_var_ptr, tracked_ptr, quanta_ptr, rows, unit, per_unit, eps, momentum,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, LOADED: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel_mask = channel < CHANNELS
    pivot = load_pivot(running_mean_ptr, quanta_ptr, channel, channel_mask, per_unit)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    squares = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in tl.range(
        tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=LOADED
    ):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & channel_mask[None, :]
        offsets = row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        sums = tl.load(sums_ptr + offsets, mask=mask, other=0).to(tl.float32)
        sums = tl.where(mask, sums - pivot[None, :], 0.0)
        total += sums
        squares += sums * sums
    first, second = tl.sum(total.to(tl.float64), 0), tl.sum(squares.to(tl.float64), 0)
    store_partial(partial_ptr, channel, channel_mask, first, second, first, CHANNELS, 2)
    if is_last(zeros_ptr + 2 * CHANNELS + tl.program_id(1), tl.num_programs(0)):
        first, second, _ = add_partials(
            partial_ptr, tl.num_programs(0), channel, CHANNELS, ADDED // BLOCK, BLOCK, 2
        )
        store_statistics(
            first, second, pivot, channel, channel_mask, stats_ptr, gamma_ptr, beta_ptr,
            running_mean_ptr, running_var_ptr, tracked_ptr, quanta_ptr, rows, unit, eps, momentum,
            CHANNELS,
        )  # fmt: skip


@triton.jit
def window_row(row, j, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """The row of c that is the j-th pixel of the 2×2 window of a pooled row."""
    across: tl.constexpr = WIDTH // 2
    down: tl.constexpr = HEIGHT // 2
    image, y, x = row // (across * down), row // across % down, row % across
    return (image * HEIGHT + 2 * y + j // 2) * WIDTH + 2 * x + j % 2


@triton.jit
def load_pivot(running_mean_ptr, quanta_ptr, channel, mask, per_unit):
    """The running mean of each channel, in the units of the sums."""
    pivot = tl.load(running_mean_ptr + channel, mask=mask, other=0) * per_unit
    if quanta_ptr is not None:
        pivot = tl.div_rn(pivot, tl.load(quanta_ptr + channel, mask=mask, other=1.0))
    return pivot


@triton.jit
def store_partial(
    partial_ptr, channel, channel_mask, first, second, third, CHANNELS: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """Store two or three sums per channel as this tile's row of (tiles, SUMS, channels)."""
    pointers = partial_ptr + tl.program_id(0) * SUMS * CHANNELS + channel
    tl.store(pointers, first, mask=channel_mask)
    tl.store(pointers + CHANNELS, second, mask=channel_mask)
    if SUMS == 3:
        tl.store(pointers + 2 * CHANNELS, third, mask=channel_mask)


@triton.jit
def add_partials(
    partial_ptr, tiles, channel, CHANNELS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """The sums per channel over all tiles, in float64; the third is 0 if there are two."""
    first = tl.zeros((ROWS, BLOCK), dtype=tl.float64)
    second = tl.zeros((ROWS, BLOCK), dtype=tl.float64)
    third = tl.zeros((ROWS, BLOCK), dtype=tl.float64)
    for start in tl.range(0, tiles, ROWS, loop_unroll_factor=4):
        tile = start + tl.arange(0, ROWS)
        mask = (tile < tiles)[:, None] & (channel < CHANNELS)[None, :]
        pointers = partial_ptr + tile[:, None] * SUMS * CHANNELS + channel[None, :]
        first += _load_partial(pointers, mask)
        second += _load_partial(pointers + CHANNELS, mask)
        if SUMS == 3:
            third += _load_partial(pointers + 2 * CHANNELS, mask)
    return tl.sum(first, 0), tl.sum(second, 0), tl.sum(third, 0)


@triton.jit
def _load_partial(pointers, mask):
    return tl.load(pointers, mask=mask, other=0, cache_modifier=".cg").to(tl.float64)


@triton.jit
def store_statistics(
    total, squares, pivot, channel, mask, stats_ptr, gamma_ptr, beta_ptr, running_mean_ptr,
    running_var_ptr, tracked_ptr, quanta_ptr, rows, unit, eps, momentum, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Store what follows from the moments of c about a pivot, and update the running statistics,
    which are those of unit·c; a channel's own quantum multiplies its unit."""
    if quanta_ptr is not None:
        unit *= tl.load(quanta_ptr + channel, mask=mask, other=1.0)
    beyond = total / rows
    mean = pivot.to(tl.float64) + beyond
    variance = tl.maximum(squares / rows - beyond * beyond, 0.0)
    # c counts in units: the statistics of unit·c are unit·mean and unit²·variance.
    inverse = 1 / tl.sqrt(variance + eps / unit / unit)
    scale = tl.load(gamma_ptr + channel, mask=mask, other=0).to(tl.float64) * inverse
    shift = tl.load(beta_ptr + channel, mask=mask, other=0).to(tl.float64) - mean * scale
    tl.store(stats_ptr + channel, mean.to(tl.float32), mask=mask)
    tl.store(stats_ptr + CHANNELS + channel, inverse.to(tl.float32), mask=mask)
    tl.store(stats_ptr + 2 * CHANNELS + channel, scale.to(tl.float32), mask=mask)
    tl.store(stats_ptr + 3 * CHANNELS + channel, shift.to(tl.float32), mask=mask)
    before = tl.load(running_mean_ptr + channel, mask=mask, other=0)
    now = before + momentum * ((mean * unit).to(tl.float32) - before)
    tl.store(running_mean_ptr + channel, now, mask=mask)
    before = tl.load(running_var_ptr + channel, mask=mask, other=0)
    unbiased = (variance * unit * unit * (rows / (rows - 1.0))).to(tl.float32)
    tl.store(running_var_ptr + channel, before + momentum * (unbiased - before), mask=mask)
    tracked = tl.load(tracked_ptr + channel, mask=channel == 0, other=0)
    tl.store(tracked_ptr + channel, tracked + 1, mask=channel == 0)


@triton.jit
def store_coefficients(
    out_ptr, stats_ptr, d_beta, weighted, squares, channel, mask, rows, per_unit,
    CHANNELS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Store (dβ, dγ, s, a, b) and, of three SUMS, √(Σ(s·dz)²/n); return (s, a, b)."""
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
    if SUMS == 3:
        size = tl.abs(s) * tl.sqrt(squares / rows)
        tl.store(out_ptr + 5 * CHANNELS + channel, size.to(tl.float32), mask=mask)
    return s, a, b


@triton.jit
def _statistics(
    partial_ptr, stats_ptr, gamma_ptr, beta_ptr, running_mean_ptr, running_var_ptr, tracked_ptr,
    quanta_ptr, rows, unit, per_unit, eps, momentum, tiles,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < CHANNELS
    total, squares, _ = add_partials(partial_ptr, tiles, channel, CHANNELS, ROWS, BLOCK, 2)
    pivot = load_pivot(running_mean_ptr, quanta_ptr, channel, mask, per_unit)
    if partial_ptr.dtype.element_ty == tl.int64:
        pivot = tl.zeros((BLOCK,), dtype=tl.float32)
    store_statistics(
        total, squares, pivot, channel, mask, stats_ptr, gamma_ptr, beta_ptr, running_mean_ptr,
        running_var_ptr, tracked_ptr, quanta_ptr, rows, unit, eps, momentum, CHANNELS,
    )  # fmt: skip


def batch_statistics(sums: Tensor, norm: Normalisation, unit: float = 1.0) -> Tensor:
    """Return (mean, 1/deviation, scale, shift) of sums per channel, (4, channels), and update the
    running statistics, which are those of unit·sums."""
    channels = sums.shape[1]
    rows = sums.numel() // channels
    grid, constants = reduction(sums, rows)
    partial = torch.empty((grid[0], 2, channels), dtype=torch.float32, device=sums.device)
    stats, arguments = norm.arguments(rows, unit)
    _moments[grid](
        sums, partial, norm.zeros, *arguments, channels, constants["ROWS"], constants["BLOCK"],
        constants["LOADED"], num_warps=WARPS, enable_fp_fusion=True,
    )  # fmt: skip
    return stats


def partial_statistics(partial: Tensor, norm: Normalisation, rows: int, unit: float) -> Tensor:
    """Do what :func:`batch_statistics` does, from moments per channel and tile, (tiles, 2,
    channels): about the running mean, or of integers about 0."""
    tiles, _, channels = partial.shape
    stats, arguments = norm.arguments(rows, unit)
    _statistics[(triton.cdiv(channels, FEW_CHANNELS),)](
        partial, *arguments, tiles, channels, min(TILES, triton.next_power_of_2(tiles)),
        FEW_CHANNELS, enable_fp_fusion=True,
    )  # fmt: skip
    return stats


def running_statistics(norm: nn.BatchNorm1d | nn.BatchNorm2d, unit: float | Tensor) -> Tensor:
    """Return (mean, 1/deviation, scale, shift) per channel, (4, channels), for sums in a unit, or
    in one unit per channel."""
    mean, variance = norm.get_buffer("running_mean"), norm.get_buffer("running_var")
    inverse = (variance.double() + norm.eps).rsqrt()
    scale = norm.get_parameter("weight").double() * inverse
    shift = norm.get_parameter("bias").double() - mean * scale
    rows = (mean.double() / unit, inverse * unit, scale * unit, shift)
    return torch.stack(rows).float()


def tile_constants(shape: Sequence[int]) -> dict[str, int]:
    """Return what a kernel must know of the shape of c; rows of a matrix are images of 1×1."""
    _, channels, height, width = shape if len(shape) == 4 else (*shape, 1, 1)
    block = min(CHANNELS, triton.next_power_of_2(channels))
    return {"HEIGHT": height, "WIDTH": width, "CHANNELS": channels, "BLOCK": block}


def reduction(
    sums: Tensor, rows: int, pooled: bool = False, others: Sequence[Tensor] = ()
) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid (tiles, blocks of channels) and the constants of a kernel that sums over so
    many rows of ``sums`` and ``others``.

    Each row of pooled features reads four rows of ``sums``: a tile has half as many rows then.
    """
    constants = tile_constants(sums.shape)
    most = LEAST_CHANNELS if rows <= FEW_ROWS else REDUCED_CHANNELS
    constants["BLOCK"] = block = min(most, constants["BLOCK"])
    constants["ROWS"] = tile = REDUCED // block // (2 if pooled else 1)
    size = sums.element_size() * (4 if pooled else 1) + sum(map(Tensor.element_size, others))
    constants["LOADED"] = min(LOADED, 1 + SHARED // (tile * block * size))
    blocks = triton.cdiv(sums.shape[1], block)
    tiles = max(1, min(triton.cdiv(rows, tile), PROGRAMS // blocks))
    return (tiles, blocks), constants
