"""Stairs prepared for fused layers, which evaluate one stair in several kernels.

The limits of the mode take a search. :func:`prepare_rows` computes those of all layers with the
same stair and family in one launch, without a synchronisation with the host. It writes one row per
layer, which the kernels pass to :func:`prepare_from_row`:

    mean | std | low | high
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from softstair.kernels.triton.general import FEW, inverse
from softstair.kernels.triton.prepare import mode_limits, prepare_few, prepare_line

__all__ = ["PreparedStair", "prepare_from_row", "prepare_rows"]


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
