"""What became of every layer: the table that says so, kept with the network it is about."""

from dataclasses import dataclass

from torch import nn

from softstair.graph import Graph

__all__ = ["Conversion", "Row", "report"]

ATTRIBUTE = "_softstair_conversion"


@dataclass(frozen=True)
class Row:
    """One module or function call: what it was, what it is, and why it was left in float."""

    name: str
    kind: str
    layer: int | None
    became: str
    stair: str = ""
    noise: str = ""
    forward: str = ""


@dataclass(frozen=True)
class Conversion:
    """The outcome of :func:`softstair.quantise`; prints as a table."""

    rows: tuple[Row, ...]
    graph: Graph

    @property
    def layers(self) -> int:
        """The number of quantised layers."""
        return 1 + max(row.layer for row in self.rows if row.layer is not None)

    def __str__(self) -> str:
        layer = lambda row: "" if row.layer is None else str(row.layer)
        head = ("layer", "name", "was", "became", "stair", "noise", "forward")
        body = [
            (layer(r), r.name, r.kind, r.became, r.stair, r.noise, r.forward) for r in self.rows
        ]
        widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in [head, tuple("─" * width for width in widths), *body]
        ]
        return "\n".join(lines)


def report(net: nn.Module) -> Conversion:
    """The table of a network that :func:`softstair.quantise` made."""
    found = getattr(net, ATTRIBUTE, None)
    if found is None:
        raise ValueError(
            f"net must be a network that softstair.quantise returned, but {type(net).__name__} "
            "carries no table; wrappers (DDP, torch.compile) have it on the network inside."
        )
    return found
