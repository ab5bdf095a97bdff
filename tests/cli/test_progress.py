"""Progress of several runs: a bar for each on a terminal, lines elsewhere."""

from io import StringIO

import pytest

from softstair.cli._output import Console, Progress


def test_every_run_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=130, color_system=None)
    place = {"epochs": 4, "total": 40, "noise": {"shares": [0, 1], "annealed": 1, "static": False}}
    begin = {"kind": "begin", "epoch": 0, "done": 0, "advice": ["raise `std0`"], **place}
    with Progress("train", console=console) as progress:
        for label in ("fold 0", "fold 1"):
            progress.show(label, {"kind": "start"})
            progress.show(label, {**begin, "compiles": label == "fold 1"})
        epoch = {"kind": "epoch", "epoch": 1, "done": 10, **place, "train_loss": 0.25}
        for label, accuracy in (("fold 0", 0.5), ("fold 1", 0.75)):
            event = {**epoch, "valid_accuracy": accuracy, "warnings": ["90% of x lie at one level"]}
            progress.show(label, event)
            progress.show(label, {"kind": "step", "epoch": 1, "done": 12, **place, "speed": 1234.5})
        progress.show("fold 0", {"kind": "done"})
        progress.show("fold 2", {"kind": "start"})
        progress.show("fold 1", {"kind": "failed", "why": "it was ill: cure it."})
    shown = screen.getvalue()
    for words in ("fold 0 epoch 2/4", "fold 1 epoch 2/4", "loss 0.250, validation 75.0%",
                  "fold 1 epoch 1/4, compiling kernels", "1,234 examples/s",
                  "noise ·█ 1/2 annealed", "fold 2 getting ready"):  # fmt: skip
        assert words in shown, words
    last = shown[shown.rindex("fold 2 getting ready") :]
    assert "fold 0" not in last
    assert "fold 1" not in last
    printed = capsys.readouterr().err + shown
    assert printed.count("warning: raise --std0.") == 1
    assert printed.count("warning: 90% of x lie at one level in epoch 1 of fold 0.") == 1
    assert printed.count("lie at one level") == 1
    assert "softstair train: fold 0 is done, validation 50.00%" in printed
    assert "softstair train: fold 1: it was ill: cure it." in printed
