"""Data-parallel training: several processes, started by ``torchrun``, train one run.

Each process takes a part of every batch. :class:`torch.nn.parallel.DistributedDataParallel`
averages the gradients; running statistics and losses are averaged after each step. All processes
then have the same network to the last bit; only their random numbers differ.

The other modules ask a :class:`Team`. The team of a single process, :data:`SINGLE_PROCESS`, answers
without communication. :class:`StopRequest` notes the signals that ask a training to stop.
"""

import contextlib
import datetime
import functools
import hashlib
import os
import re
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from softstair._errors import SoftstairError, first_line

TIMEOUT = datetime.timedelta(minutes=15)
"""For a process that hangs or computes features; one that died is noticed at once."""

T = TypeVar("T")


class TeamError(SoftstairError):
    """The processes of a training cannot continue."""


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


class Team:
    """The processes that train a run; by default a team of one, which never communicates.

    This process has number ``rank`` of ``size``, and ``local_rank`` on its machine.
    """

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int | None = None) -> None:
        self.rank, self.size, self.local_rank = rank, size, local_rank

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process has the run directory and reports for all."""
        return self.rank == 0

    def part(self, batch: Tensor) -> Tensor:
        """Return this process's part of a batch."""
        return batch.chunk(self.size)[self.rank]

    def seed(self, seed: int) -> int:
        """Return the seed of this process: the run's for rank 0, another one for each other."""
        if self.is_rank_zero:
            return seed
        return int.from_bytes(hashlib.sha256(f"{seed} {self.rank}".encode()).digest()[:8]) >> 1

    def forward(
        self, network: nn.Module, forward: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor], Tensor]:
        """Return ``forward``; its backward pass averages the gradients of ``network``."""
        if self.size == 1:
            return forward
        with self.connected():
            # Truncated and frozen parameters have no gradient, and others from epoch to epoch.
            return DistributedDataParallel(
                _Forward(network, forward), broadcast_buffers=False, find_unused_parameters=True
            )

    def broadcast(self, make: Callable[[], T]) -> T:
        """Return what ``make`` returns in rank 0; if it raises there, all processes raise."""
        values: list[Any] = [None]
        with self.all_or_none():
            if self.is_rank_zero:
                values = [make()]
        if self.size > 1:
            with self.connected():
                dist.broadcast_object_list(values, 0)
        return values[0]

    def rank_zero_first(self, make: Callable[[], T]) -> T:
        """Call ``make`` in rank 0, then in the others, which find the files that it wrote."""
        values: list[T] = []
        for rank_zero in (True, False):
            with self.all_or_none():
                if self.is_rank_zero is rank_zero:
                    values.append(make())
        return values[0]

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, by rank."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            with self.connected():
                dist.all_gather_object(values, value)
        return values

    @contextlib.contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Raise in all processes if one raises ValueError or OSError inside; rank 0 says why."""
        failure: Exception | None = None
        try:
            yield
        except (ValueError, OSError) as error:
            if self.size == 1:
                raise
            failure = error
        if not self.agree(None, failure is not None)[1]:
            return
        messages = self.gather(None if failure is None else str(failure))
        if self.is_rank_zero and failure is not None:
            raise failure
        raise TeamError(next(filter(None, messages), "another process failed."))

    def agree(self, signal_number: int | None, due: bool) -> tuple[int | None, bool]:
        """Return the signal that any process received, and whether it is due in any."""
        if self.size == 1:
            return signal_number, due
        # On the CPU, by gloo: to read it from a GPU would wait for the GPU in every step.
        values = torch.tensor([signal_number or 0, due])
        with self.connected():
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return int(values[0]) or None, bool(values[1])

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Raise TeamError if communication inside fails because a process ended."""
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            raise TeamError(
                f"one of the run's {self.size} processes ended or hangs ({_reason(error)}): resume "
                "the run from its last checkpoint with `resume`."
            ) from None

    def add(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the processes."""
        if self.size > 1:
            with self.connected():
                dist.all_reduce(tensor)

    def average(self, tensors: Sequence[Tensor], count: Tensor) -> None:
        """Replace tensors by their means over the processes, and a count by its sum."""
        every = [*tensors, count]
        # float32 counts the examples of a batch exactly.
        dtype = functools.reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)
        flat = torch.cat([x.detach().reshape(-1).to(dtype) for x in every])
        self.add(flat)
        flat[:-1] /= self.size
        for x, values in zip(every, flat.split([x.numel() for x in every]), strict=True):
            x.detach().copy_(values.view(x.shape))


SINGLE_PROCESS = Team()


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
def joined(device: str = "auto") -> Iterator[Team]:
    """Connect the processes that ``torchrun`` started, and yield the team of this process.

    Without torchrun it is :data:`SINGLE_PROCESS`. ``device`` is as for :func:`train`.
    """
    rank, size, local_rank = torchrun_ranks()
    if size == 1:
        yield SINGLE_PROCESS
        return
    cuda = device != "cpu" and torch.cuda.is_available() and dist.is_nccl_available()
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise TeamError(
            f"the {size} processes that torchrun started cannot connect ({_reason(error)}): check "
            "torchrun's rendezvous options."
        ) from None
    try:
        with warnings.catch_warnings():
            # The new argument that torch recommends does not exist in torch 2.6.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
            yield Team(rank, size, local_rank)
    except BaseException as error:
        # After an error the others may wait in a collective operation on a GPU, and so would this
        # process: its end ends theirs.
        if not isinstance(error, Exception):
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def torchrun_ranks() -> tuple[int, int, int]:
    """Return (rank, number of processes, rank on this machine) from torchrun's environment."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not {"RANK", "WORLD_SIZE"} <= set(os.environ):
        return 0, 1, 0
    try:
        rank, size, local_rank = (int(os.environ.get(name, "0")) for name in names)
    except ValueError as error:
        raise TeamError(
            "RANK, WORLD_SIZE and LOCAL_RANK must be integers, as torchrun sets them "
            f"({first_line(error)}): start with torchrun, or unset them."
        ) from None
    return rank, max(size, 1), local_rank


def _reason(error: Exception) -> str:
    # The first sentence, without the place in the source of gloo.
    text = re.sub(r"^\[\S+\] ", "", first_line(error, limit=1000))
    return text.partition(". ")[0][:200].rstrip(".")
