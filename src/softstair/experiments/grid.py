"""Grids: the units of a design in a folder, how far each is, and the engine of one machine.

An engine is a function ``run(units, folder, on_event, …)`` that returns how many units failed. It
trains each in its run directory, which is all that it leaves behind: a unit that is done there is
never trained again, one that was begun is resumed.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from softstair.experiments.design import Design, Unit
from softstair.experiments.results import UNKNOWN, find
from softstair.train.execution import choose_device
from softstair.train.parallel import StopRequest
from softstair.train.pool import ProcessPool, Task, cores, worker_count
from softstair.train.progress import Event
from softstair.train.records import (
    RunError,
    check_same_recipe,
    data_version_of,
    recipe_of,
    refuse_other_data,
    summary_of,
)

__all__ = [
    "STATES", "OnEvent", "Pace", "UnitStatus", "by_configuration", "data_versions", "has_begun",
    "refuse_mixed_data", "run", "status_json", "statuses", "summarise", "unfinished",
]  # fmt: skip

OnEvent = Callable[[Unit, Event], None]
STATES = ("done", "training", "begun", "waiting")
RECENT = 120.0
"""Where a lock cannot be tested, a unit that wrote a file within so many seconds is training."""
WINDOW = 20.0
"""Seconds in which steps are counted, once as many units train as should."""
GAIN = 1.03
"""One more at a time must raise the steps per second by this factor to be worth its memory."""


@dataclass(frozen=True)
class UnitStatus:
    """How far a unit is.

    state         done, training, begun or waiting
    epochs        so far
    accuracy      validation accuracy of the last of them
    data_version  of the data set, if it is recorded
    """

    unit: Unit
    state: str
    epochs: int = 0
    accuracy: float | None = None
    data_version: str | None = None

    @property
    def is_done(self) -> bool:
        """Whether nothing of it is left to train."""
        return self.state == "done"

    @property
    def of_epochs(self) -> int:
        """Its epochs in the end."""
        return self.unit.recipe.epochs

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for :func:`json.dumps`."""
        return {
            "fold": self.unit.recipe.fold,
            "state": self.state,
            "epochs": self.epochs,
            "of_epochs": self.of_epochs,
            "valid_accuracy": self.accuracy,
            "data_version": self.data_version,
        }


def statuses(design: Design, folder: Path) -> list[UnitStatus]:
    """Return how far each unit of a design is, in order; nothing is written.

    Raises:
        RunError: If a unit was begun with another recipe, or its run directory is damaged.
    """
    return [_status(unit, folder) for unit in design.units()]


def by_configuration(units: Iterable[UnitStatus]) -> dict[str, list[UnitStatus]]:
    """Return the units of each configuration."""
    groups: dict[str, list[UnitStatus]] = {}
    for status in units:
        groups.setdefault(status.unit.configuration, []).append(status)
    return groups


def summarise(units: Sequence[UnitStatus]) -> dict[str, Any]:
    """Return how many units are in each state, their epochs, and their mean accuracy, which is
    None if they are of several versions of the data."""
    scores = [status.accuracy for status in units if status.accuracy is not None]
    if len(data_versions(units)) > 1:
        scores = []
    return {
        **{state: sum(status.state == state for status in units) for state in STATES},
        "epochs": sum(status.epochs for status in units),
        "of_epochs": sum(status.of_epochs for status in units),
        "valid_accuracy": sum(scores) / len(scores) if scores else None,
    }


def status_json(design: Design, folder: Path, units: Sequence[UnitStatus]) -> dict[str, Any]:
    """Return how far a grid is as plain data, ready for :func:`json.dumps`."""
    configurations = [
        {"name": name, **summarise(group), "units": [status.to_json() for status in group]}
        for name, group in by_configuration(units).items()
    ]
    total = {"name": design.name, "folder": str(folder), **summarise(units)}
    return {**total, "configurations": configurations}


def data_versions(units: Iterable[UnitStatus]) -> list[str]:
    """Return the versions of the data of the units that have an accuracy."""
    scored = [status for status in units if status.accuracy is not None]
    return list(dict.fromkeys(status.data_version or UNKNOWN for status in scored))


def has_begun(unit: Unit, folder: Path) -> bool:
    """Whether a unit has a run directory.

    Raises:
        RunError: If another recipe was begun there.
    """
    path = unit.path(folder)
    if (begun := recipe_of(path)) is None:
        return False
    check_same_recipe(unit.recipe, begun, path)
    return True


def unfinished(units: Iterable[Unit], folder: Path) -> Iterator[Unit]:
    """Yield the units that are not done."""
    for unit in units:
        if not has_begun(unit, folder) or summary_of(unit.path(folder)) is None:
            yield unit


def refuse_mixed_data(units: Iterable[Unit], folder: Path, data_dir: str) -> None:
    """Raise RunError if the folder has runs of another version of these units' data sets than is
    in ``data_dir``."""
    refuse_other_data(find(folder), {unit.recipe.data for unit in units}, data_dir)


def run(
    units: Iterable[Unit],
    folder: Path,
    on_event: OnEvent,
    *,
    data_dir: str = "data",
    device: str = "auto",
    threads: int | None = None,
    jobs: Literal["auto"] | int = "auto",
) -> int:
    """Train the units that are not done, in parallel, on this machine; return how many failed.

    With ``jobs="auto"``, it begins with one unit on a GPU, and with as many as there are cores on a
    CPU, and adds one after the other as long as that makes all of them faster together.
    """
    left = list(unfinished(units, folder))
    if not left:
        return 0
    refuse_mixed_data(left, folder, data_dir)
    is_cpu = choose_device(device).type == "cpu"
    if jobs != "auto":
        pace = Pace(first=jobs, most=min(jobs, len(left)))
    elif is_cpu:
        pace = Pace(first=1, most=min(cores(), len(left)))
    else:
        pace = Pace(first=1, most=worker_count("auto", "cuda", len(left)))

    def count(known: int | None) -> int:
        if jobs == "auto" and is_cpu:
            pace.begin(worker_count("auto", device, len(left), known or threads))
        return pace()

    def report(unit: Unit, event: Event) -> None:
        pace.hear(unit.name, event)
        on_event(unit, event)

    settings = {"data_dir": data_dir, "device": device, "resume": True, "threads": threads}
    tasks = (Task(unit.name, unit.recipe, unit.path(folder), key=unit) for unit in left)
    with StopRequest() as stop, ProcessPool(tasks, report, count, settings) as pool:
        return pool.run(stop)


class Pace:
    """The number of units to train at a time: the fastest, measured while they train.

    It counts the steps of all units together, adds one unit after the other as long as that helps,
    and keeps the best number.

    >>> now = 0.0
    >>> pace = Pace(first=1, most=4, clock=lambda: now)
    >>> for second in range(200):
    ...     now, speed = float(second), {1: 10, 2: 18, 3: 18}[pace()]
    ...     for unit in range(pace()):
    ...         pace.hear(unit, {"kind": "step", "done": speed * second / pace()})
    >>> pace()
    2
    """

    def __init__(self, first: int, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self._clock = most, clock
        self._number = min(first, most)
        self._best: tuple[float, int] | None = None
        self._settled = False
        self._done: dict[Any, float] = {}
        self._steps = 0.0
        self._since: tuple[float, float] | None = None
        self._asked: float | None = None

    def begin(self, number: int) -> None:
        """Start from another number, before anything was measured."""
        if self._best is None and self._since is None:
            self._number = min(max(1, number), self.most)

    def hear(self, unit: Any, event: Event) -> None:
        """Count the steps of a unit from the first that it reports."""
        if "done" in event and event["kind"] in ("begin", "step", "epoch"):
            self._steps += max(0.0, event["done"] - self._done.get(unit, event["done"]))
            self._done[unit] = event["done"]
        elif event["kind"] in ("done", "failed", "stopped"):
            self._done.pop(unit, None)

    def __call__(self) -> int:
        """Return how many units to train now."""
        if self._settled:
            return self._number
        now = self._clock()
        self._asked = now if self._asked is None else self._asked
        if self._since is None:
            # Short units may never all train at once: then the window opens after a while.
            late = self._done and now - self._asked >= 2 * WINDOW
            if len(self._done) >= self._number or late:
                self._since = (now, self._steps)
        elif now - self._since[0] >= WINDOW:
            self._judge((self._steps - self._since[1]) / (now - self._since[0]))
        return self._number

    def _judge(self, speed: float) -> None:
        self._since = self._asked = None
        if self._best is None or speed > GAIN * self._best[0]:
            self._best = (speed, self._number)
            self._settled = self._number >= self.most
            self._number = min(self._number + 1, self.most)
        else:
            self._number, self._settled = self._best[1], True


def _status(unit: Unit, folder: Path) -> UnitStatus:
    path = unit.path(folder)
    if not has_begun(unit, folder):
        return UnitStatus(unit, "waiting")
    reached = *_last_epoch(path / "metrics.jsonl"), data_version_of(path)
    if summary_of(path) is not None:
        return UnitStatus(unit, "done", *reached)
    return UnitStatus(unit, "training" if _is_training(path) else "begun", *reached)


def _is_training(path: Path) -> bool:
    """Whether a process holds the lock of a run directory."""
    try:
        import fcntl

        file = os.open(path / "lock", os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except (ImportError, OSError):
        return _wrote_recently(path)
    try:
        # Shared, so that two who test it do not take each other for a trainer.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return _wrote_recently(path)
    finally:
        os.close(file)
    return False


def _wrote_recently(path: Path) -> bool:
    written = 0.0
    for name in ("metrics.jsonl", "config.json", "checkpoint"):
        with contextlib.suppress(OSError):
            written = max(written, (path / name).stat().st_mtime)
    return time.time() - written < RECENT


def _last_epoch(file: Path) -> tuple[int, float | None]:
    """The number of epochs done, and the accuracy of the last. The file may be being written."""
    lines = file.read_bytes().split(b"\n")[:-1] if file.is_file() else []
    if not lines:
        return 0, None
    try:
        accuracy = float(json.loads(lines[-1])["valid_accuracy"])
        if not 0 <= accuracy <= 1:
            raise ValueError("no accuracy")
        return len(lines), accuracy
    except (ValueError, LookupError, TypeError, RecursionError):
        raise RunError(f"{str(file)!r} is damaged or was edited: restore it.") from None
