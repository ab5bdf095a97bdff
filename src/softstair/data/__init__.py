"""Data sets, loaded by name as tensors of bytes.

Each data set has a module with ``load(root)`` and ``version(root)``. All but the digits have to be
downloaded (``softstair data fetch``).
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from softstair import _plugins
from softstair._errors import SoftstairError
from softstair.data.dataset import DataError, Dataset

__all__ = ["NAMES", "DataError", "Dataset", "Loading", "load", "version"]

Loading = Callable[[int, int], None]
"""Called with the number of examples done and the total."""

NAMES: tuple[str, ...] = ("digits", "cifar10", "svhn", "speech")


def load(name: str, root: Path | str = "data", loading: Loading | None = None) -> Dataset:
    """Load a data set.

    Args:
        name: One of ``NAMES``, or ``package.module:function``, a function of your own that returns
            a :class:`Dataset`. It is passed ``root`` if it has a parameter of that name.
        root: Folder that contains the folders of the data sets.
        loading: Called while features are computed from recordings, which can take minutes.

    Raises:
        DataError: If a file is missing or damaged.

    >>> load("digits").classes
    ('0', '1', '2', '3', '4', '5', '6', '7', '8', '9')
    """
    if ":" in name:
        return _plugins.call(name, "data", Dataset, root=Path(root))
    if name not in NAMES:
        raise SoftstairError(
            f"data must be one of {', '.join(NAMES)}, or package.module:function for data of your "
            f"own, but {name!r} was given.",
            field="data",
        )
    module: Any = importlib.import_module(f"softstair.data.{name}")
    return module.load(Path(root), **({"progress": loading} if name == "speech" else {}))


def version(name: str, root: Path | str = "data") -> str | None:
    """Return ``Dataset.version`` of the data that :func:`load` would read, from file names alone.

    Returns None for a function of your own, and if the data are not there.

    >>> version("digits")
    'scikit-learn digits'
    """
    if name not in NAMES:
        return None
    module: Any = importlib.import_module(f"softstair.data.{name}")
    return module.version(Path(root))
