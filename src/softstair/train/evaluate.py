"""How good the hard network is: evaluation with the noise removed, in float32."""

import functools
import operator
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softstair.data.batches import Examples
from softstair.train.parallel import ALONE, Team
from softstair.train.products import products_in

__all__ = ["evaluate"]

CHUNKS = {"cuda": 1000}
"""Examples at a time: on a GPU, starting kernels would otherwise take longer than they do."""
CHUNK = 500
"""Everywhere else."""


@torch.no_grad()
def evaluate(
    network: nn.Module,
    examples: Examples,
    between: Callable[[], None] = lambda: None,
    team: Team = ALONE,
    forward: Callable[[Tensor], Tensor] | None = None,
) -> tuple[float, float]:
    """(mean loss, accuracy) of the network in ``eval()``, in which no noise is left; ``forward``
    is how it runs, if not as it is.

    ``between`` is called after every chunk of examples: a long evaluation can be stopped there. A
    team takes a chunk each, and each of it has the result that one alone would have.
    """
    was_training = network.training
    network.eval()
    size = CHUNKS.get(examples.y.device.type, CHUNK)
    chunks = -(-len(examples) // size)
    # Kept where the examples are: nobody waits for a device before the end.
    sums = torch.zeros((chunks, 2), dtype=torch.float64, device=examples.y.device)
    with products_in("float32"):
        for number, (x, y) in enumerate(examples.chunks(size)):
            if number % team.size == team.rank:
                scores = (forward or network)(x).float()
                sums[number, 0] = F.cross_entropy(scores, y, reduction="sum")
                sums[number, 1] = (scores.argmax(1) == y).sum()
            if (number + 1) % team.size == 0 or number + 1 == chunks:
                between()
    network.train(was_training)
    team.add(sums)
    # One after the other, whoever computed them: another order would round otherwise.
    loss, right = (functools.reduce(operator.add, column) for column in sums.T.tolist())
    return loss / len(examples), right / len(examples)
