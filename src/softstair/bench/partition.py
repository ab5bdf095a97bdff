"""What truncation saves: the step with 0, 1, …, n layers annealed, beside one with static noise.

The seconds of a schedule are those of its steps and captures, each measured once per phase and
added up. Evaluation and checkpoints are not included.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from softstair.anneal import SMALLEST_STD
from softstair.bench.clock import Effort, Record, Times
from softstair.bench.training_step import bench_settings, race_steps
from softstair.bench.workload import StepRunner, workload
from softstair.train.network import stair_network
from softstair.train.recipe import Recipe

__all__ = ["PartitionReport", "Phase", "Span", "measure_partition", "spans"]


class Span(NamedTuple):
    """Epochs of a schedule in which the same layers are annealed."""

    annealed: tuple[int, ...]
    first: int
    epochs: int
    rates: int  # number of different learning rates: a step is captured again for each


@dataclass(frozen=True)
class Phase(Record):
    """A span with the seconds of a step, of the static step beside it, and of a capture."""

    annealed: tuple[int, ...]
    epochs: int
    rates: int
    times: Times
    static_times: Times
    capture: float

    @property
    def speed_up(self) -> float:
        return self.static_times.median / self.times.median


@dataclass(frozen=True)
class PartitionReport(Record):
    """The phases of a schedule and their sums; ``steps`` is the number of steps per epoch."""

    model: str
    preset: str
    forward: str
    batch: int
    precision: str
    augment: str
    treatment: str
    threads: int
    epochs: int
    steps: int
    phases: list[Phase]
    static_capture: float
    static_rates: int

    @property
    def images(self) -> int:
        """Images seen in the whole schedule."""
        return self.epochs * self.steps * self.batch

    @property
    def seconds(self) -> float:
        """Seconds of the schedule with truncation, captures included."""
        return sum(
            phase.epochs * self.steps * phase.times.median + phase.rates * phase.capture
            for phase in self.phases
        )

    @property
    def static_seconds(self) -> float:
        """Seconds of as many epochs with static noise, captures included."""
        steps = sum(phase.epochs * self.steps * phase.static_times.median for phase in self.phases)
        return steps + self.static_rates * self.static_capture

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds

    @property
    def static_images_per_second(self) -> float:
        return self.images / self.static_seconds

    @property
    def speed_up(self) -> float:
        return self.static_seconds / self.seconds


def spans(recipe: Recipe, layers: int) -> list[Span]:
    """Return the spans of a recipe's schedule, in order."""
    schedule = recipe.schedule(layers)
    annealed = []
    for epoch in range(recipe.epochs):
        stds = [schedule(layer, float(epoch))[1] for layer in range(layers)]
        annealed.append(tuple(layer for layer, std in enumerate(stds) if std < SMALLEST_STD))
    parts = []
    for layers_annealed in dict.fromkeys(annealed):
        first, epochs = annealed.index(layers_annealed), annealed.count(layers_annealed)
        rates = {recipe.learning_rate_at(float(first + i)) for i in range(epochs)}
        parts.append(Span(layers_annealed, first, epochs, len(rates)))
    return parts


def measure_partition(
    device: torch.device | str,
    model: str = "vgg8",
    batch: int = 256,
    precision: str = "auto",
    augment: str = "none",
    forward: str = "mode",
    effort: Effort | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> PartitionReport:
    """Measure the partition schedule of the model's preset, phase by phase, beside static noise.

    ``forward`` is that of both networks; other arguments are those of ``measure_step``.
    """
    device = torch.device(device)
    effort = effort or Effort.on(device)
    load = workload(model)
    common = {"precision": precision, "augment": augment, "forward": forward, "static_mean": True}
    dynamic = load.recipe(batch, static_std=False, interval="partition", truncate=True, **common)
    recipes = {"static": replace(dynamic, static_std=True), "partition": dynamic}
    with bench_settings(load, dynamic, device):
        examples = load.examples(batch, effort.calls, device)
        runners = {}
        for name, recipe in recipes.items():
            progress(f"partition: {name}")
            network = stair_network(load.network(), recipe, torch.zeros(2, *load.shape))
            runners[name] = StepRunner(recipe, network, examples, device)
        static, partition = runners["static"], runners["partition"]
        assert partition.state.annealer is not None
        layers = partition.state.annealer.layers
        phases: list[Phase] = []
        for span in spans(dynamic, layers):
            progress(f"partition: {len(span.annealed)} of {layers} layers annealed")
            # In the first span it was compiled and captured when it was created.
            first_step = partition.go_to(span.first) if phases else partition.seconds
            times = race_steps(runners, device, effort)
            capture = _capture(first_step, times["partition"], partition)
            figures = times["partition"], times["static"], capture
            phases.append(Phase(span.annealed, span.epochs, span.rates, *figures))
        return PartitionReport(
            model=model,
            preset=load.preset,
            forward=forward,
            batch=batch,
            precision=static.state.execution.precision,
            augment=augment,
            treatment=partition.treatment,
            threads=torch.get_num_threads(),
            epochs=dynamic.epochs,
            steps=max(1, load.images // batch),
            phases=phases,
            static_capture=_capture(static.seconds, phases[0].static_times, static),
            static_rates=sum(span.rates for span in spans(recipes["static"], layers)),
        )


def _capture(first_step: float, times: Times, runner: StepRunner) -> float:
    """Return the seconds of a capture: those of the first step beyond a usual one."""
    return max(0.0, first_step - times.median) if runner.state.execution.captured else 0.0
