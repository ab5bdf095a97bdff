"""Atomic writes, and no writes through symbolic links.

A run directory may come from anybody. It may itself be a symbolic link, but a link inside it could
point to any file of the user. :func:`replacing` and :func:`write` replace such a link by a new
file; :func:`refuse_link` is for folders and locks, which are used as they are.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from softstair._errors import SoftstairError

__all__ = ["LinkError", "refuse_link", "replacing", "write"]


class LinkError(SoftstairError):
    """A symbolic link where softstair would write."""


def refuse_link(path: Path) -> Path:
    """Return the path.

    Raises:
        LinkError: If the path is a symbolic link. Its parents may be links.
    """
    if path.is_symlink():
        raise LinkError(
            f"{str(path)!r} is a symbolic link, and nothing is written through a link inside a run "
            "directory: delete the link, or replace it by what it points to."
        )
    return path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path`` atomically when the block ends.

    If the block raises, ``path`` is unchanged. A symbolic link is replaced; its target is
    unchanged.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    partial.unlink(missing_ok=True)
    partial.touch(exist_ok=False)  # exclusive: a link of this name is not followed
    try:
        yield partial
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write(path: Path, text: str) -> None:
    """Write a text file atomically."""
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
