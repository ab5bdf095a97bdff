"""The scripts in `benchmarks/`: goals of speed, shares of weights, statistics of batch norms, and
what options are worth."""

import csv
import itertools
import json
import runpy
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paper.design import configuration, read_design
from paper.tables import Epoch, Training, write
from softstair import models, zoo
from softstair.data import load
from softstair.train import Recipe, fit
from softstair.train.network import trained_network

ROOT = Path(__file__).parents[2]
Script = Callable[..., tuple[int, str, str]]
RESULTS = [ROOT / "results" / f"speed-h200{part}.json" for part in ("", "-operator")]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Script:
    """Run a script in this process; return its exit code, stdout and stderr."""

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
    recipe = Recipe.from_flat(
        static_mean=False, epochs=1, limit=200, batch=32, fold=1, compile="never"
    )
    name = configuration(recipe).name
    path = tmp_path / "runs" / name / "fold-1"
    fit(recipe, path)
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


def test_goals_are_compared_with_what_was_measured(run: Script, tmp_path: Path) -> None:
    """The published figures reach all goals."""
    code, out, _ = run("goals.py", *RESULTS)
    assert (code, out.count("MISSED")) == (0, 0), out
    assert "operator, bfloat16, int4@0.07, forward" in out
    step, operator = (json.loads(file.read_text(encoding="utf-8")) for file in RESULTS)
    files = tmp_path / "step.json", tmp_path / "operator.json"
    for share, missing in ((0.8, 0), (0.79, 1)):
        operator["operator"][0]["forward_share"] = share
        for file, figures in zip(files, (step, operator), strict=True):
            file.write_text(json.dumps(figures), encoding="utf-8")
        code, out, _ = run("goals.py", *files)
        assert (code, out.count("MISSED")) == (missing, missing)
    assert "not measured" in run("goals.py", RESULTS[1])[1]


POINTS: dict[str, dict[Any, float]] = {
    "latent_rate": {0.03: 1.0},
    "clip_latent": {True: -0.25},
    "teacher": {None: -2.0},
    "time_mask": {4: 0.5},
    "feature_quantum": {0.07: -0.75, 0.2: 0.15},
}
"""Points that a value of an option adds, in a grid that is made up."""


def made_grid(seeds: int, scatter: float) -> list[Training]:
    """Trainings of accuracy_speech.toml; each second configuration scatters the other way."""
    design = read_design(ROOT / "benchmarks" / "accuracy_speech.toml").rescaled(4)
    trainings = []
    for number, unit in enumerate(design.units()):
        recipe = unit.recipe
        if recipe.run.seed >= seeds:
            continue
        points = 80 + 3 * recipe.run.seed + scatter * (-1) ** (number // 2 + recipe.run.seed)
        points += sum(added.get(recipe[name], 0) for name, added in POINTS.items())
        valid = points / 100
        curve = tuple(Epoch(epoch, 1e-3, 1.0, valid, 1.0, valid) for epoch in range(4))
        test = 1 - valid  # must not matter
        trainings.append(Training(unit.configuration, recipe, curve, valid, test, seconds=1.0))
    return trainings


@pytest.mark.parametrize(("seeds", "suffix"), [(2, "csv"), (2, "parquet"), (1, "csv")])
def test_effects_of_options_are_those_of_a_known_grid(
    seeds: int, suffix: str, run: Script, tmp_path: Path
) -> None:
    write(made_grid(seeds, scatter=0.1 * (seeds - 1)), tmp_path / f"table.{suffix}")
    out = tmp_path / "effects.csv"
    code, stdout, _ = run("accuracy.py", tmp_path / f"table.{suffix}", "--out", out)
    assert code == 0
    effects = {(row["option"], row["to"]): row for row in rows_of(out)}
    start = "runs/accuracy_float/speech"
    wanted = dict.fromkeys(effects, 0.0) | {
        ("latent_rate", "0.03"): 1.0,
        ("clip_latent", "true"): -0.25,
        ("teacher", f"{start}-teacher/fold-0"): 2.0,
        ("time_mask, coefficient_mask", "4, 2"): 0.5,
        ("feature_quantum", "0.07"): -0.75,
        ("feature_quantum", "0.2"): 0.15,
    }
    assert len(effects) == len(wanted) == 13
    # Two numbers of each of 14 configurations, 0.1 above and below its mean; 13 degrees of freedom.
    deviation = (28 * 0.1**2 / 13) ** 0.5
    for (option, to), row in effects.items():
        assert float(row["effect"]) == pytest.approx(wanted[option, to], abs=0.006)
        share = 1.0 if option == "feature_quantum" else 1 / 6
        error = f"{deviation * share**0.5:.2f}" if seeds == 2 else ""
        assert row["standard_error"] == error
        aliased = "none" if option == "feature_quantum" else "0.33 of each of 45 interactions"
        assert row["aliased"] == aliased
    assert effects["first_layer", "int8"]["from"] == "same"
    best, values, expected, chosen = stdout.splitlines()[-4:]
    assert f": run-10, {seeds} runs, mean {81.5 + 1.5 * (seeds - 1):.2f} %" in best
    assert "init_from = None;" in values
    assert f"teacher = {start}-teacher/fold-0" in values
    assert f"{81.65 + 1.5 * (seeds - 1):.2f} % expected" in expected
    assert "feature_quantum = 0.2;" in chosen
    assert "clip_latent = false;" in chosen


@pytest.mark.parametrize(("name", "seeds"), [("accuracy", 3), ("accuracy_speech", 2)])
def test_each_pair_of_options_is_balanced(name: str, seeds: int) -> None:
    design = read_design(ROOT / "benchmarks" / f"{name}.toml")
    rows = [each.recipe for each in design.configurations if each.name.startswith(("run", "reci"))]
    varied = [field for field in design.varied() if field not in ("seed", "interval", "power")]
    options = [field for field in varied if field not in ("feature_quantum", "coefficient_mask")]
    assert (len(rows), len(options)) == (12 * seeds, 11)
    for pair in itertools.combinations(options, 2):
        counts = Counter(tuple(recipe[field] for field in pair) for recipe in rows)
        assert set(counts.values()) == {3 * seeds}, pair
    for recipe in rows:  # late annealing ends in time
        recipe.schedule(9)
    floats = read_design(ROOT / "benchmarks" / "accuracy_float.toml")
    paths = {unit.path(Path("runs/accuracy_float")).as_posix() for unit in floats.units()}
    assert {rows[-1].network.init_from, rows[-1].optimiser.teacher} < paths
    assert all(each.recipe.network.is_float for each in floats.configurations)


def test_invalid_input_is_an_error_of_one_line(run: Script, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    figures.write_text("[1]", encoding="utf-8")
    for script, path in (
        ("goals.py", figures),
        ("dynamic_means.py", tmp_path),
        ("accuracy.py", tmp_path),
    ):
        code, _, error = run(script, path)
        assert (code, len(error.splitlines())) == (2, 1)
        assert path.name in error


@pytest.mark.nightly
def test_fresh_statistics_of_the_first_layer_repair_the_first_layer_alone(
    run: Script, tmp_path: Path
) -> None:
    fit(Recipe.from_flat(epochs=4, static_std=True), tmp_path / "run", device="cpu")
    trained = tmp_path / "run" / "network.safetensors"
    known, net = zoo.about(trained), zoo.load(trained)
    next(b for name, b in net.named_buffers() if name.endswith("running_mean")).add_(100.0)
    facts = {name: getattr(known, name) for name in ("mean", "std", "data", "fold", "folds")}
    file = tmp_path / "mine.safetensors"
    zoo.save(net, file, known.model, known.shape, classes=known.classes, **facts)
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


def test_float_twin_for_other_runtimes_equals_its_network(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx", reason="needs onnx")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script = runpy.run_path(str(ROOT / "benchmarks" / "deployed.py"))
    model = models.dscnn()
    twin = script["float_twin"](model, (1, 49, 10))
    x = torch.randn(4, 1, 49, 10)
    torch.testing.assert_close(twin(x), model.eval()(x), rtol=1e-3, atol=1e-4)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in twin.modules())


def test_deployed_goals_compare_with_the_fastest_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx", reason="needs onnx")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script = runpy.run_path(str(ROOT / "benchmarks" / "deployed.py"))
    times = {"ours, C": 2.0, script["ONNX"]: 8.0, "ONNX Runtime 1, INT8": 4.0, "ncnn 1, INT8": 3.0}
    figures = {name: {"cpu_ms": time} for name, time in times.items()}
    ratios = [ratio for _, _, ratio in script["goals"]("VGG8", figures)]
    assert ratios == [1.5, None, 0.5, None]  # the float network of ONNX Runtime was not measured


def test_cmsis_nn_program_has_every_weight_as_int8(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "cmsis_nn.py"))
    first = torch.nn.Conv2d(2, 3, (2, 1), padding=(1, 0))
    model = torch.nn.Sequential(
        first,
        torch.nn.ReLU(),
        torch.nn.AvgPool2d((5, 3)),
        torch.nn.Flatten(),
        torch.nn.Linear(3, 2),
    )
    text, (step, zero) = script["program"](model, torch.linspace(-1, 3, 48).reshape(2, 2, 4, 3))
    assert (step, zero) == (4 / 255, -64)
    line = next(line for line in text.splitlines() if "layer0_weights" in line)
    levels = [int(word) for word in line.partition("{")[2].rstrip("};").split(",")]
    weight = torch.tensor(levels).reshape(3, 2, 1, 2).permute(0, 3, 1, 2)  # the channels last
    largest = first.weight.detach().abs().amax((1, 2, 3), keepdim=True)
    assert torch.equal(weight, (first.weight.detach() / largest * 127).round().long())
    with pytest.raises(ValueError, match="must be a folder of CMSIS-NN"):
        script["variables"](tmp_path)
