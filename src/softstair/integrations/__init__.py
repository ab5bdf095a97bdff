"""Callbacks for other people's training loops, each in a file that imports its own framework:
:mod:`softstair.integrations.lightning` and :mod:`softstair.integrations.transformers`.

What they share is here. The unit of the schedule's time is an epoch and the clock counts batches,
so that an epoch is one unit whatever the gradient accumulation. The noise moves with the first
batch of each accumulation and then stays until the optimiser has stepped: gradients that are summed
belong to one network, and accumulating over k batches is training on batches k times as large.
"""

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from softstair.anneal import Annealer
from softstair.convert import ATTRIBUTE
from softstair.schedule import NoisePath, Schedule


class Plan:
    """What a callback was told, until there is a network and a number of batches to anneal with.

    schedule         a :class:`Schedule` or a function (layer, t) -> (mean, std); None: ``settings``
    settings         of a schedule (period, interval, …) that counts the network's layers itself
    net              the name of the stair network in the module trained; None: it is looked for
    steps_per_unit   batches in one unit of the schedule's time; None: those of an epoch
    options          further arguments of :class:`Annealer`
    """

    def __init__(
        self,
        schedule: NoisePath | None,
        settings: dict[str, Any],
        net: str | None,
        steps_per_unit: int | None,
        options: dict[str, Any],
    ) -> None:
        given = ", ".join(settings) or "none"
        if (schedule is None) != ("period" in settings) or (schedule is not None and settings):
            raise ValueError(
                "schedule must be a Schedule or a function (layer, t), or else be left out for the "
                f"settings of one, period at least, but {schedule!r} and the settings {given} "
                "were given."
            )
        if schedule is None:
            Schedule(layers=1, **settings)  # refuses nonsense now, not when training begins
        self.schedule, self.settings = schedule, settings
        self.net, self.steps_per_unit, self.options = net, steps_per_unit, options

    def annealer(
        self, module: nn.Module, batches: float | None, state: Mapping[str, Any] | None
    ) -> Annealer:
        """An annealer for the network in ``module``, at the clock of ``state`` if there is one."""
        units = self.steps_per_unit
        if units is None:
            if batches is None or math.isinf(batches):
                raise ValueError(
                    "steps_per_unit must be a number of batches where the training data have no "
                    "length, but None was given."
                )
            units = int(batches)
        net = stair_network(module, self.net)
        schedule = self.schedule or Schedule.for_network(net, **self.settings)
        annealer = Annealer(net, schedule, units, **self.options)
        if state:
            annealer.load_state_dict(state)
        return annealer

    def arguments(self) -> dict[str, Any]:
        """The callback's arguments again, in plain data; a function of the user's is left out."""
        settings = self.settings
        if isinstance(self.schedule, Schedule):
            settings = {k: v for k, v in self.schedule.to_json().items() if k != "layers"}
        return {"net": self.net, "steps_per_unit": self.steps_per_unit, **self.options, **settings}


def stair_network(module: nn.Module, name: str | None = None) -> nn.Module:
    """The submodule called ``name``; without a name, the one that :func:`softstair.quantise` made.

    >>> import softstair as ss
    >>> module = nn.Module()
    >>> module.net = ss.quantise(nn.Sequential(nn.Linear(4, 2), nn.ReLU()), ss.Stair.ternary())
    >>> stair_network(module) is stair_network(module, "net") is module.net
    True
    """
    modules = dict(module.named_modules())
    made = [key for key, found in modules.items() if ATTRIBUTE in vars(found)]
    if name is None and len(made) <= 1:  # none: put together by hand, or the Annealer's error
        return modules[made[0]] if made else module
    if name not in modules:
        raise ValueError(
            f"net must name the stair network in {type(module).__name__} "
            f"({', '.join(made) or 'none found'}), but {name!r} was given."
        )
    return modules[name]
