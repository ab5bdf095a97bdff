"""Speech Commands in twelve classes: ten words, unknown words and silence, as 49×10 bytes.

All clips of ten words are used. For every ten of them (rounded up) there is one clip of another
word, labelled *unknown*, and one cut of background noise, labelled *silence*. Features are computed
from the recordings as published, in a folder per word, or read from ``gsc/*.npz`` (docs/data.md).
"""

import contextlib
import hashlib
import io
import os
import warnings
import wave
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch

from softstair import _check
from softstair._files import replacing
from softstair.data import dataset
from softstair.data.dataset import Array, DataError, Dataset, Expected
from softstair.data.mfcc import COEFFICIENTS, FRAMES, RATE, mfcc, quantise

CLASSES: Final = tuple("silence unknown yes no up down left right on off stop go".split())
TRAINING, VALIDATION, TESTING = 0, 1, 2
REMEDY: Final = "run `softstair data fetch speech`, or set `data_dir` to the folder with the data"
FEATURES_VERSION: Final = "speech-commands-v0.01 features, test v0.02"

_X: Final[Expected] = (np.uint8, ("N", FRAMES, COEFFICIENTS))
_LABELS: Final[Expected] = (np.integer, ("N",))
FOLDERS: Final = ("speech_commands_v0.02", "speech_commands_v0.01")
TEST_FOLDER: Final = "speech_commands_test_set_v0.02"
TEST_CLASSES: Final = ("_silence_", "_unknown_", *CLASSES[2:])
LISTS: Final = {VALIDATION: "validation_list.txt", TESTING: "testing_list.txt"}
LONGEST: Final = 600 * 2 * RATE  # bytes of a recording of ten minutes

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Corpus:
    """Features of all clips, in the order of ``<word>/<file>``."""

    path: Path  # for error messages
    x: Array  # (N, 49, 10)
    word: Array  # (N,), indices into words
    words: tuple[str, ...]
    split: Array  # (N,), TRAINING, VALIDATION or TESTING
    speaker: Array  # (N,), names
    silence: Array  # (M, 49, 10), cuts of background noise
    test: tuple[Array, Array] | None  # official test set: (T, 49, 10), (T,) indices into CLASSES
    version: str


def load(root: Path, seed: int = 0, progress: Progress | None = None) -> Dataset:
    """Load Speech Commands from recordings in ``root``, or else from features in ``root/gsc``.

    The seed chooses unknown words and silence. Groups are the speakers; each cut of background
    noise is a group of its own. ``progress`` gets the number of clips done and the total.
    """
    root = Path(root)
    if (folder := _find_recordings(root)) is not None:
        return _dataset(_read_recordings(root, folder, progress), seed)
    if (folder := _find_features(root)) is not None:
        return _dataset(_read_features(folder), seed)
    problem = f"contains no Speech Commands (none of {', '.join((*FOLDERS, 'gsc'))})"
    raise DataError(root, problem, REMEDY)


def version(root: Path) -> str | None:
    """Return ``Dataset.version`` of what :func:`load` would read; None if there are no data."""
    if (folder := _find_recordings(root)) is not None:
        return _version(root, folder)
    return None if _find_features(root) is None else FEATURES_VERSION


def _find_features(root: Path) -> Path | None:
    """Return the folder ``gsc`` in ``root``, or ``root`` if it is that folder, or None."""
    if (root / "gsc").is_dir():
        return root / "gsc"
    return root if (root / "features_v001.npz").is_file() else None


def _read_features(folder: Path) -> Corpus:
    """Return what ``gsc/*.npz`` contain: features of v0.01, computed beforehand (docs/data.md)."""
    path, test_path = folder / "features_v001.npz", folder / "testset_v002.npz"
    expected: dict[str, Expected] = {"x": _X, "words": (np.str_, ("words",))}
    expected |= {"word": _LABELS, "split": _LABELS, "speaker": (np.str_, ("N",)), "utt": _LABELS}
    clips = dataset.read_arrays(path, expected, REMEDY)
    words = tuple(clips["words"].tolist())
    if len(set(words)) < len(words):
        raise DataError(path, "has the same word twice in 'words'", REMEDY)
    _check_range(path, "word", clips["word"], len(words))
    _check_range(path, "split", clips["split"], TESTING + 1)
    expected = {"x": _X, "label": _LABELS, "classes": (np.str_, (len(CLASSES),))}
    test = dataset.read_arrays(test_path, expected, REMEDY)
    if tuple(test["classes"].tolist()) != CLASSES:
        raise DataError(test_path, f"has other classes than {', '.join(CLASSES)}", REMEDY)
    _check_range(test_path, "label", test["label"], len(CLASSES))
    # In the order of file names, like recordings, so that a seed chooses the same clips.
    columns = (clips[name].tolist() for name in ("word", "speaker", "utt"))
    names = [
        f"{words[word]}/{speaker}_nohash_{utt}.wav"
        for word, speaker, utt in zip(*columns, strict=True)
    ]
    order = sorted(range(len(names)), key=names.__getitem__)
    return Corpus(
        path=path,
        x=clips["x"][order],
        word=clips["word"][order],
        words=words,
        split=clips["split"][order],
        speaker=clips["speaker"][order],
        silence=dataset.read_arrays(folder / "background.npz", {"x": _X}, REMEDY)["x"],
        test=(test["x"], test["label"]),
        version=FEATURES_VERSION,
    )


def _check_range(path: Path, name: str, values: Array, count: int) -> None:
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= count:
        problem = f"has {name!r} from {low} to {high}, not from 0 to {count - 1}"
        raise DataError(path, problem, REMEDY)


def _dataset(corpus: Corpus, seed: int) -> Dataset:
    """Return the training partition and the test set, the official one if there is one.

    The choice of clips depends on the seed and the order of the clips alone. Groups are the
    speakers, then the cuts of noise, each of them a group.
    """
    random = np.random.default_rng(_check.integer("seed", seed, 0))
    cuts = _shuffled(random, np.arange(len(corpus.silence)))
    clips, silence, y = _choose(corpus, TRAINING, random, cuts)
    x = np.concatenate([corpus.x[clips], corpus.silence[silence]])
    _, speakers = np.unique(corpus.speaker, return_inverse=True)
    groups = np.concatenate([speakers[clips], speakers.max() + 1 + silence])
    if corpus.test is not None:
        test_x, test_y = corpus.test
    else:
        # Cuts that the training partition does not use, as long as there are any.
        cuts = np.roll(cuts, -len(silence))
        test_clips, test_silence, test_y = _choose(corpus, TESTING, random, cuts)
        test_x = np.concatenate([corpus.x[test_clips], corpus.silence[test_silence]])
    return Dataset(
        "speech",
        torch.from_numpy(x).unsqueeze(1),
        torch.from_numpy(y),
        CLASSES,
        mean=0.0,
        std=1.0,
        groups=torch.from_numpy(groups.astype(np.int64)),
        test_x=torch.from_numpy(test_x).unsqueeze(1),
        test_y=torch.from_numpy(test_y.astype(np.int64)),
        centred=(128.0, 16.0),  # 128 was added; standard deviations are from 2 to 27
        version=corpus.version,
    )


def _choose(
    corpus: Corpus, split: int, random: np.random.Generator, cuts: Array
) -> tuple[Array, Array, Array]:
    """Return the clips and the cuts of noise of a partition, and the classes of both."""
    classes = np.array([CLASSES.index(w) if w in CLASSES[2:] else 1 for w in corpus.words])
    label = classes[corpus.word]
    in_split = corpus.split == split
    counts = np.bincount(label[in_split], minlength=len(CLASSES))
    for name, count in zip(CLASSES[1:], counts[1:], strict=True):
        if not count:
            part = ("training", "validation", "testing")[split]
            problem = f"has no clips for the class {name!r} in its {part} partition"
            raise DataError(corpus.path, problem, REMEDY)
    extra = -(-int(counts[2:].sum()) // 10)
    others = _shuffled(random, np.flatnonzero(in_split & (label == 1)))
    # np.resize repeats them from the first if there are too few.
    unknown, silence = np.resize(others, extra), np.resize(cuts, extra)
    clips = np.sort(np.concatenate([np.flatnonzero(in_split & (label > 1)), unknown]))
    return clips, silence, np.concatenate([label[clips], np.zeros(extra, dtype=np.int64)])


def _shuffled(random: np.random.Generator, values: Array) -> Array:
    # Uniform numbers are the ones least likely to change with the version of NumPy.
    return values[np.argsort(random.random(len(values)), kind="stable")]


class Recording(NamedTuple):
    """A .wav file."""

    key: str  # <folder>/<file>.wav, as in the lists of the partitions
    folder: str  # which is the word
    path: Path
    status: os.stat_result


def _find_recordings(root: Path) -> Path | None:
    """Return the folder of words in ``root``, the newest version first, or None."""
    for name in FOLDERS:
        if (root / name).is_dir():
            return root / name
    return root if any((root / name).is_file() for name in LISTS.values()) else None


def _version(root: Path, folder: Path) -> str:
    """Return ``Dataset.version`` of the recordings in ``folder``, by the names of folders."""
    name = folder.absolute().name
    release = name.rpartition("_")[2] if name in FOLDERS else "(unknown release)"
    official = (root / TEST_FOLDER).is_dir()
    test = TEST_FOLDER.rpartition("_")[2] if official else f"by {LISTS[TESTING]}"
    return f"speech-commands-{release} recordings, test {test}"


def _read_recordings(root: Path, folder: Path, progress: Progress | None) -> Corpus:
    """Return the features of all clips in ``folder``, and of the test set if ``root`` contains it.

    Features are kept in a file in ``root``; they are computed again when a recording is added,
    removed or changed.
    """
    folders = [path for path in folder.glob("[!._]*") if path.is_dir()]
    spoken = sorted(clip for path in folders for clip in _list(path))
    words = tuple(sorted({clip.folder for clip in spoken}))
    if missing := set(CLASSES[2:]).difference(words):
        raise DataError(folder, f"has no clips of {', '.join(sorted(missing))}", REMEDY)
    split = _read_split(folder, spoken)
    noise = _list(folder / "_background_noise_", required=True)
    test = []
    if (root / TEST_FOLDER).is_dir():
        paths = [root / TEST_FOLDER / name for name in TEST_CLASSES]
        test = [clip for path in paths for clip in _list(path, required=True)]
    # Cuts for a tenth of each partition, rounded up, from each noise and of zeros equally many.
    wanted = sum(clip.folder in CLASSES for clip in spoken)
    cuts = -(-(wanted // 10 + 3) // (len(noise) + 1))
    counts = {"silence": cuts * (len(noise) + 1), "test": len(test), "clips": len(spoken)}
    audio = chain(
        noise_cuts([clip.path for clip in noise], cuts),
        first_seconds([clip.path for clip in test + spoken]),
    )
    # The version is to be increased when the same recordings give other features.
    cache = root / f"speech-features-v1-{_digest(spoken, noise, test)}.npz"
    x = _cached_features(cache, counts, audio, progress)
    labels = np.array([TEST_CLASSES.index(clip.folder) for clip in test])
    return Corpus(
        path=folder,
        x=x["clips"],
        word=np.searchsorted(words, [clip.folder for clip in spoken]),
        words=words,
        split=split,
        speaker=np.array([clip.path.stem.split("_nohash_")[0] for clip in spoken]),
        silence=x["silence"],
        test=(x["test"], labels) if test else None,
        version=_version(root, folder),
    )


def first_seconds(paths: Iterable[Path]) -> Iterator[Array]:
    """Yield the first second of each recording, followed by zeros if it is shorter."""
    for path in paths:
        samples = _read_wav(path)[:RATE]
        yield np.pad(samples / 32768, (0, RATE - len(samples)))


def noise_cuts(paths: Iterable[Path], count: int) -> Iterator[Array]:
    """Yield ``count`` random seconds of each recording, times U(0, 1), and as many of zeros.

    They are the same each time. Zeros stand for a microphone that is switched off.
    """
    random = np.random.default_rng(0)
    for path in paths:
        samples = _read_wav(path)
        if len(samples) < RATE:
            raise DataError(path, f"has only {len(samples):,} samples", f"{RATE:,} are needed")
        starts = (random.random(count) * (len(samples) - RATE + 1)).astype(np.int64)
        for start, volume in zip(starts, random.random(count), strict=True):
            yield volume * (samples[start : start + RATE] / 32768)
    yield from np.zeros((count, RATE))


def features(audio: Iterator[Array], count: int, progress: Progress | None = None) -> Array:
    """Return the features (count, 49, 10) of ``count`` clips."""
    x = np.empty((count, FRAMES, COEFFICIENTS), dtype=np.uint8)
    for start in range(0, count, 128):
        block = np.stack(list(islice(audio, min(128, count - start))))
        x[start : start + len(block)] = quantise(mfcc(torch.from_numpy(block))).numpy()
        if progress is not None:
            progress(start + len(block), count)
    return x


def _list(folder: Path, required: bool = False) -> list[Recording]:
    """Return the .wav files of a folder, sorted by their keys."""
    with dataset.guard(folder, "listed", REMEDY), os.scandir(folder) as entries:
        recordings = [
            Recording(f"{folder.name}/{entry.name}", folder.name, folder / entry.name, entry.stat())
            for entry in entries
            if entry.name.endswith(".wav") and not entry.name.startswith(".")
        ]
    if required and not recordings:
        raise DataError(folder, "contains no recordings", REMEDY)
    return sorted(recordings)


def _read_wav(path: Path) -> Array:
    remedy = "replace it by a 16-bit PCM mono file at 16 kHz, or remove it"
    data = dataset.read_bytes(path, remedy, LONGEST)
    with dataset.guard(path, "read as a WAV file", remedy), wave.open(io.BytesIO(data)) as file:
        channels, width, rate, count, *_ = file.getparams()
        if (channels, width, rate) != (1, 2, RATE):
            raise ValueError(f"{channels} channels of {8 * width} bits at {rate} Hz")
        samples = np.frombuffer(file.readframes(count), "<i2")
        if not count or len(samples) != count:
            raise ValueError(f"{len(samples):,} of {count:,} samples")
    return samples


def _read_split(folder: Path, spoken: list[Recording]) -> Array:
    """Return the partition of each clip by the two lists."""
    split = np.full(len(spoken), TRAINING)
    for number, name in LISTS.items():
        path = folder / name
        with dataset.guard(path, "read as text", REMEDY):
            lines = dataset.read_bytes(path, REMEDY, 2**24).decode("utf-8-sig").split("\n")
        keys = {line.strip() for line in lines}
        listed = np.array([clip.key in keys for clip in spoken])
        if not listed.any() or (split[listed] != TRAINING).any():
            problem = "names no clip that is there, or a clip that is in the other list, too"
            raise DataError(path, problem, REMEDY)
        split[listed] = number
    return split


def _digest(*groups: Iterable[Recording]) -> str:
    """Return 16 hexadecimal digits that depend on names, sizes and times of change."""
    sha256 = hashlib.sha256()
    for group in groups:
        for clip in group:
            size, changed = clip.status.st_size, clip.status.st_mtime_ns
            sha256.update(os.fsencode(clip.key) + f"\0{size}\0{changed}\n".encode())
        sha256.update(b"\n")
    return sha256.hexdigest()[:16]


def _cached_features(
    path: Path, counts: dict[str, int], audio: Iterator[Array], progress: Progress | None
) -> dict[str, Array]:
    """Return features by name, so many of each: those kept at ``path``, or computed and kept."""
    expected: dict[str, Expected] = {
        name: (np.uint8, (count, FRAMES, COEFFICIENTS)) for name, count in counts.items() if count
    }
    with contextlib.suppress(DataError):
        return dataset.read_arrays(path, expected, "remove it")
    x = features(audio, sum(counts.values()), progress)
    arrays = dict(zip(counts, np.split(x, np.cumsum(list(counts.values()))[:-1]), strict=True))
    try:
        with replacing(path) as partial, partial.open("wb") as file:
            np.savez(file, **{name: arrays[name] for name in expected})  # type: ignore[arg-type]
    except OSError as error:
        warnings.warn(
            f"{str(path)!r} cannot be written ({error.strerror}), so features of recordings are "
            "computed each time: use a `data_dir` that can be written.",
            stacklevel=2,
        )
    return arrays
