"""``softstair train``: flags, errors, what it prints and writes, folds, resuming, own code."""

import json
import re
import shlex
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from helpers.commands import Run
from helpers.terminal import Terminal, without_escapes
from softstair.cli import main
from softstair.cli._args import parse, spelling
from softstair.cli.train import Command, next_free
from softstair.data import load
from softstair.train import PRESETS, Interrupted, trained_network

pytestmark = pytest.mark.usefixtures("plain_terminal", "narrow_digits")

SHORT = "--epochs 2 --limit 150 --batch 24".split()
MODEL = """
from pathlib import Path
from torch import nn

def build(classes):
    Path("called").touch()
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, classes)
    )
"""


@pytest.fixture(autouse=True)
def _draw_where_it_is_looked_at(request: pytest.FixtureRequest) -> None:
    if request.node.originalname not in ("test_output_to_a_file", "test_every_fold"):
        request.getfixturevalue("blank_picture")


def parsed(words: str | list[str]) -> Command:
    return parse(Command, words.split() if isinstance(words, str) else words, "softstair train")


def metrics(out: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]


# Flags


def described(text: str) -> dict[str, str]:
    """Return the help text of each flag."""
    parts = re.split(r"(?m)^  (?:-h, )?(--[a-z][a-z0-9-]*)", text)
    return {
        flag: " ".join(words.split()) for flag, words in zip(parts[1::2], parts[2::2], strict=True)
    }


@pytest.mark.quick
def test_help_shows_the_values_of_a_preset(run: Run) -> None:
    for name, recipe in PRESETS.items():
        texts = described(run("train", f"--preset={name}", "-h")[1])
        for field in ("period", "epochs", "drop", "data", "batch", "weights", "update"):
            value = recipe[field]
            assert value is None or f"(default: {value})" in texts[spelling(field)]
    words = ["--preset", "paper-cifar10", "--epochs", "100", "--help"]
    texts = described(run("train", *words)[1])
    assert "(default: 10.0)" in texts["--period"]
    assert "(default: 80.0)" in texts["--lr-drop-epoch"]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--preset paper-cifar10 --epochs 100", {"epochs": 100, "period": 10.0, "drop": 80.0}),
        ("--preset paper-speech --epochs 60 --period 7", {"period": 7.0, "drop": 50.0}),
        ("--preset paper-svhn --lr-drop-epoch None", {"drop": None, "period": 50.0}),
        (
            "--epochs 80 --anneal-from 25% --period None",
            {"anneal_from": 20.0, "period": None, "drop": 64.0},
        ),
        ("--anneal-from 12.5 --period 2", {"anneal_from": 12.5}),
        ("--no-static-mean --static-std", {"static_mean": False, "anneal_from": 10.0}),
        ("--static-std", {"static_std": True, "anneal_from": 0.0}),
        ("--static-std --anneal-from 5", {"static_std": True, "anneal_from": 5.0}),
        ("", {"data": "digits", "model": "auto", "weights": "ternary"}),
    ],
)
def test_flags_make_the_recipe(words: str, expected: dict[str, Any]) -> None:
    recipe = parsed(words).recipe
    assert {name: recipe[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        ("--epochs 0", ["--epochs must be an integer from 1", "0 was given"]),
        ("--fold 5", ["fold", "5"]),
        ("--anneal-from half", ["--anneal-from must be", "'half' was given"]),
        ("--anneal-from 50", ["--anneal-from must be below 19.4", "but 50 was given"]),
        ("--epochs 40 --anneal-from 50% --period 9", ["--period must be at most 6.26667 for 3 "]),
        ("--limit 40", ["batch", "32", "64"]),
        ("--device toaster", ["device", "'toaster'"]),
        ("--model vgg8", ["vgg8", "32"]),
        ("--data cifar10", ["softstair data fetch cifar10"]),
        ("--resume", ["--resume needs --out"]),
        ("--resume --out absent", ["--resume needs a run to continue", "'absent' holds none"]),
        ("--resume --every-fold --out absent", ["'absent' holds none"]),
        ("--every-fold --fold 2", ["--every-fold and --fold 2 exclude each other"]),
        ("--jobs 2", ["--jobs 2 needs --every-fold"]),
        ("--threads 0", ["--threads must be an integer from 1 to 1024"]),
        ("--skip *", ["quantise"]),
        ("--noise-schedule mine", ["train: --noise-schedule must be package.module:function"]),
        ("--model absent:net", ["train: --model must be in a module that can be imported"]),
    ],
)
def test_errors(words: str, messages: list[str], run: Run) -> None:
    error = run.rejected("train", *words.split())
    assert all(message in error for message in messages), error
    assert not list(Path.cwd().glob("runs/*")), "a directory that nobody asked for"


# What is printed and written


@pytest.mark.parametrize("is_float", [False, True])
def test_output_to_a_file(is_float: bool, run: Run) -> None:
    from matplotlib.image import imread

    folder = "-[bold] :cat: b[/c] ünï %s {x}/run"  # printed as it is
    flags = ["--weights", "float", "--features", "float"] if is_float else []
    code, out, err = run("train", *SHORT, *flags, f"--out={folder}")
    assert code == 0
    assert "\x1b" not in out + err
    notes = [line for line in err.splitlines() if "train: warning: " not in line]
    said = ["softstair train: freezes"]
    assert [note.partition(";")[0] for note in notes] == ([] if is_float else said)
    network = Path(folder, "network.txt").read_text()
    assert all(note.partition(": ")[2].rstrip(".") in network for note in notes)
    summary = json.loads(Path(folder, "summary.json").read_text())
    for name in ("valid_accuracy", "best_valid_accuracy"):
        assert f"{summary[name]:.2%}" in out
    for text in ("none", "examples/s", "validation accuracy", f"run: {folder}"):
        assert text in out
    assert ("noise of layer 1" in out) == (not is_float)
    assert "epoch 1/2" not in out
    assert imread(f"{folder}/picture.png")[..., :3].std() > 0.05
    assert not [path for path in Path(folder).iterdir() if path.name in ("events", ".part")]


def test_warnings_go_to_stderr_once(run: Run) -> None:
    flags = ["--anneal-from", "0", "--period", "9", "--feature-quantum", "1e4"]
    code, out, err = run("train", *SHORT, *flags)
    assert (code, "warning" in out) == (0, False)
    assert "run: runs/digits-1" in out
    layers = re.findall(r"inputs of (\S+) lie at one level", err)
    assert layers
    assert len(layers) == len(set(layers))
    assert next_free(Path("runs"), "digits") == Path("runs/digits-2")


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")  # otherwise rich asks the process's own terminal
    terminal = Terminal(80)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal.stream)
        code = main("train --epochs 3 --limit 200 --batch 32 --out x".split())
    shown = terminal.close()
    plain = without_escapes(shown)
    assert code == 0
    for text in ("epoch 1/3", "epoch 3/3", "/s"):
        assert text in plain, text
    assert re.search(r"[·▁▂▃▄▅▆▇█]{2,} [0-3]/[23]", plain), "annealed layers"
    for line in metrics("x"):
        assert f"loss {line['train_loss']:.3f}" in plain
    assert re.search(r"\d+:\d\d:\d\d|-:--:--", plain), "time left"
    assert "…" not in plain, "nothing is cut off"
    assert "\x1b[?25h" in shown, "the cursor is visible again"


# Folds and resuming


@pytest.mark.nightly
def test_every_fold(run: Run) -> None:
    words = ["train", *SHORT, "--folds", "3"]
    # In this process: worker processes do not have the small network of the fixture.
    code, out, _ = run(*words, "--every-fold", "--jobs", 1, "--out", "x")
    assert code == 0
    paths = [Path(f"x/fold-{fold}") for fold in range(3)]
    summaries = [json.loads((path / "summary.json").read_text()) for path in paths]
    scores = torch.tensor([summary["valid_accuracy"] for summary in summaries], dtype=torch.float64)
    half = stats.t.ppf(0.975, 2) * float(scores.std()) / 3**0.5
    result = f"{float(scores.mean()):.2%} ± {half:.2%}"
    assert result in out
    assert Path("x/picture.png").exists()
    assert len({(path / "metrics.jsonl").read_bytes() for path in paths}) == 3
    # A fold by itself is the same.
    assert run(*words, "--fold", 1, "--out", "y")[0] == 0
    assert Path("y/metrics.jsonl").read_bytes() == (paths[1] / "metrics.jsonl").read_bytes()
    assert "--resume" in run.rejected(*words, "--every-fold", "--out", "x")
    # Folds of two versions of the data are not trained.
    (paths[2] / "summary.json").unlink()
    config = paths[0] / "config.json"
    config.write_text(config.read_text().replace("scikit-learn digits", "other digits"))
    resume = ["train", "--resume", "--every-fold", "--out", "x"]
    assert "'other digits'" in run.rejected(*resume)


def test_resume_takes_the_recipe_of_the_run(run: Run) -> None:
    words = ["train", *SHORT, "--seed", "7", "--noise", "normal", "--skip", "features.4"]
    assert run(*words, "--out", "x")[0] == 0
    before = Path("x/metrics.jsonl").read_bytes()
    Path("x/summary.json").unlink()
    for again in (["train"], ["train", "--seed", 7], words):
        assert run(*again, "--resume", "--out=x")[0] == 0
    assert Path("x/metrics.jsonl").read_bytes() == before
    for flag, name in {"--seed 8": "seed", "--preset paper-svhn": "data"}.items():
        assert name in run.rejected("train", "--resume", *flag.split(), "--out", "x")
    Path("x/config.json").write_bytes(b"")
    assert "config.json" in run.rejected("train", "--resume", "--out", "x")


def stop(*_: object) -> None:
    raise KeyboardInterrupt


def test_all_examples_with_a_start_and_a_teacher_that_are_trained_first(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("tested_digits.py").write_text(
        "from dataclasses import replace\n"
        "from softstair.data import load as named\n"
        "def load(root=None):\n"
        "    data = named('digits')\n"
        "    return replace(data, test_x=data.x[:60], test_y=data.y[:60])\n"
    )
    own = ["--data", "tested_digits:load", "--model", "digits"]
    flags = ["--fold", "all", "--init-from", "auto", "--teacher", "auto", "--first-layer", "int8"]
    code, out, _ = run("train", *SHORT, *own, *flags, "--out", "r")
    assert code == 0
    assert "validation" not in out
    assert "training accuracy" in out
    assert re.search(r"epochs: [0-9.]+% test accuracy", out)
    assert json.loads(Path("r/start/summary.json").read_text())["epochs"] == 1
    assert "no test set" in run.rejected("train", *SHORT, "--fold", "all", "--out", "s")
    assert "exclude each other" in run.rejected("train", "--fold", "all", "--every-fold")
    # Stopped before the start was finished: the same command resumes it.
    Path("r/start/summary.json").unlink()
    shutil.copytree("r/start", "t/start")
    assert "holds none" in run.rejected("train", "--resume", "--out", "t")
    with monkeypatch.context() as patch:
        patch.setattr(import_module("softstair.train.fit"), "Step", stop)
        code, _, err = run("train", *SHORT, *own, *flags, "--out", "t")
    assert (code, "continue with" in err, "--resume --out t" in err) == (130, True, True)
    assert run("train", *SHORT, *own, *flags, "--resume", "--out", "t")[0] == 0
    assert json.loads(Path("t/start/summary.json").read_text())["epochs"] == 1


OWN = """
import math
import torch
from softstair import Noise, ste

class Laplace(Noise):
    def cdf(self, z):
        half = 0.5 * torch.exp(-math.sqrt(2) * z.abs())
        return torch.where(z < 0, half, 1 - half)

    def pdf(self, z):
        return torch.exp(-math.sqrt(2) * z.abs()) / math.sqrt(2)

class Halving:
    def __init__(self, layers, epochs, schedule):
        assert (layers, epochs, schedule.std0) == (3, 2, 0.25)

    def __call__(self, layer, t):
        return 0.0, 0.25 * 0.5 ** int(t)

def estimator():
    return ste.sigmoid()

def vector():
    return torch.nn.CrossEntropyLoss(reduction="none")
"""


def test_noise_schedule_and_loss_of_ones_own(run: Run) -> None:
    Path("own.py").write_text(OWN)
    own = "--noise own:Laplace --noise-schedule own:Halving --loss torch.nn:MultiMarginLoss".split()
    words = ["train", *SHORT, *own, "--std0", "0.25", "--label-smoothing", "0"]
    assert run(*words, "--out", "r")[0] == 0
    assert "Laplace()" in Path("r/network.txt").read_text()
    stds = [[std for _, std in line["noise"]] for line in metrics("r")]
    assert stds == [[0.25] * 3, [0.125] * 3]
    assert metrics("r")[0]["train_loss"] < 0.9  # ten classes: cross entropy begins at 2.3
    # Loading calls no code; training goes on with it.
    Path("own.py").unlink()
    sys.modules.pop("own")
    assert not trained_network("r", load("digits").sample(150)).training
    Path("own.py").write_text(OWN)
    Path("r/summary.json").unlink()
    assert run("train", "--resume", "--out", "r")[0] == 0
    assert "own" in sys.modules
    assert "one number" in run.rejected(*words, "--loss", "own:vector", "--out", "s")


def test_estimator_of_ones_own(run: Run) -> None:
    Path("own.py").write_text(OWN)
    words = ["train", *SHORT, "--noise", "own:estimator", "--std0", "0.45"]
    assert run(*words, "--static-std", "--epochs", 1, "--out", "r")[0] == 0
    assert "--static-std must be True" in run.rejected(*words)  # its module is compiled by now
    assert "Logistic()" in Path("r/network.txt").read_text()


def test_interrupt_before_anything_is_saved_names_the_command(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        assert not [*Path("runs/digits-1").glob("config.json")]
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("softstair.train.fit"), "load", load)
    for words in ([], ["--out", "a b"]):
        monkeypatch.setattr(sys, "argv", ["softstair", "train", *SHORT, *words])
        code, out, err = run("train", *SHORT, *words)
        again = f"begin again with {shlex.join(['softstair', 'train', *SHORT, *words])}"
        message = f"softstair train: interrupted before anything was saved; {again}\n"
        assert (code, out, err) == (130, "", message)
    # A run directory that nobody asked for is not left behind.
    assert not [path for path in Path().rglob("*") if path.name != "runs"]


def test_interrupt_after_the_training_names_the_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("softstair.cli.train._show", draw)
    code, _, err = run("train", *SHORT, "--out", "r")
    assert (code, Path("r/summary.json").exists()) == (130, True)
    assert "stopped by SIGINT; continue with softstair train --resume --out r" in err
    assert "before anything was saved" not in err


def test_folds_continue_from_whichever_was_begun(run: Run) -> None:
    Path("mine.py").write_text(MODEL)
    own = ["--model", "mine:build"]
    folds = ["--every-fold", "--jobs", "1", "--out", "x"]
    words = ["train", *SHORT, "--epochs", 1, "--folds", 3, "--seed", 3]
    assert run(*words, *own, *folds)[0] == 0
    before = [Path(f"x/fold-{fold}/metrics.jsonl").read_bytes() for fold in range(3)]
    shutil.rmtree("x/fold-0")
    Path("x/fold-2/summary.json").unlink()
    resume = ["train", "--resume", *folds]
    shutil.copytree("x/fold-1", "x/fold-0")  # finished, but not what its name says
    assert "fold" in run.rejected(*resume)
    shutil.rmtree("x/fold-0")
    assert run(*resume)[0] == 0
    assert [Path(f"x/fold-{fold}/metrics.jsonl").read_bytes() for fold in range(3)] == before
    # Folds and a single run are not mixed up.
    assert "--every-fold" in run.rejected("train", *SHORT, "--resume", "--out", "x")
    Path("x/fold-1").rename("one")
    words = ["train", *SHORT, "--resume", "--every-fold", "--out", "one"]
    assert "holds one run and no folds" in run.rejected(*words)


def test_command_that_continues_has_all_that_the_run_needs(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise Interrupted(15)

    monkeypatch.setattr(import_module("softstair.train.fit"), "Step", stop)
    flags = ["--data-dir", "my data", "--device", "cpu", "--out", "my run"]
    code, out, err = run("train", *SHORT, *flags)
    assert (code, out, err.count("\n")) == (143, "", 1)
    command = parsed(shlex.split(err[err.index("softstair train --resume") :])[2:])
    assert (command.resume, command.device) == (True, "cpu")
    assert (command.out, command.data_dir) == (Path("my run"), Path("my data"))
    assert command.recipe.data.limit == 150
    words = ["train", *SHORT, "--every-fold", "--jobs", "1", "--out", "all"]
    code, _, err = run(*words)
    assert code == 143
    assert shlex.split(err)[-4:] == ["all", "--every-fold", "--jobs", "1"]
