"""``python -m benchmarks.speed``: tables, JSON with every figure, and errors of one line."""

import json
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import softstair
from benchmarks.speed import Times, command
from benchmarks.speed.operators import OperatorRow
from benchmarks.speed.training_step import FIRST_STEP
from helpers.commands import Run
from softstair.cli._args import parse
from softstair.cli._output import Console
from softstair_command import call

pytestmark = pytest.mark.usefixtures("plain_terminal")

TINY = "--quick --repeats 1 --batch 4 --elements 64 --device cpu".split()
PROGRAM = "python -m benchmarks.speed"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The script, as helpers.commands.Run."""
    return Run(capsys, PROGRAM, lambda words: call(PROGRAM, "benchmarks.speed.command", words))


@pytest.mark.nightly
def test_all_parts_are_measured_shown_and_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    code, out, err = run(*TINY, "--json", "figures.json")
    assert code == 0
    lines = [line.removeprefix(f"{PROGRAM}: ") for line in err.splitlines()]
    assert lines[0] == "operator: ternary, float32: all noise families and forwards"
    assert [line for line in lines if line.startswith("step: mode:")] == [
        f"step: mode: {FIRST_STEP}"
    ]
    assert lines[-1] == "partition: 2 of 3 layers annealed: measuring"
    assert out.splitlines()[-1] == "all figures: figures.json"
    figures = json.loads(Path("figures.json").read_text())
    assert figures["torch"] == torch.__version__
    assert figures["softstair"] == softstair.__version__
    assert figures["device"] in out
    assert len(figures["operator"]) == 16
    for name in ("expectation", "mode", "random", "hard", "naive", "float (the twin)"):
        assert f" {name} " in out
    by_name = {row["name"]: row for row in figures["step"]["rows"]}
    assert by_name["float"]["ratio"] == 1
    assert [phase["annealed"] for phase in figures["partition"]["phases"]][-1] == [0, 1]
    assert f"{figures['partition']['speed_up']:.2f} times" in out
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


def operator_rows(*stairs: str) -> list[OperatorRow]:
    times = Times((1e-3,))
    return [
        OperatorRow(
            stair=stair, noise="normal", how="mode", dtype=dtype, elements=1000, forward=times,
            backward=times, copy=times, relu=1e-3, forward_bytes=5000, backward_bytes=2500,
            copy_bytes=5000, kept=1.0, memory=2.0,
        )
        for dtype in ("bfloat16", "float32")
        for stair in stairs
    ]  # fmt: skip


def test_json_contains_the_command_and_the_commit_to_repeat_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.speed.clock.source_commit", lambda: "abc1234")
    measured = lambda device, effort, stairs, progress: operator_rows(*stairs)
    monkeypatch.setattr("benchmarks.speed.measure_operator", measured)
    words = [*TINY, "--only", "operator", "--stairs", "ternary,int4", "--json", "figures of today"]
    code, out, _ = run(*words)
    assert code == 0
    for title in ("ternary on 1,000 elements of bfloat16", "int4 on 1,000 elements of float32"):
        assert out.count(title) == 1
    assert (out.count("100.0%"), out.count("50.0%")) == (4, 4)
    figures = json.loads(Path("figures of today").read_text())
    *program, again = figures["command"].partition(f"{PROGRAM} ")
    assert (program, figures["commit"]) == (["", f"{PROGRAM} "], "abc1234")
    lines = words, shlex.split(again)
    first, second = (parse(command.Command, line, PROGRAM) for line in lines)
    assert first == second
    assert set(figures) & set(command.PARTS) == {"operator"}
    assert {row["stair"] for row in figures["operator"]} == {"ternary", "int4"}


def test_without_json_the_flag_is_named(run: Run) -> None:
    code, out, _ = run(*TINY, "--only", "partition", "--forward", "random")
    assert code == 0
    assert "digits, random, batches of 4" in out
    assert "--json FILE" in out.splitlines()[-1]
    assert "ReLU" not in out


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--only speed", "--only must be one or more of operator, step, partition, exact"),
        ("--batch 1", "--batch must be an integer from 2 to 4096, but 1 was given"),
        ("--repeats 0", "--repeats must be an integer from 1 to 1000, but 0 was given"),
        ("--stairs ,", "--stairs must be one or more stairs such as ternary or int4@0.07"),
        ("--stairs foo", "--stairs must be one of heaviside, "),
        ("--batch 0", "--batch must be an integer from 2 to 4096, but 0 was given"),
        ("--elements 0", "--elements must be an integer from 1 to 2147483648, but 0 was given."),
        ("--precision tf32 --device cpu", "'tf32' was given"),
        ("--json .", "--json must be a file that can be written"),
    ],
)
def test_errors_come_before_measuring(run: Run, words: str, message: str) -> None:
    assert message in run.rejected(*words.split())


def test_out_of_memory_names_the_flags(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def large(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 1 EB")

    monkeypatch.setattr("benchmarks.speed.measure_step", large)
    code, _, err = run(*TINY, "--only", "step", "--json", "figures.json")
    assert (code, err.count("\n")) == (2, 1)
    assert "give a --batch below 4, or --quick" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_what_was_not_measured_is_listed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "brevitas", None)
    _, out, _ = run(*TINY, "--only", "step")
    assert "Brevitas: not measured (not installed)" in out


def test_progress_is_a_line_per_network_or_a_status_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with command._status() as progress:
        for line in ("step: mode: compiling", "step: mode: measuring", "step: hard: compiling"):
            progress(line)
    lines = f"{PROGRAM}: step: mode: compiling\n{PROGRAM}: step: hard: compiling\n"
    assert tuple(capsys.readouterr()) == ("", lines)
    monkeypatch.setattr(
        command, "Console", partial(Console, force_terminal=True, color_system=None)
    )
    with command._status() as progress:
        progress("step: [mode]: measuring")
    assert "step: [mode]: measuring 0:00:0" in capsys.readouterr().err
