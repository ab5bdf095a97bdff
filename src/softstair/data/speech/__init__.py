"""Speech Commands in twelve classes: ten words, unknown words and silence, as 49×10 bytes."""

from collections.abc import Callable
from pathlib import Path

from softstair.data.dataset import DataError, Dataset
from softstair.data.speech import corpus, recordings
from softstair.data.speech.corpus import CLASSES

__all__ = ["CLASSES", "load", "version"]


def load(root: Path, seed: int = 0, progress: Callable[[int, int], None] | None = None) -> Dataset:
    """Load Speech Commands from recordings in ``root``, or else from features in ``root/gsc``.

    The seed chooses unknown words and silence. Groups are the speakers; each cut of background
    noise is a group of its own. ``progress`` gets the number of clips done and the total.
    """
    root = Path(root)
    if (folder := recordings.find(root)) is not None:
        return corpus.dataset(recordings.read(root, folder, progress), seed)
    if (folder := corpus.find_features(root)) is not None:
        return corpus.dataset(corpus.read_features(folder), seed)
    problem = f"contains no Speech Commands (none of {', '.join((*recordings.FOLDERS, 'gsc'))})"
    raise DataError(root, problem, corpus.REMEDY)


def version(root: Path) -> str | None:
    """Return ``Dataset.version`` of what :func:`load` would read; None if there are no data."""
    if (folder := recordings.find(root)) is not None:
        return recordings.version(root, folder)
    return None if corpus.find_features(root) is None else corpus.FEATURES_VERSION
