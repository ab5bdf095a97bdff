"""What a training tells while it runs: plain records, which a process can hand to another."""

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from softstair.train.network import advice
from softstair.train.state import State

__all__ = ["News", "Telling"]

News = dict[str, Any]
"""A record of numbers and words; ``said`` is its kind: start, loading, begin, step, epoch, done,
stopped, failed."""

PAUSE = 0.1
"""Seconds between two steps that are told of: more often nobody looks."""


class Telling:
    """A watcher that tells somebody of every beginning, every epoch, and some steps between."""

    def __init__(self, tell: Callable[[News], None]) -> None:
        self._tell = tell

    def loading(self, done: int, total: int) -> None:
        """Features are being computed from recordings: so many are, of so many."""
        self._tell({"said": "loading", "done": done, "total": total})

    def begin(self, state: State) -> None:
        place = _place(state)
        self._first, self._since = place["done"], time.monotonic()
        self._told = self._since
        self._schedule = None
        if state.annealer is not None:
            self._schedule = state.recipe.schedule(state.annealer.layers)
        process = {"process": os.getpid(), "threads": torch.get_num_threads()}
        self._tell({"said": "begin", **place, **process, "advice": advice(state)})

    def step(self, state: State) -> None:
        now = time.monotonic()
        if now - self._told < PAUSE:
            return
        self._told = now
        place = _place(state)
        done = (place["done"] - self._first) * state.recipe.batch
        speed = done / max(now - self._since, 1e-9)
        self._tell({"said": "step", **place, "speed": speed, "noise": self._noise(state)})

    def epoch(self, state: State, metrics: dict[str, Any]) -> None:
        names = ("train_loss", "valid_accuracy")
        numbers = {name: metrics[name] for name in names}
        warnings = metrics.get("warnings", [])
        noise = self._noise(state)
        self._tell(
            {"said": "epoch", **_place(state), **numbers, "noise": noise, "warnings": warnings}
        )

    def _noise(self, state: State) -> News | None:
        """What is left of the noise of each layer, as a share; None for a float network."""
        if state.annealer is None or self._schedule is None:
            return None
        std0 = self._schedule.std0 or 1.0
        shares = [noise[1] / std0 if noise else 1.0 for noise in state.annealer.noise]
        annealed = len(state.annealer.annealed)
        return {"shares": shares, "annealed": annealed, "static": self._schedule.is_static}


def _place(state: State) -> News:
    """Where a training stands, in epochs from 0 and in steps."""
    return {
        "epoch": state.epoch,
        "epochs": state.recipe.epochs,
        "done": state.epoch * state.steps + state.step,
        "total": state.recipe.epochs * state.steps,
    }
