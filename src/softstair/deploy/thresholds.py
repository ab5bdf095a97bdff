"""Thresholds on integer sums that stand for rescaling, batch normalisation and stair, exactly.

What the float network does between a sum and its level is, for one channel, a monotone function of
the sum, however it rounds. So the sums that reach level k are all integers from some threshold on
(or up to one, where the function decreases), and bisection finds it by asking the network itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from softstair.deploy.nodes import FloatSteps, MaxPool, Steps, Sum
from softstair.nn import StairActivation, StairLayer
from softstair.stair import Stair

MAX_PAIRS = 2**22  # pairs of values of which the sums are computed
FAR = 2.0**64  # a sum so large that float32 rounds the addend away: f(FAR) / FAR is the factor
MAX_STAGES = 2  # a layer's scale and bias, then a normalisation
MAX_SEARCHED = 2**18  # thresholds that are searched at once
SAMPLES = 65  # sums of each channel at which stages are compared with the network
LevelIndex = Callable[[Tensor], Tensor]
"""Sums (B, C) int64 -> index of the level that each becomes, (B, C)."""
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class IntegerFeatures:
    """The integers n that a node gives, which stand for n · unit."""

    node: str
    unit: float
    low: int
    high: int
    values: tuple[tuple[float, float], ...] | None = None
    """The least and the greatest float of every integer from ``low`` to ``high``, where known.

    They differ where sums of features round; both are NaN where an integer does not occur."""


@dataclass(frozen=True)
class PendingSum:
    """The sum of node ``source``, and what the float network does with it before its stair."""

    source: str
    before: tuple[Function, ...]  # applied to the sum
    layer: StairLayer | None = None  # of the sum, as long as nothing else was applied
    factor: float = 1.0  # of the sum, before the layer's own scale
    pools: tuple[MaxPool, ...] = ()  # exchanged with the stair, which is monotone
    shortcut: IntegerFeatures | None = None  # added next
    after: tuple[Function, ...] = ()  # applied after the addition


@dataclass(frozen=True)
class LevelThresholds:
    """The thresholds of every channel: index = Σₖ [s ≥ tₖ], or Σₖ [−s ≥ tₖ] where decreasing."""

    thresholds: Tensor  # (C, K − 1) int64
    decreasing: Tensor  # (C,) bool


def search(index: LevelIndex, least: Tensor, greatest: Tensor, levels: int) -> LevelThresholds:
    """Find the thresholds between the least and the greatest sum of each channel.

    A level that every sum reaches has the least sum as its threshold; one that none reaches has the
    greatest sum plus 1.
    """
    with torch.no_grad():
        decreasing = index(greatest[None])[0] < index(least[None])[0]
        sign = torch.where(decreasing, -1, 1)
        low = torch.where(decreasing, -greatest, least)
        high = torch.where(decreasing, -least, greatest) + 1
        level = torch.arange(1, levels)[:, None]
        # Invariant: the first sum that reaches the level is from `below` to `above`.
        below = low.expand(levels - 1, -1).clone()
        above = high.expand(levels - 1, -1).clone()
        while bool((below < above).any()):
            middle = torch.div(below + above, 2, rounding_mode="floor")
            # Where the search has ended, the network is still asked about a sum that can occur.
            reaches = index(sign * torch.minimum(middle, high - 1)) >= level
            searching = below < above
            above = torch.where(searching & reaches, middle, above)
            below = torch.where(searching & ~reaches, middle + 1, below)
    return LevelThresholds(above.t().contiguous(), decreasing)


def fold(
    name: str,
    activation: StairActivation,
    pending: PendingSum,
    source: Sum,
    axis: int,
    searched: bool = True,
) -> tuple[Steps, Sum]:
    """Return the thresholds of a stair and the sum that they apply to.

    Unless they are ``searched``, which takes long with shortcuts, they are the largest of all. The
    weights of channels with a decreasing function are negated.
    """
    shortcut, levels = pending.shortcut, activation.stair.integers or ()
    values = ((None, None),) if shortcut is None else shortcut.values or ()
    if searched:
        rows = _search_at(activation, pending, source, [value for value, _ in values])
    else:
        largest = torch.where(-source.least > source.greatest, source.least, source.greatest + 1)
        same = largest[:, None].expand(-1, len(levels) - 1)
        rows = [LevelThresholds(same, torch.zeros_like(largest, dtype=torch.bool))]
    decreasing = torch.stack([row.decreasing for row in rows]).any(0)
    tables = [_oriented(row, decreasing, source) for row in rows]
    ends = (levels[0], levels[-1])
    if searched:
        floats = _float_steps(activation.stair, pending, source, decreasing)
    else:
        floats = _constant(activation.stair, shortcut, tables[0][:, 0] > source.least)
    if shortcut is None:
        steps = Steps(name, (pending.source,), *ends, tables[0], levels, axis=axis, floats=floats)
    else:
        inputs = (pending.source, shortcut.node)
        table = torch.stack(tables, dim=1).expand(-1, len(values), -1)
        steps = Steps(name, inputs, *ends, table, levels, shortcut.low, axis, floats)
    return steps, _negated(source, decreasing)


def thresholds_of(stair: Stair, x: IntegerFeatures) -> Tensor | None:
    """Return the thresholds (K − 1,) of a stair on integers; None where rounding decides."""
    if x.values is None:
        return None
    values = torch.tensor(x.values)
    occurs = ~values.isnan().any(1)
    index, numbers = stair.index(values[occurs]), torch.arange(x.low, x.high + 1)[occurs]
    if not torch.equal(index[:, 0], index[:, 1]):
        return None
    reached = index[:, 0] >= torch.arange(1, len(stair))[:, None]
    return torch.where(reached, numbers, x.high + 1).amin(1)


def sum_values(a: IntegerFeatures, b: IntegerFeatures) -> tuple[tuple[float, float], ...] | None:
    """Return the floats that stand for each sum of two features in float32."""
    if a.values is None or b.values is None or len(a.values) * len(b.values) > MAX_PAIRS:
        return None
    terms, others = torch.tensor(a.values), torch.tensor(b.values)
    sums = terms[:, None] + others
    numbers = torch.arange(len(terms))[:, None] + torch.arange(len(others))
    occurs = ~sums.isnan().any(-1)
    index, ends = numbers[occurs], []
    for column, reduce in enumerate(("amin", "amax")):
        result = torch.full((len(terms) + len(others) - 1,), torch.nan)
        chosen = sums[..., column][occurs]
        ends.append(result.scatter_reduce(0, index, chosen, reduce, include_self=False).tolist())
    return tuple(zip(*ends, strict=True))


def _float_steps(
    stair: Stair, pending: PendingSum, source: Sum, decreasing: Tensor
) -> FloatSteps | None:
    """Return the stages of the network, a product and a sum each; None if it has others.

    The network's results for 0 and FAR give addends and factors. Whether these give its other
    results is tested at some sums here, and at all thresholds in affine.py.
    """
    relus = nn.ReLU | nn.ReLU6 | nn.Hardtanh  # left out, since the stair clips its input as well
    functions = [function for function in pending.before if not isinstance(function, relus)]
    if len(functions) > MAX_STAGES or pending.after:
        return None
    count, rank = len(source.weight), source.weight.dim()
    # Contiguous, since batch_norm of strided inputs rounds differently.
    points = torch.tensor([[0.0], [FAR]]).repeat(1, count)
    part = torch.linspace(0, 1, SAMPLES).double()
    sums = (source.least[:, None] + part * (source.greatest - source.least)[:, None]).long()
    with torch.no_grad():
        ends = torch.stack([_apply([function], points, rank) for function in functions], 1)
        expected = _apply(functions, sums.t().contiguous(), rank).t()
    for is_fused in (True, False):
        steps = _with_stages(stair, pending.shortcut, ends[1] / FAR, ends[0], is_fused)
        if torch.equal(steps.rescaled(sums), expected) and bool(expected.isfinite().all()):
            steps.factors[0] *= torch.where(decreasing, -1, 1)
            return steps
    return None


def _constant(stair: Stair, shortcut: IntegerFeatures | None, is_lowest: Tensor) -> FloatSteps:
    """Return stages with which every sum of a channel has the lowest level, or the highest."""
    far = torch.where(is_lowest, -1.0, 1.0) * 2.0**12 * (stair.levels[1] - stair.levels[0])
    ones, zeros = torch.ones_like(far), torch.zeros_like(far)
    stages = torch.stack([ones, zeros]), torch.stack([zeros, far])
    return _with_stages(stair, shortcut, *stages, is_fused=True)


def _with_stages(
    stair: Stair,
    shortcut: IntegerFeatures | None,
    factors: Tensor,
    addends: Tensor,
    is_fused: bool,
) -> FloatSteps:
    quantum, limits = stair.quantum, torch.tensor(stair.rounded(torch.float32).thresholds)
    assert isinstance(quantum, float)
    values = torch.zeros(1) if shortcut is None else torch.tensor(shortcut.values)[:, 0]
    return FloatSteps(factors, addends, is_fused, values, limits, quantum)


def _apply(functions: Sequence[Function], sums: Tensor, rank: int) -> Tensor:
    """Return the functions of sums (N, C), for weights of that rank."""
    y = sums.reshape(*sums.shape, *[1] * (rank - 2))
    for function in functions:
        y = function(y)
    return y.reshape(sums.shape)


def _search_at(
    activation: StairActivation,
    pending: PendingSum,
    source: Sum,
    shortcuts: Sequence[float | None],
) -> list[LevelThresholds]:
    """Find the thresholds for each value of the shortcut; the value None means no shortcut.

    Several values are searched at once, because for small tensors an operation takes about the
    same time whatever their size.
    """
    levels, channels, rank = len(activation.stair), len(source.least), source.weight.dim()
    count = max(1, MAX_SEARCHED // (levels * channels))
    rows: list[LevelThresholds] = []
    for start in range(0, len(shortcuts), count):
        values = shortcuts[start : start + count]

        def index(sums: Tensor, values: Sequence[float | None] = values) -> Tensor:
            y = _apply(pending.before, sums.reshape(-1, channels), rank)
            if values[0] is not None:
                y = y + torch.tensor(values, dtype=y.dtype).repeat(len(sums))[:, None]
            return activation.stair.index(_apply(pending.after, y, rank)).reshape(sums.shape)

        least, greatest = (end.repeat(len(values)) for end in (source.least, source.greatest))
        found = search(index, least, greatest, levels)
        parts = (found.thresholds.split(channels), found.decreasing.split(channels))
        rows += map(LevelThresholds, *parts)
    return rows


def _negated(source: Sum, channels: Tensor) -> Sum:
    sign = torch.where(channels, -1, 1)
    weight = source.weight * sign.reshape(-1, *[1] * (source.weight.dim() - 1))
    least = torch.where(channels, -source.greatest, source.least)
    greatest = torch.where(channels, -source.least, source.greatest)
    low, high = int(least.min()), int(greatest.max())
    return replace(source, weight=weight, least=least, greatest=greatest, low=low, high=high)


def _oriented(row: LevelThresholds, decreasing: Tensor, source: Sum) -> Tensor:
    """Return the thresholds for sums that are negated where ``decreasing``.

    A channel that decreases for other values of the shortcut alone has one level for this value,
    so each threshold is reached by every sum, or by none.
    """
    always, never = -source.greatest[:, None], 1 - source.least[:, None]
    negated = torch.where(row.thresholds == source.least[:, None], always, never)
    constant = (decreasing & ~row.decreasing)[:, None]
    return torch.where(constant, negated, row.thresholds)
