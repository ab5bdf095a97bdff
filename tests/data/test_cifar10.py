"""CIFAR-10 from small files of both layouts; what is missing or damaged is refused by name."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mutations
import numpy as np
import pytest
import torch
from test_unpickle import python2

from softstair import data
from softstair.data import DataError, cifar10

NAMES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
# Batches of 1 to 6 records.
COUNTS = dict(zip(NAMES, range(1, 7), strict=True))


def batch(name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    random = np.random.default_rng(COUNTS[name])
    pixels = random.integers(0, 256, (COUNTS[name], 3, 32, 32), dtype=np.uint8)
    return pixels, random.integers(0, 10, COUNTS[name])


def binary(pixels: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> bytes:
    return b"".join(
        bytes([label]) + image.tobytes() for image, label in zip(pixels, labels, strict=True)
    )


def of_python2(pixels: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> bytes:
    return python2(pixels.reshape(len(pixels), -1), labels.tolist())


def of_python3(pixels: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> bytes:
    return pickle.dumps({b"data": pixels.reshape(len(pixels), -1), b"labels": labels.tolist()})


Writer = Callable[[np.ndarray[Any, Any], np.ndarray[Any, Any]], bytes]
LAYOUTS: dict[str, tuple[str, str, Writer]] = {
    "binary": ("cifar-10-batches-bin", ".bin", binary),
    "Python 2": ("cifar-10-batches-py", "", of_python2),
    "Python 3": ("cifar-10-batches-py", "", of_python3),
}


def write(root: Path, layout: str) -> Path:
    name, suffix, writer = LAYOUTS[layout]
    (root / name).mkdir()
    for each in NAMES:
        (root / name / f"{each}{suffix}").write_bytes(writer(*batch(each)))
    return root / name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_layouts(layout: str, tmp_path: Path) -> None:
    folder = write(tmp_path, layout)
    for root in (tmp_path, folder):
        found = data.load("cifar10", root)
        assert found.name == "cifar10"
        assert found.classes[:3] == ("airplane", "automobile", "bird")
        assert (found.mean, found.std) == (0.47337 * 255, 0.25033 * 255)
        assert found.groups is None
        pixels = np.concatenate([batch(name)[0] for name in NAMES[:5]])
        assert torch.equal(found.x, torch.tensor(pixels))
        labels = np.concatenate([batch(name)[1] for name in NAMES[:5]])
        assert found.y.tolist() == labels.tolist()
        assert found.test_x is not None
        assert found.test_y is not None
        assert torch.equal(found.test_x, torch.tensor(batch("test_batch")[0]))
        assert found.test_y.tolist() == batch("test_batch")[1].tolist()
        assert found.x.is_contiguous()
        # Both hold the same images.
        assert found.version == data.version("cifar10", root) == "cifar-10 (official layout)"


def test_binary_goes_before_pickles(tmp_path: Path) -> None:
    write(tmp_path, "Python 3")
    folder = write(tmp_path, "binary")
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_3\.bin' is missing"):
        cifar10.load(tmp_path)


@pytest.mark.parametrize("layout", ["binary", "Python 3"])
@pytest.mark.parametrize("name", NAMES)
def test_a_missing_batch_is_named(layout: str, name: str, tmp_path: Path) -> None:
    folder, suffix = write(tmp_path, layout), LAYOUTS[layout][1]
    (folder / f"{name}{suffix}").unlink()
    with pytest.raises(DataError) as caught:
        cifar10.load(tmp_path)
    assert str(caught.value) == (
        f"{str(folder / name) + suffix!r} is missing: run `softstair data fetch cifar10`, or say "
        "with --data-dir where CIFAR-10 lies."
    )


def test_nothing_there(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-bin").mkdir()
    for root in (tmp_path, tmp_path / "absent"):
        with pytest.raises(DataError, match=r"has neither a folder .*data fetch cifar10"):
            cifar10.load(root)


RECORD = binary(*batch("data_batch_1"))
BAD_BINARIES = {
    "empty": (b"", "0 bytes"),
    "a byte short": (RECORD[:-1], "3,072 bytes, which is no whole number of records of 3,073"),
    "a byte more": (RECORD + b"\0", "no whole number"),
    "label": (b"\x0a" + RECORD[1:], "labels that are not between 0 and 9"),
}


@pytest.mark.parametrize("name", BAD_BINARIES)
def test_bad_binaries(name: str, tmp_path: Path) -> None:
    content, sentence = BAD_BINARIES[name]
    (write(tmp_path, "binary") / "data_batch_2.bin").write_bytes(content)
    with pytest.raises(DataError, match=rf"data_batch_2\.bin' has .*{sentence}"):
        cifar10.load(tmp_path)


def test_a_batch_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "binary")
    monkeypatch.setattr(cifar10, "LIMIT", 4 * len(RECORD))
    with pytest.raises(DataError, match=r"data_batch_5\.bin' is larger than 12,292 bytes"):
        cifar10.load(tmp_path)


ONE = np.zeros((1, 3072), np.uint8)
BAD_PICKLES: dict[str, tuple[dict[Any, Any], str]] = {
    "nothing": ({}, "no 'data'"),
    "list": ({"data": [1], "labels": [1]}, "no 'data'"),
    "dtype": ({"data": ONE.astype(np.int8), "labels": [1]}, "no 'data'"),
    "no labels": ({"data": ONE}, "no 'labels'"),
    "text": ({"data": ONE, "labels": ["1"]}, "no 'labels'"),
    "bool": ({"data": ONE, "labels": [True]}, "no 'labels'"),
    "float": ({"data": ONE, "labels": [1.0]}, "no 'labels'"),
    "list in list": ({"data": ONE, "labels": [[1]]}, "no 'labels'"),
    "more labels": ({"data": ONE, "labels": [1, 2]}, r"shape \(1, 3072\) and labels of shape"),
    "none": ({"data": ONE, "labels": []}, r"labels of shape \(0,\)"),
    "columns": ({"data": ONE[:, 1:], "labels": [1]}, r"shape \(1, 3071\)"),
    "axes": ({"data": ONE.reshape(1, 3, 32, 32), "labels": [1]}, "pixels of shape"),
    "matrix": ({"data": ONE, "labels": np.array([[1]])}, "labels of shape"),
    "ten": ({"data": ONE, "labels": [10]}, "between 0 and 9"),
    "below": ({"data": ONE, "labels": [-1]}, "between 0 and 9"),
    "huge": ({"data": ONE, "labels": [10**30]}, "between 0 and 9"),
    "array": ({"data": ONE, "labels": np.array([300])}, "between 0 and 9"),
}


@pytest.mark.parametrize("name", BAD_PICKLES)
def test_bad_pickles(name: str, tmp_path: Path) -> None:
    content, sentence = BAD_PICKLES[name]
    (write(tmp_path, "Python 3") / "test_batch").write_bytes(pickle.dumps(content))
    with pytest.raises(DataError, match=f"test_batch' has .*{sentence}"):
        cifar10.load(tmp_path)


def test_labels_of_numpy() -> None:
    for labels in (np.array([7], np.uint8), [np.int64(7)]):
        content = pickle.dumps({"data": ONE, "labels": labels})
        assert cifar10._parse_pickle(content, Path("batch"))[1].tolist() == [7]


TEN = [f"class_{number}" for number in range(10)]


def test_names_of_classes(tmp_path: Path) -> None:
    folder = write(tmp_path, "binary")
    meta = folder / "batches.meta.txt"
    meta.write_text("\n".join(TEN) + "\n\n")
    assert cifar10.load(tmp_path).classes == tuple(TEN)
    for content in (b"", b"\n".join(name.encode() for name in TEN[1:]), b"a\n" * 10, b"\xff" * 9):
        meta.write_bytes(content)
        with pytest.raises(DataError, match=r"batches\.meta\.txt' (is not text|does not hold)"):
            cifar10.load(tmp_path)
    meta.write_bytes(b"a" * 2**17)
    with pytest.raises(DataError, match="is larger than"):
        cifar10.load(tmp_path)
    meta.write_bytes("\n".join([*TEN[1:], "\x1b[31m"]).encode())
    with pytest.raises(DataError, match="does not hold"):
        cifar10.load(tmp_path)


def test_pickled_names_of_classes(tmp_path: Path) -> None:
    meta = write(tmp_path, "Python 2") / "batches.meta"
    for names in (TEN, [name.encode() for name in TEN]):
        meta.write_bytes(pickle.dumps({b"num_cases_per_batch": 9, b"label_names": names}, 2))
        assert cifar10.load(tmp_path).classes == tuple(TEN)
    for bad in (TEN[1:], [[]] * 10, "x" * 10, None):
        meta.write_bytes(pickle.dumps({b"label_names": bad}))
        with pytest.raises(DataError, match=r"batches\.meta' (has no list|does not hold)"):
            cifar10.load(tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mutated_batches(layout: str) -> None:
    writer = LAYOUTS[layout][2]
    parse = cifar10._parse if layout == "binary" else cifar10._parse_pickle

    def tensors(content: bytes) -> None:
        x, y = cifar10._tensors([parse(content, Path("batch"))])
        assert x.shape == (len(y), 3, 32, 32)
        assert 0 <= int(y.min()) <= int(y.max()) <= 9

    read, refused = mutations.outcomes(tensors, writer(*batch("data_batch_2")), 10_000)
    assert read > 1_000
    assert refused > 1_000


def test_mutated_names() -> None:
    def names(content: bytes) -> None:
        assert len(cifar10._names(content, Path("meta"))) == 10

    def pickled(content: bytes) -> None:
        assert len(cifar10._pickled_names(content, Path("meta"))) == 10

    assert min(mutations.outcomes(names, "\n".join(TEN).encode(), 3_000)) > 100
    assert min(mutations.outcomes(pickled, pickle.dumps({"label_names": TEN}, 2), 3_000)) > 100
