"""The loss of a batch: cross entropy, of mixtures too, or a function of the user's own."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from softstair import _check, _plugins
from softstair._errors import first_line


def cross_entropy(scores: Tensor, y: Tensor, share: Tensor | None, smoothing: float) -> Tensor:
    """Return the mean cross entropy of a batch.

    A label has the probability 1 − ``smoothing`` + ``smoothing``/classes, each other class the
    rest in equal parts. ``share`` is that of the labels ``y.flip(0)`` in a mixture.
    """
    if share is None:
        return F.cross_entropy(scores, y, label_smoothing=smoothing)
    rest = smoothing / scores.shape[1]
    targets = torch.full(scores.shape, rest, device=y.device)
    targets.scatter_(1, y[:, None], 1 - smoothing + rest)
    targets = targets.lerp(targets.flip(0), share)
    logarithms = F.log_softmax(scores, 1, dtype=torch.float32)
    return (targets * logarithms).sum() / -len(y)


def own_loss(name: str, classes: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss that package.module:object names, after a trial with two examples."""
    loss: Any = _plugins.call(name, "loss", object)
    try:
        value = loss(torch.zeros(2, classes), torch.arange(2))
        problem = None if value.shape == () else f"returned the shape {tuple(value.shape)}"
    except Exception as error:
        problem = f"raised {type(error).__name__} ({first_line(error)})"
    if problem is not None:
        raise _check.invalid("loss", f"must return one number, but {name} {problem}")
    return cast(Callable[[Tensor, Tensor], Tensor], loss)
