"""A whole training step, of every forward, beside that of the float network.

The float twin has the same topology, batch, precision, optimiser and data, and is made as fast as
can be: compiled, captured, channels-last, cuDNN's kernels chosen by trial. Of several ways the
fastest is the twin, and every other row is measured in turns with it.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from softstair.bench.clock import Times, race
from softstair.bench.contestant import Contestant
from softstair.bench.effort import Effort
from softstair.bench.machine import is_out_of_memory, reason
from softstair.bench.rivals import Rival, brevitas_network, has_brevitas, naive_network
from softstair.bench.subject import Subject, subject
from softstair.data.batches import Examples
from softstair.regularise import FORWARDS
from softstair.train.machine import own_settings, threads_for
from softstair.train.network import stair_network
from softstair.train.recipe import Recipe

__all__ = ["EXAMPLE", "Report", "Row", "chosen", "measure"]

EXAMPLE = 2
"""Examples in the batch of zeros by which a network is looked through."""


@dataclass(frozen=True)
class Row:
    """A network's step: how it ran, its seconds, those of the twin in the same race, its memory."""

    name: str
    treatment: str
    times: Times
    twin: Times
    batch: int
    memory: int
    twin_memory: int

    @property
    def images_per_second(self) -> float:
        return self.batch / self.times.median

    @property
    def ratio(self) -> float:
        """Its images a second over the twin's."""
        return self.twin.median / self.times.median

    @property
    def memory_ratio(self) -> float:
        """Its peak over the twin's."""
        return self.memory / self.twin_memory

    def to_json(self) -> dict[str, Any]:
        """Plain data; times in seconds, memory in bytes."""
        plain = ("name", "treatment", "images_per_second", "ratio", "memory", "memory_ratio")
        times = {"times": self.times.to_json(), "twin_times": self.twin.to_json()}
        return {**{name: getattr(self, name) for name in plain}, **times}


@dataclass(frozen=True)
class Report:
    """What was measured: the first row is the twin; ``skipped`` says why others are missing."""

    model: str
    batch: int
    precision: str
    augment: str
    threads: int
    rows: list[Row]
    skipped: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        plain = ("model", "batch", "precision", "augment", "threads", "skipped")
        rows = [row.to_json() for row in self.rows]
        return {**{name: getattr(self, name) for name in plain}, "rows": rows}


def measure(
    device: torch.device | str,
    model: str = "vgg8",
    batch: int = 256,
    precision: str = "auto",
    augment: str = "none",
    tune: bool = False,
    effort: Effort | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Report:
    """The step of every forward under static noise, of the float twin, and of rivals.

    ``tune`` lets the compiler try out kernels for the twin, which takes minutes.

    >>> effort = Effort(repeats=1, calls=1, seconds=0.0, elements=1, quick=True)
    >>> report = measure("cpu", "digits", batch=8, effort=effort)
    >>> [row.name for row in report.rows][:3]
    ['float', 'expectation', 'mode']
    """
    device = torch.device(device)
    effort = effort or Effort.on(device)
    one = subject(model)
    recipe = one.recipe(
        batch, precision=precision, augment=augment, static_mean=True, static_std=True
    )
    with own_settings(recipe, device), chosen(device):
        torch.manual_seed(0)
        if device.type == "cpu":
            torch.set_num_threads(threads_for(one.network(), batch))
        examples = one.examples(batch, effort.calls, device)
        skipped: dict[str, str] = {}
        twin, rows = _twin(one, recipe, examples, device, effort, tune, skipped, tell)
        report = Report(
            model=model,
            batch=batch,
            precision=twin.state.treatment.precision,
            augment=augment,
            threads=torch.get_num_threads(),
            rows=rows,
            skipped=skipped,
        )
        memory = rows[0].memory
        for name, make in _others(one, recipe, examples, device, skipped):
            tell(f"step: {name}")
            other = make() if name in FORWARDS else _tried(name, make, skipped)
            if other is None:
                continue
            held = other.memory()
            times = _race({"twin": twin, name: other}, device, effort)
            row = Row(name, other.treatment, times[name], times["twin"], batch, held, memory)
            report.rows.append(row)
            del other, make
            gc.collect()  # a graph's memory goes before the next one is captured
    return report


def _twin(
    one: Subject,
    recipe: Recipe,
    examples: Examples,
    device: torch.device,
    effort: Effort,
    tune: bool,
    skipped: dict[str, str],
    tell: Callable[[str], None],
) -> tuple[Contestant, list[Row]]:
    """The fastest float network, and a row for each way that was tried, the fastest first."""
    never = replace(recipe, weights="float", features="float", compile="never")
    ways: dict[str, str | None] = {"float": None}
    if device.type == "cuda":
        ways = {"float compiled": "default", **ways}
        if tune:
            ways["float tuned"] = "max-autotune-no-cudagraphs"
    floats: dict[str, Contestant] = {}
    for name, compiler in ways.items():
        tell(f"step: {name}")
        with _trials():

            def make(compiler: str | None = compiler) -> Contestant:
                return Contestant(never, one.network(), examples, device, compiler)

            found = make() if name == "float" else _tried(name, make, skipped)
        if found is not None:
            floats[name] = found
    times = _race(floats, device, effort)
    order = sorted(times, key=lambda name: times[name].median)
    with _trials():
        memory = {name: floats[name].memory() for name in order}
    rows = [
        Row(
            name=name,
            treatment=floats[name].treatment,
            times=times[name],
            twin=times[order[0]],
            batch=recipe.batch,
            memory=memory[name],
            twin_memory=memory[order[0]],
        )
        for name in order
    ]
    return floats[order[0]], rows


def _others(
    one: Subject,
    recipe: Recipe,
    examples: Examples,
    device: torch.device,
    skipped: dict[str, str],
) -> Iterator[tuple[str, Callable[[], Contestant]]]:
    """Every other network by its name, and how to make it."""
    example = torch.zeros(EXAMPLE, *one.shape)
    for forward in FORWARDS:
        ours = replace(recipe, forward=forward)

        def make(ours: Recipe = ours) -> Contestant:
            return Contestant(ours, stair_network(one.network(), ours, example), examples, device)

        yield forward, make
    eager = replace(recipe, weights="float", features="float", compile="never", capture="never")
    weights, features = recipe.stair("weights"), recipe.stair("features")
    assert weights is not None
    assert features is not None
    rivals = {"naive": naive_network, "Brevitas": brevitas_network}
    if not has_brevitas():
        skipped["Brevitas"] = "not installed"
        del rivals["Brevitas"]
    for name, rival in rivals.items():

        def make_rival(rival: Rival = rival) -> Contestant:
            network = rival(one.network(), weights, features)
            return Contestant(eager, network, examples, device)

        yield name, make_rival


def _race(
    contestants: dict[str, Contestant], device: torch.device, effort: Effort
) -> dict[str, Times]:
    return race(contestants, device, effort, before=lambda name: contestants[name].rewind())


def _tried(name: str, make: Callable[[], Contestant], skipped: dict[str, str]) -> Contestant | None:
    """A contestant that may fail for reasons of its own: then it is named as missing."""
    try:
        return make()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        skipped[name] = reason(error)
        return None


@contextlib.contextmanager
def _trials() -> Iterator[None]:
    """cuDNN tries its kernels out and takes the fastest."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextlib.contextmanager
def chosen(device: torch.device) -> Iterator[None]:
    """The device, if it is one of several."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        yield
