"""The answer of ``softstair data status`` as a table, and each data set's terms below it."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from softstair.cli._console import Console
from softstair.cli._data_status import Row
from softstair.data.sources import SOURCES

__all__ = ["show"]

COLOURS = {
    "built in": "green",
    "complete": "green",
    "no test set": "yellow",
    "partial": "yellow",
    "incomplete": "red",
    "no": "dim",
}


def show(rows: Sequence[Row], root: Path) -> None:
    """Prints the rows; 100 columns wide where the terminal does not say."""
    told = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if told else 100)
    table = Table(
        title=Text(f"data sets in {str(root)!r}"),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
    )
    for column in ("name", "state", "where"):
        table.add_column(column, overflow="fold")
    for column in ("files", "size"):
        table.add_column(column, justify="right", no_wrap=True)
    before = ""
    for row in rows:
        table.add_row(
            "" if row.name == before else row.name,
            Text(row.state, COLOURS[row.state]),
            Text(": ".join(filter(None, (row.where, row.wrong)))),
            f"{row.files:,}" if row.files else "",
            readable(row.size) if row.size else "",
        )
        before = row.name
    console.print(table)
    console.print(_terms(root))


def _terms(root: Path) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    where = "" if root == Path("data") else f" --data-dir {shlex.quote(str(root))}"
    for name, source in SOURCES.items():
        size = sum(item.size for item in source.downloads)
        table.add_row(f" {name}", Text(source.title))
        if size:
            told = f"softstair data fetch {name}{where}   ({readable(size)})"
            table.add_row("", Text(told, "cyan"))
        table.add_row("", Text(f"{source.terms}\n", "dim"))
    return table


def readable(size: int) -> str:
    """A number of bytes in the unit that suits it.

    >>> readable(999), readable(170_052_171), readable(2_428_923_189)
    ('999 bytes', '170.1 MB', '2.4 GB')
    """
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if size >= 10**power:
            return f"{size / 10**power:.1f} {unit}"
    return f"{size} bytes"
