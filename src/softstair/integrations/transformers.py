"""The annealer as a callback of Hugging Face's Trainer; ``pip install softstair[transformers]``."""

from typing import Any, Literal

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import has_length
except ImportError as error:
    raise ImportError(
        "softstair.integrations.transformers needs Transformers and Accelerate: "
        "pip install 'softstair[transformers]'."
    ) from error

from softstair.anneal import Annealer
from softstair.integrations import Plan
from softstair.schedule import NoisePath

__all__ = ["AnnealerCallback"]


class AnnealerCallback(TrainerCallback, ExportableState):
    """Anneals the stair network of a Trainer's model while it trains; a unit of time is an epoch.

    schedule         a :class:`softstair.Schedule` or a function (layer, t) -> (mean, std); None:
                     ``settings`` make one: ``AnnealerCallback(period=50, interval="overlapped")``
    net              the attribute of the model that is the stair network; None: it is looked for
    steps_per_unit   batches in one unit of the schedule's time; None: those of an epoch
    update, truncate, freeze, shift   as in :class:`softstair.Annealer`, which ``annealer`` holds

    With gradient_accumulation_steps the noise moves once per optimiser step. The Trainer's
    checkpoints hold the clock (trainer_state.json), and ``train(resume_from_checkpoint=…)`` sets
    it, with restore_callback_states_from_checkpoint or without.
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
        self.annealer: Annealer | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        entries: Any = state.stateful_callbacks
        # The Trainer saves over this entry, which checkpoints made without the callback lack.
        saved = entries.setdefault(type(self).__name__, {})
        if isinstance(saved, list):
            raise ValueError(
                f"callbacks must hold one {type(self).__name__}, since a Trainer cannot restore "
                f"more of a class, but {len(saved)} were given; subclass it for the others."
            )
        loader = kwargs["train_dataloader"]
        batches = len(loader) if has_length(loader) else None
        # The entry of a run that begins is this callback's own, maybe of an earlier train().
        clock = saved.get("attributes", {}).get("clock") if state.global_step else None
        self.annealer = self._plan.annealer(kwargs["model"], batches, clock)

    def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
        assert self.annealer is not None
        self.annealer.step()

    def on_substep_end(self, *_: Any, **kwargs: Any) -> None:
        assert self.annealer is not None
        self.annealer.tick()  # the clock runs; the noise stays until the optimiser steps

    def state(self) -> dict[str, Any]:
        """What trainer_state.json holds; the Trainer may rebuild the callback from it."""
        clock = None if self.annealer is None else self.annealer.state_dict()
        return {"args": self._plan.arguments(), "attributes": {"clock": clock}}
