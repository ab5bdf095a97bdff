"""Does a default lose to a plain straight-through estimator? Trains both, at equal steps.

    python -m benchmarks.defaults digits out.jsonl
    python -m benchmarks.defaults vgg8,resnet20,dscnn out.jsonl --data-dir data --epochs 30

`default` is what ss.quantise gives by the name of bits, with static noise. `annealed` anneals the
noise layer by layer until 80 % of the steps. `plain` is slope 1 everywhere. For GPTs,
benchmarks/language.py compares softstair with plain-start. What the file has is not trained again.
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import softstair as ss

DATA = {"digits": "digits", "vgg8": "cifar10", "resnet20": "cifar10", "dscnn": "speech"}
METHODS = ("default", "annealed", "plain")
BITS = ("ternary", "int2", "int4")
BATCH, RATE = 128, 2e-3


def network(
    name: str, method: str, bits: str, data: Any, epochs: int, steps: int
) -> tuple[nn.Module, Any]:
    """Return a quantised network, and its annealer if it has one."""
    float_net = ss.models.build(name, len(data.classes), tuple(data.x.shape[1:]))
    noise: Any = ss.ste.identity() if method == "plain" else "uniform"
    net = ss.quantise(float_net, bits, noise=noise, skip=ss.models.last_layer(float_net))
    if method != "annealed":
        return net, None
    layers = 1 + max(stair.layer for _, stair in ss.nn.stair_modules(net))
    return net, ss.Annealer(net, ss.Schedule.for_network(net, period=0.8 * epochs / layers), steps)


def accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    net.eval()
    with torch.no_grad():
        parts = zip(x.split(500), y.split(500), strict=True)
        right = [(net(images).argmax(1) == labels).sum() for images, labels in parts]
    return float(torch.stack(right).sum() / len(y))


def trained(row: dict[str, Any], root: Path, epochs: int) -> float:
    """Train a network on four fifths of the training data; return its accuracy on the last."""
    torch.manual_seed(row["seed"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = ss.data.load(DATA[row["network"]], root)
    known, new = ss.data.split(data, 0, 5)
    x, y = ((data.x.float() - data.mean) / data.std).to(device), data.y.to(device)
    count = len(known) // BATCH
    kind = (row["network"], row["method"], row["bits"])
    net, annealer = network(*kind, data, epochs, count)
    optimiser = torch.optim.AdamW(net.to(device).parameters(), RATE)
    decay = lambda k: (1 + math.cos(math.pi * k / (epochs * count))) / 2
    rates = torch.optim.lr_scheduler.LambdaLR(optimiser, decay)
    for _ in range(epochs):
        for part in torch.randperm(len(known))[: count * BATCH].split(BATCH):
            if annealer is not None:
                annealer.step()
            batch = torch.as_tensor(known)[part]
            optimiser.zero_grad()
            F.cross_entropy(net(x[batch]), y[batch]).backward()
            optimiser.step()
            rates.step()
    return accuracy(net, x[new], y[new])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("networks")
    parser.add_argument("out", type=Path)
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    lines = given.out.read_text().splitlines() if given.out.exists() else []
    known, lost = {tuple(key): value for key, value in map(json.loads, lines)}, 0
    for name in given.networks.split(","):
        for bits in BITS:
            scores: dict[str, list[float]] = {}
            for method in METHODS:
                for seed in range(given.seeds):
                    row = {"network": name, "bits": bits, "method": method, "seed": seed}
                    key = (*row.values(), given.epochs)
                    if key not in known:
                        known[key] = trained(row, given.data_dir, given.epochs)
                        with given.out.open("a") as file:
                            file.write(json.dumps([key, known[key]]) + "\n")
                    scores.setdefault(method, []).append(known[key])
            means = {method: statistics.mean(own) for method, own in scores.items()}
            pairs = [a - b for a, b in zip(scores["default"], scores["plain"], strict=True)]
            error = statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else 0.0
            loses = statistics.mean(pairs) < -error
            lost += loses
            figures = ", ".join(f"{method} {mean:.2%}" for method, mean in means.items())
            verdict = "LOSES" if loses else "holds"
            difference = f"default − plain {statistics.mean(pairs):+.2%} ± {error:.2%}"
            print(f"{name} {bits}: {figures}; {difference}: {verdict}", flush=True)
    return 1 if lost else 0


if __name__ == "__main__":
    raise SystemExit(main())
