"""The optimiser of a training: its options, groups of parameters, learning rates and clipping."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from softstair import _check
from softstair.convert.conversion import ATTRIBUTE, conversion_of
from softstair.nn import StairLayer, stair_modules
from softstair.schedule import Schedule
from softstair.train.options import POSITIVE, RATE, SHARE, TIME, check_values, option

INSIDE = 1 - 1e-4
"""Of the half-width of the noise: latent weights that are clipped keep a positive density."""
DEFAULT_LATENT_RATE = 0.03
"""Of latent weights whose stairs are given by name, in quanta."""


@dataclass(frozen=True)
class OptimiserOptions:
    """The loss, the optimiser that lowers it, and its learning rates."""

    name: Literal["adam", "adamw", "sgd", "nesterov"] = option(
        "adam",
        "Adam, AdamW (decoupled weight decay), or SGD with momentum or Nesterov's.",
        flat="optimiser",
    )
    learning_rate: float = option(1e-3, "Initial learning rate.", within=RATE)
    latent_rate: float | None = option(
        None,
        "Initial learning rate of latent weights, in quanta (None: the learning rate; with bits "
        "and Adam, 0.03).",
        within=RATE,
    )
    norm_rate: float = option(
        1.0,
        "Factor of the learning rate of normalisations and biases, but those of the last layer.",
        within=RATE,
    )
    rate_shape: Literal["drop", "cosine", "linear", "flat-then-linear"] = option(
        "drop",
        "Learning rate over the run: one drop, or a fall to 0 along a cosine or a line; "
        "flat-then-linear begins to fall after 60 % of the run.",
    )
    warm_up: float = option(
        0.0, "Epochs in which the learning rate rises from 0.", "scales_with_epochs", within=TIME
    )
    momentum: float = option(0.9, "Momentum of sgd and nesterov.", within=(0.0, 0.999999))
    weight_decay: float = option(0.0, "Weight decay.", within=RATE)
    norm_decay: float | None = option(
        None, "Weight decay of normalisations and biases (None: as of weights).", within=RATE
    )
    clip_gradient: float | None = option(
        None, "Largest norm of the gradient (None: any).", within=POSITIVE
    )
    clip_latent: bool = option(
        False, "Clip latent weights after each step to where the initial noise has a density."
    )
    label_smoothing: float = option(
        0.0, "Share of each label spread over all classes.", within=(0.0, 0.999)
    )
    loss: str | None = option(None, "Your own loss, package.module:object.", "own_code")
    drop: float | None = option(
        32.0, "Epoch of the drop (None: never).", "scales_with_epochs", within=TIME
    )
    drop_factor: float = option(0.1, "Factor by which the learning rate drops.", within=RATE)
    teacher: str | None = option(
        None, "Learn the scores of a float run too: its directory, or auto."
    )
    teacher_weight: float = option(0.9, "Weight of the teacher in the loss.", within=SHARE)
    temperature: float = option(
        4.0, "Divisor of all scores before the softmax.", within=(1e-3, 1e6)
    )

    def rate_factor(self, t: float, epochs: int) -> float:
        """Return the factor of all initial learning rates at time ``t`` of a run, in epochs.

        >>> [OptimiserOptions(rate_shape="linear").rate_factor(t, epochs=4) for t in (0, 1, 4)]
        [1.0, 0.75, 0.0]
        """
        left = max(1 - t / epochs, 0.0)
        factors = {
            "drop": self.drop_factor if self.drop is not None and t >= self.drop else 1.0,
            "cosine": 0.5 * (1 - math.cos(math.pi * left)),
            "linear": left,
            "flat-then-linear": min(left / 0.4, 1.0),
        }
        warm = min(t / self.warm_up, 1.0) if self.warm_up else 1.0
        return factors[self.rate_shape] * warm

    def latent_rate_for(self, quantum: float, has_bits: bool = False) -> float:
        """Return the initial learning rate of latent weights whose stair has this quantum.

        A step of Adam is as large as its rate. A step of SGD is not: with w = ε·u, ε the quantum,
        the step −r·∂L/∂u of u is the step −r·ε²·∂L/∂w of w.
        """
        is_adam = self.name.startswith("adam")
        rate = self.latent_rate
        if rate is None and has_bits and is_adam:
            rate = DEFAULT_LATENT_RATE
        return self.learning_rate if rate is None else rate * quantum ** (1 if is_adam else 2)

    def __post_init__(self) -> None:
        check_values(self)
        if self.name == "nesterov" and not self.momentum:
            raise _check.wrong("momentum", 0, "above 0 with nesterov")
        for name, default in (("teacher_weight", 0.9), ("temperature", 4.0)):
            if self.teacher is None and (value := getattr(self, name)) != default:
                raise _check.wrong(name, value, "left out, or given with a `teacher`")


def parameter_groups(
    network: nn.Module, options: OptimiserOptions, has_bits: bool = False
) -> list[dict[str, Any]]:
    """Return the parameters of a network in groups of equal initial learning rate and decay.

    Latent weights are those with as many levels as most have; of equally many, as the last has.
    If no option changes a rate or a decay, there is one group. ``has_bits`` says whether stairs
    are given by name, without quanta.
    """
    rate = options.learning_rate
    norm_decay = options.weight_decay if options.norm_decay is None else options.norm_decay
    layers = _layers(network)
    rates: dict[Tensor, float] = {}
    for parameter in network.parameters():
        rates[parameter] = rate * options.norm_rate if parameter.dim() < 2 else rate
    for layer in layers[-1:]:
        rates |= {parameter: rate for parameter in layer.parameters()}
    quantised = [layer for layer in layers if isinstance(layer, StairLayer)]
    counts = Counter(len(layer.weight_stair.stair) for layer in reversed(quantised))
    for layer in layers:
        own = layer.weight_stair if layer in quantised else None
        if own is not None and len(own.stair) == counts.most_common(1)[0][0]:
            rates[layer.weight] = options.latent_rate_for(
                float(own.quantum.double().mean()), has_bits
            )
    stairs = [stair for _, stair in stair_modules(network)]
    learned = {stair.log_ratio for stair in stairs if stair.log_ratio is not None}
    rates |= dict.fromkeys(learned, rate)
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for parameter in network.parameters():
        decay = norm_decay if parameter.dim() < 2 else options.weight_decay
        decay = 0.0 if parameter in learned else decay
        groups.setdefault((rates[parameter], decay), []).append(parameter)
    return [
        {"params": parameters, "lr": rate, "weight_decay": decay}
        for (rate, decay), parameters in groups.items()
    ]


def _layers(network: nn.Module) -> list[Any]:
    """Return the layers with weights in order of execution; of a float network, of the modules."""
    modules = dict(network.named_modules())
    names = list(modules)
    if hasattr(network, ATTRIBUTE):
        names = [row.name for row in conversion_of(network).rows]
    kinds = nn.Linear | nn.Conv1d | nn.Conv2d
    return [modules[name] for name in names if isinstance(modules.get(name), kinds)]


def make_optimiser(
    network: nn.Module,
    options: OptimiserOptions,
    device: torch.device,
    has_bits: bool = False,
) -> torch.optim.Optimizer:
    """Return the optimiser; on a GPU it is fused and can be captured in a graph."""
    cuda = device.type == "cuda"
    groups = parameter_groups(network, options, has_bits)
    if options.name in ("adam", "adamw"):
        kind = torch.optim.Adam if options.name == "adam" else torch.optim.AdamW
        return kind(groups, fused=cuda, capturable=cuda)
    nesterov = options.name == "nesterov"
    return torch.optim.SGD(groups, momentum=options.momentum, nesterov=nesterov, fused=cuda)


Bounds = tuple[float, float] | tuple[Tensor, Tensor]
"""The smallest and the largest latent weight of a layer, or of each of its channels; in quanta if
these are learned."""


def latent_bounds(network: nn.Module, schedule: Schedule) -> dict[str, Bounds]:
    """Return by layer the range of latent weights in which the first noise has a density.

    It is [θ₁ − h, θₙ + h], with the first and the last threshold of the layer's stair, and h the
    half-width of the first noise of the schedule, or of the layer's estimator; of an unbounded
    family, that which holds 95 %. A mean of the noise moves the range; one that changes widens it.
    Layers whose estimator has a slope however far from the thresholds are left out.
    """
    scheduled = (schedule.first_mean, schedule.first_mean if schedule.static_mean else 0.0)
    bounds: dict[str, Bounds] = {}
    for name, layer in network.named_modules():
        if isinstance(layer, StairLayer) and layer.weight_stair.noise.proper:
            own, stair = layer.weight_stair, layer.weight_stair.stair
            means = scheduled if own.scheduled else (float(own.mean),)
            std = schedule.std0 if own.scheduled else float(own.std)
            reach = std / own.noise.std_within(1.0) * INSIDE
            unit = stair.quantum if isinstance(stair.quantum, float) else 1.0
            scale = layer.weight_stair.scale(layer.weight, layer.weight.dim() - 1)
            scale = scale if layer.weight_stair.log_ratio is None else 1.0
            lowest = layer.weight.new_tensor(stair.thresholds[0] / unit + min(means) - reach)
            highest = layer.weight.new_tensor(stair.thresholds[-1] / unit + max(means) + reach)
            low, high = lowest * scale, highest * scale
            # One vectorised pass clips to two numbers; tensors are broadcast, which is slower.
            bounds[name] = (low, high) if low.numel() > 1 else (float(low), float(high))
    return bounds


@torch.no_grad()
def clip_latent(network: nn.Module, bounds: Mapping[str, Bounds]) -> None:
    """Clip the latent weights of layers to their bounds, in place."""
    for name, bound in bounds.items():
        layer: Any = network.get_submodule(name)
        layer.weight.clamp_(*absolute_bounds(layer, bound))


def absolute_bounds(layer: StairLayer, bounds: Bounds) -> Bounds:
    """Return bounds of :func:`latent_bounds` in the units of the weights, as tensors if learned."""
    if layer.weight_stair.log_ratio is None:
        return bounds
    quanta = layer.weight_stair.present_quantum().detach()
    unit = quanta.reshape(-1, *[1] * (layer.weight.dim() - 1)) if quanta.dim() else quanta
    return bounds[0] * unit, bounds[1] * unit
