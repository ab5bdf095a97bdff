"""How the whole numbers of a tensor lie in the file: as bytes where they fit, else as int32."""

from dataclasses import dataclass

import numpy as np

from softstair.deploy.onnx.graph import Graph

__all__ = ["Stored", "zero_point"]


def zero_point(low: int, high: int) -> int | None:
    """The byte that stands for 0, if bytes hold 0 and all from low to high; else None.

    >>> zero_point(-1, 1), zero_point(2, 255), zero_point(-100, 200)
    (1, 0, None)
    """
    zero = -min(low, 0)
    return zero if zero + max(high, 0) <= 255 else None


@dataclass(frozen=True)
class Stored:
    """A tensor of whole numbers from low to high: bytes of which ``zero_byte`` is 0, or int32."""

    name: str
    low: int
    high: int
    bytes: bool = False
    zero_byte: int = 0

    def whole(self, graph: Graph, hint: str) -> str:
        """The numbers themselves, in int32."""
        if not self.bytes:
            return self.name
        wide = graph.cast(self.name, "INT32", f"{hint}_taken")
        zero = graph.constant(f"{hint}_zero", np.int32(self.zero_byte))
        return graph.apply("Sub", [wide, zero], f"{hint}_whole")

    def as_bytes(self, graph: Graph, hint: str) -> "Stored":
        """The same in bytes, which must hold them."""
        if self.bytes:
            return self
        zero = zero_point(self.low, self.high)
        assert zero is not None
        byte_of_zero = graph.constant(f"{hint}_zero", np.int32(zero))
        raised = graph.apply("Add", [self.name, byte_of_zero], f"{hint}_raised")
        return Stored(graph.cast(raised, "UINT8", hint), self.low, self.high, True, zero)
