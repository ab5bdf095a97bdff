"""Run directories across verbs: whose code runs, folds and single runs, ``check --run``."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from softstair import cli
from softstair.cli.train import next_free
from softstair.data import load
from softstair.data.folds import split
from softstair.theory import distances_on_network
from softstair.train import trained_network

SHORT = ["--epochs", "2", "--period", "0.5", "--limit", "150", "--batch", "24"]
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
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def train(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = cli.main(["train", *words])
    return code, capsys.readouterr().err


def test_a_run_with_code_of_its_own_asks_for_the_users_word(capsys) -> None:
    Path("mine.py").write_text(MODEL)
    assert train(capsys, *SHORT, "--model", "mine:build", "--out", "r")[0] == 0
    Path("r/summary.json").unlink()
    Path("called").unlink()
    code, said = train(capsys, "--resume", "--out", "r")
    assert code == 2
    assert "give --model mine:build again if you trust it." in said
    code = cli.main(["check", "--run", "r"])
    assert code == 2
    assert "give --own-code if you trust it." in capsys.readouterr().err
    assert not Path("called").exists()
    assert train(capsys, "--resume", "--out", "r", "--model", "mine:build")[0] == 0
    assert Path("called").exists()
    Path("called").unlink()
    assert train(capsys, "--resume", "--out", "r")[0] == 0, "done: nothing is called for its table"
    assert not Path("called").exists()


def test_folds_and_a_single_run_are_not_mixed_up(capsys) -> None:
    assert train(capsys, *SHORT, "--out", "one")[0] == 0
    before = sorted(path.name for path in Path("one").iterdir())
    code, said = train(capsys, *SHORT, "--resume", "--every-fold", "--out", "one")
    assert (code, "holds one run and no folds" in said) == (2, True)
    assert sorted(path.name for path in Path("one").iterdir()) == before
    two = ["--folds", "2", "--every-fold", "--together", "1", "--out", "two"]
    assert train(capsys, *SHORT, *two)[0] == 0
    code, said = train(capsys, *SHORT, "--resume", "--out", "two")
    assert (code, "holds the folds of --every-fold" in said) == (2, True)


def test_folds_go_on_from_whichever_was_begun(capsys) -> None:
    """Of those that train together, any may be the first; and none of them brings its own code."""
    Path("mine.py").write_text(MODEL)
    folds = ["--every-fold", "--together", "1", "--out", "x"]
    flags = [*SHORT, "--folds", "3", "--model", "mine:build", "--seed", "3"]
    assert train(capsys, *flags, *folds)[0] == 0
    before = [Path(f"x/fold-{fold}/metrics.jsonl").read_bytes() for fold in range(3)]
    shutil.rmtree("x/fold-0")
    Path("x/fold-2/summary.json").unlink()
    Path("called").unlink()
    code, said = train(capsys, "--resume", *folds)
    assert (code, "give --model mine:build again if you trust it." in said) == (2, True)
    shutil.copytree("x/fold-1", "x/fold-0")  # done, but not what it says it is
    code, said = train(capsys, "--resume", *folds)
    assert (code, "give --model mine:build again if you trust it." in said) == (2, True)
    assert not Path("called").exists()
    code, said = train(capsys, "--resume", *folds, "--model", "mine:build")
    assert (code, "was begun with fold = 1" in said) == (2, True)
    shutil.rmtree("x/fold-0")
    assert train(capsys, "--resume", *folds, "--model", "mine:build")[0] == 0
    after = [Path(f"x/fold-{fold}/metrics.jsonl").read_bytes() for fold in range(3)]
    assert after == before
    Path("called").unlink()
    assert train(capsys, "--resume", *folds)[0] == 0, "done: nothing is called for its table"
    assert not Path("called").exists()


def test_a_free_directory_is_given_once() -> None:
    given = [next_free(Path("runs"), "digits") for _ in range(3)]
    assert [path.name for path in given] == ["digits-1", "digits-2", "digits-3"]
    assert all(path.is_dir() for path in given)


def test_a_refusal_leaves_no_directory_that_nobody_asked_for(capsys) -> None:
    assert train(capsys, "--model", "no.such:build")[0] == 2
    assert list(Path("runs").iterdir()) == []


def test_check_measures_the_trained_network_of_a_run(capsys) -> None:
    assert train(capsys, *SHORT, "--interval", "same_end", "--out", "r")[0] == 0
    code = cli.main(["check", "--run", "r", "--json", "report.json"])
    said = capsys.readouterr().out
    assert code == 1, "same end is out of order: the recipe's own schedule is what is checked"
    assert "on the trained network" in said
    report = json.loads(Path("report.json").read_text())
    assert report["schedule"]["layers"] == 3
    assert report["schedule"]["period"] == 0.5
    found = report["distances_on_run"]
    assert len(found["values"]) == 3
    assert all(values[-1] == 0 for values in found["values"]), "without noise it is the hard one"
    # The same by hand.
    from softstair import Schedule

    digits = load("digits").sample(150)
    chosen = split(digits, 0, 5)[1][:16]
    inputs = (digits.x[chosen].float() - digits.mean) / digits.std
    schedule = Schedule.from_json(report["schedule"])
    network = trained_network("r", digits)
    again = distances_on_network(network, inputs, schedule, found["times"])
    assert torch.allclose(torch.tensor(again.values), torch.tensor(found["values"]))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--run", "nowhere"], "holds no run"),
        (["--run", "float"], "is in float"),
        (["--run", "begun"], "must have trained for an epoch"),
    ],
)
def test_check_refuses_what_has_no_stair_network(capsys, words, said) -> None:
    if "float" in words:
        train(capsys, *SHORT, "--weights", "float", "--features", "float", "--out", "float")
    if "begun" in words:
        train(capsys, *SHORT, "--out", "begun")
        Path("begun/metrics.jsonl").write_text("")
    assert cli.main(["check", *words]) == 2
    assert said in capsys.readouterr().err
