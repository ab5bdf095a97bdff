"""What runs on the machines of a Ray cluster: the training of a unit, and a box for its news.

It travels there by value, so this file imports nothing that a machine might lack: one that has no
softstair, or another one, says so in a sentence.
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
"""Seconds between two steps of a unit that are told of: there may be hundreds of units."""
PATIENCE = 60.0
"""Seconds to wait for a run directory: whoever held it may have been killed a moment ago."""


class Mailbox:
    """What units tell, until the driver fetches it. Nothing depends on it but what is shown."""

    def __init__(self) -> None:
        self._news: deque[tuple[str, dict[str, Any]]] = deque(maxlen=10_000)

    def put(self, name: str, news: dict[str, Any]) -> None:
        """Event of the unit with that name."""
        self._news.append((name, news))

    def take(self) -> list[tuple[str, dict[str, Any]]]:
        """All that came since it was last emptied."""
        news = list(self._news)
        self._news.clear()
        return news


def train_unit(task: dict[str, Any], mailbox: Any) -> dict[str, Any]:
    """Trains a unit, or goes on with it; returns what became of it: done, stopped or failed.

    ``task`` is plain data:

    name                       the unit's
    recipe, out, settings      what :func:`softstair.train.train` is given
    threads                    how many torch has for networks that are not small
    token                      a file that the driver sees in the grid's folder
    versions                   the driver's
    path, folder, environment  the driver's, for modules of the user's own
    """
    outcome: dict[str, Any] = {"threads": None}
    told = -PAUSE

    def tell(news: dict[str, Any]) -> None:
        nonlocal told
        if news["kind"] == "begin":
            outcome["threads"] = news["threads"]
        if news["kind"] in ("step", "loading"):
            if time.monotonic() - told < PAUSE:
                return
            told = time.monotonic()
        mailbox.put.remote(task["name"], news)

    try:
        tell({"kind": "start"})
        _feel_at_home(task)
        _refuse_other_machine(task)
        _train(task, tell)
    except KeyboardInterrupt:
        why = "its task was cancelled: give the same command again."
        return {**outcome, "kind": "stopped", "why": why}
    except Exception as error:
        trace = traceback.format_exc() if task["environment"].get("SOFTSTAIR_TRACEBACK") else ""
        return {**outcome, "kind": "failed", "why": _why(error), "trace": trace}
    return {**outcome, "kind": "done"}


def warm_up(task: dict[str, Any]) -> None:
    """Imports what training needs, in seconds, in a process that will be given a unit soon."""
    _feel_at_home(task)
    for name in ("softstair.train.loop", "torch._dynamo"):
        with contextlib.suppress(ImportError):  # the unit will say so
            importlib.import_module(name)


def _feel_at_home(task: dict[str, Any]) -> None:
    """Takes over from the driver what a process that it had started would have."""
    there = [path for path in task["path"] if os.path.exists(path)]
    sys.path[:] = there + [path for path in sys.path if path not in there]
    os.environ.update(task["environment"])
    if os.path.isdir(task["folder"]):
        os.chdir(task["folder"])


def _refuse_other_machine(task: dict[str, Any]) -> None:
    """Refuses a machine that does not see what the driver sees, or would compute otherwise."""
    here = platform.node()
    try:
        import torch

        import softstair
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{here} must have what trains, but {error.name} is not installed there for "
            f"{sys.executable}: install softstair[cli,ray] on every machine of the cluster."
        ) from None
    found = {"softstair": softstair.__version__, "torch": str(torch.__version__)}
    for name, wanted in task["versions"].items():
        if found[name].partition("+")[0] != wanted.partition("+")[0]:
            raise ValueError(
                f"{here} has {name} {found[name]}, and the machine that asks has {wanted}: what "
                "they train would not be the same, so install one version on every machine."
            )
    if not os.path.exists(task["token"]):
        raise ValueError(
            f"{here} does not see the folder {os.path.dirname(task['token'])!r} as the machine "
            "that asks does: put --out on a file system that all machines of the cluster share."
        )


def _train(task: dict[str, Any], tell: Any) -> None:
    import torch

    from softstair.train.interrupt import Interrupted
    from softstair.train.loop import train
    from softstair.train.progress import EventSender
    from softstair.train.recipe import Recipe

    telling, out = EventSender(tell), Path(task["out"])
    # Ray allows a process one thread for each of its CPUs; what is computed must not depend on it.
    torch.set_num_threads(task["threads"])
    _wait_for(out)
    try:
        recipe = Recipe.from_json(task["recipe"])
        train(
            recipe,
            out,
            resume=True,
            watchers=[telling],
            loading=telling.loading,
            **task["settings"],
        )
    except Interrupted as stopped:
        if stopped.number == signal.SIGTERM:
            # Not the driver's word: this machine goes down, and another one will go on.
            os._exit(1)
        raise KeyboardInterrupt from None
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _wait_for(out: Path) -> None:
    """Waits until nobody holds a run directory, as long as that may still come."""
    import filelock

    from softstair._files import refuse_link

    if (out / "config.json").exists():
        lock = filelock.FileLock(refuse_link(out / "lock"), PATIENCE)
        with contextlib.suppress(filelock.Timeout), lock:
            pass


def _why(error: Exception) -> str:
    """One sentence, and a way to see more where it is a mistake of ours."""
    if isinstance(error, ValueError | OSError):
        return " ".join(str(error).split())
    return (
        f"stopped by a mistake of its own ({type(error).__name__}: "
        f"{' '.join(str(error).split())[:200]}): run it again with SOFTSTAIR_TRACEBACK=1 and "
        "report what that prints."
    )
