"""Batch normalisation, stair and max-pooling in one pass over memory.

The sums c of a layer, (rows, channels) in memory, are read once for their statistics (unless the
convolution has made these, :mod:`softstair._accelerate.moments`) and once for

    z = γ·(c − μ)/√(v + ε) + β = scale·c + shift        y = the value of the stair at z

which is pooled and written, in a float dtype and, if an integer convolution follows, as int8. In
residual networks a shortcut is added to z. For the backward pass nothing is kept but c, the
shortcut, and the argmax of pooling, one byte per element; of a first layer
(:mod:`softstair._accelerate.first`), not even c.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from softstair._accelerate.first import First, first_sums, load_matrix
from softstair._accelerate.moments import CHANNELS, tile_constants, window_row
from softstair._accelerate.stairs import PreparedStair, prepare_from_row
from softstair.kernels.triton import evaluator
from softstair.kernels.triton.distributions import shared_words

__all__ = ["LayerOutput", "forward", "memory_format"]

ELEMENTS = 2048
"""Elements of a tile, or of each of the four tiles that a program handles together."""
FEW_TILES = 1024
"""With fewer tiles of rows, each is half as large: more programs hide more of the latency."""
IMAGES = 64
"""Images of a tile whose transpose is stored, and most channels of it. A tile of a first layer has
more channels, which use the same taps, and fewer images."""


class LayerOutput(NamedTuple):
    """Output of a layer: features, the same in quanta as int8, the argmax of pooling (0–3), and the
    features in quanta with images last, (C, H, W, N)."""

    y: Tensor
    integers: Tensor | None
    argmax: Tensor | None
    transposed: Tensor | None


@triton.jit
def tile_rows(
    rows, images, j, POSITIONS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    TRANSPOSE: tl.constexpr,
):  # fmt: skip
    """Part j of the program's tile: its rows of (images, positions), and which of them exist. With
    TRANSPOSE they are images at one position, which are returned too."""
    if TRANSPOSE:
        blocks = tl.cdiv(images, ROWS)
        position = tl.program_id(0) // blocks * PARTS + j
        image = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
        row, mask = image * POSITIONS + position, image < images
        if PARTS > 1:
            mask = image < tl.where(position < POSITIONS, images, 0)
    else:
        row = (tl.program_id(0) * PARTS + j) * ROWS + tl.arange(0, ROWS)
        image, position, mask = row, 0, row < rows
    return row, image, position, mask


@triton.jit
def _forward(
    sums_ptr, weight_ptr, shortcut_ptr, y_ptr, integers_ptr, transposed_ptr, argmax_ptr, stats_ptr,
    table, row_ptr, seed_ptr, rows, images, per_quantum,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, COUNT: tl.constexpr, FAMILY: tl.constexpr, FORWARD: tl.constexpr,
    PARTS: tl.constexpr, NORMALISE: tl.constexpr, SHORTCUT: tl.constexpr, POOL: tl.constexpr,
    STORE: tl.constexpr, INTEGERS: tl.constexpr, TRANSPOSE: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel_mask = channel < CHANNELS
    prepared = prepare_from_row(row_ptr, table, COUNT, FAMILY, FORWARD)
    if NORMALISE:
        scale = tl.load(stats_ptr + 2 * CHANNELS + channel, mask=channel_mask, other=0)[None, :]
        shift = tl.load(stats_ptr + 3 * CHANNELS + channel, mask=channel_mask, other=0)[None, :]
    if FIRST is not None:
        weights = load_matrix(weight_ptr, channel, CHANNELS, FIRST)
    if FORWARD == "random":
        # Each of the four parts takes one of four words.
        pairs: tl.constexpr = (CHANNELS + 1) // 2
        first = tl.program_id(0).to(tl.int64) * (ROWS * pairs) + tl.program_id(1) * (BLOCK // 2)
        lane = tl.arange(0, BLOCK)[None, :]
        pair = tl.arange(0, ROWS)[:, None] * pairs + (lane >> 1)
        words = shared_words(tl.load(seed_ptr), first, pair, (lane & 1) != 0)
    positions: tl.constexpr = HEIGHT * WIDTH // (4 if POOL else 1)
    tiles: tl.constexpr = 1 if POOL else PARTS
    best = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    argmax = tl.zeros((ROWS, BLOCK), dtype=tl.int8)
    for j in tl.static_range(PARTS):
        row, image, position, row_mask = tile_rows(
            rows, images, 0 if POOL else j, positions, ROWS, tiles, TRANSPOSE
        )
        source = window_row(row, j, HEIGHT, WIDTH) if POOL else row
        mask = row_mask[:, None]
        if CHANNELS % BLOCK != 0:
            mask = mask & channel_mask[None, :]
        offsets = source.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        if FIRST is not None:
            count = images * HEIGHT * WIDTH
            z, _ = first_sums(sums_ptr, weights, source, count, HEIGHT, WIDTH, FIRST)
        else:
            z = tl.load(sums_ptr + offsets, mask=mask, other=0).to(tl.float32)
        if NORMALISE:
            z = z * scale + shift
        if SHORTCUT:
            z += tl.load(shortcut_ptr + offsets, mask=mask, other=0).to(tl.float32)
        word = z
        if FORWARD == "random":
            word = words[j]
        y = evaluator.value(z, prepared, word, COUNT, FAMILY, FORWARD, True)
        if POOL and j > 0:
            better = (y > best) | (y != y)
            best = tl.where(better, y, best)
            argmax = tl.where(better, j, argmax).to(tl.int8)
        else:
            best = y
        if not POOL or j == 3:
            offsets = row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
            if STORE:
                tl.store(y_ptr + offsets, best.to(y_ptr.dtype.element_ty), mask=mask)
            if POOL:
                tl.store(argmax_ptr + offsets, argmax, mask=mask)
            if INTEGERS:
                integers = tl.floor(best * per_quantum + 0.5)
                tl.store(integers_ptr + offsets, integers.to(tl.int8), mask=mask)
                if TRANSPOSE:
                    index = position * images + image
                    store_transposed(transposed_ptr, integers, channel, index, mask, rows)


@triton.jit
def store_transposed(out_ptr, values, channel, index, mask, rows):
    """Store values of (index, channel) as (channel, index), in the dtype of the pointer."""
    pointers = out_ptr + channel.to(tl.int64)[:, None] * rows + index[None, :]
    tl.store(pointers, tl.trans(values.to(out_ptr.dtype.element_ty)), mask=tl.trans(mask))


def forward(
    sums: Tensor,
    stats: Tensor | None,
    stair: PreparedStair,
    strategy: str,
    seed: Tensor,
    dtype: torch.dtype,
    stored: bool = True,
    pool: bool = False,
    quantum: float | None = None,
    shortcut: Tensor | None = None,
    last_dtype: torch.dtype | None = None,
    first: First | None = None,
) -> LayerOutput:
    """Return the values of the stair at scale·c + shift (at c itself without ``stats``) plus the
    ``shortcut``, pooled 2×2 with ``pool``, and in quanta too if the ``quantum`` is given: as int8,
    and in the dtype ``last_dtype`` with images last. With ``stored=False`` y only has a shape and a
    dtype, and must not be read. Of a ``first`` layer, ``sums`` is the input."""
    given, constants = tuple(sums.shape), dict[str, Any](FIRST=None)
    if first is not None:
        given, constants = first.shape(sums), first.constants(sums)
    elif stats is None and last_dtype is None and sums.numel() % CHANNELS == 0:
        # Weights: the same stair for each element, whatever its channel.
        constants |= tile_constants((sums.numel() // CHANNELS, CHANNELS))
    else:
        constants |= tile_constants(given)
    height, width = constants["HEIGHT"], constants["WIDTH"]
    parts = 4 if pool or strategy == "random" else 1
    tile = ELEMENTS // constants["BLOCK"] * (1 if parts == 4 else 2)
    shape = (*given[:2], height // 2, width // 2) if pool else given
    own: dict[str, Any] = {"device": sums.device, "memory_format": memory_format(sums)}
    y = torch.empty(shape if stored else [1] * sums.dim(), dtype=dtype, **own)
    y = y if stored else y.expand(shape)
    integers = y if quantum is None else torch.empty(shape, dtype=torch.int8, **own)
    argmax = torch.empty(shape, dtype=torch.int8, **own) if pool else y
    rows, tiles = y.numel() // constants["CHANNELS"], 1 if pool else parts
    if first is None and triton.cdiv(rows, tiles * tile) < FEW_TILES:
        tile //= 2
    count, transposed = triton.cdiv(rows, tiles * tile), y
    if last_dtype is not None:
        if first is None:
            tile, constants["BLOCK"] = IMAGES, min(IMAGES, constants["BLOCK"])
        else:
            tile = min(IMAGES, ELEMENTS // constants["BLOCK"])
        count = triton.cdiv(len(y), tile) * triton.cdiv(rows // len(y), tiles)
        transposed = images_last(y, last_dtype)
    warps = 4 if strategy == "random" else 2
    warps = 4 if last_dtype is not None else 8 if first is not None else warps
    _forward[(count, triton.cdiv(constants["CHANNELS"], constants["BLOCK"]))](
        sums, sums if first is None else first.weight, sums if shortcut is None else shortcut, y,
        integers, transposed, argmax, sums if stats is None else stats, stair.table, stair.row,
        seed, rows, len(y), 1.0 if quantum is None else 1 / quantum,
        **constants, **stair.constants, ROWS=tile, FORWARD=strategy, PARTS=parts,
        NORMALISE=stats is not None, SHORTCUT=shortcut is not None, POOL=pool,
        STORE=stored, INTEGERS=quantum is not None, TRANSPOSE=last_dtype is not None,
        num_warps=warps,
        enable_fp_fusion=True,
    )  # fmt: skip
    return LayerOutput(
        y,
        None if quantum is None else integers,
        argmax if pool else None,
        None if last_dtype is None else transposed,
    )


def images_last(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor (C, H, W, N) for the elements of one of shape (N, C, H, W)."""
    return torch.empty((*like.shape[1:], len(like)), dtype=dtype, device=like.device)


def memory_format(tensor: Tensor) -> torch.memory_format:
    """Return the format in which the tensor is rows of channels in memory."""
    return torch.channels_last if tensor.dim() == 4 else torch.contiguous_format
