"""Speech Commands as ready features: every clip's 49×10 bytes, computed once for all.

gsc/features_v001.npz   x, word, words, split, speaker, utt: the 64,721 clips of v0.01
gsc/testset_v002.npz    x, label, classes: the official test set of v0.02
gsc/background.npz      x: cuts of background noise at random volume, and of zeros
"""

from pathlib import Path
from typing import Any, Final

import numpy as np

from softstair.data.dataset import DataError
from softstair.data.formats import arrays
from softstair.data.speech.corpus import CLASSES, REMEDY, TESTING, Corpus
from softstair.data.speech.mfcc import COEFFICIENTS, FRAMES

__all__ = ["CLIPS", "NOISE", "TEST", "VERSION", "find", "read"]

CLIPS: Final = "features_v001.npz"
TEST: Final = "testset_v002.npz"
NOISE: Final = "background.npz"
VERSION: Final = "speech-commands-v0.01 features, test v0.02"

_X: Final[arrays.Expected] = ("u1", ("N", FRAMES, COEFFICIENTS))
_LIMIT: Final = 2**28


def find(root: Path) -> Path | None:
    """The folder ``gsc`` within ``root``, or ``root`` itself if the clips' file lies there."""
    if (root / "gsc").is_dir():
        return root / "gsc"
    return root if (root / CLIPS).is_file() else None


def read(folder: Path) -> Corpus:
    """The three files of ``folder``."""
    path = folder / CLIPS
    clips = arrays.read(
        path,
        {
            "x": _X,
            "word": ("u i", ("N",)),
            "words": ("U", ("words",)),
            "split": ("u i", ("N",)),
            "speaker": ("U", ("N",)),
            "utt": ("u i", ("N",)),
        },
        REMEDY,
        _LIMIT,
    )
    words = tuple(clips["words"].tolist())
    if len(set(words)) < len(words):
        raise DataError(path, "has the same word twice in 'words'", REMEDY)
    _check_range(path, "word", clips["word"], len(words))
    _check_range(path, "split", clips["split"], TESTING + 1)
    path = folder / TEST
    expected: dict[str, arrays.Expected] = {
        "x": _X,
        "label": ("u i", ("N",)),
        "classes": ("U", (len(CLASSES),)),
    }
    test = arrays.read(path, expected, REMEDY, _LIMIT)
    if tuple(test["classes"].tolist()) != CLASSES:
        raise DataError(path, f"has other classes than {', '.join(CLASSES)}", REMEDY)
    _check_range(path, "label", test["label"], len(CLASSES))
    # The order of the files' names, in which recordings are read too: one seed draws the same.
    names = [
        f"{words[word]}/{speaker}_nohash_{utt}.wav"
        for word, speaker, utt in zip(
            clips["word"].tolist(), clips["speaker"].tolist(), clips["utt"].tolist(), strict=True
        )
    ]
    order = sorted(range(len(names)), key=names.__getitem__)
    return Corpus(
        path=folder / CLIPS,
        x=clips["x"][order],
        word=clips["word"][order],
        words=words,
        split=clips["split"][order],
        speaker=clips["speaker"][order],
        silence=arrays.read(folder / NOISE, {"x": _X}, REMEDY, _LIMIT)["x"],
        test=(test["x"], test["label"]),
        version=VERSION,
    )


def _check_range(path: Path, name: str, values: np.ndarray[Any, Any], count: int) -> None:
    if not 0 <= int(values.min()) <= int(values.max()) < count:
        wrong = f"has {name!r} from {values.min()} to {values.max()}, not from 0 to {count - 1}"
        raise DataError(path, wrong, REMEDY)
