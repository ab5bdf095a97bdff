"""A second CUDA stream, whose kernels overlap those of the current stream."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

__all__ = ["SecondStream"]


class SecondStream:
    """Launches kernels in a second CUDA stream, where they overlap later ones of the current one.

    torch's allocator orders the reuse of memory within one stream only. Reuse stays safe here: the
    second stream waits for the current one before it allocates, and tensors of the current stream
    that it reads are held until :meth:`join`. Without CUDA, everything runs in the order of the
    program.
    """

    def __init__(self) -> None:
        self._unjoined: torch.cuda.Stream | None = None
        self._kept: list[object] = []

    @contextmanager
    def beside(self, device: torch.device, *kept: object) -> Iterator[None]:
        """Return a context whose kernels run after those launched so far, and overlap those that
        are launched between its end and :meth:`join`. They may read the tensors in ``kept``."""
        if device.type != "cuda":
            yield
            return
        current = torch.cuda.current_stream(device)
        self._unjoined = _stream_beside(current.device_index, current.cuda_stream)
        self._kept += kept
        self._unjoined.wait_stream(current)
        with torch.cuda.stream(self._unjoined):
            yield

    def join(self) -> None:
        """Let kernels that are launched from now on wait for those of the second stream."""
        if self._unjoined is not None:
            torch.cuda.current_stream(self._unjoined.device).wait_stream(self._unjoined)
        self._unjoined = None
        self._kept.clear()


@cache
def _stream_beside(device: int, stream: int) -> torch.cuda.Stream:
    """Return the second stream for a stream of a device.

    It is cached, since cuDNN keeps a workspace for each stream. Each stream has its own: a shared
    one could reuse memory after waiting for one of them while the other still reads it. torch has
    32 streams of each priority; with more than 32 first streams, two share a second one.
    """
    return torch.cuda.Stream(device)
