"""Results of a grid: the trainings in run directories and tables, and the state of each unit."""

import contextlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isclose
from pathlib import Path
from typing import Any

from paper import tables
from paper.design import Design, Unit
from paper.rows import to_row
from paper.tables import METRICS, READERS, UNKNOWN, Epoch, Training, kind_of
from softstair._files import write
from softstair.data import version
from softstair.train import RunError, records
from softstair.train.records import recipe_of, summary_of

DEPTHS = ("*", "*/*", "*/*/*")
"""How deep in a folder run directories and tables may lie."""
DEVICE_FILE = "device.json"
"""File of a run directory in which a grid records the device time that the run took."""
STATES = ("done", "elsewhere", "training", "begun", "waiting")
RECENT = 120.0
"""Where a lock cannot be tested, a unit that wrote a file within so many seconds is training."""


def find(folder: Path) -> list[Path]:
    """Return the run directories in a folder and its folders, in order."""
    if (folder / "config.json").is_file():
        return [folder]
    files = _unique(path for depth in DEPTHS for path in folder.glob(f"{depth}/config.json"))
    runs = [path.parent for path in files]
    # Runs inside another are its start and its teacher; it may not have begun itself.
    begins = lambda run: run.name in records.FLOAT_RUNS and (run.parent / "lock").exists()
    return sorted((run for run in runs if run.parent not in runs and not begins(run)), key=_order)


def readable(folder: Path) -> list[Training]:
    """Return every unit in a folder that has an epoch, without those that are damaged."""
    trainings: list[Training] = []
    for path in find(folder):
        with contextlib.suppress(RunError):
            trainings += filter(None, [read(path, folder)])
    return trainings


def load(path: Path | str) -> list[Training]:
    """Return the trainings of a folder of run directories, of a table in CSV or Parquet, or of a
    folder of such tables.

    Raises:
        RunError: If there is none, or one is damaged.
        ForeignTable: If a table is not one of trainings.
    """
    return [training for training, _ in located(Path(path))]


def located(path: Path, passed_over: list[Path] | None = None) -> list[tuple[Training, Path]]:
    """Return what :func:`load` does, each training with its run directory or its table.

    The tables of a folder may lie in its folders, as run directories may; where some are, deeper
    folders are not searched. Other tables beside them are appended to ``passed_over`` if that is
    given, and raise ForeignTable if not.
    """
    if kind_of(path) in READERS and path.is_file():
        return [(training, path) for training in tables.load_table(path)]
    foreign: tables.ForeignTable | None = None
    if path.is_dir() and not find(path):
        for depth in DEPTHS:
            paths = _unique(sorted(p for p in path.glob(depth) if kind_of(p) in READERS))
            trainings: list[tuple[Training, Path]] = []
            for table in (table for table in paths if table.is_file()):
                try:
                    trainings += [(training, table) for training in tables.load_table(table)]
                except tables.ForeignTable as error:
                    if passed_over is None:
                        raise
                    passed_over.append(table)
                    foreign = foreign or error
            if trainings:
                return trainings
    if foreign is not None:
        raise foreign
    if units := [(unit, run) for run in find(path) if (unit := read(run, path))]:
        return units
    if path.is_file():
        problem = "it is neither a folder nor such a table."
    else:
        problem = "none has an epoch." if path.exists() else "it does not exist."
    raise RunError(
        f"{str(path)!r} must hold run directories of softstair train or grid, or be a table of "
        f"them (.csv, .csv.gz, .parquet), but {problem}"
    )


def _unique(paths: Iterable[Path]) -> list[Path]:
    """Return each file once, even if several links lead to it."""
    known: dict[Path, Path] = {}
    for path in paths:
        known.setdefault(path.resolve(), path)
    return list(known.values())


def _order(path: Path) -> tuple[str, int]:
    """Sort folds by number."""
    number = path.name.removeprefix("fold-")
    return str(path.parent), int(number) if number.isdecimal() else -1


def read(path: Path, folder: Path) -> Training | None:
    """Return the unit in a run directory of a folder; None if it has no epoch."""
    recipe, summary, metrics = recipe_of(path), summary_of(path), path / "metrics.jsonl"
    has_epoch = summary is not None or (metrics.is_file() and metrics.stat().st_size > 0)
    if recipe is None or not has_epoch:
        return None
    name = path.parent if path.name.startswith("fold-") else path
    inside = name != folder and folder in name.parents
    config = records.read_json(path, "config.json") or {}
    group = lambda name: found if isinstance(found := config.get(name), dict) else {}
    return Training(
        configuration=str(name.relative_to(folder)) if inside else name.resolve().name,
        recipe=recipe,
        curve=tuple(Epoch(*(line[name] for name in METRICS)) for line in records.metrics_of(path)),
        data_version=records.data_version_of(path) or UNKNOWN,
        path=path,
        device_seconds=device_seconds_of(path),
        device=str(config.get("device_name") or ""),
        commit=str(group("versions").get("commit") or ""),
        step_precision=str(group("step").get("precision") or ""),
        **{name: (summary or {}).get(name) for name in tables.OUTCOME},
    )


def device_seconds_of(path: Path) -> float | None:
    """Return the device time that a grid recorded for a run directory; None if it did not."""
    seconds = (records.read_json(path, DEVICE_FILE) or {}).get("seconds")
    is_valid = type(seconds) is float and 0 <= seconds < tables.LARGEST_NUMBER
    return seconds if is_valid else None


def add_device_seconds(path: Path, seconds: float) -> None:
    """Add device time to that which is recorded for a run directory."""
    seconds += device_seconds_of(path) or 0.0
    write(path / DEVICE_FILE, json.dumps({"seconds": seconds}) + "\n")


# The state of each unit


@dataclass(frozen=True)
class UnitStatus:
    """State of a unit: epochs so far, and the validation accuracy of the last, if there is one."""

    unit: Unit
    state: str
    epochs: int = 0
    accuracy: float | None = None
    data_version: str | None = None
    seconds: float | None = None
    device_seconds: float | None = None

    @property
    def is_done(self) -> bool:
        return self.state in ("done", "elsewhere")

    @property
    def cost(self) -> float:
        """Device time so far in seconds, or that of training steps if no other is recorded."""
        return (self.seconds if self.device_seconds is None else self.device_seconds) or 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "fold": self.unit.recipe.data.fold,
            "state": self.state,
            "epochs": self.epochs,
            "of_epochs": self.unit.recipe.run.epochs,
            "valid_accuracy": self.accuracy,
            "data_version": self.data_version,
            "seconds": self.seconds,
            "device_seconds": self.device_seconds,
        }


def statuses(
    design: Design, folder: Path, elsewhere: Mapping[str, Training] | None = None
) -> list[UnitStatus]:
    """Return the state of each unit, in a folder or by :func:`done_elsewhere`.

    Raises RunError if a run directory has another recipe.
    """
    return [_status(unit, folder, (elsewhere or {}).get(unit.name)) for unit in design.units()]


def done_elsewhere(design: Design, paths: Iterable[Path], data_dir: Path) -> dict[str, Training]:
    """Return the units of a design that are done in tables, or folders of tables or runs.

    Raises RunError if one has a unit with another recipe or data version than would be trained
    here, or with other results than another one, or is damaged. Empty folders are allowed.
    """
    units, found = {unit.name: unit for unit in design.units()}, dict[str, Training]()
    versions = {
        data: version(data, data_dir) for data in {u.recipe.data.name for u in units.values()}
    }
    for training, path in (pair for source in _sources(paths) for pair in located(source)):
        if not training.is_done or (unit := units.get(training.name)) is None:
            continue
        given, here = training.settings, {**training.settings, **to_row(unit.recipe)}
        if training.data_version != UNKNOWN and (present := versions[unit.recipe.data.name]):
            here[tables.DATA_VERSION] = present
        names = [name for name in ("epochs", *tables.NAMES) if given[name] != here[name]]
        problem = f"with {names[0]} = {given[names[0]]}, here {here[names[0]]}" if names else ""
        if not _is_close(found.setdefault(training.name, training), training):
            problem = "with other results than another table"
        if problem:
            raise RunError(
                f"{str(path)!r} has {training.name} {problem}: leave it out of `done`, or train "
                "another design.",
                field="done",
            )
    return found


def _sources(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the paths that are not empty folders, and the tables beside run directories."""
    for path in paths:
        if not path.is_dir() or any(path.iterdir()):
            yield path
        if path.is_dir() and find(path):  # located() reads only the runs
            yield from sorted(p for p in path.iterdir() if kind_of(p) in READERS and p.is_file())


def _is_close(first: Training, second: Training) -> bool:
    """Return whether two units have the same epochs, to the digits of a table in CSV."""
    curves = [[getattr(e, name) or 0 for e in t.curve for name in METRICS] for t in (first, second)]
    return len(curves[0]) == len(curves[1]) and all(
        isclose(a, b, rel_tol=1e-6) for a, b in zip(*curves, strict=True)
    )


def finished(
    units: Iterable[Unit], folder: Path, elsewhere: Mapping[str, Training]
) -> list[Training]:
    """Return the units that are done, in a folder or else by :func:`done_elsewhere`."""
    trainings = [
        read(unit.path(folder), folder) if is_finished(unit, folder) else elsewhere.get(unit.name)
        for unit in units
    ]
    return [training for training in trainings if training is not None]


def time_spent(units: Sequence[UnitStatus]) -> dict[str, Any]:
    """Return the device time that units took, and an estimate of the time left, in seconds.

    The estimate is the mean time of an epoch of the units that are done, times the epochs left; it
    is None if no unit is done. The ``unmeasured_units`` of them record only the seconds of their
    training steps, which count the time of other units that trained at the same time.
    """
    done = [status for status in units if status.is_done]
    cost, epochs = (sum(getattr(s, name) for s in done) for name in ("cost", "epochs"))
    left = sum(max(0, s.unit.recipe.run.epochs - s.epochs) for s in units if not s.is_done)
    return {
        "seconds_used": sum(status.cost for status in units),
        "seconds_left": left * cost / epochs if epochs else None,
        "unmeasured_units": sum(status.device_seconds is None for status in done),
    }


def by_configuration(units: Iterable[UnitStatus]) -> dict[str, list[UnitStatus]]:
    """Return the units of each configuration, which lie together."""
    groups = groupby(units, key=lambda status: status.unit.configuration)
    return {name: list(group) for name, group in groups}


def summarise(units: Sequence[UnitStatus]) -> dict[str, Any]:
    """Return how many units are in each state, their epochs, and their mean accuracy, which is
    None if they are of several versions of the data."""
    scores = [status.accuracy for status in units if status.accuracy is not None]
    has_mean = scores and len(data_versions(units)) == 1
    return {
        **{state: sum(status.state == state for status in units) for state in STATES},
        "epochs": sum(status.epochs for status in units),
        "of_epochs": sum(status.unit.recipe.run.epochs for status in units),
        "valid_accuracy": sum(scores) / len(scores) if has_mean else None,
    }


def status_json(design: Design, folder: Path, units: Sequence[UnitStatus]) -> dict[str, Any]:
    configurations = [
        {"name": name, **summarise(group), "units": [status.to_json() for status in group]}
        for name, group in by_configuration(units).items()
    ]
    total = {"name": design.name, "folder": str(folder), **summarise(units), **time_spent(units)}
    return {**total, "configurations": configurations}


def data_versions(units: Iterable[UnitStatus]) -> list[str]:
    """Return the versions of the data of the units that have an accuracy."""
    scored = [status for status in units if status.accuracy is not None]
    return list(dict.fromkeys(status.data_version or UNKNOWN for status in scored))


def has_begun(unit: Unit, folder: Path) -> bool:
    """Return whether a unit has a run directory; raise RunError if it has another recipe."""
    path = unit.path(folder)
    if (begun := recipe_of(path)) is None:
        return False
    records.check_same_recipe(unit.recipe, begun, path)
    return True


def is_finished(unit: Unit, folder: Path) -> bool:
    """Return whether a unit is done in a folder; raise RunError if it has another recipe there."""
    return has_begun(unit, folder) and summary_of(unit.path(folder)) is not None


def _status(unit: Unit, folder: Path, elsewhere: Training | None) -> UnitStatus:
    path, is_begun = unit.path(folder), has_begun(unit, folder)
    summary = (summary_of(path) if is_begun else None) or {}
    if elsewhere is not None and not summary:
        epochs, accuracy = len(elsewhere.curve), elsewhere.valid_accuracy
        times = elsewhere.seconds, elsewhere.device_seconds
        return UnitStatus(unit, "elsewhere", epochs, accuracy, elsewhere.data_version, *times)
    if not is_begun:
        return UnitStatus(unit, "waiting")
    state = "done" if summary else "training" if _is_training(path) else "begun"
    epochs, accuracy = last_epoch(path / "metrics.jsonl")
    times = summary.get("seconds"), device_seconds_of(path)
    return UnitStatus(unit, state, epochs, accuracy, records.data_version_of(path), *times)


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
        written = 0.0
    else:
        return False
    for name in ("metrics.jsonl", "config.json", "checkpoint"):
        with contextlib.suppress(OSError):
            written = max(written, (path / name).stat().st_mtime)
    return time.time() - written < RECENT


def last_epoch(file: Path) -> tuple[int, float | None]:
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
