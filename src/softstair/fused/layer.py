"""One layer of a stair network: sums, normalisation, stair and pooling together.

Forward, the sums are read once; where features and weights are whole numbers (mode, random and hard
forwards, and every layer that is annealed) they are exact, made from int8. Kept for the backward
pass: the sums, and what the weights' gradient needs, the features.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softstair.fused import evaluated
from softstair.fused.whole import fits_bytes, forward_of, quantum_of, takes_whole, unit_of
from softstair.kernels.triton import convolution, moments, narrow, normalised, pulled
from softstair.kernels.triton.normalised import Steps
from softstair.nn import StairActivation, StairWeight

__all__ = ["FusedLayer"]


class FusedLayer(nn.Module):
    """What [convolution or linear layer, batch normalisation, stair, max-pooling] compute.

    ``source`` is the layer whose features this one takes as they are, if they come from one;
    ``whole`` are those last made here, in quanta, for a layer that wants them so (``hands_on``).
    ``seeds``, two numbers on the device for the weights' and the features' draws (none is drawn in
    evaluation), and the stairs
    made ready for their noise are set by whoever runs the network, for all layers at once.
    """

    source: "FusedLayer | None"
    whole: Tensor | None
    seeds: Tensor
    steps: Steps
    weight_steps: Steps

    def __init__(
        self,
        sums: nn.Conv2d | nn.Linear,
        norm: nn.BatchNorm1d | nn.BatchNorm2d,
        stair: StairActivation,
        pool: nn.Module | None,
        source: "FusedLayer | None",
    ) -> None:
        super().__init__()
        self.sums, self.norm, self.stair, self.pool = sums, norm, stair, pool
        self.weight_stair: StairWeight | None = getattr(sums, "weight_stair", None)
        self.__dict__["source"] = source  # no part of this one
        self.hands_on, self.whole = False, None
        if isinstance(sums, nn.Conv2d):  # the kernels take rows of channels
            sums.weight.data = sums.weight.data.contiguous(memory_format=torch.channels_last)
        if source is not None and takes_whole(sums):
            source.hands_on = True

    def forward(self, x: Tensor) -> Tensor:
        self.whole = None
        if self._evaluates(x):
            return evaluated.evaluate(self, x)
        if not self._runs(x):
            y = self.stair(self.norm(self.sums(x)))
            return y if self.pool is None else self.pool(y)
        if self.stair.annealed:
            with torch.no_grad():
                y = climb(self, x, self.sums.weight).y
        else:
            y = _Layer.apply(x, self.sums.weight, self.norm.weight, self.norm.bias, self)
        return y if self.pool is None or self.tiles(x) else self.pool(y)

    def _runs(self, x: Tensor) -> bool:
        """Whether what is fused is what the modules would do: all in training, one row a sample."""
        training = self.sums.training and self.norm.training and self.stair.training
        return training and x.dim() == (4 if isinstance(self.sums, nn.Conv2d) else 2)

    def _evaluates(self, x: Tensor) -> bool:
        """The same for a convolution in evaluation, in float32 and without a gradient; a linear
        layer has too few features to gain by it."""
        training = self.sums.training or self.norm.training or self.stair.training
        half = torch.is_autocast_enabled(x.device.type)
        plain = x.dim() == 4 and x.dtype == torch.float32 and not half
        return plain and not training and not torch.is_grad_enabled()

    def tiles(self, x: Tensor) -> bool:
        """Whether windows of pooling tile the picture that x becomes."""
        sums = self.sums
        if self.pool is None or not isinstance(sums, nn.Conv2d):
            return False
        kinds = (sums.kernel_size, sums.stride, sums.padding, sums.dilation)
        sides = zip(x.shape[2:], *(tuple(map(int, kind)) for kind in kinds), strict=True)
        made = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides]
        return all(side % 2 == 0 for side in made)

    @property
    def is_narrow(self) -> bool:
        """Whether this is a convolution of few channels, such as a picture has."""
        sums = self.sums
        return isinstance(sums, nn.Conv2d) and narrow.fits(
            sums.weight, sums.stride, sums.padding, sums.dilation, sums.groups
        )

    @property
    def draws(self) -> bool:
        """Whether the forward pass draws random numbers."""
        stairs = [self.stair] if self.weight_stair is None else [self.stair, self.weight_stair]
        return any(forward_of(stair) == "random" for stair in stairs)

    def taken(self) -> Tensor | None:
        """The source's features in quanta, let go with this; None where it did not make them."""
        if self.source is None or not takes_whole(self.sums):
            return None
        whole, self.source.whole = self.source.whole, None
        return whole


class _Climbed(NamedTuple):
    """A forward pass: what it made, and what the backward pass needs of it."""

    y: Tensor
    x: Tensor
    values: Tensor
    c: Tensor
    place: Tensor | None
    statistics: Tensor
    squares: Tensor | None
    unit: float


def climb(layer: FusedLayer, x: Tensor, weight: Tensor) -> _Climbed:
    """The forward pass, in the precision of autocast."""
    if torch.is_autocast_enabled("cuda"):
        x = x.to(torch.get_autocast_dtype("cuda"))
    # As the kernels read them; what lies so already is not touched.
    x, weight = _laid(x), _laid(weight)
    whole = layer.taken()
    values, integers = _weights(layer, weight, x.dtype, whole is not None)
    unit, squares, seen = 1.0, None, layer.norm.running_mean
    assert seen is not None  # as whoever fuses has seen to
    with torch.autocast("cuda", enabled=False):
        if whole is not None and integers is not None:
            assert isinstance(layer.sums, nn.Conv2d)
            assert layer.source is not None
            assert layer.weight_stair is not None
            padding = int(layer.sums.padding[0])
            unit, dtype = unit_of(layer.sums, layer.weight_stair, layer.source.stair)
            c, partial = convolution.convolve(whole, integers, padding, dtype, seen, unit)
        elif layer.is_narrow:
            c, partial, squares = narrow.convolve(x, values, seen)
        else:
            c = _laid(_sums(layer.sums, x, values))
            partial = moments.moments(c, seen)
    rows = c.numel() // c.shape[1]
    if rows < 2:
        raise ValueError(
            f"a batch must hold more than one value a channel for its normalisation to be trained, "
            f"but features of shape {tuple(c.shape)} were given."
        )
    statistics = moments.finish(partial, layer.norm, rows, unit)
    stair, pool = layer.stair, layer.tiles(x)
    # Pooled elsewhere, they would not be those that the next layer takes.
    hands_on = layer.hands_on and fits_bytes(stair) and (pool or layer.pool is None)
    y, layer.whole, place = normalised.climb(
        c,
        statistics,
        layer.steps,
        forward_of(stair),
        layer.seeds[1:],
        x.dtype,
        pool=pool,
        quantum=quantum_of(stair) if hands_on else None,
    )
    return _Climbed(y, x, values, c, place, statistics, squares, unit)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, gamma: Tensor, beta: Tensor, layer: FusedLayer
    ) -> Tensor:
        made = climb(layer, x, weight)
        ctx.save_for_backward(weight, *made[1:-1])
        stair = layer.weight_stair
        ctx.teaches = ctx.needs_input_grad[1] and not (stair is not None and stair.annealed)
        ctx.layer, ctx.unit, ctx.dtype = layer, made.unit, x.dtype
        # The noise as it was: another forward pass may come before this one's way back.
        ctx.steps = layer.steps
        ctx.weight_steps = None if layer.weight_stair is None else layer.weight_steps
        return made.y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, x, values, c, place, statistics, squares = ctx.saved_tensors
        layer: FusedLayer = ctx.layer
        steps, needed = ctx.steps, (ctx.needs_input_grad[0], ctx.teaches)
        gradient = gradient.contiguous(memory_format=normalised.format_of(c))
        for_x: Tensor | None = None
        for_values: Tensor | None
        if squares is not None and not needed[0]:
            turned, for_values = narrow.pull_weights(
                x, gradient, c, values, statistics, steps, place, squares
            )
        else:
            turned = pulled.pull_sums(gradient, c, statistics, steps, place, ctx.unit)
            for_c = pulled.pull(gradient, c, statistics, steps, place, turned)
            for_x, for_values = _products(layer.sums, for_c, x, values, needed)
        for_weight = for_values
        if for_values is not None and ctx.weight_steps is not None:
            for_weight = pulled.pull_plain(for_values, _laid(weight), ctx.weight_steps)
        if not ctx.teaches:
            for_weight = None
        if for_x is not None:
            for_x = for_x.to(ctx.dtype)
        return for_x, for_weight, turned[1], turned[0], None


def _laid(tensor: Tensor) -> Tensor:
    """As rows of channels."""
    return tensor.contiguous(memory_format=normalised.format_of(tensor))


def _sums(layer: nn.Conv2d | nn.Linear, x: Tensor, weight: Tensor) -> Tensor:
    if isinstance(layer, nn.Linear):
        # Whole numbers in bfloat16 (where the quantum is a power of two) stay so in float32 sums.
        half = x.dtype in (torch.bfloat16, torch.float16) and x.is_cuda
        return torch.mm(x, weight.t(), out_dtype=torch.float32) if half else x @ weight.t()
    return F.conv2d(x, weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)


def _products(
    layer: nn.Conv2d | nn.Linear, pulled: Tensor, x: Tensor, weight: Tensor, needed: Any
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the features and of the weights that multiply them."""
    if isinstance(layer, nn.Linear):
        for_x = pulled @ weight if needed[0] else None
        return for_x, pulled.t() @ x if needed[1] else None
    for_x, for_weight, _ = torch.ops.aten.convolution_backward(
        pulled,
        x,
        weight,
        None,
        layer.stride,
        layer.padding,
        layer.dilation,
        False,
        [0, 0],
        layer.groups,
        [*needed, False],
    )
    # Laid out as the weights are; a library may prefer another order.
    return for_x, None if for_weight is None else for_weight.contiguous(
        memory_format=torch.channels_last
    )


def _weights(
    layer: FusedLayer, weight: Tensor, dtype: torch.dtype, whole: bool
) -> tuple[Tensor, Tensor | None]:
    """The weights that multiply: in a dtype, and in quanta as int8 if that can be."""
    stair = layer.weight_stair
    if stair is None:
        return weight.to(dtype), None
    quantum = quantum_of(stair) if whole and fits_bytes(stair) else None
    y, integers, _ = normalised.climb(
        weight, None, layer.weight_steps, forward_of(stair), layer.seeds[:1], dtype, quantum=quantum
    )
    return y, integers
