"""Operations of the generated program, and the C text of their constants."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from softstair.deploy.c.layout import Features

__all__ = ["Constant", "Operation", "structure", "window_fields"]

Pair = tuple[int, ...]
C_TYPES = {
    "int8": "int8_t",
    "int16": "int16_t",
    "int32": "int32_t",
    "uint8": "uint8_t",
    "uint32": "uint32_t",
    "float32": "float",
}


@dataclass(frozen=True)
class Constant:
    """An array in flash; ``part`` is "weights" or "thresholds", where the memory plan counts it."""

    name: str
    values: npt.NDArray[Any]
    part: str

    def text(self) -> str:
        """Return its definition."""
        values = self.values.reshape(-1)
        kind = C_TYPES[values.dtype.name]
        lines = "\n".join(_lines(_literals(values)))
        return f"static const {kind} {self.name}[{len(values)}] = {{\n{lines}\n}};"


def _literals(values: npt.NDArray[Any]) -> Iterator[str]:
    if values.dtype == np.uint32:
        return (f"0x{value:08x}U" for value in values.tolist())
    if values.dtype == np.float32:
        return (f"{value.hex()}F" for value in values.tolist())
    return (str(value) for value in values.tolist())


def _lines(literals: Iterable[str], width: int = 100) -> Iterator[str]:
    line = "   "
    for literal in literals:
        if len(line) + len(literal) + 2 > width:
            yield line
            line = "   "
        line += f" {literal},"
    yield line


def structure(kind: str, name: str, /, **fields: Any) -> str:
    """Return the definition of a constant structure; fields that are None stay 0."""
    lines = [f"    .{field} = {value}," for field, value in fields.items() if value is not None]
    return "\n".join([f"static const {kind} {name} = {{", *lines, "};"])


@dataclass(frozen=True)
class Operation:
    """A call of the generated program; nodes are given by their numbers."""

    number: int  # the node whose result it writes; its C names begin with layer_<number>
    nodes: tuple[int, ...]  # all nodes that it computes
    reads: tuple[int, ...]  # the nodes whose results it reads
    calls: tuple[str, ...]  # lines of C
    how: str  # description for the memory plan
    constants: tuple[Constant, ...] = ()
    structures: tuple[str, ...] = ()  # definitions of the structures that the calls take
    scratch: int = 0  # bytes of memory that it needs while it runs
    weights: int = 0  # number of weights

    def part(self, name: str) -> int:
        """Return the bytes of one kind of constants."""
        return sum(constant.values.nbytes for constant in self.constants if constant.part == name)


def window_fields(
    x: Features,
    output: Features,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair = (1, 1),
) -> dict[str, int]:
    """Return the fields of ss_window in softstair_window.h, in order."""
    names = "height width rows columns kernel_y kernel_x stride_y stride_x padding_y padding_x"
    sizes = (x.height, x.width, output.height, output.width)
    numbers = map(int, (*sizes, *kernel, *stride, *padding, *dilation))
    return dict(zip([*names.split(), "dilation_y", "dilation_x"], numbers, strict=True))
