"""Batch normalisation, the stair and max-pooling in one pass over memory.

A layer's sums c, (rows, channels) in memory, are read once: normalised, climbed, pooled and
written, as numbers and, where a convolution of whole numbers follows, as int8.

    z = γ·(c − μ)/√(v + ε) + β = slope·c + offset        y = the stair's value at z

Nothing else is kept for the backward pass but c itself, which any normalisation keeps, and for
pooling which of four was the largest, a byte.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from softstair.kernels.triton import shapes
from softstair.kernels.triton.moments import size_of
from softstair.kernels.triton.ready import ascend

__all__ = ["Climbed", "Steps", "block_of", "climb", "format_of", "picture_of", "row_of"]

ROWS, CHANNELS = 16, 128
"""Of a tile, or of each of the four that belong together."""


class Steps(NamedTuple):
    """A stair as the kernels take it: its table, and what its present noise makes of it."""

    table: Tensor
    ready: Tensor
    number: int
    family: str
    kind: str


class Climbed(NamedTuple):
    """The features; the same in quanta, as int8; which of four each came from, if pooled."""

    y: Tensor
    whole: Tensor | None
    place: Tensor | None


@triton.jit
def row_of(
    row,
    j,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    POOL: tl.constexpr,
):
    """The j-th of the rows of c that belong to a row of a tile: those of one window, or of tiles
    that follow each other."""
    if POOL:
        across: tl.constexpr = WIDTH // 2
        down: tl.constexpr = HEIGHT // 2
        image, y, x = row // (across * down), row // across % down, row % across
        found = (image * HEIGHT + 2 * y + j // 2) * WIDTH + 2 * x + j % 2
    else:
        found = row // ROWS * (PARTS * ROWS) + j * ROWS + row % ROWS
    return found


@triton.jit
def _climb(
    c,
    y,
    whole,
    place,
    statistics,
    table,
    ready,
    seed,
    rows,
    per_quantum,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    FAMILY: tl.constexpr,
    FORWARD: tl.constexpr,
    KIND: tl.constexpr,
    PARTS: tl.constexpr,
    NORMALISED: tl.constexpr,
    POOL: tl.constexpr,
    WHOLE: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = channel < CHANNELS
    if NORMALISED:
        slope = tl.load(statistics + 2 * CHANNELS + channel, mask=there, other=0)[None, :]
        offset = tl.load(statistics + 3 * CHANNELS + channel, mask=there, other=0)[None, :]
    if FORWARD == "random":
        # One counter for the four: each of its words is another's draw.
        number = row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        low, high = number.to(tl.int32), (number >> 32).to(tl.int32)
        words = tl.philox(tl.load(seed), low, high, low * 0, low * 0, shapes.ROUNDS)
    best = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    winner = tl.zeros((ROWS, BLOCK), dtype=tl.int8)
    for j in tl.static_range(PARTS):
        source = row_of(row, j, HEIGHT, WIDTH, ROWS, PARTS, POOL)
        mask = ((row < rows) if POOL else (source < rows))[:, None]
        if CHANNELS % BLOCK != 0:
            mask = mask & there[None, :]
        at = source.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        z = tl.load(c + at, mask=mask, other=0).to(tl.float32)
        if NORMALISED:
            z = z * slope + offset
        word = z
        if FORWARD == "random":
            word = words[j]
        value = ascend(z, ready, table, word, COUNT, FAMILY, FORWARD, KIND)
        if POOL and j > 0:
            better = (value > best) | (value != value)
            best = tl.where(better, value, best)
            winner = tl.where(better, j, winner).to(tl.int8)
        elif POOL:
            best = value
        else:
            tl.store(y + at, value.to(y.dtype.element_ty), mask=mask)
            if WHOLE:
                tl.store(whole + at, tl.floor(value * per_quantum + 0.5).to(tl.int8), mask=mask)
    if POOL:
        mask = (row < rows)[:, None] & there[None, :]
        at = row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        tl.store(y + at, best.to(y.dtype.element_ty), mask=mask)
        tl.store(place + at, winner, mask=mask)
        if WHOLE:
            tl.store(whole + at, tl.floor(best * per_quantum + 0.5).to(tl.int8), mask=mask)


def climb(
    c: Tensor,
    statistics: Tensor | None,
    steps: Steps,
    forward: str,
    seed: Tensor,
    dtype: torch.dtype,
    pool: bool = False,
    quantum: float | None = None,
) -> Climbed:
    """The stair's values at slope·c + offset (at c itself, without statistics), pooled if asked;
    also as int8, in quanta, if given the quantum."""
    (rows, channels), (height, width) = size_of(c), picture_of(c)
    block = block_of(channels)
    parts = 4 if pool or forward == "random" else 1
    tile = ROWS if parts == 4 else 2 * ROWS
    shape = (*c.shape[:2], height // 2, width // 2) if pool else c.shape
    y = torch.empty(shape, dtype=dtype, device=c.device, memory_format=format_of(c))
    whole = y if quantum is None else torch.empty_like(y, dtype=torch.int8)
    place = torch.empty_like(y, dtype=torch.int8) if pool else y
    rows = rows // 4 if pool else rows
    grid = (triton.cdiv(rows, tile if pool else parts * tile), triton.cdiv(channels, block))
    _climb[grid](
        c,
        y,
        whole,
        place,
        c if statistics is None else statistics,
        steps.table,
        steps.ready,
        seed,
        rows,
        1.0 if quantum is None else 1 / quantum,
        height,
        width,
        channels,
        tile,
        block,
        steps.number,
        steps.family,
        forward,
        steps.kind,
        parts,
        statistics is not None,
        pool,
        quantum is not None,
        num_warps=4 if forward == "random" else 2,
        enable_fp_fusion=True,
    )
    return Climbed(y, None if quantum is None else whole, place if pool else None)


def picture_of(c: Tensor) -> tuple[int, int]:
    """(height, width) of what has them, or of a single pixel."""
    return (c.shape[2], c.shape[3]) if c.dim() == 4 else (1, 1)


def format_of(c: Tensor) -> torch.memory_format:
    """That in which c lies as rows of channels."""
    return torch.channels_last if c.dim() == 4 else torch.contiguous_format


def block_of(channels: int) -> int:
    """How many channels a program takes."""
    return min(CHANNELS, triton.next_power_of_2(channels))
