"""A small network for the callbacks of training loops, and the noise that they should give it."""

import importlib
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import softstair as ss
from softstair.nn import stair_modules
from softstair.schedule import NoisePath

DOCS = Path(__file__).parents[2] / "docs" / "integrations.md"
BATCHES = 6
LAYERS = 2
Noise = list[tuple[float, float]]


def examples(seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs and labels of so many batches of four."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * BATCHES, 5, generator=generator)
    return x, torch.randint(3, (len(x),), generator=generator)


class Endless(IterableDataset[Any]):
    """Data without a length."""

    def __init__(self, data: Iterable[Any]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)


def network(norm: bool = True, forward: Any = "mode") -> nn.Module:
    """A ternary network of two annealed layers, with the same weights every time."""
    torch.manual_seed(0)
    normal = nn.BatchNorm1d if norm else nn.Identity
    model = nn.Sequential(
        *(nn.Linear(5, 16), normal(16), nn.ReLU(), nn.Linear(16, 16), normal(16), nn.ReLU()),
        nn.Linear(16, 3),
    )
    return ss.quantise(model, ss.Stair.ternary(), ss.Stair.ternary(), skip="6", forward=forward)


def noise_of(net: nn.Module) -> Noise:
    """The (mean, std) in the buffers of each layer, the same in all its stairs."""
    noise: list[set[tuple[float, float]]] = [set() for _ in range(LAYERS)]
    for _, stair in stair_modules(net):
        noise[stair.layer].add((stair.mean.item(), stair.std.item()))
    return [pair for (pair,) in noise]


def expected(schedule: NoisePath, batches: Iterable[int], per_unit: int = BATCHES) -> list[Noise]:
    """The schedule at the start of these batches, in float32 as the buffers are."""
    times = [batch / per_unit for batch in batches]
    noise = torch.tensor([[schedule(layer, t) for layer in range(LAYERS)] for t in times])
    return [[(mean, std) for mean, std in layers] for layers in noise.tolist()]


def check_missing(monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    """Assert that an integration names the extra to install where its package is missing."""
    monkeypatch.delitem(sys.modules, f"softstair.integrations.{name}")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"pip install '\.\[{name}\]'"):
        importlib.import_module(f"softstair.integrations.{name}")


def run_documented(word: str, name: str = "trainer") -> Any:
    """Run the example of the documentation that has this word, and return its trainer."""
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (code,) = (block for block in blocks if word in block)
    names: dict[str, Any] = {}
    exec(code, names)
    return names[name]
