"""``softstair data``: download data sets, and show which are there."""

import shlex
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from softstair import _check
from softstair._errors import SoftstairError
from softstair.cli._args import argument, flag, parse
from softstair.cli._output import Console, Progress, print_table
from softstair.data.fetch import SOURCES, DataStatus, fetch, survey

COLOURS = {
    "built in": "green",
    "complete": "green",
    "no test set": "yellow",
    "partial": "yellow",
    "no": "dim",
}


@dataclass(frozen=True)
class Command:
    """Download data sets from their official addresses, or show which are there.

    softstair data fetch NAME...  Download, verify and unpack. Give the same command again to
                                  continue an interrupted download. What is there already is
                                  kept. Exit code 0: all are there; 2: an error; 130: interrupted.
    softstair data status         Show which data sets are there, how to get the others, and their
                                  licences. Exit code 0, whatever is there; 2: an error.

    cifar10 is a download of 170 MB, svhn 246 MB, speech (v0.02, the paper's) 2.5 GB and
    speech-v0.01 1.6 GB. digits is part of scikit-learn.
    """

    action: Literal["fetch", "status"] | None = argument("ACTION", "fetch or status.", default=None)
    names: tuple[str, ...] = argument(
        "NAME", f"Data sets to fetch: {', '.join(SOURCES)}.", default=()
    )
    data_dir: Path = flag(Path("data"), "Folder of the data sets.")

    def __post_init__(self) -> None:
        if self.action == "status" and self.names:
            raise SoftstairError(f"status takes no NAME, but {self.names[0]!r} was given.")
        unknown = [name for name in self.names if name not in SOURCES]
        if unknown or (self.action == "fetch" and not self.names):
            given = repr(unknown[0]) if unknown else "none"
            raise SoftstairError(
                f"NAME must be one or more of {', '.join(SOURCES)}, but {given} was given"
                f"{_check.ending(unknown[0] if unknown else '', SOURCES)}"
            )

    def run(self) -> int:
        if self.action is None:
            parse(Command, ["--help"], "softstair data")
        if self.action == "status":
            show(survey(self.data_dir), self.data_dir)
            return 0
        log = partial(print, flush=True)  # at once, also to a file
        try:
            with Progress("data") as progress:
                for name in dict.fromkeys(self.names):
                    fetch(name, self.data_dir, log=log, progress=progress.count)
        except KeyboardInterrupt:
            print(
                "softstair data: interrupted; give the same command again to continue the download "
                f"in {str(self.data_dir / '.fetch')!r}.",
                file=sys.stderr,
            )
            return 130
        return 0


def show(rows: list[DataStatus], root: Path) -> None:
    """Print what is there, and how to get each data set and on which terms."""
    names = [row.name for row in rows]
    cells = (
        (
            "" if name == previous else name,
            Text(row.state, COLOURS[row.state]),
            row.where,
            f"{row.files:,}" if row.files else "",
            decimal(row.size) if row.size else "",
        )
        for name, previous, row in zip(names, ["", *names], rows, strict=False)
    )
    title, columns = f"data sets in {str(root)!r}", ("name", "state", "where")
    print_table(title, columns, ("files", "size"), cells, boxed=False)
    terms = Table.grid(padding=(0, 2))
    terms.add_column(style="bold", no_wrap=True)
    terms.add_column(overflow="fold")
    folder = "" if root == Path("data") else f" --data-dir {shlex.quote(str(root))}"
    for name, source in SOURCES.items():
        terms.add_row(f" {name}", source.title)
        if size := sum(download.size for download in source.downloads):
            command = f"softstair data fetch {name}{folder}   ({decimal(size)})"
            terms.add_row("", Text(command, "cyan"))
        terms.add_row("", Text(f"{source.terms}\n", "dim"))
    Console().print(terms)
