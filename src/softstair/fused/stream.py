"""A second CUDA stream, whose kernels overlap those of the current stream."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

__all__ = ["SecondStream"]

GROUPS = 2
"""Most groups of kernels whose tensors are held: before another begins, the current stream waits
for the oldest."""


class SecondStream:
    """Launches kernels in a second CUDA stream, where they overlap later ones of the current one.

    torch's allocator orders the reuse of memory within one stream only. Reuse stays safe here: the
    second stream waits for the current one before it allocates, and tensors of the current stream
    that it reads are held until the current stream has waited for the kernels that read them. It
    waits for all of them in :meth:`join`, and for the oldest group when there are more than
    ``GROUPS``. Without CUDA, everything runs in the order of the program.
    """

    def __init__(self) -> None:
        self._unjoined: torch.cuda.Stream | None = None
        self._held: deque[tuple[torch.cuda.Event, list[object]]] = deque()

    @contextmanager
    def beside(self, device: torch.device, *read: object) -> Iterator[None]:
        """Return a context whose kernels run after those launched so far, and overlap those that
        are launched between its end and :meth:`join`. They may read the tensors in ``read``, and
        others that live until :meth:`join`."""
        if device.type != "cuda":
            yield
            return
        current = torch.cuda.current_stream(device)
        self._unjoined = second = _stream_beside(current.device_index, current.cuda_stream)
        while read and len(self._held) >= GROUPS:
            current.wait_event(self._held[0][0])
            self._held.popleft()
        second.wait_stream(current)
        done = torch.cuda.Event()
        if read:
            self._held.append((done, [*read]))
        with torch.cuda.stream(second):
            try:
                yield
            finally:
                done.record()

    def hold(self, *read: object) -> None:
        """Hold more tensors, as long as those that the last call of :meth:`beside` was given."""
        if self._held:
            self._held[-1][1].extend(read)

    def join(self) -> None:
        """Let kernels that are launched from now on wait for those of the second stream."""
        if self._unjoined is not None:
            torch.cuda.current_stream(self._unjoined.device).wait_stream(self._unjoined)
        self._unjoined = None
        self._held.clear()


@cache
def _stream_beside(device: int, stream: int) -> torch.cuda.Stream:
    """Return the second stream for a stream of a device.

    It is cached, since cuDNN keeps a workspace for each stream. Each stream has its own: a shared
    one could reuse memory after waiting for one of them while the other still reads it. torch has
    32 streams of each priority; with more than 32 first streams, two share a second one.
    """
    return torch.cuda.Stream(device)
