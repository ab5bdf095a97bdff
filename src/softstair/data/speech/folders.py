"""Speech Commands as it is published: a folder a word, lists of two partitions, and noise.

    speech_commands_v0.02/           or speech_commands_v0.01/, or the data folder itself
      <word>/<speaker>_nohash_<n>.wav
      validation_list.txt            a line a clip, <word>/<file>.wav; what is in neither list
      testing_list.txt               is the training partition
      _background_noise_/*.wav
    speech_commands_test_set_v0.02/  if it is there: _silence_, _unknown_, yes, no, ...

Files that are hidden or not called .wav are passed over, and so are folders without clips; links
are followed. A clip that cannot be read stops the reading with its name. The speaker is what
precedes ``_nohash_``, or the whole name where that is missing. A list's line for a clip that is not
there has no effect; a list that names none of those that are there is refused.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from softstair.data.dataset import DataError
from softstair.data.speech import cache
from softstair.data.speech.corpus import CLASSES, REMEDY, TESTING, TRAINING, VALIDATION, Corpus
from softstair.data.speech.listing import Clip, digest, read_list, recordings, subfolders

__all__ = ["FOLDERS", "TEST_FOLDER", "find", "read", "version"]

FOLDERS: Final = ("speech_commands_v0.02", "speech_commands_v0.01")
TEST_FOLDER: Final = "speech_commands_test_set_v0.02"
TEST_CLASSES: Final = ("_silence_", "_unknown_", *CLASSES[2:])
LISTS: Final = {VALIDATION: "validation_list.txt", TESTING: "testing_list.txt"}
NOISE: Final = "_background_noise_"


def find(root: Path) -> Path | None:
    """The folder of words within ``root``, the newer version first, or None."""
    for name in FOLDERS:
        if (root / name).is_dir():
            return root / name
    return root if any((root / name).is_file() for name in LISTS.values()) else None


def read(root: Path, folder: Path, progress: Callable[[int, int], None] | None = None) -> Corpus:
    """All clips of ``folder``, and the official test set if ``root`` holds it.

    Features are computed once and kept in ``root``; they are computed again when a file is added,
    removed or changed. ``progress`` hears how many clips are done, and of how many.
    """
    clips = recordings(subfolders(folder))
    words = tuple(sorted({clip.folder for clip in clips}))
    if missing := [word for word in CLASSES[2:] if word not in words]:
        raise DataError(folder, f"has no clip of {', '.join(missing)}", REMEDY)
    split = _split(folder, clips)
    noise = recordings([folder / NOISE])
    if not noise:
        raise DataError(folder / NOISE, "holds no recording", REMEDY)
    test = _test_clips(root / TEST_FOLDER) if (root / TEST_FOLDER).is_dir() else []
    wanted = sum(clip.folder in CLASSES for clip in clips)
    sources = cache.Sources(
        clips=[clip.path for clip in clips],
        noise=[clip.path for clip in noise],
        # Enough for a tenth of each partition, rounded up, in equal parts, zeros among them.
        cuts=-(-(wanted // 10 + 3) // (len(noise) + 1)),
        test=[clip.path for clip in test],
    )
    kept = cache.path(root, digest(clips, noise, test))
    x = cache.features(kept, sources, progress)
    labels = np.array([TEST_CLASSES.index(clip.folder) for clip in test])
    return Corpus(
        path=folder,
        x=x["clips"],
        word=np.searchsorted(words, [clip.folder for clip in clips]),
        words=words,
        split=split,
        speaker=np.array([clip.speaker for clip in clips]),
        silence=x["silence"],
        test=(x["test"], labels) if test else None,
        version=version(root, folder),
    )


def version(root: Path, folder: Path) -> str:
    """``Dataset.version`` of the recordings in ``folder``, which its name tells."""
    name = folder.absolute().name
    release = name.rpartition("_")[2] if name in FOLDERS else "(unknown release)"
    official = (root / TEST_FOLDER).is_dir()
    test = TEST_FOLDER.rpartition("_")[2] if official else f"by {LISTS[TESTING]}"
    return f"speech-commands-{release} recordings, test {test}"


def _split(folder: Path, clips: list[Clip]) -> NDArray[np.int64]:
    """The partition of each clip by the two lists, which may not share one."""
    split = np.full(len(clips), TRAINING)
    listed = {number: read_list(folder / name) for number, name in LISTS.items()}
    if both := listed[VALIDATION] & listed[TESTING]:
        wrong = f"names {min(both)!r}, as {LISTS[VALIDATION]} does"
        raise DataError(folder / LISTS[TESTING], wrong, REMEDY)
    for number, keys in listed.items():
        here = np.array([clip.key in keys for clip in clips])
        if not here.any():
            raise DataError(folder / LISTS[number], "names none of the clips beside it", REMEDY)
        split[here] = number
    return split


def _test_clips(folder: Path) -> list[Clip]:
    found = []
    for name in TEST_CLASSES:
        clips = recordings([folder / name])
        if not clips:
            raise DataError(folder / name, "holds no clip", REMEDY)
        found += clips
    return found
