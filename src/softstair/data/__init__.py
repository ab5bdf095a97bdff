"""Data sets by name: read from where they lie, whole, as bytes.

Each reader is a file of its own with ``load(root)``; a name is looked up here. Nothing but the
digits comes with the library; ``softstair data fetch`` brings the others.
"""

import importlib
from collections.abc import Callable
from pathlib import Path

from softstair import own
from softstair.data.dataset import DataError, Dataset

__all__ = ["NAMES", "DataError", "Dataset", "Loading", "load", "version"]

Loading = Callable[[int, int], None]

NAMES: tuple[str, ...] = ("digits", "cifar10", "svhn", "speech")


def load(name: str, root: Path | str = "data", loading: Loading | None = None) -> Dataset:
    """The data set of that name; ``root`` is the folder that holds the data sets' own folders.

    ``package.module:function`` is a function of the user's own that returns a :class:`Dataset`; it
    is given ``root`` if it takes it. ``loading(done, total)`` is called while features are computed
    from recordings, which takes minutes the first time.

    >>> load("digits").classes
    ('0', '1', '2', '3', '4', '5', '6', '7', '8', '9')
    """
    if ":" in name:
        return own.call(name, "data", Dataset, root=Path(root))
    if name not in NAMES:
        raise ValueError(
            f"data must be one of {', '.join(NAMES)}, or package.module:function for data of your "
            f"own, but {name!r} was given."
        )
    if name == "speech":
        from softstair.data import speech

        return speech.load(Path(root), progress=loading)
    return importlib.import_module(f"softstair.data.{name}").load(Path(root))


def version(name: str, root: Path | str = "data") -> str | None:
    """``Dataset.version`` of what :func:`load` would read, from the names of the files alone.

    None where that is unknown: for a function of the user's own, and where there is no such data.

    >>> version("digits")
    'scikit-learn digits'
    """
    if name not in NAMES:
        return None
    found: str | None = importlib.import_module(f"softstair.data.{name}").version(Path(root))
    return found
