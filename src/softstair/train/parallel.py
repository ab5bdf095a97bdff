"""Data-parallel training: several processes, started by ``torchrun``, train one run.

Each process takes a part of every batch. :class:`torch.nn.parallel.DistributedDataParallel`
averages the gradients; running statistics and losses are averaged after each step. All processes
then have the same network to the last bit; only their random numbers differ.

The other modules ask a :class:`Team`. The team of a single process, :data:`SINGLE_PROCESS`, answers
without communication.
"""

import contextlib
import datetime
import functools
import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from softstair._errors import SoftstairError, first_line
from softstair.train.interrupt import StopRequest

__all__ = [
    "SINGLE_PROCESS",
    "NotRankZero",
    "Team",
    "TeamError",
    "joined",
    "launch_command",
    "rank_zero_output",
    "torchrun_ranks",
]

TIMEOUT = datetime.timedelta(minutes=15)
"""For a process that hangs, or computes the features of recordings. One that died is noticed at
once, since its connections are closed."""

T = TypeVar("T")


class TeamError(SoftstairError):
    """The processes of a training cannot continue."""


class NotRankZero(TeamError):
    """The same error in another process than rank 0, which reports it."""


class Team:
    """The processes that train a run; this class is a team of one.

    Attributes:
        rank: Number of this process, from 0.
        size: Number of processes.
        local_rank: Number of this process on its machine; None for a single process.
    """

    rank, size = 0, 1
    local_rank: int | None = None

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process has the run directory and reports for all."""
        return self.rank == 0

    def part(self, batch: Tensor) -> Tensor:
        """Return this process's part of a batch.

        >>> Team().part(torch.arange(3)).tolist()
        [0, 1, 2]
        """
        return batch

    def seed(self, seed: int) -> int:
        """Return the seed of this process: the run's for rank 0, another one for each other."""
        if self.is_rank_zero:
            return seed
        return int.from_bytes(hashlib.sha256(f"{seed} {self.rank}".encode()).digest()[:8]) >> 1

    def forward(
        self, network: nn.Module, forward: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor], Tensor]:
        """Return ``forward``, whose backward pass averages the gradients of ``network``."""
        return forward

    def broadcast(self, make: Callable[[], T]) -> T:
        """Return what ``make`` returns in rank 0; if it raises there, all processes raise."""
        return make()

    def rank_zero_first(self, make: Callable[[], T]) -> T:
        """Call ``make`` in rank 0, then in the others, which find the files that it wrote."""
        return make()

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, by rank."""
        return [value]

    @contextlib.contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Raise in all processes if one raises ValueError or OSError inside; rank 0 says why."""
        yield

    def agree(self, signal_number: int | None, due: bool) -> tuple[int | None, bool]:
        """Return the signal that any process received, and whether any says that it is due."""
        return signal_number, due

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Raise TeamError if communication inside fails because a process ended."""
        yield

    def add(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the processes."""

    def average(self, tensors: Sequence[Tensor], count: Tensor) -> None:
        """Replace tensors by their means over the processes, and a count by its sum."""

    def stop_request(self) -> StopRequest:
        """Return the context that notes signals."""
        return StopRequest()


SINGLE_PROCESS = Team()


class DistributedTeam(Team):
    """Several processes that are connected."""

    def __init__(self, rank: int, size: int, local_rank: int) -> None:
        self.rank, self.size, self.local_rank = rank, size, local_rank

    def part(self, batch: Tensor) -> Tensor:
        return batch.chunk(self.size)[self.rank]

    def forward(
        self, network: nn.Module, forward: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor], Tensor]:
        with self.connected():
            # Truncated and frozen parameters have no gradient, and others from epoch to epoch.
            return DistributedDataParallel(
                _Forward(network, forward), broadcast_buffers=False, find_unused_parameters=True
            )

    def broadcast(self, make: Callable[[], T]) -> T:
        values: list[Any] = [None]
        with self.all_or_none():
            if self.is_rank_zero:
                values = [make()]
        with self.connected():
            dist.broadcast_object_list(values, 0)
        return values[0]

    def rank_zero_first(self, make: Callable[[], T]) -> T:
        values: list[T] = []
        for rank_zero in (True, False):
            with self.all_or_none():
                if self.is_rank_zero is rank_zero:
                    values.append(make())
        return values[0]

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        with self.connected():
            dist.all_gather_object(values, value)
        return values

    @contextlib.contextmanager
    def all_or_none(self) -> Iterator[None]:
        failure: Exception | None = None
        try:
            yield
        except (ValueError, OSError) as error:
            failure = error
        if not self.agree(None, failure is not None)[1]:
            return
        messages = self.gather(None if failure is None else str(failure))
        if self.is_rank_zero and failure is not None:
            raise failure
        raise self._error(next(filter(None, messages), "another process failed."))

    def agree(self, signal_number: int | None, due: bool) -> tuple[int | None, bool]:
        # On the CPU, by gloo: to read it from a GPU would wait for the GPU in every step.
        values = torch.tensor([signal_number or 0, due])
        with self.connected():
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return int(values[0]) or None, bool(values[1])

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            raise self._error(
                f"one of the run's {self.size} processes ended or hangs ({_reason(error)}): resume "
                "the run from its last checkpoint with `resume`."
            ) from None

    def add(self, tensor: Tensor) -> None:
        with self.connected():
            dist.all_reduce(tensor)

    def average(self, tensors: Sequence[Tensor], count: Tensor) -> None:
        every = [*tensors, count]
        # float32 counts the examples of a batch exactly.
        dtype = functools.reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)
        flat = torch.cat([x.detach().reshape(-1).to(dtype) for x in every])
        self.add(flat)
        flat[:-1] /= self.size
        for x, values in zip(every, flat.split([x.numel() for x in every]), strict=True):
            x.detach().copy_(values.view(x.shape))

    def stop_request(self) -> StopRequest:
        return _RepeatedStopRequest()

    def _error(self, message: str) -> TeamError:
        return (TeamError if self.is_rank_zero else NotRankZero)(message)


class _Forward(nn.Module):
    """A network with the function that computes its training steps."""

    def __init__(self, network: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.network, self._compute = network, forward
        # DistributedDataParallel prints a warning while it finds no unused parameter.
        self.unused = nn.Parameter(torch.zeros((), device=next(network.parameters()).device))

    def forward(self, x: Tensor) -> Tensor:
        return self._compute(x)


class _RepeatedStopRequest(StopRequest):
    """Ignores a second signal: a scheduler and torchrun both send it to every process."""

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number


@contextlib.contextmanager
def joined(device: str = "auto") -> Iterator[Team]:
    """Connect the processes that ``torchrun`` started.

    Args:
        device: As for :func:`softstair.train.train`.

    Yields:
        The team of this process; :data:`SINGLE_PROCESS` without torchrun or with one process.

    >>> with joined() as team:
    ...     team.size
    1
    """
    rank, size, local_rank = torchrun_ranks()
    if size == 1:
        yield SINGLE_PROCESS
        return
    cuda = device != "cpu" and torch.cuda.is_available() and dist.is_nccl_available()
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        kind = NotRankZero if rank else TeamError
        raise kind(
            f"the {size} processes that torchrun started cannot connect ({_reason(error)}): check "
            "torchrun's rendezvous options."
        ) from None
    try:
        with warnings.catch_warnings():
            # The new argument that torch recommends does not exist in torch 2.6.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
            yield DistributedTeam(rank, size, local_rank)
    except BaseException as error:
        # After an error the others may wait in a collective operation on a GPU, and so would this
        # process: its end ends theirs.
        if not isinstance(error, Exception):
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def torchrun_ranks() -> tuple[int, int, int]:
    """Return (rank, number of processes, rank on this machine) from torchrun's environment.

    Raises:
        TeamError: If the environment variables are not integers.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not {"RANK", "WORLD_SIZE"} <= set(os.environ):
        return 0, 1, 0
    values = [os.environ.get(name, "0") for name in names]
    if not all(value.isascii() and value.isdigit() for value in values):
        given = ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        raise TeamError(
            "RANK, WORLD_SIZE and LOCAL_RANK must be integers, as torchrun sets them, but the "
            f"environment has {given[:200]}: start with torchrun, or unset them."
        )
    rank, size, local_rank = map(int, values)
    return rank, max(size, 1), local_rank


def launch_command() -> list[str]:
    """Return the words before ``softstair`` that start as many processes as there are now."""
    _, size, _ = torchrun_ranks()
    if size == 1:
        return []
    nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
    per_node = os.environ.get("LOCAL_WORLD_SIZE", str(size))
    several = [] if nodes == "1" else ["--nnodes", nodes]
    return ["torchrun", *several, "--nproc-per-node", per_node, "-m"]


@contextlib.contextmanager
def rank_zero_output() -> Iterator[None]:
    """Discard output inside, and the message of an error, in all processes but rank 0."""
    if not torchrun_ranks()[0]:
        yield
        return
    with open(os.devnull, "w") as null, contextlib.ExitStack() as silent:
        silent.enter_context(contextlib.redirect_stdout(null))
        silent.enter_context(contextlib.redirect_stderr(null))
        try:
            yield
        except (ValueError, OSError):
            raise SystemExit(2) from None


def _reason(error: Exception) -> str:
    """Return the first sentence of a torch error, without the place in the source of gloo."""
    text = re.sub(r"^\[\S+\] ", "", first_line(error, limit=1000))
    return text.partition(". ")[0][:200].rstrip(".")
