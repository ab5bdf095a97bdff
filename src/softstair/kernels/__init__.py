"""Backends of the operator, and the choice between them.

``reference`` is plain torch and right everywhere; ``cpu`` is the same operator for eager CPU
tensors, in blocks; ``triton`` is the same for eager CUDA tensors of at most 32 bits, bins of one
width and the four families of the paper; for others a warning says, once, that the reference runs.
Both load when they are first used. Transforms and compilers get the reference, which they
differentiate and fuse themselves. Nothing outside this folder knows which one runs.

:func:`use`, or the environment variable ``SOFTSTAIR_KERNELS``, selects one of them.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache

import torch
from torch import Tensor

from softstair import _check
from softstair._errors import SoftstairError
from softstair.kernels import reference, triton
from softstair.kernels.bound import BoundStair, Scalar, SoftStair, channel_quanta
from softstair.stair import Stair, check_tensor

__all__ = [
    "CHOICES",
    "AbsentError",
    "SoftStair",
    "backward",
    "can_convolve_int8",
    "channel_quanta",
    "convolve_int8",
    "forward",
    "hard",
    "index",
    "is_transformed",
    "selected",
    "slope",
    "use",
    "value",
]

CHOICES = ("auto", "triton", "reference")
_selected: str | None = None


class AbsentError(SoftstairError, RuntimeError):
    """The selected backend cannot run here."""


@contextmanager
def use(choice: str) -> Iterator[None]:
    """Select the backend of eager tensors, in every thread, within a ``with`` block.

    Args:
        choice: "auto": the fastest available. "triton": Triton, or an error where it cannot run.
            "reference": plain torch.

    Raises:
        ValueError: If ``choice`` is none of these.

    >>> with use("reference"):
    ...     hard(torch.tensor([-0.7, 0.2]), Stair.ternary())
    tensor([-1.,  0.])
    """
    global _selected
    before, _selected = _selected, _check.choice("kernels", choice, CHOICES)
    try:
        yield
    finally:
        _selected = before


def selected() -> str:
    """Return the backend selected by :func:`use` or by the environment; "auto" by default."""
    if _selected is not None:
        return _selected
    name = "SOFTSTAIR_KERNELS"
    return _check.choice(name, os.environ.get(name) or "auto", CHOICES)


def is_transformed() -> bool:
    """Whether this runs in a compiled graph or a transform of torch.func (grad, vmap, jvp, …)."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def forward(
    x: Tensor,
    soft: SoftStair,
    strategy: str,
    generator: torch.Generator | None = None,
    compact: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the forward pass without gradient, in x's dtype, and what :func:`backward` needs.

    That is x or, if ``compact`` allows it and one byte per element suffices, such bytes.
    """
    backend, bound = _bind(x, soft, strategy)
    if backend == "cpu":
        from softstair.kernels import cpu

        return cpu.value(x, bound, strategy, generator), x
    if strategy == "random" and not _has_noise(soft.std):
        strategy = "mode"  # the same Dirac, without a draw
    if backend == "triton":
        from softstair.kernels.triton import elementwise

        compact = compact and triton.can_compact(soft)
        y, saved = elementwise.forward(x, soft, strategy, generator, compact)
        return y, saved if compact else x
    draw = x
    if strategy == "random":
        draw = reference.draws_like(x, soft.noise, bound.compute, generator)
    return reference.value(x, bound, strategy, draw), x


def value(
    x: Tensor, soft: SoftStair, strategy: str, generator: torch.Generator | None = None
) -> Tensor:
    """Return the forward pass alone."""
    return forward(x, soft, strategy, generator)[0]


def slope(x: Tensor, soft: SoftStair) -> Tensor:
    """Return the derivative of the expectation, in the dtype of computation; differentiable."""
    return reference.slope(x, BoundStair(soft, x))


def backward(grad: Tensor, saved: Tensor, soft: SoftStair) -> Tensor:
    """Return grad·slope in x's dtype, without gradient but that of grad; ``saved`` is what
    :func:`forward` returned for x."""
    if saved.dtype == torch.uint8:
        from softstair.kernels.triton import elementwise

        if not (_is_batched(grad) or (torch.is_grad_enabled() and grad.requires_grad)):
            return elementwise.backward(grad, saved, soft)
        return grad * elementwise.backward(torch.ones_like(saved, dtype=grad.dtype), saved, soft)
    if soft.noise.proper and not _is_batched(grad):
        backend, bound = _bind(saved, soft, "backward")
        if backend == "cpu":
            from softstair.kernels import cpu

            return cpu.backward(grad, saved, bound)
        if backend == "triton":
            from softstair.kernels.triton import elementwise

            return elementwise.backward(grad, saved, soft)
    return (grad * slope(saved, soft)).to(saved.dtype)


def hard(x: Tensor, stair: Stair) -> Tensor:
    """Return σ(x)."""
    check_tensor(x)
    return value(x.detach(), SoftStair(stair), "hard")


def index(x: Tensor, stair: Stair) -> Tensor:
    """Return the index of σ(x) among the levels."""
    check_tensor(x)
    x = x.detach()
    bound = BoundStair(SoftStair(stair), x)
    return bound.index(x.to(bound.compute)).nan_to_num(0.0).long()


def can_convolve_int8(
    features: Tensor, stride: object, padding: object, dilation: object, groups: int
) -> bool:
    """Whether :func:`convolve_int8` computes such a convolution of these features."""
    plain = type(features) in (Tensor, torch.nn.Parameter)
    runs = plain and features.is_cuda and triton.unavailable(features.device) is None
    if not runs or is_transformed() or selected() == "reference":
        return False
    from softstair.kernels.triton import convolution

    return convolution.supports_int8(features.shape[1], stride, dilation, groups, padding)


def convolve_int8(features: Tensor, weight: Tensor, padding: int, stride: int = 1) -> Tensor:
    """Return the convolution, in float32, of integers from −128 to 127 that are held as floats.

    Every sum must be below 2²⁴: the result has the bits that float32 gives. With a NaN, all sums of
    its image or its output are NaN.
    """
    from softstair.kernels.triton import convolution

    x, w = (
        tensor.to(torch.int8, memory_format=torch.channels_last) for tensor in (features, weight)
    )
    with torch.cuda.device(features.device) if features.is_cuda else nullcontext():
        sums = convolution.convolve_int8(x, w, padding, torch.int32, stride)
    kept = 1 + 0 * features.sum((1, 2, 3))[:, None] + 0 * weight.sum((1, 2, 3))
    return sums * kept[:, :, None, None]  # in the pass that makes floats of the integers


def _bind(x: Tensor, soft: SoftStair, strategy: str) -> tuple[str, BoundStair]:
    """Return the backend for x ("cpu", "triton" or "reference") and the stair bound to x.

    ``strategy`` is that of the forward pass, or "backward".
    """
    backend = _backend(x, soft)
    has_channels = isinstance(soft.stair.quantum, tuple)
    if backend == "cpu" and not has_channels:
        soft = soft._replace(mean=float(soft.mean), std=float(soft.std))
    bound = BoundStair(soft, x)
    if backend == "cpu" and has_channels:
        from softstair.kernels import cpu

        backend = "cpu" if cpu.takes_channels(x, bound, strategy) else "reference"
    return backend, bound


def _backend(x: Tensor, soft: SoftStair) -> str:
    if is_transformed() or type(x) not in (Tensor, torch.nn.Parameter):
        return "reference"
    choice = selected()
    if choice == "reference":
        return "reference"
    if choice == "triton" or x.device.type == "cuda":
        reason = triton.unsupported(x, soft)
        if reason is None:
            return "triton"
        if choice == "triton":
            raise AbsentError(f"kernels must be auto or reference: {reason}.", field="kernels")
        _warn(reason)
    has_channels = isinstance(soft.stair.quantum, tuple)
    plain = has_channels or (_is_number(soft.mean) and _is_number(soft.std))
    return "cpu" if plain and x.device.type == "cpu" else "reference"


@cache  # once for each reason
def _warn(reason: str) -> None:
    slower = "the operator runs as plain torch operations on the GPU, which is slower"
    warnings.warn(f"{reason}; {slower}; torch.compile makes it faster.", stacklevel=2)


def _is_batched(grad: Tensor) -> bool:
    """Whether this is a batch of gradients (is_grads_batched of autograd), outside torch.func."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(grad) or functorch.is_legacy_batchedtensor(grad)


def _has_noise(std: Scalar) -> bool:
    """False only where it is known without waiting for a device that std is 0."""
    if isinstance(std, float):
        return std > 0
    return is_transformed() or std.device.type != "cpu" or bool((std > 0).any())


def _is_number(value: Scalar) -> bool:
    return isinstance(value, float) or (value.dim() == 0 and value.device.type == "cpu")
