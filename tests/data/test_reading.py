"""Arrays of .npz files: what NumPy wrote, or a DataError."""

import io
import zipfile
from typing import Any

import mutations
import numpy as np
import pytest

from softstair.data import DataError, dataset
from softstair.data.dataset import Expected, read_arrays, read_bytes

ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "x": np.arange(70, dtype=np.uint8).reshape(7, 5, 2),
    "y": np.arange(7),
    "words": np.array(["on", "höher", "𝄞"]),
}
EXPECTED: dict[str, Expected] = {
    "x": (np.uint8, ("N", 5, 2)),
    "y": (np.integer, ("N",)),
    "words": (np.str_, ("K",)),
}


@pytest.mark.parametrize("compressed", [False, True])
def test_arrays_are_those_that_numpy_wrote(compressed, tmp_path):
    path = tmp_path / "a.npz"
    save = np.savez_compressed if compressed else np.savez
    save(path, **(ARRAYS | {"more": np.zeros(3), "y": ARRAYS["y"].astype(">i4")}))
    arrays = read_arrays(path, EXPECTED, "make it again")
    assert arrays.keys() == EXPECTED.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, ARRAYS[name])
        assert array.dtype.isnative


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("y", np.arange(6)),
        ("y", np.arange(7.0)),
        ("y", np.array(7)),
        ("x", ARRAYS["x"][:, 0]),
        ("x", ARRAYS["x"][:, :4]),
        ("words", np.array([], str)),
        ("words", np.array([0x110000], np.uint32).view("U1")),
    ],
)
def test_arrays_of_another_type_or_shape_are_refused(name, array, tmp_path):
    np.savez(tmp_path / "a.npz", **(ARRAYS | {name: array}))
    with pytest.raises(DataError, match=r"a\.npz' cannot be read as an \.npz file"):
        read_arrays(tmp_path / "a.npz", EXPECTED, "make it again")


def test_pickled_arrays_are_not_loaded(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([print], dtype=object))
    with pytest.raises(DataError, match="allow_pickle"):
        read_arrays(tmp_path / "a.npz", {"x": (np.object_, ("N",))}, "make it again")


def test_files_are_limited_in_size(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.zeros((7, 500, 2), np.uint8))
    monkeypatch.setattr(dataset, "LIMIT", 5_000)
    assert path.stat().st_size < 5_000
    with pytest.raises(DataError, match="more than 5,000 bytes"):
        read_arrays(path, {"x": (np.uint8, ("N", 500, 2))}, "make it again")
    with pytest.raises(DataError, match="is larger than 10 bytes"):
        read_bytes(path, "make it again", 10)


def test_mutated_npz_files_are_read_or_refused(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, **ARRAYS)
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}

    def read(data: bytes) -> None:
        path.write_bytes(data)
        arrays = read_arrays(path, EXPECTED, "make it again")
        assert arrays["x"].shape[1:] == (5, 2)

    assert min(mutations.outcomes(read, content)) > 5

    def read_with_valid_checksum(data: bytes) -> None:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            for name, member in members.items():
                archive.writestr(name, data if name == "x.npy" else member)
        read(stream.getvalue())

    assert min(mutations.outcomes(read_with_valid_checksum, members["x.npy"])) > 5
