"""A worker of the pool that trains in this process."""

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from softstair.train import Recipe, progress
from softstair.train.pool import Worker

__all__ = ["WorkerHere"]


class WorkerHere(Worker):
    """Trains in this process: importing torch in another one takes seconds.

    A run is done before anybody can stop it.
    """

    process: Any = SimpleNamespace(terminate=lambda: None)

    def __init__(self, events: Any, device: str) -> None:
        self.task, self.is_free, self.events = None, True, events

    def give(self, task: Any, recipe: Recipe, out: Path, settings: dict[str, Any]) -> None:
        self.task, self.is_free = task, False
        with tempfile.TemporaryFile() as file:
            progress._train({"recipe": recipe.to_json(), "out": out, **settings}, file.fileno())
            file.seek(0)
            for line in file:
                self.events.put((self, json.loads(line)))

    def dismiss(self) -> None:
        self.is_free = False

    def end(self, timeout: float) -> None:
        pass
