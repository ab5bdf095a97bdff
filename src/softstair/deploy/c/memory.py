"""The memory plan: buffers that do not live at the same time may share their bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Buffer", "arrange"]

ALIGNED = 16


@dataclass(frozen=True)
class Buffer:
    """Bytes that are in use from step ``first`` to step ``last``, both included."""

    name: str
    size: int
    first: int
    last: int


def arrange(buffers: Sequence[Buffer]) -> tuple[dict[str, int], int]:
    """Where each buffer begins, and how many bytes there are in all.

    The largest are placed first, each as low as those that live with it allow.

    >>> chain = [Buffer("a", 64, 0, 1), Buffer("b", 32, 1, 2), Buffer("c", 64, 2, 3)]
    >>> arrange(chain)
    ({'a': 0, 'c': 0, 'b': 64}, 96)
    """
    placed: dict[str, int] = {}
    known: list[tuple[int, Buffer]] = []
    for buffer in sorted(buffers, key=lambda one: (-one.size, one.first)):
        at = 0
        for begin, other in sorted(known, key=lambda one: one[0]):
            apart = other.last < buffer.first or buffer.last < other.first
            if not apart and begin < at + _room(buffer) and at < begin + _room(other):
                at = begin + _room(other)
        placed[buffer.name] = at
        known.append((at, buffer))
    total = max((at + _room(buffer) for at, buffer in known), default=0)
    return placed, total


def _room(buffer: Buffer) -> int:
    return -(-buffer.size // ALIGNED) * ALIGNED
