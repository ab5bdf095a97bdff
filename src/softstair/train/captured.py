"""A training step as a CUDA graph: a hundred kernels with one launch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from softstair._errors import SoftstairError, first_line
from softstair.train.state import State

WARM_UP_STEPS = 2
"""Steps that run before a capture, to compile and choose kernels; their changes are undone."""


class CapturedStep:
    """Replays one CUDA graph of ``train_on(indices)``; for a single process.

    A step has about a hundred kernels. The host needs more time to launch them than the device to
    run them; a graph needs one launch. What changes in every step is in tensors on the device: the
    position in the epoch, the noise, the learning rates, the state of the random numbers. With
    ``truncate``, the backward pass ends at annealed layers, whose noise is gone. A graph cannot
    change which layers these are: the step is captured again for each layer that is annealed.
    """

    def __init__(self, state: State, train_on: Callable[[Tensor], None]) -> None:
        self.state, self._train_on = state, train_on
        device = state.device
        # The graph reads these tensors at fixed addresses: only their values may change. Behind the
        # order are indices for the steps that run before a capture at the end of an epoch.
        size = state.example_count + WARM_UP_STEPS * state.recipe.run.batch
        self._order = torch.zeros(size, dtype=torch.int64, device=device)
        self._places = torch.arange(state.recipe.run.batch, device=device)  # of the next batch
        self._copied_order: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        # Its kernels start before those that wait in a second stream.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._truncated_layers: tuple[int, ...] = ()
        self.captures = 0

    def __call__(self) -> None:
        """Train on the next batch of the epoch."""
        state = self.state
        if self._copied_order is not state.order:  # a new epoch, or a resumed one
            assert state.order is not None
            self._order[: len(state.order)] = state.order
            first = state.step * state.recipe.run.batch
            torch.arange(first, first + state.recipe.run.batch, out=self._places)
            self._copied_order = state.order
        layers = state.truncated_layers
        if self._graph is None or layers != self._truncated_layers:
            self._capture()
            self._truncated_layers = layers
        assert self._graph is not None
        self._graph.replay()

    def _train_on_next_batch(self) -> None:
        """Run the operations that the graph records; the position in the epoch advances."""
        indices = self._order.index_select(0, self._places)
        self._places += self.state.recipe.run.batch
        self._train_on(indices)

    def _capture(self) -> None:
        # Free the old graph first, with its gradients: two graphs would double the peak memory.
        self._graph = None
        self.state.updates.zero_grad()
        with preserve(self.state, self._places):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UP_STEPS):
                    self._train_on_next_batch()
            torch.cuda.current_stream().wait_stream(self._stream)
        # Without gradients, the captured backward pass allocates them in the graph's own memory.
        self.state.updates.zero_grad()
        self._graph = _captured(self._train_on_next_batch, self._stream)
        self.captures += 1


def _captured(compute: Callable[[], object], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of what a function computes."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            compute()
    except RuntimeError as error:
        if "captur" not in str(error):  # CUDA's errors name a "capture" or "capturing"
            raise
        raise SoftstairError(
            "a training step of this model cannot be captured as a CUDA graph "
            f"({first_line(error)}): train with `capture=never`.",
            field="capture",
        ) from None
    return graph


@contextmanager
def preserve(state: State, *others: Tensor) -> Iterator[None]:
    """Return a context that undoes on exit what :func:`train_on` changed, except the gradients.

    It restores parameters, buffers, the sums of loss and correct answers, the optimiser's state,
    random numbers and the tensors ``others``, all in place: a CUDA graph keeps their addresses.
    """
    network_tensors = (*state.network.parameters(), *state.network.buffers())
    tensors = [x.detach() for x in (*network_tensors, state.loss, state.correct, *others)]
    tensors += optimiser_tensors(state)
    # On the host, so that the memory of a capture is that of a step.
    old_values = [tensor.to("cpu", copy=True) for tensor in tensors]
    random_state = state.random_state()
    try:
        yield
    finally:
        for tensor, old_value in zip(tensors, old_values, strict=True):
            tensor.copy_(old_value)
        restored = {id(tensor) for tensor in tensors}
        for tensor in optimiser_tensors(state):
            # Created inside, by the first step; with zeros, the next step equals a first one.
            if id(tensor) not in restored:
                tensor.zero_()
        state.set_random_state(random_state)


def optimiser_tensors(state: State) -> list[Tensor]:
    """Return the tensors of the optimiser's state."""
    states = state.optimiser.state.values()  # a dictionary for each parameter
    values = [value for parameter_state in states for value in parameter_state.values()]
    return [value for value in values if isinstance(value, Tensor)]
