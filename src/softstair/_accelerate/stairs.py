"""The stairs of fused layers: what the kernels evaluate, prepared on the device.

The limits of the mode take a search. :func:`prepare_rows` computes those of all layers with the
same stair and family in one launch, without a synchronisation with the host. It writes one row per
layer, which the kernels pass to :func:`prepare_from_row`:

    mean | std | low | high
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from softstair.kernels.triton import longer_table, table
from softstair.kernels.triton.evaluator import mode_limits, prepare_few, prepare_line
from softstair.kernels.triton.general import FEW, inverse
from softstair.nn import StairActivation, StairModule
from softstair.noise import Noise
from softstair.stair import Stair

__all__ = [
    "PreparedStair",
    "is_in_quanta",
    "kernel_stair",
    "learns",
    "makes_int8",
    "prepare_from_row",
    "prepare_rows",
    "prepare_stairs",
    "quantum_of",
    "strategy_of",
]


@triton.jit
def prepare_from_row(row, table, COUNT: tl.constexpr, FAMILY: tl.constexpr, FORWARD: tl.constexpr):
    """Return ``prepared`` for tensors of float32, from a row of :func:`prepare_rows`."""
    mean, std = tl.load(row), tl.load(row + 1)
    low, high = tl.load(row + 2), tl.load(row + 3)
    if COUNT <= FEW:
        stair = prepare_few(table, COUNT)
        if FORWARD == "mode":
            # Add the mean to thresholds and limits, instead of subtracting it from every element.
            thresholds, levels, rises = stair
            stair = (_add(thresholds, mean, COUNT), levels, rises)
            mean, low, high = 0.0, low + mean, high + mean
    else:
        stair = prepare_line(table, mean, std, COUNT, FAMILY, FORWARD == "slope")
    return mean, std, inverse(std), stair, (low, high)


class PreparedStair(NamedTuple):
    """A stair as the kernels of the fused layers read it."""

    table: Tensor
    row: Tensor  # mean, std, low and high, from prepare_rows
    constants: Mapping[str, object]  # the kernels' arguments COUNT and FAMILY


def prepare_rows(table: Tensor, means: Tensor, stds: Tensor, count: int, family: str) -> Tensor:
    """Return the rows of layers with the same stair and family: a tensor (len(means), 4).

    ``count`` is the number of thresholds, ``family`` the name of the noise family.
    """
    rows = torch.empty((len(means), 4), dtype=torch.float32, device=table.device)
    _prepare_rows[(len(means),)](
        means, stds, table, rows, means.stride(0), stds.stride(0), count, family, num_warps=1,
        enable_fp_fusion=True,
    )  # fmt: skip
    return rows


@triton.jit
def _prepare_rows(
    means, stds, table, rows, mean_step, std_step, COUNT: tl.constexpr, FAMILY: tl.constexpr
):
    """Write the row of one layer."""
    layer = tl.program_id(0)
    mean, std = tl.load(means + layer * mean_step), tl.load(stds + layer * std_step)
    low, high = mode_limits(table, std, COUNT, FAMILY)
    row = rows + layer * 4
    tl.store(row, mean)
    tl.store(row + 1, std)
    tl.store(row + 2, low)
    tl.store(row + 3, high)


@triton.jit
def _add(values, number, COUNT: tl.constexpr):
    sums = (values[0] + number,)
    for k in tl.static_range(1, COUNT):
        sums = sums + (values[k] + number,)  # type: ignore[assignment]  # noqa: RUF005
    return sums


def strategy_of(stair: StairModule) -> str:
    """Return the forward of a stair: without noise, in evaluation or annealed, a simpler one."""
    if not stair.training:
        return "hard"
    return "mode" if stair.annealed and stair.strategy != "hard" else stair.strategy


def learns(stair: StairModule) -> bool:
    """Whether the quantum of the stair is the parameter, which in evaluation it is not."""
    return stair.log_ratio is not None and stair.training


def makes_int8(stair: StairModule) -> bool:
    """Whether the values of the stair are integers times a quantum that fit into int8."""
    levels = stair.stair.integers
    fits = levels is not None and min(levels) >= -128 and max(levels) <= 127
    return fits and strategy_of(stair) != "expectation" and not learns(stair)


def quantum_of(stair: StairModule) -> float:
    """Return the quantum that kernels use: 1 for a stair with one per channel."""
    quantum = stair.stair.quantum
    return quantum if isinstance(quantum, float) else 1.0


def is_in_quanta(stair: StairModule) -> bool:
    """Whether kernels evaluate the stair in quanta: those that are learned or one per channel."""
    return learns(stair) or stair.stair.axis is not None


def kernel_stair(stair: StairModule) -> Stair:
    """Return the stair that kernels evaluate."""
    if not is_in_quanta(stair):
        return stair.stair
    return _in_quanta(stair.stair) if stair.log_ratio is None else stair.unit_stair


@cache
def _in_quanta(stair: Stair) -> Stair:
    return stair.with_quantum(1.0)


@torch.no_grad()
def prepare_stairs(sites: Iterable[StairModule]) -> dict[StairModule, PreparedStair]:
    """Prepare every stair for its present noise; one launch for those with one stair and family."""
    groups: dict[tuple[Stair, Noise], list[StairModule]] = {}
    for site in sites:
        groups.setdefault((kernel_stair(site), site.noise), []).append(site)
    prepared: dict[StairModule, PreparedStair] = {}
    for (stair, noise), modules in groups.items():
        # Stairs of one layer have the same mean and std, so they share a row.
        noises = {module.std.data_ptr(): (module.mean, module.std) for module in modules}
        means, stds = (_stack(scalars) for scalars in zip(*noises.values(), strict=True))
        if isinstance(stair.quantum, float) and stair.quantum != 1.0:
            means, stds = means * stair.quantum, stds * stair.quantum
        values = table(stair, means.device)
        rows = prepare_rows(values, means, stds, len(stair) - 1, noise.name)
        rows_of = dict(zip(noises, rows, strict=True))
        for module in modules:
            own, row, count = values, rows_of[module.std.data_ptr()], len(stair) - 1
            longer = module.longer_stair(is_in_quanta(module)) if module.training else None
            if longer is not None:  # the limits of the mode, in the row, are those of the stair
                own, count = longer_table(stair, longer, means.device), len(longer) - 1
            # Thresholds of learned features are in quanta, levels and rises are not.
            if learns(module) and isinstance(module, StairActivation):
                own = own.clone()
                own[:, count : 3 * count + 1] *= module.present_quantum()
            constants = {"COUNT": count, "FAMILY": noise.name}
            prepared[module] = PreparedStair(own, row, constants)
    return prepared


def _stack(scalars: Sequence[Tensor]) -> Tensor:
    """Stack scalars; without a copy if they lie at equal distances in one tensor."""
    bases = {scalar.untyped_storage().data_ptr() for scalar in scalars}
    offsets = [scalar.storage_offset() for scalar in scalars]
    steps = {b - a for a, b in pairwise(offsets)}
    if len(bases) > 1 or len(steps) > 1 or min(steps, default=1) < 1:
        return torch.stack(list(scalars))
    return scalars[0].as_strided((len(scalars),), (max(steps, default=1),))
