"""The block types of GGUF, bit for bit: integers with one fp16 scale for each block of a row."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
TQ1_PARTS = ((0, 32, 5), (160, 16, 5), (240, 4, 4))
"""Of TQ1_0: the first weight, the bytes and the digits of each part; a byte holds weights that are
as far apart as the part has bytes."""


@dataclass(frozen=True)
class Block:
    """A type of GGUF whose weights are integers times a scale.

    Args:
        number: Of the type in ggml.
        size: Weights of a block.
        low: The lowest integer.
        high: The highest integer.
        pack: From integers (blocks, size) to their bytes.
        unpack: The inverse.
        scale_first: Whether the two bytes of the scale come before the integers.
        activations: What llama.cpp rounds the features to that these weights multiply.
    """

    number: int
    size: int
    low: int
    high: int
    pack: Callable[[Array], Array]
    unpack: Callable[[Array], Array]
    scale_first: bool = True
    activations: Literal["q8_0", "q8_k"] = "q8_0"

    def encode(self, integers: Array, scales: Array) -> Array:
        """Return the bytes of rows of integers (R, C), with fp16 scales (R, C/size)."""
        codes = self.pack(integers.reshape(-1, self.size))
        halves = scales.astype("<f2").reshape(-1, 1).view(np.uint8)
        parts = (halves, codes) if self.scale_first else (codes, halves)
        return np.concatenate(parts, axis=1).reshape(len(integers), -1)

    def decode(self, data: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """Return the integers (R, C) and the scale of each, from the bytes of a tensor."""
        blocks = data.reshape(-1, self.bytes)
        codes, halves = (
            (blocks[:, 2:], blocks[:, :2])
            if self.scale_first
            else np.split(blocks, [self.bytes - 2], axis=1)
        )
        scales = np.ascontiguousarray(halves).view("<f2").astype(np.float64)
        integers = self.unpack(codes).reshape(shape)
        return integers, scales.repeat(self.size, axis=1).reshape(shape)

    @property
    def bytes(self) -> int:
        """Bytes of a block."""
        return 2 + len(self.pack(np.zeros((1, self.size), np.int64))[0])


def _planes(integers: Array, width: int, bits: int) -> Array:
    """Return bytes that hold integers which lie ``width`` apart, the first in the lowest bits."""
    planes = integers.reshape(len(integers), -1, 8 // bits, width)
    return (planes << (np.arange(8 // bits) * bits)[:, None]).sum(2).reshape(len(integers), -1)


def _unplanes(codes: Array, width: int, bits: int) -> Array:
    shifts = (np.arange(8 // bits) * bits)[:, None]
    planes = codes.astype(np.int64).reshape(len(codes), -1, 1, width) >> shifts
    return (planes & ((1 << bits) - 1)).reshape(len(codes), -1)


def _pack_tq1(integers: Array) -> Array:
    """Return five ternary digits a byte, as a binary fraction: ⌈256·n/243⌉."""
    parts = []
    for start, width, count in TQ1_PARTS:
        digits = integers[:, start : start + width * count].reshape(-1, count, width) + 1
        numbers = (digits * 3 ** (4 - np.arange(count))[:, None]).sum(1)
        parts.append((numbers * 256 + 242) // 243)
    return np.concatenate(parts, axis=1).astype(np.uint8)


def _unpack_tq1(codes: Array) -> Array:
    parts, start = [], 0
    for _, width, count in TQ1_PARTS:
        part = codes[:, start : start + width].astype(np.int64)
        parts += [((part * 3**digit & 255) * 3 >> 8) - 1 for digit in range(count)]
        start += width
    return np.concatenate(parts, axis=1)


BLOCKS: dict[str, Block] = {
    "tq2_0": Block(
        35, 256, -1, 1,
        lambda integers: _planes(integers + 1, 32, 2).astype(np.uint8),
        lambda codes: _unplanes(codes, 32, 2) - 1,
        scale_first=False, activations="q8_k",
    ),
    "tq1_0": Block(
        34, 256, -1, 1, _pack_tq1, _unpack_tq1, scale_first=False, activations="q8_k",
    ),
    "q2_0": Block(
        42, 64, -1, 2,
        lambda integers: _planes(integers + 1, 1, 2).astype(np.uint8),
        lambda codes: _unplanes(codes, 1, 2) - 1,
    ),
    "q4_0": Block(
        2, 32, -8, 7,
        lambda integers: _planes(integers + 8, 16, 4).astype(np.uint8),
        lambda codes: _unplanes(codes, 16, 4) - 8,
    ),
    "q8_0": Block(
        8, 32, -128, 127,
        lambda integers: integers.astype(np.int8).view(np.uint8),
        lambda codes: np.ascontiguousarray(codes).view(np.int8).astype(np.int64),
    ),
}  # fmt: skip
"""The types that are written and read, by name."""
FLOATS = {"f32": 0, "f16": 1, "bf16": 30}
"""Types without blocks, and their numbers."""
