"""Processes of the pool that begin at once: importing torch in another process takes seconds."""

import multiprocessing
import os
import subprocess
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from softstair.train import Interrupted, pool
from softstair.train.progress import Event, train_with_events

__all__ = ["start_fork", "start_here"]


def start_here(run: dict[str, Any], threads: int) -> tuple[Connection, Any]:
    """Train a run in this process, which is done before anybody can stop it."""
    here, there = multiprocessing.Pipe()
    events: list[Event] = []
    try:
        train_with_events(events.append, **run)
        events.append({"kind": "done"})
    except Interrupted:
        pass
    for event in events:
        if event["kind"] != "step":  # the pipe is read later, and has room for a few
            there.send(event)
    there.close()
    return here, SimpleNamespace(terminate=lambda: None, wait=lambda timeout=None: 0)


def start_fork(run: dict[str, Any], threads: int) -> tuple[Connection, Any]:
    """Train a run in a fork of this process, which can be stopped."""
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_serve, args=(here, there))
    child.start()
    there.close()
    here.send(run)
    return here, _Process(child)


class _Process:
    """What the pool uses of :class:`subprocess.Popen`."""

    def __init__(self, child: Any) -> None:
        self._child = child
        self.terminate, self.kill = child.terminate, child.kill

    def wait(self, timeout: float | None = None) -> int:
        self._child.join(timeout)
        if self._child.exitcode is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
        return self._child.exitcode


def _serve(here: Connection, there: Connection) -> None:
    here.close()
    pool.main(os.dup(there.fileno()), 1)
