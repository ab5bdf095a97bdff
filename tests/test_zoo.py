"""The zoo: what ships, and a small network that is added, loaded, evaluated, exported, verified."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from helpers.commands import Run
from softstair import zoo
from softstair._errors import SoftstairError
from softstair.cli._mean import mean_of
from softstair.data import Dataset, load
from softstair.train import Recipe, train, trained_network
from softstair.train.packed import pack
from softstair.train.trained import deployed

pytestmark = pytest.mark.usefixtures("plain_terminal", "narrow_digits")

DIGITS = load("digits")
RECIPE = Recipe(limit=300, epochs=1, batch=32, integer_input=True, first_layer="int8")
COMMAND = "softstair train --limit 300 --epochs 1 --batch 32 --integer-input --first-layer int8"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, narrow_digits: None) -> list[Path]:
    """Runs of three seeds, with their packed networks beside them."""
    folder = tmp_path_factory.mktemp("zoo")
    for seed in range(3):
        train(replace(RECIPE, seed=seed), folder / f"seed-{seed}", device="cpu")
        packed(folder / f"seed-{seed}")
    return [folder / f"seed-{seed}" for seed in range(3)]


def packed(run: Path, dataset: Dataset = DIGITS) -> Path:
    return pack(run, dataset, run.with_suffix(".safetensors"))


@pytest.fixture(scope="module")
def filled(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A zoo with one network."""
    folder = tmp_path_factory.mktemp("networks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zoo, "FOLDER", folder)
        files = [run.with_suffix(".safetensors") for run in runs]
        zoo.add("digits-ternary", files, DIGITS.version, COMMAND, "0123abc")
    return folder


@pytest.fixture
def small(filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it in the place of what ships, for a test to change."""
    folder = Path(shutil.copytree(filled, tmp_path / "networks"))
    monkeypatch.setattr(zoo, "FOLDER", folder)
    return folder


# What ships


def test_every_network_that_ships_has_a_card() -> None:
    assert zoo.names()
    assert sorted(json.loads((zoo.FOLDER / "cards.json").read_text())) == list(zoo.names())
    for name in zoo.names():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", name)
        card = zoo.card(name)
        assert card.bytes < 4_000_000
        assert card.command.startswith("softstair train ")
        assert re.search(r"\b[0-9a-f]{7}\b", card.commit)
        assert card.mean.is_integer(), "it exports exactly"


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("name", zoo.names()[::-1])
def test_every_network_that_ships_runs(name: str) -> None:
    card, network = zoo.card(name), zoo.load(name)
    assert not network.training
    inputs = torch.zeros(2, *card.shape, dtype=torch.uint8).sub(card.mean).div(card.std)
    assert network(inputs).shape == (2, len(card.classes))


def test_the_wheel_has_every_file_of_the_zoo() -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="needs hatchling")
    builder = wheel.WheelBuilder(str(Path(__file__).parents[1]))
    packaged = {file.distribution_path for file in builder.recurse_included_files()}
    assert {f"softstair/zoo/{file.name}" for file in zoo.FOLDER.glob("*.*")} <= packaged


# A small zoo


def test_card_has_what_the_runs_say(small: Path, runs: list[Path]) -> None:
    card = zoo.card("digits-ternary")
    summaries = [json.loads((run / "summary.json").read_text()) for run in runs]
    assert card.accuracies == tuple(summary["valid_accuracy"] for summary in summaries)
    assert card.accuracy == card.accuracies[0]
    assert card.spread == pytest.approx(torch.tensor(card.accuracies).std().item())
    assert card.recipe == replace(RECIPE, model="digits")
    assert card.bits == "ternary, first layer int8"
    assert card.bytes == (small / "digits-ternary.safetensors").stat().st_size
    assert (card.shape, card.mean, card.std) == ((1, 8, 8), 8.0, 8.0)
    assert (card.data, card.command) == ("scikit-learn digits", COMMAND)
    assert replace(card, accuracies=(0.5,)).spread is None


def test_network_is_that_of_the_first_run(small: Path, runs: list[Path]) -> None:
    card, x = zoo.card("digits-ternary"), DIGITS.x[:50].float()
    inputs = (x - card.mean) / card.std
    expected = trained_network(runs[0], DIGITS)(inputs)
    assert torch.equal(zoo.load("digits-ternary")(inputs), expected)
    assert zoo.evaluate("digits-ternary", device="cpu") == card.accuracy
    assert deployed("digits-ternary").classes == DIGITS.classes


@pytest.mark.parametrize("name", ["digits-tenary", "", ".", "../digits-ternary", "x" * 200])
def test_unknown_name_is_an_error_that_names_the_known(name: str, small: Path, run: Run) -> None:
    (small / "../digits-ternary.safetensors").write_bytes(b"outside of the zoo")
    for call in (zoo.load, zoo.card, zoo.evaluate):
        for wrong in (name, None):
            with pytest.raises(SoftstairError, match="digits-ternary"):
                call(wrong)
    if name not in ("", "."):
        for words in (["export"], ["verify"], ["zoo", "export"], ["zoo", "card"]):
            assert "digits-ternary" in run.rejected(*words, name)


def test_damaged_files_and_cards_are_errors(small: Path, run: Run) -> None:
    file, cards = small / "digits-ternary.safetensors", small / "cards.json"
    data, text = file.read_bytes(), cards.read_text()
    for broken in (b"", data[:-1], data[: len(data) // 2], b"\xff" * 100):
        file.write_bytes(broken)
        with pytest.raises(SoftstairError, match="damaged"):
            zoo.load("digits-ternary")
        assert "damaged" in run.rejected("zoo")
    file.write_bytes(data)
    known = json.loads(text)["digits-ternary"]
    wrong = ({"accuracies": ["a"]}, {"accuracies": []}, {"accuracies": [7.5]}, {"command": None})
    for entry in ([], {}, *({**known, **fields} for fields in wrong)):
        cards.write_text(json.dumps({"digits-ternary": entry}))
        assert "card of 'digits-ternary'" in run.rejected("zoo", "card", "digits-ternary")
    for broken_text in ("{", "3", "{}", "[" * 100_000):
        cards.write_text(broken_text)
        assert "card of 'digits-ternary'" in run.rejected("zoo")


@pytest.mark.parametrize("wrong", [{"classes": [3] * 10}, {"std": 0.0}])
def test_a_card_of_a_forged_file_is_an_error(wrong: dict[str, object], small: Path) -> None:
    file = small / "digits-ternary.safetensors"
    with safe_open(file, "pt") as opened:
        text = json.dumps({**json.loads(opened.metadata()["softstair"]), **wrong})
    save_file(load_file(file), file, metadata={"softstair": text})
    with pytest.raises(SoftstairError, match="card of 'digits-ternary'"):
        zoo.card("digits-ternary")


def test_code_that_a_file_names_is_not_called(
    small: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    called: list[object] = []
    monkeypatch.setattr("softstair._plugins.call", lambda *given, **more: called.append(given))
    file = small / "digits-ternary.safetensors"
    data = file.read_bytes()
    field = b'\\"data\\": \\"digits\\"'
    assert data.count(field) == 1
    file.write_bytes(data.replace(field, field.replace(b"digits", b"os:abc")))
    assert "data of its maker" in run.rejected("zoo", "evaluate", "digits-ternary")
    assert called == []


def test_networks_of_different_recipes_are_not_seeds_of_one(
    small: Path, runs: list[Path], tmp_path: Path
) -> None:
    train(replace(RECIPE, weights="sign"), tmp_path / "other", device="cpu")
    other = packed(tmp_path / "other")
    for given in ([], [runs[0].with_suffix(".safetensors"), other]):
        with pytest.raises(SoftstairError, match="one recipe"):
            zoo.add("another", given, "digits", COMMAND, "0123abc")
    assert zoo.names() == ("digits-ternary",)


def test_network_trained_on_all_examples_has_its_test_accuracy(small: Path, tmp_path: Path) -> None:
    tested = replace(DIGITS, test_x=DIGITS.x[:100], test_y=DIGITS.y[:100])
    summary = train(replace(RECIPE, fold="all"), tmp_path / "all", device="cpu", dataset=tested)
    card = zoo.add("digits-all", [packed(tmp_path / "all", tested)], "all", COMMAND, "0123abc")
    assert card.accuracy == summary["test_accuracy"]
    assert deployed("digits-all").recipe.fold == "all"


def test_file_does_not_name_folders_of_the_machine(small: Path, tmp_path: Path) -> None:
    float_twin = replace(RECIPE, weights="float", features="float", first_layer="same")
    train(float_twin, tmp_path / "float", device="cpu")
    started = replace(RECIPE, init_from=str(tmp_path / "float"))
    train(started, tmp_path / "started", device="cpu")
    card = zoo.add("started", [packed(tmp_path / "started")], "digits", COMMAND, "0123abc")
    assert card.recipe.init_from == "float"
    assert str(tmp_path).encode() not in (small / "started.safetensors").read_bytes()


# The command


def test_list_card_and_evaluate(small: Path, run: Run) -> None:
    card = zoo.card("digits-ternary")
    for words in ([], ["list"]):
        code, out, err = run("zoo", *words)
        assert (code, err) == (0, "")
        assert "ternary, first layer int8" in out
        assert mean_of(card.accuracies).in_percent() in out
    code, out, _ = run("zoo", "card", "digits-ternary")
    assert code == 0
    assert COMMAND in " ".join(out.split())
    code, out, _ = run("zoo", "evaluate", "digits-ternary", "--device", "cpu")
    assert code == 0
    assert out == f"digits-ternary: accuracy {card.accuracy:.2%} (its card: {card.accuracy:.2%})\n"


def test_export_and_verify_take_names(small: Path, tmp_path: Path, run: Run) -> None:
    pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    Path("digits-ternary").write_bytes(b"a file that zoo export does not mean")
    code, out, err = run("zoo", "export", "digits-ternary")
    assert (code, err) == (0, "")
    written = Path("digits-ternary-network.onnx").read_bytes()
    Path("digits-ternary").unlink()
    assert run("export", "digits-ternary", "--out", "a.onnx")[0] == 0
    assert Path("a.onnx").read_bytes() == written
    assert run("zoo", "export", "digits-ternary", "--to", "c", "--last-layer", "int8")[0] == 0
    assert (tmp_path / "digits-ternary-c" / "network.c").is_file()
    code, out, err = run("verify", "digits-ternary", "--backends", "onnx")
    assert (code, err) == (0, "")
    assert "integer network: 0 mismatches of" in out
    assert "onnx: 0 mismatches of" in out


def test_words_that_do_not_fit(small: Path, run: Run) -> None:
    for words, field in {
        ("export",): "NAME",
        ("list", "digits-ternary"): "NAME",
        ("evaluate", "digits-ternary", "--to", "c"): "--to",
        ("evaluate", "digits-ternary", "--device", "tpu"): "--device",
        ("train",): "ACTION",
    }.items():
        assert field in run.rejected("zoo", *words)
