"""A process that trains one run after the other as its parent asks, and tells it how they go.

:mod:`softstair.train.together` starts it. Both speak in lines of JSON: what to train comes in, news
go out. The end of what comes in means that nobody waits for it any more: a parent that was killed
cannot say so, but its end of the pipe is closed for it on every system.
"""

import _thread
import contextlib
import gc
import importlib
import json
import os
import queue
import signal
import threading
import traceback
from pathlib import Path
from typing import Any

import torch

from softstair.train.events import Events
from softstair.train.interrupt import Interrupted
from softstair.train.job import train
from softstair.train.news import News, Telling
from softstair.train.recipe import Recipe

__all__ = ["main"]


def main(threads: int) -> None:
    """Trains until there is nothing more to train; ``threads`` are those that torch has."""
    torch.set_num_threads(threads)
    incoming, outgoing = os.dup(0), os.dup(1)
    # A model of the user's own may read and print: that is not for the parent to take for news.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    asked = Asked()
    with contextlib.suppress(KeyboardInterrupt):
        # Until a run takes signals itself, SIGTERM ends it as Ctrl-C would: it lets go of all.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        threading.Thread(target=asked.listen, args=(incoming,), daemon=True).start()
        while (task := asked.get()) is not None and _obey(task, outgoing):
            asked.rest()
        asked.rest()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Asked:
    """What the parent asks for, and whether it is still there."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._busy = self._ended = False

    def listen(self, incoming: int) -> None:
        """Takes what comes in; at its end, a run that is in training is stopped and kept."""
        with os.fdopen(incoming, "rb", 0) as file:
            for line in file:
                self._tasks.put(json.loads(line))
        with self._lock:
            self._ended = True
            if self._busy:
                _thread.interrupt_main(signal.SIGTERM)
        self._tasks.put(None)

    def get(self) -> dict[str, Any] | None:
        """The next run to train; None if there is none, and never will be."""
        try:
            task = self._tasks.get(timeout=0.2)
        except queue.Empty:
            # An optimiser imports this, in seconds: better now, while there is nothing to do.
            importlib.import_module("torch._dynamo")
            task = self._tasks.get()
        with self._lock:
            self._busy = task is not None and not self._ended
        return task if self._busy else None

    def rest(self) -> None:
        """The run is done: should the parent go now, there is nothing to stop."""
        with self._lock:
            self._busy = False


def _obey(task: dict[str, Any], outgoing: int) -> bool:
    """Trains a run; returns whether the process is fit for another one."""

    def tell(news: News) -> None:
        line = json.dumps(news).encode() + b"\n"
        with contextlib.suppress(OSError):  # nobody listens any more, and it is being stopped
            while line:
                line = line[os.write(outgoing, line) :]

    try:
        _train(task, Telling(tell))
    except (Interrupted, KeyboardInterrupt):
        tell({"said": "stopped"})
        return False
    except Exception as error:
        tell({"said": "failed", "why": _why(error)})
        return False
    # As free for the next run as a new process would be, the device's memory included.
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    tell({"said": "done"})
    return True


def _train(task: dict[str, Any], telling: Telling) -> None:
    out = Path(task["out"])
    settings = {name: task[name] for name in ("data_dir", "device", "resume", "threads")}
    with contextlib.ExitStack() as watching:
        watchers: list[Any] = [telling]
        if task["tensorboard"]:
            watchers.append(watching.enter_context(Events(out / "events")))
        recipe = Recipe.from_json(task["recipe"])
        train(recipe, out, watchers=watchers, loading=telling.loading, **settings)


def _why(error: Exception) -> str:
    """One sentence, and a way to see more where it is a mistake of ours."""
    if os.environ.get("SOFTSTAIR_TRACEBACK"):
        traceback.print_exception(error)
    if isinstance(error, ValueError | OSError):
        return " ".join(str(error).split())
    return (
        f"stopped by a mistake of its own ({type(error).__name__}: {error}): run it again with "
        "SOFTSTAIR_TRACEBACK=1 and report what that prints."
    )
