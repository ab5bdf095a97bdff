"""Training on a GPU: it learns, it survives, and resumed it is the same run."""

import json
import os
import signal
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from standalone import main
from torch import nn

from softstair.data import Dataset
from softstair.train import Recipe, fit
from softstair.train.parallel import Interrupted
from softstair.train.settings import matmul_precision, training_settings
from softstair.train.state import State


def blobs() -> Dataset:
    """Ten classes of 8×8 bytes, each a pattern under noise."""
    draw = torch.Generator().manual_seed(0)
    patterns = torch.randint(160, (10, 1, 8, 8), generator=draw)
    y = torch.randint(10, (4000,), generator=draw)
    x = patterns[y] + torch.randint(95, (4000, 1, 8, 8), generator=draw)
    return Dataset("blobs", x.byte(), y, tuple("0123456789"), mean=128.0, std=64.0)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


class Stop:
    """Asks the training to stop after so many steps of this process, as a signal would."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def begin(self, state: State) -> None: ...

    def step(self, state: State) -> None:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGTERM)

    def epoch(self, state: State, metrics: object) -> None: ...


def run(recipe: Recipe, out: Path, stop: int | None = None, resume: bool = False) -> float:
    watchers = [] if stop is None else [Stop(stop)]
    common = {"device": "cuda", "dataset": blobs(), "model": network(), "resume": resume}
    return fit(recipe, out, watchers=watchers, **common)["valid_accuracy"]


X, W = (64, 128, 16, 16), (256, 128, 3, 3)
RECIPE = Recipe.from_flat(data="blobs:load", epochs=6, period=2.0, drop=5.0, augment="crop-flip")

GROUPS = {
    "optimiser": "adamw", "latent_rate": 0.01, "norm_rate": 0.3, "rate_shape": "cosine",
    "weight_decay": 0.1, "norm_decay": 0.0, "clip_gradient": 1.0, "clip_latent": True,
}  # fmt: skip


def test_every_forward_and_precision_learns() -> None:
    for forward in ("expectation", "mode", "random"):
        for precision in ("float32", "tf32", "bfloat16"):
            with tempfile.TemporaryDirectory() as folder:
                recipe = Recipe.from_flat(
                    data="blobs:load", epochs=6, period=2.0, forward=forward, precision=precision
                )
                assert run(recipe, Path(folder) / "run") > 0.6, (forward, precision)


def test_float32_is_float32() -> None:
    """Products of a training beside those in float64; by itself torch rounds convolutions' factors.
    What is evaluated, is so in float32."""
    draw = torch.Generator("cuda").manual_seed(0)
    x, w = (torch.randn(shape, generator=draw, device="cuda") for shape in (X, W))

    def error() -> tuple[float, float]:
        found = []
        for product in (lambda a, b: F.conv2d(a, b), lambda a, b: a.flatten(1) @ a.flatten(1).T):
            exact = product(x.double(), w.double())
            found.append(float((product(x, w) - exact).abs().max() / exact.abs().max()))
        return found[0], found[1]

    cuda, before = torch.device("cuda"), error()
    for precision, rounds in (("float32", False), ("tf32", True), ("bfloat16", None)):
        with training_settings(Recipe.from_flat(precision=precision), cuda):
            if rounds is not None:
                assert [one > 1e-5 for one in error()] == [rounds, rounds], (precision, error())
            with matmul_precision("float32"):
                assert max(error()) < 1e-5, (precision, error())
        assert error() == before


def test_a_stopped_run_goes_on_with_its_own_random_numbers() -> None:
    """Crops, flips and random forwards draw on the device: their generator is part of the state.

    Sums on a GPU may be added up in another order from run to run, so the comparison is close and
    not exact; other crops would be farther off by orders of magnitude.
    """
    for changes in ({}, GROUPS):
        _check_a_stopped_run(RECIPE.replace(forward="random", **changes))


def _check_a_stopped_run(recipe: Recipe) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        run(recipe, out / "whole")
        try:
            run(recipe, out / "cut", stop=70)
            raise AssertionError("it was not stopped")
        except Interrupted:
            pass
        run(recipe, out / "cut", resume=True)
        losses = [
            [json.loads(line)["train_loss"] for line in (out / name / "metrics.jsonl").open()]
            for name in ("whole", "cut")
        ]
    assert losses[0][0] == losses[1][0]
    worst = max(abs(a - b) / a for a, b in zip(*losses, strict=True))
    assert worst < 0.02, losses


if __name__ == "__main__":
    main(globals())
