"""Recordings as Speech Commands keeps them: RIFF files of 16-bit PCM, mono, 16 kHz.

The standard library's ``wave`` is more generous: it reads a clip that breaks off as a shorter one,
and takes 12 bits a sample for 16. Here a file is what it says it is, or it is refused.
"""

import struct
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from softstair.data.dataset import DataError
from softstair.data.formats import arrays

__all__ = ["parse", "read"]

LIMIT: Final = 2 * 16_000 * 600  # bytes: ten minutes, six times the longest of the data set
_REMEDY: Final = "give a 16-bit PCM mono file at 16 kHz, or remove this one"
_HEADER: Final = struct.Struct("<4sI4s")
_CHUNK: Final = struct.Struct("<4sI")
_FORMAT: Final = struct.Struct("<HHIIHH")


def read(path: Path) -> NDArray[np.int16]:
    """The samples of a file, as ``parse`` finds them."""
    return parse(arrays.contents(path, LIMIT, _REMEDY), path)


def parse(data: bytes, path: Path) -> NDArray[np.int16]:
    """The samples in the bytes of a file, ``path`` being its name in errors.

    >>> header = b"RIFF" + struct.pack("<I", 40) + b"WAVE"
    >>> form = b"fmt " + struct.pack("<IHHIIHH", 16, 1, 1, 16000, 32000, 2, 16)
    >>> parse(header + form + b"data" + struct.pack("<Ihh", 4, -1, 300), Path("clip.wav"))
    array([ -1, 300], dtype=int16)
    """
    if len(data) < _HEADER.size or data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise DataError(path, "is not a RIFF WAVE file", _REMEDY)
    place, known = _HEADER.size, False
    # The size of the whole in the header is passed over: every chunk is held to the file's end.
    while place + _CHUNK.size <= len(data):
        name, size = _CHUNK.unpack_from(data, place)
        place += _CHUNK.size
        if place + size > len(data):
            missing = place + size - len(data)
            raise DataError(path, f"breaks off {missing} bytes before its end", _REMEDY)
        if name == b"fmt ":
            _check_format(data[place : place + size], path)
            known = True
        elif name == b"data":
            if not known:
                raise DataError(path, "has samples before their format", _REMEDY)
            return _samples(data[place : place + size], path)
        place += size + size % 2  # chunks begin at even places
    raise DataError(path, "has no samples" if known else "has no format", _REMEDY)


def _check_format(chunk: bytes, path: Path) -> None:
    if len(chunk) < _FORMAT.size:
        raise DataError(path, f"has a format of {len(chunk)} bytes where 16 are needed", _REMEDY)
    code, channels, rate, _, frame, bits = _FORMAT.unpack_from(chunk)
    if code != 1:
        raise DataError(path, f"is not plain PCM but of format {code}", _REMEDY)
    if channels != 1:
        raise DataError(path, f"has {channels} channels", _REMEDY)
    if rate != 16_000:
        raise DataError(path, f"has {rate} samples a second", _REMEDY)
    if bits != 16 or frame != 2:
        raise DataError(path, f"has {bits} bits a sample, {frame} bytes apart", _REMEDY)


def _samples(chunk: bytes, path: Path) -> NDArray[np.int16]:
    if not chunk:
        raise DataError(path, "is empty", _REMEDY)
    if len(chunk) % 2:
        raise DataError(path, f"ends within a sample, after {len(chunk)} bytes", _REMEDY)
    return np.frombuffer(chunk, dtype="<i2").astype(np.int16, copy=True)
