"""``softstair bench``: how fast it is here, each figure beside a twin measured in the same run."""

import contextlib
import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from softstair._errors import SoftstairError
from softstair.bench.clock import REPEATS, Effort, is_out_of_memory
from softstair.bench.workload import BATCH
from softstair.cli._files import reserved
from softstair.regularise import Forward

__all__ = ["PARTS", "Command"]

PARTS = ("operator", "step", "partition", "exact")
ELEMENTS = (1, 1 << 31)
SMALL_BATCHES = {"vgg8": 16, "dscnn": 64, "digits": 64}
"""On a CPU, where a batch of the paper's takes seconds."""


@dataclass(frozen=True)
class Command:
    """Measures how fast softstair is on this machine, each figure beside a twin in the same run.

    The operator: bandwidth as a share of a copy's, time as a multiple of ReLU's. The training step:
    images a second and peak memory of every forward, beside those of the float network, which is
    made as fast as can be, and of other ways to train a quantised one. Partition: what ending the
    backward pass at annealed layers saves over a whole schedule. Exact: convolutions of whole
    numbers from int8 beside bfloat16 ones, on a GPU.
    Exit code 0: measured; 2: an error.
    """

    what: str = "operator,step,partition,exact"
    """Which parts, separated by commas: operator, step, partition, exact."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto: a GPU if there is one."""
    model: Literal["auto", "vgg8", "dscnn", "digits"] = "auto"
    """Network of step and partition; auto: vgg8 on a GPU, digits on a CPU."""
    batch: int | None = None
    """Examples in a batch; None: 256 on a GPU, fewer on a CPU."""
    precision: Literal["auto", "float32", "tf32", "bfloat16"] = "auto"
    """Of the steps, the twin's too; auto: bfloat16 on a GPU that has it, else float32."""
    augment: Literal["none", "crop", "crop-flip", "shift"] = "none"
    """Augmentation in the steps, the twin's too."""
    forward: Forward = "mode"
    """Forward of partition; step measures them all."""
    stairs: str | None = None
    """Stairs of operator, separated by commas, int4@0.07 with a quantum of their own; None:
    heaviside,ternary,int4,int4@0.07 (--quick: ternary)."""
    elements: int | None = None
    """Of operator's tensor; None: 33,554,432 on a GPU, 1,048,576 on a CPU (--quick: fewer)."""
    tune: bool = False
    """Let the compiler also try out kernels for the float twin: takes minutes."""
    repeats: int | None = None
    """Samples of each; None: 7 on a GPU, 5 on a CPU (--quick: fewer)."""
    quick: bool = False
    """Little of everything: to see that it works, not to quote."""
    json: Path | None = None
    """Write every figure there, as JSON."""

    def __post_init__(self) -> None:
        parts = self.parts()
        unknown = [part for part in parts if part not in PARTS]
        if unknown or not parts:
            raise ValueError(
                f"--what must be one or more of {', '.join(PARTS)}, separated by commas, but "
                f"{self.what!r} was given."
            )
        if self.stairs is not None and not _words(self.stairs):
            raise ValueError(
                "--stairs must be one or more stairs such as ternary or int4@0.07, separated by "
                f"commas, but {self.stairs!r} was given."
            )
        ranges = {"batch": BATCH, "repeats": REPEATS, "elements": ELEMENTS}
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"--{name} must be from {low} to {high}, but {value} was given.")

    def parts(self) -> list[str]:
        """The parts that are asked for."""
        return _words(self.what)

    def run(self) -> int:
        from softstair.bench import about
        from softstair.cli import _bench_tables
        from softstair.train.execution import choose_device

        device = choose_device(self.device)
        batch, model = self._subject(device.type)
        effort = Effort.on(device, self.quick, self.repeats)
        if self.elements is not None:
            effort = replace(effort, elements=self.elements)
        self._check(device, model, batch)
        with reserved(self.json, "--json") as text:
            found: dict[str, Any] = {"command": self.line(), **about(device)}
            show = _bench_tables.Tables(found)
            for part in PARTS:
                if part in self.parts():
                    with _enough_memory(device, batch), show.waiting() as progress:
                        measured = self._measure(part, device, model, batch, effort, progress)
                    getattr(show, part)(measured)
                    found[part] = _plain(measured)
            if text is not None:
                text.write_text(json.dumps(found, indent=1, allow_nan=False), encoding="utf-8")
        show.farewell(self.json)
        return 0

    def _subject(self, device: str) -> tuple[int, str]:
        model = self.model
        if model == "auto":
            model = "vgg8" if device == "cuda" else "digits"
        usual = 256 if device == "cuda" else SMALL_BATCHES[model]
        return self.batch or usual, model

    def _check(self, device: Any, model: str, batch: int) -> None:
        """Refuses before anything is measured what would be refused after the first part."""
        from softstair.bench.operators import bench_stair
        from softstair.bench.workload import workload

        recipe = workload(model).recipe(batch, precision=self.precision, augment=self.augment)
        recipe.precision_on(device)
        for name in _words(self.stairs or ""):
            bench_stair(name)

    def _measure(
        self,
        part: str,
        device: Any,
        model: str,
        batch: int,
        effort: Effort,
        progress: Callable[[str], None],
    ) -> Any:
        from softstair.bench import (
            measure_exact,
            measure_operator,
            measure_partition,
            measure_step,
        )

        if part == "operator":
            stairs = None if self.stairs is None else _words(self.stairs)
            return measure_operator(device, effort, stairs, progress=progress)
        if part == "exact":
            return measure_exact(device, batch, effort, progress)
        common = (device, model, batch, self.precision, self.augment)
        if part == "step":
            return measure_step(*common, tune=self.tune, effort=effort, progress=progress)
        return measure_partition(*common, forward=self.forward, effort=effort, progress=progress)

    def line(self) -> str:
        """The command line, without flags that have their defaults."""
        words = ["softstair", "bench"]
        for field in fields(self):
            value = getattr(self, field.name)
            if value is True:
                words.append(f"--{field.name}")
            elif value != field.default:
                words += [f"--{field.name}", str(value)]
        return shlex.join(words)


@contextlib.contextmanager
def _enough_memory(device: Any, batch: int) -> Iterator[None]:
    """Turn the error of an allocator into one that names the flags to change."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise SoftstairError(
            f"not enough memory on {device} for the measurement: give a --batch below {batch}, or "
            "--quick."
        ) from None


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _plain(measured: Any) -> Any:
    if isinstance(measured, list):
        return [row.to_json() for row in measured]
    return measured.to_json()
