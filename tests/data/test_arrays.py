"""Arrays of .npz against what numpy wrote; bombs, lies and mutations refused."""

import os
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import mutations
import numpy as np
import pytest

from softstair.data import DataError
from softstair.data.formats import arrays

EXPECTED: dict[str, arrays.Expected] = {
    "x": ("u1", ("N", 5, 2)),
    "y": ("u1 i8", ("N",)),
    "words": ("U", ("K",)),
    "volume": ("f4 f8", ("N",)),
}


def honest() -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    return {
        "x": random.integers(0, 256, (7, 5, 2), dtype=np.uint8),
        "y": random.integers(-9, 9, 7),
        "words": np.array(["on", "höher", "𝄞"]),
        "volume": random.random(7, dtype=np.float32),
    }


def archive(members: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    stream = BytesIO()
    with zipfile.ZipFile(stream, "w", method) as target:
        for name, data in members.items():
            target.writestr(name, data)
    return stream.getvalue()


def npy(array: np.ndarray[Any, Any], version: tuple[int, int] | None = None) -> bytes:
    stream = BytesIO()
    np.lib.format.write_array(stream, array, version)
    return stream.getvalue()


def lying(shape: str, descr: str = "'|u1'", order: str = "False", data: bytes = b"\0" * 8) -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}".encode()
    header = header.ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def parse(
    data: bytes, expected: Mapping[str, arrays.Expected] = EXPECTED, limit: int = arrays.LIMIT
) -> dict[str, np.ndarray[Any, Any]]:
    return arrays._parse(BytesIO(data), Path("some.npz"), expected, "make it again", limit)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_numpy_wrote(save: Any, tmp_path: Path) -> None:
    save(tmp_path / "some.npz", left=np.array([None]), **honest())
    found = arrays.read(tmp_path / "some.npz", EXPECTED, "make it again")
    assert found.keys() == EXPECTED.keys()
    for name, array in honest().items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
        assert found[name].flags.writeable
        assert found[name].flags.c_contiguous


def test_orders_and_versions() -> None:
    array = np.arange(6).reshape(3, 2)
    expected: dict[str, arrays.Expected] = {"a": ("i", (3, 2))}
    for twin in (np.asfortranarray(array), array.astype(">i2"), array.astype("<i4")):
        for version in ((1, 0), (2, 0)):
            found = parse(archive({"a.npy": npy(twin, version)}), expected)["a"]
            np.testing.assert_array_equal(found, array)
            assert found.dtype.isnative
    text = np.array(["ab", "c"]).astype(">U2")
    assert parse(archive({"a.npy": npy(text)}), {"a": ("U", (2,))})["a"].tolist() == ["ab", "c"]


def test_many_chunks() -> None:
    array = np.random.default_rng(0).integers(0, 256, 3 * arrays.CHUNK + 5, dtype=np.uint8)
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        found = parse(archive({"a.npy": npy(array)}, method), {"a": ("u1", ("N",))})
        np.testing.assert_array_equal(found["a"], array)


U1: dict[str, arrays.Expected] = {"a": ("u1", (8,))}
BAD: dict[str, tuple[bytes, str]] = {
    "no zip": (b"hello", "does not end as a zip"),
    "empty": (b"", "does not end as a zip"),
    "another name": (archive({"b.npy": lying("(8,)")}), "no array 'a'"),
    "a path": (archive({"../a.npy": lying("(8,)")}), "no array 'a'"),
    "objects": (archive({"a.npy": npy(np.array([{}] * 8), None)}), "no header of a plain"),
    "records": (archive({"a.npy": npy(np.zeros(8, "u1,u1"))}), "no header of a plain"),
    "another dtype": (archive({"a.npy": npy(np.zeros(8))}), "float64 where one of 'u1'"),
    "times": (archive({"a.npy": npy(np.zeros(8, "M8[s]"))}), "no header of a plain"),
    "another shape": (archive({"a.npy": npy(np.zeros(9, "u1"))}), r"shape \(9,\) where \(8,\)"),
    "axes": (archive({"a.npy": npy(np.zeros((8, 1), "u1"))}), r"shape \(8, 1\) where"),
    "scalar": (archive({"a.npy": npy(np.array(8, "u1"))}), r"shape \(\) where"),
    "short": (archive({"a.npy": lying("(8,)", data=b"1234567")}), "another size"),
    "long": (archive({"a.npy": lying("(8,)", data=b"123456789")}), "another size"),
    "negative": (archive({"a.npy": lying("(-8,)")}), "no header of a plain"),
    "expression": (archive({"a.npy": lying("(2*4,)")}), "no header of a plain"),
    "call": (archive({"a.npy": lying("(exit(),)")}), "no header of a plain"),
    "nested": (archive({"a.npy": lying("(" * 99 + "8," + ")" * 99)}), "no header of a plain"),
    "odd dtype": (archive({"a.npy": lying("(8,)", "'|u3'")}), "no header of a plain"),
    "no header": (archive({"a.npy": b"\x93NUMPY\x01\x00"}), "not a sound"),
    "version": (archive({"a.npy": b"\x93NUMPY\x09\x00"}), "version 1 or 2"),
    "pickle": (archive({"a.npy": b"\x80\x02."}), "does not begin as a .npy"),
    "bzip2": (archive({"a.npy": lying("(8,)")}, zipfile.ZIP_BZIP2), "than deflate"),
    "lzma": (archive({"a.npy": lying("(8,)")}, zipfile.ZIP_LZMA), "than deflate"),
    "members": (archive({f"{i}": b"" for i in range(99)}), "at most 64 members"),
    "prefix": (b"junk" + archive({"a.npy": lying("(8,)")}), "directory is not where"),
    "suffix": (archive({"a.npy": lying("(8,)")}) + b"junk", "does not end as a zip"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name: str) -> None:
    data, sentence = BAD[name]
    with pytest.raises(DataError, match=sentence) as caught:
        parse(data, U1)
    assert str(caught.value).startswith("'some.npz' is not a sound .npz file (")
    assert str(caught.value).endswith("): make it again.")


def test_axes_of_one_name_agree() -> None:
    whole = honest() | {"volume": np.zeros(6)}
    stream = BytesIO()
    np.savez(stream, **whole)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"'volume' has the shape \(6,\) .* N being 7"):
        parse(stream.getvalue())


def test_no_entries() -> None:
    with pytest.raises(DataError, match=r"the shape \(0,\)"):
        parse(archive({"a.npy": npy(np.zeros(0, "u1"))}), {"a": ("u1", ("N",))})


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_of_one_name() -> None:
    stream = BytesIO()
    with zipfile.ZipFile(stream, "w") as target:
        target.writestr("a.npy", lying("(8,)"))
        target.writestr("a.npy", lying("(8,)"))
    with pytest.raises(DataError, match="two members of one name"):
        parse(stream.getvalue(), U1)


@pytest.mark.parametrize("point", [0xD800, 0xDFFF, 0x110000, 0xFFFFFFFF])
def test_numbers_that_are_no_characters(point: int) -> None:
    data = archive({"a.npy": lying("(2,)", "'<U1'", data=struct.pack("<2L", 0x61, point))})
    with pytest.raises(DataError, match="no characters"):
        parse(data, {"a": ("U", (2,))})


def test_bombs_are_refused_before_they_go_off() -> None:
    limit = 2**20
    bomb = archive({"a.npy": lying(f"({2**25},)", data=bytes(2**25))}, zipfile.ZIP_DEFLATED)
    # The same with the declared size made small: what is declared is what is read.
    shy = bomb.replace(struct.pack("<L", 2**25 + 128), struct.pack("<L", 8 + 128))
    # And a shape without the bytes to fill it.
    empty = archive({"a.npy": lying(f"({2**62},)")})
    expected: dict[str, arrays.Expected] = {"a": ("u1", ("N",))}
    tracemalloc.start()
    try:
        for data in (bomb, shy, empty):
            with pytest.raises(DataError, match="is not a sound"):
                parse(data, expected, limit)
        assert tracemalloc.get_traced_memory()[1] < 4 * limit
    finally:
        tracemalloc.stop()


def test_declared_sizes_are_within_what_deflate_can_do() -> None:
    data = bytearray(archive({"a.npy": lying("(8,)")}, zipfile.ZIP_DEFLATED))
    place = data.index(b"PK\1\2") + 24
    data[place : place + 4] = struct.pack("<L", 2**25)
    with pytest.raises(DataError, match="cannot be as large"):
        parse(bytes(data), U1)


def test_encrypted_and_changed() -> None:
    data = archive({"a.npy": lying("(8,)", data=b"softstai")})
    flagged = bytearray(data)
    for signature, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        flagged[data.index(signature) + offset] |= 1
    with pytest.raises(DataError, match="encrypted"):
        parse(bytes(flagged), U1)
    with pytest.raises(DataError, match="CRC"):
        parse(data.replace(b"softstai", b"softstay"), U1)


def test_another_directory_of_64_bits() -> None:
    data = archive({"a.npy": lying("(8,)")})
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, 0, 1)
    with pytest.raises(DataError, match="in one piece"):
        parse(data[:-22] + locator + data[-22:], U1)


def test_files_that_are_none(tmp_path: Path) -> None:
    for path, sentence in ((tmp_path / "absent.npz", "is missing"), (tmp_path, "is not a file")):
        with pytest.raises(DataError, match=f"{sentence}: make it again"):
            arrays.read(path, U1, "make it again")
        with pytest.raises(DataError, match=f"{sentence}: make it again"):
            arrays.contents(path, 10, "make it again")
    (tmp_path / "large.npz").write_bytes(b"01234567890")
    with pytest.raises(DataError, match="larger than 10 bytes"):
        arrays.contents(tmp_path / "large.npz", 10, "make it again")
    with pytest.raises(DataError, match="larger than 10 bytes"):
        arrays.read(tmp_path / "large.npz", U1, "make it again", limit=10)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names are POSIX's")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(DataError, match="is not a file"):
        arrays.read(tmp_path / "pipe.npz", U1, "make it again")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_mutated_archives(save: Any) -> None:
    stream = BytesIO()
    save(stream, **honest())
    read, refused = mutations.outcomes(parse, stream.getvalue(), 5_000)
    assert read
    assert refused > 3_000


def test_mutated_members_in_sound_archives() -> None:
    """The archive's checksum would hide most of what the header's reader could meet."""

    def wrapped(data: bytes) -> bytes:
        # What zipfile.writestr does, in a tenth of the time.
        local = struct.pack("<5H3L2H", 20, 0, 0, 0, 33, zlib.crc32(data), *[len(data)] * 2, 5, 0)
        central = struct.pack("<H", 20) + local + struct.pack("<3H2L", 0, 0, 0, 0, 0)
        start = b"PK\3\4" + local + b"a.npy" + data
        directory = b"PK\1\2" + central + b"a.npy"
        ends = struct.pack("<4H2LH", 0, 0, 1, 1, len(directory), len(start), 0)
        return start + directory + b"PK\5\6" + ends

    member = npy(honest()["words"])
    expected: dict[str, arrays.Expected] = {"a": ("U", ("K",))}
    assert parse(wrapped(member), expected)["a"].tolist() == honest()["words"].tolist()
    read, refused = mutations.outcomes(lambda data: parse(wrapped(data), expected), member, 10_000)
    assert read > 100
    assert refused > 1_000
