"""Seeded mutations of the bytes of a file, as a bad disk or a broken download would make them."""

import random
from collections.abc import Callable, Iterator

from softstair.data.dataset import DataError

__all__ = ["mutations", "outcomes"]

# Numbers that parsers handle badly: signs, ends of ranges, sizes larger than any file.
EDGES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**40)
HEADERS = (b"", b"\0" * 8, b"\xff" * 8, b"PK\3\4", b"\x93NUMPY\1\0", b"\x80\2", b"\x89HDF")


def _change(data: bytearray, draw: random.Random) -> None:
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        at = draw.randrange(len(data))
        data[at] = draw.choice((0, 0x28, 0x7F, 0xFF, 0x2E, *(data[at] ^ 1 << n for n in range(8))))


def _truncate(data: bytearray, draw: random.Random) -> None:
    del data[draw.randrange(len(data)) :]


def _insert(data: bytearray, draw: random.Random) -> None:
    """Insert random bytes, or some that are there."""
    start, size = draw.randrange(len(data)), draw.choice((1, 2, 4, 16, 128))
    target = draw.randrange(len(data) + 1)
    data[target:target] = draw.choice((draw.randbytes(size), data[start : start + size]))


def _remove(data: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(data))
    del data[start : start + draw.choice((1, 2, 4, 8, 64))]


def _zero(data: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(data))
    end = min(len(data), start + draw.choice((1, 2, 4, 8, 32, 256)))
    data[start:end] = bytes(end - start)


def _number(data: bytearray, draw: random.Random) -> None:
    """Overwrite some bytes with a number of ``EDGES``, as if it were a length or a size."""
    size, order = draw.choice((2, 4, 8)), draw.choice(("little", "big"))
    start = draw.randrange(len(data))
    number = (draw.choice(EDGES) % 2 ** (8 * size)).to_bytes(size, order)  # type: ignore[arg-type]
    data[start : start + size] = number


def _header(data: bytearray, draw: random.Random) -> None:
    header = draw.choice((*HEADERS, draw.randbytes(draw.randrange(1, 32))))
    data[: draw.choice((len(header), draw.randrange(64)))] = header


KINDS = (_change, _change, _truncate, _insert, _insert, _remove, _zero, _number, _header)


def mutations(data: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """Yield ``count`` mutations of ``data``, which are the same for the same seed.

    Half of them are anywhere; the others are in the first or the last 512 bytes, where headers,
    directories and trailers are.
    """
    draw = random.Random(seed)
    for _ in range(count):
        start, end = draw.choice(((0, None), (0, None), (0, 512), (-512, None)))
        before = data[:start] if start else b""
        part = bytearray(data[start:end])
        after = data[end:] if end else b""
        for _ in range(draw.choice((1, 1, 1, 2))):
            if part:
                draw.choice(KINDS)(part, draw)
        yield before + bytes(part) + after


def outcomes(
    parse: Callable[[bytes], object], data: bytes, count: int = 200, seed: int = 0
) -> tuple[int, int]:
    """Return how many mutations ``parse`` accepts and for how many it raises DataError.

    Any other exception is a failure, as is an error message that is long or cannot be printed.
    """
    accepted = refused = 0
    for number, mutation in enumerate(mutations(data, count, seed)):
        try:
            parse(mutation)
            accepted += 1
        except DataError as error:
            refused += 1
            message = str(error)
            assert len(message) < 1000 and message.isprintable(), (number, message)  # noqa: PT018
        except Exception as error:
            raise AssertionError(f"mutation {number} of seed {seed}: {error!r}") from error
    return accepted, refused
