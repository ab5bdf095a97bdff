"""SVHN, street view house numbers: 73,257 + 26,032 colour images of digits, 32×32 pixels.

Read from ``svhn/train_32x32.mat`` as published, where label 10 is the digit 0, or from
``svhn/train_32x32.npz`` (see docs/data.md). The files of the test set may be missing.
"""

from pathlib import Path

import numpy as np
import torch

from softstair._errors import import_extra
from softstair.data import dataset
from softstair.data.dataset import Array, DataError, Dataset, Expected
from softstair.data.fetch import SVHN_TEST, SVHN_TRAIN

MAT_SHA256 = {download.file: download.sha256 for download in (SVHN_TRAIN, SVHN_TEST)}
NPZ: dict[str, Expected] = {"X": (np.uint8, ("N", 32, 32, 3)), "y": (np.integer, ("N",))}
REMEDY = "run `softstair data fetch svhn`, or set `data_dir` to the folder that contains it"


def load(root: Path) -> Dataset:
    """Load SVHN from ``root``, which contains the folder ``svhn`` or is it; .mat is preferred."""
    folder = _folder(Path(root))
    path, test_path = _find(folder, "train"), _find(folder, "test")
    if path is None:
        path = folder / "train_32x32.mat"
        raise DataError(path, "is missing, and so is train_32x32.npz", REMEDY)
    x, y = _read(path)
    test_x, test_y = (None, None) if test_path is None else _read(test_path)
    classes, mean, std = tuple("0123456789"), 0.4514 * 255, 0.1993 * 255
    return Dataset(
        "svhn", x, y, classes, mean, std, test_x=test_x, test_y=test_y, version=version(root)
    )


def version(root: Path) -> str | None:
    """Return ``Dataset.version``: which parts are published files; None if there are no data."""
    folder = _folder(Path(root))
    # An .npz file does not record what its images were made from.
    layouts = {".mat": ".mat (official layout)", ".npz": ".npz (not the official file)"}
    train, test = _find(folder, "train"), _find(folder, "test")
    if train is None:
        return None
    tested = "no test set" if test is None else f"test {layouts[test.suffix]}"
    return f"svhn {layouts[train.suffix]}, {tested}"


def _folder(root: Path) -> Path:
    folder = root / "svhn"
    return root if not folder.is_dir() and _find(root, "train") else folder


def _find(folder: Path, part: str) -> Path | None:
    paths = [folder / f"{part}_32x32.{suffix}" for suffix in ("mat", "npz")]
    return next((path for path in paths if path.exists()), None)


def _read(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    if path.suffix == ".mat":
        images, labels = _read_mat(path)
    else:
        images, labels = dataset.read_arrays(path, NPZ, REMEDY).values()
    if labels.min() < 0 or labels.max() > 9:
        raise DataError(path, "has labels that are not between 0 and 9", REMEDY)
    x = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    return torch.from_numpy(x), torch.from_numpy(labels.astype(np.int64))


def _read_mat(path: Path) -> tuple[Array, Array]:
    """Return images (N, 32, 32, 3) and labels from X (32, 32, 3, N) and y (N, 1)."""
    dataset.check_digest(path, MAT_SHA256[path.name], REMEDY)  # damaged files crash SciPy
    matlab = import_extra("scipy.io")
    with dataset.guard(path, "read as a MATLAB 5 file", REMEDY):
        arrays = matlab.loadmat(path, variable_names=("X", "y"))
        return arrays["X"].transpose(3, 0, 1, 2), arrays["y"][:, 0].astype(np.int64) % 10
