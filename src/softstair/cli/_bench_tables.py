"""What ``softstair bench`` measured, as tables."""

import contextlib
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from softstair.bench import Times
from softstair.bench.operators import ConvolutionRow, OperatorRow
from softstair.bench.partition import PartitionReport
from softstair.bench.training_step import StepReport
from softstair.cli._console import Console

__all__ = ["Tables"]


class Tables:
    """Prints a table as soon as its part is measured, and a line on stderr while it is."""

    def __init__(self, machine: dict[str, Any]) -> None:
        told = sys.stdout.isatty() or "COLUMNS" in os.environ
        self._console = Console(markup=False, width=None if told else 100)
        names = ("softstair", "torch", "triton", "cuda")
        versions = ", ".join(f"{name} {machine[name]}" for name in names if machine[name])
        self._console.print(f"{machine['device']}; {versions}", soft_wrap=True)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[Callable[[str], None]]:
        """Tells a terminal what is being measured; a file is not told."""
        console = Console(stderr=True, markup=False)
        if not console.is_terminal:
            yield lambda line: None
            return
        with console.status("…") as status:
            yield status.update

    def operator(self, rows: list[OperatorRow]) -> None:
        """The operator's bandwidth, time and memory: a table for each stair and precision."""
        for dtype, stair in dict.fromkeys((row.dtype, row.stair) for row in rows):
            chosen = [row for row in rows if (row.dtype, row.stair) == (dtype, stair)]
            copy = statistics.median(row.copy_bandwidth for row in chosen)
            slow = statistics.median(row.forward.median for row in chosen) > 1e-3
            unit, name = (1e3, "ms") if slow else (1e6, "µs")
            table = _table(
                f"{stair} on {chosen[0].elements:,} elements of {dtype}; "
                f"a copy moves {_number(copy / 1e9)} GB/s",
                ("noise", "how"),
                (
                    f"forward {name}",
                    "of copy",
                    f"backward {name}",
                    "of copy",
                    "×ReLU",
                    "kept",
                    "peak",
                ),
            )
            for row in chosen:
                table.add_row(
                    row.noise,
                    row.how,
                    _compact(row.forward, unit),
                    f"{row.forward_share:.1%}",
                    _compact(row.backward, unit),
                    f"{row.backward_share:.1%}",
                    f"{row.times_relu:.2f}",
                    f"{row.kept:g} B",
                    f"{row.memory:.2f}×",
                )
            self._console.print(table)

    def step(self, report: StepReport) -> None:
        """Every network's step beside the twin's."""
        table = _table(
            f"a training step of {report.model}, batches of {report.batch}, {report.precision}, "
            f"{'no' if report.augment == 'none' else report.augment} augmentation",
            ("network", "how"),
            ("ms", "images/s", "of the twin's", "peak", "of the twin's"),
        )
        for number, row in enumerate(report.rows):
            table.add_row(
                f"{row.name} (the twin)" if not number else row.name,
                row.treatment,
                _spread(row.times, 1e3),
                _number(row.images_per_second),
                f"{row.ratio:.3f}",
                f"{_number(row.memory / 1e6)} MB",
                f"{row.memory_ratio:.2f}",
            )
        self._console.print(table)
        for name, why in report.skipped.items():
            self._console.print(f"{name}: not measured ({why})", soft_wrap=True)

    def partition(self, report: PartitionReport) -> None:
        """The phases of a schedule, and what they come to."""
        table = _table(
            f"partition over {report.epochs} epochs of {report.preset}: {report.model}, "
            f"{report.forward}, batches of {report.batch}, {report.precision}, {report.treatment}",
            ("layers annealed",),
            ("epochs", "ms", "static ms", "speed-up", "capture s"),
        )
        for phase in report.phases:
            table.add_row(
                str(len(phase.annealed)),
                str(phase.epochs),
                _spread(phase.times, 1e3),
                _spread(phase.static_times, 1e3),
                f"{phase.speed_up:.2f}",
                f"{phase.capture:.2f}",
            )
        self._console.print(table)
        self._console.print(
            f"{report.images:,} images in {report.seconds:,.1f} s, captures included: "
            f"{_number(report.images_per_second)} images/s, {report.speed_up:.2f} times the static "
            f"run's {_number(report.static_images_per_second)}",
            soft_wrap=True,
        )

    def exact(self, rows: list[ConvolutionRow]) -> None:
        """Convolutions from int8 beside those from bfloat16."""
        if not rows:
            self._console.print("exact: not measured (int8 convolutions need CUDA and triton)")
            return
        table = _table(
            "convolutions of whole numbers, 3×3, moments included",
            ("channels", "pixels"),
            ("int8 µs", "bfloat16 µs", "speed-up", "wrong sums"),
        )
        for row in rows:
            table.add_row(
                f"{row.inputs} → {row.outputs}",
                f"{row.side}×{row.side}",
                _spread(row.int8, 1e6),
                _spread(row.bfloat16, 1e6),
                f"{row.ratio:.2f}",
                f"{row.wrong} of {row.sums:,}",
            )
        self._console.print(table)

    def farewell(self, path: Path | None) -> None:
        """Where the figures are."""
        kept = "every figure: not kept; --json FILE keeps them" if path is None else None
        self._console.print(kept or f"every figure: {path}", soft_wrap=True)


def _table(title: str, words: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    table = Table(
        title=Text(title),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in words:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _spread(times: Times, unit: float) -> str:
    """The median, and the least and most, in the median's digits."""
    median = unit * times.median
    digits = _digits(median)
    return f"{median:.{digits}f} ({unit * times.least:.{digits}f}–{unit * times.most:.{digits}f})"


def _compact(times: Times, unit: float) -> str:
    """The median, and half of what lies between the least and the most."""
    half = (times.most - times.least) / (2 * times.median)
    return f"{_number(unit * times.median)} ±{half:.0%}"


def _number(value: float) -> str:
    return f"{value:,.{_digits(value)}f}"


def _digits(value: float) -> int:
    """Places behind the point that show three figures in all."""
    return max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
