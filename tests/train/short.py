"""Short trainings, and what a sentence to a user looks like."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from softstair.data import load
from softstair.data.batches import Examples
from softstair.train import Interrupted, Recipe, fit
from softstair.train.fit import Step
from softstair.train.network import make_network
from softstair.train.state import State

RECIPE = Recipe.from_flat(limit=200, batch=32).rescaled(3).replace(period=0.7)
"""Three epochs of five steps on 160 digits: some tenths of a second."""
OWN_DATA = """
import torch
from torch import nn
from softstair.data import Dataset

def load():
    numbers = torch.Generator().manual_seed(1)
    y = torch.randint(4, (240,), generator=numbers)
    x = 20 * torch.randn(240, 1, 6, 6, generator=numbers) + 30 * y[:, None, None, None] + 50
    return Dataset("own", x.clamp(0, 200).byte(), y, tuple("abcd"), mean=100.0, std=40.0)
"""
OWN_MODEL = """
def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 32), nn.BatchNorm1d(32), nn.ReLU(),
                         nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
"""
"""The source of a module with data and a model of a user's own."""


def recipe(**changes: Any) -> Recipe:
    return RECIPE.replace(**changes)


def without_export(messages: str) -> str:
    """Return messages without the line on what the network exports, which a run begins with.

    >>> without_export("softstair train: freezes.\\nsoftstair train: stopped.")
    'softstair train: stopped.'
    """
    first, newline, rest = messages.partition("\n")
    is_export = "freezes" in first or "does not freeze" in first
    return rest if newline and is_export else messages


def is_sentence(text: str, longest: int = 900) -> bool:
    """One line, one full stop, not endless, no traceback.

    >>> is_sentence("epochs must be a whole number, but 1.5 was given.")
    True
    >>> is_sentence("it failed (x was given.) try again.")
    False
    """
    text = text.removesuffix("\n")
    plain = text.isprintable() and "Traceback" not in text and "internal error" not in text
    return plain and 10 < len(text) < longest and not re.search(r"(?<!\.)\.[)\s]", text)


def files(folder: Path) -> dict[str, bytes]:
    """Everything below a folder but the lock."""
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def put(file: Path, content: bytes) -> None:
    """Writes into a file that is there: making it anew costs a hundred times that."""
    with open(file, "r+b") as opened:
        opened.write(content)
        opened.truncate()


def metrics_of(out: Path) -> bytes:
    return (out / "metrics.jsonl").read_bytes()


def lines_of(out: Path) -> list[dict[str, Any]]:
    """The metrics of each epoch of a run."""
    return [json.loads(line) for line in metrics_of(out).splitlines()]


def summary_of(summary: dict[str, Any]) -> list[Any]:
    """What of a summary does not depend on the clock."""
    return [summary[name] for name in ("valid_accuracy", "best_valid_accuracy", "test_accuracy")]


def result(out: Path) -> tuple[bytes, list[Any]]:
    """The metrics and the accuracies of a finished run."""
    return metrics_of(out), summary_of(json.loads((out / "summary.json").read_text()))


def uninterrupted(out: Path, recipe: Recipe = RECIPE, **given: Any) -> tuple[bytes, list[Any]]:
    """The metrics and the accuracies of a training that nobody disturbs."""
    fit(recipe, out, **given)
    return result(out)


def stopped(recipe: Recipe, out: Path, epoch: int, step: int, **given: Any) -> None:
    """Train until a signal stops the run, after so many complete epochs and steps."""
    with pytest.raises(Interrupted):
        fit(recipe, out, watchers=[At(epoch, step, strike(signal.SIGTERM))], **given)


def begun(recipe: Recipe, examples: int) -> tuple[State, Step]:
    """The state of a training on so many digits before its first step, and this step."""
    torch.manual_seed(0)
    data = load("digits").sample(examples)
    state = State(recipe, make_network(recipe, data), examples, torch.device("cpu"))
    state.begin_epoch()
    return state, Step(state, Examples(data.x, data.y, data.mean, data.std))


class At:
    """A watcher that acts after a step; ``epoch`` and ``step`` count complete ones."""

    def __init__(self, epoch: int, step: int, act: Callable[[State], None]) -> None:
        self.position, self.act = (epoch, step), act

    def begin(self, state: State) -> None:
        pass

    def step(self, state: State) -> None:
        if (state.epoch, state.step) == self.position:
            self.act(state)

    def epoch(self, state: State, metrics: dict[str, Any]) -> None:
        self.step(state)


def strike(*numbers: int) -> Callable[[State], None]:
    """Return what sends signals to this process."""
    return lambda state: [os.kill(os.getpid(), number) for number in numbers] and None
