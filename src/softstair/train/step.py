"""One training step: a batch drawn, forward, backward, the optimiser, and what it says counted."""

import torch
import torch.nn.functional as F
from torch import Tensor

from softstair.data.batches import Examples
from softstair.train.state import State

__all__ = ["Step", "compute"]


class Step:
    """The step as it is written: an operation after the other, on any device."""

    def __init__(self, state: State, examples: Examples) -> None:
        self.state, self.examples = state, examples

    def __call__(self) -> None:
        """Trains on the next batch of the epoch's order."""
        state = self.state
        size = state.recipe.batch
        assert state.order is not None
        if state.annealer is not None:
            state.annealer.step()
        state.set_learning_rate()
        batch = state.order[state.step * size : (state.step + 1) * size]
        compute(state, self.examples, state.team.part(batch))
        state.count()


def compute(state: State, examples: Examples, indices: Tensor) -> None:
    """What happens on the device, and nothing else: no number of it is read."""
    x, y = examples.batch(indices, state.recipe.augment)
    with state.autocast():
        scores = state.forward(x)
        loss = F.cross_entropy(scores, y)
    state.optimiser.zero_grad()
    loss.backward()
    state.fill_gradients()
    with torch.no_grad():
        right = (scores.argmax(1) == y).sum()
        if state.team.size > 1:
            state.average(loss, right)
    state.optimiser.step()
    with torch.no_grad():
        state.loss += loss
        state.right += right
