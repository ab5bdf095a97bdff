"""One fused layer of a stair network: sums, normalisation, stair and pooling.

The sums are read once by normalisation, stair and pooling together. In residual networks a shortcut
is added before the stair. Where features and weights are integers times a quantum (mode, random and
hard forwards, and every annealed layer) the sums are exact, from int8. The backward pass keeps the
sums and the features; of a first layer, whose sums are computed again, only the input.

Features with a learned quantum ε are ε·S(z/ε), with the stair S in quanta: γ and β are divided by
ε before, and the levels of S multiplied. Sums of learned layers are in float. Weights whose quanta
q are learned, or one per channel, are divided by them, so that the sums count in q. Of these sums
the normalisation has mean m and variance v: it divides by √(v + eps/q²), and its running statistics
are those of q·m and q²·v.

In evaluation the statistics are the running ones. What is normalised is rounded in another order
than by torch, so a feature can differ where that decides on which side of a threshold it lies. A
NaN does not pass a stair here: it comes from parameters alone, which the training checks. FP8 has
no infinite gradients of sums: those of γ and β, which are not rounded, show them.
"""

import math
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from softstair._accelerate import batchnorm, batchnorm_backward, gradients, products
from softstair._accelerate.first import First, first_statistics, first_weight_gradient
from softstair._accelerate.moments import Normalisation, batch_statistics, running_statistics
from softstair._accelerate.parts import Context, Integers, LayerParts
from softstair._accelerate.stairs import is_in_quanta, learns, makes_int8, quantum_of, strategy_of

__all__ = ["Average", "FusedLayer", "quantise_ahead"]


class _Inputs(NamedTuple):
    """The tensors that a layer trains with.

    Weights are in quanta if ``weight_quantum`` is given. So are γ, β and the shortcut if
    ``quantum``, that of the features, is given.
    """

    x: Tensor
    weight: Tensor
    gamma: Tensor
    beta: Tensor
    shortcut: Tensor | None
    weight_quantum: Tensor | None
    quantum: Tensor | None


class _Result(NamedTuple):
    """The result of a forward pass, and what the backward pass needs.

    ``x`` and ``values``, the factors of the sums, are in FP8 if the backward pass multiplies in it.
    """

    y: Tensor
    x: Tensor
    values: Tensor
    sums: Tensor | None
    argmax: Tensor | None
    stats: Tensor
    squares: Tensor | None
    unit: float


class FusedLayer(LayerParts):
    """What [convolution or linear layer, batch normalisation, stair, max-pooling] compute."""

    def forward(self, context: Context, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        shapes_fit = x.dim() == (4 if isinstance(self.sums, nn.Conv2d) else 2)
        if shapes_fit and shortcut is not None:
            shapes_fit = shortcut.shape == (len(x), self.norm.num_features, *self.sides(x))
            shortcut = _as_rows(shortcut) if shapes_fit else shortcut
        if shapes_fit and self.can_evaluate(x) and self.modes == {False}:
            y = _evaluate(self, x, shortcut, context)
        elif not (shapes_fit and self.modes == {True}):
            y = self.norm(self.sums(x))
            y = self.stair(y if shortcut is None else y + shortcut)
            return y if self.pool is None else self.pool(y)
        elif self.stair.annealed:
            with torch.no_grad():
                y = _train(self, self._inputs(x, shortcut), context).y
        else:
            y = _LayerFunction.apply(*self._inputs(x, shortcut), self, context)
        return y if self.pool is None or self.pools_here(x) else self.pool(y)

    def _inputs(self, x: Tensor, shortcut: Tensor | None) -> _Inputs:
        weight: Tensor = self.sums.weight
        gamma: Tensor = self.norm.weight
        beta: Tensor = self.norm.bias
        weight_quantum = quantum = None
        weight_stair = self.weight_stair
        if weight_stair is not None and is_in_quanta(weight_stair):
            weight_quantum = weight_stair.quantum
            if learns(weight_stair):
                weight_quantum = weight_stair.scaled_quantum(weight.numel())
            weight = weight / _by_output(weight_quantum, weight)
        if learns(self.stair):
            area = math.prod(self.sides(x))
            quantum = self.stair.scaled_quantum(self.norm.num_features * area)
            gamma, beta = gamma / quantum, beta / quantum
            shortcut = None if shortcut is None else shortcut / quantum
        return _Inputs(x, weight, gamma, beta, shortcut, weight_quantum, quantum)


class Average(nn.Module):
    """An average pooling. Over whole images it is a mean in training: on a GPU the gradient of
    torch's pooling takes longer."""

    def __init__(self, pool: nn.AvgPool2d) -> None:
        super().__init__()
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        pool = self.pool
        is_plain = pool.padding in (0, (0, 0)) and pool.divisor_override is None
        if is_plain and x.requires_grad and _pair(pool.kernel_size) == tuple(x.shape[2:]):
            return x.mean((2, 3), keepdim=True)
        return pool(x)


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


def _train(layer: LayerParts, inputs: _Inputs, context: Context) -> _Result:
    """Run the forward pass in training, in the precision of autocast."""
    x, weight, gamma, beta, shortcut, weight_quantum, _ = inputs
    if len(x) * math.prod(sides := layer.sides(x)) < 2:
        raise ValueError(
            "batch normalisation needs more than one value per channel in training, but its input "
            f"has shape {(len(x), layer.norm.num_features, *sides)}."
        )
    is_first = layer.has_short_sums and shortcut is None and not x.requires_grad
    if torch.is_autocast_enabled("cuda"):
        x = x.to(torch.get_autocast_dtype("cuda"))
    integers = layer.source_integers(context)
    x = x if integers is not None and integers.float8 is not None else _as_rows(x)
    images = None if integers is None else len(x)
    values, weight_integers = _weights(layer, weight, x.dtype, images, context)
    unit, squares, first = 1.0, None, None
    quanta = None if weight_quantum is None else weight_quantum.expand(len(weight)).contiguous()
    norm = Normalisation(layer.norm, gamma, beta, context.zeros[layer.number], quanta)
    with torch.autocast("cuda", enabled=False):
        if integers is not None and weight_integers is not None:
            factors = (integers.int8, weight_integers.int8)
            sums, stats, unit = products.int8_sums(layer, *factors, norm)
        elif is_first:
            first = layer.first(values)
            sums, (stats, squares) = None, first_statistics(x, first, norm)
        else:
            sums = _as_rows(products.sums_of(layer.sums, x, values))
            stats = batch_statistics(sums, norm)
    y, argmax = _features(layer, sums, stats, shortcut, x, context, first)
    if weight_integers is not None and weight_integers.float8 is not None:
        assert integers is not None
        assert integers.float8 is not None
        x, values = integers.float8, weight_integers.float8
    return _Result(y, x, values, sums, argmax, stats, squares, unit)


def _evaluate(layer: LayerParts, x: Tensor, shortcut: Tensor | None, context: Context) -> Tensor:
    """Run the forward pass in evaluation."""
    sums, unit = _evaluated_sums(layer, x, context)
    stats = running_statistics(layer.norm, unit)
    return _features(layer, _as_rows(sums), stats, shortcut, x, context)[0]


def _evaluated_sums(
    layer: LayerParts, x: Tensor, context: Context
) -> tuple[Tensor, float | Tensor]:
    """Return the sums in evaluation, and their unit or one unit per channel."""
    integers, stair = layer.source_integers(context), layer.weight_stair
    if integers is None or stair is None or not makes_int8(stair):
        return layer.sums(x), 1.0
    weight, quanta = _as_rows(layer.sums.weight), stair.present_quantum()
    levels: Tensor | None
    if stair.stair.axis is None:
        _, made = _weights(layer, weight, weight.dtype, len(x), context)
        assert made is not None
        levels = made.int8
    elif stair.log_ratio is None:  # as the network: weights are compared with rounded q·θ
        levels = (stair(weight) / _by_output(quanta, weight)).round()
    else:  # not by a kernel: its tables, one for each evaluation then, are never freed
        levels = stair.integers(weight)
    assert levels is not None
    sums, _, unit = products.int8_sums(layer, integers.int8, _as_rows(levels.to(torch.int8)))
    return sums, unit if stair.stair.axis is None else unit * quanta.double()


def _by_output(quanta: Tensor, weight: Tensor) -> Tensor:
    """Return one quantum, or one per output, in a shape that broadcasts against the weights."""
    return quanta if quanta.dim() == 0 else quanta.view(-1, *(1,) * (weight.dim() - 1))


def _features(
    layer: LayerParts,
    sums: Tensor | None,
    stats: Tensor,
    shortcut: Tensor | None,
    x: Tensor,
    context: Context,
    first: First | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return features and the argmax of pooling; integers go into the context. The sums of a
    ``first`` layer are computed from x."""
    stair, pool, float8 = layer.stair, layer.pools_here(x), None
    # Pooled by torch afterwards, they would not be those that the next layer takes.
    keeps = bool(layer.readers) and makes_int8(stair) and (pool or layer.pool is None)
    if keeps and context.needs_gradients:
        formats = (reader.float8_format(len(x)) for reader in layer.readers)
        float8 = next(filter(None, formats), None)
        quantise_ahead(layer.readers, x.dtype, len(x), context)
    y, integers, argmax, transposed = batchnorm.forward(
        x if sums is None else sums,
        stats,
        context.stairs[stair],
        strategy_of(stair),
        context.seeds[layer.number, 1:],
        x.dtype,
        stored=float8 is None or not layer.read_once,
        pool=pool,
        quantum=quantum_of(stair) if keeps else None,
        shortcut=shortcut,
        last_dtype=float8,
        first=first,
    )
    if integers is not None:
        context.integers[layer] = Integers(integers, transposed)
    return y, argmax


def _weights(
    layer: LayerParts, weight: Tensor, dtype: torch.dtype, images: int | None, context: Context
) -> tuple[Tensor, Integers | None]:
    """Return the quantised weights in ``dtype``. If ``images`` is given, the features are integers,
    and the weights are returned as int8 too if they fit, and in FP8 if the backward pass uses it.
    """
    stair, weight = layer.weight_stair, _as_rows(weight)
    if stair is None:
        return weight.to(dtype), None
    if (ahead := context.weights.pop((layer, dtype, images), None)) is not None:
        context.stream.join()
        return ahead
    quantum = quantum_of(stair) if images is not None and makes_int8(stair) else None
    float8 = None
    if images is not None and context.needs_gradients and layer.float8_format(images) is not None:
        float8 = gradients.float8_for(stair.stair.integers)
    seed, prepared = context.seeds[layer.number, :1], context.stairs[stair]
    given, stored = (weight, None, prepared, strategy_of(stair), seed, dtype), float8 is None
    values, integers, _, transposed = batchnorm.forward(
        *given, stored=stored, quantum=quantum, last_dtype=float8
    )
    return values, None if integers is None else Integers(integers, transposed)


def quantise_ahead(
    layers: Iterable[LayerParts], dtype: torch.dtype, images: int | None, context: Context
) -> None:
    """Quantise the weights of layers that run later, beside what is launched until then.

    The features that these layers will take have this dtype, and are also in quanta if the number
    of ``images`` is given.
    """
    for layer in layers:
        stair, weight = layer.weight_stair, layer.sums.weight.detach()
        if stair is None or is_in_quanta(stair) or layer.modes != {True}:
            continue
        key = (layer, dtype, images)
        assert key not in context.weights
        with context.stream.beside(weight.device):
            context.weights[key] = _weights(layer, weight, dtype, images, context)


def _as_rows(tensor: Tensor) -> Tensor:
    """Return the tensor as rows of channels in memory; copied only if it is not so already."""
    return tensor.contiguous(memory_format=batchnorm.memory_format(tensor))


class _LayerFunction(torch.autograd.Function):
    """The training pass of a layer that is not annealed, and its gradients."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        """Run the pass; given are the fields of _Inputs, the layer and the context."""
        *tensors, layer, context = given
        inputs = _Inputs(*tensors)
        result = _train(layer, inputs, context)
        y = None if inputs.quantum is None else result.y
        ctx.save_for_backward(inputs.weight, *result[1:-1], y, *inputs[4:])
        stair = layer.weight_stair
        ctx.needs_weight = ctx.needs_input_grad[1] and not (stair is not None and stair.annealed)
        ctx.layer, ctx.unit, ctx.dtype = layer, result.unit, inputs.x.dtype
        ctx.zeros = context.zeros[layer.number]
        ctx.float8 = result.x.dtype in gradients.FORMATS
        # As prepared for this pass: the noise may change before the backward pass.
        ctx.stair = context.stairs[layer.stair]
        ctx.weight_stair = None if stair is None else context.stairs[stair]
        return result.y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, x, values, sums, argmax, stats, squares, y, shortcut, *quanta = ctx.saved_tensors
        layer, dy = ctx.layer, _as_rows(dy)
        has_fixed_quantum = ctx.weight_stair is not None and quanta[0] is None
        steps = layer.steps if ctx.needs_weight and has_fixed_quantum else None
        gradient: batchnorm_backward.SumGradient | None = None
        dw: Tensor | None = None
        if squares is not None:
            coefficients, dw = first_weight_gradient(
                x, dy, layer.first(values), stats, ctx.stair, argmax, squares
            )
        else:
            coefficients = batchnorm_backward.reduce_dz(
                dy, sums, stats, ctx.stair, argmax, ctx.unit, ctx.zeros, shortcut, ctx.float8
            )
            gradient = batchnorm_backward.backward(
                dy, sums, stats, ctx.stair, argmax, coefficients, shortcut
            )
        later = gradient if ctx.needs_weight else None
        if later is not None and isinstance(layer.sums, nn.Linear):
            # In the current stream: cuBLAS would keep a workspace for the second one.
            dw, later = products.weight_gradient(layer, later, x, values, ctx.zeros), None
        factors = (dw,) if later is None else (x, ctx.zeros, *later.for_weights)
        read = (ctx.weight_stair, *factors)
        with nullcontext() if steps is None else steps.stream.beside(dy.device, *read):
            del read, factors  # the second stream holds them, if there is one
            if later is not None:
                dw, later = products.weight_gradient(layer, later, x, values, ctx.zeros), None
            dw = dw if ctx.needs_weight else None
            # Of the quantum as a factor of the levels; autograd adds its part as a divisor of γ, β
            # and weights.
            learned = quanta[0] if ctx.needs_input_grad[5] else None
            d_weight_quantum = products.quantum_gradient(dw, values, learned)
            if steps is not None:
                steps.add(layer.sums.weight, dw, ctx.weight_stair)
                dw = None
            elif dw is not None and ctx.weight_stair is not None:
                dw = batchnorm_backward.stair_backward(dw, _as_rows(weight), ctx.weight_stair)
        dx = d_shortcut = None
        if gradient is not None:
            d_shortcut = gradient.shortcut
            # Frees the memory of `transposed` for dx, if no second stream reads it.
            gradient = gradient._replace(transposed=None)
            if ctx.needs_input_grad[0]:
                dx = products.feature_gradient(layer, gradient, x, values, dy.dtype).to(ctx.dtype)
        d_quanta = d_weight_quantum, products.quantum_gradient(dy, y, quanta[1])
        return dx, dw, coefficients[1], coefficients[0], d_shortcut, *d_quanta, None, None
