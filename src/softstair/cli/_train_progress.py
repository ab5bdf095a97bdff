"""What a training looks like on a terminal; nowhere else does it say anything but warnings."""

import math
import sys
import time
from typing import Any

from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from softstair.cli._console import Console
from softstair.train.advice import advice
from softstair.train.state import State

__all__ = ["Progress"]

WIDE = 110
"""Columns of a terminal in which there is room for words."""


class Progress:
    """A line that moves: epoch, examples a second, loss, accuracy, time left, annealed layers."""

    def __init__(
        self, label: str = "", resuming: bool = False, console: Console | None = None
    ) -> None:
        self._console = console or Console()
        self._label, self._resuming = label, resuming
        self._wide = self._console.width >= WIDE
        self._warned: set[str] = set()
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None if self._wide else 6),
            TextColumn("{task.fields[speed]}"),
            TextColumn("{task.fields[news]}"),
            TextColumn("{task.fields[noise]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self._console,
            disable=not self._console.is_terminal,
            expand=True,
        )
        self._task: Any = None

    def __enter__(self) -> "Progress":
        self._task = self._bar.add_task("getting ready", total=None, speed="", news="", noise="")
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def loading(self, done: int, total: int) -> None:
        """Features are being computed from recordings: so many are, of so many."""
        speed = f"{done:,} of {total:,}"
        self._bar.update(
            self._task, description="features", total=total, completed=done, speed=speed
        )

    def begin(self, state: State) -> None:
        self._bar.remove_task(self._task)
        if state.annealer is not None:
            self._schedule = state.recipe.schedule(state.annealer.layers)
        total = state.recipe.epochs * state.steps
        done = state.epoch * state.steps + state.step
        self._task = self._bar.add_task(
            self._title(state), total=total, completed=done, speed="", news="", noise=""
        )
        self._first, self._since = done, time.monotonic()
        if self._resuming and not done:
            print("softstair train: there was no checkpoint to resume: it begins.", file=sys.stderr)
        for sentence in advice(state):
            print(f"softstair train: warning: {sentence}.", file=sys.stderr)

    def step(self, state: State) -> None:
        if self._bar.disable:
            return
        done = state.epoch * state.steps + state.step
        seconds = max(time.monotonic() - self._since, 1e-9)
        speed = (done - self._first) * state.recipe.batch / seconds
        self._bar.update(
            self._task,
            completed=done,
            description=self._title(state),
            speed=f"{speed:,.0f} examples/s" if self._wide else f"{speed:,.0f}/s",
            noise=self._noise(state),
        )

    def epoch(self, state: State, metrics: dict[str, Any]) -> None:
        accuracy, loss = metrics["valid_accuracy"], metrics["train_loss"]
        right = "validation" if self._wide else "right"
        self._bar.update(self._task, news=f"loss {loss:.3f}, {right} {accuracy:.1%}")
        for warning in metrics.get("warnings", ()):
            # The share in it changes from epoch to epoch; the stair that it is about does not.
            subject = warning.partition(" ")[2]
            if subject not in self._warned:
                self._warned.add(subject)
                say = f"softstair train: warning: {warning} in epoch {metrics['epoch'] + 1}."
                print(say, file=sys.stderr)

    def _title(self, state: State) -> str:
        epoch = min(state.epoch + 1, state.recipe.epochs)
        return f"{self._label} epoch {epoch}/{state.recipe.epochs}".strip()

    def _noise(self, state: State) -> str:
        """A bar for every layer, as high as what is left of its noise; · where it is annealed."""
        if state.annealer is None:
            return "float"
        if self._schedule.is_static:
            return f"{state.annealer.layers} noisy layers"
        shares = [
            noise[1] / (self._schedule.std0 or 1.0) if noise else 1.0
            for noise in state.annealer.noise
        ]
        annealed = f"{len(state.annealer.annealed)}/{len(shares)}"
        bars = "".join("·▁▂▃▄▅▆▇█"[min(8, math.ceil(8 * share))] for share in shares)
        return f"noise {bars} {annealed} annealed" if self._wide else f"{bars} {annealed}"
