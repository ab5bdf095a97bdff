"""What the verbs print: tables, lines of text, and bars while they work.

Bars are shown on a terminal; elsewhere, lines on stderr.
"""

import math
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, stdev
from typing import Any

from rich import box, console
from rich.progress import BarColumn, Progress as Bars, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from softstair._errors import import_extra
from softstair.cli._args import flags_in
from softstair.train.parallel import Interrupted
from softstair.train.progress import Event

PIPE_WIDTH = 100
"""Columns of a pipe or a file, unless COLUMNS is set."""
UNLIMITED = 10_000
"""Columns where each row of a table has to be one line."""
FEWEST = 3
"""Repetitions that an interval takes at least."""


class Console(console.Console):
    """rich's console, without highlighting; a closed pipe raises BrokenPipeError.

    Args:
        unlimited: Whether a pipe or a file has room for any row, so that ``grep`` finds it.
        settings: Those of ``rich.console.Console``.
    """

    def __init__(self, unlimited: bool = False, **settings: Any) -> None:
        super().__init__(**{"highlight": False, "emoji": False, "markup": False, **settings})
        if not self.is_terminal and unlimited:
            self.width = UNLIMITED
        elif not self.is_terminal and not {"COLUMNS", "width"} & {*os.environ, *settings}:
            self.width = PIPE_WIDTH

    def on_broken_pipe(self) -> None:
        # rich would exit with code 1, which means here that the answer is no.
        raise BrokenPipeError


def table(
    title: str | None,
    left: Sequence[str],
    right: Sequence[str] = (),
    rows: Iterable[Sequence[Any]] = (),
    *,
    total: Sequence[Any] = (),
    caption: str | None = None,
    boxed: bool = True,
) -> Table:
    """Return a table with columns of text, aligned left, and of numbers, aligned right.

    ``total`` is a last row, below a line. Cells are strings, integers or texts of rich.
    """
    style: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "box": box.SIMPLE_HEAD}
    style |= {"pad_edge": False, "collapse_padding": True}
    shown = Table(title=title and Text(title), caption=caption, **({} if boxed else style))
    for name in (*left, *right):
        shown.add_column(name, overflow="fold")
    for column in shown.columns[len(left) :]:
        column.justify = "right"
    for row in rows:
        shown.add_row(*(cell if isinstance(cell, Text) else str(cell) for cell in row))
    if total:
        shown.add_section()
        shown.add_row(*map(str, total))
    return shown


def print_table(*arguments: Any, unlimited: bool = False, **settings: Any) -> None:
    """Print the table that :func:`table` returns for these arguments."""
    Console(unlimited).print(table(*arguments, **settings))


def bars(shares: Sequence[float]) -> str:
    """Return a bar for each share of the height; · is 0."""
    return "".join("·▁▂▃▄▅▆▇█"[min(8, math.ceil(8 * share))] for share in shares)


def in_percent(values: Sequence[float]) -> str:
    """Return a mean ± half of Student's 95 % interval; of two values, which say nothing of an
    interval, with their range.

    >>> in_percent([0.85, 0.86, 0.87]), in_percent([0.85, 0.87]), in_percent([0.85])
    ('86.00% ± 2.48%', '86.00% (85.00% to 87.00%)', '85.00%')
    """
    mean, count = fmean(values), len(values)
    if count < FEWEST:
        return f"{mean:.2%}" + (f" ({min(values):.2%} to {max(values):.2%})" if count > 1 else "")
    # scipy.stats is not imported for a quantile of Student's t: it takes as long as a figure.
    quantile = import_extra("scipy.special").stdtrit(count - 1, 0.975)
    return f"{mean:.2%} ± {quantile * stdev(values) / count**0.5:.2%}"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def print_line(text: str) -> None:
    """Print a text as it is to stdout, without wrapping it."""
    Console().print(text, soft_wrap=True)


WIDE = 110
"""Columns of a terminal from which texts are not abbreviated."""


class Stoppable:
    """A context that a signal ends: it says how to continue, and has an ``exit_code``.

    ``again`` returns how to continue, or an empty text if nothing was saved: then the command is to
    be given again. The exception is swallowed and not replaced: its frames would keep a process
    group alive that is then destroyed.
    """

    exit_code: int | None = None

    def __init__(self, verb: str, again: Callable[[], str], program: str = "softstair") -> None:
        self._verb, self._again, self._program = verb, again, program

    def __enter__(self) -> "Stoppable":
        return self

    def __exit__(self, kind: object, stop: BaseException | None, trace: object) -> bool:
        if not isinstance(stop, Interrupted | KeyboardInterrupt):
            return False
        # A KeyboardInterrupt comes before the training begins, or from a second signal.
        number = stop.number if isinstance(stop, Interrupted) else int(signal.SIGINT)
        same = same_command(self._verb, self._program)
        text = f"interrupted before anything was saved; begin again with {same}"
        if how := self._again():
            text = f"stopped by {signal.Signals(number).name}; continue with {how}"
        print(f"{self._program} {self._verb}: {text}", file=sys.stderr)
        self.exit_code = 128 + number
        return True


def same_command(verb: str, program: str = "softstair") -> str:
    """Return the command line of this process, if it has this verb of the program."""
    is_own = sys.argv[1:2] == [verb]
    return shlex.join([*program.split(), *sys.argv[1:]]) if is_own else "the same command"


class Progress:
    """A bar for every run, download or other piece of work; warnings and results as lines.

    Runs of a grid are counted: ``finished`` before it began, of ``total``.
    """

    def __init__(
        self,
        verb: str,
        resuming: bool = False,
        finished: int = 0,
        total: int = 0,
        console: Console | None = None,
        program: str = "softstair",
    ) -> None:
        self._console = console or Console(stderr=True)
        self._program, self._verb, self._resuming = program, verb, resuming
        self._started = self._finished = finished
        self._total = total
        self._is_wide = self._console.width >= WIDE
        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None if self._is_wide else 6),
            TextColumn("{task.fields[speed]}"),
            TextColumn("{task.fields[accuracy]}"),
            TextColumn("{task.fields[noise]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self._console,
            disable=not self._console.is_terminal,
            expand=True,
            redirect_stdout=sys.stdout.isatty(),
        )
        self._tasks: dict[str, TaskID] = {}
        self._titles: dict[str, str] = {}
        self._accuracies: dict[str, str] = {}
        self._noted: set[str] = set()

    def __enter__(self) -> "Progress":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def count(self, action: str, done: int, total: int) -> None:
        """Show how many examples or megabytes of an action are done."""
        if action not in self._tasks:
            for task in self._tasks.values():
                self._bars.remove_task(task)
            self._tasks = {}
            self._add(action, action)
        self._update(action, total=total, completed=done, speed=f"{done:,} of {total:,}")

    def show(self, label: str, event: Event) -> None:
        """Show an event of the run with that label, which is empty if there is only one run."""
        kind = event["kind"]
        if kind == "start":
            self._started += 1
            number = f"{self._started}/{self._total} " if self._total else ""
            self._titles[label] = f"{number}{label}"
            self._add(label, self._title(label, "getting ready"))
        elif kind == "loading":
            done, total = event["done"], event["total"]
            title, speed = self._title(label, "features"), f"{done:,} of {total:,}"
            self._update(label, description=title, total=total, completed=done, speed=speed)
        elif kind == "begin":
            self._begin(label, event)
        elif kind in ("step", "epoch"):
            self._advance(label, event)
        elif kind == "done":
            self._finished += 1
            if label:
                self._bars.remove_task(self._tasks.pop(label))
                number = f"{self._finished}/{self._total} " if self._total else ""
                self.note(f"{number}{label} is done{self._accuracies.pop(label, '')}")
        elif kind == "failed":
            self._bars.remove_task(self._tasks.pop(label))
            self.note(f"{label}: {flags_in(event['why'])}")

    def _begin(self, label: str, event: Event) -> None:
        self._bars.remove_task(self._tasks.pop(label))  # its time left was that of loading
        title = self._epoch(label, event)
        if event.get("compiles"):  # until the first step
            title += ", compiling kernels"
        self._add(label, title, total=event["total"], completed=event["done"])
        if self._resuming and not event["done"] and "part" not in event:
            self.note(f"{f'{label}: ' if label else ''}no checkpoint to resume; starting anew.")
        for advice in event["advice"]:
            self._note_once(advice, f"warning: {flags_in(advice)}.")
        if (exports := event.get("exports")) and self._verb == "train":
            self._note_once(exports, f"{flags_in(exports).rstrip('.')}.")

    def _advance(self, label: str, event: Event) -> None:
        more: dict[str, Any] = {}
        if "speed" in event:
            more["speed"] = f"{event['speed']:,.0f}{' examples' if self._is_wide else ''}/s"
        if "valid_accuracy" in event:
            name = "validation" if self._is_wide else "acc."
            accuracy = event["valid_accuracy"]
            if accuracy is None:  # trained on all examples
                name, accuracy = "training", event["train_accuracy"]
            else:
                self._accuracies[label] = f", validation {accuracy:.2%}"
            more["accuracy"] = f"loss {event['train_loss']:.3f}, {name} {accuracy:.1%}"
            more["refresh"] = True  # an epoch may be shorter than the time between two refreshes
        for warning in event.get("warnings", ()):
            # It begins with a share that changes from epoch to epoch; the rest is its subject.
            epoch = f"epoch {event['epoch']}" + (f" of {label}" if label else "")
            self._note_once(warning.partition(" ")[2], f"warning: {warning} in {epoch}.")
        title, noise = self._epoch(label, event), self._noise(event["noise"])
        self._update(label, completed=event["done"], description=title, noise=noise, **more)

    def _title(self, label: str, state: str) -> str:
        return f"{self._titles[label]} {state}".strip()

    def _epoch(self, label: str, event: Event) -> str:
        epoch = min(event["epoch"] + 1, event["epochs"])
        part = f"{event['part']}, " if "part" in event else ""  # a run that is trained first
        return self._title(label, f"{part}epoch {epoch}/{event['epochs']}")

    def _noise(self, noise: Event | None) -> str:
        """Return a character per layer, as high as its remaining noise; · if it is annealed."""
        if noise is None:
            return "float"
        shares = noise["shares"]
        if noise["static"]:
            return f"{len(shares)} noisy layers"
        annealed = f"{noise['annealed']}/{len(shares)}"
        left = bars(shares)
        return f"noise {left} {annealed} annealed" if self._is_wide else f"{left} {annealed}"

    def _add(self, label: str, title: str, **settings: Any) -> None:
        settings = {"total": None, "speed": "", "accuracy": "", "noise": "", **settings}
        self._tasks[label] = self._bars.add_task(title, **settings)

    def _update(self, label: str, **settings: Any) -> None:
        self._bars.update(self._tasks[label], **settings)

    def _note_once(self, subject: str, sentence: str) -> None:
        """Print a sentence once for each subject."""
        if subject not in self._noted:
            self._noted.add(subject)
            self.note(sentence)

    def note(self, sentence: str) -> None:
        """Print a sentence on stderr, above the bars."""
        print(f"{self._program} {self._verb}: {sentence}", file=sys.stderr)
