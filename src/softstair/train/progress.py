"""Progress of a training: events for a terminal, or for the process that started it."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from softstair.train.fit import fit
from softstair.train.network import advice
from softstair.train.recipe import Recipe
from softstair.train.state import State

Event = dict[str, Any]
"""Plain data. Its ``kind`` is start, loading, begin, step, epoch, done, stopped or failed."""

PAUSE = 0.1
"""Seconds between two step events."""


class EventSender:
    """A watcher that calls ``send`` with an event for the beginning, each epoch and some steps."""

    def __init__(self, send: Callable[[Event], None]) -> None:
        self._send = send

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
        examples = (position["done"] - self._first) * state.recipe.run.batch
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
        "epochs": state.recipe.run.epochs,
        "done": state.epoch * state.steps + state.step,
        "total": state.recipe.run.epochs * state.steps,
    }


def train_with_events(
    send: Callable[[Event], None], recipe: Recipe, out: Path, **settings: Any
) -> None:
    """Train a run, and send its events; ``settings`` are other arguments of ``train``."""
    sender = EventSender(send)
    fit(recipe, out, watchers=[sender], loading=sender.loading, **settings)


def error_message(error: Exception) -> str:
    """Return an error as one line; for an internal error, with how to report it."""
    text = " ".join(str(error).split())
    if isinstance(error, ValueError | OSError):
        return text
    return (
        f"internal error ({type(error).__name__}: {text[:200]}): run it again with "
        "SOFTSTAIR_TRACEBACK=1 and report what that prints."
    )
