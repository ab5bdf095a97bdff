"""``softstair data fetch`` and ``softstair data status``: get data sets, and see what is there."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from softstair.cli import _arguments
from softstair.data.fetch import fetch
from softstair.data.sources import SOURCES

__all__ = ["ACTIONS", "Fetch", "Status", "parse"]


@dataclass(frozen=True)
class Fetch:
    """Downloads data sets from their official addresses, verifies and unpacks them.

    A download that breaks off goes on where it was when the same command is given again. Nothing
    appears in the folder before it is whole and verified, and nothing that is there already is
    touched. Exit code 0: all of it is there; 2: an error; 130: interrupted.

    cifar10 has 170 MB, svhn 246 MB, speech (v0.02, that of the paper) 2.5 GB and speech-v0.01
    1.6 GB to download; digits needs none. `softstair data status` tells on which terms.
    """

    names: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(metavar="NAME...", help_behavior_hint="(one or more)"),
    ] = ()
    """Which data sets: digits, cifar10, svhn, speech, speech-v0.01."""
    data_dir: Path = Path("data")
    """Folder to put them in."""

    def __post_init__(self) -> None:
        known = ", ".join(SOURCES)
        if not self.names:
            raise ValueError(f"NAME must be one or more of {known}, but none was given")
        for name in self.names:
            if name not in SOURCES:
                raise ValueError(f"NAME must be one or more of {known}, but {name!r} was given")

    def run(self) -> int:
        from softstair.cli._data_progress import bar

        try:
            with bar() as progress:
                for name in dict.fromkeys(self.names):
                    fetch(name, self.data_dir, log=_say, progress=progress)
        except KeyboardInterrupt:
            kept = str(self.data_dir / ".fetch")
            print(
                f"softstair data: interrupted, and what has come is kept in {kept!r}: run the same "
                "command again to go on from there.",
                file=sys.stderr,
            )
            return 130
        return 0


@dataclass(frozen=True)
class Status:
    """Shows which data sets are there, whole or not, how to get the others, and on which terms.

    Looks at names, sizes and numbers of files, and reads none of them; `softstair data fetch`
    verifies the official files by their digests, also where they are there already.
    Exit code 0, whatever is there; 2: an error.
    """

    data_dir: Path = Path("data")
    """Folder that holds them."""

    def run(self) -> int:
        from softstair.cli import _data_status, _data_table

        _data_table.show(_data_status.survey(self.data_dir), self.data_dir)
        return 0


ACTIONS: dict[str, type[Fetch] | type[Status]] = {"fetch": Fetch, "status": Status}


def parse(words: Sequence[str], prog: str) -> Fetch | Status:
    """What the words after ``softstair data`` ask for."""
    if not words or words[0] in ("-h", "--help"):
        print(_help(prog))
        raise SystemExit(0)
    if words[0] not in ACTIONS:
        raise ValueError(
            f"the action must be one of {', '.join(ACTIONS)}, but {words[0]!r} was given: see "
            f"{prog} --help."
        )
    return _arguments.parse(ACTIONS[words[0]], words[1:], prog=f"{prog} {words[0]}")


def _say(line: str) -> None:
    # At once, also where stdout is a file that somebody watches.
    print(line, flush=True)


def _help(prog: str) -> str:
    width = max(map(len, SOURCES))
    sets = [f"  {name:<{width}}  {source.title}" for name, source in SOURCES.items()]
    return "\n".join(
        [
            f"usage: {prog} fetch NAME... [--data-dir DIR]",
            f"       {prog} status [--data-dir DIR]",
            "",
            "Gets data sets from their official addresses, and shows which are there.",
            "",
            "  fetch   downloads, verifies and unpacks; goes on where it broke off",
            "  status  what is there, whole or not, how to get it, and on which terms",
            "",
            "The names:",
            "",
            *sets,
            "",
            f"DIR is data unless it is given. {prog} fetch --help tells more.",
        ]
    )
