"""SVHN from small files that SciPy and NumPy wrote."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import savemat

from softstair import data
from softstair.data import DataError, svhn


def images(part: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images by row, column and colour, and digits."""
    count = {"train": 12, "test": 3}[part]
    pixels = np.random.default_rng(count).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    return pixels, np.arange(count) % 10


@pytest.fixture
def write_mat(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a .mat file, and makes its digest the published one."""

    def write(folder: Path, part: str) -> Path:
        pixels, digits = images(part)
        y = np.where(digits == 0, 10, digits)[:, None]
        path = folder / f"{part}_32x32.mat"
        savemat(path, {"X": pixels.transpose(1, 2, 3, 0), "y": y}, do_compression=True)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        monkeypatch.setitem(svhn.MAT_SHA256, path.name, digest)
        return path

    return write


def write_npz(folder: Path, part: str, **changes: Any) -> Path:
    pixels, digits = images(part)
    path = folder / f"{part}_32x32.npz"
    np.savez(path, **({"X": pixels, "y": digits.astype(np.uint8)} | changes))
    return path


VERSIONS = {"mat": ".mat (official layout)", "npz": ".npz (not the official file)"}


@pytest.mark.parametrize(
    ("train", "test", "nested"),
    [("mat", "mat", True), ("mat", "npz", False), ("npz", "npz", False), ("npz", None, True)],
)
def test_both_layouts_give_the_images_of_the_files(train, test, nested, write_mat, tmp_path):
    write = {"mat": write_mat, "npz": write_npz}
    folder = tmp_path / "svhn" if nested else tmp_path
    folder.mkdir(exist_ok=True)
    write[train](folder, "train")
    if test:
        write[test](folder, "test")
    dataset = data.load("svhn", tmp_path)
    assert dataset.classes == tuple("0123456789")
    assert (dataset.mean, dataset.std) == (0.4514 * 255, 0.1993 * 255)
    pixels, digits = images("train")
    assert torch.equal(dataset.x, torch.tensor(pixels).permute(0, 3, 1, 2))
    assert dataset.x.is_contiguous()
    assert dataset.y.tolist() == digits.tolist()
    if test:
        pixels, digits = images("test")
        assert torch.equal(dataset.test_x, torch.tensor(pixels).permute(0, 3, 1, 2))
        assert dataset.test_y.tolist() == digits.tolist()
    else:
        assert dataset.test_x is None
    tested = f"test {VERSIONS[test]}" if test else "no test set"
    version = f"svhn {VERSIONS[train]}, {tested}"
    assert dataset.version == data.version("svhn", tmp_path) == version


def test_mat_files_without_the_published_digest_are_not_parsed(write_mat, tmp_path):
    write_npz(tmp_path, "train")
    path = write_mat(tmp_path, "train")
    assert len(svhn.load(tmp_path)) == 12
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match=r"train_32x32\.mat' is not the published file"):
        svhn.load(tmp_path)


def test_other_arrays_in_an_npz_file_are_refused(tmp_path):
    channels_first = np.zeros((12, 3, 32, 32), np.uint8)
    for changes in ({"y": np.full(12, 10)}, {"y": np.full(12, -1)}, {"X": channels_first}):
        write_npz(tmp_path, "train", **changes)
        with pytest.raises(DataError, match=r"train_32x32\.npz"):
            svhn.load(tmp_path)
