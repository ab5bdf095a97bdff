"""The modules of a fused layer, and what the layers of a network share in a forward pass."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from softstair._accelerate import gradients
from softstair._accelerate.first import First, supports_first
from softstair._accelerate.stairs import PreparedStair, makes_int8, strategy_of
from softstair._accelerate.update import LatentSteps, SecondStream
from softstair.kernels.triton import convolution
from softstair.nn import StairActivation, StairModule, StairWeight

__all__ = ["Context", "Integers", "LayerParts", "is_depthwise"]


class Integers(NamedTuple):
    """Features or weights in quanta: as int8, and in FP8 with images or outputs last."""

    int8: Tensor
    float8: Tensor | None


WeightKey = tuple["LayerParts", torch.dtype, int | None]
"""A layer, the dtype of its weights and, if they are in quanta too, the number of images."""


@dataclass
class Context:
    """What the layers share in one forward pass."""

    stairs: dict[StairModule, PreparedStair]
    """Every stair, prepared for its present noise."""
    seeds: Tensor
    """(layers, 2): seeds for the draws of weights and of features."""
    zeros: Tensor
    """(layers, …): a row for the sums and counters of each layer's kernels."""
    needs_gradients: bool = True
    """Whether gradients are recorded."""
    stream: SecondStream = field(default_factory=SecondStream)
    """Second stream, for weights that are quantised ahead of their layer."""
    weights: dict[WeightKey, tuple[Tensor, Integers | None]] = field(default_factory=dict)
    """Weights that were quantised ahead, removed when their layer uses them."""
    integers: dict["LayerParts", Integers] = field(default_factory=dict)
    """The features of a layer in quanta, until the next layer takes them."""


def is_depthwise(sums: nn.Conv2d) -> bool:
    """Whether a convolution sums each channel alone."""
    return sums.groups == sums.in_channels == sums.out_channels


class LayerParts(nn.Module):
    """The modules that a fused layer replaces, and what it can do in their place.

    ``source`` is the layer whose features this one takes unchanged, if there is one. A source
    makes integers if it has ``readers``: layers that can use them, in order of execution. With
    ``float8`` the products of the backward pass are in FP8 where integers were multiplied; features
    that are ``read_once``, by a reader, are then made as integers alone. If ``steps`` is
    set, the backward pass gives it the gradient of the quantised weights, and autograd gets none.
    """

    source: "LayerParts | None"
    readers: "list[LayerParts]"

    def __init__(
        self,
        number: int,
        sums: nn.Conv2d | nn.Linear,
        norm: nn.BatchNorm1d | nn.BatchNorm2d,
        stair: StairActivation,
        pool: nn.Module | None,
        source: "LayerParts | None",
        float8: bool = False,
    ) -> None:
        super().__init__()
        self.number, self.float8 = number, float8
        self.sums, self.norm, self.stair, self.pool = sums, norm, stair, pool
        self.weight_stair: StairWeight | None = getattr(sums, "weight_stair", None)
        self.__dict__.update(source=source, readers=[])  # not as submodules
        self.read_once = False
        self.steps: LatentSteps | None = None
        if isinstance(sums, nn.Conv2d):  # the kernels read rows of channels
            sums.weight.data = sums.weight.data.contiguous(memory_format=torch.channels_last)
        if source is not None and self._takes_integers:
            source.readers.append(self)

    @property
    def modes(self) -> set[bool]:
        """The values of ``training`` of the modules; two if some are in evaluation."""
        modules = (self.sums, self.norm, self.stair, self.weight_stair)
        return {module.training for module in modules if module is not None}

    def can_evaluate(self, x: Tensor) -> bool:
        """Whether x suits the kernels of evaluation: a convolution's input in float32, without
        gradient. A linear layer has too few features to gain from them."""
        plain = x.dim() == 4 and x.dtype == torch.float32 and not torch.is_grad_enabled()
        return plain and not torch.is_autocast_enabled(x.device.type)

    def pools_here(self, x: Tensor) -> bool:
        """Whether pooling windows tile the image that x becomes, so that the kernels pool it."""
        if self.pool is None or not isinstance(self.sums, nn.Conv2d):
            return False
        return all(side % 2 == 0 for side in self.sides(x))

    def sides(self, x: Tensor) -> list[int]:
        """Return height and width of the sums of a convolution; nothing of a linear layer."""
        sums: Any = self.sums
        if isinstance(sums, nn.Linear):
            return []
        settings = (sums.kernel_size, sums.stride, sums.padding, sums.dilation)
        return convolution.output_sides(x.shape[2:], *settings)

    @property
    def has_short_sums(self) -> bool:
        """Whether this is a convolution of few channels, such as an image has."""
        sums = self.sums
        return isinstance(sums, nn.Conv2d) and supports_first(
            sums.weight, sums.stride, sums.padding, sums.dilation, sums.groups
        )

    def first(self, weight: Tensor) -> First:
        """Return this layer as a first layer that has short sums, with its quantised weights."""
        sums: Any = self.sums
        return First(weight, sums.stride[0], sums.padding)

    @property
    def draws(self) -> bool:
        """Whether the forward pass draws random numbers."""
        stairs = (self.stair, self.weight_stair)
        return any(stair is not None and strategy_of(stair) == "random" for stair in stairs)

    @property
    def _takes_integers(self) -> bool:
        """Whether there is an integer convolution that does what this layer does."""
        sums = self.sums
        if not isinstance(sums, nn.Conv2d) or self.weight_stair is None:
            return False
        return is_depthwise(sums) or convolution.supports_int8(
            sums.in_channels, sums.stride, sums.dilation, sums.groups, sums.padding
        )

    @property
    def reads_integers(self) -> bool:
        """Whether this takes features as integers if its source makes them."""
        return self.source is not None and self in self.source.readers

    @property
    def factor_stairs(self) -> tuple[StairModule, StairModule]:
        """The stairs of features and of weights, if this reads integers."""
        assert self.source is not None
        assert self.weight_stair is not None
        return self.source.stair, self.weight_stair

    def float8_format(self, images: int) -> torch.dtype | None:
        """Return the FP8 format of the features if the backward pass multiplies in FP8."""
        if not self.float8 or not self.reads_integers or self.modes != {True}:
            return None
        sums: Any = self.sums
        settings = (sums.in_channels, sums.out_channels, sums.stride, sums.dilation, sums.groups)
        fits = gradients.supports_float8(images, *settings) and not self.stair.annealed
        fits = fits and all(map(makes_int8, self.factor_stairs))
        features, weights = (gradients.float8_for(s.stair.integers) for s in self.factor_stairs)
        return features if fits and weights is not None else None

    def source_integers(self, context: Context) -> Integers | None:
        """Take the source's features in quanta from the context; None if it did not make them."""
        source = self.source
        if source is None or not self.reads_integers:
            return None
        taken = context.integers.get(source)
        if self is source.readers[-1]:
            context.integers.pop(source, None)
        if taken is not None and self.float8_format(len(taken.int8)) is None:
            taken = taken._replace(float8=None)  # for another reader
        return taken
