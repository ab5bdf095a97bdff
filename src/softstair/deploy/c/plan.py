"""What a network needs once it is C: bytes of memory, and of constants layer by layer."""

from dataclasses import dataclass

__all__ = ["Plan", "Row"]


@dataclass(frozen=True)
class Row:
    """One operation: the nodes it computes, by name, and what it needs.

    how          in a few words
    weights      how many there are
    flash        (bytes of weights, bytes of thresholds and what else is constant)
    memory       (where its result begins, bytes of it)
    scratch      bytes that it needs besides while it runs
    """

    names: tuple[str, ...]
    how: str
    weights: int
    flash: tuple[int, int]
    memory: tuple[int, int]
    scratch: int


@dataclass(frozen=True)
class Plan:
    """The memory plan of a written network; as text it is a table.

    name     of the files and functions
    ram      bytes of static memory, beside the stack
    nodes    the numbers of nodes are their places here
    """

    name: str
    ram: int
    rows: tuple[Row, ...]
    nodes: tuple[str, ...]

    @property
    def flash(self) -> int:
        """Bytes of constants; the program itself comes on top."""
        return sum(sum(row.flash) for row in self.rows)

    def __str__(self) -> str:
        lines = [f"{'layer':32} {'weights':>10} {'constants':>10} {'memory':>8}  how"]
        for row in self.rows:
            name = " + ".join(row.names)
            shown = name if len(name) <= 32 else "…" + name[-31:]
            numbers = f"{row.weights:>10,} {sum(row.flash):>10,} {row.memory[1]:>8,}"
            lines.append(f"{shown:32} {numbers}  {row.how}")
        total = sum(row.weights for row in self.rows)
        lines.append(f"{'in all':32} {total:>10,} {self.flash:>10,} {self.ram:>8,}  bytes")
        return "\n".join(lines)
