"""The annealer as a Lightning callback; needs ``pip install '.[lightning]'``."""

from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError(
        "softstair.integrations.lightning needs Lightning: run pip install '.[lightning]' in the "
        "clone of softstair."
    ) from error

from softstair.integrations import CallbackArguments

__all__ = ["AnnealerCallback"]


class AnnealerCallback(CallbackArguments, Callback):
    """Anneals the quantised network of a LightningModule while it trains; time is in epochs.

    ``AnnealerCallback(period=50, interval="overlapped")`` makes a schedule for the network; see
    :class:`softstair.integrations.CallbackArguments` for all arguments.

    With accumulate_grad_batches the noise moves once per optimiser step. Lightning's checkpoints
    hold the clock, and ``trainer.fit(…, ckpt_path=…)`` sets it.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._state: dict[str, Any] = {}

    @property
    def state_key(self) -> str:
        """Another one for each network, so that a module may hold several."""
        return self._generate_state_key(net=self._net)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A second fit() of the same trainer goes on; a new trainer without a checkpoint begins.
        state = self.state_dict() if trainer.global_step else None
        batches = trainer.num_training_batches
        total = trainer.estimated_stepping_batches * trainer.accumulate_grad_batches
        self.annealer = self._make_annealer(pl_module, batches, state, total)

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
