"""Teachers and float starts: the loss, the first weights, and runs that are trained first."""

import json
import math
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from short import At, metrics_of, recipe, stopped, strike, summary_of
from torch import Tensor, nn

from networks import with_statistics
from paper import results
from softstair._errors import SoftstairError
from softstair._quantum import fit_quantum
from softstair.data import Dataset, load
from softstair.models import digits
from softstair.train import (
    PRESETS,
    Interrupted,
    Recipe,
    RunError,
    fit,
    teacher,
    trained_network,
)
from softstair.train.network import stair_network
from softstair.train.teacher import (
    FloatRun,
    Teacher,
    auto_recipe,
    float_runs,
    start_from,
)

FLOAT = recipe(epochs=1, weights="float", features="float")
TAUGHT = recipe(epochs=2, period=None, init_from="auto", teacher="auto", first_layer="int8")


@pytest.fixture(scope="module")
def float_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a float run on digits."""
    out = tmp_path_factory.mktemp("float") / "run"
    fit(FLOAT, out)
    return out


class Linear(nn.Module):
    """Scores that are linear in the mean of the input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).mean(1, keepdim=True) * torch.arange(3.0)


@pytest.mark.quick
def test_the_loss_is_the_formula() -> None:
    x, y = torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1])
    data = Dataset("data", x, y, ("a", "b", "c"), mean=100.7, std=30.0)
    own = Recipe.from_flat(teacher="auto", teacher_weight=0.7, temperature=3.0, integer_input=True)
    run = FloatRun(own.replace(integer_input=False), Linear(), "")
    taught = Teacher(run, own, data, torch.device("cpu"))
    inputs = torch.randn(5, 1, 2, 2)
    scores, loss = torch.randn(5, 3, requires_grad=True), torch.tensor(2.0)
    computed = taught(loss, scores, inputs)
    computed.backward()
    # By hand: from the input of the network (zero 101, scale 32) to that of the teacher.
    seen = (inputs.double() * 32 + 101 - 100.7) / 30
    p = torch.softmax(seen.flatten(1).mean(1, keepdim=True) * torch.arange(3.0) / 3, 1)
    hand = scores.detach().double().requires_grad_()
    q = torch.softmax(hand / 3, 1)
    divergence = (p * (p.log() - q.log())).sum(1).mean()
    expected = 0.3 * 2 + 0.7 * 9 * divergence
    expected.backward()
    assert computed.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(scores.grad.double(), hand.grad, atol=1e-6)


@pytest.mark.quick
@pytest.mark.parametrize("first", ["same", "int8", "float"])
def test_a_float_start_scales_weights_and_statistics(first: str) -> None:
    torch.manual_seed(3)
    twin = with_statistics(digits()).train()
    own = Recipe.from_flat(first_layer=first)
    network = stair_network(twin, own)
    start_from(network, FloatRun(FLOAT, twin, ""), own)
    assert torch.equal(network.classifier.weight, twin.classifier.weight)
    for number in (1, 4, 7):
        layer, weight = network.features[number], twin.features[number].weight.detach()
        norm, before = network.features[number + 1], twin.features[number + 1]
        low, high, scale = -1.0, 1.0, 0.5 / (0.7 * weight.abs().mean().item())
        if number == 1 and first == "float":
            low, high, scale = -math.inf, math.inf, 1.0
        elif number == 1 and first == "int8":
            stair = own.network.stair("first_layer")
            high, scale = (
                1 - 2**-7,
                2**-7 / fit_quantum(weight, stair).quantum,
            )
        assert torch.allclose(layer.weight, (weight * scale).clamp(low, high), atol=2e-4)
        assert torch.equal(norm.weight, before.weight)
        assert torch.allclose(norm.running_mean, before.running_mean * scale)
        assert torch.allclose(norm.running_var, before.running_var * scale**2)


@pytest.mark.quick
def test_a_float_start_of_another_model_is_refused(float_run: Path, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    changed = recipe(init_from=str(float_run), weights="float", features="float")
    with pytest.raises(RunError, match="than those of the model") as caught:
        fit(changed, tmp_path / "run", model=model)
    assert caught.value.field == "init_from"


@pytest.mark.quick
def test_another_model_is_refused_before_a_teacher_trains(
    float_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher, "teacher_for", lambda shape: "digits")
    (tmp_path / "slim.py").write_text(
        "from torch import nn\n\ndef build(classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    changed = recipe(model="slim:build", init_from=str(float_run), teacher="auto")
    with pytest.raises(RunError, match="same model") as caught:
        fit(changed, tmp_path / "run")
    assert caught.value.field == "init_from"
    assert not (tmp_path / "run").exists()


def test_a_start_with_another_input_is_an_error(float_run: Path, tmp_path: Path) -> None:
    # FLOAT has (x - 8)/8. A centred input of other numbers, as of speech, and of the same.
    for name, centred in {"other": (8.5, 10.0), "same": (8.0, 8.0)}.items():
        shown = replace(load("digits"), centred=centred)
        start = tmp_path / f"{name}-start"
        fit(FLOAT.replace(centre_input=False), start, dataset=shown)
        started = recipe(epochs=1, init_from=str(start), centre_input=True)
        if name == "same":
            fit(started, tmp_path / name, dataset=shown)
            continue
        with pytest.raises(RunError, match="centre_input = False, this run has True") as caught:
            fit(started, tmp_path / name, dataset=shown)
        assert caught.value.field == "init_from"
        assert not (tmp_path / name).exists()
    rounded = recipe(epochs=1, init_from=str(float_run), integer_input=True)
    fit(rounded, tmp_path / "rounded")  # also (x - 8)/8


@pytest.mark.quick
@pytest.mark.parametrize("name", [name for name in PRESETS if name != "digits"])
def test_automatic_starts_have_the_input_of_their_preset(name: str) -> None:
    shape = (1, 49, 10) if "speech" in name else (3, 32, 32)
    given = PRESETS[name]
    start = auto_recipe(given, "start", shape)
    for field in ("integer_input", "centre_input"):
        assert start[field] == given[field]


def test_runs_start_from_and_learn_from_a_float_run(float_run: Path, tmp_path: Path) -> None:
    path = str(float_run)
    both = recipe(epochs=2, period=None, init_from=path, teacher=path)
    out = tmp_path / "run"
    stopped(both, out, 1, 2)
    config = json.loads((out / "config.json").read_text())
    assert config["teacher"] == config["start"]
    assert fit(both, out, resume=True)["config"]["start"] == config["start"]
    fit(both, tmp_path / "same")
    assert metrics_of(out) == metrics_of(tmp_path / "same")
    fit(both.replace(init_from=None, teacher=None), tmp_path / "plain")
    assert metrics_of(out) != metrics_of(tmp_path / "plain")


def test_a_float_run_that_is_start_and_teacher_is_read_once(
    float_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def counted(name: str) -> None:
        function = getattr(teacher, name)
        monkeypatch.setattr(
            teacher, name, lambda *given, **more: calls.append(name) or function(*given, **more)
        )

    for name in ("load_float_run", "trained_network", "make_network", "start_from"):
        counted(name)
    fit(recipe(epochs=1, init_from=str(float_run), teacher=str(float_run)), tmp_path / "run")
    assert calls == ["load_float_run", "trained_network", "start_from"]


def test_another_teacher_is_refused(float_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "teacher"
    taught = recipe(epochs=2, period=None, teacher=str(path))
    fit(FLOAT, path)
    stopped(taught, tmp_path / "run", 1, 0)
    path.rename(tmp_path / "before")
    with pytest.raises(RunError, match="finished float run") as caught:
        fit(taught, tmp_path / "run", resume=True)
    assert caught.value.field == "teacher"
    fit(FLOAT.replace(seed=1), path)
    with pytest.raises(RunError, match="another network in `teacher`"):
        fit(taught, tmp_path / "run", resume=True)


@pytest.mark.quick
@pytest.mark.parametrize("field", ["init_from", "teacher"])
def test_float_runs_that_know_the_validation_examples_are_refused(
    field: str, float_run: Path, tmp_path: Path
) -> None:
    for other in ({"fold": 1}, {"folds": 4}, {"limit": 150}):
        with pytest.raises(RunError, match=f"has {next(iter(other))} = ") as caught:
            fit(recipe(**{field: str(float_run)}, **other), tmp_path / "run")
        assert caught.value.field == field
        assert not (tmp_path / "run").exists()


@pytest.mark.quick
@pytest.mark.parametrize("damaged", ["config.json", "summary.json", "checkpoint"])
def test_a_damaged_float_run_is_named_by_its_own_field(
    damaged: str, float_run: Path, tmp_path: Path
) -> None:
    path = tmp_path / "teacher"
    shutil.copytree(float_run, path)
    if damaged == "checkpoint":
        shutil.rmtree(path / damaged)
    else:
        (path / damaged).write_text("{")
    with pytest.raises(RunError, match=r"teacher must be .*: give another run") as caught:
        fit(recipe(teacher=str(path)), tmp_path / "run")
    assert caught.value.field == "teacher"
    assert "`out`" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_only_finished_float_runs_are_taken(tmp_path: Path) -> None:
    stopped(FLOAT, tmp_path / "begun", 0, 2)
    fit(recipe(epochs=1), tmp_path / "ternary")
    for name, problem in (
        ("begun", "is not finished"), ("ternary", "quantised"), ("none", "holds no run"),
    ):  # fmt: skip
        for field in ("init_from", "teacher"):
            with pytest.raises(RunError, match=problem) as caught:
                fit(recipe(**{field: str(tmp_path / name)}), tmp_path / "run")
            assert caught.value.field == field
    assert not (tmp_path / "run").exists()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("field", "values"), [("batch", {"batch": 1024}), ("teacher", {"teacher": "none"})]
)
def test_an_error_before_the_first_run_leaves_no_files(
    field: str, values: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(SoftstairError) as caught:
        fit(recipe(init_from="auto", **values), tmp_path / "run")
    assert caught.value.field == field
    assert not (tmp_path / "run").exists()


@pytest.mark.quick
def test_the_runs_that_are_trained_first() -> None:
    own = Recipe.from_flat(epochs=61, seed=3, fold=2, mixup=0.3, integer_input=True, data="cifar10")
    image, speech, digit = (3, 32, 32), (1, 49, 10), (1, 8, 8)
    large = auto_recipe(own, "teacher", image)
    assert large.network.is_float
    assert (large.network.model, large.run.epochs, large.data.cutout, large.data.mixup) == (
        "resnet18",
        20,
        12,
        0,
    )
    assert (large.run.seed, large.data.fold, large.data.integer_input) == (3, 2, True)
    assert (large.optimiser.weight_decay, large.optimiser.norm_decay) == (0.1, 0), (
        "features keep their size"
    )
    assert auto_recipe(own, "start", image) == large.replace(model="auto")
    taught = Recipe.from_flat(data="speech", epochs=2).replace(init_from="auto", teacher="auto")
    start = auto_recipe(taught, "start", speech)
    assert (start.data.augment, start.optimiser.weight_decay, start.run.epochs) == (
        "shift",
        0.01,
        1,
    )
    assert start.optimiser.teacher is start.network.init_from is None
    out = Path("out")
    assert float_runs(taught, out, speech) == {"start": out / "start", "teacher": out / "teacher"}
    assert set(float_runs(taught, out, digit).values()) == {out / "start"}, "the float twin"
    large = taught.replace(model="dscnn-276")
    assert set(float_runs(large, out, speech).values()) == {out / "start"}, "trained once"
    given = taught.replace(init_from=None, teacher="runs/a")
    assert float_runs(given, out, speech) == {"teacher": Path("runs/a")}


class InPart(At):
    """Acts in one of the runs that are trained first."""

    def __init__(self, name: str, *position: Any) -> None:
        super().__init__(*position)
        self.name = name

    def part(self, name: str) -> At:
        return At(*self.position, self.act if name == self.name else lambda state: None)

    def step(self, state: Any) -> None:
        if not self.name:
            super().step(state)


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run with a start and a teacher of its own that nobody interrupts."""
    out = tmp_path_factory.mktemp("complete") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teacher, "teacher_for", lambda shape: "digits")
        fit(TAUGHT, out)
        yield out


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("part", ["teacher", "start", ""])
def test_killed_and_resumed_in_each_part(part: str, complete: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        fit(TAUGHT, out, watchers=[InPart(part, 0, 1, strike(signal.SIGTERM))])
    assert results.find(tmp_path) == ([] if part else [out])
    summary = fit(TAUGHT, out, resume=True)
    for run in ("", "start", "teacher"):
        assert metrics_of(out / run) == metrics_of(complete / run), run
    config = json.loads((out / "config.json").read_text())
    assert config["teacher"] == json.loads((complete / "config.json").read_text())["teacher"]
    assert summary_of(summary) == summary_of(json.loads((complete / "summary.json").read_text()))
    # A finished run needs neither.
    for name in ("start", "teacher"):
        (out / name).rename(tmp_path / name)
    assert fit(TAUGHT, out, resume=True) == summary
    assert not trained_network(out, load("digits")).training


def test_a_report_has_no_line_for_the_runs_that_were_trained_first(complete: Path) -> None:
    assert results.find(complete.parent) == [complete]
