"""Fine-tunes one float network with softstair, Brevitas and torchao, with the defaults of each.

    python -m benchmarks.peers --out peers.csv
    python -m benchmarks.peers --data cifar10 --device cuda --batch 128 --epochs 20 \
        --float-epochs 100 --out peers-cifar10.csv

All start from one float network (MobileNetV1-0.25 on digits of 16×16, ResNet-20 on CIFAR-10), with
the same batches in the same order, AdamW and half a cosine of the rate. With ``--latent-rate`` the
weights of softstair's layers have a rate of their own, in quanta: rows with it are not compared at
equal settings. With ``--teacher`` all learn the scores of the float network too, by the defaults of
``softstair train``. The last layer stays in float, and the first reads bytes.

Each training adds a row: the accuracies in per cent of the float network, after quantisation and
calibration (untrained) and after fine-tuning (trained), the seconds of fine-tuning, what is
exported, and how many of the compared numbers differ between the trained network and the export.
Brevitas and torchao are imported from PYTHONPATH.
"""

import argparse
import copy
import csv
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.baselines.harness import Run
from benchmarks.baselines.peer_networks import METHODS, accuracy
from benchmarks.sentence import tell
from softstair.data import load
from softstair.train import OptimiserOptions, Recipe
from softstair.train.optimiser import make_optimiser
from softstair.train.settings import training_settings
from softstair.train.teacher import FloatRun, Teacher
from softstair.train.updates import Rates

NETWORKS = {"digits": ("mobilenet-16", "none"), "cifar10": ("resnet20", "crop-flip")}
"""The network and the augmentation of each data set."""
BITS = ("int8", "int4", "int3", "int2", "ternary")
CALIBRATION_BATCHES = 8
WEIGHT_DECAY = 1e-4
FOLDS = 2
"""Of data without a test set: half of the examples test, so that 0.3 points are resolved."""


def train(run: Run, latent_rate: float | None = None) -> float:
    """Train the network of a run, and return the seconds; on a CPU, those of this process."""
    clock = time.perf_counter if run.is_cuda else time.process_time
    begin = clock()
    run.network.train()
    options = OptimiserOptions(
        "adamw",
        learning_rate=run.rate,
        latent_rate=latent_rate,
        weight_decay=run.weight_decay,
        norm_decay=0.0,
    )
    optimiser = make_optimiser(run.network, options, run.device)
    rates = Rates(optimiser, None)
    for share, indices in run.batches():
        rates.set(0.5 * (1 + math.cos(math.pi * share)))
        optimiser.zero_grad()
        run.loss(indices).backward()
        optimiser.step()
    if run.is_cuda:
        torch.cuda.synchronize()
    return clock() - begin


def new_run(given: argparse.Namespace, seed: int, fold: int, epochs: int, rate: float) -> Run:
    """Return a run of the float network."""
    dataset = load(given.data, given.data_dir)
    model, augment = NETWORKS[given.data]
    every = dataset.test_x is not None
    if given.data == "digits":
        dataset = replace(dataset, x=dataset.x.repeat_interleave(2, 2).repeat_interleave(2, 3))
    recipe = Recipe.from_flat(
        data=given.data, model=model, augment=augment, weights="float", features="float",
        integer_input=True, precision="float32", batch=given.batch, epochs=epochs, seed=seed,
        fold="all" if every else fold, folds=FOLDS,
    )  # fmt: skip
    if given.limit is not None:
        dataset = dataset.sample(given.limit)
    run = Run(recipe, dataset, torch.device(given.device), None, rate, WEIGHT_DECAY)
    run.test = run.test if every else run.valid
    return run


def float_network(given: argparse.Namespace, seed: int, fold: int) -> nn.Module:
    """Return the trained float network of a seed and fold, which is kept in a file."""
    path = given.starts / f"{given.data}-{given.float_epochs}-{seed}-{fold}.pt"
    run = new_run(given, seed, fold, given.float_epochs, given.float_rate)
    if path.exists():
        run.network.load_state_dict(torch.load(path, weights_only=True))
    else:
        train(run)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(run.network.state_dict(), path)
    return run.network.eval()


def measure(
    method: str, bits: str, model: nn.Module, run: Run, given: argparse.Namespace
) -> dict[str, Any]:
    """Quantise, fine-tune and deploy once; return the row of the table."""
    if given.teacher:
        start = FloatRun(run.recipe, copy.deepcopy(model), digest="")
        run.teacher = Teacher(start, run.recipe, run.dataset, run.device)
    chunks = islice(run.training.chunks(run.recipe.run.batch), CALIBRATION_BATCHES)
    candidate = METHODS[method](model, bits, [x for x, _ in chunks])
    row: dict[str, Any] = {"method": method, "bits": bits, "rate": f"{run.rate:g}"}
    row["latent_rate"] = "" if given.latent_rate is None else f"{given.latent_rate:g}"
    row |= {"epochs": run.recipe.run.epochs, "teacher": "yes" if given.teacher else ""}
    row |= {
        "seed": run.recipe.run.seed,
        "fold": run.recipe.data.fold,
        "float": accuracy(model, run),
    }
    row["untrained"] = accuracy(candidate.untrained, run)
    run.network = candidate.network.to(run.device)
    seconds = train(run, given.latent_rate)
    row |= {"trained": accuracy(candidate.trained(), run), "seconds": seconds}
    try:
        deployed = candidate.deploy(run)
    except Exception as error:  # whatever the export of a peer raises
        deployed = (f"failed: {type(error).__name__}", "", "")
    row |= zip(("deployed", "differ", "compared"), deployed, strict=True)
    return {name: f"{x:.2f}" if isinstance(x, float) else x for name, x in row.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--bits", nargs="+", choices=BITS, default=BITS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folds", type=int, nargs="+", help="of the digits")
    parser.add_argument("--data", choices=NETWORKS, default="digits")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--teacher", action="store_true", help="learn the float network's scores")
    parser.add_argument("--limit", type=int, help="use only N random examples")
    for name, default in (("epochs", 10), ("float-epochs", 30), ("batch", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, rate in (("rate", 1e-3), ("float-rate", 3e-3), ("latent-rate", None)):
        parser.add_argument(f"--{name}", type=float, default=rate)
    for name, path in (("data-dir", "data"), ("starts", "runs/peers"), ("out", "peers.csv")):
        parser.add_argument(f"--{name}", type=Path, default=Path(path))
    given = parser.parse_args(arguments)
    folds = given.folds or (range(FOLDS) if given.data == "digits" else [0])
    for seed, fold in itertools.product(given.seeds, folds):
        model = float_network(given, seed, fold)
        for bits, method in itertools.product(given.bits, given.methods):
            run = new_run(given, seed, fold, given.epochs, given.rate)
            with training_settings(run.recipe, run.device):
                row = measure(method, bits, model, run, given)
            is_new = not given.out.exists()
            with given.out.open("a", newline="") as file:
                csv.writer(file).writerows([row, row.values()] if is_new else [row.values()])
            print(*row.values(), flush=True)
    return 0


if __name__ == "__main__":
    tell(main)
