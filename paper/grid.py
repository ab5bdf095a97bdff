"""Grids: the local engine, which trains the units of a design.

An engine is a function ``run(units, folder, on_event, …)`` that returns how many units failed. It
trains each in its run directory, which is all that it leaves behind: a unit that is done there is
never trained again, one that was begun is resumed.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from paper.design import Unit
from paper.results import add_device_seconds, find, is_finished, last_epoch
from paper.tables import Training
from softstair.train import RunError
from softstair.train.parallel import StopRequest
from softstair.train.pool import ProcessPool, Task, worker_count
from softstair.train.progress import Event
from softstair.train.records import refuse_other_data
from softstair.train.settings import choose_device

OnEvent = Callable[[Unit, Event], None]
WINDOW = 20.0
"""Seconds over which steps are counted."""
GAIN = 1.03
"""Factor by which another parallel unit must raise the steps per second."""


def unfinished(units: Iterable[Unit], folder: Path) -> Iterator[Unit]:
    """Return the units that are not done."""
    return (unit for unit in units if not is_finished(unit, folder))


def refuse_mixed_data(units: Iterable[Unit], folder: Path, data_dir: str) -> None:
    """Raise RunError if the folder has runs of another version of these units' data sets than is
    in ``data_dir``."""
    refuse_other_data(find(folder), {unit.recipe.data.name for unit in units}, data_dir)


def run(
    units: Iterable[Unit],
    folder: Path,
    on_event: OnEvent,
    *,
    data_dir: str = "data",
    device: str = "auto",
    threads: int | None = None,
    jobs: Literal["auto"] | int = "auto",
    timer: "Timer | None" = None,
) -> int:
    """Train the units that are not done, in parallel, on this machine; return how many failed.

    With ``jobs="auto"``, it begins with one unit on a GPU, and with as many as there are cores on a
    CPU, and adds one at a time as long as that raises the number of steps per second. It returns at
    the deadline of the ``timer``, after the units that are training have saved their runs.
    """
    timer = timer or Timer()
    left = [unit for unit in unfinished(units, folder) if timer.can_finish(unit, folder)]
    if not left:
        return 0
    refuse_mixed_data(left, folder, data_dir)
    place = choose_device(device).type
    pace = Pace(first=1 if jobs == "auto" else jobs, most=worker_count(jobs, place, len(left)))

    def count(known: int | None) -> int:
        if jobs == "auto" and place == "cpu":
            pace.begin(worker_count("auto", place, len(left), known or threads))
        return pace()

    def report(unit: Unit, event: Event) -> None:
        pace.hear(unit.name, event)
        timer.hear(unit, event, folder)
        on_event(unit, event)

    settings = {"data_dir": data_dir, "device": device, "resume": True, "threads": threads}
    tasks = (
        Task(unit.name, unit.recipe, unit.path(folder), key=unit)
        for unit in left
        if timer.can_finish(unit, folder)  # evaluated again when the unit could start
    )
    with StopRequest() as stop, ProcessPool(tasks, report, count, settings, most=pace.most) as pool:
        return pool.run(stop, timer.deadline)


class Timer:
    """Measures the device time of each unit, and estimates which units finish before a deadline.

    While several units train, each is charged an equal share of the time. The estimate assumes that
    an epoch takes as long as in the slowest unit that has trained two epochs here, or, if there is
    none, as in the fastest of ``known``. ``deadline`` is a time of ``clock``. With ``is_partial``,
    units that do not finish may begin too.
    """

    def __init__(
        self,
        deadline: float = math.inf,
        known: Iterable[Training] = (),
        is_partial: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.deadline, self._is_partial, self._clock = deadline, is_partial, clock
        self._known = min(((each.seconds or 0.0) / len(each.curve) for each in known), default=0.0)
        self._epochs: dict[str, float] = {}  # seconds of an epoch of each unit here
        self._shares: dict[str, float] = {}  # of the units that train
        self._begun: dict[str, float] = {}
        self._first: dict[str, tuple[float, int]] = {}  # time and number of their first epoch
        self._now = clock()
        self._delay = 0.0  # seconds from the start of the latest unit to the end of its first epoch

    def hear(self, unit: Unit, event: Event, folder: Path) -> None:
        """Measure an event; at the end of a unit, write its time to its run directory."""
        before, self._now = self._now, self._clock()
        for name in self._shares:
            self._shares[name] += (self._now - before) / len(self._shares)
        kind, name = event["kind"], unit.name
        if kind == "start":
            self._shares[name], self._begun[name] = 0.0, self._now
        elif kind == "epoch" and "part" not in event:
            if name not in self._first:
                self._first[name] = self._now, event["epoch"]
                self._delay = self._now - self._begun[name]
            start, first = self._first[name]
            if (count := event["epoch"] - first) > 0:
                self._epochs[name] = (self._now - start) / count
        elif kind in ("done", "stopped", "failed") and name in self._shares:
            with contextlib.suppress(OSError, RunError):  # the run itself is saved
                add_device_seconds(unit.path(folder), self._shares.pop(name))

    def can_finish(self, unit: Unit, folder: Path) -> bool:
        """Return whether a unit that begins now is estimated to end before the deadline."""
        left = self.deadline - self._clock()
        if self._is_partial or left <= 0:
            return left > 0
        epochs = unit.recipe.run.epochs - last_epoch(unit.path(folder) / "metrics.jsonl")[0]
        return self._delay + epochs * max(self._epochs.values(), default=self._known) <= left


class Pace:
    """The number of units to train at a time: one more as long as all together become faster.

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
