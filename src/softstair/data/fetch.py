"""Downloads of data sets: resumed, verified, unpacked, and then moved into place.

Work is done in ``<root>/.fetch``. A file or folder appears under its own name only when it is
complete and verified. What is there already is never overwritten or removed. :func:`survey` says
which data sets are there by names and sizes of files, and reads none.
"""

import hashlib
import http.client
import os
import shutil
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import softstair
from softstair import _check
from softstair._errors import first_line, import_extra
from softstair.data.dataset import DataError
from softstair.data.reading import guard
from softstair.data.sources import (
    CIFAR10,
    SOURCES,
    SPEECH,
    SPEECH_TEST,
    SPEECH_V001,
    SVHN,
    Download,
    Source,
)

__all__ = ["DataStatus", "Progress", "fetch", "survey"]

Progress = Callable[[str, int, int], None]
"""Called with what is being done, the number of bytes done, and the total."""

AGAIN = "run the same command again"
MAX_MEMBERS, MAX_UNPACKED = 250_000, 8 * 10**9  # files of an archive, and their bytes
TIMEOUT, WAITS = 30.0, (1.0, 2.0, 4.0, 8.0)  # seconds for an answer, and before further attempts


def fetch(
    name: str,
    root: Path | str = "data",
    *,
    sources: Mapping[str, Source] = SOURCES,
    log: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda action, done, total: None,
) -> None:
    """Download a data set into the folder ``root``, unless it is there already; log what is done.

    >>> fetch("digits", log=print)
    digits: nothing to fetch (1,797 handwritten digits, part of scikit-learn).
    """
    source, root = sources[_check.choice("data", name, sources)], Path(root)
    if not source.downloads:
        log(f"{name}: nothing to fetch ({source.title}).")
        return
    try:
        with _locked(root):
            for download in source.downloads:
                target = root / download.target
                if not _is_there(download, target, progress):
                    log(f"{name}: fetching {download.address} ({download.size:,} bytes).")
                    _fetch_download(download, _partial_path(download, root), target, progress)
                log(f"{name}: {str(target)!r} is there, verified.")
    except OSError as error:
        remedy = f"free some space or choose another `data_dir`, and {AGAIN}"
        raise DataError(root, f"cannot be written ({error.strerror})", remedy) from error
    log(f"{name}: {source.terms}.")


def _partial_path(download: Download, root: Path) -> Path:
    """Return the path of a download that is not complete."""
    return root / ".fetch" / f"{download.file}.part"


def _file_size(path: Path) -> int:
    """Return the number of bytes of a file, 0 if there is none."""
    return path.stat().st_size if path.exists() else 0


def _problem_with(download: Download, place: Path, progress: Progress | None = None) -> str:
    """Return what is wrong with a download that was moved to ``place``; empty if nothing.

    Looks at the names, sizes and number of files; with ``progress``, also at their digests.
    """
    for file in download.files:
        path = place / file.path
        size = _file_size(path)
        if not path.is_file():
            return f"lacks {path.name}"
        if size == 0 or file.size not in (None, size):
            expected = "" if file.size is None else f" instead of {file.size:,}"
            return f"has {size:,} bytes{expected} in {path.name}"
        if progress and file.sha256 and (problem := _mismatch(path, file.sha256, progress)):
            return problem
    if download.recordings:
        count = sum(1 for path in place.glob("*/*.wav") if not path.name.startswith("."))
        if count < download.recordings:
            return f"has {count:,} of {download.recordings:,} recordings"
    return ""


def _mismatch(path: Path, expected: str, progress: Progress) -> str:
    """Return how the digest of a file differs from the expected one; empty if it does not."""
    sha256, total = hashlib.sha256(), _file_size(path)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            sha256.update(block)
            progress(f"verifying {path.name}", file.tell(), total)
    digest = sha256.hexdigest()
    return "" if digest == expected else f"has SHA-256 {digest} instead of {expected}"


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Allow one process at a time to fetch data into a folder."""
    filelock = import_extra("filelock")
    folder = root / ".fetch"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(folder / "lock", timeout=0):
            yield
    except filelock.Timeout:
        problem = "is in use by another softstair data fetch"
        raise DataError(root, problem, "wait until it has finished") from None


def _is_there(download: Download, target: Path, progress: Progress) -> bool:
    if target.is_dir() and not target.is_symlink() and not any(target.iterdir()):
        target.rmdir()
    if not os.path.lexists(target):
        return False
    if problem := _problem_with(download, target, progress):
        remedy = f"move it elsewhere, and {AGAIN}"
        raise DataError(target, f"is not as published: it {problem}", remedy)
    return True


def _fetch_download(download: Download, part: Path, target: Path, progress: Progress) -> None:
    _download_file(download, part, progress)
    if problem := _mismatch(part, download.sha256, progress):
        part.unlink()
        remedy = f"it was removed, so {AGAIN}; if that fails too, {download.address} has changed"
        raise DataError(part, problem, remedy)
    target.parent.mkdir(parents=True, exist_ok=True)
    if download.folder is None:
        os.rename(part, target)
        return
    temporary = part.with_name("unpacked")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        _unpack(part, temporary, progress)
        place = temporary / download.folder
        if problem := _problem_with(download, place, progress):
            raise DataError(part, f"is not as published: it {problem}", "please report this")
        os.rename(place, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    part.unlink()


def _unpack(archive: Path, folder: Path, progress: Progress) -> None:
    def members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
        size = 0
        for count, member in enumerate(tar, start=1):
            size += member.size
            if count > MAX_MEMBERS or size > MAX_UNPACKED:
                raise ValueError(f"more than {MAX_MEMBERS:,} files or {MAX_UNPACKED:,} bytes")
            progress(f"unpacking {archive.stem}", file.tell(), _file_size(archive))
            yield member

    remedy = f"check that the disk is not full and that Python is 3.11.4 or newer, and {AGAIN}"
    with (
        guard(archive, "unpacked", remedy),
        archive.open("rb") as file,
        tarfile.open(fileobj=file, mode="r:gz") as tar,
    ):
        tar.extractall(folder, members(tar), filter=tarfile.data_filter)


def _download_file(download: Download, part: Path, progress: Progress) -> None:
    """Download to the file ``part``, resuming where an earlier attempt stopped.

    Writes no more than the known size. Whether the bytes are right is for the digest to decide.
    """
    waits = list(WAITS)
    while (size := _file_size(part)) != download.size:
        try:
            _attempt(download, part, size, progress)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
                if error.code < 500 and error.code not in (408, 425, 429):
                    waits = []
            elif _file_size(part) > size:
                waits = list(WAITS)
            if not waits:
                have = f"{_file_size(part):,} of {download.size:,} bytes are there"
                problem = f"cannot be downloaded ({first_line(error)}; {have})"
                remedy = f"{AGAIN} to resume, or look at the address in a browser"
                raise DataError(download.address, problem, remedy) from None
            time.sleep(waits.pop(0))


def _attempt(download: Download, part: Path, start: int, progress: Progress) -> None:
    headers = {"User-Agent": f"softstair/{softstair.__version__}"}
    if 0 < start < download.size:
        headers["Range"] = f"bytes={start}-"
    request = urllib.request.Request(download.address, headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        resumed = response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        length = response.headers.get("Content-Length", str(download.size))
        if not resumed and length != str(download.size):  # such as the login page of a network
            problem = f"has {length} bytes instead of {download.size:,}"
            raise DataError(download.address, problem, "look at it in a browser")
        with part.open("ab" if resumed else "wb") as file:
            while (done := file.tell()) < download.size:
                block = response.read1(min(1 << 18, download.size - done))
                if not block:
                    raise ConnectionError("the connection was closed")
                file.write(block)
                progress(download.file, file.tell(), download.size)


Piece = Download | str
"""An unpacked download, or the path of a file of which only the name is known."""


@dataclass(frozen=True)
class Layout:
    """A set of files that a data set can be read from; training does not need ``test``."""

    name: str
    where: str
    pieces: tuple[Piece, ...]
    test: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class DataStatus:
    """What a folder has of one data set in one layout."""

    name: str
    state: str  # built in, complete, no test set, incomplete, partial (a download), or no
    where: str = ""  # the layout, if any of its files is there
    problem: str = ""  # what is missing or wrong
    files: int = 0
    size: int = 0  # bytes of all files


_CIFAR10_PICKLES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
_FEATURES = ("features_v001", "testset_v002", "background")

LAYOUTS = (
    Layout("cifar10", "cifar-10-batches-bin", (CIFAR10,)),
    Layout(
        "cifar10",
        "cifar-10-batches-py",
        tuple(f"cifar-10-batches-py/{name}" for name in _CIFAR10_PICKLES),
    ),
    Layout("svhn", "svhn/*.mat", SVHN[:1], SVHN[1:]),
    Layout("svhn", "svhn/*.npz", ("svhn/train_32x32.npz",), ("svhn/test_32x32.npz",)),
    Layout("speech", "speech_commands_v0.02", (SPEECH,), (SPEECH_TEST,)),
    Layout("speech", "speech_commands_v0.01", (SPEECH_V001,), (SPEECH_TEST,)),
    Layout("speech", "gsc", tuple(f"gsc/{name}.npz" for name in _FEATURES)),
)


def survey(root: Path | str = "data") -> list[DataStatus]:
    """Return a status for each layout that is there, or with state "no", and partial downloads.

    >>> [(row.name, row.state) for row in survey("nowhere")]
    [('digits', 'built in'), ('cifar10', 'no'), ('svhn', 'no'), ('speech', 'no')]
    """
    root = Path(root)
    rows = [DataStatus("digits", "built in", "scikit-learn")]
    for name in dict.fromkeys(layout.name for layout in LAYOUTS):
        layouts = [layout for layout in LAYOUTS if layout.name == name]
        present = [
            _status(layout, root)
            for layout in layouts
            if any((root / _path(piece)).exists() for piece in layout.pieces)
        ]
        rows += [*(present or [DataStatus(name, "no")]), *_partial(name, layouts, root)]
    return rows


def _path(piece: Piece) -> str:
    return piece if isinstance(piece, str) else piece.target


def _status(layout: Layout, root: Path) -> DataStatus:
    problems = [text for piece in layout.pieces if (text := _problem(piece, root))]
    test_problems = [text for piece in layout.test if (text := _problem(piece, root))]
    state = "incomplete" if problems else "no test set" if test_problems else "complete"
    paths = {root / _path(piece) for piece in (*layout.pieces, *layout.test)}
    every = [inner for path in paths for inner in (path.rglob("*") if path.is_dir() else [path])]
    sizes = [path.stat().st_size for path in every if path.is_file()]
    problem = next(iter([*problems, *test_problems]), "")
    return DataStatus(layout.name, state, layout.where, problem, len(sizes), sum(sizes))


def _problem(piece: Piece, root: Path) -> str:
    path = root / _path(piece)
    if not path.exists():
        return f"lacks {path.name}"
    if isinstance(piece, Download):
        return _problem_with(piece, path)
    return "" if path.is_file() and path.stat().st_size else f"{path.name} is empty"


def _partial(name: str, layouts: Sequence[Layout], root: Path) -> Iterator[DataStatus]:
    pieces = [piece for layout in layouts for piece in (*layout.pieces, *layout.test)]
    for download in dict.fromkeys(piece for piece in pieces if isinstance(piece, Download)):
        if size := _file_size(_partial_path(download, root)):
            progress = f"{size:,} of {download.size:,} bytes of {download.file} are downloaded"
            yield DataStatus(name, "partial", "", progress, 0, size)
