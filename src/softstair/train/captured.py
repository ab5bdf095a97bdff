"""The training step as one CUDA graph, which the host launches and does not wait for.

A step of a hundred kernels takes the host longer to launch than the device to run. Captured once,
it is one launch. Everything that changes from step to step is on the device: the place in the
epoch's order, the noise, the random numbers' state. What the graph itself depends on, the set of
annealed layers and the learning rate, changes a few times a run, and then it is captured anew.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from softstair.data.batches import Examples
from softstair.train.state import State
from softstair.train.step import compute

__all__ = ["CapturedStep", "undone"]

WARM_UP = 2
"""Steps that are run, and undone, before a capture: kernels are compiled and chosen in them."""


class CapturedStep:
    """The same as :class:`Step <softstair.train.step.Step>`, as a graph."""

    def __init__(self, state: State, examples: Examples) -> None:
        self.state, self.examples = state, examples
        device = state.device
        self._order = torch.zeros(state.examples, dtype=torch.int64, device=device)
        self._at = torch.zeros((), dtype=torch.int64, device=device)
        self._batch = torch.arange(state.recipe.batch, device=device)
        self._held: Tensor | None = None
        self._key: tuple[Any, ...] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self.captures = 0

    def __call__(self) -> None:
        """Trains on the next batch of the epoch's order."""
        state = self.state
        if state.annealer is not None:
            state.annealer.step()
        state.set_learning_rate()
        if self._held is not state.order:
            assert state.order is not None
            self._order.copy_(state.order)
            self._at.fill_(state.step)
            self._held = state.order
        key = (state.learning_rate, state.annealed)
        if self._graph is None or key != self._key:
            self._capture()
            self._key = key
        assert self._graph is not None
        self._graph.replay()
        state.count()

    def _run(self) -> None:
        size = self.state.recipe.batch
        indices = self._order.index_select(0, self._at * size + self._batch)
        self._at += 1
        compute(self.state, self.examples, indices)

    def _capture(self) -> None:
        # The old graph's memory goes first: two of them at once would be twice the peak.
        self._graph = None
        self.state.optimiser.zero_grad()
        with undone(self.state, self._at):
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
            reason = str(error).strip().partition("\n")[0][:200]
            raise ValueError(
                f"a training step of this model cannot be captured as a CUDA graph ({reason}): "
                "train it with --capture never."
            ) from None
        self._graph = graph
        self.captures += 1


@contextmanager
def undone(state: State, *others: Tensor) -> Iterator[None]:
    """Whatever the steps inside change is as it was before, where it was before."""
    network = (*state.network.parameters(), *state.network.buffers(), state.loss, state.right)
    known = [*(tensor.detach() for tensor in (*network, *others)), *_tensors(state.optimiser)]
    before = [tensor.clone() for tensor in known]
    generators = state.generators()
    try:
        yield
    finally:
        for tensor, value in zip(known, before, strict=True):
            tensor.copy_(value)
        held = {id(tensor) for tensor in known}
        for tensor in _tensors(state.optimiser):
            if id(tensor) not in held:  # made in these steps: it begins at zero
                tensor.zero_()
        state.set_generators(generators)


def _tensors(optimiser: torch.optim.Optimizer) -> list[Tensor]:
    values = [value for held in optimiser.state.values() for value in held.values()]
    return [value for value in values if isinstance(value, Tensor)]
