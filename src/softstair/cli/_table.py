"""Tables and lines of text, as every verb prints them."""

import math
import os
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev
from typing import Any

from rich import box, console
from rich.table import Table
from rich.text import Text

from softstair._errors import import_extra

PIPE_WIDTH = 100
"""Columns of a pipe or a file, unless COLUMNS is set."""
UNLIMITED = 10_000
"""Columns where each row of a table has to be one line."""
FEWEST = 3
"""Repetitions that an interval takes at least."""


class Console(console.Console):
    """rich's console, without highlighting; a closed pipe raises BrokenPipeError.

    Args:
        unlimited: Whether a pipe or a file has room for any row, so that ``grep`` finds it.
        settings: Those of ``rich.console.Console``.
    """

    def __init__(self, unlimited: bool = False, **settings: Any) -> None:
        super().__init__(**{"highlight": False, "emoji": False, "markup": False, **settings})
        if not self.is_terminal and unlimited:
            self.width = UNLIMITED
        elif not self.is_terminal and not {"COLUMNS", "width"} & {*os.environ, *settings}:
            self.width = PIPE_WIDTH

    def on_broken_pipe(self) -> None:
        # rich would exit with code 1, which means here that the answer is no.
        raise BrokenPipeError


def table(
    title: str | None,
    left: Sequence[str],
    right: Sequence[str] = (),
    rows: Iterable[Sequence[Any]] = (),
    *,
    total: Sequence[Any] = (),
    caption: str | None = None,
    boxed: bool = True,
) -> Table:
    """Return a table with columns of text, aligned left, and of numbers, aligned right.

    ``total`` is a last row, below a line. Cells are strings, integers or texts of rich.
    """
    style: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "box": box.SIMPLE_HEAD}
    style |= {"pad_edge": False, "collapse_padding": True}
    shown = Table(title=title and Text(title), caption=caption, **({} if boxed else style))
    for name in (*left, *right):
        shown.add_column(name, overflow="fold")
    for column in shown.columns[len(left) :]:
        column.justify = "right"
    for row in rows:
        shown.add_row(*(cell if isinstance(cell, Text) else str(cell) for cell in row))
    if total:
        shown.add_section()
        shown.add_row(*map(str, total))
    return shown


def print_table(*arguments: Any, unlimited: bool = False, **settings: Any) -> None:
    """Print the table that :func:`table` returns for these arguments."""
    Console(unlimited).print(table(*arguments, **settings))


def bars(shares: Sequence[float]) -> str:
    """Return a bar for each share of the height; · is 0."""
    return "".join("·▁▂▃▄▅▆▇█"[min(8, math.ceil(8 * share))] for share in shares)


def in_percent(values: Sequence[float]) -> str:
    """Return a mean ± half of Student's 95 % interval; of two values, which say nothing of an
    interval, with their range.

    >>> in_percent([0.85, 0.86, 0.87]), in_percent([0.85, 0.87]), in_percent([0.85])
    ('86.00% ± 2.48%', '86.00% (85.00% to 87.00%)', '85.00%')
    """
    mean, count = fmean(values), len(values)
    if count < FEWEST:
        return f"{mean:.2%}" + (f" ({min(values):.2%} to {max(values):.2%})" if count > 1 else "")
    # scipy.stats is not imported for a quantile of Student's t: it takes as long as a figure.
    quantile = import_extra("scipy.special").stdtrit(count - 1, 0.975)
    return f"{mean:.2%} ± {quantile * stdev(values) / count**0.5:.2%}"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def print_line(text: str) -> None:
    """Print a text as it is to stdout, without wrapping it."""
    Console().print(text, soft_wrap=True)
