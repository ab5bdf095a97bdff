"""Trained networks that are part of softstair: list them, load them, read their cards.

Each network is a packed file in this folder (see :mod:`softstair.train.packed`). The file has the
recipe, the classes and the accuracy of the network; ``cards.json`` has what only its maker knows:
the data, the accuracy of other seeds, the command and the commit.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from softstair import _check
from softstair._errors import SoftstairError, first_line
from softstair._files import replacing, write
from softstair.data import load as load_data
from softstair.data.batches import Examples
from softstair.data.folds import held_out
from softstair.train.execution import choose_device
from softstair.train.metrics import evaluate as evaluate_network
from softstair.train.network import levels_of
from softstair.train.packed import NEWER, about, packed_network, packed_recipe
from softstair.train.recipe import Recipe

__all__ = ["Card", "card", "evaluate", "load", "names"]

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Card:
    """What is known of a trained network. The network takes (x − mean)/std of bytes x.

    Args:
        name: Name of the network.
        data: Data that it was trained and tested on.
        recipe: How it was trained.
        accuracy: Its accuracy on the test set, or on its validation fold if there is no test set.
        accuracies: The same for each seed that was trained, this network's first.
        bytes: Size of its file.
        bits: Its stairs by name: ``"int4"`` is weights of int4 and features of uint4.
        shape: Shape of an input: channels, height, width.
        classes: Names of the classes.
        mean: Zero point of the input.
        std: Scale of the input.
        command: The command that trained it.
        commit: The commit of softstair that trained it.
    """

    name: str
    data: str
    recipe: Recipe
    accuracy: float
    accuracies: tuple[float, ...]
    bytes: int
    bits: str
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    mean: float
    std: float
    command: str
    commit: str

    @property
    def spread(self) -> float | None:
        """Standard deviation of the accuracy over seeds; None if there is one seed."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None


def names() -> tuple[str, ...]:
    """Return the names of the networks, sorted.

    >>> "speech-dscnn-int4" in names()
    True
    """
    return tuple(sorted(file.stem for file in FOLDER.glob("*.safetensors")))


def load(name: str) -> nn.Module:
    """Return a trained network in ``eval()``.

    Its input is (x − mean)/std, in float32, of bytes x; :func:`card` has the numbers.

    Args:
        name: One of :func:`names`.

    Raises:
        SoftstairError: If there is no such network, or if its file is damaged.

    >>> import torch
    >>> network, known = load("speech-dscnn-int4"), card("speech-dscnn-int4")
    >>> x = torch.randint(256, (2, *known.shape), dtype=torch.uint8)
    >>> network((x.float() - known.mean) / known.std).shape
    torch.Size([2, 12])
    """
    return packed_network(path_of(name))


def card(name: str) -> Card:
    """Return what is known of a network.

    Args:
        name: One of :func:`names`.

    Raises:
        SoftstairError: If there is no such network, or if its file or card is damaged.

    >>> known = card("speech-dscnn-int4")
    >>> known.bits, known.classes[2]
    ('int4', 'yes')
    """
    file = path_of(name)
    metadata = about(file)
    try:
        entry = _cards()[name]
        recipe = Recipe.from_json({**NEWER, **metadata["recipe"]})
        accuracies = tuple(
            _check.number("accuracies", value, 0, 1) for value in entry["accuracies"]
        )
        classes = tuple(metadata["classes"])
        for text in (*classes, entry["data"], entry["command"], entry["commit"]):
            if not isinstance(text, str):
                raise ValueError(f"{_check.shortened(text)} is not text")
        channels, height, width = metadata["shape"]
        return Card(
            name=name,
            data=entry["data"],
            recipe=recipe,
            accuracy=accuracies[0],
            accuracies=accuracies,
            bytes=file.stat().st_size,
            bits=levels_of(recipe),
            shape=(channels, height, width),
            classes=classes,
            mean=metadata["mean"],
            std=_check.number("std", metadata["std"], above=0),
            command=entry["command"],
            commit=entry["commit"],
        )
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise SoftstairError(
            f"the card of {name!r} in {str(FOLDER)!r} is damaged ({first_line(error)}): install "
            "softstair again."
        ) from None


def evaluate(name: str, data_dir: Path | str = "data", device: str = "auto") -> float:
    """Return the accuracy of a network on the test set, or on its validation fold without one.

    Args:
        name: One of :func:`names`.
        data_dir: Folder of the data sets.
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.

    Raises:
        SoftstairError: If there is no such network.
        DataError: If the data are missing or damaged.
    """
    network, known = load(name), card(name)
    recipe, used = known.recipe, choose_device(device)
    if ":" in recipe.data:
        raise SoftstairError(f"the network {name!r} was trained on data of its maker.")
    dataset = load_data(recipe.data, data_dir)
    _, x, y = held_out(dataset, recipe.fold, recipe.folds, recipe.limit)
    return evaluate_network(network.to(used), Examples(x, y, known.mean, known.std, used))[1]


def path_of(name: str) -> Path:
    """Return the file of a network; raise SoftstairError with the known names if there is none."""
    known = names()
    if name not in known:
        hint = _check.suggestion(name, known) or f"there are {', '.join(known) or 'none'}."
        raise SoftstairError(f"no network is called {_check.shortened(name)}; {hint}", field="name")
    return FOLDER / f"{name}.safetensors"


def add(name: str, files: Sequence[Path | str], data: str, command: str, commit: str) -> Card:
    """Add the first of some packed networks, and its card; they may differ in their seeds."""
    packed = [about(Path(file)) for file in files]
    recipes = [packed_recipe(metadata) for metadata in packed]
    tested = "test_accuracy" if packed and packed[0]["test_accuracy"] else "valid_accuracy"
    accuracies = [metadata[tested] for metadata in packed]
    if not packed or None in accuracies or any(recipe != recipes[0] for recipe in recipes):
        raise SoftstairError("`files` must be packed networks of one recipe with different seeds.")
    entry = {"data": data, "accuracies": accuracies, "command": command, "commit": commit}
    content = Path(files[0]).read_bytes()
    with replacing(FOLDER / f"{name}.safetensors") as partial:
        partial.write_bytes(content)
    cards = json.dumps({**_cards(), name: entry}, indent=1, sort_keys=True, allow_nan=False)
    write(FOLDER / "cards.json", f"{cards}\n")
    return card(name)


def _cards() -> dict[str, Any]:
    file = FOLDER / "cards.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}
