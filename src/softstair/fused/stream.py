"""A second CUDA stream, in which kernels run beside those of the current stream."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["SecondStream"]


class SecondStream:
    """Runs kernels whose results are not needed at once beside those that follow.

    One kernel can then use the memory while another multiplies. Memory is safe to reuse: what is
    allocated here is allocated after the kernels that were launched so far, and what they read is
    kept until both streams join. Without CUDA, everything runs in the order of the program.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._kept: list[object] = []

    @contextmanager
    def beside(self, device: torch.device, *kept: object) -> Iterator[None]:
        """Return a context whose kernels run after those launched so far, and beside those launched
        later until :meth:`join`; they may read the tensors in ``kept``."""
        if device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._kept += (*kept, True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let kernels that are launched from now on wait for those of the second stream."""
        if self._kept:
            assert self._stream is not None
            torch.cuda.current_stream().wait_stream(self._stream)
            self._kept.clear()
