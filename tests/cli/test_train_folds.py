"""Folds in parallel on the command line: flags, and a line of progress for each run."""

from io import StringIO

import pytest

from softstair import cli
from softstair.cli._console import Console
from softstair.cli._train_progress import Progress


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
    assert stderr.count("\n") == 1
    assert all(word in stderr for word in told), stderr


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
