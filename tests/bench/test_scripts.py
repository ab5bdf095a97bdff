"""The scripts in `benchmarks/`: goals of speed, shares of weights, statistics of batch norms."""

import csv
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from softstair.data import load
from softstair.experiments.design import configuration
from softstair.train import Recipe, train
from softstair.train.network import trained_network
from softstair.train.packed import pack

ROOT = Path(__file__).parents[2]
Script = Callable[..., tuple[int, str, str]]
RESULTS = [ROOT / "results" / f"speed-h200{part}.json" for part in ("", "-operator")]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Script:
    """Run a script in this process; return its exit code, stdout and stderr."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")

    def run(script: str, *words: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [script, *map(str, words)])
        code: int | str | None = 0
        try:
            runpy.run_path(str(ROOT / "benchmarks" / script), run_name="__main__")
        except SystemExit as end:
            code = end.code
        stdout, stderr = capsys.readouterr()
        return (1, stdout, stderr + code) if isinstance(code, str) else (code or 0, stdout, stderr)

    return run


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_shares_are_those_of_the_trained_network(run: Script, tmp_path: Path) -> None:
    recipe = Recipe(static_mean=False, epochs=1, limit=200, batch=32, fold=1, compile="never")
    name = configuration(recipe).name
    path = tmp_path / "runs" / name / "fold-1"
    train(recipe, path)
    out = tmp_path / "table.csv"
    assert run("dynamic_means.py", tmp_path / "runs", "--out", out)[0] == 0
    table = rows_of(out)
    assert [row["layer"] for row in table] == ["0", "1", "2"]
    network = trained_network(path, load("digits"))
    layers = [layer for layer in network.modules() if hasattr(layer, "weight_stair")]
    for row, layer in zip(table, layers, strict=True):
        assert (row["configuration"], row["epochs"], row["fold"]) == (name, "1", "1")
        values = layer.weight_stair.stair(layer.weight)
        for level in (-1, 0, 1):
            share = float((values == level).float().mean())
            assert float(row[f"at {level}"]) == pytest.approx(share, abs=6e-5)


def test_what_was_measured_meets_every_goal(run: Script, tmp_path: Path) -> None:
    code, out, _ = run("goals.py", *RESULTS)
    assert code == 0, out
    assert "MISSED" not in out
    assert "operator, bfloat16, int4@0.07, forward" in out
    figures = json.loads(RESULTS[1].read_text(encoding="utf-8"))
    figures["operator"][0]["forward_share"] = 0.79
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps(figures), encoding="utf-8")
    code, out, _ = run("goals.py", RESULTS[0], slow)
    assert (code, out.count("MISSED")) == (1, 1)
    assert "not measured" in run("goals.py", RESULTS[1])[1]


def test_invalid_input_is_an_error_of_one_line(run: Script, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    figures.write_text("[1]", encoding="utf-8")
    for script, path in (("goals.py", figures), ("dynamic_means.py", tmp_path)):
        code, _, error = run(script, path)
        assert (code, len(error.splitlines())) == (2, 1)
        assert path.name in error


def test_fresh_statistics_of_the_first_layer_repair_the_first_layer_alone(
    run: Script, tmp_path: Path
) -> None:
    train(Recipe(epochs=4, static_std=True), tmp_path / "run", device="cpu")
    file = pack(tmp_path / "run", load("digits"), tmp_path / "mine.safetensors")
    with safe_open(file, "pt") as packed:
        metadata = packed.metadata()
        tensors = {key: packed.get_tensor(key) for key in packed.keys()}  # noqa: SIM118
    first = next(name for name in tensors if name.endswith("running_mean"))
    tensors[first] += 100.0
    save_file(tensors, file, metadata)
    out = tmp_path / "statistics.csv"
    assert run("fresh_statistics.py", file, "--every-layer", file, "--out", out)[0] == 0
    rows = {row.pop("statistics"): row for row in rows_of(out)}
    accuracy = {name: float(row.pop("valid_accuracy")) for name, row in rows.items()}
    good = {name for name, value in accuracy.items() if value > 0.6}
    bad = {name for name, value in accuracy.items() if value < 0.3}
    alone, without = "fresh in layer {} alone", "fresh in all but layer {}"
    assert good == {"fresh", alone.format(0), without.format(1), without.format(2)}
    assert bad == {"running", without.format(0), alone.format(1), alone.format(2)}
    wanted = {"network": "mine", "test_accuracy": "", "data_version": "scikit-learn digits"}
    assert all(row == wanted for row in rows.values())
