"""The annealer as a Lightning callback; needs ``pip install 'softstair[lightning]'``."""

from typing import Any, Literal

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError(
        "softstair.integrations.lightning needs Lightning: pip install 'softstair[lightning]'."
    ) from error

from softstair.anneal import Annealer
from softstair.integrations import Plan
from softstair.schedule import NoisePath

__all__ = ["AnnealerCallback"]


class AnnealerCallback(Callback):
    """Anneals the stair network of a LightningModule while it trains; a unit of time is an epoch.

    schedule         a :class:`softstair.Schedule` or a function (layer, t) -> (mean, std); None:
                     ``settings`` make one: ``AnnealerCallback(period=50, interval="overlapped")``
    net              the attribute of the module that is the stair network; None: it is looked for
    steps_per_unit   batches in one unit of the schedule's time; None: those of an epoch
    update, truncate, freeze, shift   as in :class:`softstair.Annealer`, which ``annealer`` holds

    With accumulate_grad_batches the noise moves once per optimiser step. Lightning's checkpoints
    hold the clock, and ``trainer.fit(…, ckpt_path=…)`` sets it.
    """

    def __init__(
        self,
        schedule: NoisePath | None = None,
        net: str | None = None,
        update: Literal["iteration", "epoch"] = "iteration",
        truncate: bool = True,
        freeze: bool = False,
        shift: bool | None = None,
        steps_per_unit: int | None = None,
        **settings: Any,
    ) -> None:
        options = {"update": update, "truncate": truncate, "freeze": freeze, "shift": shift}
        self._plan = Plan(schedule, settings, net, steps_per_unit, options)
        self._state: dict[str, Any] = {}
        self.annealer: Annealer | None = None

    @property
    def state_key(self) -> str:
        """One for each network, so that a module may hold several."""
        return self._generate_state_key(net=self._plan.net)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A second fit() of the same trainer goes on; a new trainer without a checkpoint begins.
        state = self.state_dict() if trainer.global_step else None
        self.annealer = self._plan.annealer(pl_module, trainer.num_training_batches, state)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert self.annealer is not None
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.annealer.step()
        else:
            self.annealer.tick()  # the clock runs; the noise stays until the optimiser steps

    def state_dict(self) -> dict[str, Any]:
        return self._state if self.annealer is None else self.annealer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state, self.annealer = state_dict, None  # Lightning loads before training starts
