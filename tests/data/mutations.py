"""Seeded mutations of the bytes of a file, as a bad disk or a broken download would make them."""

import random
from collections.abc import Callable, Iterator

from softstair.data.dataset import DataError

__all__ = ["mutations", "outcomes"]

# Numbers that parsers handle badly: signs, ends of ranges, sizes larger than any file.
EDGES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**40)
HEADERS = (b"", b"\xff" * 8, b"PK\3\4", b"\x93NUMPY\1\0", b"\x80\2", b"\x89HDF")


def _mutated(data: bytes, draw: random.Random) -> bytes:
    """Return the bytes with a part overwritten, inserted, removed, or cut off."""
    # Half of the parts are among the first or last 512 bytes, where headers and trailers are.
    size = len(data)
    first, last = draw.choice(((0, size), (0, size), (0, 512), (size - 512, size)))
    start = draw.randrange(max(first, 0), max(min(last, size), 1))
    length = draw.choice((1, 2, 4, 8, 64))
    random_bytes, copied = draw.randbytes(length), data[size - start :][:length]
    number = (draw.choice(EDGES) % 256**length).to_bytes(length, draw.choice(("little", "big")))
    kind = draw.choice((*["overwrite"] * 4, "insert", "remove", "cut", "header"))
    if kind == "cut":
        return data[:start]
    if kind == "header":
        return draw.choice(HEADERS) + data[length:]
    new = b"" if kind == "remove" else draw.choice((random_bytes, copied, number, bytes(length)))
    return data[:start] + new + data[start if kind == "insert" else start + length :]


def mutations(data: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """Yield ``count`` mutations of ``data``, which are the same for the same seed."""
    draw = random.Random(seed)
    for _ in range(count):
        mutated = data
        for _ in range(draw.choice((1, 1, 1, 2, 4))):
            mutated = _mutated(mutated, draw)
        yield mutated


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
