"""Checkpoints: tensors in a safetensors file, the rest in JSON, and checksums of both.

A checkpoint is ``<number>.safetensors`` and ``<number>.json``. The second is written last and has
the checksum of the first, so a checkpoint is complete or absent. Reading one runs no code: it has
no pickle. The last two are kept, in case the newest is damaged.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from softstair._errors import SoftstairError, import_extra
from softstair._files import refuse_link, replacing, write

__all__ = ["CheckpointError", "is_like", "load", "save"]

FORMAT = 1
KEPT = 2
MAX_JSON_BYTES = 1 << 28
NAME = re.compile(r"(?:[0-9]{8}|[1-9][0-9]{8,})\.(?:safetensors|json)")
PART = re.compile(rf"\.{NAME.pattern}\.[0-9]+\.part")
"""Names of the files that :func:`save` writes: 00000012.json, .00000012.json.4711.part."""


class CheckpointError(SoftstairError):
    """A checkpoint that cannot be used."""


def save(folder: Path, state: Mapping[str, Any]) -> Path:
    """Write the newest checkpoint, remove all but the one before, and return its JSON file.

    Args:
        folder: Where the checkpoints are.
        state: Nested dictionaries, lists and tuples of tensors and plain values.
    """
    refuse_link(folder).mkdir(exist_ok=True)
    tensors: dict[str, Tensor] = {}
    plain = _encode(state, "", tensors)
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
    """Return the newest checkpoint, its tensors on the CPU; None if there is none.

    Raises:
        CheckpointError: If it is damaged.
    """
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
        remedy = "delete it to go back to the checkpoint before"
        remedy = remedy if len(numbers) > 1 else "start again"
        raise CheckpointError(
            f"the checkpoint {str(manifest)!r} is damaged or was edited ({reason}): {remedy}."
        ) from None
    return state


def _numbers(folder: Path) -> list[int]:
    return [int(path.stem) for path in folder.glob("*.json") if NAME.fullmatch(path.name)]


def _sweep(folder: Path) -> None:
    """Remove old checkpoints and what a killed process left; only one process saves at a time.

    Files with other names than those that :func:`save` writes are the user's, and stay.
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
        # A clone: safetensors does not take tensors that share memory, as tied parameters do.
        name = f"{len(tensors):06d}{path}"
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"@tensor": name}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str | int) for key in value):
            raise TypeError(f"keys of a checkpoint are text or integers, but {path} has others.")
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
    return all(kind(loaded[name]) == kind(value) for name, value in own.items())
