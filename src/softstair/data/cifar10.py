"""CIFAR-10: 50,000 + 10,000 images of 32×32 in three colours and ten classes.

Read from either of the official layouts: ``cifar-10-batches-bin`` (records of a label byte and
3,072 bytes of pixels) or ``cifar-10-batches-py`` (pickles, read as plain data by ``unpickle``).
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from softstair.data.dataset import DataError, Dataset
from softstair.data.formats import arrays, unpickle

__all__ = ["load", "version"]

CLASSES = tuple("airplane automobile bird cat deer dog frog horse ship truck".split())
TRAINING = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = "test_batch"
PIXELS = 3 * 32 * 32
# A batch of 10,000 has 31 MB in either layout.
LIMIT = 64 * 2**20
REMEDY = "run `softstair data fetch cifar10`, or say with --data-dir where CIFAR-10 lies"

Batch = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def load(root: Path) -> Dataset:
    """CIFAR-10 from ``root``, which holds one of the two folders or is one of them.

    Where both are there, the binary one is read. Batches may have any number of records.

    >>> load(Path("nowhere"))
    Traceback (most recent call last):
    softstair.data.dataset.DataError: 'nowhere' has neither a folder cifar-10-batches-bin nor ...
    """
    folder, pickled = _folder(Path(root))
    parse, suffix = (_parse_pickle, "") if pickled else (_parse, ".bin")
    training = [_batch(folder / f"{name}{suffix}", parse) for name in TRAINING]
    test = _batch(folder / f"{TEST}{suffix}", parse)
    meta = folder / ("batches.meta" if pickled else "batches.meta.txt")
    classes = CLASSES
    if os.path.exists(meta):
        names = _pickled_names if pickled else _names
        classes = names(arrays.contents(meta, 2**16, REMEDY), meta)
    x, y = _tensors(training)
    del training
    test_x, test_y = _tensors([test])
    return Dataset(
        "cifar10",
        x,
        y,
        classes,
        mean=0.47337 * 255,
        std=0.25033 * 255,
        test_x=test_x,
        test_y=test_y,
        version=version(root),
    )


def version(root: Path) -> str:
    """``Dataset.version`` of CIFAR-10: both layouts hold the same images."""
    return "cifar-10 (official layout)"


def _folder(root: Path) -> tuple[Path, bool]:
    for folder in (root / "cifar-10-batches-bin", root / "cifar-10-batches-py", root):
        for pickled, suffix in ((False, ".bin"), (True, "")):
            if any(os.path.exists(folder / f"{name}{suffix}") for name in (*TRAINING, TEST)):
                return folder, pickled
    wrong = "has neither a folder cifar-10-batches-bin nor cifar-10-batches-py with batches in it"
    raise DataError(root, wrong, REMEDY)


def _batch(path: Path, parse: Callable[[bytes, Path], Batch]) -> Batch:
    return parse(arrays.contents(path, LIMIT, REMEDY), path)


def _parse(data: bytes, path: Path) -> Batch:
    """Records of a label and the pixels: all the reds row by row, the greens, the blues."""
    if not data or len(data) % (1 + PIXELS):
        wrong = f"has {len(data):,} bytes, which is no whole number of records of {1 + PIXELS:,}"
        raise DataError(path, wrong, REMEDY)
    records = np.frombuffer(data, np.uint8).reshape(-1, 1 + PIXELS)
    return _checked(records[:, 1:], records[:, 0], path)


def _parse_pickle(data: bytes, path: Path) -> Batch:
    batch = unpickle.load(data, path, REMEDY)
    pixels, labels = batch.get("data"), batch.get("labels")
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8:
        raise DataError(path, "has no 'data' that are an array of uint8", REMEDY)
    if isinstance(labels, list) and all(type(label) is int for label in labels):
        # Numbers that int64 cannot hold are out of range as well.
        labels = np.array([min(max(label, -1), 10) for label in labels], np.int64)
    if not isinstance(labels, np.ndarray):
        raise DataError(path, "has no 'labels' that are a list of integers", REMEDY)
    return _checked(pixels, labels, path)


def _checked(pixels: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], path: Path) -> Batch:
    if pixels.shape != (labels.size, PIXELS) or labels.ndim != 1:
        wrong = f"has pixels of shape {pixels.shape} and labels of shape {labels.shape}"
        raise DataError(path, f"{wrong} where (N, {PIXELS}) and (N,) are expected", REMEDY)
    if not labels.size or labels.min() < 0 or labels.max() > 9:
        raise DataError(path, "has labels that are not between 0 and 9", REMEDY)
    return pixels, labels


def _names(data: bytes, path: Path) -> tuple[str, ...]:
    try:
        return _ten(data.decode("utf-8").split(), path)
    except UnicodeDecodeError as error:
        raise DataError(path, "is not text", REMEDY) from error


def _pickled_names(data: bytes, path: Path) -> tuple[str, ...]:
    names = unpickle.load(data, path, REMEDY).get("label_names")
    if not isinstance(names, list) or len(names) != 10:
        raise DataError(path, "has no list of ten 'label_names'", REMEDY)
    return _ten(
        [name.decode("latin-1") if isinstance(name, bytes) else name for name in names], path
    )


def _ten(names: list[Any], path: Path) -> tuple[str, ...]:
    sound = all(isinstance(name, str) and name.isprintable() for name in names)
    if not sound or len(names) != 10 or len(set(names)) != 10:
        raise DataError(path, "does not hold the ten names of the classes", REMEDY)
    return tuple(names)


def _tensors(batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = np.concatenate([pixels for pixels, _ in batches])
    labels = np.concatenate([labels for _, labels in batches]).astype(np.int64)
    return torch.from_numpy(pixels).reshape(-1, 3, 32, 32), torch.from_numpy(labels)
