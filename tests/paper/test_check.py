"""``python -m paper check``: exit codes, errors, tables and files; the network of a run."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

import softstair
from helpers.commands import Run
from paper.__main__ import main
from paper.cli import check
from paper.theory import distances_on_network, examine
from softstair.data import load, split
from softstair.train import Recipe, fit, trained_network

pytestmark = pytest.mark.usefixtures("plain_terminal", "narrow_digits")

SMALL = ["--layers", "3", "--period", "10"]


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        ("--interval partition", 0, "yes, strictly"),
        ("--interval overlapped", 0, "yes, but only weakly"),
        ("--interval same_end", 1, "layer 2 is ahead of layer 1"),
        ("--std0 0", 0, "no density"),
    ],
)
def test_exit_code_is_whether_the_layers_are_in_order(
    flags: str, code: int, text: str, run: Run
) -> None:
    exit_code, out, err = run("check", *SMALL, *flags.split())
    assert (exit_code, err) == (code, "")
    assert text in out


@pytest.mark.quick
def test_defaults_are_the_papers_settings_for_cifar_10() -> None:
    command = check.Command()
    std0 = softstair.noise.Uniform().std_within(0.5)
    assert command.schedule() == softstair.Schedule(layers=7, period=50.0, std0=std0)
    assert command.target() == softstair.Stair.ternary()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        ("--layers 1000000", ["--layers must be", "from 1 to 200"]),
        ("--seed -1", ["--seed", "-1 was given"]),
        ("--out no/picture.png", ["--out", "'no/picture.png'", "does not exist"]),
        ("--out picture.xyz", ["--out", ".png, .pdf, .svg"]),
        ("--out same.svg --json same.svg", ["--out and --json must differ"]),
        ("--run nowhere", ["--run", "holds no run"]),
    ],
)
def test_errors(flags: str, messages: list[str], run: Run) -> None:
    error = run.rejected("check", *flags.split())
    assert all(message in error for message in messages), error


def test_files_are_checked_first_and_written_atomically(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def forbidden(self: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    def full(report: object, path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    picture = tmp_path / "picture.png"
    picture.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(check, "examine", lambda *_: pytest.fail("the work was begun"))
        run.rejected("check", "--out", tmp_path / "no" / "picture.png")
        patch.setattr(Path, "touch", forbidden)
        assert "Permission denied" in run.rejected("check", "--out", picture)
    monkeypatch.setattr(check, "draw", full)
    code, _, err = run("check", *SMALL, "--out", picture)
    assert code == 2
    assert "No space left" in err
    assert picture.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]


@pytest.mark.nightly
def test_picture_and_json_are_written(run: Run, tmp_path: Path) -> None:
    flags = [*SMALL, "--interval", "same_end", "--no-static-mean", "--json"]
    code, _, err = run("check", *flags, "a.json", "--out", "a.png")
    assert (code, err) == (1, "")
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")
    data = json.loads(Path("a.json").read_text())
    assert data["synchronised"] is False
    assert data["first_break"] == {"earlier": 1, "later": 2, "start": 0.0, "end": 30.0}
    assert len(data["verdicts"]) == 8 * 3 - 1
    assert list(data["propositions"][0]) == ["mean", "std", "found"]
    assert softstair.Schedule.from_json(data["schedule"]).layers == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.png"]
    # The same seed gives the same report.
    for name, seed in (("b.json", 0), ("c.json", 4)):
        run("check", *flags, name, "--seed", seed)
    texts = [Path(name).read_text() for name in ("a.json", "b.json", "c.json")]
    assert texts[0] == texts[1] != texts[2]


def test_lines_fit_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = softstair.Schedule(layers=12, period=7.0, interval="same_end", power="progressive")
    report = examine(schedule, "logistic", softstair.Stair.linear(4, quantum=0.07))
    monkeypatch.setenv("COLUMNS", "80")
    check.show(report)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)


def test_network_of_a_run(run: Run) -> None:
    settings = {"anneal_from": 0.25, "interval": "same_end"}
    short = Recipe.from_flat(epochs=2, period=0.5, limit=150, batch=24, **settings)
    fit(short, "run", device="cpu")
    code, out, _ = run("check", "--run", "run", "--json", "report.json")
    assert code == 1, "the recipe's schedule is checked"
    assert "on the trained network" in out
    report = json.loads(Path("report.json").read_text())
    assert (report["schedule"]["layers"], report["schedule"]["period"]) == (3, 0.5)
    assert report["schedule"]["start"] == 0.25
    distances = report["distances_on_run"]
    assert [values[-1] for values in distances["values"]] == [0, 0, 0]
    # The same by hand.
    digits = load("digits").sample(150)
    chosen = split(digits, 0, 5)[1][:16]
    inputs = (digits.x[chosen].float() - digits.mean) / digits.std
    schedule = softstair.Schedule.from_json(report["schedule"])
    network = trained_network("run", digits)
    again = distances_on_network(network, inputs, schedule, distances["times"])
    assert torch.allclose(torch.tensor(again.values), torch.tensor(distances["values"]))
    # A run that names code, a run without an epoch, and one of a float network.
    shutil.copytree("run", "own")
    config = json.loads(Path("own/config.json").read_text())
    config["recipe"]["model"] = "mine:build"
    Path("own/config.json").write_text(json.dumps(config))
    assert "--trust-code" in run.rejected("check", "--run", "own")
    shutil.copytree("run", "begun")
    Path("begun/metrics.jsonl").write_text("")
    assert "has no epoch yet" in run.rejected("check", "--run", "begun")
    fit(
        Recipe.from_flat(epochs=1, limit=150, weights="float", features="float"),
        "float",
        device="cpu",
    )
    assert "is float" in run.rejected("check", "--run", "float")


def test_terminal_without_unicode_gets_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["check", "--layers", "2"]) == 0
    terminal.flush()
    assert b"Theorem 2" in terminal.buffer.getvalue()  # type: ignore[attr-defined]
