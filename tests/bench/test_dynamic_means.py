"""`benchmarks/dynamic_means.py`: where the weights of trained networks lie."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from softstair.data import load
from softstair.experiments.design import configuration
from softstair.train import train
from softstair.train.network import trained_network
from softstair.train.recipe import Recipe

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "dynamic_means.py"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_shares_are_those_of_the_trained_network(tmp_path: Path) -> None:
    recipe = Recipe(static_mean=False, epochs=1, limit=200, batch=32, fold=1, compile="never")
    name = configuration(recipe).name
    path = tmp_path / "runs" / name / "fold-1"
    train(recipe, path)
    assert run(str(tmp_path / "runs"), "--out", str(tmp_path / "table.csv")).returncode == 0
    with open(tmp_path / "table.csv", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert [row["layer"] for row in table] == ["0", "1", "2"]
    network = trained_network(path, load("digits"))
    layers = [layer for layer in network.modules() if hasattr(layer, "weight_stair")]
    for row, layer in zip(table, layers, strict=True):
        assert (row["configuration"], row["epochs"], row["fold"]) == (name, "1", "1")
        values = layer.weight_stair.stair(layer.weight)
        for level in (-1, 0, 1):
            share = float((values == level).float().mean())
            assert float(row[f"at {level}"]) == pytest.approx(share, abs=6e-5)


def test_a_folder_without_runs_is_an_error(tmp_path: Path) -> None:
    done = run(str(tmp_path))
    assert done.returncode == 2
    assert "holds no run directory" in done.stderr
