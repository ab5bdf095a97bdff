"""Test accuracy of a float run that is quantised and calibrated, but not trained.

    python -m benchmarks.untrained runs/resnet20 int8 int4 int4+uint8

After a plus come the bits of shortcuts. Eight batches of 128 training images calibrate the network;
they are not augmented.
"""

import argparse
from pathlib import Path

import torch

import softstair as ss
from benchmarks.sentence import tell
from softstair.data import load
from softstair.data.batches import Examples
from softstair.train import evaluate, trained_network
from softstair.train.records import recipe_of

BATCHES, SIZE = 8, 128


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="directory of a float run")
    parser.add_argument("bits", nargs="+", help="as of softstair train --bits, or BITS+SHORTCUTS")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    given = parser.parse_args()
    recipe = recipe_of(given.run)
    data = load(recipe.data.name, given.data_dir)
    network = trained_network(given.run, data)
    numbers = data.numbers(recipe.data.integer_input, recipe.data.centre_input)
    assert data.test_x is not None
    assert data.test_y is not None
    test = Examples(data.test_x, data.test_y, *numbers)
    print(f"float {evaluate(network, test)[1]:.2%}", flush=True)
    order = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(0))
    chosen = Examples(data.x[order[: BATCHES * SIZE]], data.y[order[: BATCHES * SIZE]], *numbers)
    for text in given.bits:
        bits, _, shortcuts = text.partition("+")
        net = ss.quantise(
            network,
            bits,
            skip="classifier",
            options=ss.QuantiseOptions(shortcuts=shortcuts or None),
        ).eval()
        ss.calibrate(net, [x for x, _ in chosen.chunks(SIZE)])
        print(f"{text} {evaluate(net, test)[1]:.2%}", flush=True)
    return 0


if __name__ == "__main__":
    tell(main)
