"""A pool trains several runs in parallel; :class:`ProcessPool` in processes of this machine.

The result of a run does not depend on the number of runs: each has the seed, the directory and, on
a CPU, the threads that it would have alone.
"""

import contextlib
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch

from softstair.train.parallel import Interrupted, StopRequest
from softstair.train.progress import Event, error_message, train_with_events
from softstair.train.recipe import Recipe
from softstair.train.records import RunError

MAX_RUNS_PER_GPU = 5
"""Runs that share a GPU: each has a CUDA context and a copy of the data there."""
TIMEOUT = 10.0
"""Seconds for a process to save its run when the pool ends because of an error."""

START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from softstair.train.pool import main
main(int(sys.argv[2]), int(sys.argv[3]))
"""
"""A new interpreter, since CUDA and threads do not survive a fork. Unlike multiprocessing it does
not run the user's script again; with -P, files in the current directory do not hide modules."""


def worker_count(
    jobs: Literal["auto"] | int, device: str, runs: int, threads: int | None = None
) -> int:
    """Return how many runs to train in parallel.

    With ``jobs="auto"``: one per available core on a CPU (each uses ``threads`` cores); on a GPU
    up to ``MAX_RUNS_PER_GPU``, two cores each.
    """
    if jobs != "auto":
        return min(jobs, runs)
    if _is_gpu(device):
        return min(runs, MAX_RUNS_PER_GPU, max(1, cores() // 2))
    return max(1, min(runs, cores() // (threads or 1)))


def process_threads(device: str, workers: int, threads: int | None = None) -> int:
    """Return with how many threads of torch each of several processes starts.

    On a GPU: ``threads``, or an equal share of the available cores, since idle threads of OpenMP
    occupy a core for a while. On a CPU as many as torch has here; a run then chooses its own.
    """
    here = torch.get_num_threads()
    return threads or max(1, min(here, cores() // workers)) if _is_gpu(device) else here


def _is_gpu(device: str) -> bool:
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@dataclass(frozen=True, eq=False)
class Task:
    """A run to train. Its events are reported with ``key``, or else with ``name``."""

    name: str
    recipe: Recipe
    out: Path
    key: Any = None


class Pool(ABC):
    """Trains tasks in parallel, and calls ``on_event`` with the key of a task and an event.

    The first task trains alone until its first step: what fails before that, such as absent data,
    would fail for the others too, and ends the pool; and features of recordings are computed once.
    A task that fails later is reported, and the others continue; no more are started once two have
    failed for the same reason before their first step.
    """

    def __init__(self, tasks: Iterable[Task], on_event: Callable[[Any, Event], None]) -> None:
        self.failed = 0
        self.running: set[Task] = set()
        self.threads: int | None = None
        self._stop_request, self._deadline = StopRequest(), math.inf
        self._waiting, self._open = iter(tasks), True
        self._on_event = on_event
        self._started: set[Task] = set()
        self._begun: set[Task] = set()
        self._reasons: set[str] = set()

    @abstractmethod
    def capacity(self) -> int:
        """Return how many tasks to train now; :attr:`threads` is known after the first step."""

    @abstractmethod
    def start(self, task: Task) -> None:
        """Let a task train."""

    @abstractmethod
    def poll(self, timeout: float) -> None:
        """Wait for events, and call :meth:`handle` or :meth:`fail`."""

    @abstractmethod
    def stop(self) -> None:
        """Let all running tasks save a checkpoint and end."""

    def run(self, stop: StopRequest, deadline: float = math.inf) -> int:
        """Train all tasks; return how many failed. Raises RunError if none can begin.

        After a signal, it raises Interrupted once all running tasks have saved their runs. At the
        ``deadline``, a time of :func:`time.monotonic`, they save their runs too, and it returns.
        """
        self._stop_request, self._deadline, stopped = stop, deadline, False
        while self._start_waiting():
            if self.stopping and not stopped:
                self._open, stopped = False, True
                self.stop()
            self.poll(timeout=0.1)
        if stop.number is not None:
            raise Interrupted(stop.number)
        return self.failed

    def _start_waiting(self) -> bool:
        """Start tasks while there is room; return whether any is running."""
        limit = self.capacity() if self.threads is not None else 1
        while self._open and len(self.running) < limit:
            if (task := next(self._waiting, None)) is None:
                self._open = False
                break
            self.running.add(task)
            self.start(task)
        return bool(self.running)

    @property
    def stopping(self) -> bool:
        """Whether a signal came, or the deadline."""
        return self._stop_request.number is not None or time.monotonic() >= self._deadline

    def handle(self, task: Task, event: Event) -> None:
        """Report an event of a task; ``start`` is reported once, and before all others."""
        kind = event["kind"]
        if event.get("threads") is not None:  # it has reached its first step
            self._begun.add(task)
            self.threads = self.threads or event["threads"]
        if kind in ("done", "stopped"):
            self.running.discard(task)
        if kind == "failed":
            self.fail(task, event["why"])
        elif kind != "stopped" or task in self._started:
            self._report(task, event)

    def _report(self, task: Task, event: Event) -> None:
        key = task.name if task.key is None else task.key
        if task not in self._started:
            self._started.add(task)
            self._on_event(key, {"kind": "start"})
        if event["kind"] != "start":
            self._on_event(key, event)

    def fail(self, task: Task, why: str, lost: bool = False) -> None:
        """Report a task that failed, or, if it is ``lost``, whose process ended; if none has begun
        to train, raise RunError."""
        self.running.discard(task)
        if self.threads is None:
            raise RunError(f"{task.name}: {why}" if lost else why)
        reason = why.replace(str(task.out), "")  # a full disk gives the same reason for each
        if reason in self._reasons and not lost and task not in self._begun:
            self._open = False
        self._reasons.add(reason)
        self.failed += 1
        self._report(task, {"kind": "failed", "why": why})


class ProcessPool(Pool):
    """Trains tasks in processes of this machine. Use it as a context manager.

    ``count`` returns how many tasks to train now, given the threads of a run, or None while they
    are unknown. ``settings`` are other arguments of :func:`softstair.train.fit`. Up to ``most``
    tasks train at a time, and on a GPU they share the CPU cores.
    ``again`` says how to continue a run whose process ended.
    """

    def __init__(
        self,
        tasks: Iterable[Task],
        on_event: Callable[[Any, Event], None],
        count: Callable[[int | None], int],
        settings: dict[str, Any],
        most: int,
        again: str = "run the same command again",
    ) -> None:
        super().__init__(tasks, on_event)
        self._count, self._settings, self._again = count, settings, again
        device = str(settings.get("device", "auto"))
        self._process_threads = process_threads(device, most, settings.get("threads"))
        self._processes: dict[Connection, tuple[Task, Process]] = {}

    def __enter__(self) -> "ProcessPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        deadline = time.monotonic() + TIMEOUT
        for connection, (_task, process) in self._processes.items():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            connection.close()

    def capacity(self) -> int:
        return self._count(self.threads)

    def start(self, task: Task) -> None:
        run = {"recipe": task.recipe, "out": task.out, **self._settings}
        connection, process = start_process(run, self._process_threads)
        self._processes[connection] = task, process
        self.handle(task, {"kind": "start"})

    def stop(self) -> None:
        for _, process in self._processes.values():
            process.terminate()

    def poll(self, timeout: float) -> None:
        for connection in wait(list(self._processes), timeout):
            assert isinstance(connection, Connection)
            task, process = self._processes[connection]
            try:
                event = connection.recv()
            except (EOFError, OSError):
                del self._processes[connection]
                connection.close()
                self._end(task, process.wait())
            else:
                self.handle(task, event)

    def _end(self, task: Task, code: int) -> None:
        """Report a task whose process has ended, unless it has said why."""
        if task not in self.running:
            return
        if not self.stopping:
            time.sleep(0.5)  # a scheduler signals every process of a job, perhaps this one last
        if self.stopping:
            self.handle(task, {"kind": "stopped"})
        else:
            self.fail(task, _cause_of_end(code, self._again), lost=True)


def _cause_of_end(code: int, again: str) -> str:
    """Return why a process ended that was not told to."""
    cause, memory = f"ended with code {code}", ""
    if code < 0:
        cause = f"was killed by {signal.Signals(-code).name}"
    if code == -signal.SIGKILL:  # which the system sends when memory runs out
        memory = ", with fewer `jobs` if memory is short"
    return f"its process {cause}: {again} to resume from its last checkpoint{memory}."


Process = subprocess.Popen[bytes]


def start_process(run: dict[str, Any], threads: int) -> tuple[Connection, Process]:
    """Start a process that trains a run; its events come from the connection that is returned."""
    here, there = multiprocessing.Pipe()
    arguments = [json.dumps(sys.path), str(there.fileno()), str(threads)]
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", START, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=2,  # what a user's model prints goes to stderr
        pass_fds=[there.fileno()],
        # Ctrl-C reaches all processes of a session; here the parent passes it on, once.
        start_new_session=True,
    )
    there.close()
    here.send(run)
    return here, process


def main(file: int, threads: int) -> None:
    """Train the run that comes from a connection, which is an open file, with so many threads."""
    connection = Connection(file)

    def send(event: Event) -> None:
        with contextlib.suppress(OSError):  # the parent has ended, and this run is being stopped
            connection.send(event)

    try:
        # Until a training handles signals itself, SIGTERM unwinds the stack as Ctrl-C does.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        torch.set_num_threads(threads)
        run = connection.recv()
        threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
        train_with_events(send, **run)
        send({"kind": "done"})
    except (Interrupted, KeyboardInterrupt):
        pass  # the end of this process says it
    except Exception as error:
        if os.environ.get("SOFTSTAIR_TRACEBACK"):
            traceback.print_exception(error)
        send({"kind": "failed", "why": error_message(error)})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # there is nothing left to save


def _end_with_parent(connection: Connection) -> None:
    """Stop this process, as a signal does, when the parent has ended or was killed."""
    with contextlib.suppress(EOFError, OSError):
        connection.recv()
    os.kill(os.getpid(), signal.SIGTERM)
