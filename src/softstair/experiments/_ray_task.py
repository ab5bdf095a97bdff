"""What runs on the machines of a Ray cluster: the training of a unit, and a mailbox for its events.

It is sent there by value, so this file imports nothing that a machine might lack: one that has no
softstair, or another version, reports it.
"""

import contextlib
import gc
import importlib
import os
import platform
import signal
import sys
import time
import traceback
from collections import deque
from pathlib import Path
from typing import Any

__all__ = ["Mailbox", "train_unit", "warm_up"]

PAUSE = 1.0
"""Seconds between two step events of a unit: there may be hundreds of units."""
TIMEOUT = 60.0
"""Seconds to wait for a run directory: the process that held it may have just been killed."""


class Mailbox:
    """Events of units, until the driver takes them. They are only shown."""

    def __init__(self) -> None:
        self._events: deque[tuple[str, dict[str, Any]]] = deque(maxlen=10_000)

    def put(self, name: str, event: dict[str, Any]) -> None:
        """Add an event of the unit with that name."""
        self._events.append((name, event))

    def take(self) -> list[tuple[str, dict[str, Any]]]:
        """Return all events since it was last emptied."""
        events = list(self._events)
        self._events.clear()
        return events


def train_unit(task: dict[str, Any], mailbox: Any) -> dict[str, Any]:
    """Train or resume a unit; return its outcome: done, stopped or failed.

    ``task`` is plain data:

    name                       of the unit
    recipe, out, settings      arguments of :func:`softstair.train.train`
    threads                    of torch, for networks that are not small
    token                      a file that the driver sees in the grid's folder
    versions                   of the driver
    path, folder, environment  of the driver, for the user's own modules
    """
    outcome: dict[str, Any] = {"threads": None}
    sent = -PAUSE

    def send(event: dict[str, Any]) -> None:
        nonlocal sent
        if event["kind"] == "begin":
            outcome["threads"] = event["threads"]
        if event["kind"] in ("step", "loading"):
            if time.monotonic() - sent < PAUSE:
                return
            sent = time.monotonic()
        mailbox.put.remote(task["name"], event)

    try:
        send({"kind": "start"})
        _take_over(task)
        _check_machine(task)
        _train(task, send)
    except KeyboardInterrupt:
        return {**outcome, "kind": "stopped"}
    except Exception as error:
        trace = traceback.format_exc() if task["environment"].get("SOFTSTAIR_TRACEBACK") else ""
        return {**outcome, "kind": "failed", "why": _reason(error), "trace": trace}
    return {**outcome, "kind": "done"}


def warm_up(task: dict[str, Any]) -> None:
    """Import what training needs, which takes seconds."""
    _take_over(task)
    for name in ("softstair.train.loop", "torch._dynamo"):
        with contextlib.suppress(ImportError):  # the unit will report it
            importlib.import_module(name)


def _take_over(task: dict[str, Any]) -> None:
    """Take over path, environment and working directory from the driver."""
    there = [path for path in task["path"] if os.path.exists(path)]
    sys.path[:] = there + [path for path in sys.path if path not in there]
    os.environ.update(task["environment"])
    if os.path.isdir(task["folder"]):
        os.chdir(task["folder"])


def _check_machine(task: dict[str, Any]) -> None:
    """Raise ValueError if this machine lacks softstair, has another version, or does not see the
    grid's folder."""
    here = platform.node()
    try:
        import torch

        import softstair
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{error.name} is not installed on {here} for {sys.executable}: install "
            "softstair[cli,ray] on every machine of the cluster."
        ) from None
    installed = {"softstair": softstair.__version__, "torch": str(torch.__version__)}
    for name, wanted in task["versions"].items():
        if installed[name].partition("+")[0] != wanted.partition("+")[0]:
            raise ValueError(
                f"{here} has {name} {installed[name]}, and the machine of the command has "
                f"{wanted}: install one version on every machine."
            )
    if not os.path.exists(task["token"]):
        raise ValueError(
            f"{here} does not see the folder {os.path.dirname(task['token'])!r} of the machine of "
            "the command: put `out` on a file system that all machines of the cluster share."
        )


def _train(task: dict[str, Any], send: Any) -> None:
    import torch

    from softstair.train.loop import train
    from softstair.train.parallel import Interrupted
    from softstair.train.progress import EventSender
    from softstair.train.recipe import Recipe

    sender, out = EventSender(send), Path(task["out"])
    # Ray allows a process one thread for each of its CPUs; results must not depend on that.
    torch.set_num_threads(task["threads"])
    _wait_for(out)
    try:
        train(
            Recipe.from_json(task["recipe"]),
            out,
            resume=True,
            watchers=[sender],
            loading=sender.loading,
            **task["settings"],
        )
    except Interrupted as stopped:
        if stopped.number == signal.SIGTERM:
            # Not from the driver: this machine shuts down, and another one will resume the unit.
            os._exit(1)
        raise KeyboardInterrupt from None
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _wait_for(out: Path) -> None:
    """Wait until no process holds a run directory, or for TIMEOUT."""
    import filelock

    from softstair._files import refuse_link

    if (out / "config.json").exists():
        lock = filelock.FileLock(refuse_link(out / "lock"), TIMEOUT)
        with contextlib.suppress(filelock.Timeout), lock:
            pass


def _reason(error: Exception) -> str:
    message = " ".join(str(error).split())
    if isinstance(error, ValueError | OSError):
        return message
    return (
        f"internal error: {type(error).__name__}: {message[:200]}: run it again with "
        "SOFTSTAIR_TRACEBACK=1 and report what that prints."
    )
