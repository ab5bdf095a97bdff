"""The operator in Triton: one pass over memory in either direction.

Triton is imported when a tensor is first worked on by it, not before.
"""

import importlib.util
from functools import cache, lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from softstair.kernels.bound import FEW_LEVELS, LAST_BITS, SoftStair, compute_dtype
from softstair.noise import Logistic, Noise, Normal, Triangular, Uniform
from softstair.stair import Stair

__all__ = [
    "FAMILIES",
    "can_compact",
    "is_native",
    "kind",
    "longer_table",
    "table",
    "unavailable",
    "unsupported",
]

FAMILIES: dict[type[Noise], str] = {
    family: family.name for family in (Uniform, Triangular, Normal, Logistic)
}
OLDEST = (7, 0)
"""The lowest compute capability that Triton compiles for."""


def unsupported(x: Tensor, noise: Noise) -> str | None:
    """Return why Triton cannot work on x with that noise, or None if it can."""
    if type(noise) not in FAMILIES:
        return (
            f"kernels must be auto or reference with {noise!r}: triton supports uniform, "
            "triangular, normal and logistic noise only."
        )
    return unavailable(x.device)


@lru_cache
def unavailable(device: torch.device) -> str | None:
    """Return why Triton cannot run on the device, or None if it can."""
    parts = ("triton", "triton.tools.tensor_descriptor")  # the second came with Triton 3.4
    if any(importlib.util.find_spec(part) is None for part in parts):
        return (
            "kernels must be auto or reference, because Triton 3.4 or later is not installed: "
            "install torch 2.8 or later for CUDA, which includes it, or run pip install triton if "
            "torch was built for a CPU."
        )
    from softstair.kernels.triton.distributions import INTERPRETED

    if INTERPRETED.value and device.type in ("cpu", "cuda"):
        return None
    if device.type != "cuda":
        return (
            f"kernels must be auto or reference for a tensor on {device}: move it to a GPU, or set "
            "TRITON_INTERPRET=1 before Python starts to interpret the kernels."
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        return (
            "kernels must be auto or reference on a GPU of compute capability "
            f"{capability[0]}.{capability[1]}: Triton needs {OLDEST[0]}.{OLDEST[1]}."
        )
    return None


def can_compact(soft: SoftStair, dtype: torch.dtype) -> bool:
    """Whether one byte per element holds all that the backward pass needs: under uniform noise,
    which of up to eight supports x lies in, or how many of those on a line."""
    if type(soft.noise) is not Uniform:
        return False
    return len(soft.stair) <= (256 if kind(soft.stair, dtype) == "line" else FEW_LEVELS + 1)


@lru_cache(maxsize=4096)
def kind(stair: Stair, dtype: torch.dtype) -> str:
    """Return what :mod:`softstair.kernels.triton.general` may rely on: "line", "even" or
    "uneven"."""
    rounded = stair.rounded(dtype)
    if len(stair) > FEW_LEVELS + 1 and None not in (rounded.level_line, rounded.threshold_line):
        return "line"
    return "uneven" if stair.spacing is None else "even"


@lru_cache(maxsize=4096)
def is_native(stair: Stair, dtype: torch.dtype) -> bool:
    """Whether the arithmetic of :mod:`softstair.kernels.triton.line` gives every threshold and
    level of a line exactly, and finds the threshold nearest to any x."""
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
        bit = LAST_BITS[dtype]
        product = (product.view(torch.int32) + bit // 2 & -bit).view(torch.float32)
    error = thresholds.double() / unit - numbers[0]
    exact = torch.equal(product, thresholds) and torch.equal(value.to(levels.dtype), levels)
    return exact and bool(error.abs().max() < 0.45)


@cache  # a captured graph reads a table where it is, so none may be freed
def table(stair: Stair, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the stair for tensors of the dtype: one row per channel, in the dtype of computation.

    A row holds the thresholds, the levels, the rises and the spacing of the thresholds; then the
    rounding errors of the first rise and of the spacing.
    """
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
        rest = steps - steps.to(compute_dtype(dtype)).to(torch.float64)
        rows = torch.cat([*rounded, rises, steps[:, 1:], rest], dim=1)
        return rows.to(compute_dtype(dtype)).to(device)


@cache  # as the other tables
def longer_table(stair: Stair, longer: Stair, device: torch.device) -> Tensor:
    """Return the table of a longer stair in float32, with no values beyond those of the stair."""
    count, ends = len(longer) - 1, (stair.levels[0], stair.levels[-1])
    values = table(longer, torch.float32, device).clone()
    values[:, count : 2 * count + 1].clamp_(*ends)
    return values
