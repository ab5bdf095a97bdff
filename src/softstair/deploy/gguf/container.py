"""Reading a GGUF file, by a reader that knows the types of tensors by their numbers."""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from softstair._errors import SoftstairError, import_extra
from softstair.deploy.gguf.blocks import BLOCKS, FLOATS, Array

CODES = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
KINDS = {block.number: name for name, block in BLOCKS.items()} | {n: k for k, n in FLOATS.items()}
MOST_HEADER, MOST = 1 << 28, 1 << 24  # bytes of fields; fields, tensors or entries of an array


class Stored(NamedTuple):
    """A tensor of a file: its type, if it is read here, and the number of its type."""

    kind: str | None
    number: int
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class File:
    """A GGUF file: its fields, the bytes that hold them, and its tensors by name."""

    path: Path
    fields: dict[str, Any]
    header: bytes
    tensors: dict[str, Stored]

    def quanta(self, name: str) -> tuple[Array, Array]:
        """Return the integers and the scale of each weight, of a tensor of blocks."""
        block = BLOCKS[str(self.tensors[name].kind)]
        return block.decode(self._data(name, block.size, block.bytes), self.tensors[name].shape)

    def values(self, name: str) -> Array:
        """Return the weights of a tensor in float64, times the scale beside it."""
        kind, number, shape, _ = self.tensors[name]
        beside = f"{name.removesuffix('.weight')}.scale"
        scale = self.values(beside).item() if name != beside and beside in self.tensors else 1.0
        if kind in BLOCKS:
            integers, scales = self.quanta(name)
            return integers * scales * scale
        if kind in FLOATS:
            data = self._data(name, 1, 4 if kind == "f32" else 2)
            if kind == "bf16":
                data = (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
            values = data.view({"f32": "<f4", "f16": "<f2"}.get(kind, np.float32))
        else:
            values = self._dequantised(name, number)
        return values.astype(np.float64).reshape(shape) * scale

    def _dequantised(self, name: str, number: int) -> Array:
        """Return the weights of another type as the package gguf reads them."""
        gguf: Any = import_extra("gguf", "gguf")
        try:
            kind = gguf.GGMLQuantizationType(number)
            data = self._data(name, *gguf.GGML_QUANT_SIZES[kind])
            values: Array = gguf.quants.dequantize(
                data.reshape(self.tensors[name].shape[0], -1), kind
            )
        except (ValueError, NotImplementedError) as error:
            raise SoftstairError(f"{name!r} has the unknown type {number} ({error}).") from None
        return values

    def _data(self, name: str, size: int, width: int) -> Array:
        tensor = self.tensors[name]
        count = math.prod(tensor.shape) // size * width
        data = np.fromfile(self.path, np.uint8, count, offset=tensor.offset)
        if len(data) != count:
            raise SoftstairError(f"{str(self.path)!r} ends before the end of {name!r}.")
        return data


class _Cursor:
    """Numbers and texts, one after the other."""

    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0

    def take(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.place)
        self.place += struct.calcsize(f"<{code}")
        return value

    def count(self, most: int = MOST) -> int:
        number: int = self.take("Q")
        if number > most:
            raise ValueError(f"a count of {number}")
        return number

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.take(f"{self.count(MOST_HEADER)}s").decode("utf-8", "surrogateescape")
        if kind == ARRAY:
            inner = self.take("I")
            return [self.value(inner) for _ in range(self.count())]
        return self.take(CODES[kind])


def open_file(path: Path) -> File:
    """Return the fields and tensors of a file.

    Raises:
        SoftstairError: If it is no GGUF file of version 2 or 3, or is damaged.
    """
    with open(path, "rb") as file:
        cursor = _Cursor(file.read(MOST_HEADER))
    tensors: dict[str, Stored] = {}
    try:
        if (cursor.take("4s"), cursor.take("I")) not in ((b"GGUF", 2), (b"GGUF", 3)):
            raise ValueError("it does not begin with GGUF and version 2 or 3")
        count, numbers = cursor.count(), cursor.count()
        start = cursor.place
        fields = {cursor.value(STRING): cursor.value(cursor.take("I")) for _ in range(numbers)}
        header = struct.pack("<Q", numbers) + cursor.data[start : cursor.place]
        for _ in range(count):
            name = cursor.value(STRING)
            shape = tuple(cursor.take("Q") for _ in range(cursor.take("I")))[::-1]
            number, offset = cursor.take("I"), cursor.take("Q")
            tensors[name] = Stored(KINDS.get(number), number, shape, offset)
        unit = int(fields.get("general.alignment", 32))
        begin = -(-cursor.place // unit) * unit
    except (struct.error, ValueError, LookupError, ArithmeticError, TypeError) as error:
        raise SoftstairError(f"{str(path)!r} is no GGUF file, or is damaged ({error}).") from None
    placed = {name: each._replace(offset=begin + each.offset) for name, each in tensors.items()}
    return File(path, fields, header, placed)


def write_tensors(
    file: File, tensors: Mapping[str, tuple[int, tuple[int, ...], bytes]], path: Path
) -> None:
    """Write a file with the same fields and other tensors: the number of a type, shape, bytes."""
    unit, names, parts, place = int(file.fields.get("general.alignment", 32)), b"", [], 0
    for name, (number, shape, data) in tensors.items():
        text = name.encode()
        names += struct.pack(f"<Q{len(text)}sI", len(text), text, len(shape))
        names += struct.pack(f"<{len(shape)}QIQ", *shape[::-1], number, place)
        parts += [data, bytes(-len(data) % unit)]
        place += len(data) + len(parts[-1])
    head = struct.pack("<4sIQ", b"GGUF", 3, len(tensors)) + file.header + names
    path.write_bytes(b"".join((head, bytes(-len(head) % unit), *parts)))
