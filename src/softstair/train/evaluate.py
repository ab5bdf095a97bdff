"""How good the hard network is: evaluation with the noise removed, in float32."""

import contextlib
from collections.abc import Callable, Iterator

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
    # Added up where the examples are: nobody waits for a device before the end.
    loss = torch.zeros((), dtype=torch.float64, device=examples.y.device)
    right = torch.zeros((), dtype=torch.int64, device=examples.y.device)
    with _float32():
        for x, y in examples.chunks(CHUNK):
            scores = network(x).float()
            loss += F.cross_entropy(scores, y, reduction="sum")
            right += (scores.argmax(1) == y).sum()
            between()
    network.train(was_training)
    return float(loss) / len(examples), float(right) / len(examples)


@contextlib.contextmanager
def _float32() -> Iterator[None]:
    """Convolutions in float32: on a GPU, torch takes the shorter TF32 for them by itself."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
