"""Models that several processes import by name; importing a test file would take a second."""

import hashlib
import os
import time
from pathlib import Path

from torch import Tensor, nn


class Witness(nn.Sequential):
    """Notes the digest of its parameters when it is evaluated.

    With STRIKE="rank target signal step" in the environment, the process of that rank sends itself
    or its launcher a signal in that step.
    """

    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        rank, target, number, step = os.environ.get("STRIKE", "none own 0 0").split()
        if self.training and rank == os.environ.get("RANK") and self.steps == int(step):
            os.kill(os.getppid() if target == "launcher" else os.getpid(), int(number))
            time.sleep(1.0)  # until the launcher has passed it on
        if not self.training and (folder := os.environ.get("NOTES")):
            values = b"".join(x.detach().numpy().tobytes() for x in self.parameters())
            with open(Path(folder, os.environ["RANK"]), "a", encoding="utf-8") as file:
                file.write(hashlib.sha256(values).hexdigest() + "\n")
        return super().forward(x)


def witness() -> nn.Module:
    norm = nn.BatchNorm1d(32)
    return Witness(nn.Flatten(), nn.Linear(64, 32), norm, nn.ReLU(), nn.Linear(32, 10))


def plain() -> nn.Module:
    """Without batch normalisation, the gradient of an example does not depend on the others."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


class Branches(nn.Sequential):
    """Trains one layer in rank 0 and another in rank 1."""

    def forward(self, x: Tensor) -> Tensor:
        other = self.training and os.environ.get("RANK") == "1"
        return self[1 + other](self[0](x))


def branches() -> nn.Module:
    return Branches(nn.Flatten(), nn.Linear(64, 10), nn.Linear(64, 10))
