"""Which straight-through estimator? All the named ones, and annealed noise, on the same folds.

    python examples/estimators.py [EPOCHS [FOLDS]]

An estimator is a density for the backward pass; the forward pass is the stair itself. Annealed
noise begins as one of them and ends without any.
"""

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import softstair as ss
from softstair.data import load, split
from softstair.models import digits as network

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 10
FOLDS = int(sys.argv[2]) if len(sys.argv) > 2 else 5
STAIR = ss.Stair.ternary()

CONTENDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "identity": lambda: {"noise": ss.ste.identity()},
    "ReLU": lambda: {"noise": ss.ste.relu()},
    "clipped ReLU": lambda: {"noise": ss.ste.clipped_relu()},
    "hard sigmoid": lambda: {"noise": ss.ste.hard_sigmoid()},
    "piecewise polynomial": lambda: {"noise": ss.ste.piecewise_polynomial()},
    "error function": lambda: {"noise": ss.ste.error_function()},
    "sigmoid": lambda: {"noise": ss.ste.sigmoid()},
    "annealed, mode": lambda: {"noise": "uniform", "forward": "mode"},
    "annealed, expectation": lambda: {"noise": "uniform", "forward": "expectation"},
}


def accuracy(settings: dict[str, Any], known: torch.Tensor, new: torch.Tensor) -> float:
    torch.manual_seed(0)
    net = ss.quantise(network(), STAIR, STAIR, skip="classifier", **settings)
    steps = len(known) // 64
    # Estimators keep their noise: an annealer moves only what is scheduled.
    schedule = ss.Schedule.for_network(net, period=0.25 * EPOCHS)
    annealer = ss.Annealer(net, schedule, steps_per_unit=steps)
    optimiser = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(EPOCHS):
        for batch in known[torch.randperm(len(known))][: steps * 64].split(64):
            annealer.step()
            optimiser.zero_grad()
            F.cross_entropy(net(x[batch]), data.y[batch]).backward()
            optimiser.step()
    with torch.no_grad():
        return float((net.eval()(x[new]).argmax(1) == data.y[new]).double().mean())


torch.set_num_threads(1)
data = load("digits")
x = (data.x - data.mean) / data.std
for name, settings in CONTENDERS.items():
    scores = [accuracy(settings(), *split(data, fold, 5)) for fold in range(FOLDS)]
    spread = f" ± {statistics.stdev(scores):.2%}" if FOLDS > 1 else ""
    print(f"{name:<22} {statistics.mean(scores):.2%}{spread}")
