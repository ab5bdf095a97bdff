"""Workers of the pool that begin at once: importing torch in another process takes seconds."""

import json
import multiprocessing
import os
import subprocess
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from softstair.train import Recipe, progress
from softstair.train.pool import Worker

__all__ = ["ForkedWorker", "WorkerHere"]


class WorkerHere(Worker):
    """Trains in this process.

    A run is done before anybody can stop it.
    """

    process: Any = SimpleNamespace(terminate=lambda: None)

    def __init__(self, events: Any, device: str, threads: int) -> None:
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


class ForkedWorker(Worker):
    """Trains in a fork of this process, which can be stopped."""

    def __init__(self, events: Any, device: str, threads: int) -> None:
        self.task, self.is_free = None, True
        inputs, outputs = os.pipe(), os.pipe()
        child = multiprocessing.get_context("fork").Process(
            target=_serve, args=(inputs, outputs, device)
        )
        child.start()
        os.close(inputs[0])
        os.close(outputs[1])
        self.process: Any = _Process(child)
        self._stdin, self._stdout = os.fdopen(inputs[1], "wb"), os.fdopen(outputs[0], "rb")
        self._listener = threading.Thread(target=self._listen, args=(events,), daemon=True)
        self._listener.start()


class _Process:
    """What the pool uses of :class:`subprocess.Popen`."""

    def __init__(self, child: Any) -> None:
        self._child = child
        self.terminate, self.kill = child.terminate, child.kill

    def poll(self) -> int | None:
        return self._child.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._child.join(timeout)
        if self._child.exitcode is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
        return self._child.exitcode


def _serve(inputs: tuple[int, int], outputs: tuple[int, int], device: str) -> None:
    os.close(inputs[1])
    os.close(outputs[0])
    os.dup2(inputs[0], 0)
    os.dup2(outputs[1], 1)
    progress.main(1, device)
