"""What training changes, and a checkpoint therefore holds."""

import math
import time
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from softstair.anneal import Annealer
from softstair.nn import layer_count
from softstair.train.checkpoint import CheckpointError, is_like
from softstair.train.execution import choose_execution
from softstair.train.parallel import ALONE, Team, TeamError
from softstair.train.recipe import Recipe

__all__ = ["State", "is_history"]


class State:
    """A network in training: its optimiser, its annealer, its generators, and where it stands.

    ``epoch`` and ``step`` count what is done; ``order`` is the order of the present epoch's
    examples; the sums over the present epoch stay on the device until somebody asks. The processes
    of a ``team`` have the same of all this after each step, but for their random numbers.
    """

    def __init__(
        self,
        recipe: Recipe,
        network: nn.Module,
        examples: int,
        device: torch.device,
        own: bool = False,
        team: Team = ALONE,
    ) -> None:
        self.recipe, self.device, self.examples, self.team = recipe, device, examples, team
        self.steps = examples // recipe.batch
        if not self.steps:
            raise ValueError(
                f"batch must be at most the number of training examples, {examples}, but "
                f"{recipe.batch} was given."
            )
        self.network = network.to(device)
        if device.type == "cuda":
            for parameter in self.network.parameters():
                if parameter.dim() == 4:  # as the tensor cores take them
                    last = torch.channels_last
                    parameter.data = parameter.data.contiguous(memory_format=last)
        self.optimiser = _optimiser(self.network, recipe, device)
        # A model's own buffers may hold an infinity by design, as masks of attention do.
        values = self.network.state_dict().items()
        self._finite = [name for name, value in values if bool(value.isfinite().all())]
        self.annealer: Annealer | None = None
        if not recipe.is_float:
            self.annealer = Annealer(
                self.network,
                recipe.schedule(layer_count(self.network)),
                steps_per_unit=self.steps,
                update=recipe.update,
                truncate=recipe.truncate,
                freeze=recipe.freeze,
            )
            if device.type == "cuda":
                self.annealer.gather()
        own = own or ":" in recipe.model
        self.execution = choose_execution(
            recipe, self.network, self.annealer, device, self.steps, own, team.size
        )
        self.forward = self.execution.forward
        self._zeros: dict[Tensor, Tensor] = {}
        self._compared: tuple[int, ...] | None = None
        self.generator = torch.Generator().manual_seed(recipe.seed)
        self.epoch, self.step = 0, 0
        self.order: Tensor | None = None
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.right = torch.zeros((), dtype=torch.int64, device=device)
        self.seconds, self._since = 0.0, 0.0
        self.history: list[dict[str, Any]] = []

    def begin_epoch(self) -> None:
        """Draws the order of the examples, unless it is drawn."""
        if self.order is None:
            order = torch.randperm(self.examples, generator=self.generator)
            self.order = order.to(self.device)
            self.loss.zero_()
            self.right.zero_()
        self.network.train()
        self._since = time.perf_counter()

    def clock(self) -> None:
        """Counts the seconds since it was last called; the examples per second come of them."""
        now = time.perf_counter()
        self.seconds += now - self._since
        self._since = now

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step; at the end of an epoch, that of its last one."""
        done = min(self.step, self.steps - 1)
        return self.recipe.learning_rate_at(self.epoch + done / self.steps)

    def set_learning_rate(self) -> None:
        """Gives the optimiser the learning rate of the next step."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.learning_rate

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of a training step."""
        # A graph would keep what the cache holds; and each weight is cast once a step anyway.
        return torch.autocast(
            self.device.type,
            torch.bfloat16,
            enabled=self.execution.precision == "bfloat16",
            cache_enabled=self.device.type == "cpu",
        )

    @property
    def annealed(self) -> tuple[int, ...]:
        """The layers at which the backward pass ends."""
        if self.annealer is None or not self.annealer.truncate:
            return ()
        return self.annealer.annealed

    def fill_gradients(self) -> None:
        """Parameters behind annealed layers, which the backward pass did not come to, have
        gradients of zero: momentum goes on as it would have."""
        if self.annealer is None or not self.execution.fused:
            return
        for parameter in self.annealer.tied:
            if parameter.grad is None:
                zero = self._zeros.get(parameter)
                if zero is None:
                    zero = self._zeros[parameter] = torch.zeros_like(parameter)
                parameter.grad = zero

    def average(self, loss: Tensor, right: Tensor) -> None:
        """Makes one step of those of a team: gradients, running statistics and losses become their
        means, and the examples that were classified rightly are added up."""
        named = self.network.named_parameters()
        gradients = {name: one.grad for name, one in named if one.grad is not None}
        if self._compared != self.annealed:  # now the backward pass ends elsewhere, for all alike
            first = self.team.share(lambda: list(gradients))
            with self.team.agreed():
                if other := set(first) ^ set(gradients):
                    raise TeamError(
                        f"every process must have the same gradients, but {min(other)!r} has one "
                        "in some alone: a model that runs other layers for other examples trains "
                        "without torchrun."
                    )
            self._compared = self.annealed
        self.team.average([*gradients.values(), *_statistics(self.network), loss], right)

    def count(self) -> None:
        """A step is done; what it says was added up on the device, which nobody waits for."""
        self.step += 1
        self.clock()

    def end_epoch(self, metrics: dict[str, Any]) -> None:
        """An epoch is done, and this is what it gave."""
        self.history.append(metrics)
        self.epoch, self.step, self.order = self.epoch + 1, 0, None

    def mean_loss(self) -> float:
        """The mean training loss of the epoch so far."""
        return float(self.loss) / max(self.step, 1)

    def accuracy(self) -> float:
        """The share of the epoch's examples that were classified rightly in training."""
        return float(self.right) / (max(self.step, 1) * self.recipe.batch)

    @torch.no_grad()
    def is_finite(self) -> bool:
        """Whether every parameter and statistic of the network is a number still."""
        now = self.network.state_dict()
        return bool(torch.stack([now[name].isfinite().all() for name in self._finite]).all())

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the training depends on."""
        first, *others = self.team.gather(self.generators())
        return {
            "network": self.network.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "annealer": None if self.annealer is None else self.annealer.state_dict(),
            "generators": first,
            **({"others": others} if others else {}),
            "threads": torch.get_num_threads(),
            "epoch": self.epoch,
            "step": self.step,
            "order": self.order,
            "sums": {"loss": self.loss, "right": self.right},
            "seconds": self.seconds,
            "history": self.history,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes back to where :meth:`state_dict` was called; the next step is the next one."""
        try:
            self._load(state)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200].rstrip(".")
            raise CheckpointError(
                f"the checkpoint does not fit this network and recipe ({reason}): resume it with "
                "the model and data that it was begun with."
            ) from None

    def _load(self, state: dict[str, Any]) -> None:
        mine = self.network.state_dict()
        if not is_like(state["network"], mine):
            raise ValueError("its parameters have other names, shapes or types")
        self.network.load_state_dict(state["network"])
        self._load_optimiser(state["optimiser"])
        if self.annealer is not None:
            self.annealer.load_state_dict(state["annealer"])
        epoch, step, order = state["epoch"], state["step"], state["order"]
        whole = all(type(number) is int for number in (epoch, step))
        if not (whole and 0 <= epoch <= self.recipe.epochs and 0 <= step <= self.steps):
            raise ValueError("its position lies outside the run")
        if (order is None) != (step == 0):
            raise ValueError("its order and its position do not go together")
        whole = order is None or order.dtype == torch.int64
        if order is not None and not (
            whole and torch.equal(order.sort().values, torch.arange(self.examples))
        ):
            raise ValueError("its order is of other examples")
        if not is_history(state["history"]) or len(state["history"]) != epoch:
            raise ValueError("its history is not that of the epochs before")
        threads, seconds = state["threads"], float(state["seconds"])
        if type(threads) is not int or not 1 <= threads <= 1024 or not 0 <= seconds < math.inf:
            raise ValueError("its threads or seconds are none")
        generators = [state["generators"], *state.get("others", [])]
        if len(generators) != self.team.size:
            raise ValueError(f"it is of {len(generators)} processes")
        self.epoch, self.step, self.seconds = epoch, step, seconds
        self.order = None if order is None else order.to(self.device)
        self.loss.copy_(state["sums"]["loss"])
        self.right.copy_(state["sums"]["right"])
        self.history = list(state["history"])
        torch.set_num_threads(threads)
        self.set_generators(generators[self.team.rank])

    def _load_optimiser(self, state: dict[str, Any]) -> None:
        parameters = [one for group in self.optimiser.param_groups for one in group["params"]]
        for number, values in state["state"].items():
            for value in values.values():
                whole = isinstance(value, Tensor) and value.dim() > 0
                if whole and value.shape != parameters[number].shape:
                    raise ValueError("its optimiser is of other parameters")
        self.optimiser.load_state_dict(state)
        # How it steps is a matter of this device, not of the one that the state comes from.
        for group in self.optimiser.param_groups:
            for name in ("fused", "capturable"):
                if name in self.optimiser.defaults:
                    group[name] = self.optimiser.defaults[name]
        for parameter, held in self.optimiser.state.items():
            for name, value in held.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    # Laid out as its parameter is, which a fused optimiser asks for.
                    held[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
            if self.device.type == "cuda" and isinstance(held.get("step"), Tensor):
                held["step"] = held["step"].to(self.device)

    def generators(self) -> dict[str, Any]:
        """The state of every source of random numbers."""
        cuda = self.device.type == "cuda"
        return {
            "order": self.generator.get_state(),
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(self.device) if cuda else None,
        }

    def set_generators(self, states: dict[str, Any]) -> None:
        """Takes them back to where :meth:`generators` was called."""
        self.generator.set_state(states["order"])
        torch.set_rng_state(states["cpu"])
        if self.device.type == "cuda" and states["cuda"] is not None:
            torch.cuda.set_rng_state(states["cuda"], self.device)


def is_history(lines: Any) -> bool:
    """Whether these are lines of metrics, one epoch after the other."""
    numbers = ("train_loss", "train_accuracy", "valid_loss", "valid_accuracy")
    return isinstance(lines, list) and all(
        isinstance(line, dict)
        and line.get("epoch") == epoch
        and all(_is_finite(line.get(name)) for name in numbers)
        and all(0 <= line[name] <= 1 for name in numbers if name.endswith("accuracy"))
        and isinstance(line.get("noise", []), list)
        and len(line.get("noise", [])) == len(lines[0].get("noise", []))
        and all(map(_is_noise, line.get("noise", [])))
        for epoch, line in enumerate(lines)
    )


def _is_noise(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(map(_is_finite, pair))


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _statistics(network: nn.Module) -> list[Tensor]:
    """What batch normalisations find out about the examples that they see."""
    found = []
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.training:
            found += [module.running_mean, module.running_var]
    return [one for one in found if one is not None]


def _optimiser(network: nn.Module, recipe: Recipe, device: torch.device) -> torch.optim.Optimizer:
    rate, decay = recipe.learning_rate, recipe.weight_decay
    cuda = device.type == "cuda"
    if recipe.optimiser == "adam":
        return torch.optim.Adam(
            network.parameters(), rate, weight_decay=decay, fused=cuda, capturable=cuda
        )
    return torch.optim.SGD(
        network.parameters(), rate, momentum=recipe.momentum, weight_decay=decay, fused=cuda
    )
