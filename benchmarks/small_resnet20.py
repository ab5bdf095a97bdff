"""Trains ResNet-20 on CIFAR-10 at half its resolution, which takes minutes on a CPU.

    python -m benchmarks.small_resnet20 float --epochs 20
    python -m benchmarks.small_resnet20 int2 bits=features.0.0=int8/uint2,*=int2
    python -m benchmarks.small_resnet20 wide bits=features.0.0=int8/uint2,*=int2 shortcuts=uint8

The first run is in float, and the start and the teacher of the others. Other words are fields of
the recipe. Images are averaged over 2×2 pixels; 20,000 train and 5,000 validate. It compares
options with one another: the accuracies are far from those of full images and many epochs.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.sentence import tell
from paper.rows import from_text
from softstair.data import Dataset, load as load_data
from softstair.models import resnet20
from softstair.train import Recipe, fit
from softstair.train.recipe import OPTIONS

COMMON = {"data": "small_resnet20:load", "model": "small_resnet20:build", "augment": "crop-flip"}
COMMON |= {"integer_input": True, "batch": 128, "limit": 25_000, "static_std": True}
COMMON |= {"rate_shape": "cosine"}
FLOAT = {"weights": "float", "features": "float", "optimiser": "nesterov", "learning_rate": 0.1}
FLOAT |= {"weight_decay": 5e-4, "norm_decay": 0.0, "warm_up": 1.0}
QUANTISED = {"optimiser": "adamw", "learning_rate": 0.003, "clip_latent": True}


def load(root: Path) -> Dataset:
    """Return CIFAR-10 with images of 16×16."""
    data = load_data("cifar10", root)
    half = lambda x: torch.nn.functional.avg_pool2d(x.float(), 2).round().to(torch.uint8)
    assert isinstance(data.test_x, Tensor)
    return replace(data, name="cifar10-16", x=half(data.x), test_x=half(data.test_x))


def build(classes: int) -> nn.Module:
    """Return ResNet-20, which takes images of any size."""
    return resnet20(classes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="float, or a name for the run")
    parser.add_argument("fields", nargs="*", help="field=value of the recipe")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("runs/small_resnet20"))
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    given = parser.parse_args()
    start = str(given.out / "float")
    own = FLOAT if given.name == "float" else QUANTISED | {"init_from": start, "teacher": start}
    pairs = dict(field.split("=", 1) for field in given.fields)
    if unknown := pairs.keys() - OPTIONS.keys():
        raise ValueError(f"a recipe has no field {sorted(unknown)[0]!r}")
    own |= {name: from_text(name, text) for name, text in pairs.items()}
    recipe = Recipe.from_flat(**{**COMMON, "epochs": given.epochs, **own})
    settings = {"data_dir": given.data_dir, "device": "cpu", "resume": True}
    summary = fit(recipe, given.out / given.name, **settings)
    print(given.name, *(f"{100 * summary[f'{part}_accuracy']:.2f}" for part in ("valid", "test")))
    return 0


if __name__ == "__main__":
    tell(main)
