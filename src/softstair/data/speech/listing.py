"""What lies in the folders of Speech Commands, and what its lists say; no clip is opened yet."""

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from softstair.data.dataset import DataError
from softstair.data.formats import arrays
from softstair.data.speech.corpus import REMEDY

__all__ = ["Clip", "digest", "parse_list", "read_list", "recordings", "subfolders"]

# A folder that begins with _ is not a word, and a name that begins with . is hidden, or goes up.
_LINE: Final = re.compile(r"[^/\\._\0][^/\\\0]*/[^/\\.\0][^/\\\0]*\.wav")
_LONGEST_LIST: Final = 2**24


class Clip(NamedTuple):
    """A recording as the listing of its folder shows it."""

    folder: str
    name: str
    path: Path
    size: int
    changed: int

    @property
    def key(self) -> str:
        """Its name in the lists."""
        return f"{self.folder}/{self.name}"

    @property
    def speaker(self) -> str:
        """
        >>> Clip("yes", "0a7c2a8d_nohash_1.wav", Path("yes/0a7c2a8d_nohash_1.wav"), 0, 0).speaker
        '0a7c2a8d'
        """
        return self.name[: -len(".wav")].split("_nohash_")[0]


def subfolders(folder: Path) -> list[Path]:
    """Folders within ``folder`` that may be words: neither hidden nor begun with _."""
    try:
        with os.scandir(folder) as entries:
            return [
                folder / entry.name
                for entry in entries
                if not entry.name.startswith((".", "_")) and entry.is_dir()
            ]
    except OSError as error:
        raise DataError(folder, f"cannot be listed ({error.strerror})", REMEDY) from error


def recordings(folders: Iterable[Path]) -> list[Clip]:
    """The .wav files of these folders by name, whatever order the file system has them in."""
    found = []
    for folder in folders:
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.endswith(".wav") and not entry.name.startswith("."):
                        status = entry.stat()
                        clip = Clip(
                            folder.name,
                            entry.name,
                            folder / entry.name,
                            status.st_size,
                            status.st_mtime_ns,
                        )
                        found.append(clip)
        except OSError as error:
            path = Path(error.filename) if isinstance(error.filename, str) else folder
            raise DataError(path, f"cannot be read ({error.strerror})", REMEDY) from error
    return sorted(found, key=lambda clip: clip.key)


def digest(*groups: Iterable[Clip]) -> str:
    """16 hexadecimal digits that change with the names, the sizes and the times of change."""
    sha = hashlib.sha256()
    for group in groups:
        for clip in group:
            sha.update(os.fsencode(clip.key) + f"\0{clip.size}\0{clip.changed}\n".encode())
        sha.update(b"\n")
    return sha.hexdigest()[:16]


def read_list(path: Path) -> frozenset[str]:
    """The clips that a list names, as ``parse_list`` finds them."""
    return parse_list(arrays.contents(path, _LONGEST_LIST, REMEDY), path)


def parse_list(data: bytes, path: Path) -> frozenset[str]:
    """``<word>/<file>.wav`` of every line: names to be compared, and never to be opened.

    >>> parse_list(b"yes/0a7c2a8d_nohash_1.wav\\r\\n", Path("testing_list.txt"))
    frozenset({'yes/0a7c2a8d_nohash_1.wav'})
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(path, f"is not text at byte {error.start}", REMEDY) from error
    lines = [line.strip(" \t\r") for line in text.split("\n")]
    for number, line in enumerate(lines, start=1):
        if line and not _LINE.fullmatch(line):
            wrong = f"has {line[:80]!r} in line {number}, which is not <word>/<file>.wav"
            raise DataError(path, wrong, REMEDY)
    return frozenset(lines) - {""}
