"""CIFAR-10 from small files."""

from pathlib import Path
from typing import Any

import mutations
import numpy as np
import pytest
import torch

from softstair import data
from softstair.data import DataError, cifar10

Array = np.ndarray[Any, Any]
NAMES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")


def batch(name: str) -> tuple[Array, Array]:
    count = 1 + NAMES.index(name)
    random = np.random.default_rng(count)
    pixels = random.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)
    return pixels, random.integers(0, 10, count)


def binary(pixels: Array, labels: Array) -> bytes:
    records = zip(pixels, labels, strict=True)
    return b"".join(bytes([label]) + image.tobytes() for image, label in records)


def write_binary(root: Path) -> Path:
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.bin").write_bytes(binary(*batch(name)))
    return folder


def test_batches_give_the_images_of_the_files(tmp_path):
    folder = write_binary(tmp_path)
    for root in (tmp_path, folder):
        dataset = data.load("cifar10", root)
        assert dataset.classes[:3] == ("airplane", "automobile", "bird")
        assert (dataset.mean, dataset.std) == (0.47337 * 255, 0.25033 * 255)
        pixels, labels = zip(*map(batch, NAMES[:5]), strict=True)
        assert torch.equal(dataset.x, torch.tensor(np.concatenate(pixels)))
        assert dataset.y.tolist() == np.concatenate(labels).tolist()
        pixels_test, labels_test = batch("test_batch")
        assert torch.equal(dataset.test_x, torch.tensor(pixels_test))
        assert dataset.test_y.tolist() == labels_test.tolist()
        assert dataset.version == data.version("cifar10", root) == "cifar-10 (official layout)"


def test_a_missing_batch_is_named(tmp_path):
    folder = write_binary(tmp_path)
    assert len(cifar10.load(tmp_path)) == 15
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_3\.bin' is missing: .*data fetch cifar10"):
        cifar10.load(tmp_path)
    with pytest.raises(DataError, match=r"contains no cifar-10-batches-bin"):
        cifar10.load(tmp_path / "absent")


def test_names_of_classes_are_read(tmp_path):
    names = [f"class_{number}" for number in range(10)]
    meta = write_binary(tmp_path) / "batches.meta.txt"
    meta.write_text("\n".join(names) + "\n\n")
    assert cifar10.load(tmp_path).classes == tuple(names)
    for content in (b"", b"a\n" * 10, b"\xff" * 9):
        meta.write_bytes(content)
        with pytest.raises(DataError, match=r"batches\.meta\.txt"):
            cifar10.load(tmp_path)


def test_mutated_batches_are_read_or_refused(tmp_path):
    path = write_binary(tmp_path) / "data_batch_2.bin"

    def load(content: bytes) -> None:
        path.write_bytes(content)
        assert cifar10.load(tmp_path).x.shape[1:] == (3, 32, 32)

    assert min(mutations.outcomes(load, path.read_bytes())) > 50
