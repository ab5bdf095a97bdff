"""A stair made ready for its present noise: what is the same for every element, worked out once.

Under symmetric, log-concave noise the mode is a stair of its own, σ with its thresholds kept
between two limits (see :mod:`softstair.kernels.modes`), and the slope under uniform noise is a
stair too, up at one edge of each support and down at the other. Moved by the mean, a row is

    θ of the mode, n | lower edges, n | upper edges, n | rise·density, n | mean | std

with n = ``COUNT`` thresholds: an element then costs a comparison or two a threshold. All layers of
a network that have the same stair and family are made ready together, on the device, where the
noise is: a step of training needs one launch for it, and no number comes back.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from softstair.kernels.triton import climbing, shapes

__all__ = ["make_ready"]

FEW = tl.constexpr(8)
TIE = tl.constexpr(8 * 1.1920928955078125e-07)
HALVINGS = tl.constexpr(26)


@triton.jit
def _margin(first, last, spacing, std, FAMILY: tl.constexpr):
    """How far beyond its threshold the end of a stair wins; at most to the middle."""
    half = 0.5 * (last - first)
    if FAMILY == "uniform":
        margin = tl.maximum(std * shapes.SQRT3 * (1 - 2 * TIE) - spacing, 0.0)
    else:
        low, high = half * 0.0, half
        for _ in range(HALVINGS):
            distance = 0.5 * (low + high)
            own = distance - tl.floor(distance / spacing) * spacing
            end = shapes.tail(distance / std, FAMILY)
            inside = 1 - shapes.tail(own / std, FAMILY)
            inside -= shapes.tail((spacing - own) / std, FAMILY)
            wins = end > inside + TIE
            low, high = tl.where(wins, distance, low), tl.where(wins, high, distance)
        margin = low
    return tl.minimum(margin, half)


@triton.jit
def _make_ready(means, stds, table, ready, COUNT: tl.constexpr, FAMILY: tl.constexpr):
    at = tl.program_id(0)
    mean = tl.load(means + at).to(tl.float64)
    given = tl.load(stds + at)
    dirac = climbing.is_dirac(given)
    std = tl.where(dirac, 1.0, given.to(tl.float64))
    row = ready + at * (4 * COUNT + 2)
    first = tl.load(table).to(tl.float64)
    last = tl.load(table + COUNT - 1).to(tl.float64)
    margin = last * 0.0
    if COUNT > 1:
        spacing = (last - first) / (COUNT - 1)
        # In float32 the search is over in a few microseconds; it ends where ties do.
        found = _margin(
            first.to(tl.float32),
            last.to(tl.float32),
            spacing.to(tl.float32),
            std.to(tl.float32),
            FAMILY,
        )
        margin = tl.where(dirac, 0.0, found.to(tl.float64))
    half = shapes.SQRT3 * std
    for k in tl.static_range(COUNT):
        threshold = tl.load(table + k).to(tl.float64)
        kept = tl.minimum(tl.maximum(threshold, first + margin), last - margin)
        tl.store(row + k, (kept + mean).to(tl.float32))
        low = threshold + mean - half * (1 + climbing.EDGE)
        high = threshold + mean + half * (1 - climbing.EDGE)
        tl.store(row + COUNT + k, low.to(tl.float32))
        tl.store(row + 2 * COUNT + k, high.to(tl.float32))
        density = tl.load(table + 2 * COUNT + 1 + k).to(tl.float64) / (2 * half)
        tl.store(row + 3 * COUNT + k, tl.where(dirac, 0.0, density).to(tl.float32))
    tl.store(row + 4 * COUNT, mean.to(tl.float32))
    tl.store(row + 4 * COUNT + 1, tl.where(dirac, 0.0, given))


@triton.jit
def ascend(
    x,
    ready,
    table,
    word,
    COUNT: tl.constexpr,
    FAMILY: tl.constexpr,
    FORWARD: tl.constexpr,
    KIND: tl.constexpr,
):
    """The forward pass on a block in float32; ``word`` is random bits, if it draws."""
    if (COUNT <= FEW) & (FORWARD != "expectation"):
        if FORWARD == "random":
            mean, std = tl.load(ready + 4 * COUNT), tl.load(ready + 4 * COUNT + 1)
            if FAMILY == "uniform":
                # 24 bits, each number in the middle of its share of the support.
                number = (word.to(tl.uint32, bitcast=True) >> 8).to(tl.float32)
                unit = std * (2 * shapes.SQRT3 / 16777216)
                moved = (x - (mean - std * shapes.SQRT3 + 0.5 * unit)) - unit * number
            else:
                moved = x - (mean + std * shapes.ppf(shapes.uniform(word), FAMILY))
            thresholds = table
        elif FORWARD == "mode":
            moved, thresholds = x, ready
        else:
            moved, thresholds = x, table
        low, high = tl.load(table + COUNT), tl.load(table + COUNT + 1)
        result = tl.where(moved >= tl.load(thresholds), high, low)
        for k in tl.static_range(1, COUNT):
            above = moved >= tl.load(thresholds + k)
            result = tl.where(above, tl.load(table + COUNT + 1 + k), result)
        result = tl.where(x != x, x, result)
    else:
        mean, std = tl.load(ready + 4 * COUNT), tl.load(ready + 4 * COUNT + 1)
        u = x
        if FORWARD == "random":
            u = shapes.uniform(word)
        result = climbing.value(x, table, 0, mean, std, u, COUNT, FAMILY, FORWARD, KIND)
    return result


@triton.jit
def steepness(x, ready, table, COUNT: tl.constexpr, FAMILY: tl.constexpr, KIND: tl.constexpr):
    """The slope on a block in float32."""
    if (COUNT <= FEW) & (FAMILY == "uniform"):
        inside = (x >= tl.load(ready + COUNT)) & (x < tl.load(ready + 2 * COUNT))
        total = tl.where(inside, tl.load(ready + 3 * COUNT), 0.0)
        for k in tl.static_range(1, COUNT):
            inside = (x >= tl.load(ready + COUNT + k)) & (x < tl.load(ready + 2 * COUNT + k))
            total += tl.where(inside, tl.load(ready + 3 * COUNT + k), 0.0)
    else:
        mean, std = tl.load(ready + 4 * COUNT), tl.load(ready + 4 * COUNT + 1)
        total = climbing.slope(x, table, 0, mean, std, COUNT, FAMILY, KIND)
    return total


def make_ready(table: Tensor, means: Tensor, stds: Tensor, count: int, family: str) -> Tensor:
    """A row for each of the noises, (n, 4·count + 2); mean and std are absolute."""
    ready = torch.empty((len(means), 4 * count + 2), dtype=torch.float32, device=table.device)
    _make_ready[(len(means),)](
        means, stds, table, ready, count, family, num_warps=1, enable_fp_fusion=True
    )
    return ready
