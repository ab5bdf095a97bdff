"""The last layer: integer weights for one in float, and the scores of a network."""

import math

import torch
from torch import Tensor

from softstair.deploy.nodes import Scores
from softstair.deploy.requantise import Line
from softstair.deploy.values import PendingSum

SCORE_BITS, SCORE_SHIFT, ORDER_BITS = 30, 8, 30


def integer_weights(weight: Tensor, bits: int, largest_input: int) -> tuple[Tensor, Tensor]:
    """Return weights of so many bits, and what 1 stands for in each output, (O,) float64.

    They have fewer levels where sums would not fit into 32 bits.
    """
    weight = weight.detach().double()
    largest = weight.flatten(1).abs().amax(1).clamp(min=1e-30)
    total = weight.flatten(1).abs().sum(1) / largest * max(largest_input, 1)
    room = int((2.0 ** (SCORE_BITS - 1) / total.clamp(min=1)).min())
    quanta = largest / max(min(2 ** (bits - 1) - 1, room), 1)
    return (weight / quanta.reshape(-1, *[1] * (weight.dim() - 1))).round(), quanta


def scores_of(x: PendingSum, line: Line, axis: int) -> Scores:
    """Return the node of the scores that stand for a line of sums."""
    largest = torch.maximum(x.least.abs(), x.greatest.abs()).double()
    # Where the weights are 0, or as good as 0, the unit is one that can hold the bias.
    slope = torch.where(line.slope == 0, 2.0**-100, line.slope)
    is_constant = (line.offset / slope).abs() > 2.0**SCORE_BITS
    slope = torch.where(is_constant, line.offset.abs() / 2.0 ** (SCORE_BITS - 2), slope)
    bias = line.offset / slope
    room = (2.0**SCORE_BITS / (largest + bias.abs()).clamp(min=1)).min()
    shift = max(0, min(SCORE_SHIFT, math.floor(math.log2(float(room)))))
    shift = shift if bool(bias.any()) else 0
    scale, whole = slope / 2**shift, (bias * 2**shift).round()
    order = (scale / scale.abs().max() * 2.0**ORDER_BITS).round()
    if bool((scale == scale[0]).all()):
        order = torch.ones_like(order)
    low = int(((x.least << shift) + whole.long()).min())
    high = int(((x.greatest << shift) + whole.long()).max())
    facts = (whole.int(), scale, order.int(), shift, axis)
    return Scores(f"{x.source}.scores", (x.source,), low, high, *facts)
