"""The state of a training: network, optimiser, annealer, random numbers and position."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn

from softstair import _check, _plugins
from softstair.anneal import Annealer
from softstair.nn import layer_count, stair_modules
from softstair.schedule import NoisePath
from softstair.train import parallel
from softstair.train.execution import choose_execution
from softstair.train.optimiser import Bounds
from softstair.train.recipe import Recipe
from softstair.train.settings import HALF
from softstair.train.updates import Updates


def check_batch(recipe: Recipe, example_count: int) -> None:
    """Raise SoftstairError if the training examples do not fill one batch."""
    if recipe.run.batch > example_count:
        allowed = f"an integer from 2 to {example_count}, the number of training examples"
        raise _check.wrong("batch", recipe.run.batch, allowed)


class State:
    """Everything that a training step reads or changes; ``network`` is trained in place.

    Several processes have equal states after each step, except for their random numbers and
    running statistics.

    Attributes:
        epoch, step: Number of complete epochs, and of complete steps of this epoch.
        steps: Number of steps of an epoch.
        order: Order of this epoch's examples; None between two epochs.
        loss, correct: Sums over this epoch's steps, on the device.
        history: Metrics of each complete epoch.
        own_loss: The recipe's own loss, a function of (scores, labels); or None.
        teacher: Returns the loss with a teacher, from (cross entropy, scores, inputs); or None.
        exports: One sentence: whether the network freezes; None for a float network.
    """

    exports: str | None = None
    own_loss: Callable[[Tensor, Tensor], Tensor] | None = None
    teacher: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def __init__(
        self,
        recipe: Recipe,
        network: nn.Module,
        example_count: int,
        device: torch.device,
        own: bool = False,
    ) -> None:
        self.recipe, self.device = recipe, device
        self.example_count = example_count
        check_batch(recipe, example_count)
        self.steps = example_count // recipe.run.batch
        self.network = network.to(device)
        if device.type == "cuda":
            for parameter in self.network.parameters():
                if parameter.dim() == 4:  # the layout of the tensor cores
                    parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        # A model's own buffers may be infinite by design, as attention masks are.
        values = [(name, x) for name, x in self._values() if x.is_floating_point() and x.numel()]
        finite = _largest([value for _, value in values]).isfinite().tolist()
        self._finite = [name for (name, _), was in zip(values, finite, strict=True) if was]
        self.annealer = self._make_annealer(recipe)
        self.updates = Updates(self.network, recipe, self.annealer, device)
        own = own or not {"model", "noise", "loss"}.isdisjoint(recipe.own_code)
        self.execution = choose_execution(
            recipe, self.network, self.annealer, device, self.steps, own, parallel.size()
        )
        self.forward = parallel.distributed(self.network, self.execution.forward)
        if self.execution.fused:
            self.updates.use_fused(self.execution.forward, alone=parallel.size() == 1)
        self.generator = torch.Generator().manual_seed(recipe.run.seed)
        self.epoch, self.step = 0, 0
        self.order: Tensor | None = None
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.correct = torch.zeros((), dtype=torch.int64, device=device)
        self.seconds = 0.0
        self._since = 0.0
        self.history: list[dict[str, Any]] = []

    def _make_annealer(self, recipe: Recipe) -> Annealer | None:
        if recipe.network.is_float:
            return None
        layers = layer_count(self.network)
        schedule: NoisePath = recipe.schedule(layers)
        if (name := recipe.noise.noise_schedule) is not None:
            given = {"layers": layers, "epochs": recipe.run.epochs, "schedule": schedule}
            schedule = cast(NoisePath, _plugins.call(name, "noise_schedule", object, **given))
        annealer = Annealer(
            self.network,
            schedule,
            steps_per_unit=self.steps,
            update=recipe.noise.update,
            truncate=recipe.noise.truncate,
        )
        if self.device.type == "cuda":
            annealer.gather()
        return annealer

    def load_network(self, saved: Mapping[str, Any]) -> None:
        """Load a network, whose weights may have other quanta: fitted to other first weights."""
        stairs = [stair for _, stair in stair_modules(self.network)]
        before = [stair.quantum.clone() for stair in stairs]
        self.network.load_state_dict(saved)
        if any(not torch.equal(a, b.quantum) for a, b in zip(before, stairs, strict=True)):
            self.updates.follow_quanta()

    def begin_epoch(self) -> None:
        """Draw the order of the examples, unless a checkpoint had one."""
        if self.order is None:
            order = torch.randperm(self.example_count, generator=self.generator)
            self.order = order.to(self.device)
            self.loss.zero_()
            self.correct.zero_()
        self.network.train()
        self._since = time.perf_counter()

    def end_epoch(self, metrics: dict[str, Any]) -> None:
        self.history.append(metrics)
        self.epoch, self.step, self.order = self.epoch + 1, 0, None

    @property
    def batch(self) -> Tensor:
        """The numbers of the next batch's examples; of several processes, of this one's part."""
        assert self.order is not None
        size = self.recipe.run.batch
        indices = self.order[self.step * size : (self.step + 1) * size]
        return indices.chunk(parallel.size())[parallel.rank()]

    def end_step(self) -> None:
        """Count a step."""
        self.step += 1
        self.lap()

    def lap(self) -> None:
        """Count the seconds since the last call: of training steps, without evaluation."""
        now = time.perf_counter()
        self.seconds += now - self._since
        self._since = now

    @property
    def optimiser(self) -> torch.optim.Optimizer:
        return self.updates.optimiser

    @property
    def latent_bounds(self) -> dict[str, Bounds]:
        return self.updates.bounds

    @property
    def t(self) -> float:
        """The time in epochs of the next step; at the end of an epoch, of its last step."""
        return self.epoch + min(self.step, self.steps - 1) / self.steps

    @property
    def rate_factor(self) -> float:
        """The factor of all initial learning rates."""
        return self.recipe.optimiser.rate_factor(self.t, self.recipe.run.epochs)

    @property
    def learning_rate(self) -> float:
        return self.recipe.optimiser.learning_rate * self.rate_factor

    def begin_step(self) -> None:
        """Set the noise and the learning rates of the next step."""
        if self.annealer is not None:
            self.annealer.step()
        self.updates.rates.set(self.rate_factor)

    def autocast(self) -> AbstractContextManager[Any]:
        # A CUDA graph would keep the cache; and each weight is cast once per step anyway.
        return torch.autocast(
            self.device.type,
            torch.bfloat16,
            enabled=self.execution.precision in HALF,
            cache_enabled=self.device.type == "cpu",
        )

    @property
    def truncated_layers(self) -> tuple[int, ...]:
        """The layers at which the backward pass ends."""
        if self.annealer is None or not self.annealer.truncate:
            return ()
        return self.annealer.annealed

    def mean_loss(self) -> float:
        return float(self.loss) / max(self.step, 1)

    def accuracy(self) -> float:
        return float(self.correct) / (max(self.step, 1) * self.recipe.run.batch)

    @torch.no_grad()
    def is_finite(self) -> bool:
        """Return whether all parameters and statistics are finite that were so at first."""
        values = dict(self._values())
        return bool(_largest([values[name] for name in self._finite]).isfinite().all())

    def _values(self) -> list[tuple[str, Tensor]]:
        """Return parameters and buffers under all their names; layers may share tensors."""
        parameters = self.network.named_parameters(remove_duplicate=False)
        return [*parameters, *self.network.named_buffers(remove_duplicate=False)]

    def random_state(self) -> dict[str, Any]:
        cuda = self.device.type == "cuda"
        return {
            "order": self.generator.get_state(),
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(self.device) if cuda else None,
        }

    def set_random_state(self, states: dict[str, Any]) -> None:
        self.generator.set_state(states["order"])
        torch.set_rng_state(states["cpu"])
        if self.device.type == "cuda" and states["cuda"] is not None:
            torch.cuda.set_rng_state(states["cuda"], self.device)


@torch.no_grad()
def _largest(tensors: list[Tensor]) -> Tensor:
    """Return the largest absolute value of each tensor, or NaN if it has one, in few kernels."""
    return torch.cat([x.reshape(1) for x in torch._foreach_norm(tensors, math.inf)])
