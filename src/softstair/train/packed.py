"""Packed networks: one small file, each quantised weight in as few bits as its levels need.

The file is safetensors and has what ``eval()`` needs: the level of each weight (two bits for a
ternary one), and what is in float as it is. A packed network cannot be trained further. Reading
the file runs no code.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import softstair
from softstair import _check
from softstair._errors import SoftstairError, first_line, import_extra
from softstair._files import replacing
from softstair._stair_module import EXTRA_STATE, learned_quantum
from softstair.data import Dataset
from softstair.models import build, default_for
from softstair.nn import StairLayer
from softstair.stair import Stair
from softstair.train.checkpoint import is_like
from softstair.train.network import stair_network, trained_network
from softstair.train.recipe import Recipe, fields_with
from softstair.train.records import recipe_of, summary_of

FORMAT = 1
MAX_BYTES = 1 << 30
NEWER = {
    name: getattr(Recipe(), name)
    for name in ("first_layer", "sums", "shortcuts", "bits", "quanta", "extra_levels")
}
"""Fields that files of the zoo and of results/networks lack."""


def pack(run: Path | str, dataset: Dataset, file: Path | str) -> Path:
    """Write the network of a finished run to a file; ``dataset`` is what it was trained on."""
    recipe, summary = recipe_of(Path(run)), summary_of(Path(run))
    if recipe is None or summary is None:
        raise SoftstairError(f"{str(run)!r} holds no finished run.")
    network = trained_network(run, dataset)
    name = default_for(recipe.data) if recipe.model == "auto" else recipe.model
    mean, std = dataset.numbers(recipe.integer_input, recipe.centre_input)
    # The file may be published: paths of the machine that trained do not belong in it.
    start, teacher = (path and Path(path).name for path in (recipe.init_from, recipe.teacher))
    metadata = {
        "format": FORMAT,
        "recipe": replace(recipe, model=name, init_from=start, teacher=teacher).to_json(),
        "shape": list(dataset.x.shape[1:]),
        "classes": list(dataset.classes),
        "mean": mean,
        "std": std,
        "valid_accuracy": summary["valid_accuracy"],
        "test_accuracy": summary["test_accuracy"],
        "versions": summary["config"].get("versions"),
    }
    state = {
        key: tensor.cpu().contiguous().clone()  # safetensors refuses tensors that share memory
        for key, tensor in network.state_dict().items()
        if not key.endswith(EXTRA_STATE)  # the recipe says which stairs these are
    }
    for key, layer in _stair_layers(network):
        stair = layer.weight_stair.stair
        state[key] = _to_bits(stair.index(layer.weight.detach().cpu()), _width(stair))
    metadata |= {"softstair": softstair.__version__, "digest": _digest(state)}
    text = json.dumps(metadata, allow_nan=False)
    data = import_extra("safetensors.torch").save(state, metadata={"softstair": text})
    with replacing(Path(file)) as partial:
        partial.write_bytes(data)
    return Path(file)


def packed_network(file: Path | str) -> nn.Module:
    """Return the network of a packed file; its scores are bit-identical."""
    metadata, tensors = _read(Path(file))
    try:
        recipe = packed_recipe(metadata)
        if ":" in recipe.model:
            raise ValueError("its model is code of its own")
        shape, classes = metadata["shape"], len(metadata["classes"])
        if classes < 1 or len(shape) != 3:
            raise ValueError(f"{classes} classes of examples of shape {shape}")
        for size in shape:
            _check.integer("shape", size, 1, 1 << 16)
        with torch.random.fork_rng([]):
            model = build(recipe.model, classes, tuple(shape))
            network = stair_network(model, recipe, torch.zeros(2, *shape))
        state = _unpacked(network, tensors)
        own = network.state_dict()
        if not is_like(state, {key: own[key] for key in own if not key.endswith(EXTRA_STATE)}):
            raise ValueError("its tensors are not those of its network")
        network.load_state_dict(state)
        if metadata.get("digest") not in (None, _digest(tensors)):
            raise ValueError("its weights are not those of its digest")
    except (LookupError, TypeError, ArithmeticError, AttributeError, RuntimeError, ValueError) as e:
        raise damaged(file, e) from None
    return network.eval()


def _digest(tensors: Mapping[str, Tensor]) -> str:
    parts = (key.encode() + tensors[key].numpy().tobytes() for key in sorted(tensors))
    return hashlib.sha256(b"".join(parts)).hexdigest()


def about(file: Path | str) -> dict[str, Any]:
    """Return the metadata of a packed file: recipe, classes, accuracies."""
    return _read(Path(file))[0]


def packed_recipe(metadata: Mapping[str, Any], *names: str) -> Recipe:
    """Return a recipe with what the metadata of a file say of the network, and of some fields."""
    recipe = {**NEWER, **metadata["recipe"]}
    if ":" in recipe["noise"]:
        recipe["noise"] = "uniform"  # in eval() there is none, and a file may come from anybody
    return Recipe(**{name: recipe[name] for name in (*fields_with("architecture"), *names)})


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    safetensors = import_extra("safetensors")
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ValueError("it is too long")
        with safetensors.safe_open(file, "pt") as opened:
            metadata = json.loads((opened.metadata() or {}).get("softstair", "null"))
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
        for name in ("mean", "std"):
            metadata[name] = _check.number(name, metadata.get(name))
    except (ValueError, OSError, RecursionError, safetensors.SafetensorError) as error:
        raise damaged(file, error) from None
    return metadata, tensors


def damaged(file: Path | str, error: Exception) -> SoftstairError:
    """Return the error that a file cannot be read, for a reason."""
    reason = f"it has no {error}" if isinstance(error, KeyError) else first_line(error)
    return SoftstairError(
        f"{str(file)!r} is not a packed network, or is damaged ({reason}): restore it, or pack the "
        "run again."
    )


def _unpacked(network: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of the network, each weight well inside the bin of its level."""
    state = dict(tensors)
    for key, layer in _stair_layers(network):
        quantum, own = tensors[f"{key}_stair.quantum"], layer.weight_stair
        is_fitted = own.fit is not None and quantum.shape == own.quantum.shape
        if not is_fitted and not torch.equal(quantum, own.quantum):
            raise ValueError(f"the quantum of {key} is not that of the recipe")
        if own.log_ratio is not None:
            quantum = learned_quantum(quantum, tensors[f"{key}_stair.log_ratio"])
        is_trained = is_fitted or own.log_ratio is not None
        stair = own.stair.with_quantum(quantum.tolist()) if is_trained else own.stair
        index = _from_bits(state[key], _width(stair), layer.weight.numel())
        if int(index.max()) >= len(stair.levels):
            raise ValueError("a weight has a level that its stair does not have")
        state[key] = _representatives(stair, index.reshape(layer.weight.shape))
    return state


def _stair_layers(network: nn.Module) -> list[tuple[str, StairLayer]]:
    """Return the layers with quantised weights, by the names of their weights."""
    return [
        (f"{name}.weight" if name else "weight", module)
        for name, module in network.named_modules()
        if isinstance(module, StairLayer)
    ]


def _width(stair: Stair) -> int:
    """Return the bits per level: 1, 2, 4 or 8, so that none crosses a byte boundary."""
    bits = (len(stair.levels) - 1).bit_length()
    return next(width for width in (1, 2, 4, 8) if bits <= width)


def _to_bits(index: Tensor, width: int) -> Tensor:
    """Return the indices in bytes, the first in the lowest bits, padded with 0."""
    flat = index.reshape(-1).to(torch.int32)
    per_byte = 8 // width
    flat = nn.functional.pad(flat, (0, -len(flat) % per_byte)).reshape(-1, per_byte)
    return (flat << torch.arange(0, 8, width)).sum(1).to(torch.uint8)


def _from_bits(packed: Tensor, width: int, count: int) -> Tensor:
    """Return the indices that :func:`_to_bits` packed."""
    if packed.dtype != torch.uint8 or packed.shape != (math.ceil(count * width / 8),):
        raise ValueError(f"{count} weights are not {width} bits each")
    index = (packed.int()[:, None] >> torch.arange(0, 8, width)) & ((1 << width) - 1)
    return index.reshape(-1)[:count].long()


def _representatives(stair: Stair, index: Tensor) -> Tensor:
    """Return for each level index a weight inside its bin: the level itself if it lies there."""
    quanta = torch.tensor(stair.quantum, dtype=torch.float64)
    unit = 1.0 if quanta.dim() else float(quanta)  # with one per channel, levels are in quanta
    low, high = stair.thresholds[0] - unit, stair.thresholds[-1] + unit
    middles = [low, *((a + b) / 2 for a, b in pairwise(stair.thresholds)), high]
    bins = pairwise((-math.inf, *stair.thresholds, math.inf))
    values = [
        level if start < level < end else middle
        for level, middle, (start, end) in zip(stair.levels, middles, bins, strict=True)
    ]
    weight = torch.tensor(values, dtype=torch.float64)[index]
    if quanta.dim():
        weight = weight * quanta.reshape(-1, *[1] * (index.dim() - 1))
    weight = weight.float()
    if not torch.equal(stair.index(weight), index):
        raise ValueError("its levels lie too close together for float32")
    return weight
