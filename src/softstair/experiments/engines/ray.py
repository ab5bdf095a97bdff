"""The engine of a cluster: each unit is a task of Ray, on one machine or on any number of them.

Every machine trains in the same folder, which must lie on a file system that all of them share: a
run directory with its lock and its checkpoint is all that they have in common. So a unit whose
process or machine is lost goes on elsewhere from its last checkpoint, and so does one that was in
training when this process was killed, once the same grid is run again.

A unit has the threads and the seed that it would have on this machine alone: on CPUs of one kind
what comes of it is the same to the last bit.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch

import softstair
from softstair.experiments.design import Unit
from softstair.experiments.engines import Tell, _ray_task, refuse_mixed_data, unfinished
from softstair.experiments.engines._ray_cluster import joined, nodes
from softstair.experiments.engines._ray_share import Share
from softstair.train.interrupt import StopRequest
from softstair.train.pool import Pool, Task
from softstair.train.progress import Event
from softstair.train.records import RunError

__all__ = ["run"]

RETRIES = 3
"""How often a unit is begun anew whose process, or machine, was lost."""
MOST_WARM = 32
"""Processes that import what they need before there is a unit for them."""
PATIENCE = 10.0
"""Seconds that tasks have to keep their runs when this process cannot wait for them."""


def run(
    units: Iterable[Unit],
    folder: Path,
    on_event: Tell,
    *,
    address: str | None = None,
    data_dir: str = "data",
    device: str = "auto",
    threads: int | None = None,
    jobs: Literal["auto"] | int = "auto",
    cpus: float | None = None,
    gpus: float | None = None,
) -> int:
    """Trains the units that are not done, each a task of Ray; returns how many failed.

    address    of the cluster: auto, host:port or ray://host:port; None starts one on this machine,
               and ends it at the end
    device     auto: a GPU if the cluster has one, for all units
    threads    of the CPU, for a unit; None leaves the choice to :func:`softstair.train.train`
    jobs       units that share a GPU; where there is none, units that train at a time
    cpus       of a task, if not as many as it has threads
    gpus       of a task, from 0 to 1, if not its share among those ``jobs``

    The first unit goes ahead of the others: what refuses it before it begins would refuse them all,
    and is raised. A unit that fails later is told of, and the others go on. One whose process is
    lost is begun anew three times, then it has failed. SIGINT and SIGTERM are passed on to the
    tasks, and raise :class:`Interrupted <softstair.train.Interrupted>` once each has kept its run.
    """
    left = list(unfinished(units, folder))
    if not left:
        return 0
    refuse_mixed_data(left, folder, data_dir)
    share = Share(device, threads, jobs, cpus, gpus)
    with StopRequest() as stop, joined(address, share.cpus_here()) as ray, _token(folder) as token:
        share.settle(nodes(ray))
        settings = {"data_dir": os.path.abspath(data_dir), "device": share.device}
        given = {**_surroundings(), "token": token, "settings": settings | {"threads": threads}}
        with RayPool(ray, left, folder.absolute(), on_event, share, given) as pool:
            return pool.run(stop)


class RayPool(Pool):
    """Trains units as tasks of Ray."""

    def __init__(
        self,
        ray: Any,
        units: list[Unit],
        folder: Path,
        on_event: Tell,
        share: Share,
        given: dict[str, Any],
    ) -> None:
        super().__init__(
            (Task(unit.name, unit.recipe, unit.path(folder), key=unit) for unit in units), on_event
        )
        self._ray, self._share, self._given = ray, share, given
        self._refs: dict[Any, Task] = {}
        self._learnt = False
        # By value, so that a machine without softstair, or with another version, can report it.
        ray.cloudpickle.register_pickle_by_value(_ray_task)
        # A process that has used one GPU would use it again, whichever Ray gives it next.
        once = {"max_calls": 1} if share.gpus else {}
        self._train = ray.remote(max_retries=RETRIES, **once)(_ray_task.train_unit)
        mailbox = ray.remote(_ray_task.Mailbox)
        self._mailbox = mailbox.options(num_cpus=0, max_restarts=-1).remote()
        self._mail = self._mailbox.take.remote()
        self._warm_up(len(units))

    def __enter__(self) -> "RayPool":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, at: Any) -> None:
        if isinstance(error, Exception) and self._refs:
            if not self.stopping:
                self.stop()
            self._ray.wait(list(self._refs), num_returns=len(self._refs), timeout=PATIENCE)

    def _warm_up(self, units: int) -> None:
        """Let other processes import their modules while the first unit trains alone."""
        task = self._ray.remote(max_retries=0)(_ray_task.warm_up)
        for _ in range(min(units, self.capacity(), MOST_WARM) - 1):
            task.options(num_cpus=self._share.cpus, num_gpus=self._share.gpus).remote(self._given)

    def capacity(self) -> int:
        machines = nodes(self._ray)
        if self.threads is not None and not self._learnt:
            self._learnt = True
            self._share.learn(self.threads, machines)
        return self._share.at_once(machines)

    def start(self, task: Task) -> None:
        message = {"name": task.name, "recipe": task.recipe.to_json(), "out": str(task.out)}
        resources = {"num_cpus": self._share.cpus, "num_gpus": self._share.gpus}
        train = self._train.options(name=task.name, **resources)
        self._refs[train.remote(message | self._given, self._mailbox)] = task

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
            task, lost = self._refs.pop(ref), None
            outcome: Event = {"kind": "stopped"}
            errors = self._ray.exceptions
            try:
                outcome = self._ray.get(ref)
            except errors.TaskCancelledError:
                lost = "its task was cancelled"
            except errors.OutOfMemoryError:
                lost = "memory ran out where it trained"
            except errors.RayError as error:
                lost = f"its process was lost {RETRIES + 1} times ({type(error).__name__})"
            self._end(task, outcome, lost)

    def _end(self, task: Task, outcome: Event, lost: str | None) -> None:
        if outcome["kind"] == "done" or (task.out / "summary.json").exists():
            self.handle(task, {**outcome, "kind": "done"})
        elif self.stopping:
            self.handle(task, {"kind": "stopped"})
        elif lost is not None or outcome["kind"] == "stopped":
            self.fail(
                task,
                f"{lost or 'its task was cancelled'}: run the same command again to resume from "
                "its last checkpoint.",
                lost=True,
            )
        else:
            if trace := outcome.get("trace"):
                print(trace, file=sys.stderr)
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


def _surroundings() -> dict[str, Any]:
    """What a task takes over from this process."""
    versions = {"softstair": softstair.__version__, "torch": str(torch.__version__)}
    ours = {name: value for name, value in os.environ.items() if name.startswith("SOFTSTAIR_")}
    return {
        "threads": torch.get_num_threads(),
        "versions": versions,
        "path": [os.path.abspath(path) for path in sys.path],
        "folder": os.getcwd(),
        "environment": ours,
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
            f"--out must be a directory that can be written, but {str(folder)!r} cannot be "
            f"({error.strerror}): give another --out."
        ) from None
    try:
        yield token
    finally:
        Path(token).unlink(missing_ok=True)
