"""The digits of scikit-learn: 1,797 images of 8×8 pixels with 17 grey levels, no download."""

from pathlib import Path

import torch

from softstair._errors import import_extra
from softstair.data.dataset import Dataset

__all__ = ["load", "version"]


def load(root: Path | None = None) -> Dataset:
    """Load the digits; ``root`` is not used, because they are part of scikit-learn."""
    images, labels = import_extra("sklearn.datasets").load_digits(return_X_y=True)
    x = torch.from_numpy(images).to(torch.uint8).reshape(-1, 1, 8, 8)
    y = torch.from_numpy(labels).to(torch.int64)
    return Dataset("digits", x, y, tuple("0123456789"), mean=8.0, std=8.0, version=version())


def version(root: Path | None = None) -> str:
    """Return ``Dataset.version`` of the digits."""
    return "scikit-learn digits"
