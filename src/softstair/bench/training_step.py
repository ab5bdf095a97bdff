"""A whole training step with every forward, beside that of the float network.

The float twin has the same topology, batch, precision, optimiser and data, and is as fast as can
be: compiled, captured, channels-last, with cuDNN's kernels chosen by trial. The fastest variant is
the twin, and every other row is timed in turns with it. Baselines are the same network quantised
by a plain autograd function ("naive") and by Brevitas.
"""

import contextlib
import gc
import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from softstair._errors import first_line
from softstair.bench.clock import Effort, Record, Times, is_out_of_memory, race
from softstair.bench.workload import StepRunner, Workload, workload
from softstair.data.batches import Examples
from softstair.models import last_layer
from softstair.regularise import FORWARDS
from softstair.stair import Stair
from softstair.train.execution import choose_threads, training_settings
from softstair.train.network import stair_network
from softstair.train.recipe import Recipe

__all__ = ["StepReport", "StepRow", "brevitas_network", "measure_step", "naive_network"]


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
    precision: str = "auto",
    augment: str = "none",
    tune: bool = False,
    effort: Effort | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> StepReport:
    """Measure the training step with every forward under static noise, beside the float twin's.

    ``precision`` and ``augment`` are those of ``softstair train``. With ``tune``, the compiler also
    tries out kernels for the twin, which takes minutes.
    """
    device = torch.device(device)
    effort = effort or Effort.on(device)
    load = workload(model)
    common = {"precision": precision, "augment": augment, "static_mean": True, "static_std": True}
    recipe = load.recipe(batch, **common)
    skipped: dict[str, str] = {}
    rows = []
    with bench_settings(load, recipe, device):
        build = partial(_build, load, load.examples(batch, effort.calls, device), device, skipped)
        runners = {}
        with _cudnn_benchmark():
            for variant in _float_variants(recipe, device, tune):
                progress(f"step: {variant.name}")
                if runner := build(variant):
                    runners[variant.name] = runner
        times = race_steps(runners, device, effort)
        names = sorted(times, key=lambda name: times[name].median)
        twin, twin_times = runners[names[0]], times[names[0]]
        with _cudnn_benchmark():
            memory = {name: runners[name].memory() for name in names}
        for name in names:
            figures = times[name], twin_times, batch, memory[name], memory[names[0]]
            rows.append(StepRow(name, runners[name].treatment, *figures))
        del runners, runner
        for variant in _quantised_variants(load, recipe, skipped):
            progress(f"step: {variant.name}")
            if runner := build(variant):
                peak = runner.memory()
                pair = race_steps({"twin": twin, "other": runner}, device, effort)
                figures = pair["other"], pair["twin"], batch, peak, rows[0].memory
                rows.append(StepRow(variant.name, runner.treatment, *figures))
            del runner
            gc.collect()  # frees a graph's memory before the next is captured
        precision, threads = twin.state.execution.precision, torch.get_num_threads()
        return StepReport(model, batch, precision, augment, threads, rows, skipped)


class _Variant(NamedTuple):
    """A network to measure: how it is made of the float network, and how it is trained."""

    name: str
    recipe: Recipe
    quantise: Callable[[nn.Module], nn.Module] = lambda network: network
    compiler: str | None = None
    required: bool = True


def _float_variants(recipe: Recipe, device: torch.device, tune: bool) -> Iterator[_Variant]:
    recipe = replace(recipe, weights="float", features="float", compile="never")
    if device.type == "cuda":
        yield _Variant("float compiled", recipe, compiler="default", required=False)
    yield _Variant("float", recipe)
    if device.type == "cuda" and tune:
        mode = "max-autotune-no-cudagraphs"
        yield _Variant("float tuned", recipe, compiler=mode, required=False)


def _quantised_variants(
    load: Workload, recipe: Recipe, skipped: dict[str, str]
) -> Iterator[_Variant]:
    example = torch.zeros(2, *load.shape)
    for forward in FORWARDS:
        own = replace(recipe, forward=forward)
        yield _Variant(forward, own, partial(stair_network, recipe=own, example=example))
    weights, features = recipe.stair("weights"), recipe.stair("features")
    assert weights is not None
    assert features is not None
    eager = replace(recipe, weights="float", features="float", compile="never", capture="never")
    baselines = {"naive": naive_network, "Brevitas": brevitas_network}
    if importlib.util.find_spec("brevitas") is None:
        skipped["Brevitas"] = "not installed"
        del baselines["Brevitas"]
    for name, baseline in baselines.items():
        quantise = partial(baseline, weights=weights, features=features)
        yield _Variant(name, eager, quantise, required=False)


def _build(
    load: Workload,
    examples: Examples,
    device: torch.device,
    skipped: dict[str, str],
    variant: _Variant,
) -> StepRunner | None:
    """Return the runner of a variant; None, with the reason in ``skipped``, if it fails."""
    try:
        network = variant.quantise(load.network())
        return StepRunner(variant.recipe, network, examples, device, variant.compiler)
    except Exception as error:
        if variant.required or is_out_of_memory(error):
            raise
        skipped[variant.name] = f"{type(error).__name__}: {first_line(error)}"
        return None


def race_steps(
    runners: dict[str, StepRunner], device: torch.device, effort: Effort
) -> dict[str, Times]:
    """Time steps in turns, each sample from the start of an epoch."""
    return race(runners, device, effort, before=lambda name: runners[name].rewind())


@contextlib.contextmanager
def bench_settings(load: Workload, recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Set seed, threads, device and precision as in a training run, and restore them afterwards."""
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with training_settings(recipe, device), on_device:
        torch.manual_seed(0)
        if device.type == "cpu":
            torch.set_num_threads(choose_threads(load.network(), recipe.batch))
        yield


@contextlib.contextmanager
def _cudnn_benchmark() -> Iterator[None]:
    """Let cuDNN choose its kernels by trial."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


class _RoundSTE(torch.autograd.Function):
    """Rounds to multiples of a quantum, with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantum: float, low: int, high: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bounds = (low - 0.5) * quantum, (high + 0.5) * quantum
        return torch.clamp(torch.round(x / quantum), low, high) * quantum

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        low, high = ctx.bounds
        return grad * ((x >= low) & (x <= high)), None, None, None


class _Rounding(nn.Module):
    def __init__(self, stair: Stair) -> None:
        super().__init__()
        assert stair.integers is not None  # the stairs of presets have equal rises
        self.settings = stair.quantum, min(stair.integers), max(stair.integers)

    def forward(self, x: Tensor) -> Tensor:
        return _RoundSTE.apply(x, *self.settings)


def naive_network(network: nn.Module, weights: Stair, features: Stair) -> nn.Module:
    """Round every ReLU's input and all weights but the last layer's, in place."""
    last = last_layer(network)
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.ReLU):
            network.set_submodule(name, _Rounding(features))
        elif isinstance(module, nn.Conv2d | nn.Linear) and name != last:
            parametrize.register_parametrization(module, "weight", _Rounding(weights))
    return network


def brevitas_network(network: nn.Module, weights: Stair, features: Stair) -> nn.Module:
    """Replace layers by those of Brevitas with as many levels, except the last, in place."""
    layers = importlib.import_module("brevitas.nn")
    quantisers = importlib.import_module("brevitas.quant")
    weight_bits, bits = (math.ceil(math.log2(len(s.levels))) for s in (weights, features))
    settings = {"weight_quant": quantisers.SignedTernaryWeightPerTensorConst}
    if len(weights.levels) != 3:
        settings = {"weight_quant": quantisers.Int8WeightPerTensorFloat}
        settings["weight_bit_width"] = weight_bits
    ternary = {"act_quant": quantisers.SignedTernaryActPerTensorConst}
    unsigned = {"act_quant": quantisers.Uint8ActPerTensorFloat, "bit_width": bits}
    last = last_layer(network)
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.ReLU) and len(features.levels) == 3:
            network.set_submodule(name, layers.QuantIdentity(**ternary))
        elif isinstance(module, nn.ReLU):
            network.set_submodule(name, layers.QuantReLU(**unsigned))
        elif isinstance(module, nn.Conv2d) and name != last:
            names = ("in_channels", "out_channels", "kernel_size", "stride", "padding")
            copied = {name: getattr(module, name) for name in (*names, "dilation", "groups")}
            conv = layers.QuantConv2d(**copied, bias=module.bias is not None, **settings)
            network.set_submodule(name, conv)
        elif isinstance(module, nn.Linear) and name != last:
            sizes, bias = (module.in_features, module.out_features), module.bias is not None
            network.set_submodule(name, layers.QuantLinear(*sizes, bias=bias, **settings))
    return network
