"""Progress of a training: events for a terminal, TensorBoard, or the process that started it.

:func:`main` is a process of a pool, which trains one run after the other. Parent and child send
each other lines of JSON: the parent runs to train, the child events. When the child's input ends,
the parent has closed it or was killed: the child saves its run and ends.
"""

import _thread
import contextlib
import gc
import importlib
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from softstair import _accelerate, kernels
from softstair._errors import SoftstairError, import_extra
from softstair.data import Dataset, Loading, load
from softstair.train.execution import choose_device
from softstair.train.loop import train
from softstair.train.network import advice, without_effect
from softstair.train.parallel import Interrupted
from softstair.train.recipe import Recipe
from softstair.train.state import State

Event = dict[str, Any]
"""Plain data. Its ``kind`` is start, loading, begin, step, epoch, done, stopped or failed."""

PAUSE = 0.1
"""Seconds between two step events."""


class EventSender:
    """A watcher that calls ``send`` with an event for the beginning, each epoch and some steps."""

    def __init__(self, send: Callable[[Event], None], base: Recipe | None = None) -> None:
        self._send, self._base = send, base

    def part(self, name: str) -> "EventSender":
        """Return the watcher of a run that is trained first; its events have a ``part``."""
        return EventSender(lambda event: self._send({**event, "part": name}))

    def loading(self, done: int, total: int) -> None:
        """Send how many recordings have their features computed."""
        self._send({"kind": "loading", "done": done, "total": total})

    def begin(self, state: State) -> None:
        position = _position(state)
        self._first, self._start = position["done"], time.monotonic()
        self._sent = self._start
        self._schedule = None
        if state.annealer is not None:
            self._schedule = state.recipe.schedule(state.annealer.layers)
        process = {"process": os.getpid(), "threads": torch.get_num_threads()}
        notes: Event = {"advice": advice(state)}
        if position["done"] == 0:  # else it was said when the run began
            # Of the fields that differ from the recipe of the preset.
            notes["unused"] = without_effect(state, self._base or state.recipe)
            notes["exports"] = state.exports
        # The first step of these takes up to half a minute on a machine that never ran it.
        compiles = state.execution.captured or state.execution.compiled
        self._send({"kind": "begin", **position, **process, **notes, "compiles": compiles})

    def step(self, state: State) -> None:
        now = time.monotonic()
        if now - self._sent < PAUSE:
            return
        self._sent = now
        position = _position(state)
        examples = (position["done"] - self._first) * state.recipe.batch
        speed = examples / max(now - self._start, 1e-9)
        self._send({"kind": "step", **position, "speed": speed, "noise": self._noise(state)})

    def epoch(self, state: State, metrics: dict[str, Any]) -> None:
        names = ("train_loss", "train_accuracy", "valid_accuracy")
        notes = {"noise": self._noise(state), "warnings": metrics.get("warnings", [])}
        measured = {name: metrics[name] for name in names}
        self._send({"kind": "epoch", **_position(state), **measured, **notes})

    def _noise(self, state: State) -> Event | None:
        """Return the std of each layer's noise, relative to its first; None for a float network."""
        if state.annealer is None or self._schedule is None:
            return None
        std0 = self._schedule.std0 or 1.0
        return {
            "shares": [noise[1] / std0 if noise else 1.0 for noise in state.annealer.noise],
            "annealed": len(state.annealer.annealed),
            "static": self._schedule.is_static,
        }


def _position(state: State) -> Event:
    """Return the position of a training, in epochs from 0 and in steps."""
    return {
        "epoch": state.epoch,
        "epochs": state.recipe.epochs,
        "done": state.epoch * state.steps + state.step,
        "total": state.recipe.epochs * state.steps,
    }


class TensorBoardEvents:
    """A watcher that writes the metrics of each epoch for TensorBoard.

    It needs the package tensorboard: ``pip install '.[tensorboard]'``.
    """

    def __init__(self, folder: Path) -> None:
        try:
            import_extra("tensorboard", extra="tensorboard")
        except ModuleNotFoundError as error:
            raise SoftstairError(f"`tensorboard`: {error}", field="tensorboard") from None
        from torch.utils.tensorboard import SummaryWriter

        self._folder, self._make = folder, SummaryWriter
        self._writer: Any = None

    def __enter__(self) -> "TensorBoardEvents":
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def begin(self, state: State) -> None:
        # Epochs after the last checkpoint are trained again: their events are replaced.
        self._writer = self._make(str(self._folder), purge_step=state.epoch)

    def step(self, state: State) -> None:
        """Write nothing: an event per step would be too many."""

    def epoch(self, state: State, metrics: dict[str, Any]) -> None:
        scalars = {name: value for name, value in metrics.items() if isinstance(value, float)}
        for layer, (mean, std) in enumerate(metrics.get("noise", ())):
            scalars |= {f"noise/{layer}/mean": mean, f"noise/{layer}/std": std}
        for stair in metrics.get("stairs", ()):
            if stair["dead"] is not None:
                scalars[f"dead/{stair['name']}"] = stair["dead"]
            scalars[f"fullest_level/{stair['name']}"] = max(stair["levels"])
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, metrics["epoch"])
        self._writer.flush()


def main(threads: int, device: str) -> None:
    """Train what the parent sends, with so many threads of torch, until there is no more."""
    torch.set_num_threads(threads)
    incoming, outgoing = os.dup(0), os.dup(1)
    # A user's model may read and print: neither must reach the pipes to the parent.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    inbox = _Inbox(device)
    with contextlib.suppress(KeyboardInterrupt):
        # Until a training handles signals itself, SIGTERM unwinds the stack as Ctrl-C does.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        threading.Thread(target=inbox.listen, args=(incoming,), daemon=True).start()
        while (message := inbox.get()) is not None and _train(message, outgoing):
            inbox.rest()
        inbox.rest()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class _Inbox:
    """What the parent sent, and whether the parent is still there."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._busy = self._ended = False

    def listen(self, incoming: int) -> None:
        """Receive messages; at the end of the input, stop the run that is training."""
        with os.fdopen(incoming, "rb", 0) as file:
            for line in file:
                self._messages.put(json.loads(line))
        with self._lock:
            self._ended = True
            if self._busy:
                _thread.interrupt_main(signal.SIGTERM)
        self._messages.put(None)

    def get(self) -> dict[str, Any] | None:
        """Return the next run to train; None at the end of the input."""
        try:
            message = self._messages.get(timeout=0.2)
        except queue.Empty:
            _get_ready(self._device)
            message = self._messages.get()
        with self._lock:
            self._busy = message is not None and not self._ended
        return message if self._busy else None

    def rest(self) -> None:
        """Nothing trains now that the end of the input would have to stop."""
        with self._lock:
            self._busy = False


def _get_ready(device: str) -> None:
    """Do what takes seconds at the beginning of a run, while there is nothing else to do."""
    importlib.import_module("torch._dynamo")  # optimisers import it
    with contextlib.suppress(Exception):  # a run that has the same error reports it
        if _accelerate.can_fuse(choose_device(device)):  # which creates the CUDA context
            importlib.import_module("softstair._accelerate.fuse")


def _train(message: dict[str, Any], outgoing: int) -> bool:
    """Train a run and send its events; return whether the process can train another one."""

    def send(event: Event) -> None:
        line = json.dumps(event).encode() + b"\n"
        with contextlib.suppress(OSError):  # the parent has ended, and this run is being stopped
            while line:
                line = line[os.write(outgoing, line) :]

    try:
        with contextlib.ExitStack() as stack:
            recipe, out = Recipe.from_json(message.pop("recipe")), Path(message.pop("out"))
            forget_compiled(recipe)
            base = message.pop("base", None)
            sender = EventSender(send, base and Recipe.from_json(base))
            watchers: list[Any] = [sender]
            if message.pop("tensorboard", False):
                watchers.append(stack.enter_context(TensorBoardEvents(out / "events")))
            dataset = _dataset(recipe.data, message.get("data_dir", "data"), sender.loading)
            train(recipe, out, watchers=watchers, dataset=dataset, **message)
    except (Interrupted, KeyboardInterrupt):
        send({"kind": "stopped"})
        return False
    except Exception as error:
        if os.environ.get("SOFTSTAIR_TRACEBACK"):
            traceback.print_exception(error)
        send({"kind": "failed", "why": error_message(error)})
        return False
    free_memory()
    send({"kind": "done"})
    return True


_datasets: dict[tuple[str, str], Dataset] = {}
"""The data set of the last run of this process."""


def _dataset(name: str, data_dir: str, loading: Loading) -> Dataset:
    """Return a data set, which is kept for the next run."""
    if (name, data_dir) not in _datasets:
        _datasets.clear()
        _datasets[name, data_dir] = load(name, data_dir, loading)
    return _datasets[name, data_dir]


_compiled_for: list[Recipe] = []  # the last recipe of this process, apart from fold and seed


def forget_compiled(recipe: Recipe) -> None:
    """Forget compiled networks if the next run compiles others than the last.

    Dynamo compiles a function for a limited number of networks, and compiles another batch size
    differently if it has compiled one before.
    """
    kind = [replace(recipe, fold=0, seed=0)]
    if kind != _compiled_for and (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()
    _compiled_for[:] = kind


def free_memory() -> None:
    """Free what a run has left, the device's memory included, for the next run."""
    kernels.free_tables()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def error_message(error: Exception) -> str:
    """Return an error as one line; for an internal error, with how to report it."""
    text = " ".join(str(error).split())
    if isinstance(error, ValueError | OSError):
        return text
    return (
        f"internal error ({type(error).__name__}: {text[:200]}): run it again with "
        "SOFTSTAIR_TRACEBACK=1 and report what that prints."
    )
