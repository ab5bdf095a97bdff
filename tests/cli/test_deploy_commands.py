"""``softstair export`` and ``softstair verify``, from a run to a file and back."""

import importlib
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import softstair as ss
from data import speech_tree
from helpers.commands import Run
from helpers.narrow import WIDTH
from softstair import Stair, zoo
from softstair._quantum import fit_quantum
from softstair.data import load
from softstair.data.folds import split
from softstair.deploy import IntegerNetwork, last_layer
from softstair.train import Recipe, train
from softstair.train.network import trained_network

pytestmark = pytest.mark.usefixtures("plain_terminal", "narrow_digits")

RECIPE = Recipe(limit=300, epochs=1, batch=32, integer_input=True, fold=3)
HAS_COMPILER = shutil.which("cc") is not None


@pytest.fixture(scope="module")
def digits(narrow_digits: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "digits"
    train(RECIPE, path, device="cpu")
    return path


@pytest.fixture
def copy(digits: Path, tmp_path: Path) -> Path:
    """A run directory that a test may change."""
    return Path(shutil.copytree(digits, tmp_path / "run"))


# verify


@pytest.mark.parametrize("backend", ["onnx", "c"])
def test_exported_network_has_no_mismatch(backend: str, digits: Path, run: Run) -> None:
    if backend == "onnx":
        pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    elif not HAS_COMPILER:
        pytest.skip("no C compiler is installed.")
    code, out, err = run("verify", digits, "--backends", backend, "--limit", 60)
    assert (code, err) == (0, "")
    assert "mismatches on 60 examples, fold 3 of digits" in " ".join(out.split())
    for name in ("integer network", backend):
        assert f"{name}: 0 mismatches of {60 * (3 * WIDTH + 1):,} numbers" in out


def test_last_layer_in_int8_is_compared_with_the_network_that_has_it(
    digits: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    flags = ["--last-layer", "int8", "--backends"]
    code, out, err = run("verify", digits, *flags, "onnx", "--limit", 60)
    assert (code, err) == (0, "")
    for name in ("integer network", "onnx"):  # the scores of integer weights are compared too
        assert f"{name}: 0 mismatches of {60 * (3 * WIDTH + 10 + 1):,} numbers" in out
    assert "the last layer in int8" in out
    assert "classifier.scores" in out
    # Classes that a coarse last layer changes are no mismatches.
    monkeypatch.setattr(last_layer, "INT8", Stair.sign())
    code, out, _ = run("verify", digits, *flags, "none")
    assert (code, "integer network: 0 mismatches" in out) == (0, True)
    # By hand: the signs of the weights, times one number for each class.
    net, dataset = trained_network(digits, load("digits")).eval(), load("digits").sample(300)
    x = (dataset.x[split(dataset, 3, 5)[1]].float() - 8) / 8
    classifier = net.get_submodule("classifier")
    assert isinstance(classifier, torch.nn.Linear)
    with torch.no_grad():
        classes = net(x).argmax(1)
        signs = torch.where(classifier.weight >= 0, 1.0, -1.0)
        fitted = fit_quantum(classifier.weight, Stair.sign(), per_channel=True)
        classifier.weight.copy_(signs * torch.tensor(fitted.quantum)[:, None])
        changed = int((net(x).argmax(1) != classes).sum())
    assert changed > 0
    assert f"{changed} of {len(x)} classes differ from the trained network's" in out


def test_sample_is_compared_before_the_rest(
    digits: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("softstair.cli.verify.SAMPLE", 10)
    dataset = load("digits").sample(300)
    x = dataset.x[split(dataset, 3, 5)[1]]
    features = IntegerNetwork.features
    seen: list[torch.Tensor] = []
    wrong_at = -1

    def spoiled(self: IntegerNetwork, given: torch.Tensor) -> dict[str, torch.Tensor]:
        seen.append(given)
        layers = features(self, given)
        if wrong_at >= 0:
            layers[self.stairs[1]][(given == x[wrong_at]).flatten(1).all(1), 40] += 1
        return layers

    monkeypatch.setattr(IntegerNetwork, "features", spoiled)
    code, out, err = run("verify", digits, "--backends", "none")
    sample = "0 mismatches in a sample of 10 examples; comparing the other 50.\n"
    assert (code, err) == (0, f"softstair verify: {sample}")
    assert f"integer network: 0 mismatches of {60 * (3 * WIDTH + 1):,} numbers" in out
    assert torch.equal(seen[0], x[::6])
    assert sorted(torch.cat(seen).flatten(1).tolist()) == sorted(x.flatten(1).tolist())
    wrong_at = 54  # in the sample
    code, out, err = run("verify", digits, "--backends", "none", "--last-layer", "int8")
    assert (code, err, len(seen)) == (1, "", 3)
    assert "mismatches on a sample of 10 of 60 examples" in " ".join(out.split())
    assert "the first in features.6, example 54 at (40,): " in " ".join(out.split())
    assert " of 10 classes differ" in out
    wrong_at = 55
    code, out, err = run("verify", digits, "--backends", "none")
    assert (code, len(seen)) == (1, 5)
    assert "mismatches on 60 examples" in " ".join(out.split())
    assert "the first in features.6, example 55 at (40,): " in " ".join(out.split())


# export


def test_export_to_onnx(digits: Path, tmp_path: Path, run: Run) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    code, out, err = run("export", digits, "--out", "digits.onnx")
    assert (code, err) == (0, "")
    assert f"{64 * WIDTH:,}" in out
    session = runtime.InferenceSession("digits.onnx", providers=["CPUExecutionProvider"])
    scores, classes = session.run(["scores", "class"], {"bytes": load("digits").x[:9].numpy()})
    assert scores.shape == (9, 10)
    assert (scores.argmax(1) == classes).all()


@pytest.mark.parametrize("cpu", ["x86", "arm"])
def test_export_for_a_cpu_and_a_runtime(cpu: str, digits: Path, run: Run) -> None:
    onnx = pytest.importorskip("onnx", reason="needs onnx")
    for flags, runtime in (([], "onnxruntime"), (["--runtime", "openvino"], "openvino")):
        code, out, err = run("export", digits, "--cpu", cpu, *flags, "--out", "digits.onnx")
        assert (code, err) == (0, "")
        assert f"for cpu={cpu}, runtime={runtime}\n" in out
        written = {each.key: each.value for each in onnx.load("digits.onnx").metadata_props}
        assert (written["cpu"], written["runtime"]) == (cpu, runtime)
    code, out, _ = run("export", digits, "--cpu", cpu, "--to", "c", "--out", "c")
    assert code == 0
    assert f"for cpu={cpu}\n" in out
    assert f" for {cpu}." in Path("c/network.h").read_text()
    assert "--cpu must be left out" in run.rejected("export", digits, "--cpu", cpu, "--to", "qonnx")
    refused = run.rejected("export", digits, "--runtime", "openvino", "--to", "c")
    assert "--runtime must be left out" in refused


def test_export_to_c_replaces_only_an_export(digits: Path, tmp_path: Path, run: Run) -> None:
    words = ["export", digits, "--to", "c", "--out"]
    code, out, _ = run(*words, tmp_path / "c")
    assert (code, "in all" in out) == (0, True)
    assert (tmp_path / "c" / "network.c").is_file()
    code, out, _ = run(*words, tmp_path / "c", "--last-layer", "int8")
    assert code == 0
    assert re.search(r"classifier +480 .* bytes multiplied, 8 bits a weight", out)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    assert "--out must be" in run.rejected(*words, tmp_path / "mine")
    assert "cannot use" in run.rejected(*words, tmp_path / "mine" / "thesis.tex" / "c")


def test_export_to_c_refuses_what_does_not_fit(copy: Path, run: Run) -> None:
    flags = ["--to", "c", "--fit-flash", 5_000, "--fit-ram", 50]
    error = run.rejected("export", copy, *flags)
    for words in ("--fit-flash allows 5,000", "--last-layer int8", "--fit-ram allows 50 bytes"):
        assert words in error, words
    assert not (copy / "c").exists()


# Both


@pytest.mark.nightly
def test_speech_network_is_exact_when_exported(tmp_path: Path, run: Run) -> None:
    pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    speech_tree.make_folders(tmp_path / "speech_commands_v0.02")
    stairs = "--weights int4 --weight-quantum 0.07 --features uint4 --feature-quantum 0.07"
    words = f"train --data speech {stairs} --epochs 2 --batch 16 --device cpu --out run"
    folder = ["--data-dir", tmp_path]
    assert run(*words.split(), *folder)[0] == 0
    file = Path("run/network.safetensors")
    assert (zoo.about(file).mean, zoo.about(file).std) == (128.0, 16.0)
    for path, backends in ((file, "none"), ("run", "onnx,c" if HAS_COMPILER else "onnx")):
        code, out, err = run("verify", path, "--backends", backends, *folder)
        assert (code, err) == (0, "")
        assert out.count(": 0 mismatches of") == 1 + len({*backends.split(",")} - {"none"})
    assert run("export", "run", "--out", "net.onnx")[0] == 0


def test_an_unfinished_run_is_refused(copy: Path, run: Run) -> None:
    (copy / "network.safetensors").unlink()
    for verb in ("verify", "export"):
        assert "holds no finished run" in run.rejected(verb, copy)


OWN = """
from torch import nn

from softstair.data import load


def build(classes, shape):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(),
        nn.Linear(16, classes),
    )


def data():
    return load("digits").sample(300)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's module in the current directory."""
    (tmp_path / "tested_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "tested_own", None)
    monkeypatch.delitem(sys.modules, "tested_own")
    return "tested_own"


def test_run_with_own_model_and_data_is_exported_by_its_flags(own: str, run: Run) -> None:
    model, data = f"{own}:build", f"{own}:data"
    train(replace(RECIPE, model=model, data=data), "mine", device="cpu")
    assert f"{model!r}: pass --model" in run.rejected("export", "mine")
    assert f"{data!r}: pass --data" in run.rejected("verify", "mine", "--model", model)
    flags = ["--model", model, "--data", data]
    code, out, err = run("verify", "mine", *flags, "--backends", "none")
    assert (code, err) == (0, "")
    assert f"integer network: 0 mismatches of {60 * 17:,} numbers" in out
    assert run("export", "mine", "--model", model, "--to", "qonnx")[0] == 0
    assert Path("mine/network.qonnx").is_file()
    assert "does not fit" in run.rejected("export", "mine", "--model", "digits")


def test_a_network_of_an_own_loop_is_exported_and_verified(own: str, run: Run) -> None:
    build = importlib.import_module(own).build
    net = ss.quantise(build(10, (1, 8, 8)), "ternary", skip="4").eval()
    digits = {"classes": load("digits").classes, "mean": 3, "std": 4.0, "data": "digits"}
    zoo.save(net, "net.safetensors", f"{own}:build", (1, 8, 8), **digits)
    flags = ["net.safetensors", "--model", f"{own}:build"]
    code, out, err = run("verify", *flags, "--backends", "none", "--limit", 20)
    assert (code, err) == (0, "")
    assert "integer network: 0 mismatches of 340 numbers" in out
    assert "20 examples, all examples of digits" in " ".join(out.split())
    code, out, err = run("export", *flags, "--to", "c", "--out", "c")
    assert (code, err) == (0, "")
    integer = ss.deploy.integerise(net, (1, 8, 8), 3, 4.0)
    ss.deploy.c.write(integer, Path("by-hand"))
    assert Path("c/network_weights.h").read_text() == Path("by-hand/network_weights.h").read_text()


def test_errors(run: Run) -> None:
    recipe = Recipe(limit=200, epochs=1, batch=32)
    train(replace(recipe, weights="float", features="float"), "float", device="cpu")
    not_integer = replace(load("digits"), mean=8.3)
    train(recipe, "mean", dataset=not_integer, device="cpu")
    Path("empty").mkdir()
    Path("folds").mkdir()
    Path("folds/fold-0").symlink_to(Path("float").absolute())
    Path("junk").write_bytes(b"\0" * 100)
    for words, message in (
        ("verify mean", "--integer-input"),
        ("export mean", "--integer-input"),
        ("export float", "float"),
        ("export empty", "holds no finished run"),
        ("verify folds", "such as 'folds/fold-0'"),
        ("export junk", "junk"),
        ("export nowhere", "nowhere"),
        ("verify", "RUN is missing"),
        ("verify mean --backends java", "--backends"),
        ("verify mean --limit 0", "--limit"),
        ("export mean --to java", "--to"),
    ):
        assert message in run.rejected(*words.split())
