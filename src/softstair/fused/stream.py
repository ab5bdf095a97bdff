"""A second CUDA stream, in which kernels run beside those of the current stream."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

__all__ = ["SecondStream"]


class SecondStream:
    """Runs kernels whose results are not needed at once beside those that follow.

    One kernel can then use the memory while another multiplies. Memory is safe to reuse: what is
    allocated here is allocated after the kernels that were launched so far, and what they read is
    kept until both streams join. Without CUDA, everything runs in the order of the program.
    """

    def __init__(self) -> None:
        self._waiting: torch.cuda.Stream | None = None
        self._kept: list[object] = []

    @contextmanager
    def beside(self, device: torch.device, *kept: object) -> Iterator[None]:
        """Return a context whose kernels run after those launched so far, and beside those launched
        later until :meth:`join`; they may read the tensors in ``kept``."""
        if device.type != "cuda":
            yield
            return
        current = torch.cuda.current_stream()
        self._waiting = _stream_beside(current.device_index, current.cuda_stream)
        self._kept += kept
        self._waiting.wait_stream(current)
        with torch.cuda.stream(self._waiting):
            yield

    def join(self) -> None:
        """Let kernels that are launched from now on wait for those of the second stream."""
        if self._waiting is not None:
            torch.cuda.current_stream().wait_stream(self._waiting)
        self._waiting = None
        self._kept.clear()


@cache
def _stream_beside(device: int, stream: int) -> torch.cuda.Stream:
    """Return the second stream for a stream of a device; torch's libraries keep memory for each.

    Two streams do not share one: what is freed after its last use in one of them could be allocated
    again after kernels of the other alone.
    """
    return torch.cuda.Stream(device)
