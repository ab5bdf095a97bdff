"""CIFAR-10 from small files of both layouts."""

import hashlib
import pickle
import struct
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


def python2_pickle(pixels: Array, labels: Array) -> bytes:
    """The opcodes that Python 2's cPickle and NumPy 1 wrote for the official batches."""

    def string(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text

    parts = [
        b"\x80\x02}q\x01(",
        string(b"labels") + b"q\x04]q\x05(",
        *(b"K" + bytes([label]) for label in labels),
        b"e" + string(b"data") + b"q\x06",
        b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08",
        b"K\x00\x85" + string(b"b") + b"\x87Rq\x09",
        b"(K\x01M" + struct.pack("<H", len(pixels)) + b"M" + struct.pack("<H", 3072) + b"\x86",
        b"cnumpy\ndtype\nq\x0a" + string(b"u1") + b"K\x00K\x01\x87Rq\x0b",
        b"(K\x03" + string(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
        b"\x89T" + struct.pack("<L", pixels.size) + pixels.tobytes() + b"tb",
        string(b"filenames") + b"q\x0c]q\x0d(" + string(b"tabby.png") + b"q\x0eeu.",
    ]
    return b"".join(parts)


def write_binary(root: Path) -> Path:
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.bin").write_bytes(binary(*batch(name)))
    return folder


def write_pickles(root: Path) -> Path:
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    for name in NAMES:
        (folder / name).write_bytes(python2_pickle(*batch(name)))
    return folder


def publish(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the digests of the files in ``folder`` the published ones."""
    for name in NAMES:
        digest = hashlib.md5((folder / name).read_bytes()).hexdigest()
        monkeypatch.setitem(cifar10.PICKLE_MD5, name, digest)


@pytest.mark.parametrize("write", [write_binary, write_pickles])
def test_both_layouts_give_the_images_of_the_files(write, tmp_path, monkeypatch):
    folder = write(tmp_path)
    if write is write_pickles:
        publish(folder, monkeypatch)
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


def test_the_binary_layout_is_preferred(tmp_path):
    write_pickles(tmp_path)
    folder = write_binary(tmp_path)
    assert len(cifar10.load(tmp_path)) == 15
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_3\.bin' is missing: .*data fetch cifar10"):
        cifar10.load(tmp_path)
    with pytest.raises(DataError, match=r"contains neither"):
        cifar10.load(tmp_path / "absent")


def test_pickles_must_have_known_digests_and_contain_arrays_only(tmp_path, monkeypatch):
    folder = write_pickles(tmp_path)
    (folder / "data_batch_1").write_bytes(pickle.dumps({"data": eval}, protocol=2))
    with pytest.raises(DataError, match="data_batch_1' is not the published file"):
        cifar10.load(tmp_path)
    publish(folder, monkeypatch)
    with pytest.raises(DataError, match="eval is not allowed"):
        cifar10.load(tmp_path)


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
