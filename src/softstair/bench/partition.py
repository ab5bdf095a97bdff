"""What truncation saves: the step with 0, 1, …, n layers annealed, beside one that is never cut.

Over a schedule, the seconds of its steps and of its captures add up; the seconds of each are
measured, the sum is arithmetic. Evaluation and checkpoints are not in it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from softstair.anneal import SMALLEST_STD
from softstair.bench.clock import Times, race
from softstair.bench.contestant import Contestant
from softstair.bench.effort import Effort
from softstair.bench.step import EXAMPLE, chosen
from softstair.bench.subject import subject
from softstair.train.machine import own_settings, threads_for
from softstair.train.network import stair_network
from softstair.train.recipe import Recipe

__all__ = ["Phase", "Report", "Span", "measure", "spans"]


@dataclass(frozen=True)
class Span:
    """Epochs of a schedule in which the same layers are annealed; the learning rate may drop."""

    annealed: tuple[int, ...]
    first: int
    epochs: int
    rates: int
    """Different learning rates: a captured step is captured anew for each."""


def spans(recipe: Recipe, layers: int) -> list[Span]:
    """The spans of a recipe, in order.

    >>> from softstair.train.presets import preset
    >>> found = spans(replace(preset("paper-cifar10"), static_std=False), layers=7)
    >>> [one.epochs for one in found], found[-1].rates
    ([50, 50, 50, 50, 50, 50, 50, 150], 2)
    """
    schedule = recipe.schedule(layers)
    gone: list[tuple[int, ...]] = []
    for epoch in range(recipe.epochs):
        stds = [schedule(layer, float(epoch))[1] for layer in range(layers)]
        gone.append(tuple(layer for layer, std in enumerate(stds) if std < SMALLEST_STD))
    starts = [
        epoch for epoch in range(recipe.epochs) if not epoch or gone[epoch] != gone[epoch - 1]
    ]
    found = []
    for start, end in zip(starts, [*starts[1:], recipe.epochs], strict=True):
        rates = {recipe.learning_rate_at(float(epoch)) for epoch in range(start, end)}
        found.append(Span(gone[start], start, end - start, len(rates)))
    return found


@dataclass(frozen=True)
class Phase:
    """A span, the seconds of a step in it and of the static twin's in the same race, and those of a
    capture beyond its step."""

    span: Span
    times: Times
    static: Times
    capture: float

    @property
    def speed_up(self) -> float:
        return self.static.median / self.times.median

    def to_json(self) -> dict[str, Any]:
        """Plain data; times in seconds."""
        return {
            "annealed": list(self.span.annealed),
            "epochs": self.span.epochs,
            "rates": self.span.rates,
            "times": self.times.to_json(),
            "static_times": self.static.to_json(),
            "capture": self.capture,
            "speed_up": self.speed_up,
        }


@dataclass(frozen=True)
class Report:
    """The phases of a schedule, and what they come to over all of it."""

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
    """In an epoch."""
    phases: list[Phase]
    static_capture: float
    static_rates: int

    @property
    def images(self) -> int:
        """Over the whole schedule."""
        return self.epochs * self.steps * self.batch

    @property
    def seconds(self) -> float:
        """Of the schedule with truncation, its captures included."""
        return sum(
            one.span.epochs * self.steps * one.times.median + one.span.rates * one.capture
            for one in self.phases
        )

    @property
    def static_seconds(self) -> float:
        """Of as many epochs without, its captures included."""
        steps = sum(one.span.epochs * self.steps * one.static.median for one in self.phases)
        return steps + self.static_rates * self.static_capture

    @property
    def speed_up(self) -> float:
        """Images over seconds with truncation, as a multiple of those without."""
        return self.static_seconds / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Plain data; times in seconds."""
        plain = ("model", "preset", "forward", "batch", "precision", "augment", "treatment")
        more = ("threads", "epochs", "steps", "static_capture", "static_rates")
        derived = ("images", "seconds", "static_seconds", "speed_up")
        return {
            **{name: getattr(self, name) for name in (*plain, *more, *derived)},
            "images_per_second": self.images / self.seconds,
            "static_images_per_second": self.images / self.static_seconds,
            "phases": [one.to_json() for one in self.phases],
        }


def measure(
    device: torch.device | str,
    model: str = "vgg8",
    batch: int = 256,
    precision: str = "auto",
    augment: str = "none",
    forward: str = "mode",
    effort: Effort | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Report:
    """The schedule of the model's preset by partition, phase by phase, beside static noise.

    >>> effort = Effort(repeats=1, calls=1, seconds=0.0, elements=1)
    >>> report = measure("cpu", "digits", batch=8, effort=effort)
    >>> [phase.span.annealed for phase in report.phases]
    [(), (0,), (0, 1), (0, 1, 2)]
    """
    device = torch.device(device)
    effort = effort or Effort.on(device)
    one = subject(model)
    common = {"precision": precision, "augment": augment, "forward": forward, "static_mean": True}
    moving = one.recipe(batch, static_std=False, interval="partition", truncate=True, **common)
    still = replace(moving, static_std=True)
    with own_settings(moving, device), chosen(device):
        torch.manual_seed(0)
        if device.type == "cpu":
            torch.set_num_threads(threads_for(one.network(), batch))
        examples = one.examples(batch, effort.calls, device)
        made = {}
        for name, recipe in (("static", still), ("partition", moving)):
            tell(f"partition: {name}")
            network = stair_network(one.network(), recipe, torch.zeros(EXAMPLE, *one.shape))
            made[name] = Contestant(recipe, network, examples, device)
        annealer = made["partition"].state.annealer
        assert annealer is not None
        phases: list[Phase] = []
        for span in spans(moving, annealer.layers):
            tell(f"partition: {len(span.annealed)} of {annealer.layers} layers annealed")
            # Already there in the first span, where it was compiled and captured when it was made.
            first = made["partition"].seconds if not phases else made["partition"].go_to(span.first)
            times = race(made, device, effort, before=lambda name: made[name].rewind())
            capture = _beyond(first, times["partition"], made["partition"])
            phases.append(Phase(span, times["partition"], times["static"], capture))
        return Report(
            model=model,
            preset=one.preset,
            forward=forward,
            batch=batch,
            precision=made["static"].state.treatment.precision,
            augment=augment,
            treatment=made["partition"].treatment,
            threads=torch.get_num_threads(),
            epochs=moving.epochs,
            steps=max(1, one.images // batch),
            phases=phases,
            static_capture=_beyond(made["static"].seconds, phases[0].static, made["static"]),
            static_rates=sum(one.rates for one in spans(still, annealer.layers)),
        )


def _beyond(first: float, times: Times, contestant: Contestant) -> float:
    """What a capture cost beyond the step that it began with; nothing where there is none."""
    return max(0.0, first - times.median) if contestant.state.treatment.captured else 0.0
