"""Layers of a stair network: activations and weights that carry their noise with them.

A :class:`StairActivation` stands where a network had its activation; :class:`StairLinear`,
:class:`StairConv1d` and :class:`StairConv2d` are torch's layers with a :class:`StairWeight` between
the parameter and the sum. Parameters keep their names, so a float checkpoint loads as it is.

In ``train()`` they are :func:`softstair.regularise`; in ``eval()`` the noise is gone: the hard
stair, and sums over whole numbers that the quanta multiply afterwards: exact wherever the incoming
features are whole multiples of a quantum too.
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
from softstair.regularise import Forward, check_forward, regularise
from softstair.stair import Stair

__all__ = [
    "StairActivation",
    "StairConv1d",
    "StairConv2d",
    "StairLayer",
    "StairLinear",
    "StairModule",
    "StairWeight",
    "layer_count",
    "stair_modules",
]


class StairModule(nn.Module):
    """A stair, a family of noise and the noise's present mean and std, in quanta, as buffers.

    ``layer`` is the number of the quantised layer it belongs to, input side first. ``annealed``
    says that the noise is gone: the output then has no gradient and stores none. ``scheduled`` is
    false for a straight-through estimator, whose noise no annealer moves.
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
        check_forward(forward)
        self.noise = noises.get(noise)
        std = self.noise.std_within(0.5) if std is None else std
        _check_stair(stair, layer, mean, std)
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
        """A number of quanta in the units of x."""
        unit = self.stair.quantum
        if isinstance(unit, float):
            return quanta if unit == 1.0 else quanta * unit
        by_channel = kernels.channel_quanta(self.stair, x)
        assert by_channel is not None
        return quanta * by_channel.to(quanta.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves with the network, but stays float32: bfloat16 would round the schedule."""
        held = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, before in held.items():
            after = self._buffers[name]
            if after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """A checkpoint of the float network has none of these buffers, and loads all the same."""
        if not any(key.rpartition(".")[2] == "std" for key in state_dict):
            return
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        # The buffer is the stair's quantum rounded to float32; only another one is news.
        mine = torch.tensor(self.stair.quantum, dtype=torch.float32)
        loaded = self.quantum.detach().cpu()
        if loaded.shape == mine.shape and not torch.equal(loaded, mine):
            self._adopt(loaded.double(), prefix, arguments[-1])

    def _adopt(self, quantum: Tensor, prefix: str, errors: list[str]) -> None:
        """Another quantum was loaded; the layers that take these features were built for mine."""
        self.quantum.copy_(torch.tensor(self.stair.quantum, dtype=torch.float32))
        errors.append(
            f"the quantum of {prefix.rstrip('.')} must be {self.stair.quantum!r}, the network's, "
            f"but the checkpoint has {quantum.tolist()!r}; quantise the model with that one."
        )

    def extra_repr(self) -> str:
        kind = type(self.noise).__name__.lower()
        return f"{self.stair}, noise={kind}, forward={self.strategy}, layer={self.layer}"


class StairActivation(StairModule):
    """The features of a layer: a stair in the place of an activation function.

    >>> activation = StairActivation(Stair.ternary(), "uniform").eval()
    >>> activation(torch.tensor([-0.7, 0.2, 0.9]))
    tensor([-1.,  0.,  1.])
    """


class StairWeight(StairModule):
    """The weights of a layer: a stair between the parameter and the sum.

    ``quantum`` (the stair's, which a fit may have chosen) and ``shifted`` (whether the weights were
    moved by the first mean of their noise) belong to the trained state and are saved with it.
    """

    shifted: Tensor

    def __init__(self, stair: Stair, *arguments: Any, **settings: Any) -> None:
        super().__init__(stair, *arguments, **settings)
        self.register_buffer("shifted", torch.tensor(False))

    def integers(self, weight: Tensor) -> Tensor | None:
        """The weights in quanta, whole numbers held in weight's dtype; None where they are not."""
        levels = self.stair.integers
        if levels is None:
            return None
        index = kernels.index(weight, self.stair)
        if all(b - a == levels[1] - levels[0] for a, b in pairwise(levels)):
            return (index * (levels[1] - levels[0]) + levels[0]).to(weight.dtype)
        return torch.tensor(levels, device=weight.device)[index].to(weight.dtype)

    def scale(self, weight: Tensor, behind: int) -> float | Tensor:
        """The quantum, or one for each output channel, with so many dimensions behind it."""
        if isinstance(self.stair.quantum, float):
            return self.stair.quantum
        quanta = torch.tensor(self.stair.quantum, dtype=weight.dtype, device=weight.device)
        return quanta.reshape(-1, *[1] * behind)

    @torch.no_grad()
    def shift(self, weight: Tensor, mean: float) -> None:
        """Moves the weights by the first mean of their noise, once in the life of the network."""
        if not bool(self.shifted):
            weight.add_(self._absolute(torch.tensor(mean, device=weight.device), weight))
            self.shifted.fill_(True)

    def _adopt(self, quantum: Tensor, prefix: str, errors: list[str]) -> None:
        """Another quantum was loaded: that of a fit, which is part of what was trained."""
        self.stair = self.stair.with_quantum(quantum.tolist(), self.stair.axis)


class StairLayer(nn.Module):
    """What the quantised layers share. ``input_quantum`` is the unit of which the incoming features
    are whole multiples, if they are: then the sums of ``eval()`` run over integers alone."""

    weight: Tensor
    bias: Any
    weight_stair: StairWeight
    input_quantum: float | None
    widest_input: int = 255
    """The most quanta that a feature holds, by which sums are judged to fit into float32."""
    sum_dimensions = 0
    """How many dimensions lie behind the output's channels."""

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
        """The layer with the parameters, hooks and settings of a float one, which it replaces."""
        layer = cls.__new__(cls)
        layer.__dict__ = module.__dict__.copy()
        layer._modules = dict(module._modules)
        place = module.get_parameter("weight").device
        layer._attach(weight_stair.train(module.training).to(place), input_quantum)
        return layer

    def _attach(self, weight_stair: StairWeight, input_quantum: float | None) -> None:
        axis = weight_stair.stair.axis
        if axis not in (None, 0):
            raise ValueError(
                "weights must have their quanta along axis 0, that of the outputs, since they "
                f"multiply whole sums, but axis={axis} was given."
            )
        self.weight_stair, self.input_quantum = weight_stair, input_quantum

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
        """What ``eval()`` makes of a sum over whole weights: the quanta multiply it once, and the
        bias is added."""
        scale = self.weight_stair.scale(self.weight, self.sum_dimensions)
        if self.input_quantum is not None:
            scale = scale * self.input_quantum
        if isinstance(scale, Tensor) or scale != 1.0:
            total = total * scale
        if self.bias is not None:
            total = total + self.bias.reshape(-1, *[1] * self.sum_dimensions)
        return total

    def _integer_sum(self, features: Tensor, weight: Tensor) -> Tensor:
        """The exact sum of whole numbers: in float32, which holds them up to 2²⁴, or else float64;
        never in the half precision of the features or of autocast."""
        levels = self.weight_stair.stair.integers or (0,)
        largest = max(-levels[0], levels[-1]) * math.prod(weight.shape[1:]) * self.widest_input
        wide = largest >= 2**24 or features.dtype == torch.float64
        dtype = torch.float64 if wide else torch.float32
        if not wide and (whole := self._exact_sum(features, weight)) is not None:
            return whole
        quanta = features.to(dtype) / (self.input_quantum or 1.0)
        # Features are n·ε rounded once: the nearest whole number is n. A gradient passes as it is.
        whole = quanta.detach().round() + (quanta - quanta.detach())
        with torch.autocast(features.device.type, enabled=False):
            total = self._sum(whole, weight.to(dtype), None)
        return total if features.dtype == torch.float64 else total.float()

    def _exact_sum(self, features: Tensor, weight: Tensor) -> Tensor | None:
        """The same sum from int8 operands, where something computes it faster so."""
        return None

    @torch.no_grad()
    def start_at_thresholds(self) -> None:
        """ε·(θ + U(−s, s)), θ a threshold in quanta drawn uniformly, s = 1/√(inputs of a sum); the
        inputs are not divided by the groups, as in the authors' code."""
        stair, weight = self.weight_stair.stair, self.weight
        inputs = math.prod(weight.shape[1:]) * int(getattr(self, "groups", 1))
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

    def _exact_sum(self, features: Tensor, weight: Tensor) -> Tensor | None:
        levels = self.weight_stair.stair.integers or (128,)
        small = max(-levels[0], levels[-1]) < 128
        recorded = torch.is_grad_enabled() and (features.requires_grad or weight.requires_grad)
        if recorded or not small or self.widest_input > 127 or self.padding_mode != "zeros":
            return None
        how = (self.stride, self.padding, self.dilation, self.groups)
        if features.dim() != 4 or not kernels.can_convolve_int8(features, *how):
            return None
        quanta = (features / (self.input_quantum or 1.0)).round()
        return kernels.convolve_int8(quanta, weight, int(self.padding[0]))

    def _sum(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._conv_forward(x, weight, bias)


def stair_modules(net: nn.Module) -> Iterator[tuple[str, StairModule]]:
    """Every stair of a network, weights' and features', with its name."""
    for name, module in net.named_modules():
        if isinstance(module, StairModule):
            yield name, module


def layer_count(net: nn.Module) -> int:
    """The number of quantised layers of a network."""
    layers = [module.layer for _, module in stair_modules(net)]
    if not layers:
        raise ValueError(
            f"net must be a stair network, as softstair.quantise makes, but {type(net).__name__} "
            "has no stair in it."
        )
    return max(layers) + 1


def _check_stair(stair: Any, layer: Any, mean: Any, std: Any) -> None:
    if not isinstance(stair, Stair):
        raise ValueError(f"stair must be a softstair.Stair, but {stair!r} was given.")
    _check.integer("layer", layer, 0)
    _check.number("mean", mean)
    _check.number("std", std, 0)
