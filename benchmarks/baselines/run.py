"""Trains VGG8 on CIFAR-10 by other methods: TWN, LSQ, PACT, DoReFa and Brevitas' defaults.

    python benchmarks/baselines/run.py twn lsq pact dorefa brevitas --start runs/float --seeds 0 1 2

Each run prints one line of JSON: the levels of weights and features, the accuracies after the last
epoch, and the seconds of training. ``--start`` is the run directory of a float network:

    softstair train --preset paper-cifar10 --weights float --features float --out runs/float
"""

import argparse
import importlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from harness import Run
from softstair.data import Dataset, load
from softstair.models import default_for
from softstair.train import Recipe
from softstair.train.execution import choose_device, choose_threads, training_settings
from softstair.train.records import recipe_of

METHODS = {
    "twn": "twn",
    "twn-features": "twn_features",
    "lsq": "lsq",
    "pact": "pact",
    "dorefa": "dorefa",
    "brevitas": "brevitas_default",
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("methods", nargs="+", choices=METHODS, metavar="METHOD")
    parser.add_argument("--start", type=Path, help="run directory of a float network")
    parser.add_argument("--first-layer", choices=("same", "float"), default="same")
    parser.add_argument("--rate", type=float, help="learning rate (default: the method's)")
    parser.add_argument("--weight-decay", type=float, help="default: the method's")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--fold", default="0", help="fold that validates, or all: none does")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--limit", type=int, help="use only N random examples of each set")
    parser.add_argument("--augment", default="crop-flip")
    parser.add_argument("--cutout", type=int, default=0)
    parser.add_argument("--mixup", type=float, default=0.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto", help="auto: bfloat16 on a GPU that has it")
    given = parser.parse_args(arguments)
    try:
        dataset = load(given.data, given.data_dir)
        device = choose_device(given.device)
        for method in given.methods:
            for seed in given.seeds:
                line = measure(method, recipe_for(given, seed), dataset, device, given)
                print(json.dumps(line), flush=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def recipe_for(given: argparse.Namespace, seed: int) -> Recipe:
    """Return the float recipe whose data, order and augmentation are used."""
    start = Recipe() if given.start is None else recipe_of(given.start)
    if start is None:
        raise ValueError(f"{str(given.start)!r} holds no run")
    names = ("data", "epochs", "batch", "limit", "augment", "cutout", "mixup", "precision")
    return Recipe(
        weights="float",
        features="float",
        seed=seed,
        fold=0 if given.fold == "all" else int(given.fold),
        integer_input=start.integer_input,
        centre_input=start.centre_input,
        **{name: getattr(given, name) for name in names},
    )


def measure(
    method: str, recipe: Recipe, dataset: Dataset, device: torch.device, given: argparse.Namespace
) -> dict[str, Any]:
    """Train once, and return the line of JSON."""
    module: Any = importlib.import_module(METHODS[method])
    rate = module.RATE if given.rate is None else given.rate
    decay = module.WEIGHT_DECAY if given.weight_decay is None else given.weight_decay
    if recipe.limit is not None:
        dataset = dataset.sample(recipe.limit)
    with training_settings(recipe, device):
        every = given.fold == "all"
        settings = (rate, decay, given.first_layer)
        run = Run(recipe, dataset, device, given.start, every, *settings)
        torch.set_num_threads(choose_threads(run.network, recipe.batch))
        begin = time.perf_counter()
        module.train(run)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        accuracies = run.accuracies()
    return {
        "method": method,
        **module.LEVELS,
        "first_layer": given.first_layer,
        "last_layer": "float",
        "data": recipe.data,
        "network": default_for(recipe.data),
        "fold": given.fold,
        "seed": recipe.seed,
        "epochs": recipe.epochs,
        "start": None if given.start is None else str(given.start),
        "rate": rate,
        "weight_decay": decay,
        "augmentation": {name: getattr(recipe, name) for name in ("augment", "cutout", "mixup")},
        "precision": recipe.precision_on(device),
        **accuracies,
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    main()
