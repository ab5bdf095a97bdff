"""The baselines in `benchmarks/baselines/`: formulas computed by hand, and short runs."""

import csv
import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.baselines import dorefa, lsq, pact, run as script, twn
from softstair.train import Recipe, fit

METHODS = ("softstair", "softstair-learned", "twn", "lsq", "pact", "dorefa")
TRAININGS = {
    "ternary/float": {"softstair", "twn"},
    "ternary/uint2": {"softstair", "softstair-learned", "twn"},
    "ternary": {"softstair", "softstair-learned"},
    **dict.fromkeys(("int2", "int4"), {*METHODS} - {"twn"}),
}


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[dict[str, Any]]]:
    """Calls the script in this process; it returns the lines of JSON."""

    def call(*words: object) -> list[dict[str, Any]]:
        monkeypatch.chdir(tmp_path)
        script.main([*map(str, words), "--device", "cpu"])
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return call


def gradients(module: Any, values: list[float]) -> tuple[list[float], list[float]]:
    """Return the module's outputs, and the gradients of their weighted sum 1·y₀ + 2·y₁ + …"""
    x = torch.tensor([values], requires_grad=True)
    y = module(x)
    (y * torch.arange(1.0, len(values) + 1)).sum().backward()
    assert x.grad is not None
    return y.flatten().tolist(), x.grad.flatten().tolist()


def test_twn_by_hand() -> None:
    """mean |w| = 0.5, so the threshold is 0.35, and 0.9 and 1.0 are above it."""
    ternary = twn.Ternary()
    y, dx = gradients(ternary, [0.1, -0.2, 0.9, -1.0, 0.3])
    assert y == pytest.approx([0, 0, 0.95, -0.95, 0], abs=1e-7)
    assert dx == [1, 2, 3, 4, 5]


def test_lsq_weights_by_hand() -> None:
    """With the step 0.5: v/s = 1.2, 0.4, −0.6, −4, of which the first and the last are clipped."""
    module = lsq.LearnedStep(-2, 1, torch.ones(1, 4) / 4)
    assert module.step.item() == 0.5  # 2 · 0.25 / √1
    y, dx = gradients(module, [0.6, 0.2, -0.3, -2.0])
    assert y == pytest.approx([0.5, 0.0, -0.5, -1.0])
    assert dx == [0, 2, 3, 0]
    # 1·1 + 2·(0 − 0.4) + 3·(−1 + 0.6) + 4·(−2): the round's error, or the last level
    expected = (1 - 0.8 - 1.2 - 8) / math.sqrt(4 * 1)
    assert float(module.step.grad) == pytest.approx(expected)


def test_lsq_features_by_hand() -> None:
    """The first batch fits the step: 2 mean(0, 1, 1.1, 5.9) / √3 = 4/√3; then s = 1 is set."""
    module = lsq.LearnedStep(0, 3)
    module(torch.tensor([[-7.0, 1.0, 1.1, 5.9]]))
    assert module.step.item() == pytest.approx(4 / math.sqrt(3))
    module.step.data.fill_(1.0)
    y, dx = gradients(module, [-7.0, 1.2, 1.6, 5.9])
    assert y == pytest.approx([0, 1, 2, 3])
    assert dx == [0, 2, 3, 0]
    expected = (2 * (1 - 1.2) + 3 * (2 - 1.6) + 4 * 3) / math.sqrt(4 * 3)
    assert float(module.step.grad) == pytest.approx(expected)


def test_dorefa_by_hand() -> None:
    """tanh w relative to the largest is 1, −1, 0.2157 and −0.8220: shares 1, 0, 0.608 and 0.089."""
    y, dw = gradients(dorefa.Weights(2), [0.5, -0.5, 0.1, -0.4])
    assert y == pytest.approx([1, -1, 1 / 3, -1])
    largest = math.tanh(0.5)
    assert dw[2] == pytest.approx(3 * (1 - math.tanh(0.1) ** 2) / largest)
    y, dx = gradients(dorefa.Features(2), [-1.0, 0.2, 0.6, 2.0])
    assert y == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert dx == pytest.approx([0, 2, 3, 0])


def test_pact_by_hand() -> None:
    """With the bound 2 the levels are 0, 2/3, 4/3 and 2; 3 and 2 are not below the bound."""
    clipped = pact.Clipped(2, 2.0)
    y, dx = gradients(clipped, [-1.0, 0.5, 1.9, 3.0, 2.0])
    assert y == pytest.approx([0, 2 / 3, 2, 2, 2])
    assert dx == [0, 2, 3, 0, 0]
    assert float(clipped.bound.grad) == 4 + 5


@pytest.mark.nightly
def test_trains_each_method_with_its_bits_from_a_float_network(tmp_path: Path, run: Any) -> None:
    recipe = Recipe.from_flat(
        weights="float", features="float", limit=200, epochs=4, integer_input=True
    )
    fit(recipe, tmp_path / "float", device="cpu")
    start = ("--start", tmp_path / "float", "--data", "digits", "--augment", "none")
    size = ("--limit", 200, "--epochs", 1, "--batch", 20, "--cutout", 2, "--mixup", 0.2)
    lines = run(*METHODS, "--bits", "ternary/float", "int2", *start, *size, "--commit", "abc")
    for bits in ("ternary/float", "int2"):
        assert {line["method"] for line in lines if line["bits"] == bits} == TRAININGS[bits]
    for line in lines:
        assert line["valid_accuracy"] > 0.5, line
        assert line["test_accuracy"] is None
        assert line["seconds"] > 0
    table = list(csv.DictReader((tmp_path / "baselines.csv").read_text().splitlines()))
    assert [float(row["valid_accuracy"]) for row in table] == [x["valid_accuracy"] for x in lines]
    assert {row["commit"] for row in table} == {"abc"}
    # What the table has is not trained again.
    again = run("twn", "lsq", "--bits", "ternary/float", "int2", *start, *size, "--seeds", 0, 1)
    assert [(line["method"], line["seed"]) for line in again] == [("twn", "1"), ("lsq", "1")]
    assert len(run("lsq", "--bits", "int2", *start, *size, "--first-layer", "float")) == 1


@pytest.mark.nightly
def test_a_seed_determines_the_run_and_all_folds_may_train(tmp_path: Path, run: Any) -> None:
    size = ("--limit", 100, "--batch", 20, "--epochs", 1, "--bits", "ternary/float")
    common = ("twn", "--data", "digits", "--augment", "crop", *size)
    lines = [run(*common, "--out", name)[0] for name in ("first.csv", "second.csv")]
    for line in lines:
        line.pop("seconds")
    assert lines[0] == lines[1]
    assert run(*common, "--fold", "all")[0]["valid_accuracy"] is None


WRONG = {"holds no run": "--start nowhere", "augment": "--augment shift", "fold": "--fold 9"}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments(message: str, run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("twn", "--data", "digits", *WRONG[message].split())
    assert message in capsys.readouterr().err


def test_brevitas_runs_or_says_how_to_get_it(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    size = ("--limit", 200, "--batch", 20, "--epochs", 3)
    call = lambda: run("brevitas", "--data", "digits", "--augment", "none", *size)
    if importlib.util.find_spec("brevitas") is not None:
        assert all(line["valid_accuracy"] > 0.5 for line in call())
        return
    with pytest.raises(SystemExit, match="2"):
        call()
    assert "pip install brevitas" in capsys.readouterr().err


@pytest.mark.nightly
def test_vgg8_on_images_in_the_layout_of_cifar10(tmp_path: Path, run: Any) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    random = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        records = random.integers(0, 256, (12, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    size = ("--epochs", 1, "--batch", 16, "--limit", 40)
    lines = run(*METHODS, "--data-dir", tmp_path, *size)
    for bits, methods in TRAININGS.items():
        assert {line["method"] for line in lines if line["bits"] == bits} == methods
    assert {line["network"] for line in lines} == {"vgg8"}
    assert all(0 <= line["test_accuracy"] <= 1 for line in lines)
