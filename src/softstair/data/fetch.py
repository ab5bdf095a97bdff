"""Where data sets come from, their downloads, and which are there.

All digests were published by others: those of archives and of SVHN's files by TensorFlow Datasets
and torchaudio, those of CIFAR-10's batches by libraries that read them. None are published of the
single recordings of Speech Commands; these are counted.

Downloads are resumed, verified and unpacked in ``<root>/.fetch``. A file or folder appears under
its own name only when it is complete; what is there already is never overwritten or removed.
"""

import hashlib
import http.client
import os
import shutil
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import softstair
from softstair import _check
from softstair._errors import first_line, import_extra
from softstair.data.dataset import DataError, guard

Progress = Callable[[str, int, int], None]
"""Called with what is being done, the number of bytes done, and the total."""

AGAIN = "run the same command again"
TIMEOUT, WAITS = 30.0, (1.0, 2.0, 4.0, 8.0)  # seconds for an answer, and before further attempts


@dataclass(frozen=True)
class KnownFile:
    """A file that must be there, and its size and digest if they are published."""

    path: str
    size: int | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class Download:
    """A file at an official address, and what it becomes in the data folder."""

    address: str
    size: int
    sha256: str
    target: str  # path in the data folder
    files: tuple[KnownFile, ...]  # by paths relative to target
    folder: str | None = None  # the folder of a .tar.gz that becomes target, empty for all of it
    recordings: int = 0  # number of .wav files in subfolders of target

    @property
    def file(self) -> str:
        """The last part of the address."""
        return self.address.rpartition("/")[2]


@dataclass(frozen=True)
class Source:
    """The downloads of a data set, and its terms."""

    title: str
    terms: str
    downloads: tuple[Download, ...] = ()


CIFAR10_SHA256 = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
CIFAR10 = Download(
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    170_052_171,
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    "cifar-10-batches-bin",
    tuple(KnownFile(name, 30_730_000, digest) for name, digest in CIFAR10_SHA256.items()),
    folder="cifar-10-batches-bin",
)


def _svhn(name: str, size: int, sha256: str) -> Download:
    address = f"http://ufldl.stanford.edu/housenumbers/{name}"  # there is no https
    return Download(address, size, sha256, f"svhn/{name}", (KnownFile("", size, sha256),))


TRAIN_SHA256 = "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8"
TEST_SHA256 = "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b"
SVHN_TRAIN = _svhn("train_32x32.mat", 182_040_794, TRAIN_SHA256)
SVHN_TEST = _svhn("test_32x32.mat", 64_275_384, TEST_SHA256)


def _speech(folder: str, size: int, sha256: str, recordings: int, *files: str) -> Download:
    address = f"https://storage.googleapis.com/download.tensorflow.org/data/{folder}.tar.gz"
    known = tuple(KnownFile(name) for name in files)
    return Download(address, size, sha256, folder, known, folder="", recordings=recordings)


LISTS = "testing_list.txt", "validation_list.txt"
SPEECH_SHA256 = "af14739ee7dc311471de98f5f9d2c9191b18aedfe957f4a6ff791c709868ff58"
SPEECH_V001_SHA256 = "743935421bb51cccdb6bdd152e04c5c70274e935c82119ad7faeec31780d811d"
SPEECH_TEST_SHA256 = "cc2a00c1147c2254e9be3fa0f779d8c17421dc349b86366567a8edfa9acd51df"
SPEECH = _speech("speech_commands_v0.02", 2_428_923_189, SPEECH_SHA256, 105_835, *LISTS)
SPEECH_V001 = _speech("speech_commands_v0.01", 1_489_096_277, SPEECH_V001_SHA256, 64_727, *LISTS)
SPEECH_TEST = _speech("speech_commands_test_set_v0.02", 112_563_277, SPEECH_TEST_SHA256, 4_890)
SPEECH_TERMS = (
    'Creative Commons BY 4.0; cite P. Warden, "Speech Commands: A Dataset for '
    'Limited-Vocabulary Speech Recognition", 2018'
)

SOURCES: Mapping[str, Source] = {
    "digits": Source(
        "1,797 handwritten digits, part of scikit-learn",
        'Creative Commons BY 4.0; cite E. Alpaydin and C. Kaynak, "Optical Recognition of '
        'Handwritten Digits", 1998',
    ),
    "cifar10": Source(
        "60,000 photographs of ten kinds",
        'no licence is stated; cite A. Krizhevsky, "Learning Multiple Layers of Features from '
        'Tiny Images", 2009',
        (CIFAR10,),
    ),
    "svhn": Source(
        "99,289 house numbers' digits, from photographs",
        'for non-commercial use only; cite Y. Netzer et al., "Reading Digits in Natural Images '
        'with Unsupervised Feature Learning", 2011',
        (SVHN_TRAIN, SVHN_TEST),
    ),
    "speech": Source(
        "105,829 spoken words, v0.02, and its test set", SPEECH_TERMS, (SPEECH, SPEECH_TEST)
    ),
    "speech-v0.01": Source(
        "64,721 spoken words, v0.01, with the test set of v0.02",
        SPEECH_TERMS,
        (SPEECH_V001, SPEECH_TEST),
    ),
}


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
    return root / ".fetch" / f"{download.file}.part"


def _file_size(path: Path) -> int:
    """Return the number of bytes of a file, 0 if there is none."""
    return path.stat().st_size if path.exists() else 0


def _problem_with(download: Download, place: Path, progress: Progress | None = None) -> str:
    """Return what is wrong with files in ``place``, their digests only with ``progress``, or ""."""
    if not place.exists():
        return f"lacks {place.name}"
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
    """Unpack an archive whose SHA-256 was checked, so that its size needs no limit."""

    def members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
        for member in tar:
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
    """Download to the file ``part``, resuming where an earlier attempt stopped."""
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


class Layout(NamedTuple):
    """Files that a data set can be read from: those of training, then those of the test set."""

    name: str
    where: str
    parts: tuple[Download, ...]


@dataclass(frozen=True)
class DataStatus:
    """What a folder has of one data set in one layout."""

    name: str
    state: str  # built in, complete, no test set, incomplete, partial (a download), or no
    where: str = ""  # the layout, if any of its files is there
    problem: str = ""  # what is missing or wrong
    files: int = 0
    size: int = 0  # bytes of all files


def _own(target: str, *files: str) -> Download:
    """Return files that are not downloaded, and of which only the names are known."""
    return Download("", 0, "", target, tuple(map(KnownFile, files or ("",))))


_PICKLES = [name.removesuffix(".bin") for name in CIFAR10_SHA256]
_FEATURES = ("features_v001.npz", "testset_v002.npz", "background.npz")

LAYOUTS = (
    Layout("cifar10", "cifar-10-batches-bin", (CIFAR10,)),
    Layout("cifar10", "cifar-10-batches-py", (_own("cifar-10-batches-py", *_PICKLES),)),
    Layout("svhn", "svhn/*.mat", (SVHN_TRAIN, SVHN_TEST)),
    Layout("svhn", "svhn/*.npz", (_own("svhn/train_32x32.npz"), _own("svhn/test_32x32.npz"))),
    Layout("speech", "speech_commands_v0.02", (SPEECH, SPEECH_TEST)),
    Layout("speech", "speech_commands_v0.01", (SPEECH_V001, SPEECH_TEST)),
    Layout("speech", "gsc", (_own("gsc", *_FEATURES),)),
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
        present = [layout for layout in layouts if (root / layout.parts[0].target).exists()]
        rows += [_status(layout, root) for layout in present] or [DataStatus(name, "no")]
        for download in dict.fromkeys(part for layout in layouts for part in layout.parts):
            if download.address and (size := _file_size(_partial_path(download, root))):
                progress = f"{size:,} of {download.size:,} bytes of {download.file} are downloaded"
                rows.append(DataStatus(name, "partial", "", progress, 0, size))
    return rows


def _status(layout: Layout, root: Path) -> DataStatus:
    paths = [root / part.target for part in layout.parts]
    problem, *test_problem = map(_problem_with, layout.parts, paths)
    state = "incomplete" if problem else "no test set" if any(test_problem) else "complete"
    every = [inner for path in paths for inner in (path.rglob("*") if path.is_dir() else [path])]
    sizes = [path.stat().st_size for path in every if path.is_file()]
    problem = problem or "".join(test_problem)
    return DataStatus(layout.name, state, layout.where, problem, len(sizes), sum(sizes))
