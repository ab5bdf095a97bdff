"""Numeric arrays of a MATLAB 5 file, checked before they are read, within limits.

Why not ``scipy.io.loadmat``: a few changed bytes make it crash the interpreter. And such files are
short to describe: a header of 128 bytes, then elements, each a tag (type, size) and its bytes,
padded to eight. An array is an element that holds four others: flags with its class, its shape,
its name and its numbers, these of a smaller type where that is enough for them. An element may
also be compressed by zlib. Whatever is not an array of numbers is passed over, unread.
"""

import math
import struct
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from softstair.data.dataset import DataError

__all__ = ["parse"]

LIMIT = 512 * 2**20
ELEMENTS = 64
# The flags, the shape and the name of an array lie within its first bytes.
HEAD = 512
CHUNK = 2**14
# A byte of deflate gives 1,032 bytes at most.
RATIO = 1032

INT8, INT32, UINT32, MATRIX, COMPRESSED = 1, 5, 6, 14, 15
TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
CLASSES = dict(zip(range(6, 16), "f8 f4 i1 u1 i2 u2 i4 u4 i8 u8".split(), strict=True))
COMPLEX = 0x0800


class _Tag(NamedTuple):
    kind: int
    size: int
    start: int  # of its bytes
    end: int  # where the next one starts


class _Head(NamedTuple):
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    end: int


def parse(
    data: bytes, names: Collection[str], path: Path, remedy: str, limit: int = LIMIT
) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of those names, in Fortran's order; none may take more than ``limit`` bytes.

    >>> from io import BytesIO
    >>> from scipy.io import savemat
    >>> savemat(stream := BytesIO(), {"y": [[1.0], [10.0]]})
    >>> parse(stream.getvalue(), ["y"], Path("test_32x32.mat"), "fetch it again")["y"].tolist()
    [[1.0], [10.0]]
    """
    try:
        arrays = _arrays(data, names, limit)
        if absent := [name for name in names if name not in arrays]:
            raise ValueError(f"it has no array {absent[0]!r} of numbers")
        return arrays
    except (MemoryError, ValueError, struct.error, zlib.error) as error:
        reason = str(error) if type(error) is ValueError else "it ends too early or is damaged"
        raise DataError(path, f"is not a sound MATLAB 5 file ({reason})", remedy) from error


def _arrays(data: bytes, names: Collection[str], limit: int) -> dict[str, np.ndarray[Any, Any]]:
    if b"\x89HDF" in (data[:4], data[512:516]):
        raise ValueError("it is of version 7.3, which is HDF5: save it with the option -v7")
    order = {b"\x00\x01IM": "<", b"\x01\x00MI": ">"}.get(data[124:128])
    if order is None:
        raise ValueError("its header is another one")
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    place = 128
    for _ in range(ELEMENTS):
        if place == len(data):
            return arrays
        tag = _tag(data, place, order)
        if tag.end > len(data) or tag.kind not in (MATRIX, COMPRESSED):
            raise ValueError("it ends too early or is damaged")
        element = memoryview(data)[tag.start if tag.kind == COMPRESSED else place : tag.end]
        place = tag.end
        head = _head(element, tag.kind == COMPRESSED, order)
        if head is None or head.name not in names:
            continue
        if head.name in arrays:
            raise ValueError(f"it has two arrays {head.name!r}")
        if tag.kind == COMPRESSED:
            element = _decompressed(element, order, limit).data
        arrays[head.name] = _array(element, head, order, limit)
    raise ValueError(f"it has more than {ELEMENTS} elements")


def _tag(data: bytes | memoryview, place: int, order: str) -> _Tag:
    """The tag at ``place``; four bytes or fewer may lie within the eight of the tag itself."""
    kind, size = struct.unpack_from(f"{order}LL", data, place)
    if kind >> 16:
        return _Tag(kind & 0xFFFF, kind >> 16, place + 4, place + 8)
    padding = 0 if kind == COMPRESSED else -size % 8
    return _Tag(kind, size, place + 8, place + 8 + size + padding)


def _head(element: memoryview, compressed: bool, order: str) -> _Head | None:
    """What an array says of itself, or None where the element is no real array of numbers."""
    data = (
        zlib.decompressobj().decompress(element, HEAD) if compressed else element[:HEAD].tobytes()
    )
    flags = _tag(data, 8, order)
    if _tag(data, 0, order).kind != MATRIX or (flags.kind, flags.size) != (UINT32, 8):
        raise ValueError("it has an element that is no array")
    (word,) = struct.unpack_from(f"{order}L", data, flags.start)
    if word & 0xFF not in CLASSES or word & COMPLEX:
        return None
    shape = _tag(data, flags.end, order)
    name = _tag(data, shape.end, order)
    if shape.kind != INT32 or shape.size % 4 or name.kind != INT8 or name.end > HEAD:
        raise ValueError("it has an array without shape or name")
    axes = struct.unpack_from(f"{order}{shape.size // 4}l", data, shape.start)
    text = data[name.start : name.start + name.size].decode("latin-1")
    return _Head(text, np.dtype(CLASSES[word & 0xFF]), axes, name.end)


def _decompressed(element: memoryview, order: str, limit: int) -> np.ndarray[Any, Any]:
    stream = zlib.decompressobj()
    first = stream.decompress(element[:CHUNK], 8)
    size = 8 + _tag(first, 0, order).size
    if size > min(limit + 2 * HEAD, RATIO * (len(element) + 1)):
        raise ValueError("it has an array that would be too large")
    stream, place = zlib.decompressobj(), 0
    buffer = np.empty(size, np.uint8)
    for start in range(0, len(element), CHUNK):
        part = stream.decompress(element[start : start + CHUNK], size - place + 1)
        if place + len(part) > size:
            raise ValueError("it has an array that is larger than it says")
        buffer.data[place : place + len(part)] = part
        place += len(part)
    if place < size or not stream.eof or stream.unused_data:
        raise ValueError("it ends too early or is damaged")
    return buffer


def _array(element: memoryview, head: _Head, order: str, limit: int) -> np.ndarray[Any, Any]:
    numbers = _tag(element, head.end, order)
    stored = np.dtype(order + TYPES.get(numbers.kind, "O"))
    if stored.kind == "O" or not np.can_cast(stored, head.dtype):
        raise ValueError(f"array {head.name!r} has numbers of another type than its class")
    sound = len(head.shape) >= 2 and min(head.shape) > 0
    count = math.prod(head.shape)
    if not sound or count * stored.itemsize != numbers.size or numbers.end != len(element):
        raise ValueError(f"array {head.name!r} has another size than its shape takes")
    if count * head.dtype.itemsize > limit:
        raise ValueError(f"array {head.name!r} would take more than {limit:,} bytes")
    values = np.frombuffer(element, stored, count, numbers.start)
    return values.astype(head.dtype, copy=False).reshape(head.shape, order="F")
