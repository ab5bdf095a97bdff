"""Networks in files: the same outputs to the last bit, files that lie, and the zoo."""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import softstair as ss
from helpers.commands import Run
from softstair import Stair, zoo
from softstair._errors import SoftstairError
from softstair.cli._output import in_percent
from softstair.data import load
from softstair.nn import StairLayer
from softstair.train import Recipe, fit, trained_network
from softstair.train.network import deployed

safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.usefixtures("plain_terminal", "narrow_digits")

RECIPE = Recipe.from_flat(limit=300, epochs=1, batch=32, integer_input=True, first_layer="int8")
COMMAND = "softstair train --limit 300 --epochs 1 --batch 32 --integer-input --first-layer int8"
SHIPPED = Path(__file__).parents[1] / "zoo"
INT4 = Stair.linear(4, signed=True, quantum=0.07)
OPTIONS: dict[str, tuple[dict[str, Any], int]] = {  # with the bits per weight
    "ternary": ({"weights": "ternary"}, 2),
    "heaviside": ({"weights": "heaviside"}, 1),
    "int4": ({"weights": "int4"}, 4),
    "int8, kept": ({"weights": "int8"}, 8),
    "int3, learned": ({"weights": "int3", "quanta": "learned"}, 4),
    "stairs": ({"weights": {0: INT4, "*": Stair.sign()}, "features": Stair.ternary()}, 0),
    "some in float": ({"weights": {"0": "int8", "*": "float"}}, 8),
    "features alone": ({"weights": "float/uint4"}, 0),
    "random noise": ({"weights": "ternary", "noise": "logistic", "forward": "random"}, 2),
}


def model() -> nn.Module:
    """A network of a user's own, trained for a step."""
    torch.manual_seed(0)
    first = nn.Linear(64, 24, bias=False), nn.BatchNorm1d(24), nn.Hardswish()
    second = nn.Linear(24, 16), nn.BatchNorm1d(16), nn.ReLU()
    return nn.Sequential(*first, *second, nn.Linear(16, 10))


def trained(**options: Any) -> nn.Module:
    net = ss.quantise(model(), **options)
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    net(EXAMPLES).square().mean().backward()
    optimiser.step()
    if options.get("quanta") != "learned":
        ss.calibrate(net, [EXAMPLES])
    return net.eval()


EXAMPLES = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))


def read(file: Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """What a file says, its table of tensors, and their bytes; by the format alone."""
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    table = json.loads(data[8 : 8 + size])
    return json.loads(table.pop("__metadata__")["softstair"]), table, data[8 + size :]


def make(file: Path, words: Any, table: dict[str, Any], body: bytes) -> Path:
    """The opposite; ``words`` may be text."""
    text = words if isinstance(words, str) else json.dumps(words)
    header = json.dumps({"__metadata__": {"softstair": text}, **table}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + body)
    return file


def signed(words: dict[str, Any], file: Path) -> dict[str, Any]:
    """Metadata with the digest that a liar would compute."""
    del words["digest"]
    return words | {"digest": zoo._digest(words, safetensors.load_file(file))}


@pytest.mark.nightly(keep=5)
@pytest.mark.filterwarnings("ignore:the weights of .* cannot be negative")
@pytest.mark.filterwarnings("ignore:.* of the weights stay in float")
@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_outputs_to_the_last_bit(name: str, tmp_path: Path) -> None:
    options, bits = OPTIONS[name]
    before = trained(**options)
    file = zoo.save(
        before, tmp_path / "net.safetensors", "mine:model", (64,), 0, 1, classes="0123456789"
    )
    state = torch.get_rng_state()
    after = zoo.load(file, model)
    assert torch.equal(torch.get_rng_state(), state), "nobody else's random numbers are drawn"
    assert not after.training
    for x in (EXAMPLES, 10 * EXAMPLES, torch.zeros(1, 64)):
        assert torch.equal(before(x), after(x))
    # The bits themselves, by hand: the first weight in the lowest bits.
    _, table, body = read(file)
    for key, layer in before.named_modules():
        if isinstance(layer, StairLayer) and bits:
            start, end = table[f"{key}.weight"]["data_offsets"]
            assert end - start == math.ceil(layer.weight.numel() * bits / 8)
            raw = np.unpackbits(np.frombuffer(body[start:end], np.uint8), bitorder="little")
            index = raw.reshape(-1, bits) @ (1 << np.arange(bits))
            expected = layer.weight_stair.stair.index(layer.weight.detach()).flatten().numpy()
            assert (index[: len(expected)] == expected).all()


def test_a_float_network_and_one_that_is_quantised_already(tmp_path: Path) -> None:
    floats = model().eval()
    file = zoo.save(floats, tmp_path / "float.safetensors", "mine:model", (64,), 0, 1)
    assert torch.equal(zoo.load(file, model)(EXAMPLES), floats(EXAMPLES))
    assert zoo.about(file).options is None
    net = trained(weights="int4")
    file = zoo.save(net, tmp_path / "net.safetensors", "mine:model", (64,), 0, 1)
    with pytest.raises(SoftstairError, match=r"mine:model.*`model`"):
        zoo.load(file)
    assert torch.equal(zoo.load(file, ss.quantise(model(), "int4"))(EXAMPLES), net(EXAMPLES))
    tanh, relu6 = model(), model()
    tanh[2], relu6[5] = nn.Tanh(), nn.ReLU6()
    small = nn.Sequential(nn.Linear(64, 3), nn.ReLU(), nn.Linear(3, 10))
    for other in (tanh, relu6, small):  # the first two have the same weights
        with pytest.raises(SoftstairError, match="does not fit"):
            zoo.load(file, other)


def test_a_convolution_of_another_stride_does_not_fit(tmp_path: Path) -> None:
    conv = lambda stride: nn.Sequential(nn.Conv2d(1, 4, 3, stride), nn.ReLU(), nn.Conv2d(4, 2, 1))
    net = ss.quantise(conv(1), "int4")
    ss.calibrate(net.eval(), [torch.randn(8, 1, 8, 8)])
    file = zoo.save(net, tmp_path / "net.safetensors", "mine:conv", (1, 8, 8), 0, 1)
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(zoo.load(file, conv(1))(x), net(x))
    with pytest.raises(SoftstairError, match="does not fit"):
        zoo.load(file, conv(2))


def test_networks_that_cannot_be_saved(tmp_path: Path) -> None:
    net = trained(weights="int4")
    with pytest.raises(SoftstairError, match="colour"):
        zoo.save(net, tmp_path / "a", "mine:model", (64,), 0, 1, colour="red")
    net[0].weight.data[0, 0] = torch.nan
    with pytest.raises(SoftstairError, match=r"0\.weight"):
        zoo.save(net, tmp_path / "a", "mine:model", (64,), 0, 1)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory, narrow_digits: None) -> Path:
    folder = tmp_path_factory.mktemp("zoo") / "run"
    fit(RECIPE, folder, device="cpu")
    return folder


@pytest.fixture
def file(run_folder: Path, tmp_path: Path) -> Path:
    """The network of a run, to spoil."""
    return Path(shutil.copy(run_folder / "network.safetensors", tmp_path))


def test_a_run_writes_its_network(run_folder: Path, file: Path) -> None:
    known, summary = zoo.about(file), json.loads((run_folder / "summary.json").read_text())
    data = load("digits")
    assert (known.model, known.shape, known.classes) == ("digits", (1, 8, 8), data.classes)
    assert (known.mean, known.std) == data.numbers(True, True)
    assert (known.data, known.fold, known.folds, known.limit) == ("digits", 0, 5, 300)
    assert known.version == ss.__version__
    for name in ("valid_accuracy", "test_accuracy"):
        assert getattr(known, name) == summary[name]
    x = (data.x[:50].float() - known.mean) / known.std
    assert torch.equal(zoo.load(file)(x), trained_network(run_folder, data)(x))


def test_export_of_a_run_reads_neither_recipe_nor_data(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    folder = Path(shutil.copytree(run_folder, tmp_path / "run"))
    for path in [path for path in folder.iterdir() if path.name != "network.safetensors"]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    monkeypatch.setattr("softstair.data.load", lambda *_: pytest.fail("the data set was read"))
    assert run("export", folder, "--to", "c")[0] == 0
    assert (folder / "c" / "network.c").is_file()


def error_of(file: Path) -> str:
    with pytest.raises(SoftstairError, match="is no network of softstair, or is damaged") as caught:
        zoo.load(file)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 900
    return message


def test_every_flipped_bit_is_refused(file: Path) -> None:
    content = file.read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]
    for number in range(150):
        place = (number * 7919) % len(content) if number % 2 else number * header // 150
        flipped = content[place] ^ (1 << number % 8)
        file.write_bytes(content[:place] + bytes([flipped]) + content[place + 1 :])
        try:
            zoo.load(file)
        except SoftstairError:
            continue
        assert place < header, "a tensor differs"
        words = read(file)[0]
        file.write_bytes(content)
        assert words == read(file)[0], "only white space may differ"


def test_code_that_a_file_names_is_not_called(
    file: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, table, body = read(file)
    called: list[Any] = []
    monkeypatch.setattr("softstair._plugins.call", lambda *given, **more: called.append(given))
    for name in ("os:system", "a:b:c", ":"):
        make(file, signed({**words, "model": name}, file), table, body)
        with pytest.raises(SoftstairError, match="pass `model`"):
            zoo.load(file)
    make(file, signed({**words, "data": "os:system"}, file), table, body)
    zoo.load(file)  # which loads no data
    assert "--data" in run.rejected("verify", file)
    assert called == []


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"shape": ["a", 8, 8]},
        {"shape": [-1, 8, 8]},
        {"shape": [10**30, 8, 8]},
        {"classes": ["a"] * 9},
        {"classes": None},
        {"model": "vgg8"},
        {"options": {"entries": [["weights", "int4"]]}},
        {"options": {"entries": [["weights", {"stair": {"levels": [0]}}]]}},
        {"options": None},
        {"options": []},
        {"colour": "red"},
    ],
)
def test_what_a_file_says_must_fit_its_tensors(change: dict[str, Any], file: Path) -> None:
    words, table, body = read(file)
    error_of(make(file, {**words, **change}, table, body))
    error_of(make(file, signed({**words, **change}, file), table, body))


def test_other_and_cut_files(file: Path) -> None:
    complete, (words, table, body) = file.read_bytes(), read(file)
    contents = [complete[:size] for size in (0, 7, 9, 3000, len(complete) // 2, len(complete) - 1)]
    contents += [bytes(500), safetensors.save({"a": torch.zeros(3)}, {"format": "pt"})]
    for content in contents:
        file.write_bytes(content)
        error_of(file)
    for text in ("null", "{", "[]", "", "[" * 100_000, '{"format": NaN}'):
        error_of(make(file, text, table, body))
    moved = {**table, "other": table.pop("classifier.weight")}
    error_of(make(file, words, moved, body))


# The networks of the zoo


def test_every_network_that_ships_has_a_card() -> None:
    assert zoo.names() == tuple(sorted(json.loads((SHIPPED / "cards.json").read_text())))
    for name in zoo.names():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", name)
        card, known = zoo.card(name), zoo.about(name)
        assert zoo.path_of(name).stat().st_size < 4_000_000
        assert card.command.startswith("softstair train ")
        assert re.search(r"\b[0-9a-f]{7}\b", card.commit)
        assert known.mean.is_integer(), "its zero is a byte"
        assert known.test_accuracy == pytest.approx(card.accuracies[0], abs=1e-4)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("name", zoo.names()[::-1])
def test_every_network_that_ships_runs(name: str) -> None:
    known, network = zoo.about(name), zoo.load(name)
    x = torch.zeros(2, *known.shape).sub(known.mean).div(known.std)
    assert network(x).shape == (2, len(known.classes))


def test_the_wheel_has_no_networks() -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="needs hatchling")
    builder = wheel.WheelBuilder(str(Path(__file__).parents[1]))
    packaged = {file.distribution_path for file in builder.recurse_included_files()}
    assert not [path for path in packaged if path.endswith(".safetensors")]


@pytest.fixture
def small(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A zoo with one network."""
    folder = tmp_path / "networks"
    folder.mkdir()
    file.rename(folder / "digits-ternary.safetensors")
    entry = {"data": "digits", "bits": "ternary, first layer int8", "command": COMMAND}
    accuracy = zoo.about(folder / "digits-ternary.safetensors").valid_accuracy
    cards = {"digits-ternary": {**entry, "accuracies": [accuracy], "commit": "0123abc"}}
    (folder / "cards.json").write_text(json.dumps(cards))
    monkeypatch.setattr(zoo, "_folders", lambda: [folder])
    return folder


def test_where_networks_are_looked_for(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.undo()
    assert "speech-dscnn-int4" in zoo.names()
    monkeypatch.setenv("SOFTSTAIR_ZOO", str(small))
    assert zoo.path_of("digits-ternary").parent == small
    monkeypatch.setattr(zoo, "_folders", lambda: [tmp_path / "nowhere"])
    with pytest.raises(SoftstairError, match="SOFTSTAIR_ZOO"):
        zoo.load("digits-ternary")
    code, out, _ = run("zoo")
    assert (code, "SOFTSTAIR_ZOO" in out) == (0, True)


@pytest.mark.parametrize("name", ["digits-tenary", "", ".", "../digits-ternary", "x" * 200])
def test_unknown_name_is_an_error_that_names_the_known(name: str, small: Path, run: Run) -> None:
    for call in (zoo.load, zoo.card, zoo.about):
        with pytest.raises(SoftstairError, match="digits-ternary"):
            call(name)
    if name not in ("", "."):
        for words in (["export"], ["verify"], ["zoo", "card"], ["zoo", "evaluate"]):
            assert "digits-ternary" in run.rejected(*words, name)


def test_damaged_cards_are_errors(small: Path, run: Run) -> None:
    cards = small / "cards.json"
    known = json.loads(cards.read_text())["digits-ternary"]
    for entry in ([], {}, {**known, "colour": "red"}, {**known, "accuracies": 3}):
        cards.write_text(json.dumps({"digits-ternary": entry}))
        assert "damaged" in run.rejected("zoo", "card", "digits-ternary")
    for text in ("{", "3", "{}", "[" * 100_000):
        cards.write_text(text)
        assert "damaged" in run.rejected("zoo")


def test_list_card_evaluate_export_and_verify(small: Path, run: Run, tmp_path: Path) -> None:
    card = zoo.card("digits-ternary")
    for words in ([], ["list"]):
        code, out, err = run("zoo", *words)
        assert (code, err) == (0, "")
        assert "ternary, first layer int8" in out
        assert in_percent(card.accuracies) in out
    code, out, _ = run("zoo", "card", "digits-ternary")
    assert code == 0
    assert COMMAND in " ".join(out.split())
    code, out, _ = run("zoo", "evaluate", "digits-ternary", "--device", "cpu")
    accuracy = f"{card.accuracies[0]:.2%}"
    assert (code, out) == (0, f"digits-ternary: accuracy {accuracy} (its card: {accuracy})\n")
    assert run("export", "digits-ternary", "--to", "c")[0] == 0
    assert (tmp_path / "digits-ternary-c" / "network.c").is_file()
    code, out, err = run("verify", "digits-ternary", "--runtimes", "none")
    assert (code, err) == (0, "")
    assert f"accuracy: {accuracy} trained, {accuracy} frozen; 0 of " in out
    assert deployed("digits-ternary").about == zoo.about("digits-ternary")


def test_words_that_do_not_fit(small: Path, run: Run) -> None:
    for words, field in {
        ("evaluate",): "NAME",
        ("list", "digits-ternary"): "NAME",
        ("evaluate", "digits-ternary", "--device", "tpu"): "--device",
        ("train",): "ACTION",
    }.items():
        assert field in run.rejected("zoo", *words)
