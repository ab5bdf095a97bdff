"""A bar on a terminal while data sets come in, and nothing elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

__all__ = ["bar"]


@contextmanager
def bar(console: Console | None = None) -> Iterator[Callable[[str, int, int], None]]:
    """A function that takes what is going on, and how many bytes of how many are done."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield lambda what, done, total: None
        return
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        # Lines for a file or a pipe go there, not to the terminal.
        redirect_stdout=sys.stdout.isatty(),
    )
    task, doing = progress.add_task("", visible=False), ""

    def moved(what: str, done: int, total: int) -> None:
        nonlocal doing
        if what != doing:
            doing = what
            progress.reset(task, total=total, completed=done, description=what, visible=True)
        progress.update(task, completed=done)

    with progress:
        yield moved
