"""``softstair bench``: tables, JSON with every figure, and errors of one line."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import softstair
from softstair import cli
from softstair.bench import Times
from softstair.bench.operators import OperatorRow
from softstair.cli import _arguments, _bench_tables, bench

TINY = ["--quick", "--repeats", "1", "--batch", "4", "--elements", "64", "--device", "cpu"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(["bench", *words])
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The sentence on stderr: one line, exit code 2, nothing on stdout."""
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("softstair bench: ")
    assert "mistake of its own" not in err
    return err


@pytest.mark.nightly
def test_all_parts_are_measured_shown_and_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    path = tmp_path / "figures.json"
    code, out, err = run(capsys, *TINY, "--json", str(path))
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == f"every figure: {path}"
    found = json.loads(path.read_text())
    assert found["torch"] == torch.__version__
    assert found["softstair"] == softstair.__version__
    assert found["device"] in out
    assert len(found["operator"]) == 16
    for name in ("expectation", "mode", "random", "hard", "naive", "float (the twin)"):
        assert f" {name} " in out
    by_name = {row["name"]: row for row in found["step"]["rows"]}
    assert by_name["float"]["ratio"] == 1
    assert [phase["annealed"] for phase in found["partition"]["phases"]][-1] == [0, 1, 2]
    assert f"{found['partition']['speed_up']:.2f} times" in out
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


def test_the_json_contains_the_command_to_repeat_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "figures of today.json"
    words = [*TINY, "--what", "operator", "--stairs", "heaviside", "--json", str(path)]
    assert run(capsys, *words)[0] == 0
    found = json.loads(path.read_text())
    program, verb, *again = shlex.split(found["command"])
    assert (program, verb) == ("softstair", "bench")
    parsed = [_arguments.parse(bench.Command, line, "softstair bench") for line in (words, again)]
    assert parsed[0] == parsed[1]
    assert set(found) & set(bench.PARTS) == {"operator"}
    assert {row["stair"] for row in found["operator"]} == {"heaviside"}


def test_without_json_it_names_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *TINY, "--what", "partition", "--forward", "random")
    assert code == 0
    assert "digits, random, batches of 4" in out
    assert "--json FILE" in out.splitlines()[-1]
    assert "ReLU" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--what speed", "--what must be one or more of operator, step, partition, exact"),
        ("--model resnet", "--model must be one of auto, vgg8, dscnn, digits"),
        ("--batch 1", "--batch must be from 2 to 4096, but 1 was given"),
        ("--stairs ternary,int99", "but 'int99' was given"),
        ("--stairs ,", "--stairs must be one or more stairs such as ternary or int4@0.07"),
        ("--precision tf32 --device cpu", "on cpu, which has no TF32, but 'tf32' was given"),
        ("--model dscnn --augment crop", "augment must be one of none, shift for speech"),
        ("--json .", "--json must name a file that can be written"),
    ],
)
def test_invalid_flags_are_rejected_before_measuring(
    capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert message in refused(capsys, *words.split())


def test_out_of_memory_is_an_error_that_names_the_flags(
    capsys, monkeypatch, tmp_path: Path
) -> None:
    def large(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 1 EB")

    monkeypatch.setattr("softstair.bench.measure_step", large)
    code, _, err = run(capsys, *TINY, "--what", "step", "--json", str(tmp_path / "figures.json"))
    assert code == 2
    assert "give a --batch below 4, or --quick" in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_what_was_not_measured_is_listed(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "brevitas", None)
    _, out, _ = run(capsys, *TINY, "--what", "step")
    assert "Brevitas: not measured (not installed)" in out


def test_figures_have_three_digits(capsys: pytest.CaptureFixture[str]) -> None:
    times = Times((0.00012345, 0.0001, 0.0002))
    assert _bench_tables._spread(times, 1e6) == "123 (100–200)"
    assert _bench_tables._spread(times, 1e3) == "0.123 (0.100–0.200)"
    assert _bench_tables._number(118_800.0) == "118,800"
    assert _bench_tables._number(4.126) == "4.13"


def test_each_precision_and_stair_has_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    times = Times((1e-3,))
    rows = [
        OperatorRow(
            stair=stair, noise="normal", how="mode", dtype=dtype, elements=1000, forward=times,
            backward=times, copy=times, relu=1e-3, forward_bytes=5000, backward_bytes=2500,
            copy_bytes=5000, kept=1.0, memory=2.0,
        )
        for dtype in ("bfloat16", "float32")
        for stair in ("ternary", "int4")
    ]  # fmt: skip
    machine = {"device": "a GPU", "softstair": "1", "torch": "2", "triton": None, "cuda": None}
    _bench_tables.Tables(machine).operator(rows)
    out = capsys.readouterr().out
    assert "a GPU; softstair 1, torch 2\n" in out
    for title in ("ternary on 1,000 elements of bfloat16", "int4 on 1,000 elements of float32"):
        assert out.count(title) == 1
    assert out.count("100.0%") == 4
    assert out.count("50.0%") == 4


def test_absent_kernels_are_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for by the environment, which every verb has."""
    monkeypatch.setenv("SOFTSTAIR_KERNELS", "triton")
    code, _, err = run(capsys, *TINY, "--what", "operator", "--device", "cpu")
    assert code == 2
    assert err.startswith("softstair bench: kernels must be auto or reference for a tensor on cpu")
    assert err.count("\n") == 1
