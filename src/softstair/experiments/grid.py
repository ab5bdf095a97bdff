"""Grids: the units of a design in a folder, their state, an estimate of their time, and the local
engine.

An engine is a function ``run(units, folder, on_event, …)`` that returns how many units failed. It
trains each in its run directory, which is all that it leaves behind: a unit that is done there is
never trained again, one that was begun is resumed.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from softstair.data import load
from softstair.data.batches import Examples
from softstair.data.folds import split
from softstair.experiments.design import Design, Unit
from softstair.experiments.results import UNKNOWN, find
from softstair.train.execution import choose_device, choose_threads, training_settings
from softstair.train.metrics import evaluate, refresh_statistics
from softstair.train.network import make_network
from softstair.train.parallel import StopRequest
from softstair.train.pool import ProcessPool, Task, cores, worker_count
from softstair.train.progress import Event
from softstair.train.recipe import Recipe
from softstair.train.records import (
    RunError,
    check_same_recipe,
    data_version_of,
    recipe_of,
    refuse_other_data,
    summary_of,
)
from softstair.train.state import State
from softstair.train.step import CapturedStep, Step

OnEvent = Callable[[Unit, Event], None]
STATES = ("done", "training", "begun", "waiting")
RECENT = 120.0
"""Where a lock cannot be tested, a unit that wrote a file within so many seconds is training."""
WINDOW = 20.0
"""Seconds over which steps are counted."""
GAIN = 1.03
"""Factor by which another parallel unit must raise the steps per second."""
PATIENCE, FEWEST_STEPS, MOST_STEPS = 3.0, 2, 200
"""Seconds and numbers of steps from which the time of a unit is estimated."""
EVALUATED = 500
"""Examples whose evaluation is measured."""


@dataclass(frozen=True)
class UnitStatus:
    """State of a unit: epochs so far, and the validation accuracy of the last, if there is one."""

    unit: Unit
    state: str
    epochs: int = 0
    accuracy: float | None = None
    data_version: str | None = None

    @property
    def is_done(self) -> bool:
        return self.state == "done"

    def to_json(self) -> dict[str, Any]:
        return {
            "fold": self.unit.recipe.fold,
            "state": self.state,
            "epochs": self.epochs,
            "of_epochs": self.unit.recipe.epochs,
            "valid_accuracy": self.accuracy,
            "data_version": self.data_version,
        }


def statuses(design: Design, folder: Path) -> list[UnitStatus]:
    """Return the state of each unit; raise RunError if a run directory has another recipe."""
    return [_status(unit, folder) for unit in design.units()]


def by_configuration(units: Iterable[UnitStatus]) -> dict[str, list[UnitStatus]]:
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
        "of_epochs": sum(status.unit.recipe.epochs for status in units),
        "valid_accuracy": sum(scores) / len(scores) if scores else None,
    }


def status_json(design: Design, folder: Path, units: Sequence[UnitStatus]) -> dict[str, Any]:
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


def _has_begun(unit: Unit, folder: Path) -> bool:
    """Return whether a unit has a run directory; raise RunError if it has another recipe."""
    path = unit.path(folder)
    if (begun := recipe_of(path)) is None:
        return False
    check_same_recipe(unit.recipe, begun, path)
    return True


def unfinished(units: Iterable[Unit], folder: Path) -> Iterator[Unit]:
    """Yield the units that are not done."""
    for unit in units:
        if not _has_begun(unit, folder) or summary_of(unit.path(folder)) is None:
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


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step, of an evaluation of the validation fold, and of a unit."""

    step: float
    evaluation: float
    unit: float
    device: str


def estimate(
    recipe: Recipe, data_dir: str = "data", device: str = "auto", threads: int | None = None
) -> Estimate:
    """Estimate the time of a unit from a few steps and an evaluation.

    >>> measured = estimate(Recipe(limit=200, epochs=10, batch=32), device="cpu")
    >>> 0 < measured.step < measured.unit
    True
    """
    place = choose_device(device)
    dataset = load(recipe.data, data_dir)
    dataset = dataset if recipe.limit is None else dataset.sample(recipe.limit)
    with training_settings(recipe, place):
        torch.manual_seed(recipe.seed)
        network = make_network(recipe, dataset)
        torch.set_num_threads(threads or choose_threads(network, recipe.batch))
        parts = split(dataset, recipe.fold, recipe.folds)
        numbers = *dataset.numbers(recipe.integer_input, recipe.centre_input), place
        training, valid = (Examples(dataset.x[part], dataset.y[part], *numbers) for part in parts)
        # Compiling takes longer than what is measured, and pays off only in a complete unit.
        state = State(replace(recipe, compile="never"), network, len(training), place)
        step = _seconds_of_a_step(state, training)
        few = Examples(training.x[:EVALUATED], training.y[:EVALUATED], *numbers)
        score = lambda: evaluate(state.network, few, forward=state.execution.eval_forward)
        score()  # the first call is slower
        evaluation = _seconds(place, score) * len(valid) / len(few)
        if recipe.statistics == "fresh":
            refresh = lambda: refresh_statistics(state.network, training, recipe.batch, recipe.seed)
            evaluation += _seconds(place, refresh)
    unit = recipe.epochs * (state.steps * step + evaluation)
    return Estimate(step, evaluation, unit, str(place))


def _seconds_of_a_step(state: State, training: Examples) -> float:
    step = (CapturedStep if state.execution.captured else Step)(state, training)
    state.begin_epoch()
    _seconds(state.device, step)  # the first call is slower
    seconds, count = 0.0, 0
    while count < FEWEST_STEPS or (seconds < PATIENCE and count < MOST_STEPS):
        if state.step >= state.steps:
            state.step, state.order = 0, None
            state.begin_epoch()
        seconds += _seconds(state.device, step)
        count += 1
    return seconds / count


def _seconds(device: torch.device, call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def _status(unit: Unit, folder: Path) -> UnitStatus:
    path = unit.path(folder)
    if not _has_begun(unit, folder):
        return UnitStatus(unit, "waiting")
    reached = *_last_epoch(path / "metrics.jsonl"), data_version_of(path)
    if summary_of(path) is not None:
        return UnitStatus(unit, "done", *reached)
    return UnitStatus(unit, "training" if _is_training(path) else "begun", *reached)


def _is_training(path: Path) -> bool:
    """Return whether a process holds the lock of a run directory."""
    try:
        import fcntl

        with os.fdopen(os.open(path / "lock", os.O_RDONLY | os.O_NONBLOCK)) as file:
            # Shared, so that two processes that test it do not report each other.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        return _wrote_recently(path)
    return False


def _wrote_recently(path: Path) -> bool:
    written = 0.0
    for name in ("metrics.jsonl", "config.json", "checkpoint"):
        with contextlib.suppress(OSError):
            written = max(written, (path / name).stat().st_mtime)
    return time.time() - written < RECENT


def _last_epoch(file: Path) -> tuple[int, float | None]:
    """Return the number of epochs and the accuracy of the last; the last line may be incomplete."""
    lines = file.read_bytes().split(b"\n")[:-1] if file.is_file() else []
    if not lines:
        return 0, None
    try:
        accuracy = json.loads(lines[-1])["valid_accuracy"]
        if accuracy is not None and not 0 <= float(accuracy) <= 1:
            raise ValueError("no accuracy")
        return len(lines), accuracy
    except (ValueError, LookupError, TypeError, RecursionError):
        raise RunError(f"{str(file)!r} is damaged or was edited: restore it.") from None
