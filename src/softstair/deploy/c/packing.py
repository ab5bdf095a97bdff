"""Weights of few bits, as codes in bytes."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from softstair.deploy.c.affine import Integers


@dataclass(frozen=True)
class PackedFields:
    """Weights (outputs, length) = ±(base + step · code), a row of bytes of codes per output.

    The sign is negative for the outputs that are ``negated``, (outputs,) bool.
    """

    codes: npt.NDArray[np.uint8]
    data: npt.NDArray[np.uint8]
    bits: int
    base: int
    step: int
    negated: npt.NDArray[np.bool_]


def pack_fields(weight: Integers) -> PackedFields | None:
    """Pack weights into the fewest of 1, 2, 4 or 8 bits, or return None if 8 are not enough.

    A channel whose weights were negated may have a value beyond its stair's (8 instead of −8); it
    is stored with its original sign.
    """
    if bool((np.abs(weight) == 1).all()):
        return _encoded(weight, 1, -1, 2, np.zeros(len(weight), dtype=bool))
    low, high = weight.min(1), weight.max(1)
    for bits in (1, 2, 4, 8):
        span = 2**bits - 1
        candidates = []
        for base in {*low.tolist(), *(-high).tolist(), -(2 ** (bits - 1))}:
            fits = (low >= base) & (high <= base + span)
            fits_negated = (-high >= base) & (-low <= base + span)
            if -128 <= base <= 127 - span and bool((fits | fits_negated).all()):
                candidates.append((int((~fits).sum()), int(base)))
        if candidates:
            _, base = min(candidates)
            return _encoded(weight, bits, base, 1, (low < base) | (high > base + span))
    return None


def _encoded(
    weight: Integers, bits: int, base: int, step: int, negated: npt.NDArray[np.bool_]
) -> PackedFields:
    codes = (np.where(negated[:, None], -weight, weight) - base) // step
    per_byte = 8 // bits
    padded = np.pad(codes, ((0, 0), (0, -weight.shape[1] % per_byte))).astype(np.uint8)
    shifts = np.arange(per_byte, dtype=np.uint8) * bits
    data = (padded.reshape(len(weight), -1, per_byte) << shifts).sum(-1).astype(np.uint8)
    return PackedFields(codes.astype(np.uint8), data, bits, base, step, negated)
