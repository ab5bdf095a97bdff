"""Shares of the weights at each level, layer by layer, of trained networks.

    python -m paper grid paper-cifar10 --epochs 50 --out runs/means --folds 0 \\
        --where static_mean=false noise=uniform forward=mode,random interval=partition,same_end \\
        power=homogeneous
    python -m benchmarks.dynamic_means runs/means --out results/dynamic-means.csv

RUNS is a folder of run directories that have the same weight
stair. Writes a CSV with a row for each quantised layer of each network: the shares of its weights
at each level, by the hard stair, after the last epoch. Layers count from 0 at the input.
"""

import argparse
import csv
import sys
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from benchmarks.sentence import tell
from paper.design import configuration
from paper.results import find
from softstair import Stair
from softstair.convert.options import stair_named
from softstair.train import Recipe, RunError, checkpoint
from softstair.train.records import recipe_of

MARK = ".weight_stair.quantum"
"""Behind the name of a quantised layer in the state of a network."""
Layers = list[tuple[Stair, Tensor]]
"""The stair and the weights of each quantised layer."""


def networks(folder: Path) -> Iterator[tuple[Recipe, Layers]]:
    """Every network in a folder: the recipe, and the quantised layers, input side first."""
    for path in find(folder):
        recipe, state = recipe_of(path), checkpoint.load(path / "checkpoint")
        if recipe is None or state is None:
            raise RunError(f"{str(path)!r} has no checkpoint: train it, or leave it out.")
        held = state["network"]
        net = recipe.network
        names = [name.removesuffix(MARK) for name in held if name.endswith(MARK)]
        stairs = [stair_named(net.weights, float(held[n + MARK]), net.thresholds) for n in names]
        weights = [held[f"{name}.weight"] for name in names]
        yield recipe, list(zip(stairs, weights, strict=True))


def rows(folder: Path) -> Iterator[dict[str, str]]:
    """A row for each quantised layer of each network in a folder."""
    for recipe, layers in networks(folder):
        for layer, (stair, weight) in enumerate(layers):
            index = stair.index(weight.detach())
            counts = index.flatten().bincount(minlength=len(stair.levels)).tolist()
            shares = {
                f"at {level / float(stair.quantum):g}": f"{count / index.numel():.4f}"
                for level, count in zip(stair.levels, counts, strict=True)
            }
            unit = {"configuration": configuration(recipe).name, "epochs": str(recipe.run.epochs)}
            yield {**unit, "fold": str(recipe.data.fold), "layer": str(layer), **shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, help="the CSV to write; printed by default")
    given = parser.parse_args()
    table = list(rows(given.runs))
    if not table:
        raise ValueError(f"{str(given.runs)!r} holds no run directory of a quantised network.")
    if len({tuple(row) for row in table}) > 1:
        raise ValueError("the networks have different weight stairs: give those of one at a time.")
    with open(given.out or sys.stdout.fileno(), "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    tell(main)
