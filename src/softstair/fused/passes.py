"""The forward and the backward pass of a fused layer.

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

from softstair.fused import products
from softstair.fused.integers import (
    Integers,
    is_in_quanta,
    makes_int8,
    quantum_of,
    strategy_of,
)
from softstair.fused.parts import Context, LayerParts, WeightKind
from softstair.kernels.triton import batchnorm, batchnorm_backward, gradients
from softstair.kernels.triton.first import First, first_statistics, first_weight_gradient
from softstair.kernels.triton.moments import Normalisation, batch_statistics, running_statistics

__all__ = [
    "LayerFunction",
    "as_rows",
    "by_output",
    "evaluate",
    "quantise_ahead",
    "train",
]


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


def train(
    layer: LayerParts,
    x: Tensor,
    weight: Tensor,
    gamma: Tensor,
    beta: Tensor,
    shortcut: Tensor | None,
    weight_quantum: Tensor | None,
    context: Context,
) -> _Result:
    """Run the forward pass in training, in the precision of autocast."""
    if len(x) * math.prod(sides := layer.sides(x)) < 2:
        raise ValueError(
            "batch normalisation needs more than one value per channel in training, but its input "
            f"has shape {(len(x), layer.norm.num_features, *sides)}."
        )
    is_first = layer.has_short_sums and shortcut is None and not x.requires_grad
    if torch.is_autocast_enabled("cuda"):
        x = x.to(torch.get_autocast_dtype("cuda"))
    integers, weight = layer.source_integers(context), as_rows(weight)
    x = x if integers is not None and integers.float8 is not None else as_rows(x)
    values, weight_integers = _weights(layer, weight, x.dtype, integers, context)
    unit, squares, first = 1.0, None, None
    quanta = None if weight_quantum is None else weight_quantum.expand(len(weight)).contiguous()
    norm = Normalisation(layer.norm, gamma, beta, context.zeros[layer.number], quanta)
    with torch.autocast("cuda", enabled=False):
        if integers is not None and weight_integers is not None:
            sums, stats, unit = layer.int8_sums(integers, weight_integers, norm)
        elif is_first:
            first = layer.first(values)
            sums, (stats, squares) = None, first_statistics(x, first, norm)
        else:
            sums = as_rows(products.sums_of(layer.sums, x, values))
            stats = batch_statistics(sums, norm)
    y, argmax = _features(layer, sums, stats, shortcut, x, context, first)
    if weight_integers is not None and weight_integers.float8 is not None:
        assert integers is not None
        assert integers.float8 is not None
        x, values = integers.float8, weight_integers.float8
    return _Result(y, x, values, sums, argmax, stats, squares, unit)


def evaluate(layer: LayerParts, x: Tensor, shortcut: Tensor | None, context: Context) -> Tensor:
    """Run the forward pass in evaluation."""
    sums, unit = _evaluated_sums(layer, x, context)
    stats = running_statistics(layer.norm, unit)
    return _features(layer, as_rows(sums), stats, shortcut, x, context)[0]


def _evaluated_sums(
    layer: LayerParts, x: Tensor, context: Context
) -> tuple[Tensor, float | Tensor]:
    """Return the sums in evaluation, and their unit or one unit per channel."""
    integers, stair = layer.source_integers(context), layer.weight_stair
    if integers is None or stair is None or not makes_int8(stair):
        return layer.sums(x), 1.0
    weight, quanta = as_rows(layer.sums.weight), stair.present_quantum()
    if stair.stair.axis is not None:  # as the network: weights are compared with rounded q·θ
        if stair.log_ratio is None:
            levels: Tensor | None = (stair(weight) / by_output(quanta, weight)).round()
        else:  # not by a kernel: its tables, one for each evaluation then, are never freed
            levels = stair.integers(weight)
        assert levels is not None
        int8 = as_rows(levels.to(torch.int8))
        sums, _, unit = layer.int8_sums(integers, Integers(int8, None))
        return sums, unit * quanta.double()
    _, weight_integers = _weights(layer, weight, weight.dtype, integers, context)
    assert weight_integers is not None
    sums, _, unit = layer.int8_sums(integers, weight_integers)
    return sums, unit


def by_output(quanta: Tensor, weight: Tensor) -> Tensor:
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
        quantise_ahead(layer.readers, x.dtype, context, True, len(x) if float8 else None)
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
    layer: LayerParts,
    weight: Tensor,
    dtype: torch.dtype,
    features: Integers | None,
    context: Context,
) -> tuple[Tensor, Integers | None]:
    """Return the weights that multiply: in a dtype, and in quanta if the features are, and if that
    is possible."""
    if layer.weight_stair is None:
        return weight.to(dtype), None
    in_float8 = features is not None and features.float8 is not None
    kind = WeightKind(layer, dtype, features is not None, in_float8)
    if kind in context.weights:
        context.stream.join()
        return context.weights.pop(kind)
    return _quantised(kind, weight, context)


def _quantised(
    kind: WeightKind, weight: Tensor, context: Context
) -> tuple[Tensor, Integers | None]:
    """Return a layer's quantised weights."""
    layer, dtype, in_quanta, in_float8 = kind
    stair = layer.weight_stair
    assert stair is not None
    quantum = quantum_of(stair) if in_quanta and makes_int8(stair) else None
    seed, prepared = context.seeds[layer.number, :1], context.stairs[stair]
    float8 = gradients.float8_for(stair.stair.integers) if in_float8 else None
    given, stored = (weight, None, prepared, strategy_of(stair), seed, dtype), float8 is None
    values, integers, _, transposed = batchnorm.forward(
        *given, stored=stored, quantum=quantum, last_dtype=float8
    )
    return values, None if integers is None else Integers(integers, transposed)


def quantise_ahead(
    layers: Iterable[LayerParts],
    dtype: torch.dtype,
    context: Context,
    in_quanta: bool = False,
    float8_images: int | None = None,
) -> None:
    """Quantise the weights of layers that run later, beside what is launched until then.

    The arguments say what features these layers will take: their dtype, whether they are also
    ``in_quanta``, and of how many images they are in FP8.
    """
    for layer in layers:
        stair, weight = layer.weight_stair, layer.sums.weight.detach()
        if stair is None or is_in_quanta(stair) or layer.modes != {True}:
            continue
        float8 = float8_images is not None and layer.float8_format(float8_images) is not None
        kind = WeightKind(layer, dtype, in_quanta, float8)
        with context.stream.beside(weight.device):
            context.weights[kind] = _quantised(kind, as_rows(weight), context)


def as_rows(tensor: Tensor) -> Tensor:
    """Return the tensor as rows of channels in memory; copied only if it is not so already."""
    return tensor.contiguous(memory_format=batchnorm.memory_format(tensor))


class LayerFunction(torch.autograd.Function):
    """The training pass of a layer that is not annealed, and its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        gamma: Tensor,
        beta: Tensor,
        shortcut: Tensor | None,
        weight_quantum: Tensor | None,
        quantum: Tensor | None,
        layer: LayerParts,
        context: Context,
    ) -> Tensor:
        result = train(layer, x, weight, gamma, beta, shortcut, weight_quantum, context)
        y = None if quantum is None else result.y
        ctx.save_for_backward(weight, *result[1:-1], y, shortcut, weight_quantum, quantum)
        stair = layer.weight_stair
        ctx.needs_weight = ctx.needs_input_grad[1] and not (stair is not None and stair.annealed)
        ctx.layer, ctx.unit, ctx.dtype = layer, result.unit, x.dtype
        ctx.zeros = context.zeros[layer.number]
        ctx.float8 = result.x.dtype in gradients.FORMATS
        # As prepared for this pass: the noise may change before the backward pass.
        ctx.stair = context.stairs[layer.stair]
        ctx.weight_stair = None if stair is None else context.stairs[stair]
        return result.y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, x, values, sums, argmax, stats, squares, y, shortcut, *quanta = ctx.saved_tensors
        layer, dy = ctx.layer, as_rows(dy)
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
        if gradient is not None and ctx.needs_weight and isinstance(layer.sums, nn.Linear):
            # In the current stream: cuBLAS would keep a workspace for the second one.
            dw = _weight_gradient(ctx, gradient, x, values)
        factors: tuple[Any, ...] = ()
        if gradient is not None and dw is None:
            factors = (x, ctx.zeros, *gradient.for_weights)
        read = (dw, ctx.weight_stair, *factors)
        with nullcontext() if steps is None else steps.stream.beside(dy.device, *read):
            del read, factors  # the second stream holds them, if there is one
            if gradient is not None and ctx.needs_weight and dw is None:
                dw = _weight_gradient(ctx, gradient, x, values)
            dw = dw if ctx.needs_weight else None
            # Of the quantum as a factor of the levels; autograd adds its part as a divisor of γ, β
            # and weights.
            learned = quanta[0] if ctx.needs_input_grad[5] else None
            d_weight_quantum = products.quantum_gradient(dw, values, learned)
            if steps is not None:
                steps.add(layer.sums.weight, dw, ctx.weight_stair)
                dw = None
            elif dw is not None and ctx.weight_stair is not None:
                dw = batchnorm_backward.stair_backward(dw, as_rows(weight), ctx.weight_stair)
        dx: Tensor | None = None
        d_shortcut: Tensor | None = None
        if gradient is not None:
            d_shortcut = gradient.shortcut
            # Frees the memory of `transposed` for dx, if no second stream reads it.
            gradient = gradient._replace(transposed=None)
            if ctx.needs_input_grad[0]:
                dx = _feature_gradient(ctx, gradient, x, values, dy.dtype).to(ctx.dtype)
        d_quanta = d_weight_quantum, products.quantum_gradient(dy, y, quanta[1])
        return dx, dw, coefficients[1], coefficients[0], d_shortcut, *d_quanta, None, None


def _weight_gradient(
    ctx: Any, gradient: batchnorm_backward.SumGradient, x: Tensor, values: Tensor
) -> Tensor:
    """Return the gradient of the weights from that of their sums; in float32 if it is in FP8."""
    sums: Any = ctx.layer.sums
    if gradient.transposed is None:
        return products.weight_gradient(sums, gradient.dc, x, values)
    assert gradient.factor is not None
    padding, unit = int(sums.padding[0]), quantum_of(ctx.layer.source.stair)
    return gradients.weight_gradient(
        gradient.transposed, x, gradient.factor, sums.kernel_size, padding, unit, ctx.zeros
    )


def _feature_gradient(
    ctx: Any,
    gradient: batchnorm_backward.SumGradient,
    x: Tensor,
    values: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of the features from that of the sums, in a dtype if it is in FP8."""
    sums: Any = ctx.layer.sums
    if gradient.factor is None:
        return products.feature_gradient(sums, gradient.dc, x, values)
    padding, unit = int(sums.padding[0]), quantum_of(ctx.layer.weight_stair)
    return gradients.feature_gradient(gradient.dc, values, gradient.factor, padding, dtype, unit)
