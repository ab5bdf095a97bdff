"""The base class of layers with quantised weights."""

import math
from functools import reduce
from operator import truediv
from typing import Any

import torch
from torch import Tensor, fx, nn

from softstair import _check
from softstair._stair_module import StairActivation, StairWeight, call_node


class StairLayer(nn.Module):
    """A layer with quantised weights: the base class of the layers of :mod:`softstair.nn`.

    Args:
        weight_stair: The stair of the weights.
        input_quantum: The quantum of which the incoming features are integer multiples, if they
            are. In ``eval()`` the layer then sums integers only.

    All other arguments are those of torch's layer.
    """

    weight: Tensor
    bias: Any
    weight_stair: StairWeight
    weight_name = "weight"
    widest_input: int = 255  # quanta of the largest feature: decides whether float32 holds the sums
    sum_dimensions = 0  # dimensions after the output's channels
    output_axis: int | None = 0  # of the weights; None if quanta cannot differ between outputs
    _source: tuple[StairActivation, tuple[int, ...]] | None = None

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
        device = module.get_parameter(cls.weight_name).device
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
    def input_quantum(self) -> float | None:
        """The quantum of the features; if it is learned, the one that their stair has now."""
        if self._source is None:
            return self._input_quantum
        activation, divisors = self._source
        quantum: Any = activation.stair.quantum
        return reduce(truediv, divisors, quantum)

    @input_quantum.setter
    def input_quantum(self, quantum: float | None) -> None:
        self._input_quantum, self._source = quantum, None

    def follow(self, activation: StairActivation, divisors: tuple[int, ...] = ()) -> None:
        """Read the quantum of the features from their stair, of which they may be averages."""
        self._source = (activation, divisors)  # in a tuple, and no submodule

    @property
    def inputs_per_sum(self) -> int:
        """The number of products of one sum."""
        return math.prod(self.weight.shape[1:])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if not any(key.startswith(f"{prefix}weight_stair.") for key in state_dict):
            self.refit()

    @staticmethod
    def matrix(weight: Tensor) -> Tensor:
        """Return weights as the stair takes them, or such weights as the parameter has them."""
        return weight

    def refit(self) -> None:
        """Fit the quanta of the weights again, if they were fitted."""
        self.weight_stair.refit(self.matrix(self.weight))

    def _sum(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the convolution; other layers override it."""
        convolve: Any = self._conv_forward
        return convolve(x, weight, bias)

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy):
            return call_node(self, input)
        weight = None if self.training else self.weight_stair.integers(self.weight)
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
