"""Seeded mutations of a file's bytes: what a bad disc, a cut download or an enemy would make of it.

Tests in this folder take it by ``import mutations``.
"""

import random
import time
from collections.abc import Callable, Iterator

from softstair.data.dataset import DataError

__all__ = ["KINDS", "mutations", "outcomes"]

# Numbers on which parsers stumble: signs, the ends of their ranges, sizes past any file.
EDGES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**40)
HEADERS = (
    b"",
    b"\x00" * 8,
    b"\xff" * 8,
    b"PK\x03\x04",
    b"\x93NUMPY\x01\x00",
    b"\x80\x02",
    b"\x89HDF",
)


def _flip(data: bytearray, draw: random.Random) -> None:
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        data[draw.randrange(len(data))] ^= draw.choice((1, 2, 4, 8, 16, 32, 64, 128, 0xFF))


def _replace(data: bytearray, draw: random.Random) -> None:
    for _ in range(draw.choice((1, 1, 2, 4))):
        data[draw.randrange(len(data))] = draw.choice((0, 1, 0x28, 0x7F, 0x80, 0xFF, 0x2E))


def _truncate(data: bytearray, draw: random.Random) -> None:
    del data[draw.randrange(len(data)) :]


def _insert(data: bytearray, draw: random.Random) -> None:
    place = draw.randrange(len(data) + 1)
    data[place:place] = draw.randbytes(draw.choice((1, 2, 4, 8, 64)))


def _remove(data: bytearray, draw: random.Random) -> None:
    place = draw.randrange(len(data))
    del data[place : place + draw.choice((1, 2, 4, 8, 64))]


def _duplicate(data: bytearray, draw: random.Random) -> None:
    start, size = draw.randrange(len(data)), draw.choice((1, 4, 16, 128, 1024))
    place = draw.randrange(len(data) + 1)
    data[place:place] = data[start : start + size]


def _zero(data: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(data))
    end = min(len(data), start + draw.choice((1, 2, 4, 8, 32, 256)))
    data[start:end] = bytes(end - start)


def _number(data: bytearray, draw: random.Random) -> None:
    """A number of an edge in place of the bytes there: lengths and sizes are such numbers."""
    size, order = draw.choice((2, 4, 8)), draw.choice(("little", "big"))
    place = draw.randrange(len(data))
    number = (draw.choice(EDGES) % 2 ** (8 * size)).to_bytes(size, order)  # type: ignore[arg-type]
    data[place : place + size] = number


def _header(data: bytearray, draw: random.Random) -> None:
    header = draw.choice((*HEADERS, draw.randbytes(draw.randrange(1, 32))))
    data[: draw.choice((len(header), draw.randrange(64)))] = header


KINDS: dict[str, Callable[[bytearray, random.Random], None]] = {
    "flip": _flip,
    "replace": _replace,
    "truncate": _truncate,
    "insert": _insert,
    "remove": _remove,
    "duplicate": _duplicate,
    "zero": _zero,
    "number": _number,
    "header": _header,
}


def mutations(data: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """``count`` mutations of ``data``, the same ones for the same seed; one in four is twofold.

    Half of them fall anywhere; the other half within the first 512 bytes or the last 512, where
    headers, directories and trailers are.

    >>> list(mutations(b"softstair", 3)) == list(mutations(b"softstair", 3))
    True
    >>> len(list(mutations(b"softstair", 3, seed=1)))
    3
    """
    if not data:
        raise ValueError("data must have at least one byte, but none was given.")
    draw = random.Random(seed)
    for _ in range(count):
        start, end = draw.choice(((0, None), (0, None), (0, 512), (-512, None)))
        before = data[:start] if start else b""
        part = bytearray(data[start:end])
        after = data[end:] if end else b""
        for _ in range(draw.choice((1, 1, 1, 2))):
            if part:
                draw.choice(tuple(KINDS.values()))(part, draw)
        yield before + bytes(part) + after


def outcomes(
    parse: Callable[[bytes], object], data: bytes, count: int, seed: int = 0
) -> tuple[int, int]:
    """How many of the mutations ``parse`` reads and how many it refuses with a DataError.

    Anything else (another exception, a second's work) fails, with the number of the mutation.

    >>> outcomes(bytes.hex, b"softstair", 100)
    (100, 0)
    """
    read = refused = 0
    for number, mutation in enumerate(mutations(data, count, seed)):
        start, sentence = time.process_time(), ""
        try:
            parse(mutation)
            read += 1
        except DataError as error:
            sentence = str(error)
            refused += 1
        except Exception as error:
            raise AssertionError(f"mutation {number} of seed {seed}: {error!r}") from error
        assert time.process_time() - start < 1, (number, seed)
        assert len(sentence) < 1000, (number, seed, sentence)
        assert sentence.isprintable(), (number, seed, sentence)
    return read, refused
