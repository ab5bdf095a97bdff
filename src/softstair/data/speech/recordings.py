"""Speech Commands as published: recordings in a folder per word (see docs/data.md)."""

import contextlib
import hashlib
import io
import os
import secrets
import warnings
import wave
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch

from softstair.data.dataset import DataError
from softstair.data.reading import Array, Expected, guard, read_arrays, read_bytes
from softstair.data.speech.corpus import CLASSES, REMEDY, TESTING, TRAINING, VALIDATION, Corpus
from softstair.data.speech.mfcc import COEFFICIENTS, FRAMES, RATE, mfcc, quantise

__all__ = ["FOLDERS", "LISTS", "features", "find", "first_seconds", "noise_cuts", "read"]

FOLDERS: Final = ("speech_commands_v0.02", "speech_commands_v0.01")
TEST_FOLDER: Final = "speech_commands_test_set_v0.02"
TEST_CLASSES: Final = ("_silence_", "_unknown_", *CLASSES[2:])
LISTS: Final = {VALIDATION: "validation_list.txt", TESTING: "testing_list.txt"}
LONGEST: Final = 600 * 2 * RATE  # bytes of a recording of ten minutes

Progress = Callable[[int, int], None]


class Recording(NamedTuple):
    """A .wav file."""

    key: str  # <folder>/<file>.wav, as in the lists of the partitions
    folder: str  # which is the word
    path: Path
    status: os.stat_result


def find(root: Path) -> Path | None:
    """Return the folder of words in ``root``, the newest version first, or None."""
    for name in FOLDERS:
        if (root / name).is_dir():
            return root / name
    return root if any((root / name).is_file() for name in LISTS.values()) else None


def version(root: Path, folder: Path) -> str:
    """Return ``Dataset.version`` of the recordings in ``folder``, by the names of folders."""
    name = folder.absolute().name
    release = name.rpartition("_")[2] if name in FOLDERS else "(unknown release)"
    official = (root / TEST_FOLDER).is_dir()
    test = TEST_FOLDER.rpartition("_")[2] if official else f"by {LISTS[TESTING]}"
    return f"speech-commands-{release} recordings, test {test}"


def read(root: Path, folder: Path, progress: Progress | None = None) -> Corpus:
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
        version=version(root, folder),
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
    with guard(folder, "listed", REMEDY), os.scandir(folder) as entries:
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
    data = read_bytes(path, remedy, LONGEST)
    with guard(path, "read as a WAV file", remedy), wave.open(io.BytesIO(data)) as file:
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
        with guard(path, "read as text", REMEDY):
            lines = read_bytes(path, REMEDY, 2**24).decode("utf-8-sig").split("\n")
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
        return read_arrays(path, expected, "remove it")
    x = features(audio, sum(counts.values()), progress)
    arrays = dict(zip(counts, np.split(x, np.cumsum(list(counts.values()))[:-1]), strict=True))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            np.savez(file, **{name: arrays[name] for name in expected})  # type: ignore[arg-type]
        os.replace(temporary, path)
    except OSError as error:
        warnings.warn(
            f"{str(path)!r} cannot be written ({error.strerror}), so features of recordings are "
            "computed each time: use a `data_dir` that can be written.",
            stacklevel=2,
        )
    finally:
        temporary.unlink(missing_ok=True)
    return arrays
