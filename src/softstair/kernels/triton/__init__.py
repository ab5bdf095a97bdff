"""The operator in Triton: one pass over memory in either direction, and a byte where one will do.

Nothing here imports Triton before a tensor is to be worked on by it.
"""

import importlib.util
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from softstair.kernels import draws
from softstair.kernels.rungs import FEW_LEVELS, working_dtype
from softstair.noise import Logistic, Noise, Normal, Triangular, Uniform
from softstair.stair import Stair

__all__ = ["climb", "kind", "lacking", "missing", "pull", "table", "traceable"]

Scalar = float | Tensor
FAMILIES: dict[type[Noise], str] = {
    family: family.name for family in (Uniform, Triangular, Normal, Logistic)
}
OLDEST = (7, 0)
"""The compute capability from which on Triton compiles."""


def missing(x: Tensor, noise: Noise) -> str | None:
    """Why Triton cannot work on x with that noise, in a sentence; None where it can."""
    if type(noise) not in FAMILIES:
        return (
            f"kernels must be auto or reference with {noise!r}, since triton has uniform, "
            "triangular, normal and logistic noise only, but triton was asked for."
        )
    return lacking(x.device)


@lru_cache
def lacking(device: torch.device) -> str | None:
    """Why Triton cannot work on tensors there, in a sentence; None where it can."""
    asked = "but triton was asked for;"
    if importlib.util.find_spec("triton") is None:
        return (
            f"kernels must be auto or reference where triton is not installed, {asked} "
            "pip install triton brings it where it exists."
        )
    from softstair.kernels.triton import operator

    if operator.IS_INTERPRETED and device.type in ("cpu", "cuda"):
        return None
    if device.type != "cuda":
        return (
            f"kernels must be auto or reference for a tensor on {device}, {asked} move x to a GPU, "
            "or set TRITON_INTERPRET=1 before Python starts to have the kernels interpreted."
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        return (
            f"kernels must be auto or reference on a GPU of compute capability "
            f"{capability[0]}.{capability[1]}, {asked} Triton needs {OLDEST[0]}.{OLDEST[1]}."
        )
    return None


def climb(
    x: Tensor,
    stair: Stair,
    noise: Noise,
    mean: Scalar,
    std: Scalar,
    forward: str,
    generator: torch.Generator | None,
    traced: bool,
) -> tuple[Tensor, Tensor]:
    """The value of x, and the bytes of its support where they are asked for (else nothing)."""
    from softstair.kernels.triton import operator

    seed = draws.seed(x.device, generator) if forward == "random" else None
    rows, alpha, beta, family, which, axis = _operands(x, x.dtype, stair, noise, mean, std)
    y, trace = operator.climb(x, rows, alpha, beta, seed, family, forward, which, axis, traced)
    return y, trace


def pull(
    grad: Tensor, trace: Tensor, stair: Stair, noise: Noise, mean: Scalar, std: Scalar
) -> Tensor:
    """grad·slope in grad's dtype, which is x's; ``trace`` is x, or the bytes that stand for it."""
    from softstair.kernels.triton import operator

    return operator.descend(grad, trace, *_operands(trace, grad.dtype, stair, noise, mean, std))


def traceable(stair: Stair, noise: Noise, dtype: torch.dtype) -> bool:
    """Whether a byte an element holds all that the backward pass needs: under uniform noise, which
    of up to eight supports x lies in, or how many of those on a line."""
    if type(noise) is not Uniform:
        return False
    return len(stair) <= (256 if kind(stair, dtype) == "line" else FEW_LEVELS + 1)


@lru_cache(maxsize=4096)
def kind(stair: Stair, dtype: torch.dtype) -> str:
    """What :mod:`softstair.kernels.triton.climbing` may rely on: a line, even or uneven bins."""
    rounded = stair.rounded(dtype)
    if len(stair) > FEW_LEVELS + 1 and None not in (rounded.level_line, rounded.threshold_line):
        return "line"
    return "uneven" if stair.spacing is None else "even"


@lru_cache(maxsize=4096)
def is_native(stair: Stair, dtype: torch.dtype) -> bool:
    """Whether arithmetic as :mod:`softstair.kernels.triton.alike` does it gives a line's every
    threshold and level to the bit, and finds the threshold next to any x."""
    if kind(stair, dtype) != "line" or dtype == torch.float64 or stair.axis is not None:
        return False
    row, count = table(stair, dtype, torch.device("cpu"))[0], len(stair) - 1
    thresholds, levels = row[:count], row[count : 2 * count + 1]
    (rise, _), (unit, _) = pairs = row[[2 * count + 1, -2, -3, -1]].view(2, 2)
    first, lowest = (
        torch.floor(2 * (v / u) + 0.5) * 0.5 for v, u in ((row[0], unit), (levels[0], rise))
    )
    numbers = torch.arange(count) + first, torch.arange(count + 1) + lowest
    if dtype == torch.float32:
        value, product = (
            (n.double() * high + n * low).float()
            for n, (high, low) in zip(reversed(numbers), pairs, strict=True)
        )
    else:
        product, value = numbers[0] * unit, (numbers[1] * rise).to(dtype)
        last = {torch.bfloat16: 1 << 16, torch.float16: 1 << 13}[dtype]
        product = (product.view(torch.int32) + last // 2 & -last).view(torch.float32)
    place = thresholds.double() / unit - numbers[0]
    exact = torch.equal(product, thresholds) and torch.equal(value.to(levels.dtype), levels)
    return exact and bool(place.abs().max() < 0.45)


@lru_cache(maxsize=4096)
def table(stair: Stair, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The stair for tensors of the dtype: a row a channel, in the working dtype, on the device.

    A row is the thresholds, the levels, the rises and the spacing of the thresholds; then what the
    working dtype has left out of the first rise, and of the spacing."""
    quanta = stair.quantum if isinstance(stair.quantum, tuple) else (1.0,)
    line, even = stair.rounded(dtype).threshold_line, stair.spacing
    spacing = line.unit if line is not None else even[0] if even is not None else 1.0
    with torch.inference_mode(False), torch.no_grad():
        unit = torch.tensor(quanta, dtype=torch.float64)[:, None]
        values = [
            unit * torch.tensor(v, dtype=torch.float64) for v in (stair.thresholds, stair.levels)
        ]
        rises = unit * torch.tensor([b - a for a, b in pairwise(stair.levels)], dtype=torch.float64)
        rounded = [value.to(dtype).to(torch.float64) for value in values]
        steps = torch.cat([rises[:, :1], unit * spacing], dim=1)
        rest = steps - steps.to(working_dtype(dtype)).to(torch.float64)
        rows = torch.cat([*rounded, rises, steps[:, 1:], rest], dim=1)
        return rows.to(working_dtype(dtype)).to(device)


def _operands(
    x: Tensor, dtype: torch.dtype, stair: Stair, noise: Noise, mean: Scalar, std: Scalar
) -> tuple[Tensor, Tensor, Tensor, str, str, int]:
    """The stair and the noise as the operators take them."""
    working = working_dtype(dtype)
    alpha, beta = (_number(value, working, x.device) for value in (mean, std))
    rows, axis = table(stair, dtype, x.device), -1 if stair.axis is None else stair.axis
    which = "native" if is_native(stair, dtype) else kind(stair, dtype)
    return rows, alpha, beta, FAMILIES[type(noise)], which, axis


def _number(value: Scalar, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A mean or std where the kernels read it, without waiting for the device."""
    if isinstance(value, Tensor):
        return value.detach().to(device, dtype, non_blocking=True)
    # What is made inside a capture belongs to that graph and has no value outside of it.
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return (_filled if capturing else _cached)(value, dtype, device)


def _filled(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return torch.full((), value, dtype=dtype, device=device)


_cached = lru_cache(maxsize=256)(_filled)
