"""Several folds at a time are the folds one after another; whoever is killed, they go on."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from io import StringIO
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch
from short import is_sentence, metrics_of, summary_of, uninterrupted

from softstair import cli
from softstair.cli._console import Console
from softstair.cli._train_progress import Progress
from softstair.cli.train import parse
from softstair.train import train
from softstair.train.pool import worker_count
from softstair.train.records import read_json, recipe_of
from softstair.train.worker import START

OWN = """
import torch
from torch import nn
from softstair.data import Dataset
from softstair.data.folds import split

def load():
    numbers = torch.Generator().manual_seed(1)
    y = torch.randint(4, (240,), generator=numbers)
    x = 20 * torch.randn(240, 1, 6, 6, generator=numbers) + 30 * y[:, None, None, None] + 50
    return Dataset("own", x.clamp(0, 200).byte(), y, tuple("abcd"), mean=100.0, std=40.0)

def marked():
    data = load()
    data.x[split(data, 1, 3)[1][5]] = 255  # it validates fold 1, and trains the others
    return data

def build():
    print("a word of the model's own")
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 32), nn.BatchNorm1d(32), nn.ReLU(),
                         nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))

class Trap(nn.Module):
    def forward(self, x):
        return x if self.training else torch.where(x > 3, torch.nan, x)

def trapped():
    return nn.Sequential(Trap(), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
"""
"""Data and models that import nothing slow: every process does it anew."""
FLAGS = "--batch 16 --period 3 --forward random --device cpu --every-fold".split()
FLAGS += ["--data", "own:load", "--model", "own:build"]


@pytest.fixture(autouse=True)
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.setitem(sys.modules, "own", None)
    monkeypatch.delitem(sys.modules, "own")  # another test may have imported its own


def result(out: Path) -> tuple[bytes, list[Any]]:
    summary = read_json(out, "summary.json")
    assert summary is not None
    return metrics_of(out), summary_of(summary)


def epochs_of(out: Path) -> int:
    try:
        return metrics_of(out).count(b"\n")
    except FileNotFoundError:
        return 0


def wait_for(run: Path) -> None:
    """Until it has an epoch behind it, or will never have."""
    deadline = time.monotonic() + 60
    while not epochs_of(run) and time.monotonic() < deadline:
        time.sleep(0.005)


def test_one_fails_one_is_killed_and_the_third_is_what_it_is_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(2)  # as a network with convolutions takes them
    heard: list[tuple[str, dict[str, Any]]] = []

    class Killer(Progress):
        def told(self, label: str, news: dict[str, Any]) -> None:
            heard.append((label, news))
            if (label, news["kind"], news.get("epoch")) == ("fold 2", "epoch", 2):
                begun = next(one for name, one in heard if name == label and one["kind"] == "begin")
                os.kill(begun["process"], signal.SIGKILL)
            super().told(label, news)

    monkeypatch.setattr("softstair.cli._train_progress.Progress", Killer)
    words = ["train", *FLAGS, "--data", "own:marked", "--model", "own:trapped", "--epochs", "12"]
    words += ["--weights", "float", "--features", "float", "--folds", "3"]
    assert cli.main([*words, "--together", "3", "--out", "x"]) == 2
    stdout, stderr = capfd.readouterr()
    assert stdout == ""
    assert "Traceback" not in stderr
    lines = [line for line in stderr.splitlines() if "own" not in line or "fold" in line]
    ends = [line for line in lines if " is done, validation " in line]
    assert len(ends) == 1
    *failures, last = [line for line in lines if line not in ends]
    failed, killed = sorted(failures)
    assert all(map(is_sentence, (failed, killed)))
    assert failed.startswith("softstair train: fold 1: the validation loss became nan in epoch 1, ")
    assert killed.startswith("softstair train: fold 2: its process was killed by SIGKILL, ")
    assert "--resume" in killed
    assert last.startswith("softstair train: 2 of 3 folds failed")
    assert "softstair train --resume --out x --every-fold --model own:trapped" in last
    processes = {news["process"] for _, news in heard if news["kind"] == "begin"}
    assert len(processes | {os.getpid()}) == 4
    # What became of them.
    x = tmp_path / "x"
    done = [(x / f"fold-{fold}" / "summary.json").exists() for fold in range(3)]
    assert done == [True, False, False]
    told = [news for label, news in heard if label == "fold 0"]
    assert [told[0]["kind"], told[1]["kind"], told[-1]["kind"]] == ["start", "begin", "done"]
    lines = [json.loads(line) for line in metrics_of(x / "fold-0").splitlines()]
    accuracies = [news["valid_accuracy"] for news in told if news["kind"] == "epoch"]
    assert accuracies == [line["valid_accuracy"] for line in lines]
    # The same alone; and the killed one goes on to it.
    recipes = [recipe_of(x / f"fold-{fold}") for fold in (0, 2)]
    for recipe in recipes:
        assert recipe is not None
        wanted = uninterrupted(tmp_path / f"alone-{recipe.fold}", recipe)
        train(recipe, x / f"fold-{recipe.fold}", resume=True)
        assert result(x / f"fold-{recipe.fold}") == wanted
        configs = [x / f"fold-{recipe.fold}", tmp_path / f"alone-{recipe.fold}"]
        first, second = (read_json(path, "config.json") for path in configs)
        assert first == second
        assert first is not None
        assert first["threads"] == 2


@pytest.mark.nightly
def test_stopped_by_a_signal_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my folds"  # a name that must be quoted
    words = ["train", *FLAGS, "--folds", "3", "--epochs", "10"]
    assert cli.main([*words, "--together", "1", "--out", "whole"]) == 0
    capsys.readouterr()

    def strike() -> None:
        wait_for(out / "fold-1")
        os.kill(os.getpid(), signal.SIGTERM)

    striking = threading.Thread(target=strike)
    striking.start()
    code = cli.main([*words, "--together", "2", "--out", str(out)])
    striking.join()
    stdout, stderr = capsys.readouterr()
    assert (code, stdout) == (143, ""), stderr
    assert stderr.count("\n") == 1, stderr
    assert is_sentence(stderr)
    assert "stopped by SIGTERM, and kept: " in stderr
    # What had begun was told, and kept itself.
    assert read_json(out / "fold-1", "summary.json") is None
    begun = [fold for fold in range(3) if recipe_of(out / f"fold-{fold}") is not None]
    assert {0, 1} <= set(begun)
    assert all(any((out / f"fold-{fold}" / "checkpoint").iterdir()) for fold in begun)
    said = shlex.split(stderr[stderr.index("softstair train --resume") :])
    assert said[-2:] == ["--together", "2"]
    assert cli.main([*said[1:], "--together", "1"]) == 0
    for fold in range(3):
        assert result(out / f"fold-{fold}") == result(tmp_path / "whole" / f"fold-{fold}")


PARENT = """
import subprocess, sys, time
child = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE, start_new_session=True)
child.stdin.write(sys.argv[1].encode() + b"\\n")
child.stdin.flush()
time.sleep(600)
"""


@pytest.mark.nightly
def test_a_killed_parent_leaves_no_child(tmp_path: Path) -> None:
    """A parent that does nothing but start a process, as a Worker does, and be killed."""
    recipe = parse([*FLAGS, "--epochs", "14"], "softstair train").recipe
    out = tmp_path / "x"
    task = {"recipe": recipe.to_json(), "out": str(out), "data_dir": "data", "device": "cpu"}
    task |= {"resume": True, "threads": None, "tensorboard": False}
    words = [json.dumps(task), sys.executable, "-P", "-c", START, json.dumps(sys.path), "1"]
    with open("errors", "w") as errors:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, *words], stdout=subprocess.DEVNULL, stderr=errors
        )
        wait_for(out)
        parent.kill()
        parent.wait()
    # It is let go of soon; whoever trains holds it.
    with filelock.FileLock(out / "lock", timeout=30):
        assert read_json(out, "summary.json") is None  # stopped, not at its end
        assert any((out / "checkpoint").iterdir())
    assert "Traceback" not in Path("errors").read_text()
    train(recipe, out, resume=True)
    assert result(out) == uninterrupted(tmp_path / "whole", recipe)


@pytest.mark.nightly
def test_what_refuses_all_folds_is_said_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *FLAGS, "--together", "2", "--limit", "12"]) == 2
    stdout, stderr = capfd.readouterr()
    said = [line for line in stderr.splitlines() if "own" not in line]
    assert (stdout, len(said)) == ("", 1)
    assert is_sentence(said[0])
    assert said[0].startswith("softstair train: batch must be at most")
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--together 2", ["--together", "--every-fold", "2"]),
        ("--every-fold --together 0", ["--together", "auto or from 1", "'0'"]),
        ("--every-fold --together 1025", ["--together", "auto or from 1", "'1025'"]),
        ("--every-fold --together many", ["--together", "auto or from 1", "'many'"]),
        ("--every-fold --together", ["--together", "auto or from 1"]),
    ],
)
def test_refused(words: str, told: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", *words.split()]) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert is_sentence(stderr)
    assert all(word in stderr for word in told), stderr


def test_how_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, cpu, cuda in ((1, 1, 1), (2, 2, 1), (8, 5, 4), (64, 5, 5)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: set(range(n)), False)
        monkeypatch.setattr(os, "cpu_count", lambda n=cores: n)
        assert worker_count("auto", "cpu", runs=5) == cpu
        assert (
            worker_count("auto", "cuda:1", runs=5) == worker_count("auto", "cuda", runs=5) == cuda
        )
        assert worker_count("auto", "cpu", runs=5, threads=cores) == 1
        assert worker_count("auto", "cpu", runs=500, threads=2) == max(1, cores // 2)
        assert worker_count(3, "cuda", runs=5) == worker_count(7, "cpu", runs=3) == 3
        for there in (False, True):
            monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
            assert worker_count("auto", "auto", runs=5) == (cuda if there else cpu)


def test_every_run_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=130, color_system=None)
    place = {"epochs": 4, "total": 40, "noise": {"shares": [0, 1], "annealed": 1, "static": False}}
    begin = {"kind": "begin", "epoch": 0, "done": 0, "advice": ["take care"], **place}
    with Progress(console=console) as progress:
        for label in ("fold 0", "fold 1"):
            progress.told(label, {"kind": "start"})
            progress.told(label, begin)
        epoch = {"kind": "epoch", "epoch": 1, "done": 10, **place, "train_loss": 0.25}
        for label, accuracy in (("fold 0", 0.5), ("fold 1", 0.75)):
            news = {**epoch, "valid_accuracy": accuracy, "warnings": ["90% of x lie at one level"]}
            progress.told(label, news)
            progress.told(label, {"kind": "step", "epoch": 1, "done": 12, **place, "speed": 1234.5})
        progress.told("fold 0", {"kind": "done"})
        progress.told("fold 2", {"kind": "start"})
        progress.told("fold 1", {"kind": "failed", "why": "it was ill: cure it."})
    shown = screen.getvalue()
    for words in ("fold 0 epoch 2/4", "fold 1 epoch 2/4", "loss 0.250, validation 75.0%",
                  "1,234 examples/s", "noise ·█ 1/2 annealed", "fold 2 getting ready"):  # fmt: skip
        assert words in shown, words
    last = shown[shown.rindex("fold 2 getting ready") :]
    assert "fold 0" not in last  # it stands above those that move
    assert "fold 1" not in last
    said = capsys.readouterr().err + shown
    assert said.count("warning: take care.") == 1
    assert said.count("warning: 90% of x lie at one level in epoch 1 of fold 0.") == 1
    assert said.count("lie at one level") == 1
    assert "softstair train: fold 1: it was ill: cure it." in said
