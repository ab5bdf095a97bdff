"""Checkpoints: a digest and what ``torch.save`` writes, read with ``weights_only``: no code runs.

:func:`state_dict` and :func:`load_state_dict` say what of a training is saved.
"""

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from softstair._errors import SoftstairError, first_line
from softstair._files import replacing
from softstair.train import parallel
from softstair.train.state import State

FORMAT = 1
NAME = "state.pt"
DIGEST = hashlib.sha256().digest_size


class CheckpointError(SoftstairError):
    """A checkpoint that cannot be used."""


def save(folder: Path, state: Mapping[str, Any]) -> Path:
    """Save a state in place of the one before."""
    folder.mkdir(exist_ok=True)
    stream = io.BytesIO()
    torch.save({"format": FORMAT, **state}, stream)
    data = stream.getbuffer()
    with replacing(folder / NAME) as partial:
        partial.write_bytes(b"".join([hashlib.sha256(data).digest(), data]))
    for left in folder.glob(f".{NAME}.*.part"):  # by a process that was killed
        left.unlink(missing_ok=True)
    return folder / NAME


def load(folder: Path) -> dict[str, Any] | None:
    """Return the checkpoint, its tensors on the CPU; None if there is none."""
    if not exists(folder):
        return None
    path = folder / NAME
    try:
        data = path.read_bytes()
        if hashlib.sha256(data[DIGEST:]).digest() != data[:DIGEST]:
            raise ValueError("checksum mismatch")
        stream = io.BytesIO(data[DIGEST:])
        state: dict[str, Any] = torch.load(stream, map_location="cpu", weights_only=True)
        if state.pop("format") != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
    except Exception as error:  # whatever torch raises
        reason = str(error) if isinstance(error, ValueError | OSError) else type(error).__name__
        problem = f"the checkpoint {str(path)!r} is damaged or was edited ({reason})"
        raise CheckpointError(f"{problem}: delete it to start again.") from None
    return state


def exists(folder: Path) -> bool:
    """Return whether a folder has a checkpoint."""
    return (folder / NAME).exists()


def is_like(loaded: Any, own: Mapping[str, Any]) -> bool:
    """Return whether the state of a network has the names, shapes and types of another's."""
    if not isinstance(loaded, Mapping) or set(loaded) != set(own):
        return False
    kind = lambda value: (getattr(value, "shape", None), getattr(value, "dtype", None))
    return all(kind(value) == kind(own[name]) for name, value in loaded.items())


def state_dict(state: State) -> dict[str, Any]:
    """Return everything that the rest of the training depends on."""
    return {
        "network": state.network.state_dict(),
        "optimiser": state.optimiser.state_dict(),
        "annealer": None if state.annealer is None else state.annealer.state_dict(),
        "generators": parallel.gathered(state.random_state()),
        "epoch": state.epoch,
        "step": state.step,
        "order": state.order,
        "sums": {"loss": state.loss, "right": state.correct},
        "seconds": state.seconds,
        "history": state.history,
    }


def load_state_dict(state: State, saved: dict[str, Any]) -> None:
    """Restore what :func:`state_dict` returned; raise CheckpointError if it does not fit."""
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
    state.load_network(saved["network"])
    for name in ("epoch", "step", "seconds", "history"):
        setattr(state, name, saved[name])
    # Rates and settings of the groups are those of the recipe and of this device.
    groups = state.optimiser.state_dict()
    state.optimiser.load_state_dict({**groups, "state": saved["optimiser"]["state"]})
    if state.annealer is not None:
        state.annealer.load_state_dict(saved["annealer"])
    order = saved["order"]
    state.order = None if order is None else order.to(state.device)
    state.loss.copy_(saved["sums"]["loss"])
    state.correct.copy_(saved["sums"]["right"])
    state.set_random_state(saved["generators"][parallel.rank()])
