"""One training in several processes, as ``torchrun`` starts them: each takes its part of a batch.

All that knows :mod:`torch.distributed` lies here. The loop and its neighbours ask a :class:`Team`;
that of one process, :data:`ALONE`, has nothing to ask anybody, and answers at once.

After every step the processes hold the same network to the last bit: gradients, and what the
forward pass changes, are averaged together; only the sources of random numbers differ.
"""

import contextlib
import datetime
import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from softstair.train.interrupt import StopRequest

__all__ = ["ALONE", "Elsewhere", "Team", "TeamError", "joined", "launcher", "one_voice", "place"]

PATIENCE = datetime.timedelta(minutes=15)
"""For a process that is stuck, or computes the features of recordings; one that died is noticed at
once, since its connections are closed."""

T = TypeVar("T")


class TeamError(ValueError):
    """Why the processes of a training cannot go on, in one sentence."""


class Elsewhere(TeamError):
    """The same, in a process that is not the first: that one says it."""


class Team:
    """The processes of a training; this one is the only one.

    ``rank`` counts them from 0, of ``size``; ``local`` counts those of this machine, and is None
    where there is but one process.
    """

    rank, size = 0, 1
    local: int | None = None

    @property
    def is_first(self) -> bool:
        """Whether this process holds the run directory and speaks for all."""
        return self.rank == 0

    def part(self, batch: Tensor) -> Tensor:
        """This process's part of a batch.

        >>> Team().part(torch.arange(3)).tolist()
        [0, 1, 2]
        """
        return batch

    def seed(self, seed: int) -> int:
        """The seed of this process's own draws: the first has the run's, the others one each."""
        if self.is_first:
            return seed
        return int.from_bytes(hashlib.sha256(f"{seed} {self.rank}".encode()).digest()[:8]) >> 1

    def share(self, make: Callable[[], T]) -> T:
        """What the first process makes, for all; where it refuses, all do."""
        return make()

    def in_turn(self, make: Callable[[], T]) -> T:
        """What each makes, the first before the others: they find what it leaves on the disk."""
        return make()

    def gather(self, value: T) -> list[T]:
        """What each of them gives, in order."""
        return [value]

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """What one of them refuses within, all refuse, and the first says why."""
        yield

    def agree(self, number: int | None, due: bool) -> tuple[int | None, bool]:
        """Whether any of them was asked to stop, by which signal, and whether any finds it due."""
        return number, due

    def add(self, tensor: Tensor) -> None:
        """Puts the sum of all in its place."""

    def average(self, tensors: Sequence[Tensor], count: Tensor) -> None:
        """Puts the means of all in their place, and the sum of all for the count."""

    def stop_request(self) -> StopRequest:
        """What notes that this process was asked to stop."""
        return StopRequest()


ALONE = Team()


class Several(Team):
    """Several processes, once they have found one another."""

    def __init__(self, rank: int, size: int, local: int) -> None:
        self.rank, self.size, self.local = rank, size, local

    def part(self, batch: Tensor) -> Tensor:
        return batch.chunk(self.size)[self.rank]

    def share(self, make: Callable[[], T]) -> T:
        made: list[Any] = [None]
        with self.agreed():
            if self.is_first:
                made = [make()]
        self._together(dist.broadcast_object_list, made, 0)
        return made[0]

    def in_turn(self, make: Callable[[], T]) -> T:
        made: list[T] = []
        for first in (True, False):
            with self.agreed():
                if self.is_first is first:
                    made.append(make())
        return made[0]

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        self._together(dist.all_gather_object, values, value)
        return values

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        refusal: Exception | None = None
        try:
            yield
        except (ValueError, OSError) as error:
            refusal = error
        if not self.agree(None, refusal is not None)[1]:
            return
        sentences = self.gather(None if refusal is None else str(refusal))
        if self.is_first and refusal is not None:
            raise refusal
        raise self._error(next(filter(None, sentences), "it was refused."))

    def agree(self, number: int | None, due: bool) -> tuple[int | None, bool]:
        # On the host, by gloo: to read it among the gradients would be to wait for a GPU.
        said = torch.tensor([number or 0, due])
        self._together(dist.all_reduce, said, dist.ReduceOp.MAX)
        return int(said[0]) or None, bool(said[1])

    def add(self, tensor: Tensor) -> None:
        self._together(dist.all_reduce, tensor)

    def average(self, tensors: Sequence[Tensor], count: Tensor) -> None:
        every = [*tensors, count]
        # A batch has too few examples for float32 to miscount them.
        kind = functools.reduce(torch.promote_types, (one.dtype for one in tensors), torch.float32)
        flat = torch.cat([one.detach().reshape(-1).to(kind) for one in every])
        self.add(flat)
        flat[:-1] /= self.size
        for one, part in zip(every, flat.split([one.numel() for one in every]), strict=True):
            one.detach().copy_(part.view(one.shape))

    def stop_request(self) -> StopRequest:
        return _Patient()

    def _together(self, what: Callable[..., Any], *given: Any) -> None:
        try:
            what(*given)
        except RuntimeError as error:
            raise self._error(
                f"one of the run's {self.size} processes is gone or stuck ({_reason(error)}): the "
                "last checkpoint, if there is one, is whole: go on with --resume."
            ) from None

    def _error(self, sentence: str) -> TeamError:
        return (TeamError if self.is_first else Elsewhere)(sentence)


def _reason(error: Exception) -> str:
    """The first sentence of what torch says, without the place in its source that gloo names."""
    text = re.sub(r"^\[\S+\] ", "", " ".join(str(error).split()))
    return text.partition(". ")[0][:200].rstrip(".")


class _Patient(StopRequest):
    """A scheduler strikes every process of a job, and torchrun passes on what it was struck with:
    the second signal says nothing that the first did not."""

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number


@contextlib.contextmanager
def joined(device: str = "auto") -> Iterator[Team]:
    """The team that ``torchrun`` started this process for; :data:`ALONE` if nobody did, or if there
    is but one. ``device`` is as a training is given it.

    >>> with joined() as team:
    ...     team.size
    1
    """
    rank, size, local = place()
    if size == 1:
        yield ALONE
        return
    cuda = device != "cpu" and torch.cuda.is_available() and dist.is_nccl_available()
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        kind = Elsewhere if rank else TeamError
        raise kind(
            f"the {size} processes that torchrun started do not find one another "
            f"({_reason(error)}): look at its rendezvous flags."
        ) from None
    try:
        yield Several(rank, size, local)
    except BaseException as error:
        # After a mistake the others may be in the midst of a sum, which a GPU would wait for: then
        # the end of this process is what ends them.
        if not isinstance(error, Exception):
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def place() -> tuple[int, int, int]:
    """This process's rank, how many there are, and its rank on its machine, as torchrun says."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not {"RANK", "WORLD_SIZE"} <= set(os.environ):
        return 0, 1, 0
    words = [os.environ.get(name, "0") for name in names]
    if not all(word.isascii() and word.isdigit() for word in words):
        given = ", ".join(f"{name}={word}" for name, word in zip(names, words, strict=True))
        raise TeamError(
            f"RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers, as torchrun sets them, but "
            f"the environment has {given[:200]}: start with torchrun, or unset them."
        )
    rank, size, local = map(int, words)
    return rank, max(size, 1), local


def launcher() -> list[str]:
    """The words before ``softstair`` in a command that starts as many processes as there are."""
    _, size, _ = place()
    if size == 1:
        return []
    nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
    each = os.environ.get("LOCAL_WORLD_SIZE", str(size))
    several = [] if nodes == "1" else ["--nnodes", nodes]
    return ["torchrun", *several, "--nproc-per-node", each, "-m"]


@contextlib.contextmanager
def one_voice() -> Iterator[None]:
    """What every process says alike within, or refuses, the first alone says."""
    if not place()[0]:
        yield
        return
    with open(os.devnull, "w") as nothing, contextlib.ExitStack() as silent:
        silent.enter_context(contextlib.redirect_stdout(nothing))
        silent.enter_context(contextlib.redirect_stderr(nothing))
        try:
            yield
        except (ValueError, OSError):
            raise SystemExit(2) from None
