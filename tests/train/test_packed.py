"""A trained network in one small file: the same scores to the last bit, and files that lie."""

import json
import math
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mutations import mutations
from short import is_sentence, recipe
from torch import Tensor

from softstair.data import Dataset, load
from softstair.data.folds import split
from softstair.train import Recipe, RunError, train, trained_network
from softstair.train.packed import about, pack, packed_network

safetensors = pytest.importorskip("safetensors.torch")

SHORT = recipe(epochs=1, drop=None, limit=100)
FOUR = {"weight_quantum": 0.07, "feature_quantum": 0.07}
RECIPES: dict[str, tuple[Recipe, int]] = {
    # What is trained, and the bits that a weight of it needs.
    "ternary": (SHORT, 2),
    "heaviside": (replace(SHORT, weights="heaviside", features="heaviside"), 1),
    "sign": (replace(SHORT, weights="sign", features="sign"), 1),
    "uint2": (replace(SHORT, weights="uint2", features="uint2", weight_quantum=0.1), 2),
    "int4": (replace(SHORT, weights="int4", features="uint4", **FOUR), 4),
    "int4, floor": (
        replace(SHORT, weights="int4", features="uint4", thresholds="floor", **FOUR),
        4,
    ),
    "uint2, floor": (replace(SHORT, weights="uint2", features="uint2", thresholds="floor"), 2),
    "int8": (replace(SHORT, weights="int8", features="uint8", weight_quantum=0.01), 8),
    "the last layer too": (replace(SHORT, last_layer="stair"), 2),
    "some in float": (replace(SHORT, skip=("features.4",)), 2),
    "weights in float": (replace(SHORT, weights="float"), 0),
    "a dynamic mean": (replace(SHORT, static_mean=False, noise="logistic", forward="random"), 2),
}
EXAMPLES = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load("digits")


def read(file: Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """What a packed file says, its table of tensors, and their bytes; by the format, not by the
    library that writes it."""
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


def scores(network: torch.nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return network(x)


@pytest.mark.parametrize("name", RECIPES)
def test_the_same_scores_to_the_last_bit(name: str, digits: Dataset, tmp_path: Path) -> None:
    chosen, bits = RECIPES[name]
    train(chosen, tmp_path / "run", dataset=digits)
    file = pack(tmp_path / "run", digits, tmp_path / "packed.safetensors")
    before = trained_network(tmp_path / "run", digits)
    state = torch.get_rng_state()
    after = packed_network(file)
    assert torch.equal(torch.get_rng_state(), state), "nobody else's random numbers are drawn"
    assert not after.training
    for x in (EXAMPLES, 10 * EXAMPLES, torch.zeros(1, 1, 8, 8)):
        assert torch.equal(scores(before, x), scores(after, x))
    # The bits themselves, by hand: the first weight in the lowest bits.
    _, table, body = read(file)
    packed = {key for key, value in table.items() if value["dtype"] == "U8"}
    stairs = {
        f"{key}.weight": module
        for key, module in before.named_modules()
        if getattr(module, "weight_stair", None) is not None
    }
    assert packed == set(stairs)
    for key, layer in stairs.items():
        start, end = table[key]["data_offsets"]
        assert end - start == math.ceil(layer.weight.numel() * bits / 8)
        unpacked = np.unpackbits(np.frombuffer(body[start:end], np.uint8), bitorder="little")
        index = unpacked.reshape(-1, bits) @ (1 << np.arange(bits))
        stair = layer.weight_stair.stair
        levels = torch.tensor(stair.levels)[torch.from_numpy(index[: layer.weight.numel()].copy())]
        hard = stair(layer.weight.detach()).reshape(-1)
        assert torch.equal(levels.float(), hard)
    # Nothing else is larger than it was: floats of four bytes, and a few of eight.
    others = [value for key, value in before.state_dict().items() if key not in packed]
    assert len(body) == sum(one.numel() * one.element_size() for one in others) + sum(
        math.ceil(layer.weight.numel() * bits / 8) for layer in stairs.values()
    )


def test_a_ternary_weight_costs_two_bits(digits: Dataset, tmp_path: Path) -> None:
    train(SHORT, tmp_path / "run", dataset=digits)
    file = pack(tmp_path / "run", digits, tmp_path / "packed.safetensors")
    ternary = 64 * 256 + 256 * 256 + 256 * 256
    floats = 3 * 4 * 256 + 257 * 10  # three batch-norms, and the last layer
    _, _, body = read(file)
    assert len(body) <= 2.1 * ternary / 8 + 4 * floats
    assert file.stat().st_size <= 2.1 * ternary / 8 + 4 * floats + 8000, "names, and words"


def test_a_speech_network_in_four_bits(tmp_path: Path) -> None:
    numbers = torch.Generator().manual_seed(1)
    x = torch.randint(256, (40, 1, 49, 10), generator=numbers, dtype=torch.uint8)
    y = torch.randint(12, (40,), generator=numbers)
    data = Dataset("speech", x, y, tuple("abcdefghijkl"), mean=128.0, std=60.0, test_x=x, test_y=y)
    chosen = Recipe(data="speech", weights="int4", features="uint4", epochs=1, batch=16, **FOUR)
    train(chosen, tmp_path / "run", dataset=data)
    file = pack(tmp_path / "run", data, tmp_path / "packed.safetensors")
    inputs = (x.float() - 128) / 60
    before = trained_network(tmp_path / "run", data)
    assert torch.equal(scores(before, inputs), scores(packed_network(file), inputs))
    assert about(file)["recipe"]["model"] == "dscnn"
    assert about(file)["test_accuracy"] == pytest.approx(
        float((scores(packed_network(file), inputs).argmax(1) == y).float().mean())
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, digits: Dataset) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    train(SHORT, folder / "run", dataset=digits)
    pack(folder / "run", digits, folder / "packed.safetensors")
    return folder / "run"


@pytest.fixture
def file(run: Path, tmp_path: Path) -> Path:
    """A packed network to spoil."""
    return Path(shutil.copy(run.parent / "packed.safetensors", tmp_path))


def test_what_it_says_of_itself(run: Path, file: Path, digits: Dataset) -> None:
    words, summary = about(file), json.loads((run / "summary.json").read_text())
    assert Recipe.from_json(words["recipe"]) == replace(SHORT, model="digits")
    assert words["classes"] == list(digits.classes)
    assert (words["shape"], words["mean"], words["std"]) == ([1, 8, 8], digits.mean, digits.std)
    for name in ("valid_accuracy", "test_accuracy"):
        assert words[name] == summary[name]
    assert words["versions"] == summary["config"]["versions"]


@pytest.mark.parametrize(
    ("integer", "centre", "numbers"),
    [
        (False, False, (4.88, 6.02)),
        (True, False, (5.0, 8.0)),
        (False, True, (9.0, 4.0)),
        (True, True, (9.0, 4.0)),
    ],
)
def test_it_says_how_to_ask_it(
    integer: bool, centre: bool, numbers: tuple[float, float], digits: Dataset, tmp_path: Path
) -> None:
    """With its own mean and std it has the accuracy that it says that it has."""
    data = replace(digits, mean=4.88, std=6.02, centred=(9.0, 4.0))
    recipe = replace(SHORT, integer_input=integer, centre_input=centre)
    train(recipe, tmp_path / "run", dataset=data)
    file = pack(tmp_path / "run", data, tmp_path / "packed.safetensors")
    words = about(file)
    assert (words["mean"], words["std"]) == numbers
    few = data.sample(100)
    valid = split(few, 0, 5)[1]
    inputs = (few.x[valid].float() - words["mean"]) / words["std"]
    right = scores(packed_network(file), inputs).argmax(1) == few.y[valid]
    assert float(right.double().mean()) == words["valid_accuracy"]


def test_fields_of_other_versions_do_no_harm(file: Path) -> None:
    """What decides is there, whatever else a recipe has or has not."""
    words, table, body = read(file)
    before = scores(packed_network(file), EXAMPLES)
    for name in ("capture", "kernels", "period", "seed"):
        del words["recipe"][name]
    words["recipe"]["wings"] = 2
    words["more"] = {"anything": [1, 2]}
    assert torch.equal(scores(packed_network(make(file, words, table, body)), EXAMPLES), before)


def test_by_name_in_a_folder(file: Path, tmp_path: Path) -> None:
    (tmp_path / "shelf").mkdir()
    file.rename(tmp_path / "shelf" / "mine.safetensors")
    network = packed_network("mine", tmp_path / "shelf")
    assert scores(network, EXAMPLES).shape == (64, 10)
    with pytest.raises(RunError, match="there are mine, but 'yours' was given") as caught:
        packed_network("yours", tmp_path / "shelf")
    assert is_sentence(str(caught.value))


@pytest.mark.parametrize("name", ["nowhere", "", ".", "a\nb", "../x"])
def test_a_file_that_is_not_there(name: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="must be a file") as caught:
        packed_network(name, tmp_path / "shelf")
    assert is_sentence(str(caught.value))
    assert repr(name) in str(caught.value)


# ---- Runs that cannot be packed


def test_a_run_that_is_not_done(run: Path, digits: Dataset, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", shutil.copytree(run, tmp_path / "undone")):
        (path / "summary.json").unlink(missing_ok=True)
        with pytest.raises(RunError, match="no run that is done") as caught:
            pack(path, digits, tmp_path / "packed.safetensors")
        assert is_sentence(str(caught.value))
    assert not (tmp_path / "packed.safetensors").exists()


def test_data_of_another_shape(run: Path, digits: Dataset, tmp_path: Path) -> None:
    other = Dataset("x", torch.zeros(9, 3, 32, 32, dtype=torch.uint8), digits.y[:9], digits.classes,
                    mean=0.0, std=1.0)  # fmt: skip
    with pytest.raises(ValueError, match="8×8") as caught:
        pack(run, other, tmp_path / "packed.safetensors")
    assert is_sentence(str(caught.value))
    assert not (tmp_path / "packed.safetensors").exists()


def test_it_takes_the_place_of_the_one_before(file: Path, run: Path, digits: Dataset) -> None:
    before = file.read_bytes()
    file.write_bytes(b"something else")
    pack(run, digits, file)
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


# ---- Files that lie


def refused(file: Path) -> str:
    """The one sentence."""
    with pytest.raises(RunError, match="is no packed network, or was damaged") as caught:
        packed_network(file)
    said = str(caught.value)
    assert said.isprintable()
    assert len(said) < 900
    assert repr(str(file)) in said
    assert said.endswith(": restore it, or pack the run again.")
    return said


def test_code_that_a_file_names_is_not_called(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, table, body = read(file)
    called: list[Any] = []
    monkeypatch.setattr(os, "system", lambda *given: called.append(given) or 0)
    monkeypatch.setattr("softstair.own.call", lambda *given, **more: called.append(given))
    for model in ("os:system", "a:b:c", ":", "torch.nn:Identity"):
        words["recipe"]["model"] = model
        assert "code of its own" in refused(make(file, words, table, body))
    words["recipe"] |= {"model": "digits", "data": "os:system"}
    packed_network(make(file, words, table, body))  # the data are not asked for
    assert called == []


def test_code_that_a_run_names_is_not_called(run: Path, digits: Dataset, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    for name in ("config.json", "summary.json"):
        data = json.loads((copy / name).read_text())
        (data if name == "config.json" else data["config"])["recipe"]["model"] = "os:system"
        (copy / name).write_text(json.dumps(data))
    with pytest.raises(RunError, match="code of its own") as caught:
        pack(copy, digits, tmp_path / "packed.safetensors")
    assert is_sentence(str(caught.value))
    assert not (tmp_path / "packed.safetensors").exists()


WORDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no format": lambda words: words.pop("format"),
    "another format": lambda words: words.update(format=2),
    "no recipe": lambda words: words.pop("recipe"),
    "a list for a recipe": lambda words: words.update(recipe=[]),
    "a text for a recipe": lambda words: words.update(recipe="x"),
    "no weights": lambda words: words["recipe"].pop("weights"),
    "no shape": lambda words: words.pop("shape"),
    "shape of nothing": lambda words: words.update(shape=None),
    "shape of a word": lambda words: words.update(shape=["a", 8, 8]),
    "shape without sides": lambda words: words.update(shape=[]),
    "shape below": lambda words: words.update(shape=[-1, 8, 8]),
    "shape without end": lambda words: words.update(shape=[10**30, 8, 8]),
    "no classes": lambda words: words.pop("classes"),
    "classes of nothing": lambda words: words.update(classes=None),
    "too few classes": lambda words: words.update(classes=["a"] * 9),
    "too many classes": lambda words: words.update(classes=["a"] * 1000),
    "another model": lambda words: words["recipe"].update(model="vgg8"),
    "no such model": lambda words: words["recipe"].update(model="auto"),
    "model of a number": lambda words: words["recipe"].update(model=5),
    "model of nothing": lambda words: words["recipe"].update(model=None),
    "other weights": lambda words: words["recipe"].update(weights="int4"),
    "fewer levels": lambda words: words["recipe"].update(weights="heaviside"),
    "weights in float": lambda words: words["recipe"].update(weights="float"),
    "features in float": lambda words: words["recipe"].update(features="float"),
    "all in float": lambda words: words["recipe"].update(features="float", weights="float"),
    "all skipped": lambda words: words["recipe"].update(skip=["*"]),
    "one skipped": lambda words: words["recipe"].update(skip=["features.4"]),
    "another last layer": lambda words: words["recipe"].update(last_layer="stair"),
    "quantum of nan": lambda words: words["recipe"].update(weight_quantum=math.nan),
    "quantum below": lambda words: words["recipe"].update(weight_quantum=-1),
    "noise of none": lambda words: words["recipe"].update(noise="cauchy"),
}


@pytest.mark.parametrize("kind", WORDS)
def test_words_that_lie(kind: str, file: Path) -> None:
    words, table, body = read(file)
    WORDS[kind](words)
    refused(make(file, words, table, body))


@pytest.mark.parametrize("kind", ["no such model", "quantum below", "noise of none"])
def test_words_that_lie_are_one_sentence(kind: str, file: Path) -> None:
    words, table, body = read(file)
    WORDS[kind](words)
    assert is_sentence(refused(make(file, words, table, body)))


def test_a_shape_of_infinity(file: Path) -> None:
    words, table, body = read(file)
    words["shape"] = [math.inf, 8, 8]
    refused(make(file, words, table, body))


def test_no_classes_at_all(file: Path) -> None:
    words, table, body = read(file)
    words["classes"] = []
    refused(make(file, words, table, body))


@pytest.mark.parametrize(
    "text", ["null", "{", "[]", "3", '"x"', "", "[" * 100_000, '{"format": NaN}']
)
def test_words_that_are_none(text: str, file: Path) -> None:
    _, table, body = read(file)
    refused(make(file, text, table, body))
    with pytest.raises(RunError):
        about(file)


WEIGHT = "features.4.weight"


@pytest.mark.parametrize("byte", [0b11, 0b1100, 0b110000, 0b11000000, 0xFF])
def test_a_level_that_the_stair_has_not(byte: int, file: Path) -> None:
    words, table, body = read(file)
    place = table[WEIGHT]["data_offsets"][1] - 1
    body = body[:place] + bytes([byte]) + body[place + 1 :]
    assert "level" in refused(make(file, words, table, body))


SHAPES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "two sides": lambda table: table[WEIGHT].update(shape=[2, 8192]),
    "another type": lambda table: table[WEIGHT].update(dtype="I8"),
    "floats": lambda table: table[WEIGHT].update(dtype="F32", shape=[4096]),
    "another name": lambda table: table.update(other=table.pop(WEIGHT)),
    "no quantum": lambda table: table.update(x=table.pop("features.4.weight_stair.quantum")),
    "quanta": lambda table: table["features.4.weight_stair.quantum"].update(shape=[1]),
    "no mean": lambda table: table.update(x=table.pop("features.2.running_mean")),
    "whole numbers": lambda table: table["features.2.running_mean"].update(dtype="I32"),
    "sides exchanged": lambda table: table["classifier.weight"].update(shape=[256, 10]),
    "flat": lambda table: table["classifier.weight"].update(shape=[2560]),
    "beyond the end": lambda table: table[WEIGHT].update(data_offsets=[0, 10**9]),
    "backwards": lambda table: table[WEIGHT]["data_offsets"].reverse(),
    "below": lambda table: table[WEIGHT].update(shape=[-1]),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_tensors_of_other_shapes(kind: str, file: Path) -> None:
    words, table, body = read(file)
    SHAPES[kind](table)
    refused(make(file, words, table, body))


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_a_quantum_that_is_none(value: float, file: Path) -> None:
    words, table, body = read(file)
    start, end = table["features.4.weight_stair.quantum"]["data_offsets"]
    body = body[:start] + struct.pack("<f", value) + body[end:]
    assert "quantum" in refused(make(file, words, table, body))


@pytest.mark.parametrize("kind", ["nothing", "zeros", "foreign", "words alone", "empty", "long"])
def test_other_files(kind: str, file: Path) -> None:
    whole, said = file.read_bytes(), json.dumps(read(file)[0])
    content = {
        "nothing": b"",
        "zeros": bytes(500),
        "foreign": safetensors.save({"a": torch.zeros(3)}, {"format": "pt"}),
        "words alone": safetensors.save({"a": torch.zeros(3)}, {"softstair": said}),
        "empty": safetensors.save({}),
        "long": whole + b"x",
    }[kind]
    file.write_bytes(content)
    refused(file)


def test_cut_anywhere(file: Path) -> None:
    whole = file.read_bytes()
    for size in (1, 7, 8, 9, 100, 3000, 8000, len(whole) // 2, len(whole) - 4096, len(whole) - 1):
        file.write_bytes(whole[:size])
        refused(file)


def test_after_a_bad_disc(file: Path) -> None:
    """Whatever the bytes are: a network, or one sentence; and never a word of another kind."""
    read_well, refusals = 0, []
    for mutation in mutations(file.read_bytes(), 40, seed=11):
        file.write_bytes(mutation)
        try:
            network = packed_network(file)
        except RunError as error:
            refusals.append(str(error))
        else:
            read_well += 1
            assert scores(network, EXAMPLES).shape == (64, 10)
    assert len(refusals) > read_well
    assert all(said.isprintable() and len(said) < 900 for said in refusals)
