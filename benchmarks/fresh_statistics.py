"""Measure trained networks with running and with fresh batch-norm statistics, layer by layer.

    python -m benchmarks.fresh_statistics NETWORK... [--every-layer NETWORK] [--data-dir data]
        [--device cpu] [--out FILE.csv]

NETWORK is a network.safetensors. Each is evaluated on its validation fold and on the test
set, with the statistics of its batch normalisations

    running                     as it was trained
    fresh                       all estimated anew
    fresh in layer 0 alone      those of the first layer estimated anew, the others running
    fresh in all but layer 0    those of the first layer running, the others estimated anew
    fresh, not augmented        all, from examples without augmentation, if it was trained with one

and, for those named by --every-layer, with the third and the fourth for every other layer.

Fresh statistics are those that a training step would use: each layer's are estimated while the
layers before it normalise by their batches, from 4,096 training examples in batches of 256, without
noise, augmented as in training. So those of one layer do not make up for what is wrong with those
of another. What is measured is printed, and written to --out. results/variations/statistics.csv:

    python -m benchmarks.fresh_statistics \
        results/networks/speech-uniform-mode-static-integer-input.safetensors \
        --out results/variations/statistics.csv

A row of VGG8 takes a quarter of an hour on one core of a CPU: --device cuda.
"""

import argparse
import contextlib
import csv
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from benchmarks.sentence import tell
from softstair import zoo
from softstair.data import load, split
from softstair.data.augment import Augmentation
from softstair.data.batches import PLAIN, Examples
from softstair.train import Recipe, evaluate
from softstair.train.metrics import refresh_statistics

COLUMNS = ("network", "statistics", "valid_accuracy", "test_accuracy", "data_version")
BATCH, SEED = 256, 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("networks", type=Path, nargs="+", metavar="NETWORK")
    parser.add_argument("--every-layer", type=Path, action="append", default=[], metavar="NETWORK")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with contextlib.ExitStack() as files:
        writer = None
        if given.out is not None:
            file = files.enter_context(open(given.out, "w", newline="", encoding="utf-8"))
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
        for name in given.networks:
            for row in measure(name, given.data_dir, given.device, name in given.every_layer):
                print(", ".join(f"{key} {value or 'none'}" for key, value in row.items()))
                if writer is not None:
                    writer.writerow(row)
                    file.flush()


def measure(
    name: Path, data_dir: Path, device: torch.device, every_layer: bool
) -> Iterator[dict[str, str]]:
    """A row of the table for each choice of statistics."""
    known = zoo.about(name)
    data = load(known.data, data_dir).sample(known.limit)
    numbers = known.mean, known.std, device
    parts = split(data, known.fold, known.folds)
    training, valid = (Examples(data.x[part], data.y[part], *numbers) for part in parts)
    test = None
    if data.test_x is not None and data.test_y is not None:
        test = Examples(data.test_x, data.test_y, *numbers)
    augmentation = Recipe.from_flat(data=known.data).data.augmentation
    for statistics, network in networks(name, training, augmentation, every_layer):
        network.to(device)
        yield {
            "network": name.stem,
            "statistics": statistics,
            "valid_accuracy": f"{evaluate(network, valid)[1]:.4f}",
            "test_accuracy": "" if test is None else f"{evaluate(network, test)[1]:.4f}",
            "data_version": data.version or "",
        }


def networks(
    name: Path, training: Examples, augmentation: Augmentation, every_layer: bool
) -> Iterator[tuple[str, nn.Module]]:
    """The network with each choice of statistics."""
    running = zoo.load(name)
    yield "running", running
    fresh = zoo.load(name).train().to(training.y.device)
    refresh_statistics(fresh, training, BATCH, SEED, augmentation)
    yield "fresh", fresh.eval()
    for layer in range(len(norms(running)) if every_layer else 1):
        yield f"fresh in layer {layer} alone", with_norm(name, running, fresh, layer)
        yield f"fresh in all but layer {layer}", with_norm(name, fresh, running, layer)
    if augmentation != PLAIN:
        refresh_statistics(fresh.train(), training, BATCH, SEED)
        yield "fresh, not augmented", fresh.eval()


def with_norm(name: Path, network: nn.Module, other: nn.Module, layer: int) -> nn.Module:
    """A copy of the network with one batch normalisation of another."""
    copy = zoo.load(name)
    copy.load_state_dict(network.state_dict())
    norms(copy)[layer].load_state_dict(norms(other)[layer].state_dict())
    return copy


def norms(network: nn.Module) -> list[nn.Module]:
    """The batch normalisations of a network, input side first."""
    kind = nn.modules.batchnorm._BatchNorm
    return [module for module in network.modules() if isinstance(module, kind)]


if __name__ == "__main__":
    tell(main)
