"""SVHN, house numbers: 73,257 digits of 32×32 in three colours to train on, 26,032 to test.

Read from ``svhn/train_32x32.mat`` as it is published (MATLAB 5, where label 10 is the digit 0), or
from ``svhn/train_32x32.npz`` (images by row, column and colour, labels 0 to 9).
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from softstair.data.dataset import DataError, Dataset
from softstair.data.formats import arrays, mat

__all__ = ["load", "version"]

LIMIT = 512 * 2**20
REMEDY = "run `softstair data fetch svhn`, or say with --data-dir where SVHN lies"
EXPECTED: dict[str, arrays.Expected] = {
    "X": ("u1", ("N", 32, 32, 3)),
    "y": ("u1 i4 i8", ("N",)),
}

Part = tuple[torch.Tensor, torch.Tensor]


def load(root: Path) -> Dataset:
    """SVHN from ``root``, which holds the folder ``svhn`` or is it; the test set may be missing.

    Where a part is there in both forms, the published one is read.

    >>> load(Path("nowhere"))
    Traceback (most recent call last):
    softstair.data.dataset.DataError: 'nowhere/svhn/train_32x32.mat' is missing, and so is the ...
    """
    folder = _folder(Path(root))
    training = _part(folder, "train")
    if training is None:
        path = folder / "train_32x32.mat"
        raise DataError(path, "is missing, and so is the .npz of that name", REMEDY)
    test_x, test_y = _part(folder, "test") or (None, None)
    return Dataset(
        "svhn",
        *training,
        tuple("0123456789"),
        mean=0.4514 * 255,
        std=0.1993 * 255,
        test_x=test_x,
        test_y=test_y,
        version=version(root),
    )


def version(root: Path) -> str | None:
    """``Dataset.version`` of SVHN in ``root``: which of its files are as published; None if there
    are none.

    An .npz holds crops of somebody's making: what they were cut from, it does not say.
    """
    kinds: dict[str, str | None] = {}
    for part in ("train", "test"):
        mat_path, npz_path = _paths(_folder(Path(root)), part)
        npz = None if npz_path is None else ".npz (not the official file)"
        kinds[part] = npz if mat_path is None else ".mat (official layout)"
    if kinds["train"] is None:
        return None
    test = "no test set" if kinds["test"] is None else f"test {kinds['test']}"
    return f"svhn {kinds['train']}, {test}"


def _folder(root: Path) -> Path:
    folder = root / "svhn"
    return root if not os.path.isdir(folder) and any(_paths(root, "train")) else folder


def _paths(folder: Path, part: str) -> tuple[Path | None, Path | None]:
    mat_path, npz_path = folder / f"{part}_32x32.mat", folder / f"{part}_32x32.npz"
    return (
        mat_path if os.path.exists(mat_path) else None,
        npz_path if os.path.exists(npz_path) else None,
    )


def _part(folder: Path, part: str) -> Part | None:
    mat_path, npz_path = _paths(folder, part)
    if mat_path is not None:
        return _parse(arrays.contents(mat_path, LIMIT, REMEDY), mat_path)
    if npz_path is not None:
        return _tensors(**arrays.read(npz_path, EXPECTED, REMEDY, LIMIT), path=npz_path)
    return None


def _parse(data: bytes, path: Path) -> Part:
    """X (32, 32, 3, N) of uint8 and y (N, 1) with 10 for the digit 0."""
    found = mat.parse(data, ("X", "y"), path, REMEDY, LIMIT)
    x, y = found["X"], found["y"]
    if x.dtype != np.uint8 or x.shape[:3] != (32, 32, 3) or y.shape != (*x.shape[3:], 1):
        wrong = f"has X {x.shape} of {x.dtype} and y {y.shape}"
        raise DataError(path, f"{wrong} where (32, 32, 3, N) of uint8 and (N, 1) belong", REMEDY)
    labels = y[:, 0]
    if not np.isin(labels, range(1, 11)).all():
        raise DataError(path, "has labels that are not 1 to 10, 10 being the digit 0", REMEDY)
    return _tensors(x.transpose(3, 0, 1, 2), labels.astype(np.int64) % 10, path)


def _tensors(X: np.ndarray[Any, Any], y: np.ndarray[Any, Any], path: Path) -> Part:
    """From images by row, column and colour to the order of a convolution's input."""
    if y.min() < 0 or y.max() > 9:
        raise DataError(path, "has labels that are not between 0 and 9", REMEDY)
    x = np.ascontiguousarray(X.transpose(0, 3, 1, 2))
    return torch.from_numpy(x), torch.from_numpy(y.astype(np.int64))
