"""Official addresses, sizes and digests of the data sets.

All digests were published by others: those of archives and of SVHN's files by TensorFlow Datasets
and torchaudio, those of CIFAR-10's batches by libraries that read them. None are published of the
single recordings of Speech Commands; these are counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["SOURCES", "Download", "KnownFile", "Source"]


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
SVHN = (
    _svhn("train_32x32.mat", 182_040_794, TRAIN_SHA256),
    _svhn("test_32x32.mat", 64_275_384, TEST_SHA256),
)


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
        SVHN,
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
"""By the name that ``softstair data fetch`` takes."""
