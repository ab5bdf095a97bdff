"""The annealer as a callback of Hugging Face's Trainer; ``pip install '.[transformers]'``."""

from typing import Any

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import has_length
except ImportError as error:
    raise ImportError(
        "softstair.integrations.transformers needs Transformers and Accelerate: "
        "run pip install '.[transformers]' in the clone of softstair."
    ) from error

from softstair.integrations import CallbackArguments

__all__ = ["AnnealerCallback"]


class AnnealerCallback(CallbackArguments, TrainerCallback, ExportableState):
    """Anneals the quantised network of a Trainer's model while it trains; time is in epochs.

    ``AnnealerCallback(period=50, interval="overlapped")`` makes a schedule for the network; see
    :class:`softstair.integrations.CallbackArguments` for all arguments.

    With gradient_accumulation_steps the noise moves once per optimiser step. The Trainer's
    checkpoints hold the clock (trainer_state.json), and ``train(resume_from_checkpoint=…)`` sets
    it, with restore_callback_states_from_checkpoint or without.
    """

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
        total = state.max_steps * args.gradient_accumulation_steps
        self.annealer = self._make_annealer(kwargs["model"], batches, clock, total)

    def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
        assert self.annealer is not None
        self.annealer.step()

    def on_substep_end(self, *_: Any, **kwargs: Any) -> None:
        assert self.annealer is not None
        self.annealer.tick()  # the clock runs; the noise stays until the optimiser steps

    def state(self) -> dict[str, Any]:
        """Return what trainer_state.json holds; the Trainer may rebuild the callback from it."""
        clock = None if self.annealer is None else self.annealer.state_dict()
        return {"args": self._arguments(), "attributes": {"clock": clock}}
