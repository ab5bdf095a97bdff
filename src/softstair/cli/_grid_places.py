"""Where each unit of a grid stands: its run directory is looked at, and left as it is."""

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softstair.experiments.design import Design, Unit
from softstair.experiments.grid import has_begun
from softstair.train.records import RunError, data_version_of, summary_of

__all__ = ["STATES", "Place", "places"]

STATES = ("done", "training", "begun", "waiting")
LATELY = 120.0
"""Where no lock can be looked at, a unit that wrote something so many seconds ago is taken to be
training."""


@dataclass(frozen=True)
class Place:
    """Where a unit stands: waiting, begun, training or done; its epochs so far, of how many, the
    accuracy of the last, and the version of the data set, if it is recorded."""

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


def places(asked: Design, folder: Path) -> list[Place]:
    """Where each unit of a design stands, in order."""
    return [_place(unit, folder) for unit in asked.units()]


def _place(unit: Unit, folder: Path) -> Place:
    path = unit.path(folder)
    if not has_begun(unit, folder):
        return Place(unit, "waiting")
    reached = *_last(path / "metrics.jsonl"), data_version_of(path)
    if summary_of(path) is not None:
        return Place(unit, "done", *reached)
    return Place(unit, "training" if _is_training(path) else "begun", *reached)


def _is_training(path: Path) -> bool:
    """Whether a process holds the lock of a run directory; where it cannot be looked at, whether
    something was written lately."""
    try:
        import fcntl

        file = os.open(path / "lock", os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except (ImportError, OSError):
        return _was_written_lately(path)
    try:
        # Shared: two who look do not take each other for a trainer, who holds it alone.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return _was_written_lately(path)
    finally:
        os.close(file)
    return False


def _was_written_lately(path: Path) -> bool:
    written = 0.0
    for name in ("metrics.jsonl", "config.json", "checkpoint"):
        with contextlib.suppress(OSError):
            written = max(written, (path / name).stat().st_mtime)
    return time.time() - written < LATELY


def _last(file: Path) -> tuple[int, float | None]:
    """The number of epochs done, and the accuracy of the last; somebody may be writing there."""
    if not file.is_file():
        return 0, None
    lines = file.read_bytes().split(b"\n")[:-1]
    if not lines:
        return 0, None
    try:
        accuracy = float(json.loads(lines[-1])["valid_accuracy"])
        if not 0 <= accuracy <= 1:
            raise ValueError("no accuracy")
        return len(lines), accuracy
    except (ValueError, LookupError, TypeError, RecursionError):
        raise RunError(f"{str(file)!r} is damaged or was edited: restore it.") from None
