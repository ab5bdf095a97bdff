"""`benchmarks/fresh_statistics.py`: a trained network by the statistics of its batch norms."""

import csv
import subprocess
import sys
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from softstair.data import load
from softstair.train import Recipe, train
from softstair.train.packed import pack

ROOT = Path(__file__).parents[2]


def test_fresh_statistics_of_the_first_layer_repair_the_first_layer_alone(tmp_path: Path) -> None:
    recipe = Recipe(epochs=4, static_std=True)
    train(recipe, tmp_path / "run", device="cpu")
    file = pack(tmp_path / "run", load("digits"), tmp_path / "mine.safetensors")
    with safe_open(file, "pt") as packed:
        metadata = packed.metadata()
        tensors = {key: packed.get_tensor(key) for key in packed.keys()}  # noqa: SIM118
    first = next(name for name in tensors if name.endswith("running_mean"))
    tensors[first] += 100.0
    save_file(tensors, file, metadata)
    command = [sys.executable, ROOT / "benchmarks" / "fresh_statistics.py"]
    command += [file, "--every-layer", file, "--out", tmp_path / "statistics.csv"]
    subprocess.run(command, check=True, capture_output=True)
    with open(tmp_path / "statistics.csv", newline="", encoding="utf-8") as table:
        rows = {row.pop("statistics"): row for row in csv.DictReader(table)}
    accuracy = {name: float(row.pop("valid_accuracy")) for name, row in rows.items()}
    good = {name for name, value in accuracy.items() if value > 0.6}
    bad = {name for name, value in accuracy.items() if value < 0.3}
    alone, without = "fresh in layer {} alone", "fresh in all but layer {}"
    assert good == {"fresh", alone.format(0), without.format(1), without.format(2)}
    assert bad == {"running", without.format(0), alone.format(1), alone.format(2)}
    wanted = {"network": "mine", "test_accuracy": "", "data_version": "scikit-learn digits"}
    assert all(row == wanted for row in rows.values())
