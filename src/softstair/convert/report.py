"""The report: what ``quantise`` has made of each layer of a network."""

from dataclasses import dataclass

from torch import nn

from softstair import _check
from softstair.convert.graph import Graph

__all__ = ["Conversion", "Row", "report"]

ATTRIBUTE = "_softstair_conversion"


@dataclass(frozen=True)
class Row:
    """A module or function call, and what became of it."""

    name: str
    kind: str  # its class, or the name of the function
    layer: int | None  # None if it is left in float
    became: str  # what it is now, or why it is left in float
    stair: str = ""
    noise: str = ""
    forward: str = ""


@dataclass(frozen=True)
class Conversion:
    """The outcome of :func:`softstair.quantise`; ``print`` shows it as a table."""

    rows: tuple[Row, ...]  # in order of execution
    graph: Graph

    @property
    def layers(self) -> int:
        """The number of quantised layers."""
        return 1 + max(row.layer for row in self.rows if row.layer is not None)

    def __str__(self) -> str:
        lines = [["layer", "name", "was", "became", "stair", "noise", "forward"]]
        for row in self.rows:
            layer = "" if row.layer is None else str(row.layer)
            cells = [row.name, row.kind, row.became, row.stair, row.noise, row.forward]
            lines.append([layer, *cells])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["─" * width for width in widths])
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


def report(net: nn.Module) -> Conversion:
    """Return what became of each layer of a quantised network, as a table to print.

    >>> import softstair as ss
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> net = ss.quantise(model, ss.Stair.ternary(), ss.Stair.ternary(), skip="2")
    >>> print(ss.report(net))
    layer  name  was     became            stair                noise      forward
    ─────  ────  ──────  ────────────────  ───────────────────  ─────────  ───────
    0      0     Linear  stair weights     3 levels, quantum 1  Uniform()  mode
    0      1     ReLU    stair activation  3 levels, quantum 1  Uniform()  mode
           2     Linear  float: skipped

    Args:
        net: A network that :func:`softstair.quantise` returned.

    Returns:
        The table: ``rows`` has an entry for each layer, ``layers`` counts the quantised ones.

    Raises:
        ValueError: If ``net`` was not quantised. DDP and ``torch.compile`` wrap the network.
    """
    conversion = getattr(net, ATTRIBUTE, None)
    if not isinstance(conversion, Conversion):
        raise _check.invalid(
            "net",
            f"must be a network that softstair.quantise returned, but {type(net).__name__} is not; "
            "pass the network inside DDP or torch.compile",
        )
    return conversion
