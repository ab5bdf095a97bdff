"""A training step: draw a batch, forward, backward, optimiser; eagerly, or as a CUDA graph."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softstair._errors import SoftstairError, first_line
from softstair.data.batches import Examples
from softstair.train.state import State

__all__ = ["CapturedStep", "Step", "compute", "undone"]

WARM_UP = 2
"""Steps to run, and undo, before a capture: kernels are compiled and chosen in them."""


class Step:
    """A training step, one operation after the other, on any device."""

    def __init__(self, state: State, examples: Examples) -> None:
        self.state, self.examples = state, examples

    def __call__(self) -> None:
        """Train on the next batch of the epoch."""
        state, size = self.state, self.state.recipe.batch
        assert state.order is not None
        if state.annealer is not None:
            state.annealer.step()
        state.set_learning_rate()
        batch = state.order[state.step * size : (state.step + 1) * size]
        compute(state, self.examples, state.team.part(batch))
        state.end_step()


def compute(state: State, examples: Examples, indices: Tensor) -> None:
    """Train on the examples at ``indices``; no value is read back from the device."""
    x, y = examples.batch(indices, state.recipe.augment)
    with state.autocast():
        scores = state.forward(x)
        loss = F.cross_entropy(scores, y)
    state.optimiser.zero_grad()
    with state.team.connected():
        loss.backward()
    state.fill_gradients()
    with torch.no_grad():
        correct = (scores.argmax(1) == y).sum()
        if state.team.size > 1:
            state.team.average([*state.running_statistics(), loss], correct)
    state.optimiser.step()
    with torch.no_grad():
        state.loss += loss
        state.correct += correct


class CapturedStep:
    """A :class:`Step` as one CUDA graph.

    The host takes longer to launch the hundred kernels of a step than the device to run them; a
    graph is one launch. What changes from step to step is on the device: the position in the
    epoch's order, the noise, the random state. When the learning rate or the set of annealed layers
    changes, which is a few times per run, the step is captured again.
    """

    def __init__(self, state: State, examples: Examples) -> None:
        self.state, self.examples = state, examples
        device = state.device
        self._order = torch.zeros(state.examples, dtype=torch.int64, device=device)
        self._position = torch.zeros((), dtype=torch.int64, device=device)
        self._batch = torch.arange(state.recipe.batch, device=device)
        self._copied_order: Tensor | None = None
        self._key: tuple[Any, ...] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self.captures = 0

    def __call__(self) -> None:
        """Train on the next batch of the epoch."""
        state = self.state
        if state.annealer is not None:
            state.annealer.step()
        state.set_learning_rate()
        if self._copied_order is not state.order:
            assert state.order is not None
            self._order.copy_(state.order)
            self._position.fill_(state.step)
            self._copied_order = state.order
        key = (state.learning_rate, state.truncated_layers)
        if self._graph is None or key != self._key:
            self._capture()
            self._key = key
        assert self._graph is not None
        self._graph.replay()
        state.end_step()

    def _run(self) -> None:
        size = self.state.recipe.batch
        indices = self._order.index_select(0, self._position * size + self._batch)
        self._position += 1
        compute(self.state, self.examples, indices)

    def _capture(self) -> None:
        # Free the old graph's memory first: two graphs would double the peak.
        self._graph = None
        self.state.optimiser.zero_grad()
        with undone(self.state, self._position):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    self._run()
            torch.cuda.current_stream().wait_stream(stream)
        self.state.optimiser.zero_grad()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._run()
        except RuntimeError as error:
            if "captur" not in str(error):
                raise
            raise SoftstairError(
                "a training step of this model cannot be captured as a CUDA graph "
                f"({first_line(error)}): train with `capture=never`.",
                field="capture",
            ) from None
        self._graph = graph
        self.captures += 1


@contextmanager
def undone(state: State, *others: Tensor) -> Iterator[None]:
    """Undo what steps inside change, in place: graphs keep the addresses of tensors."""
    network = (*state.network.parameters(), *state.network.buffers(), state.loss, state.correct)
    tensors = [*(x.detach() for x in (*network, *others)), *_optimiser_tensors(state)]
    before = [tensor.clone() for tensor in tensors]
    random_state = state.random_state()
    try:
        yield
    finally:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)
        known = {id(tensor) for tensor in tensors}
        for tensor in _optimiser_tensors(state):
            if id(tensor) not in known:  # created by these steps; it starts at zero
                tensor.zero_()
        state.set_random_state(random_state)


def _optimiser_tensors(state: State) -> list[Tensor]:
    values = [x for parameter in state.optimiser.state.values() for x in parameter.values()]
    return [x for x in values if isinstance(x, Tensor)]
