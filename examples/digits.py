"""A whole experiment on one page: a ternary network on the digits, every fold, mean ± std.

    python examples/digits.py [EPOCHS]

No recipe, no run directory: PyTorch, and the four lines of softstair in it.
"""

import statistics
import sys

import torch
import torch.nn.functional as F
from torch import nn

import softstair as ss
from softstair.data import load, split

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 30
BATCH, FOLDS = 64, 5


def layer(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU()]


def train(x: torch.Tensor, y: torch.Tensor) -> nn.Module:
    model = nn.Sequential(*layer(64, 256), *layer(256, 256), nn.Linear(256, 10))
    net = ss.quantise(model, ss.Stair.ternary(), ss.Stair.ternary(), skip="6")
    # Layer 0 is annealed in the first third of the epochs, layer 1 in the second.
    schedule = ss.Schedule.for_network(net, period=EPOCHS / 3, interval="partition")
    steps = len(x) // BATCH
    annealer = ss.Annealer(net, schedule, steps_per_unit=steps)
    optimiser = torch.optim.Adam(net.parameters(), 1e-3)
    drop = torch.optim.lr_scheduler.StepLR(optimiser, max(1, EPOCHS * 4 // 5), gamma=0.1)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x))[: steps * BATCH].split(BATCH):
            annealer.step()
            optimiser.zero_grad()
            F.cross_entropy(net(x[batch]), y[batch]).backward()
            optimiser.step()
        drop.step()
    return net.eval()


torch.manual_seed(0)
torch.set_num_threads(1)
digits = load("digits")
x = ((digits.x - digits.mean) / digits.std).flatten(1)
scores = []
for fold in range(FOLDS):
    known, new = split(digits, fold, FOLDS)
    net = train(x[known], digits.y[known])
    with torch.no_grad():
        scores.append(float((net(x[new]).argmax(1) == digits.y[new]).double().mean()))
    print(f"fold {fold}: {scores[-1]:.2%}")
print(f"{statistics.mean(scores):.2%} ± {statistics.stdev(scores):.2%}")
