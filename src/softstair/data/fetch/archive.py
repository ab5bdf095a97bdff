"""A .tar.gz becomes a folder, whole or not at all, and nothing outside that folder.

The archive is taken for hostile. tarfile reads its headers and nothing else: it gets a stream that
goes forwards only and gives so many bytes a header, so that no header can fill the memory. Files
and folders are made here, from names of plain characters, with modes and times of our own; links,
devices, sparse files, second files of a name (in any case of letters) are refused, and so is more
than was said to come. Where Python has tarfile's own ``data`` filter, it must agree.
"""

import errno
import gzip
import os
import re
import shutil
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

from softstair.data.dataset import DataError

__all__ = ["FULL", "extract"]

BLOCK = 1 << 20
HEADER = 16 << 10
"""Bytes of headers a member may have; the members of official archives have 512 to 1,536."""
DEPTH = 8
NAME = re.compile(r"[A-Za-z0-9._-]{0,99}[A-Za-z0-9_-]")
"""No name ends in a dot, so neither "." nor ".." is one."""
FULL = (errno.ENOSPC, errno.EDQUOT)


class _Refused(Exception):
    """What is wrong with the archive, as the rest of a sentence that begins with its path."""


def extract(
    archive: Path,
    folder: Path,
    members: int,
    size: int,
    moved: Callable[[int], None] = lambda done: None,
) -> None:
    """Makes the folder, which must not be there yet, of what the archive holds.

    members, size   at most so many members, with so many bytes in all
    moved           is called with the number of bytes read of the archive so far

    A :class:`DataError` says what was wrong; then there is no such folder.

    >>> import io, tempfile
    >>> with tempfile.TemporaryDirectory() as room:
    ...     where = Path(room)
    ...     with tarfile.open(where / "a.tar.gz", "w:gz") as tar:
    ...         info = tarfile.TarInfo("words/yes.txt")
    ...         info.size = 3
    ...         tar.addfile(info, io.BytesIO(b"yes"))
    ...     extract(where / "a.tar.gz", where / "a", members=10, size=100)
    ...     (where / "a" / "words" / "yes.txt").read_text()
    'yes'
    """
    folder.mkdir()
    try:
        with open(archive, "rb") as raw, gzip.GzipFile(fileobj=raw) as stream:
            # Headers and padding: two blocks a member, and as much again for extended names.
            window = _Window(stream, size + 2048 * members + BLOCK)
            _unpack(window, folder, members, size, lambda: moved(raw.tell()))
    except BaseException as error:
        shutil.rmtree(folder)
        if isinstance(error, _Refused):
            raise DataError(archive, str(error), "nothing of it was kept; fetch it again") from None
        if isinstance(error, OSError) and error.errno in FULL:
            raise DataError(
                folder.parent, "has no room left", f"make room for {size:,} bytes, and go on"
            ) from None
        raise


class _Window:
    """A stream as tarfile sees it: forwards only, up to a limit, ``budget`` bytes at a time."""

    def __init__(self, stream: gzip.GzipFile, limit: int) -> None:
        self._stream, self._limit = stream, limit
        self._position = 0
        self.budget = HEADER
        self.last = b""

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        if not self._position <= position <= self._limit:
            raise _Refused(f"is not in order: it points to byte {position:,} of what it holds")
        while self._position < position and self._pull(min(BLOCK, position - self._position)):
            pass

    def read(self, count: int) -> bytes:
        if not 0 <= count <= self.budget:
            raise _Refused(f"is not in order: a header would have {count:,} bytes or more")
        self.budget -= count
        self.last = self._pull(count)
        return self.last

    def drain(self) -> None:
        """To the very end, where gzip keeps its checksum."""
        while self._pull(BLOCK):
            pass

    def _pull(self, count: int) -> bytes:
        try:
            data = self._stream.read(count)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise _Refused(f"is damaged or not a .tar.gz ({error})") from None
        self._position += len(data)
        if self._position > self._limit:
            raise _Refused(f"unpacks to more than the {self._limit:,} bytes that may come")
        return data


def _unpack(
    window: _Window, folder: Path, members: int, size: int, moved: Callable[[], None]
) -> None:
    tar: tarfile.TarFile | None = None
    seen: dict[str, tuple[str, bool]] = {}
    count = 0
    while True:
        tar, info = _next(window, tar)
        if info is None:
            break
        count, size = count + 1, size - info.size
        if count > members:
            raise _Refused(f"holds more than the {members:,} members that may come")
        if size < 0:
            raise _Refused(f"holds more bytes than may come, {_short(info.name)} being one too big")
        parts = _parts(info, folder)
        _remember(parts, info.isdir(), seen)
        path = folder.joinpath(*parts)
        if info.isdir():
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            _copy(window, info, path)
        moved()
    # tarfile takes a damaged header for the end of the archive; the true end is a block of zeros.
    if window.last.strip(b"\0"):
        raise _Refused(f"is damaged: its header at byte {window.tell():,} cannot be read")
    window.drain()


def _next(
    window: _Window, tar: tarfile.TarFile | None
) -> tuple[tarfile.TarFile, tarfile.TarInfo | None]:
    window.budget = HEADER
    try:
        if tar is None:
            tar = tarfile.TarFile(fileobj=window, encoding="utf-8")  # type: ignore[arg-type]
        info = tar.next()
        # It would remember every member, a hundred megabytes of them for Speech Commands.
        tar.members = []  # type: ignore[attr-defined]
        return tar, info
    except (tarfile.TarError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        raise _Refused(f"is damaged or not a .tar.gz ({error})") from None


def _parts(info: tarfile.TarInfo, folder: Path) -> tuple[str, ...]:
    """The member's path, in parts, all of them harmless."""
    name = _short(info.name)
    if info.issparse() or not (info.isreg() or info.isdir()):
        raise _Refused(f"holds {name}, which is neither a plain file nor a folder")
    if info.size < 0 or (info.isdir() and info.size):
        raise _Refused(f"says that {name} has {info.size:,} bytes, which cannot be")
    parts = info.name.split("/")
    if parts[0] == ".":
        parts = parts[1:]
    if not parts and not info.isdir():
        raise _Refused("holds a file without a name")
    if len(parts) > DEPTH or not all(NAME.fullmatch(part) for part in parts):
        raise _Refused(f"holds {name}, which is no path of plain names within a folder")
    agrees = getattr(tarfile, "data_filter", None)  # from Python 3.11.4 on
    if agrees is not None:
        try:
            agrees(info, str(folder))
        except tarfile.TarError as error:
            raise _Refused(f"holds {name}, which Python will not extract ({error})") from None
    return tuple(parts)


def _remember(parts: tuple[str, ...], is_folder: bool, seen: dict[str, tuple[str, bool]]) -> None:
    """Refuses two files of one name, a file in a file, and names that differ in case alone."""
    for depth in range(1, len(parts) + 1):
        path, whole = "/".join(parts[:depth]), depth == len(parts)
        entry = (path, is_folder if whole else True)
        before = seen.setdefault(path.lower(), entry)
        if before is not entry and (before != entry or (whole and not is_folder)):
            raise _Refused(f"holds both {_short(before[0])} and {_short('/'.join(parts))}")


def _copy(window: _Window, info: tarfile.TarInfo, path: Path) -> None:
    window.seek(info.offset_data)
    window.budget = left = info.size
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    with open(os.open(path, flags | getattr(os, "O_BINARY", 0), 0o644), "wb") as file:
        while left:
            block = window.read(min(BLOCK, left))
            if not block:
                raise _Refused(f"ends in the midst of {_short(info.name)}")
            file.write(block)
            left -= len(block)


def _short(name: str) -> str:
    return repr(name if len(name) <= 80 else name[:79] + "…")
