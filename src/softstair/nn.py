"""Layers of a quantised network: activations and weights that carry their noise.

:class:`StairActivation` replaces an activation. :class:`StairLinear`, :class:`StairConv2d` and the
other layers are torch's with a :class:`StairWeight` between the parameter and the sum. Parameters
keep their names, so that float checkpoints load.

In ``train()`` they compute :func:`softstair.regularise`. In ``eval()`` they compute the stair
without noise and sum over integers, which the quanta multiply afterwards. The sums are exact if the
incoming features are integer multiples of a quantum too.
"""

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softstair import _check, kernels
from softstair import noise as noises
from softstair.kernels import SoftStair
from softstair.noise import Noise
from softstair.regularise import FORWARDS, Forward, regularise
from softstair.stair import Stair

__all__ = [
    "StairActivation",
    "StairConv1d",
    "StairConv2d",
    "StairConv3d",
    "StairConvTranspose2d",
    "StairLayer",
    "StairLinear",
    "StairModule",
    "StairWeight",
    "layer_count",
    "stair_modules",
]


class StairModule(nn.Module):
    """A stair with its noise: the base class of :class:`StairActivation` and :class:`StairWeight`.

    Args:
        stair: The stair.
        noise: A family of noise, or its name.
        forward: What it computes in training; see :func:`softstair.regularise`.
        layer: The number of its quantised layer, in order of execution.
        mean: The first mean of the noise, in quanta.
        std: The first standard deviation, in quanta; by default 95 % of the noise is within half a
            quantum.
        scheduled: Whether an annealer moves the noise; not that of a straight-through estimator.

    Attributes:
        annealed: Whether the noise is gone. The output then has no gradient and stores none.
    """

    mean: Tensor
    std: Tensor
    quantum: Tensor

    def __init__(
        self,
        stair: Stair,
        noise: Noise | str = "uniform",
        forward: Forward = "mode",
        layer: int = 0,
        mean: float = 0.0,
        std: float | None = None,
        scheduled: bool = True,
    ) -> None:
        super().__init__()
        _check.choice("forward", forward, FORWARDS)
        self.noise = noises.get(noise)
        std = self.noise.std_within(0.5) if std is None else std
        if not isinstance(stair, Stair):
            raise _check.wrong("stair", stair, "a softstair.Stair")
        _check.integer("layer", layer, 0)
        _check.number("mean", mean)
        _check.number("std", std, 0)
        self.stair, self.strategy, self.layer = stair, forward, layer
        self.scheduled, self.annealed = scheduled, False
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32))
        self.register_buffer("quantum", torch.tensor(stair.quantum, dtype=torch.float32))

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return kernels.hard(input, self.stair)
        mean = self._absolute(self.mean, input)
        if self.annealed:
            forward = "hard" if self.strategy == "hard" else "mode"
            soft = SoftStair(self.stair, self.noise, mean, 0.0)
            return kernels.value(input.detach(), soft, forward)
        std = self._absolute(self.std, input)
        return regularise(input, self.stair, self.noise, mean, std, self.strategy)

    def _absolute(self, quanta: Tensor, x: Tensor) -> Tensor:
        """Return a number of quanta in the units of x."""
        unit = self.stair.quantum
        if isinstance(unit, float):
            return quanta if unit == 1.0 else quanta * unit
        by_channel = kernels.channel_quanta(self.stair, x)
        assert by_channel is not None
        return quanta * by_channel.to(quanta.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the noise with the network, in float32: bfloat16 would round the schedule."""
        buffers = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, before in buffers.items():
            after = self._buffers[name]
            if after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Load the buffers, which a checkpoint of the float network does not have."""
        if not any(key.rpartition(".")[2] == "std" for key in state_dict):
            return
        for child in self._modules:  # the later calls, which older checkpoints do not tell apart
            if f"{prefix}{child}.std" not in state_dict:
                stored = [key for key in self._buffers if f"{prefix}{key}" in state_dict]
                state_dict |= {f"{prefix}{child}.{k}": state_dict[f"{prefix}{k}"] for k in stored}
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        own = torch.tensor(self.stair.quantum, dtype=torch.float32)
        loaded = self.quantum.detach().cpu()
        if loaded.shape == own.shape and not torch.equal(loaded, own):
            self._load_quantum(loaded.double(), prefix, arguments[-1])

    def _load_quantum(self, quantum: Tensor, prefix: str, errors: list[str]) -> None:
        """Report a quantum for which the layers that take these features were not built."""
        self.quantum.copy_(torch.tensor(self.stair.quantum, dtype=torch.float32))
        errors.append(
            f"the quantum of {prefix.rstrip('.')} must be {self.stair.quantum!r}, the network's, "
            f"but the checkpoint has {quantum.tolist()!r}; quantise the model with that one."
        )

    def extra_repr(self) -> str:
        kind = type(self.noise).__name__.lower()
        return f"{self.stair}, noise={kind}, forward={self.strategy}, layer={self.layer}"


class StairActivation(StairModule):
    """The quantised features of a layer: a stair instead of an activation function.

    >>> activation = StairActivation(Stair.ternary(), "uniform").eval()
    >>> activation(torch.tensor([-0.7, 0.2, 0.9]))
    tensor([-1.,  0.,  1.])
    """


class StairWeight(StairModule):
    """The quantised weights of a layer: a stair between the parameter and the sum.

    Its state holds ``quantum``, which a fit may have chosen, and ``shifted``: whether the weights
    were moved by the first mean of their noise.
    """

    shifted: Tensor

    def __init__(self, stair: Stair, *arguments: Any, **settings: Any) -> None:
        super().__init__(stair, *arguments, **settings)
        self.register_buffer("shifted", torch.tensor(False))

    def integers(self, weight: Tensor) -> Tensor | None:
        """Return the weights in quanta, as integers in weight's dtype; None if they are not."""
        levels = self.stair.integers
        if levels is None:
            return None
        index = kernels.index(weight, self.stair)
        if all(b - a == levels[1] - levels[0] for a, b in pairwise(levels)):
            return (index * (levels[1] - levels[0]) + levels[0]).to(weight.dtype)
        return torch.tensor(levels, device=weight.device)[index].to(weight.dtype)

    def scale(self, weight: Tensor, behind: int) -> float | Tensor:
        """Return the quantum, or one per output channel with ``behind`` dimensions after it."""
        if isinstance(self.stair.quantum, float):
            return self.stair.quantum
        quanta = torch.tensor(self.stair.quantum, dtype=weight.dtype, device=weight.device)
        return quanta.reshape(-1, *[1] * behind)

    @torch.no_grad()
    def shift(self, weight: Tensor, mean: float) -> None:
        """Move the weights by the first mean of their noise, once in the life of the network."""
        if not bool(self.shifted):
            weight.add_(self._absolute(torch.tensor(mean, device=weight.device), weight))
            self.shifted.fill_(True)

    def _load_quantum(self, quantum: Tensor, prefix: str, errors: list[str]) -> None:
        """Take the quantum of a fit, which is part of the trained state."""
        self.stair = self.stair.with_quantum(quantum.tolist(), self.stair.axis)


class StairLayer(nn.Module):
    """A layer with quantised weights: the base class of the layers below.

    Args:
        weight_stair: The stair of the weights.
        input_quantum: The quantum of which the incoming features are integer multiples, if they
            are. In ``eval()`` the layer then sums integers only.

    All other arguments are those of torch's layer.
    """

    weight: Tensor
    bias: Any
    weight_stair: StairWeight
    input_quantum: float | None
    widest_input: int = 255  # quanta of the largest feature: decides whether float32 holds the sums
    sum_dimensions = 0  # dimensions after the output's channels
    output_axis: int | None = 0  # of the weights; None if quanta cannot differ between outputs

    def __init__(
        self,
        *arguments: Any,
        weight_stair: StairWeight,
        input_quantum: float | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        self._attach(weight_stair, input_quantum)

    @classmethod
    def from_float(
        cls, module: nn.Module, weight_stair: StairWeight, input_quantum: float | None = None
    ) -> Any:
        """Return the layer with the parameters, hooks and settings of a float one."""
        layer = cls.__new__(cls)
        layer.__dict__ = module.__dict__.copy()
        layer._modules = dict(module._modules)
        device = module.get_parameter("weight").device
        layer._attach(weight_stair.train(module.training).to(device), input_quantum)
        return layer

    def _attach(self, weight_stair: StairWeight, input_quantum: float | None) -> None:
        axis = weight_stair.stair.axis
        if axis not in (None, self.output_axis):
            place = "one quantum" if self.output_axis is None else "their quanta along axis 0"
            raise _check.invalid(
                "weights", f"of a {type(self).__name__} must have {place}, but axis is {axis}"
            )
        self.weight_stair, self.input_quantum = weight_stair, input_quantum

    @property
    def inputs_per_sum(self) -> int:
        """The number of products of one sum."""
        return math.prod(self.weight.shape[1:])

    def _sum(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise TypeError(f"{type(self).__name__} does not say how it sums.")

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            return self._sum(input, self.weight_stair(self.weight), self.bias)
        weight = self.weight_stair.integers(self.weight)
        if weight is None:
            return self._sum(input, self.weight_stair(self.weight), self.bias)
        if self.input_quantum is None:
            total = self._sum(input, weight, None)
        else:
            total = self._integer_sum(input, weight)
        return self.rescale(total).to(input.dtype)

    def rescale(self, total: Tensor) -> Tensor:
        """Return the output for a sum over integer weights: times the quanta, plus the bias."""
        scale = self.weight_stair.scale(self.weight, self.sum_dimensions)
        if self.input_quantum is not None:
            scale = scale * self.input_quantum
        if isinstance(scale, Tensor) or scale != 1.0:
            total = total * scale
        if self.bias is not None:
            total = total + self.bias.reshape(-1, *[1] * self.sum_dimensions)
        return total

    def _integer_sum(self, features: Tensor, weight: Tensor) -> Tensor:
        """Return the exact sum of integers, in float32, which holds them up to 2²⁴, or float64."""
        levels = self.weight_stair.stair.integers or (0,)
        largest = max(-levels[0], levels[-1]) * self.inputs_per_sum * self.widest_input
        wide = largest >= 2**24 or features.dtype == torch.float64
        dtype = torch.float64 if wide else torch.float32
        if not wide and (total := self._int8_sum(features, weight)) is not None:
            return total
        quanta = features.to(dtype) / (self.input_quantum or 1.0)
        # Features are n·ε rounded once: the nearest integer is n. The gradient is the identity's.
        integers = quanta.detach().round() + (quanta - quanta.detach())
        with torch.autocast(features.device.type, enabled=False):
            total = self._sum(integers, weight.to(dtype), None)
        return total if features.dtype == torch.float64 else total.float()

    def _int8_sum(self, features: Tensor, weight: Tensor) -> Tensor | None:
        """Return the same sum from int8 operands, or None if there is no faster way."""
        return None

    @torch.no_grad()
    def start_at_thresholds(self) -> None:
        """Set the weights to ε·(θ + U(−s, s)), with θ drawn from the thresholds in quanta.

        s = 1/√(inputs of a sum), not divided by the groups, as in the authors' code.
        """
        stair, weight = self.weight_stair.stair, self.weight
        inputs = self.inputs_per_sum * int(getattr(self, "groups", 1))
        unit = stair.quantum if isinstance(stair.quantum, float) else 1.0
        thresholds = torch.tensor([t / unit for t in stair.thresholds])
        choice = torch.randint(len(thresholds), weight.shape)
        start = thresholds[choice] + (2 * torch.rand(weight.shape) - 1) / math.sqrt(inputs)
        scale = self.weight_stair.scale(start, weight.dim() - 1)
        weight.copy_(start * scale)


class StairLinear(StairLayer, nn.Linear):
    """:class:`torch.nn.Linear` with quantised weights."""

    def _sum(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)


class StairConv1d(StairLayer, nn.Conv1d):
    """:class:`torch.nn.Conv1d` with quantised weights."""

    sum_dimensions = 1

    def _sum(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._conv_forward(x, weight, bias)


class StairConv2d(StairLayer, nn.Conv2d):
    """:class:`torch.nn.Conv2d` with quantised weights."""

    sum_dimensions = 2

    def _int8_sum(self, features: Tensor, weight: Tensor) -> Tensor | None:
        levels = self.weight_stair.stair.integers or (128,)
        small = max(-levels[0], levels[-1]) < 128
        has_gradient = torch.is_grad_enabled() and (features.requires_grad or weight.requires_grad)
        if has_gradient or not small or self.widest_input > 127 or self.padding_mode != "zeros":
            return None
        geometry = (self.stride, self.padding, self.dilation, self.groups)
        if features.dim() != 4 or not kernels.can_convolve_int8(features, *geometry):
            return None
        quanta = (features / (self.input_quantum or 1.0)).round()
        return kernels.convolve_int8(quanta, weight, int(self.padding[0]))

    def _sum(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._conv_forward(x, weight, bias)


class StairConv3d(StairLayer, nn.Conv3d):
    """:class:`torch.nn.Conv3d` with quantised weights."""

    sum_dimensions = 3

    def _sum(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._conv_forward(x, weight, bias)


class StairConvTranspose2d(StairLayer, nn.ConvTranspose2d):
    """:class:`torch.nn.ConvTranspose2d` with quantised weights, which have one quantum."""

    sum_dimensions = 2
    output_axis = None

    @property
    def inputs_per_sum(self) -> int:
        return int(self.weight[:, 0].numel()) // self.groups

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if output_size is not None:
            raise _check.wrong("output_size", output_size, "None; set output_padding")
        return StairLayer.forward(self, input)

    def _sum(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding: Any = self.padding
        more = (self.output_padding, self.groups, self.dilation)
        return F.conv_transpose2d(x, weight, bias, self.stride, padding, *more)


def stair_modules(net: nn.Module) -> Iterator[tuple[str, StairModule]]:
    """Yield each stair of a network, of weights and of features, with its name."""
    for name, module in net.named_modules():
        if isinstance(module, StairModule):
            yield name, module


def layer_count(net: nn.Module) -> int:
    """Return the number of quantised layers of a network.

    Raises:
        ValueError: If there are none.
    """
    layers = [module.layer for _, module in stair_modules(net)]
    if not layers:
        raise _check.invalid(
            "net", f"must be a quantised network, but {type(net).__name__} has no stairs"
        )
    return max(layers) + 1
