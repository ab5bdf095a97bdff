"""Text of C: arrays, and structures of constants."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Constant", "structure"]

TYPES = {
    "int8": "int8_t",
    "int16": "int16_t",
    "int32": "int32_t",
    "uint8": "uint8_t",
    "uint32": "uint32_t",
    "float32": "float",
}


@dataclass(frozen=True)
class Constant:
    """An array that does not change; ``part`` says what it is to its layer."""

    name: str
    values: npt.NDArray[Any]
    part: str

    @property
    def size(self) -> int:
        """In bytes."""
        return int(self.values.nbytes)

    def text(self) -> str:
        """Its definition.

        >>> print(Constant("a", np.array([1, -2], dtype=np.int8), "levels").text())
        static const int8_t a[2] = {
            1, -2,
        };
        """
        values = self.values.reshape(-1)
        kind = TYPES[values.dtype.name]
        lines = "\n".join(_lines(_literals(values)))
        return f"static const {kind} {self.name}[{len(values)}] = {{\n{lines}\n}};"


def _literals(values: npt.NDArray[Any]) -> Iterator[str]:
    if values.dtype == np.uint32:
        return (f"0x{one:08x}U" for one in values.tolist())
    if values.dtype == np.float32:
        return (f"{one.hex()}F" for one in values.tolist())
    return (str(one) for one in values.tolist())


def _lines(literals: Iterable[str], width: int = 100) -> Iterator[str]:
    line = "   "
    for literal in literals:
        if len(line) + len(literal) + 2 > width:
            yield line
            line = "   "
        line += f" {literal},"
    yield line


def structure(kind: str, name: str, /, **fields: Any) -> str:
    """The definition of a structure of constants; fields that are None stay 0.

    >>> print(structure("ss_features", "layer_0", kind="SS_BYTES", channels=3, bias=None))
    static const ss_features layer_0 = {
        .kind = SS_BYTES,
        .channels = 3,
    };
    """
    given = [f"    .{one} = {value}," for one, value in fields.items() if value is not None]
    return "\n".join([f"static const {kind} {name} = {{", *given, "};"])
