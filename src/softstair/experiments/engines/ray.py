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
from types import TracebackType
from typing import Any, Literal

import torch

import softstair
from softstair.experiments.design import Unit
from softstair.experiments.engines import Tell, _ray_task, refuse_mixed_data, unfinished
from softstair.experiments.engines._ray_cluster import joined, nodes
from softstair.experiments.engines._ray_share import Share
from softstair.train.interrupt import Interrupted, StopRequest
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
    tell: Tell,
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
        with Crew(ray, left, folder.absolute(), tell, share, given) as crew:
            crew.warm_up(len(left))
            while crew.hand_out():
                if stop.number is not None:
                    crew.stop()
                crew.hear()
    if stop.number is not None:
        raise Interrupted(stop.number)
    return crew.failed


class Crew:
    """Tasks in flight, and the units that wait."""

    def __init__(
        self,
        ray: Any,
        units: Iterable[Unit],
        folder: Path,
        tell: Tell,
        share: Share,
        given: dict[str, Any],
    ) -> None:
        self.failed = 0
        self._ray, self._waiting, self._folder = ray, iter(units), folder
        self._tell, self._share, self._given = tell, share, given
        self._open, self._begun, self._stopping = True, False, False
        self._flying: dict[Any, Unit] = {}
        self._started: set[str] = set()
        self._reasons: set[str] = set()
        # By value: a machine that has no softstair, or another one, can say so.
        ray.cloudpickle.register_pickle_by_value(_ray_task)
        # A process that has used one GPU would use it again, whichever Ray gives it next.
        once = {"max_calls": 1} if share.gpus else {}
        self._task = ray.remote(max_retries=RETRIES, **once)(_ray_task.train_unit)
        mailbox = ray.remote(_ray_task.Mailbox)
        self._mailbox = mailbox.options(num_cpus=0, max_restarts=-1).remote()
        self._mail = self._mailbox.take.remote()

    def __enter__(self) -> "Crew":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and self._flying:
            self.stop()
            number = len(self._flying)
            self._ray.wait(list(self._flying), num_returns=number, timeout=PATIENCE)

    def warm_up(self, units: int) -> None:
        """Lets other processes import what they need while the first unit goes ahead."""
        task = self._ray.remote(max_retries=0)(_ray_task.warm_up)
        for _ in range(min(units, self._share.at_once(nodes(self._ray)), MOST_WARM) - 1):
            task.options(num_cpus=self._share.cpus, num_gpus=self._share.gpus).remote(self._given)

    def hand_out(self) -> bool:
        """Makes tasks of units; whether there is still something to wait for."""
        while self._open and len(self._flying) < self._most():
            if (unit := next(self._waiting, None)) is None:
                self._open = False
                break
            self._flying[self._submit(unit)] = unit
        return bool(self._flying)

    def stop(self) -> None:
        """Each keeps its run, and ends."""
        if not self._stopping:
            self._open, self._stopping = False, True
            for task in self._flying:
                # It reaches training as SIGINT does, and only once.
                self._ray.cancel(task, force=False, recursive=False)

    def hear(self) -> None:
        """Waits a moment for what tasks say, and for the end of one."""
        ended, _ = self._ray.wait(list(self._flying), timeout=0.1)
        self._read_mail()
        if ended:
            self._read_mail(patience=1.0)  # its last words
        for task in ended:
            unit = self._flying.pop(task)
            self._settle(unit, self._outcome(task))

    def _most(self) -> int:
        return self._share.at_once(nodes(self._ray)) if self._begun else 1

    def _submit(self, unit: Unit) -> Any:
        task = {"name": unit.name, "recipe": unit.recipe.to_json()}
        task |= {"out": str(unit.path(self._folder)), **self._given}
        resources = {"num_cpus": self._share.cpus, "num_gpus": self._share.gpus}
        return self._task.options(name=unit.name, **resources).remote(task, self._mailbox)

    def _outcome(self, task: Any) -> Event:
        """What became of a task, whatever Ray makes of it."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(task)
        except errors.TaskCancelledError:
            why = "its task was cancelled"
        except errors.OutOfMemoryError:
            why = "memory ran out where it trained"
        except errors.RayError as error:
            why = f"its process was lost {RETRIES + 1} times ({type(error).__name__})"
        whole = "its last checkpoint, if there is one, is whole: give the same command again"
        return {"kind": "lost", "why": f"{why}, and {whole}."}

    def _settle(self, unit: Unit, outcome: Event) -> None:
        """A unit has come to an end."""
        is_done = outcome["kind"] == "done" or (unit.path(self._folder) / "summary.json").exists()
        if (threads := outcome.get("threads")) is not None:
            self._begin(threads)
        if is_done:
            self._say(unit, {"kind": "done"})
        elif self._stopping:
            if unit.name in self._started:
                self._say(unit, {"kind": "stopped"})
        else:
            self._fail(unit, outcome)
        self._started.discard(unit.name)

    def _fail(self, unit: Unit, outcome: Event) -> None:
        if trace := outcome.get("trace"):
            print(trace, file=sys.stderr)
        why = outcome["why"]
        # Without what is the unit's own: a full disk says the same of each.
        reason = why.replace(str(unit.path(self._folder)), "")
        if not self._begun and reason in self._reasons:
            raise RunError(f"{unit.name}: {why}" if outcome["kind"] == "lost" else why)
        if outcome["kind"] == "failed" and outcome["threads"] is None:
            # What refuses a second unit before it begins is not the affair of one.
            self._open = self._open and reason not in self._reasons
        if not self._begun or outcome.get("threads") is None:
            self._reasons.add(reason)
        self.failed += 1
        self._say(unit, {"kind": "failed", "why": why})

    def _begin(self, threads: int) -> None:
        if not self._begun:
            self._begun = True
            self._share.learn(threads, nodes(self._ray))

    def _read_mail(self, patience: float = 0.0) -> None:
        """Tells what came. Should the mailbox be lost, there is less to show, and no more."""
        ready, _ = self._ray.wait([self._mail], timeout=patience)
        if not ready:
            return
        news: list[tuple[str, Event]] = []
        with contextlib.suppress(self._ray.exceptions.RayError):
            news = self._ray.get(self._mail)
        self._mail = self._mailbox.take.remote()
        flying = {unit.name: unit for unit in self._flying.values()}
        for name, one in news:
            if name in flying:  # otherwise it comes late
                if one["kind"] == "begin":
                    self._begin(one["threads"])
                self._say(flying[name], one)

    def _say(self, unit: Unit, news: Event) -> None:
        """Whoever listens hears of one start for each unit, though it be begun anew."""
        if unit.name not in self._started:
            self._started.add(unit.name)
            self._tell(unit, {"kind": "start"})
        if news["kind"] != "start":
            self._tell(unit, news)


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
