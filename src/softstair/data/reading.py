"""Files that may be damaged: size limits, and one exception type for whatever a parser raises."""

import hashlib
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from softstair._errors import SoftstairError, first_line
from softstair.data.dataset import DataError

__all__ = ["Array", "Expected", "check_digest", "guard", "read_arrays", "read_bytes"]

Array = np.ndarray[Any, Any]
Expected = tuple[type[Any], tuple[int | str, ...]]
"""Dtype and shape of an array; "N" stands for a size that is the same in all arrays of a file."""

LIMIT = 512 * 2**20


@contextmanager
def guard(path: Path, action: str, remedy: str) -> Iterator[None]:
    """Turn any exception into a DataError which says that ``path`` cannot be read, listed, ..."""
    try:
        yield
    except SoftstairError:
        raise
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) else None
        problem = f"cannot be {action} ({reason or first_line(error)})"
        raise DataError(path, problem, remedy) from error


def check_file(path: Path, remedy: str, limit: int = LIMIT) -> None:
    """Raise DataError unless ``path`` is a regular file of at most ``limit`` bytes."""
    with guard(path, "read", remedy):
        if not path.is_file():  # opening a named pipe would block
            raise DataError(path, "is not a file" if path.exists() else "is missing", remedy)
        if path.stat().st_size > limit:
            raise DataError(path, f"is larger than {limit:,} bytes", remedy)


def check_digest(path: Path, algorithm: str, expected: str, remedy: str) -> None:
    """Raise DataError unless the file at ``path`` has the published digest."""
    check_file(path, remedy)
    with guard(path, "read", remedy), path.open("rb") as file:
        digest = hashlib.file_digest(file, algorithm).hexdigest()
    if digest != expected:
        problem = f"is not the published file (its {algorithm} is {digest}, not {expected})"
        raise DataError(path, problem, remedy)


def read_bytes(path: Path, remedy: str, limit: int) -> bytes:
    """Return the content of a file of at most ``limit`` bytes."""
    check_file(path, remedy, limit)
    with guard(path, "read", remedy):
        return path.read_bytes()


def read_arrays(path: Path, expected: Mapping[str, Expected], remedy: str) -> dict[str, Array]:
    """Return the arrays of an .npz file that ``expected`` names; none may be empty."""
    check_file(path, remedy)
    sizes: dict[str, int] = {}
    with guard(path, "read as an .npz file", remedy):
        with zipfile.ZipFile(path) as archive:
            if sum(member.file_size for member in archive.infolist()) > LIMIT:
                raise ValueError(f"its arrays have more than {LIMIT:,} bytes")
        with np.load(path, allow_pickle=False) as arrays:
            return {name: _checked(name, arrays[name], expected[name], sizes) for name in expected}


def _checked(name: str, array: Array, expected: Expected, sizes: dict[str, int]) -> Array:
    dtype, shape = expected
    if not np.issubdtype(array.dtype, dtype):
        raise ValueError(f"array {name!r} has dtype {array.dtype} instead of {dtype.__name__}")
    pairs = zip(shape, array.shape, strict=array.ndim == len(shape))
    allowed = [sizes.setdefault(n, size) if isinstance(n, str) else n for n, size in pairs]
    if array.ndim != len(shape) or list(array.shape) != allowed or not array.size:
        raise ValueError(f"array {name!r} has shape {array.shape} instead of {shape}, {sizes}")
    if array.dtype.kind == "U":
        array.tolist()  # raises ValueError if there are invalid code points
    return np.ascontiguousarray(array, array.dtype.newbyteorder("="))
