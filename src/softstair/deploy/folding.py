"""All that lies between a sum and its stair, folded into thresholds on the sum."""

from dataclasses import replace

import torch
from torch import Tensor

from softstair.deploy import nodes
from softstair.deploy.thresholds import Crossing, search
from softstair.deploy.values import Pending
from softstair.nn import StairActivation

__all__ = ["fold"]


def fold(
    name: str, activation: StairActivation, x: Pending, source: nodes.Sum, axis: int
) -> tuple[nodes.Steps, nodes.Sum]:
    """The thresholds of a stair, and the sum that they are for: where a normalisation turns the
    order of a channel round, its weights change their sign. ``axis`` is that of its channels."""
    values = (None,) if x.beside is None else x.beside.values or ()
    rows = [_searched(activation, x, source, value) for value in values]
    turned = torch.stack([row.turned for row in rows]).any(0)
    rows = [_turned(row, turned, source) for row in rows]
    levels = activation.stair.integers or ()
    if x.beside is None:
        steps = nodes.Steps(name, (x.source,), 0, 0, rows[0].thresholds, levels, axis=axis)
    else:
        table = torch.stack([row.thresholds for row in rows], dim=1)
        inputs = (x.source, x.beside.node)
        steps = nodes.Steps(name, inputs, 0, 0, table, levels, x.beside.low, axis)
    return steps, _negated(source, turned)


def _searched(
    activation: StairActivation, x: Pending, source: nodes.Sum, beside: float | None
) -> Crossing:
    """The thresholds for one value of the shortcut, if there is one."""

    def probe(sums: Tensor) -> Tensor:
        y = sums if source.weight.dim() == 2 else sums[:, :, None, None]
        for one in x.chain:
            y = one(y)
        if beside is not None:
            y = y + torch.full_like(y, beside)
        for one in x.after:
            y = one(y)
        return activation.stair.index(y).reshape(sums.shape)

    return search(probe, source.least, source.greatest, len(activation.stair.levels))


def _negated(source: nodes.Sum, turned: Tensor) -> nodes.Sum:
    """The same sum, of the other sign in some channels."""
    sign = torch.where(turned, -1, 1)
    weight = source.weight * sign.reshape(-1, *[1] * (source.weight.dim() - 1))
    least = torch.where(turned, -source.greatest, source.least)
    greatest = torch.where(turned, -source.least, source.greatest)
    low, high = int(least.min()), int(greatest.max())
    return replace(source, weight=weight, least=least, greatest=greatest, low=low, high=high)


def _turned(row: Crossing, turned: Tensor, source: nodes.Sum) -> Crossing:
    """The thresholds of channels whose order is turned for other values of the shortcut: for this
    one they have a single level throughout, and no order of their own."""
    always, never = -source.greatest[:, None], 1 - source.least[:, None]
    flipped = torch.where(row.thresholds == source.least[:, None], always, never)
    still = (turned & ~row.turned)[:, None]
    return Crossing(torch.where(still, flipped, row.thresholds), turned)
