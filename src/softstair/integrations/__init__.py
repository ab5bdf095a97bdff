"""Callbacks for the training loops of other libraries, each in a module that imports the library:
:mod:`softstair.integrations.lightning` and :mod:`softstair.integrations.transformers`.

The unit of the schedule's time is an epoch, and the clock counts batches: an epoch is one unit
whatever the gradient accumulation. The noise moves with the first batch of each accumulation and
then stays until the optimiser has stepped. The gradients that are summed therefore belong to one
network, and accumulating over k batches equals training on batches k times as large.
"""

import math
from collections.abc import Mapping
from inspect import signature
from typing import Any, Literal

from torch import nn

from softstair import _check
from softstair.anneal import Annealer
from softstair.convert.conversion import ATTRIBUTE
from softstair.schedule import NoisePath, Schedule


class CallbackArguments:
    """The arguments that the callbacks share; the annealer is made when training begins.

    Args:
        schedule: A :class:`softstair.Schedule` or a function (layer, t) -> (mean, std); None makes
            a schedule from ``settings``, with as many layers as the network; ``"blended"`` makes
            :meth:`softstair.Schedule.blended` over the whole training, whose arguments after
            ``steps`` are the ``settings``.
        net: The attribute of the trained module that is the quantised network; None looks for it.
        update: As in :class:`softstair.Annealer`.
        truncate: As in :class:`softstair.Annealer`.
        shift: As in :class:`softstair.Annealer`.
        steps_per_unit: Batches in one unit of the schedule's time; None: those of an epoch.
        **settings: Arguments of a schedule, ``period`` at least unless it is ``"blended"``.

    Attributes:
        annealer: The :class:`softstair.Annealer`; None before training.
    """

    def __init__(
        self,
        schedule: NoisePath | Literal["blended"] | None = None,
        net: str | None = None,
        update: Literal["iteration", "epoch"] = "iteration",
        truncate: bool = True,
        shift: bool | None = None,
        steps_per_unit: int | None = None,
        **settings: Any,
    ) -> None:
        is_blended = schedule == "blended"
        is_given = schedule is not None and not is_blended
        if (schedule is None) != ("period" in settings) or (is_given and settings):
            given = f"{schedule!r} and the settings {', '.join(settings) or 'none'}"
            raise _check.invalid(
                "schedule",
                "must be a Schedule or a function (layer, t), or be left out for the settings of "
                f"one, period at least, but {given} were given",
            )
        if schedule is None:
            Schedule(layers=1, **settings)  # raises now, not when training begins
        if is_blended and not settings.keys() <= set(signature(Schedule.blended).parameters):
            raise _check.wrong("settings", settings, "arguments of softstair.Schedule.blended")
        self._schedule, self._settings, self._net = schedule, settings, net
        self._steps_per_unit = steps_per_unit
        self._options = {"update": update, "truncate": truncate, "shift": shift}
        self.annealer: Annealer | None = None

    def _make_annealer(
        self,
        module: nn.Module,
        batches: float | None,
        state: Mapping[str, Any] | None,
        total: float,
    ) -> Annealer:
        """Return an annealer of the network in ``module``, with the clock of ``state`` if given;
        ``batches`` are those of an epoch, ``total`` those of the training."""
        steps = self._steps_per_unit
        if steps is None:
            if batches is None or math.isinf(batches):
                raise _check.invalid(
                    "steps_per_unit",
                    "must be a number of batches where the training data have no length, but None "
                    "was given",
                )
            steps = int(batches)
        net = quantised_network(module, self._net)
        schedule: NoisePath
        if self._schedule == "blended":
            if not 0 < total < math.inf:
                raise _check.wrong("schedule", "blended", "a Schedule if steps have no end")
            schedule = Schedule.blended(net, total / steps, **self._settings)
        else:
            schedule = self._schedule or Schedule.for_network(net, **self._settings)
        annealer = Annealer(net, schedule, steps, **self._options)  # type: ignore[arg-type]
        if state:
            annealer.load_state_dict(state)
        return annealer

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments as plain data, without a function that is no Schedule."""
        settings = self._settings
        if isinstance(self._schedule, Schedule):
            settings = {k: v for k, v in self._schedule.to_json().items() if k != "layers"}
        own = {"net": self._net, "steps_per_unit": self._steps_per_unit}
        if self._schedule == "blended":
            own["schedule"] = self._schedule
        return {**own, **self._options, **settings}


def quantised_network(module: nn.Module, name: str | None = None) -> nn.Module:
    """Return the submodule of that name; without a name, the result of :func:`softstair.quantise`.

    >>> import softstair as ss
    >>> module = nn.Module()
    >>> module.net = ss.quantise(nn.Sequential(nn.Linear(4, 2), nn.ReLU()), ss.Stair.ternary())
    >>> quantised_network(module) is quantised_network(module, "net") is module.net
    True
    """
    modules = dict(module.named_modules())
    quantised = [key for key, submodule in modules.items() if ATTRIBUTE in vars(submodule)]
    if name is None and len(quantised) <= 1:  # none: built by hand, or an error of the Annealer
        return modules[quantised[0]] if quantised else module
    if name not in modules:
        names = ", ".join(quantised) or "none found"
        raise _check.invalid(
            "net",
            f"must name the quantised network in {type(module).__name__} ({names}), but {name!r} "
            "was given",
        )
    return modules[name]
