"""A trained network in one small file: each weight of a stair in as few bits as its levels need.

What is kept is what ``eval()`` computes with: the level that each weight has, two bits of it for a
ternary one, and whatever is in float (batch-norm, the last layer) as it is. What lies behind a
weight's level, and the optimiser, are gone: a packed network answers, and does not train on.

The file is safetensors: tensors, and a few words about them. Reading it runs no code.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softstair._errors import import_extra
from softstair._files import replacing
from softstair.data import Dataset
from softstair.models import build, default_for
from softstair.nn import StairLayer, StairWeight
from softstair.stair import Stair
from softstair.train.checkpoint import is_like
from softstair.train.network import stair_network, trained_network
from softstair.train.recipe import Recipe, fields_with
from softstair.train.run import RunError, recipe_of, summary_of

__all__ = ["NETWORKS", "about", "pack", "packed_network"]

FORMAT = 1
NETWORKS = Path("results/networks")
"""Where networks have a name, in a checkout of softstair."""
LARGEST = 1 << 30


def pack(run: Path | str, dataset: Dataset, file: Path | str) -> Path:
    """Writes the network of a run that is done; ``dataset`` is what it was trained on.

    >>> import tempfile
    >>> from softstair.data import load
    >>> from softstair.train import train
    >>> with tempfile.TemporaryDirectory() as out:
    ...     _ = train(Recipe(limit=200, epochs=1, batch=32), out + "/run")
    ...     file = pack(out + "/run", load("digits"), out + "/digits.safetensors")
    ...     network, size = packed_network(file), file.stat().st_size
    >>> network(torch.zeros(1, 1, 8, 8)).shape, size < 70_000
    (torch.Size([1, 10]), True)
    """
    recipe, summary = recipe_of(Path(run)), summary_of(Path(run))
    if recipe is None or summary is None:
        raise RunError(f"{str(run)!r} holds no run that is done: train one with --out there.")
    network = trained_network(run, dataset)
    name = default_for(recipe.data) if recipe.model == "auto" else recipe.model
    mean, std = dataset.numbers(recipe.integer_input, recipe.centre_input)
    words = {
        "format": FORMAT,
        "recipe": replace(recipe, model=name).to_json(),
        "shape": list(dataset.x.shape[1:]),
        "classes": list(dataset.classes),
        "mean": mean,
        "std": std,
        "valid_accuracy": summary["valid_accuracy"],
        "test_accuracy": summary["test_accuracy"],
        "versions": summary["config"].get("versions"),
    }
    held = import_extra("safetensors.torch").save(
        _packed(network), metadata={"softstair": json.dumps(words, allow_nan=False)}
    )
    with replacing(Path(file)) as partial:
        partial.write_bytes(held)
    return Path(file)


def packed_network(name: Path | str, folder: Path | str = NETWORKS) -> nn.Module:
    """The network of a packed file, or of that name in the folder, in ``eval()``: it gives the same
    scores, to the last bit, as the network that was packed."""
    file = _find(name, folder)
    words, tensors = _read(file)
    try:
        architecture = {name: words["recipe"][name] for name in fields_with("architecture")}
        if ":" in architecture["model"]:
            raise ValueError("its model is code of its own")
        recipe = Recipe(**architecture)
        shape, classes = tuple(map(int, words["shape"])), len(words["classes"])
        if classes < 1 or len(shape) != 3 or not all(1 <= size <= 1 << 16 for size in shape):
            raise ValueError(f"{classes} classes of examples of shape {shape} are none")
        with torch.random.fork_rng([]):
            model = build(recipe.model, classes, shape)
            network = stair_network(model, recipe, torch.zeros(2, *shape))
        state = _unpacked(network, tensors)
        if not is_like(state, network.state_dict()):
            raise ValueError("its tensors are not those of the network that it names")
        network.load_state_dict(state)
    except (
        LookupError,
        TypeError,
        ArithmeticError,
        AttributeError,
        RuntimeError,
        ValueError,
    ) as error:
        raise _damaged(file, error) from None
    return network.eval()


def about(name: Path | str, folder: Path | str = NETWORKS) -> dict[str, Any]:
    """What a packed file says of its network: recipe, classes, accuracies."""
    return _read(_find(name, folder))[0]


def _find(name: Path | str, folder: Path | str) -> Path:
    direct, named = Path(name), Path(folder) / f"{name}.safetensors"
    for file in (direct, named):
        if file.is_file():
            return file
    known = sorted(path.stem for path in Path(folder).glob("*.safetensors"))
    there = f"there are {', '.join(known)}" if known else "there is none"
    raise RunError(
        f"a packed network must be a file, or a name in {str(folder)!r}, where {there}, but "
        f"{str(name)!r} was given."
    )


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    safetensors = import_extra("safetensors")
    try:
        if file.stat().st_size > LARGEST:
            raise ValueError("it is too long to be one")
        with safetensors.safe_open(file, "pt") as opened:
            words = json.loads((opened.metadata() or {}).get("softstair", "null"))
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        if not isinstance(words, dict) or words.get("format") != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
        for name in ("mean", "std"):
            if type(words.get(name)) not in (int, float) or not math.isfinite(words[name]):
                raise ValueError(f"its {name} is no number")
            words[name] = float(words[name])
    except (ValueError, OSError, RecursionError, safetensors.SafetensorError) as error:
        raise _damaged(file, error) from None
    return words, tensors


def _damaged(file: Path, error: Exception) -> RunError:
    said = f"it has no {error}" if isinstance(error, KeyError) else str(error)
    reason = " ".join(said.split()).rstrip(".")[:200]
    return RunError(
        f"{str(file)!r} is no packed network, or was damaged ({reason}): restore it, or pack the "
        "run again."
    )


def _packed(network: nn.Module) -> dict[str, Tensor]:
    """The state of a network, bits instead of weights where there is a stair."""
    state = {name: tensor.cpu().contiguous() for name, tensor in network.state_dict().items()}
    for name, layer in _stair_layers(network):
        stair = layer.weight_stair.stair
        index = stair.index(layer.weight.detach().cpu())
        state[name] = _bits(index, _width(stair))
    return state


def _unpacked(network: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state that a network like this one had, each weight in the middle of its level's bin."""
    state = dict(tensors)
    for name, layer in _stair_layers(network):
        # A fit may have given the weights a quantum of their own, which the file has.
        stair = _with_quantum(
            layer.weight_stair, tensors[name.removesuffix("weight") + "weight_stair.quantum"]
        )
        index = _from_bits(state[name], _width(stair), layer.weight.numel())
        if int(index.max()) >= len(stair.levels):
            raise ValueError("a weight has a level that its stair has not")
        state[name] = _inside(stair, index.reshape(layer.weight.shape))
    return state


def _with_quantum(held: StairWeight, quantum: Tensor) -> Stair:
    mine = torch.tensor(held.stair.quantum, dtype=torch.float32)
    if quantum.shape == mine.shape and torch.equal(quantum, mine):
        return held.stair
    return held.stair.with_quantum(quantum.double().tolist(), held.stair.axis)


def _stair_layers(network: nn.Module) -> list[tuple[str, StairLayer]]:
    """The layers with a stair, by the names of their weights."""
    found = [(name, one) for name, one in network.named_modules() if isinstance(one, StairLayer)]
    return [(f"{name}.weight" if name else "weight", one) for name, one in found]


def _width(stair: Stair) -> int:
    """Bits that a level needs: 1, 2, 4 or 8, so that none lies across two bytes."""
    needs = (len(stair.levels) - 1).bit_length()
    return next((width for width in (1, 2, 4, 8) if needs <= width), 16)


def _bits(index: Tensor, width: int) -> Tensor:
    """Indices in bytes, the first in a byte's lowest bits; what is left over is 0."""
    flat = index.reshape(-1).to(torch.int32)
    if width == 16:
        return torch.stack([flat & 255, flat >> 8], dim=1).to(torch.uint8).reshape(-1)
    each = 8 // width
    flat = nn.functional.pad(flat, (0, -len(flat) % each)).reshape(-1, each)
    return (flat << torch.arange(0, 8, width)).sum(1).to(torch.uint8)


def _from_bits(packed: Tensor, width: int, count: int) -> Tensor:
    """The indices that :func:`_bits` packed.

    >>> _from_bits(_bits(torch.tensor([2, 0, 1, 1, 2]), 2), 2, 5).tolist()
    [2, 0, 1, 1, 2]
    """
    if packed.dtype != torch.uint8 or packed.shape != (math.ceil(count * width / 8),):
        raise ValueError(f"{count} weights are not {width} bits each")
    if width == 16:
        low, high = packed.int().reshape(-1, 2).unbind(1)
        return (low | high << 8).long()
    shifts = torch.arange(0, 8, width)
    spread = (packed.int()[:, None] >> shifts) & ((1 << width) - 1)
    return spread.reshape(-1)[:count].long()


def _inside(stair: Stair, index: Tensor) -> Tensor:
    """For each level a weight that has it, well inside its bin: the level itself, where it is."""
    thresholds, unit = stair.thresholds, 1.0
    if isinstance(stair.quantum, float):
        unit = stair.quantum
    inner = [(a + b) / 2 for a, b in pairwise(thresholds)]
    middles = [thresholds[0] - unit, *inner, thresholds[-1] + unit]
    bins = zip((-math.inf, *thresholds), (*thresholds, math.inf), strict=True)
    own = [
        level if low < level < high else middle
        for level, middle, (low, high) in zip(stair.levels, middles, bins, strict=True)
    ]
    weight = torch.tensor(own, dtype=torch.float64)[index]
    if isinstance(stair.quantum, tuple):
        quanta = torch.tensor(stair.quantum, dtype=torch.float64)
        weight = weight * quanta.reshape(-1, *[1] * (index.dim() - 1))
    weight = weight.float()
    if not torch.equal(stair.index(weight), index):
        raise ValueError("its levels lie too close together for float32")
    return weight
