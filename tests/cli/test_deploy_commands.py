"""``softstair export`` and ``softstair verify``, from a run to a file and back."""

import importlib
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

import softstair as ss
from data import speech_tree
from helpers.commands import Run
from helpers.narrow import WIDTH
from softstair import zoo
from softstair.data import load, split
from softstair.deploy import c, comparison, processes
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.loaders import Running
from softstair.train import Recipe, fit

pytestmark = pytest.mark.usefixtures("plain_terminal", "narrow_digits")

RECIPE = Recipe.from_flat(limit=300, epochs=1, batch=32, integer_input=True, fold=3)
HAS_COMPILER = shutil.which("cc") is not None


@pytest.fixture(scope="module")
def digits(narrow_digits: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "digits"
    fit(RECIPE, path, device="cpu")
    return path


@pytest.fixture
def copy(digits: Path, tmp_path: Path) -> Path:
    """A run directory that a test may change."""
    return Path(shutil.copytree(digits, tmp_path / "run"))


# verify


@pytest.mark.parametrize("backend", ["onnxruntime", "c"])
def test_exported_network_has_no_mismatch(backend: str, digits: Path, run: Run) -> None:
    if backend == "onnx":
        pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    elif not HAS_COMPILER:
        pytest.skip("no C compiler is installed.")
    code, out, err = run("verify", digits, "--runtimes", backend, "--limit", 60)
    assert (code, err) == (0, "")
    assert "differences on 60 examples, fold 3 of digits" in " ".join(out.split())
    least = 60 * (3 * WIDTH + 10 + 1)  # the stairs, the scores and the class
    found = re.search(rf"{backend} +│ +([0-9,]+) │ +0 │ +([0-9.]+) │", out)
    assert found is not None
    assert int(found[1].replace(",", "")) >= least
    assert 0 < float(found[2]) < 100
    assert f"eval(): 0 of {60 * 3 * WIDTH:,} levels differ" in out


def test_levels_and_classes_that_differ_from_eval_are_facts(copy: Path, run: Run) -> None:
    """They are counted, and change no exit code: the frozen network is the definition."""
    file = copy / "frozen.safetensors"
    frozen = ss.load_frozen(file)
    frozen.node(frozen.stairs[0]).tensors["thresholds"].add_(1_000_000)  # all have one level
    frozen.save(file)
    code, out, err = run("verify", copy, "--runtimes", "none")
    assert (code, err) == (0, "")
    dataset = load("digits").sample(300)
    part = split(dataset, 3, 5)[1]
    x, y = dataset.x[part], dataset.y[part]
    with torch.no_grad():
        trained = zoo.load(copy / "network.safetensors")((x.float() - 8) / 8).argmax(1)
    actual = ss.load_frozen(file).predict(x)
    right = [float((classes == y).double().mean()) for classes in (trained, actual)]
    changed = int((trained != actual).sum())
    assert changed > 0
    accuracies = f"{right[0]:.2%} trained, {right[1]:.2%} frozen"
    assert f"accuracy: {accuracies}; {changed} of 60 classes differ" in out
    assert "eval(): 0 of" not in out
    assert re.search(r"^  features\S+: [0-9,]+ of [0-9,]+ levels, by at most ", out, re.MULTILINE)


def test_runtimes_that_are_absent_are_named(
    digits: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "find_spec", lambda name: None)
    monkeypatch.setenv("SOFTSTAIR_RUNTIMES", "nowhere")
    error = run.rejected("verify", digits, "--runtimes", "c,openvino")
    assert "openvino is not installed" in error
    monkeypatch.setattr("softstair.cli.verify.RUNTIMES", ("openvino",))
    code, out, _ = run("verify", digits, "--runtimes", "all")
    assert code == 0
    assert "openvino: left out, openvino is not installed" in out
    assert "--runtimes must be" in run.rejected("verify", digits, "--runtimes", "tensorrt")


def test_sample_is_compared_before_the_rest(
    digits: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("softstair.cli.verify.SAMPLE", 10)
    dataset = load("digits").sample(300)
    x = dataset.x[split(dataset, 3, 5)[1]]
    stair = ss.load_frozen(digits / "frozen.safetensors").stairs[1]
    seen: list[torch.Tensor] = []
    wrong_at = -1

    def runner(frozen: FrozenNetwork, _: Path, runtime: str) -> Running:
        def spoiled(given: torch.Tensor) -> dict[str, torch.Tensor]:
            seen.append(given)
            results = comparison.results_of(frozen, given)
            if wrong_at >= 0:
                results[stair][(given == x[wrong_at]).flatten(1).all(1), 40] += 1
            return results

        return Running(spoiled, lambda _: 0.5)

    monkeypatch.setattr(comparison, "runner", runner)
    code, out, err = run("verify", digits, "--runtimes", "c")
    sample = "0 mismatches in a sample of 10 examples; comparing the other 50.\n"
    assert (code, err) == (0, f"softstair verify: {sample}")
    assert re.search(r"c +│ +[0-9,]+ │ +0 │ 0.500 │", out)
    assert torch.equal(seen[0], x[::6])
    assert sorted(torch.cat(seen).flatten(1).tolist()) == sorted(x.flatten(1).tolist())
    wrong_at = 54  # in the sample
    code, out, err = run("verify", digits, "--runtimes", "c")
    assert (code, err, len(seen)) == (1, "", 3)
    assert "differences on a sample of 10 of 60 examples" in " ".join(out.split())
    assert "c: 1 mismatches of" in out
    assert "the first in features.6, example 54 at (40,): " in " ".join(out.split())
    wrong_at = 55
    code, out, err = run("verify", digits, "--runtimes", "c")
    assert (code, len(seen)) == (1, 5)
    assert "differences on 60 examples" in " ".join(out.split())
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
    frozen = ss.load_frozen(digits / "frozen.safetensors")
    assert scores.tolist() == frozen(load("digits").x[:9]).tolist()
    assert classes.tolist() == frozen.predict(load("digits").x[:9]).tolist()
    assert re.search("compared on 32 random inputs: 0 mismatches of [0-9,]+ numbers", out)


def test_export_of_a_frozen_network_and_of_one_that_is_frozen_now(digits: Path, run: Run) -> None:
    written = {}
    for name, words in {
        "run": [digits],
        "frozen": [digits / "frozen.safetensors"],
        "now": [digits / "network.safetensors"],
        "double": [digits, "--rounding", "double"],
    }.items():
        code, out, err = run("export", *words, "--to", "qonnx", "--out", f"{name}.onnx")
        assert (code, err) == (0, "")
        assert ("nothing was compared" in out) == (name in ("now", "double")), name
        assert "compared on 32 random inputs: not run" in out
        written[name] = Path(f"{name}.onnx").read_bytes()
    assert len(set(written.values())) == 1  # thresholds alone, and an INT8 last layer
    frozen = digits / "frozen.safetensors"
    assert "--rounding must be left out" in run.rejected("export", frozen, "--rounding", "once")
    assert "network.safetensors" in run.rejected("verify", frozen)


def test_export_without_a_check_needs_no_compiler(
    digits: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "no-such-compiler" in run.rejected("export", digits, "--to", "c", "--out", "c")
    assert not Path("c").exists()
    code, out, _ = run("export", digits, "--to", "c", "--out", "c", "--no-check")
    assert (code, "not run" in out, Path("c/network.c").is_file()) == (0, True, True)


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
    code, out, _ = run(*words, tmp_path / "c")
    assert code == 0
    assert re.search(r"classifier +480 .* (bytes|panels) multiplied, 8 bits a weight", out)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    assert "--out must be" in run.rejected(*words, tmp_path / "mine")
    assert "cannot use" in run.rejected(*words, tmp_path / "mine" / "thesis.tex" / "c")


def test_export_to_c_refuses_what_does_not_fit(copy: Path, run: Run) -> None:
    for flag, limit in (("--fit-flash", "2,000"), ("--fit-ram", "50")):
        error = run.rejected(
            "export", copy, "--to", "c", "--cpu", "arm", flag, limit.replace(",", "")
        )
        assert f"{flag} allows {limit} bytes" in error
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
    for path, backends in (
        (file, "none"),
        ("run", "onnxruntime,c" if HAS_COMPILER else "onnxruntime"),
    ):
        code, out, err = run("verify", path, "--runtimes", backends, *folder)
        assert (code, err) == (0, "")
        assert out.count("│           0 │") == len({*backends.split(",")} - {"none"})
        assert "eval(): 0 of " in out
    assert run("export", "run", "--out", "net.onnx")[0] == 0


def test_an_unfinished_run_is_refused(copy: Path, run: Run) -> None:
    for file in copy.glob("*.safetensors"):
        file.unlink()
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
    fit(RECIPE.replace(model=model, data=data), "mine", device="cpu")
    assert f"{model!r}: pass --model" in run.rejected("export", "mine/network.safetensors")
    assert run("export", "mine", "--to", "qonnx", "--out", "frozen.onnx")[0] == 0
    assert f"{data!r}: pass --data" in run.rejected("verify", "mine", "--model", model)
    flags = ["--model", model, "--data", data]
    code, out, err = run("verify", "mine", *flags, "--runtimes", "none")
    assert (code, err) == (0, "")
    assert f"eval(): 0 of {60 * 16:,} levels differ" in out
    file = "mine/network.safetensors"
    assert run("export", file, "--model", model, "--to", "qonnx")[0] == 0
    assert Path("network-network.qonnx").is_file()
    assert "does not fit" in run.rejected("export", file, "--model", "digits")


def test_a_network_of_an_own_loop_is_exported_and_verified(own: str, run: Run) -> None:
    build = importlib.import_module(own).build
    net = ss.quantise(build(10, (1, 8, 8)), "ternary", skip="4").eval()
    digits = {"classes": load("digits").classes, "mean": 3, "std": 4.0, "data": "digits"}
    zoo.save(net, "net.safetensors", f"{own}:build", (1, 8, 8), **digits)
    flags = ["net.safetensors", "--model", f"{own}:build"]
    code, out, err = run("verify", *flags, "--runtimes", "none", "--limit", 20)
    assert (code, err) == (0, "")
    assert "eval(): 0 of 320 levels differ" in out
    assert "20 examples, all examples of digits" in " ".join(out.split())
    code, out, err = run("export", *flags, "--to", "c", "--out", "c")
    assert (code, err) == (0, "")
    frozen = ss.freeze(net, (1, 8, 8), zero=3, scale=4.0, classes=digits["classes"])
    c.write(frozen, Path("by-hand"))
    assert Path("c/network_weights.h").read_text() == Path("by-hand/network_weights.h").read_text()


def test_errors(run: Run) -> None:
    recipe = Recipe.from_flat(limit=200, epochs=1, batch=32)
    fit(recipe.replace(weights="float", features="float"), "float", device="cpu")
    Path("empty").mkdir()
    Path("folds").mkdir()
    Path("folds/fold-0").symlink_to(Path("float").absolute())
    Path("junk").write_bytes(b"\0" * 100)
    for words, message in (
        ("export float", "float"),
        ("export empty", "holds no finished run"),
        ("verify folds", "such as 'folds/fold-0'"),
        ("export junk", "junk"),
        ("export nowhere", "nowhere"),
        ("verify", "RUN is missing"),
        ("verify float --runtimes java", "runtimes"),
        ("verify float --limit 0", "--limit"),
        ("export float --to java", "--to"),
    ):
        assert message in run.rejected(*words.split())
