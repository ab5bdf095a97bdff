"""The operator in Triton: one pass over memory in either direction.

Triton is imported when a tensor is first worked on by it, not before.
"""

import importlib.util
from functools import cache, lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from softstair.kernels.bound import FEW_LEVELS, SoftStair
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


def unsupported(x: Tensor, soft: SoftStair) -> str | None:
    """Return why Triton has no kernel for x and its stair, or None if it has one."""
    if type(soft.noise) not in FAMILIES:
        return f"Triton has uniform, triangular, normal and logistic noise, not {soft.noise!r}"
    if x.dtype == torch.float64:
        return "Triton computes in float32, and x has float64"
    if soft.stair.spacing is None:
        return f"Triton needs bins and rises of one width, which {soft.stair!r} has not"
    return unavailable(x.device)


@lru_cache
def unavailable(device: torch.device) -> str | None:
    """Return why Triton cannot run on the device, or None if it can."""
    parts = ("triton", "triton.tools.tensor_descriptor")  # the second came with Triton 3.4
    if any(importlib.util.find_spec(part) is None for part in parts):
        return (
            "Triton 3.4 or later is not installed: install torch 2.8 or later for CUDA, which "
            "includes it, or run pip install triton if torch was built for a CPU"
        )
    from softstair.kernels.triton.distributions import INTERPRETED

    if INTERPRETED.value and device.type in ("cpu", "cuda"):
        return None
    if device.type != "cuda":
        return (
            f"the tensor is on {device}: move it to a GPU, or set TRITON_INTERPRET=1 before Python "
            "starts to interpret the kernels"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        return (
            f"the GPU has compute capability {capability[0]}.{capability[1]}, and Triton needs "
            f"{OLDEST[0]}.{OLDEST[1]}"
        )
    return None


def can_compact(soft: SoftStair) -> bool:
    """Whether one byte per element holds all that the backward pass needs: under uniform noise,
    which of up to eight supports x lies in, or how many of those on a line."""
    if type(soft.noise) is not Uniform:
        return False
    return len(soft.stair) <= (256 if kind(soft.stair) == "line" else FEW_LEVELS + 1)


@lru_cache(maxsize=4096)
def kind(stair: Stair) -> str:
    """Return what :mod:`softstair.kernels.triton.general` may rely on: "line" or "even"."""
    rounded = stair.rounded(torch.float32)
    is_line = None not in (rounded.level_line, rounded.threshold_line)
    return "line" if is_line and len(stair) > FEW_LEVELS + 1 else "even"


@lru_cache(maxsize=4096)
def is_native(stair: Stair) -> bool:
    """Whether the arithmetic of :mod:`softstair.kernels.triton.line` gives every threshold and
    level of a line exactly, and finds the threshold nearest to any x."""
    if kind(stair) != "line" or stair.axis is not None:
        return False
    row, count = table(stair, torch.device("cpu"))[0], len(stair) - 1
    thresholds, levels = row[:count], row[count : 2 * count + 1]
    (rise, _), (unit, _) = pairs = row[[2 * count + 1, -2, -3, -1]].view(2, 2)
    first, lowest = (
        torch.floor(2 * (v / u) + 0.5) * 0.5 for v, u in ((row[0], unit), (levels[0], rise))
    )
    numbers = torch.arange(count) + first, torch.arange(count + 1) + lowest
    value, product = (
        (n.double() * high + n * low).float()
        for n, (high, low) in zip(reversed(numbers), pairs, strict=True)
    )
    error = thresholds.double() / unit - numbers[0]
    exact = torch.equal(product, thresholds) and torch.equal(value, levels)
    return exact and bool(error.abs().max() < 0.45)


@cache  # a captured graph reads a table where it is, so none may be freed
def table(stair: Stair, device: torch.device) -> Tensor:
    """Return the stair in float32, one row per channel.

    A row holds the thresholds, the levels, the rises and the spacing of the thresholds; then the
    rounding errors of the first rise and of the spacing.
    """
    quanta = stair.quantum if isinstance(stair.quantum, tuple) else (1.0,)
    line = stair.rounded(torch.float32).threshold_line
    assert stair.spacing is not None
    spacing = stair.spacing[0] if line is None else line.unit
    with torch.inference_mode(False), torch.no_grad():
        unit = torch.tensor(quanta, dtype=torch.float64)[:, None]
        rises = [b - a for a, b in pairwise(stair.levels)]
        values = [
            unit * torch.tensor(v, dtype=torch.float64)
            for v in (stair.thresholds, stair.levels, rises)
        ]
        steps = torch.cat([values[2][:, :1], unit * spacing], dim=1)
        rest = steps - steps.float().double()
        return torch.cat([*values, steps[:, 1:], rest], dim=1).float().to(device)


@cache  # as the other tables
def longer_table(stair: Stair, longer: Stair, device: torch.device) -> Tensor:
    """Return the table of a longer stair in float32, with no values beyond those of the stair."""
    count, ends = len(longer) - 1, (stair.levels[0], stair.levels[-1])
    values = table(longer, device).clone()
    values[:, count : 2 * count + 1].clamp_(*ends)
    return values
