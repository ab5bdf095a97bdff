"""The engine of a cluster: each unit is a task of Ray, on one machine or on any number of them.

Every machine trains in the same folder, which must be on a file system that all of them share: a
run directory with its lock and its checkpoint is all that they have in common. So a unit whose
process or machine is lost resumes elsewhere from its last checkpoint, and so does one that was
training when this process was killed, once the same grid is run again.

A unit has the threads and the seed that it would have on this machine alone: on CPUs of one kind
its results are the same to the last bit.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

import softstair
from softstair import _check
from softstair._errors import SoftstairError
from softstair.experiments import _ray_task
from softstair.experiments._ray_cluster import joined
from softstair.experiments.design import Unit
from softstair.experiments.grid import OnEvent, refuse_mixed_data, unfinished
from softstair.train.parallel import StopRequest
from softstair.train.pool import MAX_RUNS_PER_GPU, Pool, Task, cores
from softstair.train.progress import Event
from softstair.train.records import RunError

__all__ = ["TaskResources", "run"]

RETRIES = 3
"""How often a unit is started again whose process, or machine, was lost."""
MOST_WARM = 32
"""Processes that import their modules before there is a unit for them."""
TIMEOUT = 10.0
"""Seconds for tasks to save their runs when this process ends because of an error."""
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

    The first unit trains alone until its first step: what fails before that would fail for the
    others too, and is raised. A unit that fails later is reported, and the others continue. One
    whose process is lost is started again three times, then it has failed. SIGINT and SIGTERM are
    passed on to the tasks, and raise :class:`Interrupted <softstair.train.Interrupted>` once each
    has saved its run.

    Args:
        units: What to train.
        folder: Folder of the run directories, which all machines see.
        on_event: Called with a unit and each of its events.
        address: Of the cluster: auto, host:port or ray://host:port. None starts one on this
            machine, and ends it at the end.
        data_dir: Folder of the data sets, which all machines see.
        device: auto: a GPU if the cluster has one, for all units.
        threads: Of the CPU, for a unit; None leaves the choice to :func:`softstair.train.train`.
        jobs: Units that share a GPU; without a GPU, units that train at a time.
        cpus: Of a task, if not as many as it has threads.
        gpus: Of a task, from 0 to 1, if not its share among ``jobs``.
    """
    left = list(unfinished(units, folder))
    if not left:
        return 0
    refuse_mixed_data(left, folder, data_dir)
    resources = TaskResources(device, threads, jobs, cpus, gpus)
    here = cores() if jobs == "auto" else max(cores(), jobs)
    with StopRequest() as stop, joined(address, here) as ray, _token(folder) as token:
        resources.settle(_machines(ray))
        settings: dict[str, Any] = {"data_dir": os.path.abspath(data_dir), "threads": threads}
        settings |= {"device": resources.device}
        surroundings = {**_surroundings(), "token": token, "settings": settings}
        with RayPool(ray, left, folder.absolute(), on_event, resources, surroundings) as pool:
            return pool.run(stop)


class TaskResources:
    """The resources of a task, and so how many tasks run at a time.

    What was not asked for is chosen: the device and the share of a GPU by :meth:`settle`, when the
    machines are known; the CPUs by :meth:`learn`, when the first unit reports its threads.

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
        """Choose the device and the share of a GPU.

        Raises:
            SoftstairError: If no machine has what a unit needs.
        """
        best = max(machines, key=lambda one: (one.get("GPU", 0.0), one.get("CPU", 0.0)))
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
            # Ray counts in steps of 0.0001.
            self.gpus = given or int(10_000 / number) / 10_000
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
        counts = [one.get("CPU", 0.0) for one in machines if one.get("GPU", 0.0) >= self.gpus]
        self.cpus = 1 if self.device == "cuda" and self._threads is None else threads
        if self.device == "cpu" and self._jobs != "auto":
            self.cpus = min(self.cpus, max(1, int(sum(counts) / self._jobs)))
        self.cpus = min(self.cpus, max(1, int(max(counts))))

    def at_once(self, machines: Sequence[Machine]) -> int:
        """Return how many tasks to submit: as many wait as train, so that no machine is idle.

        Without a GPU, ``jobs`` decides.
        """
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
        ray.cloudpickle.register_pickle_by_value(_ray_task)
        # A process that has used one GPU would use it again, whichever Ray gives it next.
        once = {"max_calls": 1} if resources.gpus else {}
        self._train = ray.remote(max_retries=RETRIES, **once)(_ray_task.train_unit)
        mailbox = ray.remote(_ray_task.Mailbox)
        self._mailbox = mailbox.options(num_cpus=0, max_restarts=-1).remote()
        self._mail = self._mailbox.take.remote()
        # Other processes import their modules while the first unit trains alone.
        warm_up = ray.remote(max_retries=0)(_ray_task.warm_up).options(**self._resources)
        for _ in range(min(len(units), self.capacity(), MOST_WARM) - 1):
            warm_up.remote(surroundings)

    def __enter__(self) -> "RayPool":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, at: Any) -> None:
        if isinstance(error, Exception) and self._refs:
            if not self.stopping:
                self.stop()
            self._ray.wait(list(self._refs), num_returns=len(self._refs), timeout=TIMEOUT)

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
                sys.stderr.write(trace)
            self.handle(task, outcome)

    def _read_mail(self, timeout: float = 0.0) -> None:
        """Report the events that came. If the mailbox is lost, there is only less to show."""
        ready, _ = self._ray.wait([self._mail], timeout=timeout)
        if not ready:
            return
        events: list[tuple[str, Event]] = []
        with contextlib.suppress(self._ray.exceptions.RayError):
            events = self._ray.get(self._mail)
        self._mail = self._mailbox.take.remote()
        tasks = {task.name: task for task in self._refs.values()}
        for name, event in events:
            if name in tasks:  # otherwise it comes late
                self.handle(tasks[name], event)


def _machines(ray: Any) -> list[Machine]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _surroundings() -> dict[str, Any]:
    """What a task takes over from this process."""
    names = [name for name in os.environ if name.startswith("SOFTSTAIR_")]
    return {
        "threads": torch.get_num_threads(),
        "versions": {"softstair": softstair.__version__, "torch": str(torch.__version__)},
        "path": [os.path.abspath(path) for path in sys.path],
        "folder": os.getcwd(),
        "environment": {name: os.environ[name] for name in names},
    }


@contextlib.contextmanager
def _token(folder: Path) -> Iterator[str]:
    """A file in the grid's folder, by which a machine knows that it sees the same folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, token = tempfile.mkstemp(prefix=".seen-", dir=folder.absolute())
        os.close(handle)
    except OSError as error:
        raise RunError(
            f"`out` must be a directory that can be written, but {str(folder)!r} cannot be "
            f"({error.strerror}): give another `out`."
        ) from None
    try:
        yield token
    finally:
        Path(token).unlink(missing_ok=True)
