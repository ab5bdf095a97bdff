"""SVHN from small files of both forms, written by scipy and numpy."""

from io import BytesIO
from pathlib import Path
from typing import Any

import mutations
import numpy as np
import pytest
import torch
from scipy.io import savemat

from softstair import data
from softstair.data import DataError, svhn
from softstair.data.formats import arrays

COUNTS = {"train": 12, "test": 3}


def images(part: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images by row, column and colour, and digits."""
    count = COUNTS[part]
    pixels = np.random.default_rng(count).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    return pixels, np.arange(count) % 10


def mat_file(part: str, compressed: bool = True, **changes: Any) -> bytes:
    pixels, digits = images(part)
    y = np.where(digits == 0, 10, digits)[:, None]
    stream = BytesIO()
    content = {"X": pixels.transpose(1, 2, 3, 0), "y": y.astype(float)} | changes
    savemat(stream, content, do_compression=compressed)
    return stream.getvalue()


def npz_file(part: str, **changes: Any) -> bytes:
    pixels, digits = images(part)
    stream = BytesIO()
    np.savez(stream, **({"X": pixels, "y": digits.astype(np.uint8)} | changes))
    return stream.getvalue()


@pytest.mark.parametrize("train", ["mat", "npz"])
@pytest.mark.parametrize("test", ["mat", "npz", None])
@pytest.mark.parametrize("nested", [True, False])
def test_both_forms(train: str, test: str | None, nested: bool, tmp_path: Path) -> None:
    folder = tmp_path / "svhn" if nested else tmp_path
    folder.mkdir(exist_ok=True)
    files = {"mat": mat_file, "npz": npz_file}
    (folder / f"train_32x32.{train}").write_bytes(files[train]("train"))
    if test:
        (folder / f"test_32x32.{test}").write_bytes(files[test]("test"))
    found = data.load("svhn", tmp_path)
    pixels, digits = images("train")
    assert found.name == "svhn"
    assert found.classes == tuple("0123456789")
    assert (found.mean, found.std) == (0.4514 * 255, 0.1993 * 255)
    assert found.x.shape == (12, 3, 32, 32)
    for index, row, column, colour in ((0, 0, 0, 0), (11, 31, 2, 1), (5, 7, 30, 2)):
        assert found.x[index, colour, row, column] == pixels[index, row, column, colour]
    assert torch.equal(found.x, torch.tensor(pixels).permute(0, 3, 1, 2))
    assert found.x.is_contiguous()
    assert found.y.tolist() == digits.tolist()
    if test:
        assert found.test_x is not None
        assert found.test_y is not None
        assert torch.equal(found.test_x, torch.tensor(images("test")[0]).permute(0, 3, 1, 2))
        assert found.test_y.tolist() == images("test")[1].tolist()
    else:
        assert found.test_x is None
        assert found.test_y is None
    words = {"mat": ".mat (official layout)", "npz": ".npz (not the official file)"}
    tested = f"test {words[test]}" if test else "no test set"
    assert found.version == data.version("svhn", tmp_path) == f"svhn {words[train]}, {tested}"


def test_the_version_of_absent_data_is_unknown(tmp_path: Path) -> None:
    for name in ("svhn", "speech", "mydata:load"):
        assert data.version(name, tmp_path) is None


def test_the_published_form_goes_first(tmp_path: Path) -> None:
    (tmp_path / "train_32x32.mat").write_bytes(b"damaged")
    (tmp_path / "train_32x32.npz").write_bytes(npz_file("train"))
    with pytest.raises(DataError, match=r"train_32x32\.mat' is not a sound MATLAB 5 file"):
        svhn.load(tmp_path)


def test_labels_of_other_types() -> None:
    digits = images("train")[1]
    for kind in (np.uint8, np.int32, np.float32):
        y = np.where(digits == 0, 10, digits)[:, None].astype(kind)
        assert svhn._parse(mat_file("train", y=y), Path("m"))[1].tolist() == digits.tolist()


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        svhn.load(tmp_path)
    assert str(caught.value) == (
        f"{str(tmp_path / 'svhn' / 'train_32x32.mat')!r} is missing, and so is the .npz of that "
        "name: run `softstair data fetch svhn`, or say with --data-dir where SVHN lies."
    )


SMALL = np.zeros((32, 32, 3, 2), np.uint8)
ONES = np.ones((2, 1))
BAD_MAT: dict[str, tuple[dict[str, Any], str]] = {
    "sizes": (
        {"X": SMALL, "y": np.ones((3, 1))},
        r"has X \(32, 32, 3, 2\) of uint8 and y \(3, 1\)",
    ),
    "row": ({"X": SMALL, "y": ONES.T}, r"y \(1, 2\) where"),
    "pixels": ({"X": SMALL[1:], "y": ONES}, r"X \(31, 32, 3, 2\)"),
    "one image": ({"X": SMALL[..., 0], "y": ONES}, r"X \(32, 32, 3\)"),
    "dtype": ({"X": SMALL.astype(float), "y": ONES}, "of float64"),
    "zero": ({"X": SMALL, "y": ONES * 0}, "labels that are not 1 to 10"),
    "eleven": ({"X": SMALL, "y": ONES * 11}, "labels that are not 1 to 10"),
    "half": ({"X": SMALL, "y": ONES / 2}, "labels that are not 1 to 10"),
    "nan": ({"X": SMALL, "y": ONES * np.nan}, "labels that are not 1 to 10"),
    "complex": ({"X": SMALL, "y": ONES * 1j}, "no array 'y'"),
    "text": ({"X": "hello"}, "no array 'X'"),
}


@pytest.mark.parametrize("name", BAD_MAT)
def test_bad_mat(name: str) -> None:
    changes, sentence = BAD_MAT[name]
    with pytest.raises(DataError, match=sentence):
        svhn._parse(mat_file("train", **changes), Path("train_32x32.mat"))


BAD_NPZ: dict[str, tuple[dict[str, Any], str]] = {
    "label": ({"y": np.full(12, 10, np.uint8)}, "labels that are not between 0 and 9"),
    "negative": ({"y": np.full(12, -1)}, "labels that are not between 0 and 9"),
    "labels": ({"y": np.zeros(11, np.uint8)}, "N being 12"),
    "floats": ({"y": np.zeros(12)}, "float64 where one of"),
    "colours": ({"X": np.zeros((12, 32, 32), np.uint8)}, r"shape \(12, 32, 32\) where"),
    "order": ({"X": np.zeros((12, 3, 32, 32), np.uint8)}, r"shape \(12, 3, 32, 32\) where"),
    "objects": ({"y": np.array([None] * 12)}, "no header of a plain array"),
}


@pytest.mark.parametrize("name", BAD_NPZ)
def test_bad_npz(name: str, tmp_path: Path) -> None:
    changes, sentence = BAD_NPZ[name]
    (tmp_path / "train_32x32.npz").write_bytes(npz_file("train", **changes))
    with pytest.raises(DataError, match=sentence):
        svhn.load(tmp_path)


def sound(part: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = part
    assert x.shape == (len(y), 3, 32, 32)
    assert 0 <= int(y.min()) <= int(y.max()) <= 9


@pytest.mark.parametrize("compressed", [False, True])
def test_mutated_mat(compressed: bool) -> None:
    content = mat_file("test", compressed)
    read, refused = mutations.outcomes(
        lambda mutated: sound(svhn._parse(mutated, Path("m"))), content, 2_000
    )
    assert read > 20
    assert refused > 500


def test_mutated_npz() -> None:
    def parse(mutated: bytes) -> None:
        path = Path("train_32x32.npz")
        found = arrays._parse(BytesIO(mutated), path, svhn.EXPECTED, svhn.REMEDY, svhn.LIMIT)
        sound(svhn._tensors(found["X"], found["y"], path))

    read, refused = mutations.outcomes(parse, npz_file("test"), 2_000)
    assert read > 20
    assert refused > 500
