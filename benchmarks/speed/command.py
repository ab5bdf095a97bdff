"""``python -m benchmarks.speed``: how fast softstair is on this machine."""

import contextlib
import json
import math
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.progress import Progress, TextColumn, TimeElapsedColumn

from benchmarks import speed
from benchmarks.speed import Times
from benchmarks.speed.clock import Effort
from benchmarks.speed.operators import ConvolutionRow, OperatorRow, bench_stair
from benchmarks.speed.training_step import PartitionReport, StepReport
from benchmarks.speed.workload import workload
from softstair import _check
from softstair._files import output_file
from softstair.cli._args import flag, words_of
from softstair.cli._output import Console, print_line, print_table
from softstair.data.augment import Moves
from softstair.regularise import Forward
from softstair.train.settings import choose_device, memory_errors

PROGRAM = "python -m benchmarks.speed"
PARTS = ("operator", "step", "partition", "exact")
CPU_BATCHES = {"vgg8": 16, "resnet20": 16, "dscnn": 64, "digits": 64}
"""On a CPU a batch of the paper's size takes seconds."""


@dataclass(frozen=True)
class Command:
    """Measure the speed of softstair on this machine, next to references in the same run.

    operator:  bandwidth compared with a copy, time compared with ReLU
    step:      images per second and peak memory of a training step, compared with the float
               network and with other libraries for quantised training
    partition: time that truncating the backward pass at annealed layers saves over a schedule
    exact:     integer convolutions from int8, compared with bfloat16 (on a GPU)

    Exit code 0: measured; 2: an error.
    """

    only: str = flag(",".join(PARTS), "Parts to measure, separated by commas.")
    device: str = flag("auto", "cpu, cuda or cuda:N (auto: a GPU if there is one).")
    model: Literal["auto", "vgg8", "resnet20", "dscnn", "digits"] = flag(
        "auto", "Network of step and partition (auto: vgg8 on a GPU, digits on a CPU)."
    )
    batch: int | None = flag(None, "Batch size (default: 256 on a GPU, less on a CPU).")
    precision: Literal["auto", "fast", "float32", "tf32", "bfloat16", "float8"] = flag(
        "fast", "Precision of the steps, as in softstair train (fast: as in the presets best-*)."
    )
    augment: Moves = flag("none", "Augmentation in the steps.")
    forward: Forward = flag("mode", "Forward mode of partition; step measures all of them.")
    stairs: str | None = flag(
        None,
        "Stairs of operator, separated by commas; int4@0.07 has a quantum of 0.07 (default: "
        "heaviside,ternary,int4,int4@0.07, or ternary with --quick).",
    )
    elements: int | None = flag(
        None,
        "Elements of operator's tensor (default: 33,554,432 on a GPU, 1,048,576 on a CPU, fewer "
        "with --quick).",
    )
    tune: bool = flag(False, "Also autotune the compiled float network, which takes minutes.")
    repeats: int | None = flag(
        None, "Samples of each time (default: 7 on a GPU, 5 on a CPU, fewer with --quick)."
    )
    quick: bool = flag(False, "Measure briefly, to see that it works.")
    json: Path | None = flag(None, "Write all figures to this file, as JSON.")

    def __post_init__(self) -> None:
        parts = _split(self.only)
        if not parts or not set(parts) <= set(PARTS):
            allowed = f"one or more of {', '.join(PARTS)}, separated by commas"
            raise _check.wrong("only", self.only, allowed)
        if self.stairs is not None and not _split(self.stairs):
            allowed = "one or more stairs such as ternary or int4@0.07, separated by commas"
            raise _check.wrong("stairs", self.stairs, allowed)
        if self.elements is not None:
            _check.integer("elements", self.elements, 1, 1 << 31)

    def run(self) -> int:
        device = choose_device(self.device)
        on_gpu = device.type == "cuda"
        model = self.model if self.model != "auto" else "vgg8" if on_gpu else "digits"
        batch = 256 if on_gpu else CPU_BATCHES[model]
        batch = batch if self.batch is None else self.batch
        effort = Effort.on(device, self.quick, self.repeats)
        if self.elements is not None:
            effort = replace(effort, elements=self.elements)
        # Errors about any part come before the first is measured.
        recipe = workload(model).recipe(batch, precision=self.precision, augment=self.augment)
        recipe.run.precision_on(device)
        stairs = None if self.stairs is None else _split(self.stairs)
        for name in stairs or ():
            bench_stair(name)
        common = (device, model, batch, self.precision, self.augment)
        step = partial(speed.measure_step, *common, tune=self.tune, effort=effort)
        partition = partial(speed.measure_partition, *common, forward=self.forward, effort=effort)
        parts: dict[str, tuple[Callable[..., Any], Callable[[Any], None]]] = {
            "operator": (partial(speed.measure_operator, device, effort, stairs), _show_operator),
            "step": (step, _show_step),
            "partition": (partition, _show_partition),
            "exact": (partial(speed.measure_exact, device, batch, effort), _show_exact),
        }
        with contextlib.ExitStack() as files:
            file = self.json and files.enter_context(output_file(self.json, "json"))
            figures: dict[str, Any] = {
                "command": shlex.join([*PROGRAM.split(), *words_of(self)]),
                **speed.about(device),
            }
            names = ("softstair", "torch", "triton", "cuda")
            versions = [f"{name} {figures[name]}" for name in names if figures[name]]
            print_line(f"{figures['device']}; {', '.join(versions)}")
            lacking = f"not enough memory on {device}: give a `batch` below {batch}, or `quick`."
            for part, (measure, show) in parts.items():
                if part not in _split(self.only):
                    continue
                with memory_errors(lacking), _status() as progress:
                    measured = measure(progress=progress)
                show(measured)
                rows = isinstance(measured, list)
                figures[part] = [row.to_json() for row in measured] if rows else measured.to_json()
            if file is not None:
                file.write_text(json.dumps(figures, indent=1, allow_nan=False), encoding="utf-8")
        print_line(f"all figures: {self.json or 'not saved; --json FILE saves them'}")
        return 0


@contextlib.contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """Show what is being measured, and for how long, in one line of a terminal; if stderr is no
    terminal, print a line for each network or operator."""
    console, shown = Console(stderr=True), ""

    def note(line: str) -> None:
        nonlocal shown
        subject = line.rpartition(": ")[0]  # "step: mode" of "step: mode: measuring"
        if subject != shown:
            print(f"{PROGRAM}: {line}", file=sys.stderr, flush=True)
        shown = subject

    if not console.is_terminal:
        yield note
        return
    columns = TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    # Once a second: a refresh takes time of the processor that is being measured.
    with Progress(*columns, console=console, transient=True, refresh_per_second=1) as status:
        task = status.add_task("starting", total=None)
        yield lambda line: status.reset(task, description=line)


def _split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _show_operator(rows: list[OperatorRow]) -> None:
    """Print bandwidth, time and memory of the operator: a table for each stair and precision."""
    for dtype, stair in dict.fromkeys((row.dtype, row.stair) for row in rows):
        chosen = [row for row in rows if (row.dtype, row.stair) == (dtype, stair)]
        copy = statistics.median(row.copy_bandwidth for row in chosen)
        is_slow = statistics.median(row.forward.median for row in chosen) > 1e-3
        unit, name = (1e3, "ms") if is_slow else (1e6, "µs")
        backward = (f"backward {name}", "of copy", "×ReLU", "kept", "peak")
        cells = (
            (
                row.noise,
                row.how,
                _median_and_spread(row.forward, unit),
                f"{row.forward_share:.1%}",
                _median_and_spread(row.backward, unit),
                f"{row.backward_share:.1%}",
                f"{row.times_relu:.2f}",
                f"{row.kept:g} B",
                f"{row.memory:.2f}×",
            )
            for row in chosen
        )
        title = f"{stair} on {chosen[0].elements:,} elements of {dtype}"
        title += f"; a copy moves {_number(copy / 1e9)} GB/s"
        names = (f"forward {name}", "of copy", *backward)
        print_table(title, ("noise", "how"), names, cells, boxed=False)


def _show_step(report: StepReport) -> None:
    """Print the training step of every network, compared with the float network."""
    augment = "no" if report.augment == "none" else report.augment
    rows = (
        (
            row.name if index else f"{row.name} (the twin)",
            row.treatment,
            _median_and_range(row.times, 1e3),
            _number(row.images_per_second),
            f"{row.ratio:.3f}",
            f"{_number(row.memory / 1e6)} MB",
            f"{row.memory_ratio:.2f}",
        )
        for index, row in enumerate(report.rows)
    )
    title = f"a training step of {report.model}, batches of {report.batch}, {report.precision}, "
    names = ("ms", "images/s", "of the twin's", "peak", "of the twin's")
    print_table(f"{title}{augment} augmentation", ("network", "how"), names, rows, boxed=False)
    for name, reason in report.skipped.items():
        print_line(f"{name}: not measured ({reason})")


def _show_partition(report: PartitionReport) -> None:
    """Print the phases of a schedule and their total."""
    rows = (
        (
            len(phase.annealed),
            phase.epochs,
            _median_and_range(phase.times, 1e3),
            _median_and_range(phase.static_times, 1e3),
            f"{phase.speed_up:.2f}",
            f"{phase.capture:.2f}",
        )
        for phase in report.phases
    )
    title = f"partition over {report.epochs} epochs of {report.preset}: {report.model}, "
    title += f"{report.forward}, batches of {report.batch}, {report.precision}, {report.treatment}"
    names = ("epochs", "ms", "static ms", "speed-up", "capture s")
    print_table(title, ("layers annealed",), names, rows, boxed=False)
    print_line(
        f"{report.images:,} images in {report.seconds:,.1f} s, captures included: "
        f"{_number(report.images_per_second)} images/s, {report.speed_up:.2f} times the static "
        f"run's {_number(report.static_images_per_second)}"
    )


def _show_exact(rows: list[ConvolutionRow]) -> None:
    """Print convolutions from int8, compared with bfloat16."""
    if not rows:
        print_line("exact: not measured (int8 convolutions need CUDA and triton)")
        return
    cells = (
        (
            f"{row.inputs} → {row.outputs}",
            f"{row.side}×{row.side}",
            _median_and_range(row.int8, 1e6),
            _median_and_range(row.bfloat16, 1e6),
            f"{row.ratio:.2f}",
            f"{row.wrong} of {row.sums:,}",
        )
        for row in rows
    )
    names = ("int8 µs", "bfloat16 µs", "speed-up", "wrong sums")
    title = "convolutions of integers, 3×3, moments included"
    print_table(title, ("channels", "pixels"), names, cells, boxed=False)


def _median_and_range(times: Times, unit: float) -> str:
    """Return the median, the least and the greatest time.

    >>> _median_and_range(Times((0.00012345, 0.0001, 0.0002)), 1e6)
    '123 (100–200)'
    """
    median = unit * times.median
    digits = _digits(median)
    return f"{median:.{digits}f} ({unit * times.least:.{digits}f}–{unit * times.most:.{digits}f})"


def _median_and_spread(times: Times, unit: float) -> str:
    """Return the median and half of the range, in per cent of the median."""
    half = (times.most - times.least) / (2 * times.median)
    return f"{_number(unit * times.median)} ±{half:.0%}"


def _number(value: float) -> str:
    """Return a number with three significant digits, or more before the point.

    >>> _number(118_800.0), _number(4.126)
    ('118,800', '4.13')
    """
    return f"{value:,.{_digits(value)}f}"


def _digits(value: float) -> int:
    return max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
