"""A training step beside that of the float network, and what truncation saves of a schedule.

The float twin has the same topology, batch, precision, optimiser and data, and is as fast as can
be: compiled, captured, channels-last, with cuDNN's kernels chosen by trial. The fastest variant is
the twin, and every other row is timed in turns with it. Baselines are the same network quantised
by a plain autograd function ("naive") and by Brevitas.

For truncation, the step with 0, 1, …, n layers annealed is timed beside one with static noise. The
seconds of a schedule are those of its steps and captures, each measured once per phase and added
up. Evaluation and checkpoints are not included.
"""

import contextlib
import gc
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from benchmarks.speed.clock import Effort, Record, Times, race
from benchmarks.speed.workload import (
    StepRunner,
    Workload,
    brevitas_network,
    naive_network,
    workload,
)
from softstair._errors import first_line, is_out_of_memory
from softstair.anneal import SMALLEST_STD
from softstair.data.batches import Examples
from softstair.regularise import FORWARDS
from softstair.train import Recipe
from softstair.train.network import stair_network
from softstair.train.settings import choose_threads, training_settings

FIRST_STEP = "first step, which may compile kernels"
"""End of the line that ``progress`` is called with before the first step of a network."""


@dataclass(frozen=True)
class StepRow(Record):
    """A network's step and the twin's, timed in turns, and the peak memory of both in bytes."""

    name: str
    treatment: str
    times: Times
    twin_times: Times
    batch: int
    memory: int
    twin_memory: int

    @property
    def images_per_second(self) -> float:
        return self.batch / self.times.median

    @property
    def ratio(self) -> float:
        """Images per second relative to the twin."""
        return self.twin_times.median / self.times.median

    @property
    def memory_ratio(self) -> float:
        """Peak memory relative to the twin."""
        return self.memory / self.twin_memory


@dataclass(frozen=True)
class StepReport(Record):
    """The rows, the twin's first; ``skipped`` maps what could not be measured to the reason."""

    model: str
    batch: int
    precision: str
    augment: str
    threads: int
    rows: list[StepRow]
    skipped: dict[str, str]


def measure_step(
    device: torch.device | str,
    model: str = "vgg8",
    batch: int = 256,
    precision: str = "fast",
    augment: str = "none",
    tune: bool = False,
    effort: Effort | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> StepReport:
    """Measure the training step with every forward under static noise, beside the float twin's.

    ``precision`` and ``augment`` are those of ``softstair train``. With ``tune``, the compiler also
    tries out kernels for the twin, which takes minutes. ``progress`` is called with a line such as
    "step: mode: measuring" before each piece of work.
    """
    device = torch.device(device)
    effort = effort or Effort.on(device)
    load = workload(model)
    common = {"precision": precision, "augment": augment, "static_mean": True, "static_std": True}
    recipe = load.recipe(batch, **common)
    skipped: dict[str, str] = {}
    rows = []

    def build(name: str, start: Callable[[], StepRunner]) -> StepRunner | None:
        progress(f"step: {name}: {FIRST_STEP}")
        try:
            return start()
        except Exception as error:
            if name in ("float", *FORWARDS) or is_out_of_memory(error):
                raise
            skipped[name] = f"{type(error).__name__}: {first_line(error)}"
            return None

    with _bench_settings(load, recipe, device):
        networks = _Networks(load, recipe, load.examples(batch, effort.calls, device), device)
        runners = {}
        for name, start in networks.floats(tune).items():
            if runner := build(name, start):
                runners[name] = runner
        progress(f"step: {', '.join(runners)}: measuring")
        times = _race(runners, device, effort)
        names = sorted(times, key=lambda name: times[name].median)
        twin, twin_times = runners[names[0]], times[names[0]]
        memory = {name: runners[name].memory() for name in names}
        for name in names:
            figures = times[name], twin_times, batch, memory[name], memory[names[0]]
            rows.append(StepRow(name, runners[name].treatment, *figures))
        del runners, runner
        for name, start in networks.quantised(skipped).items():
            if runner := build(name, start):
                progress(f"step: {name}: measuring")
                peak = runner.memory()
                pair = _race({"twin": twin, "other": runner}, device, effort)
                figures = pair["other"], pair["twin"], batch, peak, rows[0].memory
                rows.append(StepRow(name, runner.treatment, *figures))
            del runner
            gc.collect()  # frees a graph's memory before the next is captured
        precision, threads = twin.state.execution.precision, torch.get_num_threads()
        return StepReport(model, batch, precision, augment, threads, rows, skipped)


Starts = dict[str, Callable[[], StepRunner]]
"""Functions that prepare the training of a network, by its name."""


@dataclass(frozen=True)
class _Networks:
    """The networks to measure."""

    load: Workload
    recipe: Recipe
    examples: Examples
    device: torch.device

    def floats(self, tune: bool) -> Starts:
        start = partial(self._start, self._float_recipe)
        if self.device.type != "cuda":
            return {"float": start}
        starts: Starts = {"float compiled": partial(start, compiler="default"), "float": start}
        if tune:
            starts["float tuned"] = partial(start, compiler="max-autotune-no-cudagraphs")
        return starts

    def quantised(self, skipped: dict[str, str]) -> Starts:
        starts: Starts = {}
        example = torch.zeros(2, *self.load.shape)
        for forward in FORWARDS:
            recipe = self.recipe.replace(forward=forward)
            quantise = partial(stair_network, recipe=recipe, example=example)
            starts[forward] = partial(self._start, recipe, quantise)
        weights, features = (
            self.recipe.network.stair("weights"),
            self.recipe.network.stair("features"),
        )
        assert weights is not None
        assert features is not None
        eager = self._float_recipe.replace(capture="never")
        baselines = {"naive": naive_network, "Brevitas": brevitas_network}
        if importlib.util.find_spec("brevitas") is None:
            skipped["Brevitas"] = "not installed"
            del baselines["Brevitas"]
        for name, baseline in baselines.items():
            quantise = partial(baseline, weights=weights, features=features)
            starts[name] = partial(self._start, eager, quantise)
        return starts

    @property
    def _float_recipe(self) -> Recipe:
        return self.recipe.replace(weights="float", features="float", compile="never")

    def _start(
        self,
        recipe: Recipe,
        quantise: Callable[[nn.Module], nn.Module] = lambda network: network,
        compiler: str | None = None,
    ) -> StepRunner:
        network = quantise(self.load.network())
        return StepRunner(recipe, network, self.examples, self.device, compiler)


def _race(runners: dict[str, StepRunner], device: torch.device, effort: Effort) -> dict[str, Times]:
    """Time steps in turns, each sample from the start of an epoch."""
    return race(runners, device, effort, before=lambda name: runners[name].rewind())


@contextlib.contextmanager
def _bench_settings(load: Workload, recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Set seed, threads, device and precision as in a training run, and restore them afterwards."""
    with training_settings(recipe, device):
        torch.manual_seed(0)
        if device.type == "cpu":
            torch.set_num_threads(choose_threads(load.network(), recipe.run.batch))
        yield


@dataclass(frozen=True)
class Phase(Record):
    """Epochs in which the same layers are annealed, and the seconds of a step and of a capture."""

    annealed: tuple[int, ...]
    epochs: int
    times: Times
    static_times: Times  # of the step with static noise beside it
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

    @property
    def images(self) -> int:
        """Images seen in the whole schedule."""
        return self.epochs * self.steps * self.batch

    @property
    def seconds(self) -> float:
        """Seconds of the schedule with truncation, captures included."""
        return sum(
            phase.epochs * self.steps * phase.times.median + phase.capture for phase in self.phases
        )

    @property
    def static_seconds(self) -> float:
        """Seconds of as many epochs with static noise, captures included."""
        steps = sum(phase.epochs * self.steps * phase.static_times.median for phase in self.phases)
        return steps + self.static_capture

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds

    @property
    def static_images_per_second(self) -> float:
        return self.images / self.static_seconds

    @property
    def speed_up(self) -> float:
        return self.static_seconds / self.seconds


def spans(recipe: Recipe, layers: int) -> dict[tuple[int, ...], range]:
    """Return the layers that are annealed in a recipe's schedule, and the epochs in which they
    are, in order."""
    schedule = recipe.schedule(layers)
    epochs: dict[tuple[int, ...], range] = {}
    for epoch in range(recipe.run.epochs):
        stds = [schedule(layer, float(epoch))[1] for layer in range(layers)]
        annealed = tuple(layer for layer, std in enumerate(stds) if std < SMALLEST_STD)
        epochs[annealed] = range(epochs.get(annealed, range(epoch, 0)).start, epoch + 1)
    return epochs


def measure_partition(
    device: torch.device | str,
    model: str = "vgg8",
    batch: int = 256,
    precision: str = "fast",
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
    recipes = {"static": dynamic.replace(static_std=True), "partition": dynamic}
    with _bench_settings(load, dynamic, device):
        examples = load.examples(batch, effort.calls, device)
        runners = {}
        for name, recipe in recipes.items():
            progress(f"partition: {name}: {FIRST_STEP}")
            network = stair_network(load.network(), recipe, torch.zeros(2, *load.shape))
            runners[name] = StepRunner(recipe, network, examples, device)
        static, partition = runners["static"], runners["partition"]
        assert partition.state.annealer is not None
        layers = partition.state.annealer.layers
        phases: list[Phase] = []
        for annealed, epochs in spans(dynamic, layers).items():
            progress(f"partition: {len(annealed)} of {layers} layers annealed: measuring")
            # In the first phase it was compiled and captured when it was created.
            first_step = partition.go_to(epochs.start) if phases else partition.seconds
            times = _race(runners, device, effort)
            capture = _capture(first_step, times["partition"], partition)
            figures = times["partition"], times["static"], capture
            phases.append(Phase(annealed, len(epochs), *figures))
        return PartitionReport(
            model=model,
            preset=load.preset,
            forward=forward,
            batch=batch,
            precision=static.state.execution.precision,
            augment=augment,
            treatment=partition.treatment,
            threads=torch.get_num_threads(),
            epochs=dynamic.run.epochs,
            steps=max(1, load.images // batch),
            phases=phases,
            static_capture=_capture(static.seconds, phases[0].static_times, static),
        )


def _capture(first_step: float, times: Times, runner: StepRunner) -> float:
    """Return the seconds of a capture: those of the first step beyond a usual one."""
    return max(0.0, first_step - times.median) if runner.state.execution.captured else 0.0
