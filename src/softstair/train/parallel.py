"""Data-parallel training: several processes, started by ``torchrun``, train one run.

Each process takes a part of every batch. :class:`torch.nn.parallel.DistributedDataParallel`
averages the gradients, and gives all processes the running statistics of rank 0, which reads and
writes the run directory. Without torchrun there is one process, which never communicates.

:class:`StopRequest` notes the signals that ask a training to stop.
"""

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from softstair._errors import SoftstairError, first_line

T = TypeVar("T")


class ConnectionLost(SoftstairError):
    """Another process of the training ended."""


class Interrupted(Exception):
    """A signal stopped the training, which has saved a checkpoint."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopRequest:
    """A context in which SIGINT and SIGTERM set ``number``; a second one raises KeyboardInterrupt.

    Outside the main thread, where Python handles no signals, it does nothing.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, raise_second: bool = True) -> None:
        self.number: int | None = None
        self._raise_second = raise_second
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        try:
            for number in self.SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        except ValueError:
            self._before.clear()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None and self._raise_second:
            raise KeyboardInterrupt
        self.number = number


def _is_joined() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Return the number of this process; rank 0 has the run directory and reports for all."""
    return dist.get_rank() if _is_joined() else 0


def size() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if _is_joined() else 1


def local_rank() -> int | None:
    """Return the number of this process on its machine; None if it trains alone."""
    return torchrun_ranks()[2] if _is_joined() else None


def distributed(
    network: nn.Module, forward: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """Return ``forward``; its backward pass averages the gradients of ``network``."""
    if size() == 1:
        return forward
    # Truncated and frozen parameters have no gradient, and others from epoch to epoch.
    return DistributedDataParallel(_Forward(network, forward), find_unused_parameters=True)


def from_rank_zero(make: Callable[[], T]) -> T:
    """Return in every process what ``make`` returns in rank 0, which alone calls it."""
    values: list[Any] = [make() if rank() == 0 else None]
    if size() > 1:
        dist.broadcast_object_list(values, 0)
    return values[0]


def rank_zero_first(make: Callable[[], T]) -> T:
    """Return what ``make`` returns in each process; the others call it when rank 0 has."""
    first = make() if rank() == 0 else None
    from_rank_zero(lambda: None)
    return make() if first is None else first


def gathered(value: T) -> list[T]:
    """Return the values of all processes, by rank."""
    values: list[Any] = [value] * size()
    if size() > 1:
        dist.all_gather_object(values, value)
    return values


def agree(signal_number: int | None, due: bool) -> tuple[int | None, bool]:
    """Return the signal that any process received, and whether it is due in any."""
    if size() == 1:
        return signal_number, due
    # On the CPU, by gloo: to read it from a GPU would wait for the GPU in every step.
    values = torch.tensor([signal_number or 0, due])
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return int(values[0]) or None, bool(values[1])


def combined(loss: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of the losses of all processes, and the sum of their correct answers."""
    if size() == 1:
        return loss, correct
    sums = torch.stack([loss.detach().double(), correct.double()])
    dist.all_reduce(sums)
    return sums[0] / size(), sums[1].to(correct.dtype)


class _Forward(nn.Module):
    """A network with the function that computes its training steps."""

    def __init__(self, network: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.network, self._compute = network, forward
        # DistributedDataParallel prints a warning while it finds no unused parameter.
        self.unused = nn.Parameter(torch.zeros((), device=next(network.parameters()).device))

    def forward(self, x: Tensor) -> Tensor:
        return self._compute(x)


@contextlib.contextmanager
def joined(device: str = "auto") -> Iterator[None]:
    """Connect the processes that ``torchrun`` started; without torchrun, do nothing.

    ``device`` is as for :func:`train`.
    """
    count = torchrun_ranks()[1]
    if count == 1:
        yield
        return
    cuda = device != "cpu" and torch.cuda.is_available() and dist.is_nccl_available()
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    except (RuntimeError, ValueError) as error:
        raise SoftstairError(
            f"the {count} processes that torchrun started cannot connect ({_reason(error)}): check "
            "torchrun's rendezvous options."
        ) from None
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise ConnectionLost(
            f"one of the run's {count} processes ended or hangs ({_reason(error)}): resume the run "
            "from its last checkpoint with `resume`."
        ) from None
    # After an error the others may wait in a collective operation on a GPU, and so would this
    # process: its end ends theirs.
    dist.destroy_process_group()


def torchrun_ranks() -> tuple[int, int, int]:
    """Return (rank, number of processes, rank on this machine) from torchrun's environment."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not {"RANK", "WORLD_SIZE"} <= set(os.environ):
        return 0, 1, 0
    try:
        rank, size, local_rank = (int(os.environ.get(name, "0")) for name in names)
    except ValueError as error:
        raise SoftstairError(
            "RANK, WORLD_SIZE and LOCAL_RANK must be integers, as torchrun sets them "
            f"({first_line(error)}): start with torchrun, or unset them."
        ) from None
    return rank, max(size, 1), local_rank


def _reason(error: Exception) -> str:
    # The first sentence, without the place in the source of gloo.
    text = re.sub(r"^\[\S+\] ", "", first_line(error, limit=1000))
    return text.partition(". ")[0][:200].rstrip(".")
