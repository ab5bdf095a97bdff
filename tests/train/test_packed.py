"""A trained network in one small file: the same scores to the last bit, and files that lie."""

import json
import math
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from short import recipe
from torch import Tensor

import softstair as ss
from softstair._errors import SoftstairError
from softstair.data import Dataset, load
from softstair.data.folds import split
from softstair.train import Recipe, train, trained_network
from softstair.train.packed import about, pack, packed_network
from softstair.train.trained import deployed

safetensors = pytest.importorskip("safetensors.torch")

SHORT = recipe(epochs=1, drop=None, limit=100)
FOUR = {"weight_quantum": 0.07, "feature_quantum": 0.07}
RECIPES: dict[str, tuple[Recipe, int]] = {  # with the bits per weight
    "ternary": (SHORT, 2),
    "heaviside": (replace(SHORT, weights="heaviside", features="heaviside"), 1),
    "int4": (replace(SHORT, weights="int4", features="uint4", **FOUR), 4),
    "uint2, floor": (replace(SHORT, weights="uint2", features="uint2", thresholds="floor"), 2),
    "int8": (replace(SHORT, weights="int8", features="uint8", weight_quantum=0.01), 8),
    "learned": (replace(SHORT, quanta="learned", quantum_rate=0.1, weights="int4"), 4),
    "int8 first": (replace(SHORT, first_layer="int8"), 2),
    "last layer": (replace(SHORT, last_layer="stair"), 2),
    "some in float": (replace(SHORT, skip=("features.4",)), 2),
    "float weights": (replace(SHORT, weights="float"), 0),
    "dynamic mean": (replace(SHORT, static_mean=False, noise="logistic", forward="random"), 2),
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


@pytest.mark.nightly(keep=4)
@pytest.mark.filterwarnings("ignore:the weights of .* cannot be negative")
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
    size = 0
    for key, layer in stairs.items():
        if chosen.first_layer != "same":
            bits = 8 if key == "features.1.weight" else 2
        start, end = table[key]["data_offsets"]
        assert end - start == math.ceil(layer.weight.numel() * bits / 8)
        size += end - start
        unpacked = np.unpackbits(np.frombuffer(body[start:end], np.uint8), bitorder="little")
        index = unpacked.reshape(-1, bits) @ (1 << np.arange(bits))
        stair = layer.weight_stair.stair
        levels = torch.tensor(stair.levels)[torch.from_numpy(index[: layer.weight.numel()].copy())]
        hard = stair(layer.weight.detach()).reshape(-1)
        assert torch.equal(levels.float(), hard)
    # Nothing else is larger than it was: floats of four bytes, and a few of eight. The recipe says
    # which stairs there are.
    others = {key: tensor for key, tensor in before.state_dict().items() if key not in packed}
    kept = [tensor.nbytes for key, tensor in others.items() if not key.endswith("_extra_state")]
    assert len(body) == size + sum(kept)


@pytest.mark.nightly
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
    assert words["softstair"] == ss.__version__


def test_the_digest_of_its_weights_is_checked(file: Path) -> None:
    words, table, body = read(file)
    assert len(bytes.fromhex(words["digest"])) == 32
    start, _ = table["features.2.running_mean"]["data_offsets"]
    edited = body[:start] + struct.pack("<f", 0.5) + body[start + 4 :]
    assert "not those of its digest" in error_of(make(file, words, table, edited))
    del words["digest"]  # as older versions
    packed_network(make(file, words, table, edited))


@pytest.mark.parametrize(
    ("integer", "centre", "numbers"), [(True, False, (5.0, 8.0)), (False, True, (9.0, 4.0))]
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


def test_runs_that_cannot_be_packed(run: Path, digits: Dataset, tmp_path: Path) -> None:
    file = tmp_path / "packed.safetensors"
    for path in (tmp_path / "nowhere", shutil.copytree(run, tmp_path / "undone")):
        (path / "summary.json").unlink(missing_ok=True)
        with pytest.raises(SoftstairError, match="no finished run"):
            pack(path, digits, file)
    other = Dataset("x", torch.zeros(9, 3, 32, 32, dtype=torch.uint8), digits.y[:9], digits.classes,
                    mean=0.0, std=1.0)  # fmt: skip
    with pytest.raises(ValueError, match="8×8"):
        pack(run, other, file)
    assert not file.exists()


def test_it_takes_the_place_of_the_one_before(file: Path, run: Path, digits: Dataset) -> None:
    before = file.read_bytes()
    file.write_bytes(b"something else")
    pack(run, digits, file)
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


def error_of(file: Path) -> str:
    with pytest.raises(SoftstairError, match="is not a packed network, or is damaged") as caught:
        packed_network(file)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 900
    return message


def test_code_that_a_file_or_run_names_is_not_called(
    file: Path, run: Path, digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, table, body = read(file)
    called: list[Any] = []
    monkeypatch.setattr("softstair._plugins.call", lambda *given, **more: called.append(given))
    for model in ("os:system", "a:b:c", ":"):
        words["recipe"]["model"] = model
        assert "code of its own" in error_of(make(file, words, table, body))
    words["recipe"] |= {"model": "digits", "data": "os:system"}
    packed_network(make(file, words, table, body))  # which does not load data
    copy = shutil.copytree(run, tmp_path / "copy")
    for name in ("config.json", "summary.json"):
        data = json.loads((copy / name).read_text())
        (data if name == "config.json" else data["config"])["recipe"]["model"] = "os:system"
        (copy / name).write_text(json.dumps(data))
    with pytest.raises(SoftstairError, match="somebody else"):
        pack(copy, digits, tmp_path / "other.safetensors")
    assert called == []


WORDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no format": lambda words: words.pop("format"),
    "no recipe": lambda words: words.pop("recipe"),
    "no weights": lambda words: words["recipe"].pop("weights"),
    "no shape": lambda words: words.pop("shape"),
    "shape of a word": lambda words: words.update(shape=["a", 8, 8]),
    "negative shape": lambda words: words.update(shape=[-1, 8, 8]),
    "huge shape": lambda words: words.update(shape=[10**30, 8, 8]),
    "no mean": lambda words: words.update(mean=None),
    "no classes": lambda words: words.update(classes=[]),
    "too few classes": lambda words: words.update(classes=["a"] * 9),
    "another model": lambda words: words["recipe"].update(model="vgg8"),
    "other weights": lambda words: words["recipe"].update(weights="int4"),
    "fewer levels": lambda words: words["recipe"].update(weights="heaviside"),
    "all in float": lambda words: words["recipe"].update(features="float", weights="float"),
    "all skipped": lambda words: words["recipe"].update(skip=["*"]),
    "another last layer": lambda words: words["recipe"].update(last_layer="stair"),
    "quantum of nan": lambda words: words["recipe"].update(weight_quantum=math.nan),
    "unknown noise": lambda words: words["recipe"].update(noise="cauchy"),
}
WEIGHT = "features.4.weight"
TABLES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "two sides": lambda table: table[WEIGHT].update(shape=[2, 8192]),
    "another type": lambda table: table[WEIGHT].update(dtype="I8"),
    "another name": lambda table: table.update(other=table.pop(WEIGHT)),
    "no quantum": lambda table: table.update(x=table.pop("features.4.weight_stair.quantum")),
    "quanta": lambda table: table["features.4.weight_stair.quantum"].update(shape=[1]),
    "integers": lambda table: table["features.2.running_mean"].update(dtype="I32"),
    "sides exchanged": lambda table: table["classifier.weight"].update(shape=[256, 10]),
    "beyond the end": lambda table: table[WEIGHT].update(data_offsets=[0, 10**9]),
    "backwards": lambda table: table[WEIGHT]["data_offsets"].reverse(),
}


@pytest.mark.parametrize("kind", [*WORDS, *TABLES])
def test_edited_metadata_and_tensors(kind: str, file: Path) -> None:
    words, table, body = read(file)
    WORDS[kind](words) if kind in WORDS else TABLES[kind](table)
    error_of(make(file, words, table, body))


@pytest.mark.parametrize("text", ["null", "{", "[]", "", "[" * 100_000, '{"format": NaN}'])
def test_metadata_that_is_no_metadata(text: str, file: Path) -> None:
    _, table, body = read(file)
    error_of(make(file, text, table, body))
    with pytest.raises(SoftstairError):
        about(file)


@pytest.mark.parametrize("change", [{"folds": None}, {"limit": "x"}, {"fold": "ALL"}])
def test_a_split_that_cannot_be_is_found_on_deployment(change: Any, file: Path) -> None:
    words, table, body = read(file)
    words["recipe"] |= change
    if change == {"folds": None}:
        del words["recipe"]["folds"]
    packed_network(make(file, words, table, body))  # which needs no split
    with pytest.raises(SoftstairError, match="is not a packed network, or is damaged"):
        deployed(file)


def test_a_level_or_quantum_that_cannot_be(file: Path) -> None:
    words, table, body = read(file)
    place = table[WEIGHT]["data_offsets"][1] - 1
    for byte in (0b11, 0b11000000, 0xFF):
        edited = body[:place] + bytes([byte]) + body[place + 1 :]
        assert "level" in error_of(make(file, words, table, edited))
    start, end = table["features.4.weight_stair.quantum"]["data_offsets"]
    for value in (math.nan, math.inf, 0.0, -1.0):
        edited = body[:start] + struct.pack("<f", value) + body[end:]
        assert "quantum" in error_of(make(file, words, table, edited))


def test_other_and_cut_files(file: Path) -> None:
    complete, text = file.read_bytes(), json.dumps(read(file)[0])
    tensors = {"a": torch.zeros(3)}
    contents = [complete[:size] for size in (0, 7, 9, 3000, len(complete) // 2, len(complete) - 1)]
    contents += [bytes(500), complete + b"x", safetensors.save(tensors, {"format": "pt"})]
    contents += [safetensors.save(tensors, {"softstair": text})]
    for content in contents:
        file.write_bytes(content)
        error_of(file)
