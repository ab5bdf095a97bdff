"""Checkpoints: tensors in a safetensors file, all else in JSON, and digests of both.

A checkpoint is ``<number>.safetensors`` and ``<number>.json``; the second is written last and names
the digest of the first, so a checkpoint is whole or not there. Reading one runs no code: there is
no pickle in it. The last two are kept: should the newest be damaged, the one before is still good.
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
LARGEST_TEXT = 1 << 28
NAME = re.compile(r"(?:[0-9]{8}|[1-9][0-9]{8,})\.(?:safetensors|json)")
PART = re.compile(rf"\.{NAME.pattern}\.[0-9]+\.part")
"""Names of the files that :func:`save` writes: 00000012.json, .00000012.json.4711.part."""


class CheckpointError(SoftstairError):
    """A checkpoint that cannot be used."""


def save(folder: Path, state: Mapping[str, Any]) -> Path:
    """Writes nested dictionaries, lists and tuples of tensors and plain values as the newest
    checkpoint; the older ones go, but for the last before it."""
    save_tensors = import_extra("safetensors.torch").save
    refuse_link(folder).mkdir(exist_ok=True)
    number = max(_numbers(folder), default=0) + 1
    tensors: dict[str, Tensor] = {}
    plain = _encode(state, "", tensors)
    held = save_tensors(tensors)
    body = {"format": FORMAT, "tensors": _digest(held), "state": plain}
    text = json.dumps({**body, "digest": _digest(_canonical(body))}, allow_nan=False)
    with replacing(_tensors(folder, number)) as partial:
        partial.write_bytes(held)
    try:
        write(_manifest(folder, number), text)
    except BaseException:
        # Half a checkpoint is of no use, and on a full disk it is in the way.
        _tensors(folder, number).unlink(missing_ok=True)
        raise
    for old in sorted(_numbers(folder))[:-KEPT]:
        _manifest(folder, old).unlink(missing_ok=True)
        _tensors(folder, old).unlink(missing_ok=True)
    _sweep(folder)
    return _manifest(folder, number)


def load(folder: Path) -> dict[str, Any] | None:
    """The newest checkpoint as it was saved, its tensors on the CPU; None if there is none."""
    SafetensorError = import_extra("safetensors").SafetensorError
    load_tensors = import_extra("safetensors.torch").load
    numbers = sorted(_numbers(folder))
    if not numbers:
        return None
    manifest, file = _manifest(folder, numbers[-1]), _tensors(folder, numbers[-1])
    before = "delete it to go back to the checkpoint before" if len(numbers) > 1 else "start again"
    try:
        if manifest.stat().st_size > LARGEST_TEXT:
            raise ValueError("it is too long to be one")
        body = json.loads(manifest.read_bytes())
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
        if body.pop("digest", None) != _digest(_canonical(body)):
            raise ValueError("its digest is another")
        held = file.read_bytes()
        if _digest(held) != body["tensors"]:
            raise ValueError(f"the digest of {file.name} is another")
        state = _decode(body["state"], load_tensors(held))
    except (ValueError, KeyError, TypeError, OSError, RecursionError, SafetensorError) as error:
        reason = str(error) if isinstance(error, ValueError | OSError) else type(error).__name__
        raise CheckpointError(
            f"the checkpoint {str(manifest)!r} is damaged or was edited ({reason}): {before}."
        ) from None
    if not isinstance(state, dict):
        raise CheckpointError(f"the checkpoint {str(manifest)!r} holds no state: {before}.")
    return state


def _numbers(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return [int(path.stem) for path in folder.glob("*.json") if NAME.fullmatch(path.name)]


def _manifest(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.json"


def _tensors(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.safetensors"


def _sweep(folder: Path) -> None:
    """Remove what a killed process left incomplete; only the process that holds the run saves.

    Files with other names than those that :func:`save` writes are the user's, and stay.
    """
    known = {_tensors(folder, number).name for number in _numbers(folder)}
    for path in folder.iterdir():
        tensors = NAME.fullmatch(path.name) and path.suffix == ".safetensors"
        if PART.fullmatch(path.name) or (tensors and path.name not in known):
            path.unlink(missing_ok=True)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, allow_nan=False).encode()


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Plain data in which tensors, tuples and dictionaries with other keys than text have a tag."""
    if isinstance(value, Tensor):
        # A clone: safetensors refuses tensors that share memory, as tied parameters do.
        name = f"{len(tensors):06d}{path}"
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"@tensor": name}
    if isinstance(value, Mapping):
        keys = list(value)
        if all(isinstance(key, str) and not key.startswith("@") for key in keys):
            return {key: _encode(value[key], f"{path}/{key}", tensors) for key in keys}
        if not all(isinstance(key, str | int) for key in keys):
            raise TypeError(
                f"a checkpoint's keys are text or whole numbers, but {path} has {keys}."
            )
        return {"@items": [[key, _encode(value[key], f"{path}/{key}", tensors)] for key in keys]}
    if isinstance(value, tuple | list):
        items = [_encode(one, f"{path}/{i}", tensors) for i, one in enumerate(value)]
        return {"@tuple": items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint holds tensors and plain values, but {path} is {type(value)}.")


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    if "@tensor" in value:
        return tensors[value["@tensor"]]
    if "@tuple" in value:
        return tuple(_decode(one, tensors) for one in value["@tuple"])
    if "@items" in value:
        return {key: _decode(one, tensors) for key, one in value["@items"]}
    return {key: _decode(one, tensors) for key, one in value.items()}


def is_like(loaded: Any, mine: Mapping[str, Any]) -> bool:
    """Whether a network's state has the same names, shapes and types as another's."""
    if not isinstance(loaded, Mapping) or set(loaded) != set(mine):
        return False
    kinds = [(getattr(x, "shape", None), getattr(x, "dtype", None)) for x in mine.values()]
    others = [(getattr(loaded[k], "shape", None), getattr(loaded[k], "dtype", None)) for k in mine]
    return kinds == others
