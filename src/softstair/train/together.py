"""Several runs at a time, each in a process of its own: what one leaves idle, another uses.

A GPU is idle while a run loads its data, captures its steps, evaluates or writes a checkpoint; on a
CPU small networks train fastest on one thread. What comes of a run does not depend on how many
train beside it: it has the threads, the seed and the directory that it would have alone.
"""

import contextlib
import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch

from softstair.train.interrupt import Interrupted, StopRequest
from softstair.train.news import News
from softstair.train.recipe import Recipe
from softstair.train.run import RunError
from softstair.train.worker import Worker

__all__ = ["MOST_ON_A_GPU", "at_once", "cores", "train_together"]

MOST_ON_A_GPU = 5
"""Runs that share one: each has a context and a copy of the data there."""
PATIENCE = 10.0
"""Seconds that a process has to keep its run when this one cannot wait for it."""


def at_once(together: Literal["auto"] | int, device: str, runs: int, threads: int = 1) -> int:
    """How many of so many runs train at a time, if each has so many threads.

    auto: on a CPU as many as there are cores for; on a GPU up to five, with two cores for each.

    >>> at_once(4, "cpu", runs=3), at_once("auto", "cpu", runs=5, threads=10**6)
    (3, 1)
    """
    if together != "auto":
        return min(together, runs)
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        return min(runs, MOST_ON_A_GPU, max(1, cores() // 2))
    return max(1, min(runs, cores() // threads))


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def train_together(
    runs: Iterable[tuple[Recipe, Path]],
    number: int | Callable[[], int],
    tell: Callable[[Any, News], None],
    limit: Callable[[int], int] | None = None,
    name: Callable[[Recipe, Path], Any] = lambda recipe, path: f"fold {recipe.fold}",
    again: str = "go on with --resume",
    alike: bool = True,
    **settings: Any,
) -> int:
    """Trains runs, recipes with their directories, so many at a time; returns how many failed.

    ``number`` may be a function, which is asked again and again: more are begun, or fewer after the
    next is done, as it says. ``tell(name, news)`` hears what each run has to say, see
    :mod:`softstair.train.news`; ``name`` says what a run is called there, its fold unless told
    otherwise, and ``again`` how to go on with one that was lost.

    The first goes ahead of the others: what refuses it before it begins would refuse them all, and
    is raised (if they are not ``alike``, the first that is refused for the same reason as one
    before it); data that must be computed are computed once; and ``limit(threads)`` may lower the
    number once it is known how many threads a run has. A run that fails later, or whose process is
    killed, is told of, and the others go on to their end. SIGINT and SIGTERM are passed on to the
    processes, and raise :class:`Interrupted <softstair.train.Interrupted>` once each has kept its
    run.

    ``settings`` are what else :func:`softstair.train.train` is given: data_dir, device, resume and
    threads; and tensorboard, whether to write events.
    """
    first = number if isinstance(number, int) else number()
    limit = limit or (lambda _: first)
    with StopRequest() as stop, Crew(runs, first, tell, limit, name, again, alike) as crew:
        told = False
        while crew.hand_out(settings):
            if not isinstance(number, int):
                crew.number = number()
            if stop.number is not None and not told:
                crew.stop()
                told = True
            with contextlib.suppress(queue.Empty):
                crew.hear(*crew.said.get(timeout=0.1), stop)
    if stop.number is not None:
        raise Interrupted(stop.number)
    return crew.failed


class Crew:
    """Processes that train, and the runs that wait for them."""

    def __init__(
        self,
        runs: Iterable[tuple[Recipe, Path]],
        number: int,
        tell: Callable[[Any, News], None],
        limit: Callable[[int], int],
        name: Callable[[Recipe, Path], Any],
        again: str,
        alike: bool,
    ) -> None:
        self.said: queue.SimpleQueue[tuple[Worker, News | None]] = queue.SimpleQueue()
        self.failed = 0
        self._waiting, self._tell, self._limit = iter(runs), tell, limit
        self._name, self._again, self._alike = name, again, alike
        self._refusals: set[str] = set()
        self.number = number
        self._open, self._begun = True, False
        self._workers: list[Worker] = []

    def __enter__(self) -> "Crew":
        # All at once: they import what they need while the first one goes ahead.
        self._workers += [Worker(self.said) for _ in range(self.number)]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.dismiss()
            if worker.run is not None:
                worker.process.terminate()
        deadline = time.monotonic() + PATIENCE
        for worker in self._workers:
            # One that trains nothing has kept everything: torch would take a second to say goodbye.
            left = deadline - time.monotonic()
            worker.end(0.0 if worker.run is None else max(0.0, left))

    def hand_out(self, settings: dict[str, Any]) -> bool:
        """Gives runs to processes that are free; whether there is still something to wait for."""
        busy = [worker for worker in self._workers if worker.run is not None]
        most = self.number if self._begun else 1
        while self._open and len(busy) < most:
            if (run := next(self._waiting, None)) is None:
                self._open = False
                break
            worker = next((one for one in self._workers if one.is_free), None)
            if worker is None:
                self._workers.append(worker := Worker(self.said))
            name = self._name(*run)
            worker.give(name, *run, settings)
            busy.append(worker)
            self._tell(name, {"said": "start"})
        spare = [worker for worker in self._workers if worker.is_free]
        wanted = max(0, self.number - len(busy)) if self._open else 0
        for worker in spare[wanted:]:
            worker.dismiss()
        return bool(busy)

    def hear(self, worker: Worker, heard: News | None, stop: StopRequest) -> None:
        """What a process says; None is its end."""
        if heard is None:
            self._workers.remove(worker)
            worker.end(PATIENCE)
        if (name := worker.run) is None:
            return
        news: News = {"said": "stopped"} if heard is None else heard
        said = news["said"]
        if said == "begin":
            worker.has_begun = True
            if not self._begun:
                self._begun, self.number = True, self._limit(news["threads"])
        if said in ("done", "stopped", "failed"):
            worker.run, worker.is_free = None, said == "done"
        if said == "stopped":
            # A scheduler strikes every process of a job, and perhaps this one last.
            if stop.number is None:
                time.sleep(0.5)
            if stop.number is None:
                why = _loss(worker.process.poll(), self._again)
                self._fail(worker, name, why, f"{name}: ")
        elif said == "failed":
            self._fail(worker, name, news["why"])
        else:
            self._tell(name, news)

    def stop(self) -> None:
        """Each keeps its run, and ends."""
        self._open = False
        for worker in self._workers:
            if worker.run is not None:
                worker.process.terminate()

    def _fail(self, worker: Worker, name: Any, why: str, before: str = "") -> None:
        reason = why.replace(str(name), "")  # a full disk says the same of each
        if not self._begun and (self._alike or reason in self._refusals):
            raise RunError(before + why)
        self._refusals.add(reason)
        if self._alike and not worker.has_begun:
            self._open = False  # what refuses a run before it begins is seldom its own affair
        self.failed += 1
        self._tell(name, {"said": "failed", "why": why})


def _loss(code: int | None, again: str) -> str:
    """Why a process that nobody here asked to end did so; its exit code is None if it says why."""
    whole = f"its last checkpoint, if there is one, is whole: {again}"
    if not code:
        return f"its process was told to stop, and {whole}."
    if code == -9:
        return (
            "its process was killed by SIGKILL, as happens where memory runs out, "
            f"and {whole}, and with a lower --together if memory is short."
        )
    names = {one.value: one.name for one in signal.Signals}
    what = f"was killed by {names.get(-code, -code)}" if code < 0 else f"ended with code {code}"
    return f"its process {what}, and {whole}."
