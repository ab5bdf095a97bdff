"""Weights in few bits: as planes of bits, or as fields in bytes."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["EIGHT", "Fields", "fields", "narrowest", "planes"]

EIGHT = 8
"""Channels whose planes lie together, as softstair_planes.h wants them."""

Whole = npt.NDArray[np.int64]


def planes(weight: Whole, words: int) -> tuple[npt.NDArray[np.uint32], int]:
    """Weights of −1, 0 and 1, (outputs, taps, channels), as words in the order of
    softstair_planes.h, and the bits of each: 2, or 1 where none is 0.

    >>> packed, bits = planes(np.array([[[1, 0, -1, 1]]]), words=1)
    >>> [f"{one:04b}" for one in packed], bits
    (['1011', '1001'], 2)
    """
    outputs, taps, channels = weight.shape
    binary = bool((weight != 0).all())
    kept = [weight > 0] if binary else [weight >= 0, weight > 0]
    bits = np.zeros((len(kept), outputs, taps, 32 * words), dtype=np.uint8)
    for plane, one in enumerate(kept):
        bits[plane, :, :, :channels] = one
    packed = np.packbits(bits, axis=-1, bitorder="little").reshape(len(kept), outputs, -1, 4)
    # Little-endian whatever this machine is.
    rows = packed.astype(np.uint32) @ (1 << np.array([0, 8, 16, 24], dtype=np.uint32))
    return np.concatenate([_together(rows[:, at : at + EIGHT]) for at in _starts(outputs)]), len(
        kept
    )


def _starts(outputs: int) -> range:
    return range(0, outputs, EIGHT)


def _together(rows: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """(planes, channels, words): fours of words of each channel, then what is left."""
    count, channels, words = rows.shape
    whole = words // 4 * 4
    fours = rows[:, :, :whole].reshape(count, channels, -1, 4).transpose(2, 0, 1, 3)
    rest = rows[:, :, whole:].transpose(2, 0, 1)
    return np.concatenate([fours.reshape(-1), rest.reshape(-1)])


@dataclass(frozen=True)
class Fields:
    """Weights (outputs, length) as codes: ``base + step·code``, a row of bytes for each output, and
    of the other sign where ``turned``, (outputs,)."""

    data: npt.NDArray[np.uint8]
    bits: int
    base: int
    step: int
    turned: npt.NDArray[np.bool_]


def fields(weight: Whole) -> Fields | None:
    """The fewest of 1, 2, 4 or 8 bits that hold the weights, or None if 8 do not.

    A channel of which the sign was turned may need a number more than its stair has (the opposite
    of −8); turned back it does not.

    >>> fields(np.array([[-8, 7], [8, -7]])).bits
    4
    """
    if bool((np.abs(weight) == 1).all()):
        return _coded(weight, 1, -1, 2, np.zeros(len(weight), dtype=bool))
    low, high = weight.min(1), weight.max(1)
    for bits in (1, 2, 4, 8):
        span = 2**bits - 1
        best: tuple[int, int] | None = None
        for base in {*low.tolist(), *(-high).tolist(), -(2 ** (bits - 1))}:
            if base < -128 or base + span > 127:
                continue
            plain = (low >= base) & (high <= base + span)
            turned = (-high >= base) & (-low <= base + span)
            if bool((plain | turned).all()):
                rank = (int((~plain).sum()), int(base))
                best = rank if best is None else min(best, rank)
        if best is not None:
            base = best[1]
            other = (low < base) | (high > base + span)
            return _coded(weight, bits, base, 1, other)
    return None


def _coded(weight: Whole, bits: int, base: int, step: int, turned: npt.NDArray[np.bool_]) -> Fields:
    codes = (np.where(turned[:, None], -weight, weight) - base) // step
    per = 8 // bits
    room = -(-weight.shape[1] // per) * per
    padded = np.zeros((len(weight), room), dtype=np.uint8)
    padded[:, : weight.shape[1]] = codes
    shifts = np.arange(per, dtype=np.uint8) * bits
    data = (padded.reshape(len(weight), -1, per) << shifts).sum(-1).astype(np.uint8)
    return Fields(data, bits, base, step, turned)


def narrowest(values: Whole) -> npt.NDArray[np.signedinteger] | None:
    """The numbers in 8, 16 or 32 bits, whichever are the fewest that hold them; None if none do.

    >>> narrowest(np.array([-129, 5])).dtype
    dtype('int16')
    """
    for kind in (np.int8, np.int16, np.int32):
        limits = np.iinfo(kind)
        if values.size == 0 or (values.min() >= limits.min and values.max() <= limits.max):
            return values.astype(kind)
    return None
