"""CIFAR-10: 50,000 + 10,000 colour images of 32×32 pixels in ten classes.

Two official layouts are read: ``cifar-10-batches-bin``, records of a label byte and 3,072 bytes of
pixels, and ``cifar-10-batches-py``, pickles, which are loaded only if their digests are known.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from softstair.data.dataset import Array, DataError, Dataset, check_digest, guard, read_bytes

CLASSES = tuple("airplane automobile bird cat deer dog frog horse ship truck".split())
PIXELS = 3 * 32 * 32
LIMIT = 64 * 2**20  # bytes of a batch; official ones have 31 MB
REMEDY = "run `softstair data fetch cifar10`, or set `data_dir` to the folder that contains it"

PICKLE_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
"""Digests of the official pickles, as published by torchvision."""


def load(root: Path) -> Dataset:
    """Load CIFAR-10 from ``root``, which contains a folder of batches or is one."""
    folder, suffix = _find(Path(root))
    read = _read_binary if suffix else _read_pickle
    *training, test = [read(folder / f"{name}{suffix}") for name in PICKLE_MD5]
    classes = _read_classes(folder / "batches.meta.txt") if suffix else CLASSES
    x, y = _tensors(training)
    test_x, test_y = _tensors([test])
    mean, std = 0.47337 * 255, 0.25033 * 255
    return Dataset(
        "cifar10", x, y, classes, mean, std, test_x=test_x, test_y=test_y, version=version(root)
    )


def version(root: Path) -> str:
    """Return ``Dataset.version`` of CIFAR-10; both layouts contain the same images."""
    return "cifar-10 (official layout)"


def _find(root: Path) -> tuple[Path, str]:
    """Return the folder of the batches and the ending of their names."""
    for folder in (root / "cifar-10-batches-bin", root / "cifar-10-batches-py", root):
        for suffix in (".bin", ""):
            if any((folder / f"{name}{suffix}").exists() for name in PICKLE_MD5):
                return folder, suffix
    raise DataError(root, "contains neither cifar-10-batches-bin nor cifar-10-batches-py", REMEDY)


def _read_binary(path: Path) -> tuple[Array, Array]:
    data = read_bytes(path, REMEDY, LIMIT)
    with guard(path, "read as a CIFAR-10 batch", REMEDY):
        records = np.frombuffer(data, np.uint8).reshape(-1, 1 + PIXELS)
        if not len(records) or records[:, 0].max() > 9:
            raise ValueError("it is empty or has labels above 9")
    return records[:, 1:], records[:, 0]


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickler of built-in types and NumPy arrays only, as Python 2 and NumPy 1 wrote them."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy.core.multiarray", "_reconstruct"):
            return np.empty(0).__reduce__()[0]  # its module has another name in NumPy 2
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a batch")


def _read_pickle(path: Path) -> tuple[Array, Array]:
    check_digest(path, "md5", PICKLE_MD5[path.name], REMEDY)
    with guard(path, "read as a CIFAR-10 batch", REMEDY), path.open("rb") as file:
        batch = _ArrayUnpickler(file, encoding="bytes").load()
    return batch[b"data"], np.array(batch[b"labels"])


def _read_classes(path: Path) -> tuple[str, ...]:
    if not path.exists():
        return CLASSES
    with guard(path, "read as a list of classes", REMEDY):
        classes = tuple(read_bytes(path, REMEDY, 2**16).decode("utf-8").split())
        if not len(classes) == len(set(classes)) == 10 or not "".join(classes).isprintable():
            raise ValueError("it must contain ten different names")
    return classes


def _tensors(batches: list[tuple[Array, Array]]) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = np.concatenate([pixels for pixels, _ in batches])
    labels = np.concatenate([labels for _, labels in batches]).astype(np.int64)
    return torch.from_numpy(pixels).reshape(-1, 3, 32, 32), torch.from_numpy(labels)
