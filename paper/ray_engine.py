"""The engine of a cluster: each unit is a task of Ray, on one machine or on any number of them.

Every machine trains in the same folder, on a file system that all of them share. A unit whose
process or machine is lost resumes elsewhere from its last checkpoint. It has the threads and the
seed that it would have alone: on CPUs of one kind its results are the same to the last bit.
"""

import contextlib
import logging
import os
import platform
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

import softstair
from paper._ray_cluster import joined, token_in
from paper.design import Unit
from paper.grid import OnEvent, refuse_mixed_data, unfinished
from softstair import _check
from softstair._errors import SoftstairError
from softstair.train.parallel import StopRequest
from softstair.train.pool import MAX_RUNS_PER_GPU, Pool, Task, cores
from softstair.train.progress import Event

RETRIES = 3
"""How often a unit is started again whose process, or machine, was lost."""
SAVE_TIMEOUT = 10.0
"""Seconds for tasks to save their runs when this process ends because of an error."""
LOCK_TIMEOUT = 60.0
"""Seconds to wait for a run directory: the process that held it may have just been killed."""
PAUSE = 1.0
"""Seconds between two step events of a unit: there may be hundreds of units."""
Jobs = Literal["auto"] | int
Machine = dict[str, float]
"""The resources of a machine: CPU, GPU."""


def run(
    units: Iterable[Unit],
    folder: Path,
    on_event: OnEvent,
    *,
    address: str | None = None,
    data_dir: str = "data",
    device: str = "auto",
    threads: int | None = None,
    jobs: Jobs = "auto",
) -> int:
    """Train the units that are not done, each as a task of Ray; return how many failed.

    Without an ``address`` a cluster is started on this machine, and ended. ``jobs`` is the number
    of units that share a GPU; without a GPU, that train at a time. A unit whose process is lost is
    started again up to RETRIES times.
    """
    left = list(unfinished(units, folder))
    if not left:
        return 0
    refuse_mixed_data(left, folder, data_dir)
    here = cores() if jobs == "auto" else max(cores(), jobs)
    choose = partial(choose_resources, threads=threads, jobs=jobs)
    with StopRequest() as stop, joined(address, here) as ray, token_in(folder) as token:
        device = choose(_machines(ray), device).device
        data_dir = os.path.abspath(data_dir)
        surroundings = {
            "settings": {"data_dir": data_dir, "threads": threads, "device": device},
            "token": token,
            "threads": torch.get_num_threads(),
            "versions": {"softstair": softstair.__version__, "torch": str(torch.__version__)},
            "path": [os.path.abspath(path) for path in sys.path],
            "folder": os.getcwd(),
            "environment": {n: v for n, v in os.environ.items() if n.startswith("SOFTSTAIR_")},
        }
        choose = partial(choose, device=device)
        with RayPool(ray, left, folder.absolute(), on_event, choose, surroundings) as pool:
            return pool.run(stop)


@dataclass(frozen=True)
class TaskResources:
    """Where a task trains, its CPUs and its share of a GPU, and so how many run at a time."""

    device: str
    cpus: int
    gpus: float
    jobs: Jobs

    def at_once(self, machines: Sequence[Machine]) -> int:
        """Return how many tasks to submit: as many wait as train, so that no machine is idle."""
        if self.device == "cpu" and self.jobs != "auto":
            return self.jobs
        return max(1, 2 * self.capacity(machines))

    def capacity(self, machines: Sequence[Machine]) -> int:
        """Return how many tasks the machines can train at a time."""
        number = 0
        for machine in machines:
            places = machine.get("CPU", 0.0) / self.cpus
            if self.gpus:
                places = min(places, machine.get("GPU", 0.0) * int(1 / self.gpus))
            number += int(places)
        return number


def choose_resources(
    machines: Sequence[Machine],
    device: str = "auto",
    threads: int | None = None,
    jobs: Jobs = "auto",
    measured_threads: int | None = None,
) -> TaskResources:
    """Return the resources of a task, chosen to suit the machines.

    A task has as many CPUs as threads, once ``measured_threads`` of the first unit are known.

    >>> machines = [{"CPU": 16.0, "GPU": 2.0}, {"CPU": 64.0}]
    >>> resources = choose_resources(machines)
    >>> resources.device, resources.cpus, resources.gpus, resources.at_once(machines)
    ('cuda', 1, 0.25, 16)
    """
    # Ray decides which GPU a unit is given.
    _check.choice("device", device, ("auto", "cpu", "cuda"))
    if jobs != "auto":
        _check.integer("jobs", jobs, 1)
    best = max(machines, key=lambda machine: (machine.get("GPU", 0.0), machine.get("CPU", 0.0)))
    count = best.get("GPU", 0.0)
    if device == "cuda" and not count:
        problem = "must be one that the cluster has, but 'cuda' was given, and it has no GPU"
        raise _check.invalid("device", problem)
    device = "cuda" if device != "cpu" and count else "cpu"
    share = 0.0
    if device == "cuda":
        shared_by = min(MAX_RUNS_PER_GPU, max(1, int(best.get("CPU", 0.0) / count // 2)))
        shared_by = shared_by if jobs == "auto" else jobs
        share = int(10_000 / shared_by) / 10_000  # Ray counts in steps of 0.0001
    counts = [node.get("CPU", 0.0) for node in machines if node.get("GPU", 0.0) >= share]
    cpus = 1 if device == "cuda" and threads is None else measured_threads or threads or 1
    if device == "cpu" and jobs != "auto":
        cpus = min(cpus, max(1, int(sum(counts) / jobs)))
    cpus = min(cpus, max(1, int(max(counts))))
    resources = TaskResources(device, cpus, share, jobs)
    if not resources.capacity(machines):
        raise SoftstairError(
            f"a unit needs {cpus} CPUs and {share:g} GPUs, but no machine of the cluster has "
            "them: add one that does.",
            field="device",
        )
    return resources


class RayPool(Pool):
    """Trains units as tasks of Ray."""

    def __init__(
        self,
        ray: Any,
        units: Sequence[Unit],
        folder: Path,
        on_event: OnEvent,
        choose: Callable[..., TaskResources],
        surroundings: dict[str, Any],
    ) -> None:
        super().__init__(
            (Task(unit.name, unit.recipe, unit.path(folder), key=unit) for unit in units), on_event
        )
        self._ray, self._choose, self._surroundings = ray, choose, surroundings
        self._resources = choose(_machines(ray))
        self._knows_threads = False
        self._refs: dict[Any, Task] = {}
        # By value, so that a machine without softstair, or with another version, can report it.
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        # A new process for each unit: one that has used a GPU would use it again, whichever Ray
        # gives it next.
        self._train = ray.remote(max_retries=RETRIES, max_calls=1)(train_unit)
        mailbox = ray.remote(Mailbox)
        self._mailbox = mailbox.options(num_cpus=0, max_restarts=-1).remote()
        self._mail = self._mailbox.take.remote()

    def __enter__(self) -> "RayPool":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, at: Any) -> None:
        if isinstance(error, Exception) and self._refs:
            if not self.stopping:
                self.stop()
            self._ray.wait(list(self._refs), num_returns=len(self._refs), timeout=SAVE_TIMEOUT)

    def capacity(self) -> int:
        machines = _machines(self._ray)
        if self.threads is not None and not self._knows_threads:
            self._knows_threads = True
            self._resources = self._choose(machines, measured_threads=self.threads)
        return self._resources.at_once(machines)

    def start(self, task: Task) -> None:
        message = {"name": task.name, "recipe": task.recipe.to_flat(), "out": str(task.out)}
        share = {"num_cpus": self._resources.cpus, "num_gpus": self._resources.gpus}
        train = self._train.options(name=task.name, **share)
        self._refs[train.remote(message | self._surroundings, self._mailbox)] = task

    def stop(self) -> None:
        for ref in self._refs:
            # It interrupts a training as SIGINT does.
            self._ray.cancel(ref, force=False, recursive=False)

    def poll(self, timeout: float) -> None:
        ended, _ = self._ray.wait(list(self._refs), timeout=timeout)
        self._read_mail()
        if ended:
            self._read_mail(timeout=1.0)  # its last events
        for ref in ended:
            task, outcome = self._refs.pop(ref), self._outcome(ref)
            if outcome["kind"] == "done" or (task.out / "summary.json").exists():
                self.handle(task, {**outcome, "kind": "done"})
            elif self.stopping:
                self.handle(task, {"kind": "stopped"})
            elif outcome["kind"] == "stopped":
                why = outcome.get("why", "its task was cancelled")
                again = "run the same command again to resume from its last checkpoint"
                self.fail(task, f"{why}: {again}.", lost=True)
            else:
                if trace := outcome.get("trace"):
                    logging.getLogger(__name__).error(trace)
                self.handle(task, outcome)

    def _outcome(self, ref: Any) -> Event:
        errors = self._ray.exceptions
        try:
            return self._ray.get(ref)
        except errors.TaskCancelledError:
            return {"kind": "stopped"}
        except errors.OutOfMemoryError:
            return {"kind": "stopped", "why": "memory ran out where it trained"}
        except errors.RayError as error:
            why = f"its process was lost {RETRIES + 1} times ({type(error).__name__})"
            return {"kind": "stopped", "why": why}

    def _read_mail(self, timeout: float = 0.0) -> None:
        """Report the events that came. If the mailbox is lost, there is only less to show."""
        if not self._ray.wait([self._mail], timeout=timeout)[0]:
            return
        tasks = {task.name: task for task in self._refs.values()}
        with contextlib.suppress(self._ray.exceptions.RayError):
            for name, event in self._ray.get(self._mail):
                if name in tasks:  # otherwise it comes late
                    self.handle(tasks[name], event)
        self._mail = self._mailbox.take.remote()


def _machines(ray: Any) -> list[Machine]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


# What runs on the machines of the cluster. It is sent there by value and imports the rest when
# called: a machine that has no softstair, or another version, reports it.


class Mailbox:
    """Events of units, until the driver takes them. They are only shown."""

    def __init__(self) -> None:
        self._events: deque[tuple[str, Event]] = deque(maxlen=10_000)

    def put(self, name: str, event: Event) -> None:
        self._events.append((name, event))

    def take(self) -> list[tuple[str, Event]]:
        events = list(self._events)
        self._events.clear()
        return events


def train_unit(task: dict[str, Any], mailbox: Any) -> dict[str, Any]:
    """Train or resume a unit; return its outcome: done, stopped or failed."""
    outcome: dict[str, Any] = {"threads": None}
    sent = -PAUSE

    def send(event: dict[str, Any]) -> None:
        nonlocal sent
        if event["kind"] == "begin":
            outcome["threads"] = event["threads"]
        if event["kind"] in ("step", "loading"):
            if time.monotonic() - sent < PAUSE:
                return
            sent = time.monotonic()
        mailbox.put.remote(task["name"], event)

    try:
        send({"kind": "start"})
        _take_over(task)
        if problem := _machine_problem(task):
            return {**outcome, "kind": "failed", "why": problem}
        _train(task, send)
    except KeyboardInterrupt:
        return {**outcome, "kind": "stopped"}
    except Exception as error:
        from softstair.train.progress import error_message

        trace = traceback.format_exc() if task["environment"].get("SOFTSTAIR_TRACEBACK") else ""
        return {**outcome, "kind": "failed", "why": error_message(error), "trace": trace}
    return {**outcome, "kind": "done"}


def _take_over(task: dict[str, Any]) -> None:
    """Take over path, environment and working directory from the driver."""
    there = [path for path in task["path"] if os.path.exists(path)]
    sys.path[:] = there + [path for path in sys.path if path not in there]
    os.environ.update(task["environment"])
    if os.path.isdir(task["folder"]):
        os.chdir(task["folder"])


def _machine_problem(task: dict[str, Any]) -> str:
    """Return why this machine cannot train for the driver; empty if it can."""
    here = platform.node()
    try:
        import torch

        import softstair
    except ModuleNotFoundError as error:
        return (
            f"{error.name} is not installed on {here} for {sys.executable}: run pip "
            "install '.[cli,ray]' in a clone of softstair on every machine of the cluster."
        )
    installed = {"softstair": softstair.__version__, "torch": str(torch.__version__)}
    for name, wanted in task["versions"].items():
        if installed[name].partition("+")[0] != wanted.partition("+")[0]:
            return (
                f"{here} has {name} {installed[name]}, and the machine of the command has "
                f"{wanted}: install one version on every machine."
            )
    if not os.path.exists(task["token"]):
        return (
            f"{here} does not see the folder {os.path.dirname(task['token'])!r} of the machine of "
            "the command: put `out` on a file system that all machines of the cluster share."
        )
    return ""


def _train(task: dict[str, Any], send: Any) -> None:
    import filelock
    import torch

    from softstair.train import Interrupted, Recipe
    from softstair.train.progress import train_with_events

    recipe, out = Recipe.from_flat(task["recipe"]), Path(task["out"])
    # Ray allows a process one thread for each of its CPUs; results must not depend on that.
    torch.set_num_threads(task["threads"])
    if (out / "lock").exists():
        lock = filelock.FileLock(out / "lock", LOCK_TIMEOUT)
        with contextlib.suppress(filelock.Timeout), lock:
            pass
    try:
        train_with_events(send, recipe, out, resume=True, **task["settings"])
    except Interrupted as stopped:
        if stopped.number == signal.SIGTERM:
            # Not from the driver: this machine shuts down, and another one will resume the unit.
            os._exit(1)
        raise KeyboardInterrupt from None
