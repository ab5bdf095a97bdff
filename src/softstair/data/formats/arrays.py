"""Arrays of a .npz that a stranger may have written: checked before they are read, within limits.

``numpy.load`` believes what the file says of itself: it allocates the shape in the header, expands
whatever the archive holds, evaluates the header as Python and raises a dozen kinds of exception.
Here sizes are compared with each other and with a limit first, the header must be what ``savez``
writes, no pickle is ever read, and every failure is a DataError.
"""

import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from softstair.data.dataset import DataError

__all__ = ["Expected", "contents", "read"]

# The dtypes that may be, as in "u1 i8" or "U" for text of any width, and the shape: a number for
# an axis that is known, a name for one that is not but must be the same in all arrays.
Expected = tuple[str, tuple[int | str, ...]]

LIMIT = 512 * 2**20
MEMBERS = 64
# A byte of deflate gives 1,032 bytes at most.
RATIO = 1032
CHUNK = 2**20
HEADER = re.compile(
    rb"\{'descr': '([<>|=]?)([iufU])(\d{1,4})', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d{1,18}, )*(?:\d{1,18},?)?)\), \} *\n"
)


def read(
    path: Path, expected: Mapping[str, Expected], remedy: str, limit: int = LIMIT
) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays that ``expected`` names, each of at least one entry; what else lies there stays.

    remedy    the end of the sentence where the file is refused: what to do
    limit     in bytes: neither the file nor what is read of it may be larger

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "three.npz"
    ...     np.savez(path, x=np.zeros((3, 2), np.uint8), y=np.arange(3))
    ...     arrays = read(path, {"x": ("u1", ("N", 2)), "y": ("i", ("N",))}, "make it again")
    >>> arrays["x"].shape, arrays["y"].tolist()
    ((3, 2), [0, 1, 2])
    """
    with _open(path, limit, remedy) as stream:
        return _parse(stream, path, expected, remedy, limit)


def contents(path: Path, limit: int, remedy: str) -> bytes:
    """The bytes of a file, if it has no more than ``limit``."""
    with _open(path, limit, remedy) as stream:
        try:
            return stream.read(limit)
        except OSError as error:
            raise DataError(path, f"cannot be read ({error.strerror})", remedy) from error


def _open(path: Path, limit: int, remedy: str) -> IO[bytes]:
    try:
        if not path.is_file():  # a pipe would wait for ever
            raise DataError(path, "is not a file" if path.exists() else "is missing", remedy)
        if path.stat().st_size > limit:
            raise DataError(path, f"is larger than {limit:,} bytes", remedy)
        return path.open("rb")
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror})", remedy) from error


def _parse(
    stream: IO[bytes], path: Path, expected: Mapping[str, Expected], remedy: str, limit: int
) -> dict[str, np.ndarray[Any, Any]]:
    axes: dict[str, int] = {}
    try:
        _check_directory(stream)
        with zipfile.ZipFile(stream) as archive:
            names = archive.namelist()
            if len(set(names)) < len(names):
                raise ValueError("it has two members of one name")
            if absent := [name for name in expected if f"{name}.npy" not in names]:
                raise ValueError(f"it has no array {absent[0]!r}")
            members = {name: archive.getinfo(f"{name}.npy") for name in expected}
            if sum(member.file_size for member in members.values()) > limit:
                raise ValueError(f"its arrays would take more than {limit:,} bytes")
            return {
                name: _array(archive, member, name, expected[name], axes)
                for name, member in members.items()
            }
    except (
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        ArithmeticError,
        EOFError,
        LookupError,
        MemoryError,
        OSError,
        RuntimeError,  # encrypted; NotImplementedError is one too: odd compression
        ValueError,
    ) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(path, f"is not a sound .npz file ({reason})", remedy) from error


def _check_directory(stream: IO[bytes]) -> None:
    """That the archive ends as ``savez`` ends it, with a directory that is read in no time.

    zipfile would read a directory of any size, and search for it past a comment.
    """
    size = stream.seek(0, 2)
    stream.seek(max(0, size - 42))
    tail = stream.read(42).rjust(42, b"\0")
    signature, disc, start, here, members, length, offset, comment = struct.unpack(
        "<4s4H2LH", tail[20:]
    )
    if signature != b"PK\5\6" or comment:
        raise ValueError("it does not end as a zip archive")
    if tail[:4] == b"PK\6\7" or disc or start or here != members or members > MEMBERS:
        raise ValueError(f"it must be an archive of at most {MEMBERS} members in one piece")
    if length > 1024 * MEMBERS or offset + length + 22 != size:
        raise ValueError("its directory is not where it should be")


def _array(
    archive: zipfile.ZipFile,
    member: zipfile.ZipInfo,
    name: str,
    expected: Expected,
    axes: dict[str, int],
) -> np.ndarray[Any, Any]:
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"array {name!r} is compressed by something else than deflate")
    if member.file_size > RATIO * member.compress_size + RATIO:
        raise ValueError(f"array {name!r} cannot be as large as the archive says")
    with archive.open(member) as stream:
        dtype, shape, order, start = _header(stream, name)
        _check(name, dtype, shape, expected, axes)
        count = 1
        for size in shape:
            count *= size
        if count * dtype.itemsize + start != member.file_size:
            raise ValueError(f"array {name!r} has another size than its shape {shape} takes")
        buffer = np.empty(count * dtype.itemsize, np.uint8)
        view = buffer.data
        for place in range(0, len(buffer), CHUNK):
            chunk = stream.read(min(CHUNK, len(buffer) - place))
            view[place : place + len(chunk)] = chunk
            if place + len(chunk) < min(place + CHUNK, len(buffer)):
                raise EOFError(f"array {name!r} ends too early")
    array = buffer.view(dtype).reshape(shape, order="F" if order == b"True" else "C")
    if dtype.kind == "U":
        points = buffer.view(dtype.byteorder + "u4")
        if ((points > 0x10FFFF) | (points // 0x800 == 0xD800 // 0x800)).any():
            raise ValueError(f"array {name!r} has numbers that are no characters")
    return np.ascontiguousarray(array, dtype.newbyteorder("="))


def _header(stream: IO[bytes], name: str) -> tuple[np.dtype[Any], tuple[int, ...], bytes, int]:
    magic = stream.read(8)
    if magic not in (b"\x93NUMPY\1\0", b"\x93NUMPY\2\0"):
        raise ValueError(f"array {name!r} does not begin as a .npy file of version 1 or 2")
    form = "<H" if magic[6] == 1 else "<L"
    (length,) = struct.unpack(form, stream.read(struct.calcsize(form)))
    match = HEADER.fullmatch(stream.read(min(length, 4096)))
    if not match:
        raise ValueError(f"array {name!r} has no header of a plain array")
    byteorder, kind, size, order, shape = match.groups()
    if kind != b"U" and size not in (b"1", b"2", b"4", b"8"):
        raise ValueError(f"array {name!r} has no header of a plain array")
    dtype = np.dtype((byteorder + kind + size).decode("ascii"))
    axes = tuple(int(axis) for axis in shape.replace(b",", b" ").split())
    return dtype, axes, order, 8 + struct.calcsize(form) + length


def _check(
    name: str,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    expected: Expected,
    axes: dict[str, int],
) -> None:
    dtypes, axes_expected = expected
    if not {dtype.kind, f"{dtype.kind}{dtype.itemsize}"} & set(dtypes.split()):
        raise ValueError(f"array {name!r} is of {dtype} where one of {dtypes!r} is expected")
    fits = len(shape) == len(axes_expected) and 0 not in shape and dtype.itemsize > 0
    for size, axis in zip(shape, axes_expected, strict=False):
        fits &= size == (axis if isinstance(axis, int) else axes.setdefault(axis, size))
    if not fits:
        raise ValueError(
            f"array {name!r} has the shape {shape} where {axes_expected} is expected"
            f"{''.join(f', {axis} being {size}' for axis, size in axes.items())}"
        )
