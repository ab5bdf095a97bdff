"""The engine of a cluster: each unit is a task of Ray, on one machine or on any number of them.

Every machine trains in the same folder, on a file system that all of them share. A unit whose
process or machine is lost resumes elsewhere from its last checkpoint. It has the threads and the
seed that it would have alone: on CPUs of one kind its results are the same to the last bit.
"""

import contextlib
import importlib
import logging
import os
import platform
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

import softstair
from softstair import _check
from softstair._errors import SoftstairError
from softstair.experiments._ray_cluster import joined, token_in
from softstair.experiments.design import Unit
from softstair.experiments.grid import OnEvent, refuse_mixed_data, unfinished
from softstair.train.parallel import StopRequest
from softstair.train.pool import MAX_RUNS_PER_GPU, Pool, Task, cores
from softstair.train.progress import Event

RETRIES = 3
"""How often a unit is started again whose process, or machine, was lost."""
MOST_WARM = 32
"""Processes that import their modules before there is a unit for them."""
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
    cpus: float | None = None,
    gpus: float | None = None,
) -> int:
    """Train the units that are not done, each as a task of Ray; return how many failed.

    Without an ``address`` a cluster is started on this machine, and ended. ``jobs`` is the number
    of units that share a GPU; without a GPU, that train at a time. ``cpus`` and ``gpus`` of a task
    are chosen if not given. A unit whose process is lost is started again up to RETRIES times.
    """
    left = list(unfinished(units, folder))
    if not left:
        return 0
    refuse_mixed_data(left, folder, data_dir)
    resources = TaskResources(device, threads, jobs, cpus, gpus)
    here = cores() if jobs == "auto" else max(cores(), jobs)
    with StopRequest() as stop, joined(address, here) as ray, token_in(folder) as token:
        resources.settle(_machines(ray))
        data_dir = os.path.abspath(data_dir)
        names = [name for name in os.environ if name.startswith("SOFTSTAIR_")]
        surroundings = {
            "settings": {"data_dir": data_dir, "threads": threads, "device": resources.device},
            "token": token,
            "threads": torch.get_num_threads(),
            "versions": {"softstair": softstair.__version__, "torch": str(torch.__version__)},
            "path": [os.path.abspath(path) for path in sys.path],
            "folder": os.getcwd(),
            "environment": {name: os.environ[name] for name in names},
        }
        with RayPool(ray, left, folder.absolute(), on_event, resources, surroundings) as pool:
            return pool.run(stop)


class TaskResources:
    """The resources of a task, and so how many tasks run at a time.

    What was not asked for is chosen when the machines, and the threads of a unit, are known.

    >>> resources = TaskResources("auto", threads=None, jobs="auto", cpus=None, gpus=None)
    >>> machines = [{"CPU": 16.0, "GPU": 2.0}, {"CPU": 64.0}]
    >>> resources.settle(machines)
    >>> resources.device, resources.cpus, resources.gpus, resources.at_once(machines)
    ('cuda', 1, 0.25, 16)
    """

    def __init__(
        self, device: str, threads: int | None, jobs: Jobs, cpus: float | None, gpus: float | None
    ) -> None:
        # Ray decides which GPU a unit is given.
        self.device = _check.choice("device", device, ("auto", "cpu", "cuda"))
        if jobs != "auto":
            _check.integer("jobs", jobs, 1)
        if cpus is not None:
            _check.number("cpus", cpus, high=1024, above=0)
        if gpus is not None:
            _check.number("gpus", gpus, 0, 1)
        self.cpus, self.gpus = 1 if cpus is None else cpus, 0.0
        self._threads, self._jobs = threads, jobs
        self._given_cpus, self._given_gpus = cpus, gpus

    def settle(self, machines: Sequence[Machine]) -> None:
        """Choose the device and the share of a GPU; raise an error if no machine has them."""
        best = max(machines, key=lambda machine: (machine.get("GPU", 0.0), machine.get("CPU", 0.0)))
        count, given = best.get("GPU", 0.0), self._given_gpus
        if self.device == "cuda" and (not count or given == 0):
            reason = "0 GPUs for each unit" if count else "the cluster has no GPU"
            raise SoftstairError(
                f"device must be one that the cluster has, but 'cuda' was given, and {reason}.",
                field="device",
            )
        self.device = "cuda" if self.device != "cpu" and count and given != 0 else "cpu"
        if self.device == "cuda":
            cores_per_gpu = best.get("CPU", 0.0) / count
            number = min(MAX_RUNS_PER_GPU, max(1, int(cores_per_gpu // 2)))
            number = number if self._jobs == "auto" else self._jobs
            self.gpus = given or int(10_000 / number) / 10_000  # Ray counts in steps of 0.0001
        self.learn(self._threads or 1, machines)
        if not self._capacity(machines):
            raise SoftstairError(
                f"a unit needs {self.cpus:g} CPUs and {self.gpus:g} GPUs, but no machine of the "
                "cluster has them: ask for fewer.",
                field="cpus",
            )

    def learn(self, threads: int, machines: Sequence[Machine]) -> None:
        """Give a unit as many CPUs as it has threads, if there are."""
        if self._given_cpus is not None:
            return
        counts = [node.get("CPU", 0.0) for node in machines if node.get("GPU", 0.0) >= self.gpus]
        self.cpus = 1 if self.device == "cuda" and self._threads is None else threads
        if self.device == "cpu" and self._jobs != "auto":
            self.cpus = min(self.cpus, max(1, int(sum(counts) / self._jobs)))
        self.cpus = min(self.cpus, max(1, int(max(counts))))

    def at_once(self, machines: Sequence[Machine]) -> int:
        """Return how many tasks to submit: as many wait as train, so that no machine is idle."""
        if self.device == "cpu" and self._jobs != "auto":
            return self._jobs
        return max(1, 2 * self._capacity(machines))

    def _capacity(self, machines: Sequence[Machine]) -> int:
        number = 0
        for machine in machines:
            places = machine.get("CPU", 0.0) / self.cpus
            if self.gpus:
                places = min(places, machine.get("GPU", 0.0) * int(1 / self.gpus))
            number += int(places)
        return number


class RayPool(Pool):
    """Trains units as tasks of Ray."""

    def __init__(
        self,
        ray: Any,
        units: Sequence[Unit],
        folder: Path,
        on_event: OnEvent,
        resources: TaskResources,
        surroundings: dict[str, Any],
    ) -> None:
        super().__init__(
            (Task(unit.name, unit.recipe, unit.path(folder), key=unit) for unit in units), on_event
        )
        self._ray, self._task_resources, self._surroundings = ray, resources, surroundings
        self._refs: dict[Any, Task] = {}
        self._has_learnt = False
        # By value, so that a machine without softstair, or with another version, can report it.
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        # A process that has used one GPU would use it again, whichever Ray gives it next.
        once = {"max_calls": 1} if resources.gpus else {}
        self._train = ray.remote(max_retries=RETRIES, **once)(train_unit)
        mailbox = ray.remote(Mailbox)
        self._mailbox = mailbox.options(num_cpus=0, max_restarts=-1).remote()
        self._mail = self._mailbox.take.remote()
        # Other processes import their modules while the first unit trains alone.
        warm = ray.remote(max_retries=0)(warm_up).options(**self._resources)
        for _ in range(min(len(units), self.capacity(), MOST_WARM) - 1):
            warm.remote(surroundings)

    def __enter__(self) -> "RayPool":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, at: Any) -> None:
        if isinstance(error, Exception) and self._refs:
            if not self.stopping:
                self.stop()
            self._ray.wait(list(self._refs), num_returns=len(self._refs), timeout=SAVE_TIMEOUT)

    @property
    def _resources(self) -> dict[str, float]:
        return {"num_cpus": self._task_resources.cpus, "num_gpus": self._task_resources.gpus}

    def capacity(self) -> int:
        machines = _machines(self._ray)
        if self.threads is not None and not self._has_learnt:
            self._has_learnt = True
            self._task_resources.learn(self.threads, machines)
        return self._task_resources.at_once(machines)

    def start(self, task: Task) -> None:
        message = {"name": task.name, "recipe": task.recipe.to_json(), "out": str(task.out)}
        train = self._train.options(name=task.name, **self._resources)
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
        errors = self._ray.exceptions
        for ref in ended:
            task, lost = self._refs.pop(ref), ""
            outcome: Event = {"kind": "stopped"}
            try:
                outcome = self._ray.get(ref)
            except errors.TaskCancelledError:
                lost = "its task was cancelled"
            except errors.OutOfMemoryError:
                lost = "memory ran out where it trained"
            except errors.RayError as error:
                lost = f"its process was lost {RETRIES + 1} times ({type(error).__name__})"
            self._end(task, outcome, lost)

    def _end(self, task: Task, outcome: Event, lost: str) -> None:
        if outcome["kind"] == "done" or (task.out / "summary.json").exists():
            self.handle(task, {**outcome, "kind": "done"})
        elif self.stopping:
            self.handle(task, {"kind": "stopped"})
        elif lost or outcome["kind"] == "stopped":
            again = "run the same command again to resume from its last checkpoint"
            self.fail(task, f"{lost or 'its task was cancelled'}: {again}.", lost=True)
        else:
            if trace := outcome.get("trace"):
                logging.getLogger(__name__).error(trace)
            self.handle(task, outcome)

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


def warm_up(task: dict[str, Any]) -> None:
    """Import what training needs, which takes seconds."""
    _take_over(task)
    for name in ("softstair.train.loop", "torch._dynamo"):
        with contextlib.suppress(ImportError):  # the unit will report it
            importlib.import_module(name)


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
            f"{error.name} is not installed on {here} for {sys.executable}: install "
            "softstair[cli,ray] on every machine of the cluster."
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

    from softstair._files import refuse_link
    from softstair.train.loop import train
    from softstair.train.parallel import Interrupted
    from softstair.train.progress import EventSender, free_memory
    from softstair.train.recipe import Recipe

    sender, recipe, out = EventSender(send), Recipe.from_json(task["recipe"]), Path(task["out"])
    # Ray allows a process one thread for each of its CPUs; results must not depend on that.
    torch.set_num_threads(task["threads"])
    if (out / "config.json").exists():
        lock = filelock.FileLock(refuse_link(out / "lock"), LOCK_TIMEOUT)
        with contextlib.suppress(filelock.Timeout), lock:
            pass
    try:
        options = {"resume": True, "loading": sender.loading, **task["settings"]}
        train(recipe, out, watchers=[sender], **options)
    except Interrupted as stopped:
        if stopped.number == signal.SIGTERM:
            # Not from the driver: this machine shuts down, and another one will resume the unit.
            os._exit(1)
        raise KeyboardInterrupt from None
    free_memory()
