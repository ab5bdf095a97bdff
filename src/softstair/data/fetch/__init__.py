"""Data sets from their official addresses: downloaded, verified, unpacked, then put in place.

Work is done in ``<root>/.fetch``; a file or folder appears under its own name when it is whole and
verified, and not before. What is already there is never overwritten and never removed.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import filelock

from softstair.data.dataset import DataError
from softstair.data.fetch.archive import extract
from softstair.data.fetch.http import PATIENT, Patience, download, forget
from softstair.data.fetch.sources import SOURCES, Download, Known, Source

__all__ = ["fetch", "lack", "part_of"]

Tell = Callable[[str], None]
"""Takes a line for the user."""
Moved = Callable[[str, int, int], None]
"""Takes what is going on, and how many bytes of how many are done."""


def fetch(
    name: str,
    root: Path | str = "data",
    *,
    sources: Mapping[str, Source] = SOURCES,
    patience: Patience = PATIENT,
    tell: Tell = lambda line: None,
    moved: Moved = lambda what, done, total: None,
) -> None:
    """Brings the data set of that name into the folder ``root``, unless it is there already.

    >>> fetch("digits", tell=print)
    digits: nothing to fetch (1,797 handwritten digits, part of scikit-learn).
    """
    if name not in sources:
        raise ValueError(f"data must be one of {', '.join(sources)}, but {name!r} was given.")
    source, root = sources[name], Path(root)
    if not source.downloads:
        tell(f"{name}: nothing to fetch ({source.title}).")
        return
    with _alone(root):
        for item in source.downloads:
            _bring(name, item, root, patience, tell, moved)
    tell(f"{name}: {source.terms}.")


def part_of(item: Download, root: Path) -> Path:
    """Where a download lies until it is whole."""
    return root / ".fetch" / f"{item.file}.part"


def lack(item: Download, place: Path) -> str:
    """What a download that has become ``place`` lacks, by names, sizes and numbers; empty: nothing.

    Contents are not read.
    """
    if item.archive is None:
        return _lack_of(item.known, place)
    for known in item.archive.files:
        if wrong := _lack_of(known, place / known.path):
            return wrong
    if item.archive.recordings:
        found = sum(1 for one in place.glob("*/*.wav") if not one.name.startswith("."))
        if found < item.archive.recordings:
            return f"has {found:,} of {item.archive.recordings:,} recordings"
    return ""


def _lack_of(known: Known, path: Path) -> str:
    if not path.is_file():
        return f"lacks {known.path}"
    found = path.stat().st_size
    if found == 0 or known.size not in (None, found):
        wanted = f", where {known.size:,} are known" if known.size is not None else ""
        return f"has {found:,} bytes in {known.path}{wanted}"
    return ""


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    room = root / ".fetch"
    lock = filelock.FileLock(room / "lock")
    try:
        room.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise DataError(
            root,
            "is being filled by another softstair data fetch",
            "wait until that is done, or choose another folder",
        ) from None
    except OSError as error:
        raise DataError(
            root, f"cannot hold data sets ({error.strerror})", "choose another folder"
        ) from None
    try:
        # What a fetch that was killed left half-unpacked.
        for rest in room.glob("*.unpacked"):
            shutil.rmtree(rest)
        yield
    finally:
        lock.release()


def _bring(
    name: str, item: Download, root: Path, patience: Patience, tell: Tell, moved: Moved
) -> None:
    target = root / item.target
    if target.is_dir() and not target.is_symlink() and not any(target.iterdir()):
        target.rmdir()
    if os.path.lexists(target):
        _verify_place(item, target, moved)
        tell(f"{name}: {str(target)!r} is there already, {_how(item)}.")
        return
    part = part_of(item, root)
    tell(f"{name}: fetching {item.address} ({item.size:,} bytes).")
    download(
        item.address, item.size, part, patience, lambda done: moved(item.file, done, item.size)
    )
    if wrong := _mismatch(item.known, part, moved):
        forget(part)
        raise DataError(
            part,
            wrong,
            "it was removed, so run the same command again; if that ends the same way, the file at "
            f"{item.address} is not the one that is known",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    if item.archive is None:
        os.rename(part, target)
    else:
        _unpack(item, part, target, moved)
    forget(part)
    tell(f"{name}: {str(target)!r} is there, {_how(item)}.")


def _unpack(item: Download, part: Path, target: Path, moved: Moved) -> None:
    assert item.archive is not None
    room = part.with_name(f"{item.target}.unpacked")
    what = f"unpacking {item.file}"
    limits = item.archive.members, item.archive.size
    extract(part, room, *limits, lambda done: moved(what, done, item.size))
    try:
        place = room / item.archive.inside
        if wrong := lack(item, place) or _wrong_within(item, place, moved):
            raise DataError(part, f"does not hold what it should: it {wrong}", "report this")
        os.rename(place, target)
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _verify_place(item: Download, target: Path, moved: Moved) -> None:
    wrong = lack(item, target) or _wrong_within(item, target, moved)
    if wrong:
        raise DataError(
            target,
            f"is there but not as it should be: it {wrong}",
            "move it elsewhere, and run the same command again",
        )


def _wrong_within(item: Download, place: Path, moved: Moved) -> str:
    if item.archive is None:
        return _mismatch(item.known, place, moved)
    found = (_mismatch(known, place / known.path, moved) for known in item.archive.files)
    return next(filter(None, found), "")


def _mismatch(known: Known, path: Path, moved: Moved) -> str:
    """Which published digest the file does not have, as the rest of a sentence; empty: none."""
    hashes = {name: hashlib.new(name, usedforsecurity=False) for name in known.digests}
    if not hashes:
        return ""
    done, total = 0, path.stat().st_size
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            for one in hashes.values():
                one.update(block)
            done += len(block)
            moved(f"verifying {known.path}", done, total)
    for name, wanted in known.digests.items():
        if (found := hashes[name].hexdigest()) != wanted:
            return f"has {name} {found} in {known.path}, where {wanted} is published"
    return ""


def _how(item: Download) -> str:
    if item.archive is None or any(known.digests for known in item.archive.files):
        return "verified by its digests"
    return f"with all {item.archive.recordings:,} recordings"
