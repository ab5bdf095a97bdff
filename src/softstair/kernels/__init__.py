"""The operator's backends, and the choice between them.

``reference`` is plain torch and right everywhere; ``cpu`` is the same operator for eager CPU
tensors, in blocks. Nothing outside this folder knows which one runs.
"""

import torch
from torch import Tensor

from softstair.kernels import cpu, draws, reference
from softstair.kernels.reference import Scalar
from softstair.kernels.rungs import Rungs, channel_quanta
from softstair.noise import Noise, Uniform
from softstair.stair import DTYPES, Stair

__all__ = [
    "channel_quanta",
    "check_tensor",
    "hard",
    "index",
    "is_transformed",
    "pull",
    "slope",
    "value",
]


def check_tensor(x: object) -> None:
    """Refuses what no stair can be climbed with."""
    if not isinstance(x, Tensor) or x.dtype not in DTYPES:
        given = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x must be a tensor of floating-point numbers, but {given} was given.")


def is_transformed() -> bool:
    """Inside a compiled graph or a functional transform (grad, vmap, jvp, …) of torch.func."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def value(
    x: Tensor,
    stair: Stair,
    noise: Noise,
    mean: Scalar,
    std: Scalar,
    forward: str,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The forward pass, in x's dtype, without gradient."""
    rungs = Rungs(stair, x)
    if _on_cpu(x, rungs, mean, std):
        return cpu.value(x, rungs, noise, float(mean), float(std), forward, generator)
    if forward == "random" and not _has_noise(x, std):
        forward = "mode"  # the same Dirac, and no number drawn for it
    draw = draws.like(x, noise, rungs.working, generator) if forward == "random" else x
    mean, std = _working(mean, rungs), _working(std, rungs)
    return reference.value(x.to(rungs.working), rungs, noise, mean, std, forward, draw).to(x.dtype)


def slope(x: Tensor, stair: Stair, noise: Noise, mean: Scalar, std: Scalar) -> Tensor:
    """The derivative of the expectation, in the working dtype; itself differentiable in x."""
    rungs = Rungs(stair, x)
    mean, std = _working(mean, rungs), _working(std, rungs)
    return reference.slope(x.to(rungs.working), rungs, noise, mean, std)


def pull(grad: Tensor, x: Tensor, stair: Stair, noise: Noise, mean: Scalar, std: Scalar) -> Tensor:
    """grad·slope in x's dtype, without gradient of its own."""
    rungs = Rungs(stair, x)
    if _on_cpu(x, rungs, mean, std) and noise.proper and not _is_batched(grad):
        return cpu.pull(grad, x, rungs, noise, float(mean), float(std))
    return (grad * slope(x, stair, noise, mean, std)).to(x.dtype)


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


def _on_cpu(x: Tensor, rungs: Rungs, mean: Scalar, std: Scalar) -> bool:
    if is_transformed() or rungs.quanta is not None or x.device.type != "cpu":
        return False
    return type(x) in (Tensor, torch.nn.Parameter) and all(_is_scalar(s) for s in (mean, std))


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
