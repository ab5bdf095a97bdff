"""What became of each layer of a network, and whether a checkpoint has all of its stairs."""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from softstair.convert.graph import Graph
from softstair.nn import StairActivation, StairLayer, stair_modules

ATTRIBUTE = "_softstair_conversion"
"""The attribute of a quantised network that holds its conversion."""


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


def stair_row(name: str, kind: str, replacement: StairLayer | StairActivation) -> Row:
    """Return the row of a module of class ``kind``, or of a function, that was replaced."""
    became = "stair weights" if isinstance(replacement, StairLayer) else "stair activation"
    module = replacement.weight_stair if isinstance(replacement, StairLayer) else replacement
    quantum = module.stair.quantum
    quanta = f"{len(quantum)} quanta" if isinstance(quantum, tuple) else f"quantum {quantum:.4g}"
    stair = f"{len(module.stair)} levels, {quanta}"
    return Row(name, kind, module.layer, became, stair, repr(module.noise), module.strategy)


def present_row(net: nn.Module, row: Row) -> Row:
    """Return a row with the present stair; a checkpoint may have had another quantum."""
    module = dict(net.named_modules(remove_duplicate=False)).get(row.name)
    if not isinstance(module, StairLayer | StairActivation):
        return row
    return replace(row, stair=stair_row(row.name, row.kind, module).stair)


def require_stairs(
    net: nn.Module, state_dict: dict[str, Any], prefix: str, *arguments: Any
) -> None:
    """Before loading, report the stairs that a checkpoint with other stairs does not have."""
    keys = {name: f"{prefix}{name}.std" for name, _ in stair_modules(net)}
    if any(key in state_dict for key in keys.values()):
        *_, missing, _, _ = arguments
        for name, key in keys.items():
            if key not in state_dict and name.rpartition(".")[0] not in keys:
                missing.append(key)
