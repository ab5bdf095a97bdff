"""Checkpoints: tensors in a safetensors file, the rest in JSON, and checksums of both.

A checkpoint is ``<number>.safetensors`` and ``<number>.json``. The second is written last and has
the checksum of the first, so a checkpoint is complete or absent. Reading one runs no code: it has
no pickle. The last two are kept, in case the newest is damaged.

:func:`state_dict` and :func:`load_state_dict` say what of a training is saved.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softstair._errors import SoftstairError, first_line, import_extra
from softstair._files import replacing, write
from softstair.train import parallel
from softstair.train.recipe import Recipe
from softstair.train.state import State

FORMAT = 1
KEPT = 2
MAX_JSON_BYTES = 1 << 28
NAME = re.compile(r"(?:[0-9]{8}|[1-9][0-9]{8,})\.(?:safetensors|json)")
PART = re.compile(rf"\.{NAME.pattern}\.[0-9]+\.part")
"""Names of the files of a checkpoint: 00000012.json, .00000012.json.4711.part."""


class CheckpointError(SoftstairError):
    """A checkpoint that cannot be used."""


def save(folder: Path, state: Mapping[str, Any], **plain: Any) -> Path:
    """Save a state and ``plain``, further entries of JSON values; return the new JSON file.

    All checkpoints but the one before are removed.
    """
    tensors: dict[str, Tensor] = {}
    plain = {**_encode(state, "", tensors), **plain}
    folder.mkdir(exist_ok=True)
    data = import_extra("safetensors.torch").save(tensors)
    body = {"format": FORMAT, "tensors": hashlib.sha256(data).hexdigest(), "state": plain}
    text = json.dumps({**body, "digest": _digest(body)}, allow_nan=False)
    manifest = folder / f"{max(_numbers(folder), default=0) + 1:08d}.json"
    with replacing(manifest.with_suffix(".safetensors")) as partial:
        partial.write_bytes(data)
    try:
        write(manifest, text)
    except BaseException:
        # Half a checkpoint is useless, and on a full disk it is in the way.
        manifest.with_suffix(".safetensors").unlink(missing_ok=True)
        raise
    _sweep(folder)
    return manifest


def load(folder: Path) -> dict[str, Any] | None:
    """Return the newest checkpoint, its tensors on the CPU; None if there is none."""
    safetensors = import_extra("safetensors")
    load_tensors = import_extra("safetensors.torch").load
    numbers = sorted(_numbers(folder))
    if not numbers:
        return None
    manifest = folder / f"{numbers[-1]:08d}.json"
    try:
        if manifest.stat().st_size > MAX_JSON_BYTES:
            raise ValueError("it is too long")
        body = json.loads(manifest.read_bytes())
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
        if body.pop("digest", None) != _digest(body):
            raise ValueError("checksum mismatch")
        data = manifest.with_suffix(".safetensors").read_bytes()
        if hashlib.sha256(data).hexdigest() != body["tensors"]:
            raise ValueError("checksum mismatch of its .safetensors file")
        state = _decode(body["state"], load_tensors(data))
        if not isinstance(state, dict):
            raise ValueError("it has no state")
    except (
        ValueError, LookupError, TypeError, OSError, RecursionError, safetensors.SafetensorError,
    ) as error:  # fmt: skip
        reason = str(error) if isinstance(error, ValueError | OSError) else type(error).__name__
        several = len(numbers) > 1
        remedy = "delete it to go back to the checkpoint before" if several else "start again"
        raise CheckpointError(
            f"the checkpoint {str(manifest)!r} is damaged or was edited ({reason}): {remedy}."
        ) from None
    return state


def exists(folder: Path) -> bool:
    """Return whether a folder has a checkpoint."""
    return bool(_numbers(folder))


def _numbers(folder: Path) -> list[int]:
    return [int(path.stem) for path in folder.glob("*.json") if NAME.fullmatch(path.name)]


def _sweep(folder: Path) -> None:
    """Remove old checkpoints and what a killed process left; only one process saves at a time.

    Files with other names than those of checkpoints are the user's, and stay.
    """
    kept = {f"{number:08d}" for number in sorted(_numbers(folder))[-KEPT:]}
    for path in sorted(folder.iterdir()):  # .json first: without it, the tensors are no checkpoint
        is_old = NAME.fullmatch(path.name) and path.stem not in kept
        if is_old or PART.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return plain data, in which tensors, tuples and dictionaries with integer keys have a tag."""
    if isinstance(value, Tensor):
        # A copy: safetensors takes no tensors that share memory.
        name = f"{len(tensors):06d}{path}"
        value = value.detach().contiguous()
        tensors[name] = value.clone() if value.device.type == "cpu" else value.cpu()
        return {"@tensor": name}
    if isinstance(value, Mapping):
        items = [(key, _encode(entry, f"{path}/{key}", tensors)) for key, entry in value.items()]
        is_plain = all(isinstance(key, str) and not key.startswith("@") for key in value)
        return dict(items) if is_plain else {"@items": items}
    if isinstance(value, tuple | list):
        entries = [_encode(entry, f"{path}/{i}", tensors) for i, entry in enumerate(value)]
        return {"@tuple": entries} if isinstance(value, tuple) else entries
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint has tensors and plain values, but {path} is {type(value)}.")


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(entry, tensors) for entry in value]
    if not isinstance(value, dict):
        return value
    if "@tensor" in value:
        return tensors[value["@tensor"]]
    if "@tuple" in value:
        return tuple(_decode(entry, tensors) for entry in value["@tuple"])
    items = value["@items"] if "@items" in value else value.items()
    return {key: _decode(entry, tensors) for key, entry in items}


def is_like(loaded: Any, own: Mapping[str, Any]) -> bool:
    """Return whether the state of a network has the names, shapes and types of another's."""
    if not isinstance(loaded, Mapping) or set(loaded) != set(own):
        return False
    kind = lambda value: (getattr(value, "shape", None), getattr(value, "dtype", None))
    return all(kind(value) == kind(own[name]) for name, value in loaded.items())


def load_checkpoint(path: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the newest checkpoint of a run directory, or None if there is none.

    Raises CheckpointError if it was not trained with the ``recipe`` and ``data`` of ``config``.
    """
    state = load(path / "checkpoint")
    if state is None:
        return None
    folder = str(path / "checkpoint")
    try:
        origin = state.pop("origin")
        saved, data = Recipe.from_json(origin["recipe"]), origin["data"]
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint in {folder!r} does not say with which recipe and data it was trained "
            f"({first_line(error)}): restore the checkpoint of this run."
        ) from None
    given = Recipe.from_json(config["recipe"])
    names = given.differences(saved)
    different = {name: (getattr(saved, name), getattr(given, name)) for name in names}
    if data != config["data"]:
        different["data set"] = (data, config["data"])
    if different:
        values = [f"{name} {was!r} instead of {now!r}" for name, (was, now) in different.items()]
        raise CheckpointError(
            f"the checkpoint in {folder!r} belongs to another training "
            f"({', '.join(values)[:400]}): restore the checkpoint of this run, or train in a new "
            "run directory."
        )
    return state


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
    _load_optimiser(state, saved["optimiser"])
    if state.annealer is not None:
        state.annealer.load_state_dict(saved["annealer"])
    order = saved["order"]
    state.order = None if order is None else order.to(state.device)
    state.loss.copy_(saved["sums"]["loss"])
    state.correct.copy_(saved["sums"]["right"])
    state.set_random_state(saved["generators"][parallel.rank()])


def _load_optimiser(state: State, saved: dict[str, Any]) -> None:
    optimiser = state.optimiser
    # Rates and settings of the groups are those of the recipe and of this device.
    optimiser.load_state_dict({**optimiser.state_dict(), "state": saved["state"]})
    for parameter, values in optimiser.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                # A fused optimiser needs the memory layout of the parameter.
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        if state.device.type == "cuda" and isinstance(values.get("step"), Tensor):
            values["step"] = values["step"].to(state.device)
