"""From all there is of Speech Commands to the twelve classes: which clips are taken, and as what.

Ten words are wanted. For every ten of their clips, rounded up, one clip of another word becomes an
example of *unknown* and one cut of background noise an example of *silence*.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softstair.data.dataset import DataError, Dataset

__all__ = ["CLASSES", "REMEDY", "TESTING", "TRAINING", "VALIDATION", "Corpus", "dataset"]

CLASSES: Final = tuple("silence unknown yes no up down left right on off stop go".split())
TRAINING, VALIDATION, TESTING = 0, 1, 2
REMEDY: Final = "fetch it anew with 'softstair data fetch speech', or name another --data-dir"

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Corpus:
    """Features of every clip, in the order of ``<word>/<file>``, and what is known of each.

    path      where it was read, for errors
    x         (N, 49, 10)
    word      (N,) indices into ``words``
    split     (N,) training, validation or testing
    speaker   (N,) names
    silence   (M, 49, 10) cuts of background noise
    test      the official test set, (T, 49, 10) and (T,) indices into ``CLASSES``, or None
    version   ``Dataset.version``
    """

    path: Path
    x: Bytes
    word: NDArray[np.integer]
    words: tuple[str, ...]
    split: NDArray[np.integer]
    speaker: NDArray[np.str_]
    silence: Bytes
    test: tuple[Bytes, NDArray[np.integer]] | None = None
    version: str | None = None


def dataset(corpus: Corpus, seed: int = 0) -> Dataset:
    """The training partition in twelve classes, and the test set: the official one if there is any.

    What is drawn depends on ``seed`` and on the order of the clips alone. The clips of a speaker
    are one group; each cut of noise is a group of its own, numbered after the speakers.
    """
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be an integer from 0 on, but {seed!r} was given.")
    if not len(corpus.silence):
        raise DataError(corpus.path, "has no background noise", REMEDY)
    random = np.random.default_rng(seed)
    noises = _shuffled(random, np.arange(len(corpus.silence)))
    clips, cuts, y = _draw(corpus, TRAINING, random, noises)
    _, speakers = np.unique(corpus.speaker, return_inverse=True)
    groups = np.concatenate([speakers[clips], speakers.max() + 1 + cuts])
    if corpus.test is not None:
        test_x, test_y = corpus.test
    else:
        # Noise that the training partition has not taken, as long as there is any.
        noises = np.roll(noises, -len(cuts))
        test_clips, test_cuts, test_y = _draw(corpus, TESTING, random, noises)
        test_x = np.concatenate([corpus.x[test_clips], corpus.silence[test_cuts]])
    return Dataset(
        name="speech",
        x=_images(np.concatenate([corpus.x[clips], corpus.silence[cuts]])),
        y=torch.from_numpy(y),
        classes=CLASSES,
        mean=0.0,
        std=1.0,
        groups=torch.from_numpy(groups.astype(np.int64)),
        test_x=_images(test_x),
        test_y=torch.from_numpy(test_y.astype(np.int64)),
        # The bytes have 128 added to them, and a std of 2 to 27 in each coefficient.
        centred=(128.0, 16.0),
        version=corpus.version,
    )


def _draw(
    corpus: Corpus, split: int, random: np.random.Generator, noises: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """A partition: the clips it takes, the cuts of noise, and the classes of both in that order."""
    classes = np.array([CLASSES.index(w) if w in CLASSES[2:] else 1 for w in corpus.words])
    label = classes[corpus.word]
    here = corpus.split == split
    part = ("training", "validation", "testing")[split]
    counts = np.bincount(label[here], minlength=len(CLASSES))
    for name, count in zip(CLASSES[1:], counts[1:], strict=True):
        if not count:
            what = "no word besides the ten" if name == "unknown" else f"no clip of {name!r}"
            raise DataError(corpus.path, f"has {what} in its {part} partition", REMEDY)
    extra = -(-int(counts[2:].sum()) // 10)
    others = _shuffled(random, np.flatnonzero(here & (label == 1)))
    # Where there are too few, all are taken, and again from the first on.
    unknown, silence = np.resize(others, extra), np.resize(noises, extra)
    clips = np.sort(np.concatenate([np.flatnonzero(here & (label > 1)), unknown]))
    return clips, silence, np.concatenate([label[clips], np.zeros(extra, dtype=np.int64)])


def _shuffled(random: np.random.Generator, items: NDArray[np.int64]) -> NDArray[np.int64]:
    # Of numpy's draws, plain uniform numbers are the ones least likely to change with its version.
    return items[np.argsort(random.random(len(items)), kind="stable")]


def _images(x: Bytes) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).unsqueeze(1)
