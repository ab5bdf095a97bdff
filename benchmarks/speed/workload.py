"""A training workload: a network and its baselines, random examples, and a repeatable step."""

import importlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from benchmarks.speed.clock import elapsed, peak_memory, tensor_bytes
from softstair import Stair, _check
from softstair.data.batches import Examples
from softstair.models import build, last_layer
from softstair.train import Recipe, preset
from softstair.train.captured import optimiser_tensors
from softstair.train.execution import Compiled
from softstair.train.fit import Step
from softstair.train.recipe import PresetName
from softstair.train.state import State
from softstair.train.teacher import Teacher

BATCH = (2, 4096)
"""Smallest batch (for batch-norm) and largest."""


@dataclass(frozen=True)
class Workload:
    """A network of the paper and its training."""

    model: str
    preset: PresetName  # the recipe with its schedule and stairs
    shape: tuple[int, int, int]  # (channels, height, width) of an example
    classes: int
    images: int  # training examples of a fold

    def network(self) -> nn.Module:
        """Return the float network, with the same weights every time."""
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            return build(self.model, self.classes, self.shape)

    def recipe(self, batch: int, **settings: Any) -> Recipe:
        """Return the preset with this batch and settings."""
        _check.integer("batch", batch, *BATCH)
        return preset(self.preset).replace(model=self.model, batch=batch, **settings)

    def examples(self, batch: int, calls: int, device: torch.device) -> Examples:
        """Return random bytes: an epoch's number of examples on CUDA, four batches on a CPU."""
        count = max(self.images, batch * calls) if device.type == "cuda" else 4 * batch
        generator = torch.Generator(device).manual_seed(0)
        shape = (count, *self.shape)
        x = torch.randint(256, shape, dtype=torch.uint8, generator=generator, device=device)
        y = torch.randint(self.classes, (count,), generator=generator, device=device)
        return Examples(x, y, mean=128.0, std=64.0, device=device)


WORKLOADS = {
    # Images: 4/5 of CIFAR-10's 50,000, of the 36,923 examples of Speech Commands v0.02 drawn for
    # twelve classes, and of the 1,797 digits.
    "vgg8": Workload("vgg8", "paper-cifar10", (3, 32, 32), 10, images=40_000),
    "resnet20": Workload("resnet20", "paper-cifar10", (3, 32, 32), 10, images=40_000),
    "dscnn": Workload("dscnn", "paper-speech", (1, 49, 10), 12, images=29_538),
    "digits": Workload("digits", "digits", (1, 8, 8), 10, images=1_437),
}


def workload(model: str) -> Workload:
    """Return the workload of a model."""
    return WORKLOADS[_check.choice("model", model, WORKLOADS)]


class StepRunner:
    """Trains a network as ``softstair train`` does, one step per call, at a fixed epoch.

    ``compiler`` is the mode of torch.compile for the network instead of what the recipe says;
    ``seconds`` is the duration of the first step, with compiling and capturing.
    """

    def __init__(
        self,
        recipe: Recipe,
        network: nn.Module,
        examples: Examples,
        device: torch.device,
        compiler: str | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        self.examples, self.device, self.epoch = examples, device, 0
        self.state = State(recipe, network, len(examples), device)
        self.state.teacher = teacher
        self._compiler = compiler
        if compiler is not None:
            # Compiled with the conversion of its input to the layout of the tensor cores.
            network = self.state.network
            channels_last = lambda x: network(x.contiguous(memory_format=torch.channels_last))
            self.state.forward = torch.compile(channels_last, mode=compiler)
        self.step = self._new_step()
        self.seconds = self.go_to(0)

    def __call__(self) -> None:
        if self.state.step == self.state.steps:
            self.rewind()
        self.step()

    def rewind(self) -> None:
        """Go back to the start of the epoch, with another order of the examples."""
        state = self.state
        state.step, state.order = 0, None
        state.begin_epoch()
        if state.annealer is not None:
            state.annealer.steps = self.epoch * state.steps

    def go_to(self, epoch: int) -> float:
        """Set the epoch of the schedule and return the seconds of the first step there."""
        self.epoch = epoch
        self.rewind()
        return elapsed(self, self.device)

    def memory(self) -> int:
        """Return the peak bytes of a step: parameters, optimiser and activations, not examples."""
        state = self.state
        del self.step
        state.optimiser.zero_grad()
        kept: list[Tensor] = [*state.network.parameters(), *state.network.buffers()]
        kept += optimiser_tensors(state)
        # A new step, captured again: memory that compiling needed is not counted.
        self.step = self._new_step()
        self.rewind()
        known = [*kept, self.examples.x, self.examples.y, state.loss, state.correct]
        return tensor_bytes(kept) + peak_memory(self, self.device, known)

    @property
    def treatment(self) -> str:
        """How steps run: fused, with products in FP8, compiled, tuned, captured or eager."""
        state, words = self.state, []
        if state.execution.fused:
            words += ["fused", "FP8"] if state.execution.precision == "float8" else ["fused"]
        elif self._compiler is not None or isinstance(state.forward, Compiled):
            words.append("compiled" if self._compiler in (None, "default") else "tuned")
        words += ["captured"] if state.execution.captured else []
        return ", ".join(words) or "eager"

    def _new_step(self) -> Step:
        return Step(self.state, self.examples)


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
