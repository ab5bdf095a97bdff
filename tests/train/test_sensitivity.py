"""What each layer of a trained network alone costs at fewer bits, and what is proposed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from short import recipe
from torch import nn

import softstair as ss
from helpers.commands import Run
from helpers.narrow import WIDTH
from softstair._errors import SoftstairError
from softstair._quantum import fit_quantum
from softstair.cli.sensitivity import Command
from softstair.convert.bits import parse_layers, stair_named
from softstair.data import load
from softstair.data.batches import Examples
from softstair.data.folds import split
from softstair.models import ResidualBlock
from softstair.nn import stair_modules
from softstair.train import Recipe, layer_sensitivity, train, trained_network
from softstair.train.metrics import evaluate
from softstair.train.sensitivity import Cost, _proposal, _Trial
from softstair.train.trained import Own, Trained, trained_run

FLOAT = recipe(epochs=1, weights="float", features="float")
INT4 = recipe(epochs=1, weights="int4", features="uint4", weight_quantum=0.1, feature_quantum=0.25)
NAMES = ["features.1", "features.4", "features.7"]
FLOAT_BYTES = 4 * (64 * WIDTH + 2 * WIDTH * WIDTH + 10 * WIDTH)
SIZE = 4500  # of three layers in INT3 too little, in INT2 enough


@pytest.fixture(scope="module")
def float_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _trained(FLOAT, tmp_path_factory)


@pytest.fixture(scope="module")
def int4_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _trained(INT4, tmp_path_factory)


def _trained(recipe: Recipe, factory: pytest.TempPathFactory) -> Path:
    path = factory.mktemp("run")
    train(recipe, path, device="cpu")
    return path


def validation(recipe: Recipe = FLOAT) -> Examples:
    digits = load("digits").sample(200)
    chosen = split(digits, recipe.fold, recipe.folds)[1]
    return Examples(digits.x[chosen], digits.y[chosen], *digits.numbers(False, True))


def source_of(path: Path) -> Trained:
    return trained_run(path, "data", Own())


def training_batches(path: Path) -> tuple[torch.Tensor, ...]:
    """Return the batches with which a network is calibrated."""
    return _Trial(source_of(path), limit=None).inputs.chunk(8)


def test_one_layer_of_a_float_network_is_quantised_at_a_time(float_run: Path) -> None:
    measured = layer_sensitivity(float_run, ["int4", "int2/float"])
    net = trained_network(float_run, load("digits"))
    assert measured[0] == ("*", "float", FLOAT_BYTES, *evaluate(net, validation()), 40)
    assert [(cost.name, cost.bits) for cost in measured[1:]] == [
        (name, bits) for name in NAMES for bits in ("int4", "int2/float")
    ]
    batches = training_batches(float_run)
    for cost in measured[1:3]:
        alone = ss.quantise(net, {cost.name: cost.bits, "*": "float"})
        ss.calibrate(alone.eval(), batches)
        assert (cost.loss, cost.accuracy) == evaluate(alone, validation())
    saved = [measured[0].bytes - cost.bytes for cost in measured[1:3]]
    assert saved == [64 * WIDTH * 7 // 2, 64 * WIDTH * 15 // 4]
    assert measured[1].loss < measured[2].loss


def test_a_quantised_network_keeps_the_layers_that_have_no_more_levels(int4_run: Path) -> None:
    trained, *costs = layer_sensitivity(int4_run, ["int4", "int8", "int2/float"])
    net, batches = trained_network(int4_run, load("digits")), training_batches(int4_run)
    assert (trained.loss, trained.accuracy) == evaluate(net, validation())
    for name, same, wide, narrow in zip(NAMES, costs[::3], costs[1::3], costs[2::3], strict=True):
        assert same[2:] == wide[2:] == trained[2:]
        narrowed = trained_network(int4_run, load("digits"))
        layer = narrowed.get_submodule(name)
        with torch.no_grad():
            layer.weight.copy_(layer.weight_stair.stair(layer.weight))
        layer.weight_stair.stair = fit_quantum(layer.weight, stair_named("int2"), True)
        ss.refresh_statistics(narrowed.eval(), batches)
        assert (narrow.loss, narrow.accuracy) == evaluate(narrowed, validation())


def test_features_of_a_quantised_network_are_calibrated_alone(int4_run: Path) -> None:
    trial = _Trial(source_of(int4_run), limit=None)
    net = trial._narrowed("features.4=float/uint2,*=float")
    alike = trained_network(int4_run, load("digits"))
    chosen = net.get_submodule("features.6")
    with torch.no_grad():
        for layer in (alike.get_submodule(name) for name in NAMES):
            layer.weight.copy_(layer.weight_stair.stair(layer.weight))
    before = {name: stair.stair for name, stair in stair_modules(alike)}
    quantum = ss.calibrate(alike, trial.inputs.chunk(8), weights=None)["features.6"]
    assert chosen.stair.levels[1:] == tuple(k * chosen.stair.quantum for k in (1, 2, 3))
    assert chosen.stair.quantum > quantum  # four levels for the values of sixteen
    for name, stair in stair_modules(net):
        assert stair is chosen or stair.stair == before[name]


def test_shortcuts_of_a_quantised_network_keep_their_stair(int4_run: Path) -> None:
    source = source_of(int4_run)
    torch.manual_seed(0)
    stem = (nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    last = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
    model = nn.Sequential(*stem, ResidualBlock(4, 4, 1), *last)
    for bits, shortcuts, count in (("int4", "uint6", 64), ("int8", None, 4)):
        net = ss.quantise(model, bits, skip="6", shortcuts=shortcuts)
        narrow = _Trial(replace(source, network=net), limit=None)._narrowed("int2")
        levels = {name: len(stair.stair) for name, stair in stair_modules(narrow)}
        assert levels == {**dict.fromkeys(levels, 4), "2": count}
        assert ("3.sums.0.input_stair" in levels) == (shortcuts is not None)


def test_a_run_without_validation_is_measured_on_training_examples(float_run: Path) -> None:
    source = replace(source_of(float_run), recipe=replace(FLOAT, fold="all"))
    assert len(_Trial(source, limit=150).examples) == 150  # the validation fold has 40


@pytest.mark.nightly
def test_the_proposal_for_a_quantised_network_fits(int4_run: Path) -> None:
    trained, *_, proposal = layer_sensitivity(int4_run, ["int3/float", "int2/float"], size=SIZE)
    assert proposal.bytes <= SIZE < trained.bytes


def test_bytes_are_saved_where_they_cost_least() -> None:
    trained = Cost("*", "float", 3200, 0.1, 0.9, 40)
    costs = [
        Cost(name, bits, 3200 - saved, 0.1 + added, 0.9, 40)
        for name, factor in (("a", 0.01), ("b", 1.0), ("c", 0.02), ("d", 0.5))
        for bits, saved, added in (
            ("int8", 600, 0.0),
            ("int4", 700, factor),
            ("int2", 750, 3 * factor),
        )
    ]
    assert _proposal(trained, *costs, size=800) == "*=int8"
    assert _proposal(trained, *costs, size=700) == "a=int4,*=int8"
    assert _proposal(trained, *costs, size=500) == "b=int8,d=int8,*=int2"
    assert _proposal(trained, *costs, size=200) == "*=int2"
    with pytest.raises(SoftstairError, match="at least 200 bytes") as caught:
        _proposal(trained, *costs, size=199)
    assert caught.value.field == "size"


# The command


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder, in which files that a command leaves are noticed."""
    monkeypatch.chdir(tmp_path)


def test_the_command_shows_a_table_and_writes_two_files(float_run: Path, run: Run) -> None:
    words = ("sensitivity", float_run, "--widths", "int3/float,int2/float", "--size", SIZE)
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    assert all(name in out for name in NAMES)
    costs = json.loads((float_run / "sensitivity.json").read_text())
    assert [cost["name"] for cost in costs] == ["*", *(n for n in NAMES for _ in "12"), "*"]
    assert f'--bits "{costs[-1]["bits"]}": accuracy' in out
    assert f"of {len(validation())} examples" in out
    path = float_run / "sensitivity.svg"
    assert f"picture: {path}" in out
    assert path.read_text().startswith("<?xml")
    # The proposal is measured as a whole.
    trained, proposal = (Cost(**cost) for cost in (costs[0], costs[-1]))
    assert proposal.bytes <= SIZE < trained.bytes
    net = trained_network(float_run, load("digits"))
    mixed = ss.quantise(net, parse_layers(proposal.bits), skip="classifier").eval()
    ss.calibrate(mixed, training_batches(float_run))
    assert sum(row.bytes for row in ss.report(mixed).rows) == proposal.bytes
    assert (proposal.loss, proposal.accuracy) == evaluate(mixed, validation())


def test_numbers_of_the_picture_can_be_read_on_dark_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("softstair.experiments.figures.rendered", lambda f: drawn.append(f) or "")
    Command(tmp_path)._draw(["a"], ["int4", "int2", "ternary"], [[-0.04, 4.0, 60.0]])
    texts = drawn[0].axes[0].texts
    assert [text.get_text() for text in texts] == ["0.0", "4.0", "60.0"]
    assert [text.get_color() == "white" for text in texts] == [False, False, True]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--widths", "int4,int9"), "--widths must be float, ternary"),
        (("--size", "10", "--widths", "int2/float"), "--size must be at least"),
        (("--zero", "3"), "--zero"),
        (("--limit", "0"), "--limit must be an integer of at least 1"),
    ],
)
def test_wrong_flags_are_refused(
    flags: tuple[str, ...], words: str, float_run: Path, run: Run
) -> None:
    assert words in run.rejected("sensitivity", float_run, *flags)


def test_a_folder_without_a_run_is_refused(tmp_path: Path, run: Run) -> None:
    assert "holds no run" in run.rejected("sensitivity", tmp_path)
