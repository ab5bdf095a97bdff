"""Files that are whole or not there: a temporary one, fsync, rename."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["replacing", "write"]


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of ``path`` once all of it is on the disk.

    Whatever goes wrong in between leaves ``path`` as it was.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield partial
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write(path: Path, text: str) -> None:
    """Puts a text in the place of a file, all of it or nothing."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def _sync_folder(folder: Path) -> None:
    # Some systems do not let a folder be opened; there the rename is as durable as they make it.
    with contextlib.suppress(OSError):
        place = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(place)
        finally:
            os.close(place)
