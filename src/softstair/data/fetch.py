"""Where data sets come from, their downloads, and which are there.

All digests were published by others: by TensorFlow Datasets and torchaudio.

Downloads are resumed, verified and unpacked in ``<root>/.fetch``. A file or folder appears under
its own name only when it is complete; what is there already is never overwritten or removed.
"""

import hashlib
import http.client
import shutil
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import softstair
from softstair import _check
from softstair._errors import first_line, import_extra
from softstair.data.dataset import DataError

Progress = Callable[[str, int, int], None]
"""Called with what is being done, the number of bytes done, and the total."""

AGAIN = "run the same command again"
TIMEOUT = 30.0  # seconds for an answer


@dataclass(frozen=True)
class Download:
    """A file at an official address, and what it becomes in the data folder."""

    address: str
    size: int
    sha256: str
    target: str  # path in the data folder
    folder: str | None = None  # the folder of a .tar.gz that becomes target, empty for all of it

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


CIFAR10 = Download(
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    170_052_171,
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    "cifar-10-batches-bin",
    folder="cifar-10-batches-bin",
)
SVHN_TRAIN = Download(
    "http://ufldl.stanford.edu/housenumbers/train_32x32.mat",  # there is no https
    182_040_794,
    "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
    "svhn/train_32x32.mat",
)
SVHN_TEST = Download(
    "http://ufldl.stanford.edu/housenumbers/test_32x32.mat",
    64_275_384,
    "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
    "svhn/test_32x32.mat",
)


def _speech(target: str, size: int, sha256: str) -> Download:
    address = f"https://storage.googleapis.com/download.tensorflow.org/data/{target}.tar.gz"
    return Download(address, size, sha256, target, folder="")


SPEECH = _speech(
    "speech_commands_v0.02",
    2_428_923_189,
    "af14739ee7dc311471de98f5f9d2c9191b18aedfe957f4a6ff791c709868ff58",
)
SPEECH_V001 = _speech(
    "speech_commands_v0.01",
    1_489_096_277,
    "743935421bb51cccdb6bdd152e04c5c70274e935c82119ad7faeec31780d811d",
)
SPEECH_TEST = _speech(
    "speech_commands_test_set_v0.02",
    112_563_277,
    "cc2a00c1147c2254e9be3fa0f779d8c17421dc349b86366567a8edfa9acd51df",
)
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
    filelock = import_extra("filelock")
    try:
        (root / ".fetch").mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(root / ".fetch" / "lock", timeout=0):
            for download in source.downloads:
                target = root / download.target
                if not target.exists():
                    log(f"{name}: fetching {download.address} ({download.size:,} bytes).")
                    part = root / ".fetch" / f"{download.file}.part"
                    _fetch(download, part, target, progress)
                log(f"{name}: {str(target)!r} is there.")
    except filelock.Timeout:
        problem = "is in use by another softstair data fetch"
        raise DataError(root, problem, "wait until it has finished") from None
    except OSError as error:
        remedy = f"free some space or choose another `data_dir`, and {AGAIN}"
        raise DataError(root, f"cannot be written ({error.strerror})", remedy) from error
    log(f"{name}: {source.terms}.")


def _fetch(download: Download, part: Path, target: Path, progress: Progress) -> None:
    """Download to the file ``part``, verify it, and put it or what it contains in place."""
    _download(download, part, progress)
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != download.sha256:
        part.unlink()
        problem = f"has SHA-256 {digest} instead of {download.sha256}"
        remedy = f"it was removed, so {AGAIN}; if that fails too, {download.address} has changed"
        raise DataError(part, problem, remedy)
    target.parent.mkdir(parents=True, exist_ok=True)
    if download.folder is None:
        part.rename(target)
        return
    unpacked = part.with_name("unpacked")
    shutil.rmtree(unpacked, ignore_errors=True)  # of a process that was killed
    with part.open("rb") as file, tarfile.open(fileobj=file, mode="r:gz") as archive:
        for member in archive:
            archive.extract(member, unpacked, filter="data")
            progress(f"unpacking {download.file}", file.tell(), download.size)
    (unpacked / download.folder).rename(target)
    shutil.rmtree(unpacked, ignore_errors=True)
    part.unlink()


def _download(download: Download, part: Path, progress: Progress) -> None:
    """Download to the file ``part``, from where an earlier attempt stopped."""
    start = part.stat().st_size if part.exists() else 0
    if start >= download.size:
        return
    headers = {"User-Agent": f"softstair/{softstair.__version__}", "Range": f"bytes={start}-"}
    request = urllib.request.Request(download.address, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            is_rest = response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
            expected = download.size - start * is_rest
            if response.length != expected:  # such as the login page of a network
                raise ConnectionError(f"{response.length} bytes instead of {expected}")
            with part.open("ab" if is_rest else "wb") as file:
                while block := response.read(1 << 18):
                    file.write(block)
                    progress(download.file, file.tell(), download.size)
                if file.tell() < download.size:
                    raise ConnectionError("the connection was closed")
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it holds the connection
        problem = f"cannot be downloaded ({first_line(error)})"
        remedy = f"{AGAIN} to resume, or look at the address in a browser"
        raise DataError(download.address, problem, remedy) from None


class Layout(NamedTuple):
    """Files that a data set can be read from: those of training, and those of the test set."""

    name: str
    where: str
    training: str
    test: str = ""  # empty if those of training contain them


class DataStatus(NamedTuple):
    """What a folder has of one data set in one layout."""

    name: str
    state: str  # built in, complete, no test set, partial (a download), or no
    where: str = ""
    files: int = 0
    size: int = 0  # bytes of all files


LAYOUTS = (
    Layout("cifar10", "cifar-10-batches-bin", CIFAR10.target),
    Layout("svhn", "svhn/*.mat", SVHN_TRAIN.target, SVHN_TEST.target),
    Layout("svhn", "svhn/*.npz", "svhn/train_32x32.npz", "svhn/test_32x32.npz"),
    Layout("speech", "speech_commands_v0.02", SPEECH.target, SPEECH_TEST.target),
    Layout("speech", "speech_commands_v0.01", SPEECH_V001.target, SPEECH_TEST.target),
    Layout("speech", "gsc", "gsc"),
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
        present = [layout for layout in layouts if (root / layout.training).exists()]
        rows += [_status(layout, root) for layout in present] or [DataStatus(name, "no")]
    parts = sorted((root / ".fetch").glob("*.part"))
    return rows + [DataStatus(part.stem, "partial", "", 1, part.stat().st_size) for part in parts]


def _status(layout: Layout, root: Path) -> DataStatus:
    parts = [root / path for path in (layout.training, layout.test) if path]
    state = "complete" if all(path.exists() for path in parts) else "no test set"
    every = [inner for path in parts for inner in (path, *path.rglob("*")) if inner.is_file()]
    size = sum(path.stat().st_size for path in every)
    return DataStatus(layout.name, state, layout.where, len(every), size)
