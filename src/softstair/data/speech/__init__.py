"""Speech Commands in twelve classes: ten words, unknown words and silence, as 49×10 bytes.

The published recordings are read if they are there, else features that were computed from them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from softstair.data.dataset import DataError, Dataset
from softstair.data.speech import features, folders
from softstair.data.speech.corpus import CLASSES, dataset

__all__ = ["CLASSES", "load", "version"]

_REMEDY: Final = "get them with 'softstair data fetch speech', or name another --data-dir"


def load(root: Path, seed: int = 0, progress: Callable[[int, int], None] | None = None) -> Dataset:
    """The twelve classes, the network seeing the bytes as the numbers they are.

    root      holds the recordings, in the folder ``speech_commands_v0.02`` or, if that is not
              there, ``speech_commands_v0.01``, or is such a folder itself; else the ready features
              in ``gsc``. Where there are both, the recordings are read: they can be of the version
              of the paper, the features are of v0.01.
    seed      of the draw of unknown words and of silence
    progress  hears how many clips are done and of how many, when features are computed

    Groups are the speakers; each cut of noise, which has none, is a group of its own.
    """
    root = Path(root)
    if (folder := folders.find(root)) is not None:
        corpus = folders.read(root, folder, progress)
    elif (folder := features.find(root)) is not None:
        corpus = features.read(folder)
    else:
        names = ", ".join((*folders.FOLDERS, "gsc"))
        wrong = f"holds no Speech Commands, neither recordings nor features (none of {names})"
        raise DataError(root, wrong, _REMEDY)
    return dataset(corpus, seed)


def version(root: Path) -> str | None:
    """``Dataset.version`` of what :func:`load` would read in ``root``; None if there is nothing."""
    if (folder := folders.find(root)) is not None:
        return folders.version(root, folder)
    return None if features.find(root) is None else features.VERSION
