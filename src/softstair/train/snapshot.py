"""The state of a training as plain data, for checkpoints."""

import math
from typing import Any

import torch
from torch import Tensor

from softstair._errors import first_line
from softstair.train.checkpoint import CheckpointError, is_like
from softstair.train.records import MAX_THREADS, is_history
from softstair.train.state import State

__all__ = ["load_state_dict", "state_dict"]


def state_dict(state: State) -> dict[str, Any]:
    """Return everything that the rest of the training depends on."""
    first, *others = state.team.gather(state.random_state())
    return {
        "network": state.network.state_dict(),
        "optimiser": state.optimiser.state_dict(),
        "annealer": None if state.annealer is None else state.annealer.state_dict(),
        "generators": first,
        **({"others": others} if others else {}),
        "threads": torch.get_num_threads(),
        "epoch": state.epoch,
        "step": state.step,
        "order": state.order,
        "sums": {"loss": state.loss, "right": state.correct},
        "seconds": state.clock.seconds,
        "history": state.history,
    }


def load_state_dict(state: State, saved: dict[str, Any]) -> None:
    """Restore what :func:`state_dict` returned.

    Raises:
        CheckpointError: If it does not belong to this network and recipe.
    """
    try:
        _load(state, saved)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"the checkpoint does not fit this network and recipe ({first_line(error)}): resume "
            "with the model and data that the run was begun with."
        ) from None


def _load(state: State, saved: dict[str, Any]) -> None:
    if not is_like(saved["network"], state.network.state_dict()):
        raise ValueError("its parameters have other names, shapes or types")
    _check_position(state, saved)
    threads, seconds = saved["threads"], float(saved["seconds"])
    if type(threads) is not int or not 1 <= threads <= MAX_THREADS:
        raise ValueError("invalid value of threads")
    if not 0 <= seconds < math.inf:
        raise ValueError("invalid value of seconds")
    random_states = [saved["generators"], *saved.get("others", [])]
    if len(random_states) != state.team.size:
        raise ValueError(f"it was saved by {len(random_states)} processes")
    state.network.load_state_dict(saved["network"])
    _load_optimiser(state, saved["optimiser"])
    if state.annealer is not None:
        state.annealer.load_state_dict(saved["annealer"])
    order = saved["order"]
    state.epoch, state.step, state.clock.seconds = saved["epoch"], saved["step"], seconds
    state.order = None if order is None else order.to(state.device)
    state.loss.copy_(saved["sums"]["loss"])
    state.correct.copy_(saved["sums"]["right"])
    state.history = list(saved["history"])
    torch.set_num_threads(threads)
    state.set_random_state(random_states[state.team.rank])


def _check_position(state: State, saved: dict[str, Any]) -> None:
    epoch, step, order = saved["epoch"], saved["step"], saved["order"]
    integers = type(epoch) is int and type(step) is int
    if not (integers and 0 <= epoch <= state.recipe.epochs and 0 <= step <= state.steps):
        raise ValueError("its position is outside the run")
    if (order is None) != (step == 0):
        raise ValueError("its order does not belong to its position")
    if order is not None:
        indices = torch.arange(state.example_count)
        if order.dtype != torch.int64 or not torch.equal(order.sort().values, indices):
            raise ValueError("its order is of other examples")
    if not is_history(saved["history"]) or len(saved["history"]) != epoch:
        raise ValueError("its history has other epochs")


def _load_optimiser(state: State, saved: dict[str, Any]) -> None:
    optimiser = state.optimiser
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    for number, values in saved["state"].items():
        for value in values.values():
            has_shape = isinstance(value, Tensor) and value.dim() > 0
            if has_shape and value.shape != parameters[number].shape:
                raise ValueError("its optimiser is of other parameters")
    optimiser.load_state_dict(saved)
    # Whether it is fused depends on this device, not on the one that saved it.
    for group in optimiser.param_groups:
        for name in {"fused", "capturable"} & set(optimiser.defaults):
            group[name] = optimiser.defaults[name]
    for parameter, values in optimiser.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                # A fused optimiser needs the memory layout of the parameter.
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        if state.device.type == "cuda" and isinstance(values.get("step"), Tensor):
            values["step"] = values["step"].to(state.device)
