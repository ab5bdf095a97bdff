"""What fresh statistics do for a trained network whose weights were moving to the last.

    python benchmarks/fresh_statistics.py NETWORK [--data-dir data]

NETWORK is a packed network or its name. Prints the accuracy on its validation fold, with the
statistics that it was packed with, and with those estimated anew from its training examples, as
they were augmented and as they are.
"""

import argparse
from pathlib import Path

from sentence import tell
from softstair.data import load
from softstair.data.batches import Examples
from softstair.data.folds import split
from softstair.train.evaluate import evaluate
from softstair.train.packed import about, packed_network
from softstair.train.statistics import refresh


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("network", type=Path)
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    given = parser.parse_args()
    network, held = packed_network(given.network), about(given.network)
    recipe = held["recipe"]
    data = load(recipe["data"], given.data_dir)
    parts = split(data, recipe["fold"], recipe["folds"])
    numbers = held["mean"], held["std"]
    training, valid = (Examples(data.x[part], data.y[part], *numbers) for part in parts)
    found = {"running": evaluate(network, valid)[1]}
    for name, augment in {"fresh": recipe["augment"], "fresh, not augmented": "none"}.items():
        refresh(network.train(), training, batch=256, seed=0, augment=augment)
        found[name] = evaluate(network.eval(), valid)[1]
    print("; ".join(f"{name} {accuracy:.2%}" for name, accuracy in found.items()))


if __name__ == "__main__":
    tell(main)
