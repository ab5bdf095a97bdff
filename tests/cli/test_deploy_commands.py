"""``softstair export`` and ``softstair verify``, from a run to a file and back."""

import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from softstair import Stair
from softstair.cli import main
from softstair.data import load
from softstair.data.folds import split
from softstair.deploy import IntegerNetwork, last_layer
from softstair.stair import fit_quantum
from softstair.train import Recipe, train
from softstair.train.network import trained_network
from softstair.train.packed import about, pack

RECIPE = Recipe(limit=300, epochs=1, batch=32, integer_input=True)
HAS_COMPILER = shutil.which("cc") is not None
sys.path.append(str(Path(__file__).parents[1] / "data"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "digits"
    train(RECIPE, path, device="cpu")
    return path


def told(words: list[Any], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize(
    "ways",
    [
        "onnx",
        "none",
        pytest.param(
            "c",
            marks=pytest.mark.skipif(not HAS_COMPILER, reason="no compiler is installed."),
        ),
    ],
)
def test_verify_counts_none(ways: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    code, out, err = told(["verify", run, "--ways", ways, "--limit", 60], capsys)
    assert (code, err) == (0, "")
    for way in ["integer network", *([] if ways == "none" else [ways])]:
        assert f"{way}: 0 mismatches of {60 * (3 * 256 + 1):,} numbers" in out


def test_verify_with_the_last_layer_in_int8(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    words = ["verify", run, "--last-layer", "int8", "--ways", "onnx", "--limit", 60]
    code, out, err = told(words, capsys)
    assert (code, err) == (0, "")
    for way in ("integer network", "onnx"):
        # The scores of whole weights are compared as well.
        assert f"{way}: 0 mismatches of {60 * (3 * 256 + 10 + 1):,} numbers" in out
    assert "the last layer in int8" in out
    assert "classifier.scores" in out
    assert "of 60 classes differ from the trained network's, whose last layer is float" in out


def test_classes_that_a_coarse_last_layer_changes_are_counted(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are what the choice costs, and no mismatch: the exit code stays 0."""
    monkeypatch.setattr(last_layer, "INT8", Stair.sign())
    code, out, _ = told(["verify", run, "--last-layer", "int8", "--ways", "none"], capsys)
    assert code == 0
    assert "integer network: 0 mismatches" in out
    # By hand: the signs of the weights, times one number for each class.
    net, dataset = trained_network(run, load("digits")).eval(), load("digits").sample(300)
    x = (dataset.x[split(dataset, 0, 5)[1]].float() - 8) / 8
    kept = net.get_submodule("classifier")
    assert isinstance(kept, torch.nn.Linear)
    with torch.no_grad():
        classes = net(x).argmax(1)
        signs = torch.where(kept.weight >= 0, 1.0, -1.0)
        quanta = torch.tensor(fit_quantum(kept.weight, Stair.sign(), per_channel=True).quantum)
        kept.weight.copy_(signs * quanta[:, None])
        changed = int((net(x).argmax(1) != classes).sum())
    assert changed > 0
    assert f"{changed} of {len(x)} classes differ from the trained network's" in out


def test_verify_says_no(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An integer network that is wrong in one place is an answer of no, and the place is named."""
    right = IntegerNetwork.features

    def wrong(self: IntegerNetwork, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = right(self, x)
        found[self.stairs[1]][7, 100] += 1
        return found

    monkeypatch.setattr(IntegerNetwork, "features", wrong)
    code, out, _ = told(["verify", run, "--ways", "none", "--limit", 20], capsys)
    assert code == 1
    assert "1 mismatches of" in out
    assert "the first in features.6, example 7 at (100,): " in " ".join(out.split())


def test_export_to_onnx(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    file = tmp_path / "digits.onnx"
    code, out, err = told(["export", run, "--out", file], capsys)
    assert (code, err) == (0, "")
    assert "65,536" in out
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    scores, classes = session.run(["scores", "class"], {"bytes": load("digits").x[:9].numpy()})
    assert scores.shape == (9, 10)
    assert (scores.argmax(1) == classes).all()


def test_export_to_c(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(["export", run, "--to", "c", "--out", tmp_path / "c"], capsys)
    assert code == 0
    assert "in all" in out
    assert "floats" in out
    assert (tmp_path / "c" / "network.c").is_file()
    # Again over itself, but over nothing else.
    words = ["export", run, "--to", "c", "--out", tmp_path / "c", "--last-layer", "int8"]
    code, out, _ = told(words, capsys)
    assert code == 0
    assert re.search(r"classifier +2,560 +2,560 +40  bytes multiplied, 8 bits a weight", out)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    code, _, err = told(["export", run, "--to", "c", "--out", tmp_path / "mine"], capsys)
    assert code == 2
    assert "holds something else" in err
    assert [one.name for one in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    beneath = tmp_path / "mine" / "thesis.tex" / "c"
    code, _, err = told(["export", run, "--to", "c", "--out", beneath], capsys)
    assert code == 2
    assert "--out must be a folder that can be written, but " in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("kind", ["onnx", "qonnx"])
def test_export_replaces_a_link_at_its_default_path(
    kind: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnx", reason="needs onnx")
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    mine = tmp_path / "mine"
    mine.write_text("mine")
    default = copy / f"network.{kind}"
    default.symlink_to(mine)
    assert told(["export", copy, "--to", kind], capsys)[0] == 0
    assert mine.read_text() == "mine"
    assert default.is_file()
    assert not default.is_symlink()
    # A link that the user names is followed.
    named = tmp_path / "named"
    named.symlink_to(mine)
    assert told(["export", copy, "--to", kind, "--out", named], capsys)[0] == 0
    assert mine.read_bytes() == default.read_bytes()
    assert named.is_symlink()


def test_export_to_c_writes_through_no_link(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    mine = tmp_path / "mine"
    mine.mkdir()
    words = ["export", copy, "--to", "c"]
    (copy / "c").symlink_to(mine)
    code, _, err = told(words, capsys)
    assert (code, [*mine.iterdir()]) == (2, [])
    assert "c' is a symbolic link" in err
    # Links in the folder: that of a file is replaced, that of a folder is refused.
    (copy / "c").unlink()
    assert told(words, capsys)[0] == 0
    (mine / "program.c").write_text("mine")
    (copy / "c" / "network.c").unlink()
    (copy / "c" / "network.c").symlink_to(mine / "program.c")
    assert told(words, capsys)[0] == 0
    assert (mine / "program.c").read_text() == "mine"
    shutil.rmtree(copy / "c" / "cortex-m4")
    (copy / "c" / "cortex-m4").symlink_to(mine)
    code, _, err = told(words, capsys)
    assert code == 2
    assert "cortex-m4' is a symbolic link" in err
    assert [one.name for one in mine.iterdir()] == ["program.c"]
    # A folder that the user names may be a link.
    (mine / "program.c").unlink()
    (tmp_path / "named").symlink_to(mine)
    assert told([*words, "--out", tmp_path / "named"], capsys)[0] == 0
    assert (mine / "network.c").is_file()


def test_a_packed_network_is_as_good(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = pack(run, load("digits"), tmp_path / "digits.safetensors")
    code, out, _ = told(["verify", file, "--ways", "none", "--limit", 20], capsys)
    assert code == 0
    assert "0 mismatches" in out


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with a small Speech Commands of tones."""
    import speech_tree

    folder = tmp_path_factory.mktemp("speech")
    speech_tree.make_folders(folder / "speech_commands_v0.02")
    return folder


@pytest.mark.parametrize(
    ("flags", "numbers"),
    [
        ([], (128.0, 16.0)),
        (["--integer-input"], (128.0, 16.0)),
        (["--no-centre-input"], (0.0, 1.0)),
    ],
    ids=["default", "integer input", "not centred"],
)
def test_a_speech_network_is_exact_when_exported(
    flags: list[str],
    numbers: tuple[float, float],
    speech: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    stairs = "--weights int4 --weight-quantum 0.07 --features uint4 --feature-quantum 0.07"
    words = f"train --data speech {stairs} --epochs 2 --period 0.2 --batch 16 --device cpu"
    given = [*words.split(), *flags, "--data-dir", speech, "--out", tmp_path / "run"]
    assert told(given, capsys)[0] == 0
    file = pack(tmp_path / "run", load("speech", speech), tmp_path / "speech.safetensors")
    assert (about(file)["mean"], about(file)["std"]) == numbers
    ways = [] if flags else ["onnx", "c"] if HAS_COMPILER else ["onnx"]
    for path, way in [(file, "none"), *((tmp_path / "run", way) for way in ways)]:
        code, out, err = told(["verify", path, "--ways", way, "--data-dir", speech], capsys)
        assert (code, err) == (0, "")
        assert out.count(": 0 mismatches of") == (1 if way == "none" else 2)
    words = ["export", tmp_path / "run", "--data-dir", speech, "--out", tmp_path / "net.onnx"]
    assert told(words, capsys)[0] == 0


@pytest.mark.parametrize("verb", ["export", "verify"])
def test_code_that_a_file_names_is_not_called(
    verb: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    for name in ("config.json", "summary.json"):
        text = (copy / name).read_text()
        (copy / name).write_text(text.replace('"data": "digits"', '"data": "antigravity:fly"'))
    code, out, err = told([verb, copy], capsys)
    assert (code, out) == (2, "")
    assert "code of its own, and is not called because a file says so" in err
    (copy / "summary.json").unlink()
    assert "is not done" in told([verb, copy], capsys)[2]


def test_a_packed_network_keeps_its_fold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(Recipe(limit=200, epochs=1, batch=32, fold=3), tmp_path / "run", device="cpu")
    file = pack(tmp_path / "run", load("digits"), tmp_path / "digits.safetensors")
    for path in (tmp_path / "run", file):
        code, out, _ = told(["verify", path, "--ways", "none"], capsys)
        assert code == 0
        assert "mismatches on 40 examples, fold 3 of digits" in " ".join(out.split())


@pytest.mark.parametrize("verb", ["export", "verify"])
def test_refusals_are_one_sentence(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    float_ = Recipe(limit=200, epochs=1, batch=32, weights="float", features="float")
    train(float_, "float", device="cpu")
    not_integer = replace(load("digits"), mean=8.3)
    train(Recipe(limit=200, epochs=1, batch=32), "mean", dataset=not_integer, device="cpu")
    packed = str(pack(Path("mean"), not_integer, Path("mean.safetensors")))
    Path("empty").mkdir()
    Path("junk").write_bytes(b"\0" * 100)
    wanted = {
        packed: "no whole number, so that neither its padding nor its first layer can be exact",
        "float": "is in float",
        "empty": "holds no run",
        "junk": "is not a packed network, or is damaged",
        "nowhere": "a packed network must be a file, or a name",
    }
    for path, words in wanted.items():
        code, out, err = told([verb, path], capsys)
        assert (code, out) == (2, ""), path
        assert words in err
        assert err.count("\n") == 1
        assert "Traceback" not in err
    assert told([verb], capsys)[0] == 2
    for flags in (
        (["--ways", "java"], ["--limit", "0"]) if verb == "verify" else (["--to", "java"],)
    ):
        assert told([verb, packed, *flags], capsys)[0] == 2
    code, _, err = told([verb, packed, "--last-layer", "int4"], capsys)
    assert code == 2
    assert "--last-layer must be one of float, int8, but 'int4' was given" in err
