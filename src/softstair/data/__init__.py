"""Data sets, loaded by name as tensors of bytes.

The digits are part of scikit-learn. The other data sets have to be downloaded (``softstair data
fetch``); each has a module with ``load(root)`` and ``version(root)``.
"""

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from softstair import _check, _plugins
from softstair._errors import import_extra
from softstair.data.dataset import DataError, Dataset, split

__all__ = ["NAMES", "DataError", "Dataset", "Loading", "load", "split", "version"]

Loading = Callable[[int, int], None]
"""Called with the number of examples done and the total."""

NAMES: tuple[str, ...] = ("digits", "cifar10", "svhn", "speech")
DIGITS = "scikit-learn digits"


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
        names = ", ".join(NAMES)
        own = "package.module:function for data of your own"
        raise _check.wrong("data", name, f"one of {names}, or {own}", NAMES)
    if name == "digits":
        return _digits()
    module: Any = importlib.import_module(f"softstair.data.{name}")
    return module.load(Path(root), **({"progress": loading} if name == "speech" else {}))


def version(name: str, root: Path | str = "data") -> str | None:
    """Return ``Dataset.version`` of the data that :func:`load` would read, from file names alone.

    Returns None for a function of your own, and if the data are not there.

    >>> version("digits")
    'scikit-learn digits'
    """
    if name not in NAMES[1:]:
        return DIGITS if name == "digits" else None
    module: Any = importlib.import_module(f"softstair.data.{name}")
    return module.version(Path(root))


def _digits() -> Dataset:
    """Return 1,797 images of 8×8 pixels with 17 grey levels."""
    # Importing scikit-learn takes seconds, so the file that its load_digits reads is read here.
    package = find_spec("sklearn")
    origin = Path(package.origin) if package and package.origin else None
    if origin and (file := origin.parent / "datasets/data/digits.csv.gz").is_file():
        table = torch.from_numpy(np.loadtxt(file, dtype=np.uint8, delimiter=","))
    else:
        images, labels = import_extra("sklearn.datasets").load_digits(return_X_y=True)
        table = torch.from_numpy(np.column_stack((images, labels)).astype(np.uint8))
    x, y = table[:, :-1].contiguous().view(-1, 1, 8, 8), table[:, -1].to(torch.int64)
    return Dataset("digits", x, y, tuple("0123456789"), mean=8.0, std=8.0, version=DIGITS)
