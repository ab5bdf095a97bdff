"""The operator's backends, and the choice between them.

``reference`` is plain torch and right everywhere; ``cpu`` is the same operator for eager CPU
tensors, in blocks; ``triton`` is the same for eager CUDA tensors under the four families of the
paper. Transforms and compilers get the reference, which they differentiate and fuse themselves.
Nothing outside this folder knows which one runs.

:func:`use`, or the environment variable ``SOFTSTAIR_KERNELS``, asks for one of them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from softstair.kernels import cpu, draws, reference, triton
from softstair.kernels.reference import Scalar
from softstair.kernels.rungs import Rungs, channel_quanta
from softstair.noise import Noise, Uniform
from softstair.stair import DTYPES, Stair

__all__ = [
    "CHOICES",
    "AbsentError",
    "asked",
    "channel_quanta",
    "check_tensor",
    "climb",
    "hard",
    "index",
    "is_transformed",
    "pull",
    "slope",
    "use",
    "value",
]

CHOICES = ("auto", "triton", "reference")
_asked: str | None = None


class AbsentError(ValueError, RuntimeError):
    """A backend was asked for that is not there: a wrong request, and a matter of the machine."""


@contextmanager
def use(choice: str) -> Iterator[None]:
    """Has eager tensors worked on by the backend of that name, in every thread, while it lasts.

    ``auto`` takes the fastest that there is, ``triton`` refuses what Triton cannot do, and
    ``reference`` is plain torch.

    >>> with use("reference"):
    ...     hard(torch.tensor([-0.7, 0.2]), Stair.ternary())
    tensor([-1.,  0.])
    """
    global _asked
    before, _asked = _asked, _checked("kernels", choice)
    try:
        yield
    finally:
        _asked = before


def asked() -> str:
    """The backend that was asked for by :func:`use` or by the environment; auto, by nobody."""
    if _asked is not None:
        return _asked
    return _checked("SOFTSTAIR_KERNELS", os.environ.get("SOFTSTAIR_KERNELS") or "auto")


def check_tensor(x: object) -> None:
    """Refuses what no stair can be climbed with."""
    if not isinstance(x, Tensor) or x.dtype not in DTYPES:
        given = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x must be a tensor of floating-point numbers, but {given} was given.")


def is_transformed() -> bool:
    """Inside a compiled graph or a functional transform (grad, vmap, jvp, …) of torch.func."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def climb(
    x: Tensor,
    stair: Stair,
    noise: Noise,
    mean: Scalar,
    std: Scalar,
    forward: str,
    generator: torch.Generator | None = None,
    brief: bool = False,
) -> tuple[Tensor, Tensor]:
    """The forward pass, in x's dtype, without gradient, and the trace that :func:`pull` needs of
    x: x itself or, where ``brief`` is asked for and a byte an element will do, those bytes."""
    rungs = Rungs(stair, x)
    backend = _backend(x, rungs, noise, mean, std)
    if backend == "cpu":
        return cpu.value(x, rungs, noise, float(mean), float(std), forward, generator), x
    if forward == "random" and not _has_noise(x, std):
        forward = "mode"  # the same Dirac, and no number drawn for it
    if backend == "triton":
        brief = brief and triton.traceable(stair, noise, x.dtype)
        y, trace = triton.climb(x, stair, noise, mean, std, forward, generator, brief)
        return y, trace if brief else x
    draw = draws.like(x, noise, rungs.working, generator) if forward == "random" else x
    mean, std = _working(mean, rungs), _working(std, rungs)
    y = reference.value(x.to(rungs.working), rungs, noise, mean, std, forward, draw).to(x.dtype)
    return y, x


def value(
    x: Tensor,
    stair: Stair,
    noise: Noise,
    mean: Scalar,
    std: Scalar,
    forward: str,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The forward pass alone."""
    return climb(x, stair, noise, mean, std, forward, generator)[0]


def slope(x: Tensor, stair: Stair, noise: Noise, mean: Scalar, std: Scalar) -> Tensor:
    """The derivative of the expectation, in the working dtype; itself differentiable in x."""
    rungs = Rungs(stair, x)
    mean, std = _working(mean, rungs), _working(std, rungs)
    return reference.slope(x.to(rungs.working), rungs, noise, mean, std)


def pull(
    grad: Tensor, trace: Tensor, stair: Stair, noise: Noise, mean: Scalar, std: Scalar
) -> Tensor:
    """grad·slope in x's dtype, without gradient but that of grad; ``trace`` is what :func:`climb`
    gave for x."""
    if trace.dtype == torch.uint8:
        if not (_is_batched(grad) or (torch.is_grad_enabled() and grad.requires_grad)):
            return triton.pull(grad, trace, stair, noise, mean, std)
        ones = torch.ones_like(trace, dtype=grad.dtype)
        return grad * triton.pull(ones, trace, stair, noise, mean, std)
    rungs = Rungs(stair, trace)
    if noise.proper and not _is_batched(grad):
        backend = _backend(trace, rungs, noise, mean, std)
        if backend == "cpu":
            return cpu.pull(grad, trace, rungs, noise, float(mean), float(std))
        if backend == "triton":
            return triton.pull(grad, trace, stair, noise, mean, std)
    return (grad * slope(trace, stair, noise, mean, std)).to(trace.dtype)


def hard(x: Tensor, stair: Stair) -> Tensor:
    """σ(x)."""
    check_tensor(x)
    return value(x.detach(), stair, Uniform(), 0.0, 0.0, "hard")


def index(x: Tensor, stair: Stair) -> Tensor:
    """The index of σ(x) among the levels."""
    check_tensor(x)
    x = x.detach()
    rungs = Rungs(stair, x)
    return rungs.index(x.to(rungs.working)).nan_to_num(0.0).long()


def _backend(x: Tensor, rungs: Rungs, noise: Noise, mean: Scalar, std: Scalar) -> str:
    """cpu, triton or reference: which one works on x."""
    if is_transformed() or type(x) not in (Tensor, torch.nn.Parameter):
        return "reference"
    choice = asked()
    if choice == "reference":
        return "reference"
    if choice == "triton" or x.device.type == "cuda":
        missing = triton.missing(x, noise)
        if missing is None:
            return "triton"
        if choice == "triton":
            raise AbsentError(missing)
    plain = x.device.type == "cpu" and all(_is_scalar(s) for s in (mean, std))
    return "cpu" if plain and rungs.quanta is None else "reference"


def _checked(name: str, choice: str) -> str:
    if choice not in CHOICES:
        raise ValueError(f"{name} must be one of {', '.join(CHOICES)}, but {choice!r} was given.")
    return choice


def _is_batched(grad: Tensor) -> bool:
    """A batch of gradients, as autograd's is_grads_batched makes, outside of torch.func."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(grad) or functorch.is_legacy_batchedtensor(grad)


def _has_noise(x: Tensor, std: Scalar) -> bool:
    """False only where it can be seen without waiting for a device that there is none."""
    if isinstance(std, float):
        return std > 0
    return is_transformed() or std.device.type != "cpu" or bool((std > 0).any())


def _is_scalar(value: Scalar) -> bool:
    return isinstance(value, float) or (value.dim() == 0 and value.device.type == "cpu")


def _working(value: Scalar, rungs: Rungs) -> Scalar:
    return value if isinstance(value, float) else value.to(rungs.working)
