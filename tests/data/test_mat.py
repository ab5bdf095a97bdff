"""MATLAB 5 files against scipy, which writes and reads them; bombs and mutations refused."""

import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import mutations
import numpy as np
import pytest
from scipy.io import loadmat, savemat

from softstair.data import DataError
from softstair.data.formats import mat


def written(arrays: dict[str, Any], compressed: bool = False) -> bytes:
    stream = BytesIO()
    savemat(stream, arrays, do_compression=compressed)
    return stream.getvalue()


def parse(data: bytes, *names: str, limit: int = mat.LIMIT) -> dict[str, np.ndarray[Any, Any]]:
    return mat.parse(data, names or ("X", "y"), Path("some.mat"), "fetch it again", limit)


def pair() -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    return {
        "X": random.integers(0, 256, (4, 4, 3, 2), dtype=np.uint8),
        "y": np.array([[1.0], [10.0]]),
    }


@pytest.mark.parametrize("compressed", [False, True])
def test_against_scipy(compressed: bool) -> None:
    random = np.random.default_rng(0)
    shapes = [(3, 5), (1, 1), (2, 3, 4, 5), (1, 3)]
    arrays = {
        f"{dtype}_{len(shape)}_{shape[1]}": random.integers(0, 99, shape).astype(dtype)
        for dtype in "u1 i1 u2 i2 u4 i4 u8 i8 f4 f8".split()
        for shape in shapes
    }
    arrays |= {"flag": np.array([[True, False]]), "large": random.random((70, 300))}
    assert len(arrays) < mat.ELEMENTS - 4
    others = {"text": "hello", "cell": np.array([{}, "x"], object), "complex": np.array([[1j]])}
    data = written(others | arrays | {"struct": {"X": np.ones(3)}}, compressed)
    truth, found = loadmat(BytesIO(data)), parse(data, *arrays)
    for name in arrays:
        np.testing.assert_array_equal(found[name], truth[name])
        assert found[name].dtype == truth[name].dtype
    for name in (*others, "struct", "absent"):
        with pytest.raises(DataError, match=f"no array '{name}' of numbers"):
            parse(data, name)


def element(kind: int, data: bytes, order: str = "<") -> bytes:
    return struct.pack(f"{order}LL", kind, len(data)) + data + bytes(-len(data) % 8)


def by_hand(
    values: bytes = b"\1\2\3",
    shape: tuple[int, ...] = (3, 1),
    order: str = "<",
    class_: int = 6,
    kind: int = 2,
    name: bytes = b"y",
) -> bytes:
    """An array of MATLAB's own make: doubles of small whole numbers are stored as bytes."""
    return element(
        14,
        element(6, struct.pack(f"{order}LL", class_, 0), order)
        + element(5, struct.pack(f"{order}{len(shape)}l", *shape), order)
        + element(1, name, order)
        + element(kind, values, order),
        order,
    )


def file(*elements: bytes, order: str = "<") -> bytes:
    magic = b"\x00\x01IM" if order == "<" else b"\x01\x00MI"
    return b"MATLAB 5.0 MAT-file".ljust(124) + magic + b"".join(elements)


def packed(inner: bytes, end: int | None = None) -> bytes:
    data = zlib.compress(inner)[:end]
    return struct.pack("<LL", 15, len(data)) + data


@pytest.mark.parametrize("order", ["<", ">"])
def test_doubles_in_bytes_in_both_orders(order: str) -> None:
    data = file(by_hand(order=order), order=order)
    np.testing.assert_array_equal(loadmat(BytesIO(data))["y"], [[1.0], [2.0], [3.0]])
    found = parse(data, "y")["y"]
    assert found.tolist() == [[1.0], [2.0], [3.0]]
    assert found.dtype == np.dtype("f8")
    wide = struct.pack(f"{order}3h", 1, 2, -300)
    data = file(by_hand(wide, order=order, kind=3), order=order)
    assert parse(data, "y")["y"].tolist() == [[1.0], [2.0], [-300.0]]


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "header is another"),
    "text": (b"hello" * 100, "header is another"),
    "version 4": (bytes(200), "header is another"),
    "HDF5": (b"\x89HDF\r\n\x1a\n".ljust(600), "version 7.3, which is HDF5"),
    "HDF5 after a header": (b"MATLAB 7.3".ljust(512) + b"\x89HDF\r\n\x1a\n", "version 7.3"),
    "nothing in it": (file(), "no array 'y'"),
    "half a tag": (file(b"\x0e\0\0\0"), "too early"),
    "cut": (file(by_hand())[:-8], "too early"),
    "rest": (file(by_hand()) + b"rest", "too early"),
    "no array": (file(element(2, b"12345678")), "damaged"),
    "array in array": (file(element(14, by_hand())), "no array"),
    "twice": (file(by_hand(), by_hand()), "two arrays 'y'"),
    "negative": (file(by_hand(shape=(-3, -1))), "another size"),
    "more": (file(by_hand(shape=(4, 1))), "another size"),
    "huge": (file(by_hand(shape=(2**31 - 1,) * 9)), "another size"),
    "one axis": (file(by_hand(shape=(3,))), "another size"),
    "no entry": (file(by_hand(b"", shape=(0, 1))), "another size"),
    "no axis": (file(by_hand(shape=())), "another size"),
    "many axes": (file(by_hand(shape=(1,) * 200)), "too early|without shape"),
    "loses values": (file(by_hand(class_=9, kind=1)), "another type than its class"),
    "numbers of text": (file(by_hand(kind=16)), "another type than its class"),
    "name": (file(by_hand(name=b"y" * 600)), "without shape or name"),
    "function": (file(by_hand(class_=16)), "no array 'y'"),
    "opaque": (file(by_hand(class_=17)), "no array 'y'"),
    "cell": (file(by_hand(class_=1)), "no array 'y'"),
    "sparse": (file(by_hand(class_=5)), "no array 'y'"),
    "complex": (file(by_hand(class_=6 | 0x0800)), "no array 'y'"),
    "many": (file(*[by_hand(name=b"z")] * 65), "more than 64 elements"),
    "packed twice": (file(packed(packed(by_hand()))), "no array"),
    "packed garbage": (file(struct.pack("<LL", 15, 8) + b"12345678"), "damaged"),
    "packed and cut": (file(packed(by_hand()[:-8])), "damaged"),
    "packed and more": (file(packed(by_hand() + b"more")), "larger than it says"),
    "no checksum": (file(packed(by_hand(), -4)), "damaged"),
    "checksum": (file(packed(by_hand())[:-1] + b"\0"), "damaged"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name: str) -> None:
    data, sentence = BAD[name]
    with pytest.raises(DataError, match=sentence) as caught:
        parse(data, "y")
    assert str(caught.value).startswith("'some.mat' is not a sound MATLAB 5 file (")
    assert str(caught.value).endswith("): fetch it again.")


@contextmanager
def at_most(size: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()


def test_bombs_are_refused_before_they_go_off() -> None:
    limit = 2**20
    whole = by_hand(bytes(2**25), (2**25, 1))
    doubles = by_hand(bytes(limit // 4), (limit // 4, 1))  # eight times as large as doubles
    shy = struct.pack("<LL", 14, 2**10) + whole[8:]
    loud = struct.pack("<LL", 14, 2**31 - 1) + by_hand()[8:]
    for data in (packed(whole), whole, packed(shy), packed(loud), doubles, packed(doubles)):
        content = file(data)
        with at_most(2 * limit), pytest.raises(DataError, match=r"large|more than|damaged|another"):
            parse(content, "y", limit=limit)


def test_what_is_not_asked_for_is_not_expanded() -> None:
    bomb = packed(by_hand(bytes(2**25), (2**25, 1), name=b"bomb"))
    content = file(bomb, packed(by_hand()))
    with at_most(2**20):
        assert parse(content, "y", limit=2**20)["y"].size == 3


@pytest.mark.parametrize("compressed", [False, True])
def test_mutated_files(compressed: bool) -> None:
    read, refused = mutations.outcomes(parse, written(pair(), compressed), 10_000)
    assert read > 100
    assert refused > 3_000


def test_mutated_arrays_in_sound_streams() -> None:
    """The checksum of zlib would hide most of what the reader of arrays could meet."""
    inner = by_hand()
    read, refused = mutations.outcomes(lambda data: parse(file(packed(data)), "y"), inner, 10_000)
    assert read > 100
    assert refused > 3_000
