"""Trains VGG8 on CIFAR-10 by softstair and by other methods, from one float network.

    softstair train --preset paper-cifar10 --weights float --features float --integer-input \\
        --centre-input --optimiser adamw --learning-rate 0.002 --weight-decay 0.1 --norm-decay 0 \\
        --rate-shape cosine --cutout 12 --epochs 100 --out runs/start
    python -m benchmarks.baselines.run softstair softstair-learned twn lsq pact dorefa brevitas \\
        --start runs/start --seeds 0 1 2 --cutout 10 --device cuda --out baselines.csv

Each training adds a row to the table: method, bits, settings, accuracies after the last epoch,
seconds of training and commit. Trainings that are in the table are skipped, so the command may be
repeated. Several may run at a time, with other methods, bits or seeds, and write one table.
Without ``--bits`` a method trains with all bits that it has.
"""

import argparse
import csv
import fcntl
import importlib
import itertools
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.baselines.harness import Run
from softstair.data import load
from softstair.models import default_for
from softstair.train import Recipe
from softstair.train.records import recipe_of
from softstair.train.settings import choose_device, choose_threads, training_settings

METHODS = {
    "softstair": "ours",
    "softstair-learned": "ours_learned",
    "twn": "twn",
    "lsq": "lsq",
    "pact": "pact",
    "dorefa": "dorefa",
    "brevitas": "brevitas_default",
}
BITS = ("ternary/float", "ternary/uint2", "ternary", "int2", "int4")
RESULTS = ("valid_accuracy", "test_accuracy", "seconds", "commit")  # all else is settings


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("methods", nargs="+", choices=METHODS, metavar="METHOD")
    parser.add_argument("--bits", nargs="+", choices=BITS, default=BITS)
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
    parser.add_argument("--eager", action="store_true", help="do not compile and capture steps")
    parser.add_argument("--out", type=Path, default=Path("baselines.csv"))
    parser.add_argument("--commit", help="default: that of the checkout")
    given = parser.parse_args(arguments)
    try:
        train_all(given)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def train_all(given: argparse.Namespace) -> None:
    """Train what the table does not have yet, all methods with one seed before the next."""
    dataset, device = load(given.data, given.data_dir), choose_device(given.device)
    beside = lambda name: importlib.import_module(f"benchmarks.baselines.{METHODS[name]}")
    modules: dict[str, Any] = {name: beside(name) for name in given.methods}
    names = [(name, bits) for bits in given.bits for name in modules if bits in modules[name].RATES]
    if given.commit is None:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
        given.commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    for seed, (name, bits) in itertools.product(given.seeds, names):
        recipe, module = recipe_for(given, seed), modules[name]
        rate = module.RATES[bits] if given.rate is None else given.rate
        decay = module.WEIGHT_DECAY if given.weight_decay is None else given.weight_decay
        settings = {
            "method": name,
            "bits": bits,
            "seed": seed,
            "epochs": recipe.run.epochs,
            "batch": recipe.run.batch,
            "data": recipe.data.name,
            "network": default_for(recipe.data.name),
            "fold": recipe.data.fold,
            "limit": recipe.data.limit,
            "first_layer": given.first_layer,
            "start": given.start,
            "rate": rate,
            "weight_decay": decay,
            **{key: recipe[key] for key in ("augment", "cutout", "mixup")},
            "precision": recipe.run.precision_on(device),
        }
        settings = {key: "" if value is None else str(value) for key, value in settings.items()}
        if is_in_table(given.out, settings):
            continue
        with training_settings(recipe, device):
            run = Run(recipe, dataset, device, given.start, rate, decay, given.first_layer)
            run.is_eager = given.eager
            torch.set_num_threads(choose_threads(run.network, recipe.run.batch))
            module.train(run, bits)
            values = (*run.accuracies().values(), round(run.seconds, 3), given.commit)
        row = {**settings, **dict(zip(RESULTS, values, strict=True))}
        append(given.out, row)
        print(json.dumps(row), flush=True)


def is_in_table(path: Path, settings: dict[str, str]) -> bool:
    """Return whether the table has a training with these settings."""
    if not path.exists():
        return False
    with path.open(newline="") as file:
        return any(settings.items() <= row.items() for row in csv.DictReader(file))


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a row to the table, which other processes may write too."""
    with path.open("a", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if file.seek(0, os.SEEK_END) == 0:
            writer.writeheader()
        writer.writerow(row)


def recipe_for(given: argparse.Namespace, seed: int) -> Recipe:
    """Return the float recipe whose data, order and augmentation are used."""
    start = Recipe() if given.start is None else recipe_of(given.start)
    if start is None:
        raise ValueError(f"{str(given.start)!r} holds no run")
    names = ("data", "epochs", "batch", "limit", "augment", "cutout", "mixup", "precision")
    return Recipe.from_flat(
        weights="float",
        features="float",
        seed=seed,
        fold="all" if given.fold == "all" else int(given.fold),
        integer_input=start.data.integer_input,
        centre_input=start.data.centre_input,
        **{name: getattr(given, name) for name in names},
    )


if __name__ == "__main__":
    main()
