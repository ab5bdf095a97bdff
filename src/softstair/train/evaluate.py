"""How good the hard network is: evaluation with the noise removed, in float32."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from softstair.data.examples import Examples

__all__ = ["evaluate"]

CHUNK = 500


@torch.no_grad()
def evaluate(
    network: nn.Module, examples: Examples, between: Callable[[], None] = lambda: None
) -> tuple[float, float]:
    """(mean loss, accuracy) of the network in ``eval()``, in which no noise is left.

    ``between`` is called after every chunk of examples: a long evaluation can be stopped there.
    """
    was_training = network.training
    network.eval()
    loss, right = torch.zeros(2, dtype=torch.float64).unbind()
    for x, y in examples.chunks(CHUNK):
        scores = network(x).float()
        loss = loss + F.cross_entropy(scores, y, reduction="sum").double().cpu()
        right = right + (scores.argmax(1) == y).sum().cpu()
        between()
    network.train(was_training)
    return float(loss) / len(examples), float(right) / len(examples)
