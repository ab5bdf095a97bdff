"""The operator: a stair regularised by noise, and the gradient that the noise gives it.

forward            value                                       gradient, of all four
=================  ==========================================  ==========================
expectation        E[σ(x − ν)] = q₀ + Σₖ (qₖ − qₖ₋₁)·F(x − θₖ)
mode               q_k of the largest pₖ = F(x−θₖ) − F(x−θₖ₊₁)  Σₖ (qₖ − qₖ₋₁)·μ(x − θₖ)
random             σ(x − ν), one draw of ν an element
hard               σ(x): a classical straight-through estimator

F and μ are the cdf and the density of ν = mean + std·Z. With std = 0 the first three are
σ(x − mean) and the gradient is 0.

Where the paper's sentence fails. It says that under zero-mean, uni-modal noise the mode is σ(x).
The end bins are unbounded, so that their probability does not shrink with the noise's width: on a
ternary stair under uniform noise of half-width 3 the level −1 wins for every x < 0. For unbounded
families it fails at any width in a thin band beyond the outermost thresholds, where p₀ = ½ but the
neighbour misses the mass beyond its far side; and bins of unequal width compete by width. The
operator returns argmax pₖ, as defined; ties, and differences within a few ulp, go to σ(x − mean).
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from softstair import _check, kernels, noise as noises
from softstair.kernels import SoftStair
from softstair.noise import Noise
from softstair.stair import Stair, check_tensor

Forward = Literal["expectation", "mode", "random", "hard"]
FORWARDS: tuple[Forward, ...] = get_args(Forward)


def regularise(
    x: Tensor,
    stair: Stair,
    noise: Noise | str,
    mean: float | Tensor,
    std: float | Tensor,
    forward: Forward = "mode",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the stair σ(x) regularised by noise, with a gradient.

    >>> x = torch.tensor([-0.6, 0.1, 0.45], requires_grad=True)
    >>> y = regularise(x, Stair.ternary(), "uniform", mean=0.0, std=0.288675, forward="mode")
    >>> y
    tensor([-1.,  0.,  0.], grad_fn=<RegularisedBackward>)
    >>> y.sum().backward()
    >>> x.grad
    tensor([1.0000, 1.0000, 1.0000])

    The noise is ν = mean + std·Z, with Z the standardised variable of its family. The gradient of
    every forward is that of the expectation E[σ(x − ν)]; with std = 0 it is 0.

    Args:
        x: A floating-point tensor of any shape.
        stair: The stair σ.
        noise: A family of noise, or its name.
        mean: The mean, in the units of x (not in quanta): a number, or a tensor that broadcasts
            to x's shape. As 0-d tensors, mean and std may change, also to 0, without a host
            synchronisation and without a recompilation. From -1e30 to 1e30.
        std: The standard deviation, likewise, from 0 to 1e30. On a GPU and in compiled code, where
            reading a tensor would wait, the output is NaN if mean or std is not in its range.
        forward: The value: ``"expectation"`` E[σ(x − ν)], ``"mode"`` the most probable level,
            ``"random"`` σ(x − ν) with one draw of ν per element, or ``"hard"`` σ(x).
        generator: The source of random numbers in eager mode; torch's own by default.

    Returns:
        A tensor with x's shape and dtype. Where x is NaN, so are the output and its gradient.

    Raises:
        ValueError: If an argument has a wrong type or value, or if mean or std requires a gradient.
    """
    noise = noises.get(noise)
    _check_operands(x, stair, noise, forward)
    soft = SoftStair(stair, noise, _parameter("mean", mean, x), _parameter("std", std, x))
    return apply(x, soft, soft, forward, generator)


def apply(
    x: Tensor,
    soft: SoftStair,
    sloped: SoftStair,
    forward: Forward,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the output of ``soft`` with the gradient of ``sloped``; operands are not checked."""
    if kernels.is_transformed():
        return _composite(x, soft, sloped, forward, generator)
    return Regularised.apply(x, soft, sloped, forward, generator)


class Regularised(torch.autograd.Function):
    """The eager operator, which saves x or less for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        soft: SoftStair,
        sloped: SoftStair,
        forward: Forward,
        generator: torch.Generator | None,
    ) -> Tensor:
        # A leaf stays in memory anyway.
        compact = ctx.needs_input_grad[0] and not x.is_leaf and sloped is soft
        y, saved = kernels.forward(x.detach(), soft, forward, generator, compact=compact)
        ctx.is_compact = saved.dtype != x.dtype
        # Saved by autograd, which raises if the noise moves before the backward pass.
        values = (saved if ctx.is_compact else x, sloped.mean, sloped.std)
        tensors = [value for value in values if isinstance(value, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.soft = sloped
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, soft = ctx.saved_tensors[0], ctx.soft
        # For a second derivative the slope must be differentiable. Where a byte was saved it is a
        # step function of x, whose derivative is 0.
        if torch.is_grad_enabled() and not ctx.is_compact:
            gradient = (grad * kernels.slope(saved, soft)).to(saved.dtype)
        else:
            gradient = kernels.backward(grad, saved, soft)
        return gradient, None, None, None, None


def _composite(
    x: Tensor,
    soft: SoftStair,
    sloped: SoftStair,
    forward: Forward,
    generator: torch.Generator | None,
) -> Tensor:
    """Return the operator in operations that every transform and compiler differentiates.

    y + (x − x̄)·s, with constants x̄ = x, y = σ and s the slope, has the value y and the derivative
    s. Some compilers silently give an autograd.Function built from comparisons zero gradients.
    """
    value = kernels.value(x.detach(), soft, forward, generator)
    limit = torch.finfo(x.dtype).max
    # ∞ − ∞ would be NaN; the slope out there is 0.
    finite = x.clamp(-limit, limit)
    constant = finite.detach()
    if _is_nested():
        # The slope half-way between x̄ and x: (x − x̄)·s(½(x̄ + x)) has the right second derivative.
        slope = kernels.slope(constant + 0.5 * (finite - constant), sloped)
    else:
        slope = kernels.slope(constant, sloped).detach()
    return (value + (finite - constant).to(slope.dtype) * slope).to(x.dtype)


def _is_nested() -> bool:
    """Return whether two or more transforms of torch.func are active.

    Inside torch.compile, which cannot tell, there are first derivatives only.
    """
    if torch.compiler.is_compiling():
        return False
    return (torch._C._functorch.maybe_current_level() or 0) > 1


def _check_operands(x: Tensor, stair: Stair, noise: Noise, forward: str) -> None:
    check_tensor(x)
    if not isinstance(stair, Stair):
        raise _check.wrong("stair", stair, "a softstair.Stair")
    _check.choice("forward", forward, FORWARDS)
    if not noise.proper and forward != "hard":
        raise _check.invalid(
            "forward",
            f"must be hard with {noise!r}, which is a slope and no probability, but {forward!r} "
            "was given",
        )


def _parameter(name: str, value: float | Tensor, x: Tensor) -> float | Tensor:
    least = 0.0 if name == "std" else -noises.LARGEST
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise _check.invalid(
                name, "must not require a gradient: noise is scheduled, not learnt"
            )
        sizes = zip(reversed(value.shape), reversed(x.shape), strict=False)
        if value.dim() > x.dim() or any(size not in (1, of_x) for size, of_x in sizes):
            shapes = f"shape {tuple(x.shape)}, but its own is {tuple(value.shape)}"
            raise _check.invalid(name, f"must broadcast to x, of {shapes}")
        if value.device.type == "cpu" and not kernels.is_transformed() and value.numel():
            for end in value.aminmax():  # both are NaN if a number is
                _check.number(name, end.item(), least, noises.LARGEST)
        return value
    if torch.compiler.is_compiling():  # numbers may be symbolic there, without bounds
        return value
    return _check.number(name, value, least, noises.LARGEST)
