"""Where the data sets officially lie, and what is published of them: sizes and digests.

Every digest here was published by somebody else, and none was computed by us:

- md5 of ``cifar-10-binary.tar.gz`` by its author, on the page of the data set;
- md5 of SVHN's files by torchvision, sha256 of Speech Commands v0.01 and v0.02 by torchaudio;
- sizes and sha256 of all archives but v0.01's by TensorFlow Datasets, which agree with the above;
- md5 and sha256 of the six files within CIFAR-10's archive by several libraries that read them.

Where two are published both are checked. md5 tells a damaged file from a whole one, but not a
forged one; sha256 does both, and here each file to download has one. No digest of the single
recordings of Speech Commands is published: they are counted instead (the numbers are those of its
README, with the six background noises).

>>> [part.file for part in SOURCES["svhn"].downloads]
['train_32x32.mat', 'test_32x32.mat']
"""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["SOURCES", "Archive", "Download", "Known", "Source"]


@dataclass(frozen=True)
class Known:
    """A file, and what is published of it; the path is relative to the folder it is sought in."""

    path: str
    size: int | None = None
    md5: str | None = None
    sha256: str | None = None

    @property
    def digests(self) -> dict[str, str]:
        """The published digests by the name of their algorithm."""
        named = {"md5": self.md5, "sha256": self.sha256}
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True)
class Archive:
    """What a .tar.gz may hold at most, and what must be in the folder that it becomes."""

    inside: str
    """The folder within the archive that is wanted; empty: all of it."""
    members: int
    size: int
    files: tuple[Known, ...]
    recordings: int = 0
    """Number of .wav files, one folder down."""


@dataclass(frozen=True)
class Download:
    """One file at its official address, and what it becomes within the folder of data sets."""

    address: str
    known: Known
    target: str
    archive: Archive | None = None

    @property
    def file(self) -> str:
        """The last part of the address."""
        return self.address.rpartition("/")[2]

    @property
    def size(self) -> int:
        assert self.known.size is not None
        return self.known.size


@dataclass(frozen=True)
class Source:
    """What ``softstair data fetch`` brings under one name, and on which terms."""

    title: str
    terms: str
    downloads: tuple[Download, ...]


def _batch(name: str, md5: str, sha256: str) -> Known:
    return Known(name, 30_730_000, md5, sha256)


CIFAR10 = Download(
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    Known(
        "cifar-10-binary.tar.gz",
        170_052_171,
        "c32a1d4ab5d03f1284b67883e8d87530",
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ),
    "cifar-10-batches-bin",
    Archive(
        "cifar-10-batches-bin",
        members=100,
        size=200_000_000,
        files=(
            _batch(
                "data_batch_1.bin",
                "5dd7e06a14cb22eb9f671a540d1b7c25",
                "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            ),
            _batch(
                "data_batch_2.bin",
                "5ea93a67294ea407fff1d09f752e9692",
                "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            ),
            _batch(
                "data_batch_3.bin",
                "942cd6a4bcdd0dd3c604fbe906cb4421",
                "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            ),
            _batch(
                "data_batch_4.bin",
                "ae636b3ba5c66a11e91e8cb52e771fcb",
                "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            ),
            _batch(
                "data_batch_5.bin",
                "53f37980c15c3d472c316c40844f3f0d",
                "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            ),
            _batch(
                "test_batch.bin",
                "803d5f7f4d78ea53de84dbe85f74fb6d",
                "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
            ),
        ),
    ),
)


def _svhn(name: str, size: int, md5: str, sha256: str) -> Download:
    # Stanford serves this over plain http only: the digests stand in for the lock.
    address = f"http://ufldl.stanford.edu/housenumbers/{name}"
    return Download(address, Known(name, size, md5, sha256), f"svhn/{name}")


SVHN = (
    _svhn(
        "train_32x32.mat",
        182_040_794,
        "e26dedcc434d2e4c54c9b2d4a06d8373",
        "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
    ),
    _svhn(
        "test_32x32.mat",
        64_275_384,
        "eb5a983be6a315427106f1b164d9cef3",
        "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
    ),
)


def _speech(folder: str, size: int, sha256: str, archive: Archive) -> Download:
    # The bucket behind http://download.tensorflow.org, asked over https.
    name = f"{folder}.tar.gz"
    address = f"https://storage.googleapis.com/download.tensorflow.org/data/{name}"
    return Download(address, Known(name, size, sha256=sha256), folder, archive)


LISTS = (Known("testing_list.txt"), Known("validation_list.txt"))

# A recording is 32 kB at most; the limits leave room for as many files again, as some tar
# programs put one with attributes beside each.
SPEECH_TRAIN = _speech(
    "speech_commands_v0.02",
    2_428_923_189,
    "af14739ee7dc311471de98f5f9d2c9191b18aedfe957f4a6ff791c709868ff58",
    Archive("", members=250_000, size=6_000_000_000, files=LISTS, recordings=105_835),
)
# Its size is what the server announces; the digest is torchaudio's.
SPEECH_TRAIN_V001 = _speech(
    "speech_commands_v0.01",
    1_489_096_277,
    "743935421bb51cccdb6bdd152e04c5c70274e935c82119ad7faeec31780d811d",
    Archive("", members=150_000, size=4_000_000_000, files=LISTS, recordings=64_727),
)
SPEECH_TEST = _speech(
    "speech_commands_test_set_v0.02",
    112_563_277,
    "cc2a00c1147c2254e9be3fa0f779d8c17421dc349b86366567a8edfa9acd51df",
    Archive("", members=12_000, size=400_000_000, files=(), recordings=4_890),
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
        (),
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
        "105,829 spoken words, v0.02, and its test set",
        SPEECH_TERMS,
        (SPEECH_TRAIN, SPEECH_TEST),
    ),
    "speech-v0.01": Source(
        "64,721 spoken words, v0.01, with the test set of v0.02",
        SPEECH_TERMS,
        (SPEECH_TRAIN_V001, SPEECH_TEST),
    ),
}
"""By the name that ``softstair data fetch`` takes."""
