"""The annealer: moves the noise of a network along a schedule.

The clock lives here and nowhere else; where the backward pass may end early, :mod:`truncate
<softstair.truncate>` ends it.
"""

import math
import sys
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from softstair import _check
from softstair.nn import StairLayer, StairModule, layer_count, stair_modules
from softstair.schedule import NoisePath, Schedule
from softstair.truncate import Truncation

__all__ = ["Annealer"]

SMALLEST_STD = 2.0**-149
"""What float32, in which the noise is held, can still tell from 0."""


class Annealer:
    """Sets the noise of every layer of ``net`` at each step.

    net              a stair network, also inside DDP or torch.compile
    schedule         a :class:`Schedule`, or any function (layer, t) -> (mean, std) in quanta
    steps_per_unit   steps in one unit of the schedule's time: ``len(loader)`` for epochs
    update           ``"iteration"`` moves the noise at every step, ``"epoch"`` once per unit
    truncate         end the backward pass at annealed layers
    freeze           parameters behind annealed layers receive no gradient and stand still
    shift            move the weights once by the first mean; None: if the mean is dynamic

    >>> import softstair as ss
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> net = ss.quantise(model, ss.Stair.ternary(), ss.Stair.ternary(), skip="2")
    >>> annealer = Annealer(net, ss.Schedule.for_network(net, period=2), steps_per_unit=10)
    >>> for _ in range(21):
    ...     annealer.step()
    >>> annealer.annealed
    (0,)
    """

    def __init__(
        self,
        net: nn.Module,
        schedule: NoisePath,
        steps_per_unit: int = 1,
        update: Literal["iteration", "epoch"] = "iteration",
        truncate: bool = True,
        freeze: bool = False,
        shift: bool | None = None,
    ) -> None:
        if not isinstance(net, nn.Module):
            raise ValueError(f"net must be a torch.nn.Module, but {net!r} was given.")
        self.net = _unwrapped(net)
        self.layers = layer_count(self.net)
        _check.boolean("truncate", truncate)
        _check.boolean("freeze", freeze)
        if shift is not None:
            _check.boolean("shift", shift)
        _check_fit(net, schedule, self.layers, steps_per_unit, update, truncate, freeze)
        self.schedule, self.steps_per_unit, self.update = schedule, steps_per_unit, update
        self.truncate, self.freeze = truncate, freeze
        self.steps = 0
        self._stairs: list[list[StairModule]] = [[] for _ in range(self.layers)]
        for _, module in stair_modules(self.net):
            if module.scheduled:
                self._stairs[module.layer].append(module)
        self._versions: list[int] = []
        self._together: torch.Tensor | None = None
        self._now: list[tuple[float, float] | None] = [None] * self.layers
        self._truncation = Truncation.of(self.net)
        if shift is None:
            shift = isinstance(schedule, Schedule) and not schedule.static_mean
        if shift:
            self._shift_weights()

    @property
    def t(self) -> float:
        """The time of the next step, in the schedule's units."""
        return self._time(self.steps)

    def _time(self, steps: int) -> float:
        if self.update == "epoch":
            return float(steps // self.steps_per_unit)
        return steps / self.steps_per_unit

    @property
    def annealed(self) -> tuple[int, ...]:
        """The layers whose noise is gone."""
        return tuple(
            layer for layer, noise in enumerate(self._now) if noise and noise[1] < SMALLEST_STD
        )

    @property
    def noise(self) -> tuple[tuple[float, float] | None, ...]:
        """The present (mean, std) of every layer, in quanta; None before the first step."""
        return tuple(self._now)

    def step(self) -> None:
        """Sets the noise for the iteration about to run; call it before the forward pass."""
        self._set(self.t)
        self.steps += 1

    def tick(self) -> None:
        """Moves the clock past an iteration and leaves the noise: within an accumulated batch."""
        self.steps += 1

    def _set(self, t: float) -> None:
        wanted = [self._wanted(layer, t) for layer in range(self.layers)]
        # Somebody else may have written to the noise: a checkpoint that was loaded since.
        mine = self._versions == self._versions_now()
        with torch.no_grad():
            if self._together is not None and (wanted != self._now or not mine):
                # On its way while the device still works on the step before.
                self._together.copy_(torch.tensor(wanted), non_blocking=True)
            for stairs, now, noise in zip(self._stairs, self._now, wanted, strict=True):
                if self._together is None and (noise != now or not mine):
                    for stair in stairs:
                        stair.mean.fill_(noise[0])
                        stair.std.fill_(noise[1])
        self._now, self._versions = list(wanted), self._versions_now()
        self._cut(self.annealed if self.truncate else ())

    def gather(self) -> None:
        """Puts the noise of all layers into one tensor, of which each stair's is a view from then
        on: one copy to the device moves all of it."""
        device = next((stair.mean.device for stairs in self._stairs for stair in stairs), None)
        if device is None:
            return
        together = torch.zeros((self.layers, 2), dtype=torch.float32, device=device)
        for stairs, (mean, std) in zip(self._stairs, together, strict=True):
            for stair in stairs:
                mean.copy_(stair.mean)
                std.copy_(stair.std)
                stair.mean, stair.std = mean, std
        self._together, self._versions = together, []

    @property
    def tied(self) -> list[nn.Parameter]:
        """The parameters that have a gradient whether or not the backward pass comes to them."""
        return [getattr(module, name) for module, name in self._truncation.tied]

    def _versions_now(self) -> list[int]:
        return [stair.std._version for stairs in self._stairs for stair in stairs]

    def _wanted(self, layer: int, t: float) -> tuple[float, float]:
        noise = self.schedule(layer, t)
        try:
            mean, std = (float(value) for value in noise)
            good = math.isfinite(mean) and math.isfinite(std) and std >= 0
        except (TypeError, ValueError):
            good = False
        if not good:
            raise ValueError(
                "schedule must give a finite mean and a std of 0 or above, "
                f"but {noise!r} was given for layer {layer} at t = {t:g}."
            )
        return mean, std

    def _cut(self, layers: tuple[int, ...]) -> None:
        """Ends the backward pass at these layers, and lets it through all others."""
        wanted = [
            # A slope that is no probability density does not vanish with the noise.
            (stair, stair.layer in layers and stair.noise.proper)
            for stairs in self._stairs
            for stair in stairs
        ]
        # The stairs' own flags are asked: another annealer, or another time, may have set them.
        if all(stair.annealed == cut for stair, cut in wanted):
            return
        for stair, cut in wanted:
            stair.annealed = cut
        self._truncation.update(self.net, self.freeze)
        _allow_recompilations(self.layers)

    def _shift_weights(self) -> None:
        means = [self._wanted(layer, 0.0)[0] for layer in range(self.layers)]
        moved: set[int] = set()
        for module in self.net.modules():
            if isinstance(module, StairLayer):
                stair = module.weight_stair
                # A parameter that two layers share moves with the first of them.
                first = id(module.weight) not in moved
                stair.shift(module.weight, means[stair.layer] if first else 0.0)
                moved.add(id(module.weight))

    def state_dict(self) -> dict[str, Any]:
        """The clock, and the schedule it belongs to; the noise itself is in the network's state."""
        schedule = self.schedule.to_json() if isinstance(self.schedule, Schedule) else None
        return {
            "steps": self.steps,
            "steps_per_unit": self.steps_per_unit,
            "update": self.update,
            "freeze": self.freeze,
            "schedule": schedule,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the clock to where :meth:`state_dict` left it; the next step is the next one."""
        mine = self.state_dict()
        if not isinstance(state, Mapping) or set(state) != set(mine):
            raise ValueError(
                f"the annealer's state must hold {', '.join(mine)}, but {state!r} was given."
            )
        for name in ("schedule", "steps_per_unit", "update", "freeze"):
            if state[name] != mine[name]:
                raise ValueError(
                    f"{name} must be the one the state was saved with, {state[name]!r}, "
                    f"but the annealer has {mine[name]!r}."
                )
        steps = self.steps = _check.integer("steps", state["steps"], 0)
        self._now = [None] * self.layers
        if steps:
            self._set(self._time(steps - 1))


def _allow_recompilations(layers: int) -> None:
    """Each newly annealed layer compiles the network once more; dynamo, which gives up after eight
    by default, is told for the whole process to bear with as many as there are layers."""
    if "torch._dynamo" in sys.modules:
        config = sys.modules["torch._dynamo"].config
        # torch 2.6 calls the limit cache_size_limit.
        name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
        setattr(config, name, max(getattr(config, name), layers + 8))


def _unwrapped(net: nn.Module) -> nn.Module:
    while True:
        inner = getattr(net, "_orig_mod", None)
        if isinstance(net, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = net.module
        if not isinstance(inner, nn.Module):
            return net
        net = inner


def _check_fit(
    net: nn.Module,
    schedule: NoisePath,
    layers: int,
    steps_per_unit: int,
    update: str,
    truncate: bool,
    freeze: bool,
) -> None:
    if not callable(schedule):
        raise ValueError(
            f"schedule must be a Schedule or a function (layer, t), but {schedule!r} was given."
        )
    if isinstance(schedule, Schedule) and schedule.layers != layers:
        raise ValueError(
            f"schedule must have as many layers as the network, {layers}, but it has "
            f"{schedule.layers}; Schedule.for_network counts them."
        )
    _check.integer("steps_per_unit", steps_per_unit, 1)
    _check.choice("update", update, ("iteration", "epoch"))
    if freeze and not truncate:
        raise ValueError("freeze goes with truncate=True, but truncate=False was given.")
    parallel = isinstance(net, nn.parallel.DistributedDataParallel)
    if freeze and parallel and not net.find_unused_parameters:
        raise ValueError(
            "freeze needs DistributedDataParallel(find_unused_parameters=True), since frozen "
            "parameters receive no gradient, but find_unused_parameters=False was given."
        )
