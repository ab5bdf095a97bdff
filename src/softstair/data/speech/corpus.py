"""The twelve classes of Speech Commands, made from all of its clips.

All clips of ten words are used. For every ten of them (rounded up) there is one clip of another
word, labelled *unknown*, and one cut of background noise, labelled *silence*.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from softstair import _check
from softstair.data.dataset import DataError, Dataset
from softstair.data.reading import Array, Expected, read_arrays
from softstair.data.speech.mfcc import COEFFICIENTS, FRAMES

__all__ = ["CLASSES", "Corpus", "dataset", "find_features", "read_features"]

CLASSES: Final = tuple("silence unknown yes no up down left right on off stop go".split())
TRAINING, VALIDATION, TESTING = 0, 1, 2
REMEDY: Final = "run `softstair data fetch speech`, or set `data_dir` to the folder with the data"
FEATURES_VERSION: Final = "speech-commands-v0.01 features, test v0.02"

_X: Final[Expected] = (np.uint8, ("N", FRAMES, COEFFICIENTS))
_LABELS: Final[Expected] = (np.integer, ("N",))


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


def find_features(root: Path) -> Path | None:
    """Return the folder ``gsc`` in ``root``, or ``root`` if it is that folder, or None."""
    if (root / "gsc").is_dir():
        return root / "gsc"
    return root if (root / "features_v001.npz").is_file() else None


def read_features(folder: Path) -> Corpus:
    """Return what ``gsc/*.npz`` contain: features of v0.01, computed beforehand (docs/data.md)."""
    path, test_path = folder / "features_v001.npz", folder / "testset_v002.npz"
    expected: dict[str, Expected] = {"x": _X, "words": (np.str_, ("words",))}
    expected |= {"word": _LABELS, "split": _LABELS, "speaker": (np.str_, ("N",)), "utt": _LABELS}
    clips = read_arrays(path, expected, REMEDY)
    words = tuple(clips["words"].tolist())
    if len(set(words)) < len(words):
        raise DataError(path, "has the same word twice in 'words'", REMEDY)
    _check_range(path, "word", clips["word"], len(words))
    _check_range(path, "split", clips["split"], TESTING + 1)
    expected = {"x": _X, "label": _LABELS, "classes": (np.str_, (len(CLASSES),))}
    test = read_arrays(test_path, expected, REMEDY)
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
        silence=read_arrays(folder / "background.npz", {"x": _X}, REMEDY)["x"],
        test=(test["x"], test["label"]),
        version=FEATURES_VERSION,
    )


def _check_range(path: Path, name: str, values: Array, count: int) -> None:
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= count:
        problem = f"has {name!r} from {low} to {high}, not from 0 to {count - 1}"
        raise DataError(path, problem, REMEDY)


def dataset(corpus: Corpus, seed: int = 0) -> Dataset:
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
