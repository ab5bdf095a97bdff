"""Convolutions and linear layers in C for x86: panels of 16 channels, as softstair_panels.h reads.

Windows lie in features that are copied between their padding, so that all have the same form: runs
of bytes, each read by four. Without VNNI two products are added in 16 bits. Fours with pairs of
weights beyond that are read twice, once for each half of their pairs.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from softstair.deploy import nodes
from softstair.deploy.c.affine import Integers
from softstair.deploy.c.layout import Features
from softstair.deploy.c.packing import PackedFields

PANEL, BLOCK = 16, 32  # channels of a panel, and those that have the same windows
BYTES_OF_FOUR = 128  # unpacked, as halves
SLACK = 64  # bytes that are read beyond features
MAX_HALF = 2**15 - 1
MIN_CHUNK = 8  # fours for which sums of 16 bits are faster


class Panels(NamedTuple):
    """The constants of a layer, the fields of ss_panels_sum, and the bytes of its memory."""

    constants: dict[str, npt.NDArray[Any]]
    fields: dict[str, int]
    unpacked: int
    padded: int


def panels(
    node: nodes.Sum, rows: Integers, packed: PackedFields, x: Features, span: tuple[int, int]
) -> Panels:
    """Return the panels of weights (outputs, taps, channels of a group) for features ``x``."""
    is_linear, (down, right) = node.weight.ndim == 2, (0, *node.padding)[-2:]
    size = (x.height, x.width) if is_linear else tuple(node.weight.shape[2:])
    across, padded = x.width + 2 * right, 0
    if any(node.padding):
        padded = (x.height + 2 * down) * across * x.channels + SLACK
    is_depthwise = node.groups == x.channels == len(rows) and node.groups > 1
    dilation = (1, *node.dilation)[-2:]
    y, z = np.indices((1, *size)[-2:]).reshape(2, -1)
    taps = (y * dilation[0] * across + z * dilation[1]) * x.channels
    offsets = x.bias * rows.sum((1, 2))
    zero = -packed.base // packed.step
    largest = span[1] - x.bias
    at: Any
    data: Any
    values: Any = packed.codes[:, : rows[0].size].reshape(rows.shape)
    fields = {"bits": packed.bits, "base": packed.base, "step": packed.step}
    if is_depthwise:
        groups, outputs, inputs = 1, len(rows), x.channels
        at, fours = taps[None], len(taps)
        narrow = largest * int(np.abs(rows).sum((1, 2)).max()) <= MAX_HALF
        chunk, tiled = int(narrow), 0
        data = np.full((-(-outputs // PANEL) * PANEL, -(-fours // 4) * 4), zero, dtype=np.uint8)
        data[:outputs, :fours] = values[:, :, 0]
        data = data.reshape(len(data), -1, 4)
    else:
        groups, values = _together(values, node.groups, zero)
        outputs, inputs = values.shape[1], values.shape[3]
        at, data = _fours(values, (taps[:, None] + np.arange(inputs)).ravel(), zero)
        stored = packed.base + packed.step * data.astype(np.int64)
        chunk = _chunk(stored, largest)
        tiled = _tiled(at)
        at = np.broadcast_to(at, (1, len(at)))
        if not chunk:
            at, data = _without_overflow(at[0], data, stored, largest, zero)
        fours = at.shape[1]
    data = data.reshape(-1, PANEL, *data.shape[1:]).transpose(0, 2, 1, 3)
    data = _packed(data.reshape(*data.shape[:2], 64), packed.bits)
    signed = np.where(packed.negated, -offsets, offsets).reshape(groups, -1)
    filled = np.pad(signed, ((0, 0), (0, -signed.shape[1] % PANEL)))
    constants: dict[str, npt.NDArray[Any]] = {"weights": data, "at": at.astype(np.int32).ravel()}
    constants["offsets"] = filled.astype(np.int32).ravel()
    if packed.negated.any():
        constants["negated"] = np.packbits(packed.negated, bitorder="little")
    fields |= {"groups": groups, "inputs": inputs, "outputs": outputs, "fours": fours}
    fields |= {"chunk": chunk, "tiled": tiled, "special": int(len(at) > 1)}
    return Panels(constants, fields, BYTES_OF_FOUR * (-(-fours // 8) * 8), padded)


def _together(
    values: npt.NDArray[np.uint8], groups: int, zero: int
) -> tuple[int, npt.NDArray[np.uint8]]:
    """Return groups that fill panels, (groups, outputs, taps, inputs), with zeros between."""
    outputs, taps, inputs = len(values) // groups, *values.shape[1:]
    fits = [n for n in range(1, groups + 1) if groups % n == 0 and n * outputs <= PANEL]
    some = max(fits, default=1)
    shape = (groups // some, some, outputs, taps, some, inputs)
    wide = np.full(shape, zero, dtype=np.uint8)
    each = values.reshape(groups // some, some, outputs, taps, inputs)
    for i in range(some):
        wide[:, i, :, :, i] = each[:, i]
    return groups // some, wide.reshape(groups // some, some * outputs, taps, some * inputs)


def _fours(
    values: npt.NDArray[np.uint8], offsets: Integers, zero: int
) -> tuple[Integers, npt.NDArray[np.uint8]]:
    """Return the beginnings of fours, and codes (panels · 16, fours, 4) in blocks of groups."""
    flat = values.reshape(*values.shape[:2], -1)
    breaks = np.diff(offsets, prepend=offsets[0] - 2) != 1
    begins = np.maximum.accumulate(np.where(breaks, np.arange(len(offsets)), 0))
    slot = (np.arange(len(offsets)) - begins) % 4
    four = np.cumsum(slot == 0) - 1
    padded = -(-flat.shape[1] // PANEL) * PANEL
    data = np.full((len(flat), padded, int(four[-1]) + 1, 4), zero, dtype=np.uint8)
    data[:, : flat.shape[1], four, slot] = flat
    return offsets[slot == 0], data.reshape(-1, *data.shape[2:])


def _chunk(stored: Integers, largest: int) -> int:
    """Return the most fours whose sums of pairs fit into 16 bits, or 0 if they are too few."""
    fours = stored.shape[1]
    pairs = stored.reshape(len(stored), fours, 2, 2)
    for parts in range(1, max(fours // MIN_CHUNK, 1) + 1):
        size = -(-fours // parts)
        starts = np.arange(0, fours, size)
        sums = (
            np.add.reduceat(side.sum(3), starts, 1) for side in (pairs.clip(0), (-pairs).clip(0))
        )
        if largest * max(int(each.max()) for each in sums) <= MAX_HALF:
            return size
    return 0


def _tiled(at: Integers) -> int:
    """Return how many fours at the beginning are 64 bytes in a row, by 16."""
    whole = at[: len(at) // 16 * 16].reshape(-1, 16)
    breaks = (whole != whole[:, :1] + 4 * np.arange(16)).any(1)
    return 16 * int(np.argmax(breaks) if breaks.any() else len(whole))


def _without_overflow(
    at: Integers, data: npt.NDArray[np.uint8], stored: Integers, largest: int, zero: int
) -> tuple[Integers, npt.NDArray[np.uint8]]:
    """Return fours for each block, with those again whose pairs exceed 16 bits."""
    pairs = stored.reshape(*stored.shape[:2], 2, 2)
    sides = np.maximum(pairs.clip(0).sum(3), (-pairs).clip(0).sum(3)).max(2)
    exceeds = largest * sides > MAX_HALF  # (channels, fours)
    if not exceeds.any():
        return at[None], data
    starts = np.arange(0, len(data), BLOCK)
    again = np.maximum.reduceat(exceeds, starts, 0)
    more = int(again.sum(1).max())
    places = np.zeros((len(starts), len(at) + more), dtype=np.int64)
    result = np.full((len(data), len(at) + more, 4), zero, dtype=np.uint8)
    result[:, : len(at)] = data
    for block, (start, twice) in enumerate(zip(starts, again, strict=True)):
        channels, which = slice(start, start + BLOCK), np.flatnonzero(twice)
        new = slice(len(at), len(at) + len(which))
        places[block, : len(at)], places[block, new] = at, at[which]
        result[channels, new, 1::2] = data[channels, which, 1::2]
        result[channels, which, 1::2] = zero
    return places, result


def _packed(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """(panels, fours, 64) → (panels, units, 64), several codes a byte."""
    each = 8 // bits
    filled = np.pad(codes, ((0, 0), (0, -codes.shape[1] % each), (0, 0)))
    units = filled.reshape(len(codes), -1, each, 64)
    shifts = bits * np.arange(each, dtype=np.uint8)[:, None]
    return (units << shifts).sum(2).astype(np.uint8).ravel()
