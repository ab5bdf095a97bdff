"""A network in training on random examples: a call of it is one training step."""

import time

import torch
from torch import Tensor, nn

from softstair.bench.clock import synchronise
from softstair.bench.memory import peak, size
from softstair.data.batches import Examples
from softstair.train.captured import CapturedStep
from softstair.train.compiled import Compiled
from softstair.train.recipe import Recipe
from softstair.train.state import State
from softstair.train.step import Step

__all__ = ["Contestant"]


class Contestant:
    """Trains as ``softstair train`` would, a step a call; the epoch of its schedule stands still.

    compiler   mode of torch.compile for the network, in place of what its recipe says; None: no
    seconds    that its first step took: kernels compiled and chosen, and the graph captured

    >>> from softstair.bench.subject import subject
    >>> one = subject("digits")
    >>> examples = one.examples(8, 1, torch.device("cpu"))
    >>> recipe = one.recipe(8, weights="float", features="float")
    >>> contestant = Contestant(recipe, one.network(), examples, torch.device("cpu"))
    >>> contestant()
    >>> contestant.treatment
    'eager'
    """

    def __init__(
        self,
        recipe: Recipe,
        network: nn.Module,
        examples: Examples,
        device: torch.device,
        compiler: str | None = None,
    ) -> None:
        self.examples, self.device, self.epoch = examples, device, 0
        self.state = State(recipe, network, len(examples), device)
        if compiler is not None:
            self.state.forward = _ChannelsLast(self.state.network, compiler)
        self._tuned = compiler not in (None, "default")
        self.step = self._new_step()
        self.seconds = self.go_to(0)

    def __call__(self) -> None:
        if self.state.step == self.state.steps:
            self.rewind()
        self.step()

    def rewind(self) -> None:
        """Back to the beginning of the epoch, in another order; costs what an epoch's begin does,
        and is left out of what is timed."""
        state = self.state
        state.step, state.order = 0, None
        state.begin_epoch()
        if state.annealer is not None:
            state.annealer.steps = self.epoch * state.steps

    def go_to(self, epoch: int) -> float:
        """Sets the clock of the schedule to an epoch; the seconds of the first step there, for
        which it may be compiled and captured."""
        self.epoch = epoch
        self.rewind()
        synchronise(self.device)
        start = time.perf_counter()
        self()
        synchronise(self.device)
        return time.perf_counter() - start

    def memory(self) -> int:
        """Bytes at the peak of a step, captured anew where it is a graph: parameters, optimiser and
        everything in between, but not the examples."""
        state = self.state
        del self.step
        state.optimiser.zero_grad()
        kept = [*state.network.state_dict().values(), *_numbers(state.optimiser)]
        # What the compilers and cuDNN tried out is over: only the step is left.
        self.step = self._new_step()
        self.rewind()
        known = [*kept, self.examples.x, self.examples.y, state.loss, state.right]
        return size(kept) + peak(self, self.device, known)

    @property
    def annealed(self) -> tuple[int, ...]:
        """The layers whose noise is gone."""
        return () if self.state.annealer is None else self.state.annealer.annealed

    @property
    def treatment(self) -> str:
        """How its steps run."""
        state, words = self.state, []
        if state.treatment.fused:
            words.append("fused")
        elif isinstance(state.forward, Compiled | _ChannelsLast):
            words.append("tuned" if self._tuned else "compiled")
        words += ["captured"] if state.treatment.captured else []
        return ", ".join(words) or "eager"

    def _new_step(self) -> Step | CapturedStep:
        return (CapturedStep if self.state.treatment.captured else Step)(self.state, self.examples)


class _ChannelsLast:
    """A network compiled together with the change of its examples' layout to the tensor cores'."""

    def __init__(self, network: nn.Module, mode: str) -> None:
        def forward(x: Tensor) -> Tensor:
            return network(x.contiguous(memory_format=torch.channels_last))

        self._run = torch.compile(forward, mode=mode)

    def __call__(self, x: Tensor) -> Tensor:
        return self._run(x)


def _numbers(optimiser: torch.optim.Optimizer) -> list[Tensor]:
    values = [value for held in optimiser.state.values() for value in held.values()]
    return [value for value in values if isinstance(value, Tensor)]
