"""What a training looks like on a terminal. Elsewhere it says warnings, and which of several runs
are done."""

import math
import sys
from typing import Any

from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from softstair.cli import flags_of
from softstair.cli._console import Console
from softstair.train.progress import Event

__all__ = ["Progress"]

WIDE = 110
"""Columns of a terminal in which there is room for words."""


class Progress:
    """A line that moves for every run: epoch, examples a second, loss, accuracy, time left,
    annealed layers. :meth:`told` hears what a run tells, see ``softstair.train.progress``."""

    def __init__(
        self, resuming: bool = False, console: Console | None = None, verb: str = "train"
    ) -> None:
        self._console = console or Console()
        self._verb = verb
        self._resuming = resuming
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
        self._tasks: dict[str, Any] = {}
        self._finished: list[Any] = []
        self._latest: dict[str, str] = {}

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def told(self, label: str, news: Event) -> None:
        """Event of the run with that label, which is empty if there is one alone."""
        said = news["kind"]
        if said == "start":
            self._roll_up()
            self._add(label, f"{label} getting ready".strip())
        elif said == "loading":
            done, total = news["done"], news["total"]
            speed, title = f"{done:,} of {total:,}", f"{label} features".strip()
            self._update(label, description=title, total=total, completed=done, speed=speed)
        elif said == "begin":
            self._bar.remove_task(self._tasks.pop(label))
            self._add(label, _title(label, news), total=news["total"], completed=news["done"])
            self._begin(label, news)
        elif said in ("step", "epoch"):
            self._go_on(label, news)
        elif said == "done":
            self._finished.append(self._tasks.pop(label))
            if label and self._bar.disable:
                self._say(f"{label} is done{self._latest.pop(label, '')}")
        elif said == "failed":
            self._bar.remove_task(self._tasks.pop(label))
            self._say(f"{label}: {news['why']}")

    def _begin(self, label: str, news: Event) -> None:
        if self._resuming and not news["done"]:
            which = f"{label}: " if label else ""
            self._say(f"{which}there was no checkpoint to resume: it begins.")
        for sentence in news["advice"]:
            self._warn(sentence, f"{sentence}.")

    def _go_on(self, label: str, news: Event) -> None:
        more: dict[str, Any] = {}
        if "speed" in news:
            speed = news["speed"]
            more["speed"] = f"{speed:,.0f} examples/s" if self._wide else f"{speed:,.0f}/s"
        if "valid_accuracy" in news:
            right = "validation" if self._wide else "right"
            accuracy, loss = news["valid_accuracy"], news["train_loss"]
            self._latest[label] = f", validation {accuracy:.2%}"
            more["news"] = f"loss {loss:.3f}, {right} {accuracy:.1%}"
            more["refresh"] = True  # of a short epoch, the clock would not draw it
        for warning in news.get("warnings", ()):
            # The share in it changes from epoch to epoch; the stair that it is about does not.
            epoch = f"epoch {news['epoch']}" + (f" of {label}" if label else "")
            self._warn(warning.partition(" ")[2], f"{warning} in {epoch}.")
        title, noise = _title(label, news), self._noise(news["noise"])
        self._update(label, completed=news["done"], description=title, noise=noise, **more)

    def _add(self, label: str, title: str, **given: Any) -> None:
        given = {"total": None, "speed": "", "news": "", "noise": "", **given}
        self._tasks[label] = self._bar.add_task(title, **given)

    def _update(self, label: str, **given: Any) -> None:
        self._bar.update(self._tasks[label], **given)

    def _roll_up(self) -> None:
        """The lines of runs that are done make room: they stand still above the others."""
        for task in self._finished:
            done = [one for one in self._bar.tasks if one.id == task]
            if not self._bar.disable:
                self._console.print(self._bar.make_tasks_table(done))
            self._bar.remove_task(task)
        self._finished.clear()

    def _warn(self, subject: str, sentence: str) -> None:
        """Says a sentence the first time that it is about its subject."""
        if subject not in self._warned:
            self._warned.add(subject)
            self._say(f"warning: {sentence}")

    def _say(self, sentence: str) -> None:
        print(f"softstair {self._verb}: {flags_of(sentence)}", file=sys.stderr)

    def _noise(self, noise: Event | None) -> str:
        """A bar for every layer, as high as what is left of its noise; · where it is annealed."""
        if noise is None:
            return "float"
        shares = noise["shares"]
        if noise["static"]:
            return f"{len(shares)} noisy layers"
        annealed = f"{noise['annealed']}/{len(shares)}"
        bars = "".join("·▁▂▃▄▅▆▇█"[min(8, math.ceil(8 * share))] for share in shares)
        return f"noise {bars} {annealed} annealed" if self._wide else f"{bars} {annealed}"


def _title(label: str, news: Event) -> str:
    epoch = min(news["epoch"] + 1, news["epochs"])
    return f"{label} epoch {epoch}/{news['epochs']}".strip()
