"""CIFAR-10: 50,000 + 10,000 colour images of 32×32 pixels in ten classes.

Read from the official binary layout ``cifar-10-batches-bin``: records of a label byte and 3,072
bytes of pixels.
"""

from pathlib import Path

import numpy as np
import torch

from softstair.data.dataset import Array, DataError, Dataset, guard, read_bytes

CLASSES = tuple("airplane automobile bird cat deer dog frog horse ship truck".split())
PIXELS = 3 * 32 * 32
LIMIT = 64 * 2**20  # bytes of a batch; official ones have 31 MB
REMEDY = "run `softstair data fetch cifar10`, or set `data_dir` to the folder that contains it"

BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")


def load(root: Path) -> Dataset:
    """Load CIFAR-10 from ``root``, which contains a folder of batches or is one."""
    folder = _find(Path(root))
    *training, test = [_read_batch(folder / f"{name}.bin") for name in BATCHES]
    classes = _read_classes(folder / "batches.meta.txt")
    x, y = _tensors(training)
    test_x, test_y = _tensors([test])
    mean, std = 0.47337 * 255, 0.25033 * 255
    return Dataset(
        "cifar10", x, y, classes, mean, std, test_x=test_x, test_y=test_y, version=version(root)
    )


def version(root: Path) -> str:
    """Return ``Dataset.version`` of CIFAR-10."""
    return "cifar-10 (official layout)"


def _find(root: Path) -> Path:
    """Return the folder of the batches."""
    for folder in (root / "cifar-10-batches-bin", root):
        if any((folder / f"{name}.bin").exists() for name in BATCHES):
            return folder
    raise DataError(root, "contains no cifar-10-batches-bin", REMEDY)


def _read_batch(path: Path) -> tuple[Array, Array]:
    data = read_bytes(path, REMEDY, LIMIT)
    with guard(path, "read as a CIFAR-10 batch", REMEDY):
        records = np.frombuffer(data, np.uint8).reshape(-1, 1 + PIXELS)
        if not len(records) or records[:, 0].max() > 9:
            raise ValueError("it is empty or has labels above 9")
    return records[:, 1:], records[:, 0]


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
