"""``softstair check``: exit codes, errors, tables and files; and the command before its verbs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import softstair
from softstair import cli
from softstair.cli import _check_picture, _check_tables, check
from softstair.theory import examine

SMALL = ["--layers", "3", "--period", "10"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The sentence on stderr: one line, exit code 2, nothing on stdout, no traceback."""
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.endswith((".\n", "'.\n"))
    assert "Traceback" not in err
    assert "╭" not in err
    return err


# The command itself


def test_without_a_verb_it_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["-h"]):
        code, out, err = run(capsys, *words)
        assert (code, err) == (0, "")
        assert all(verb in out for verb in cli.VERBS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"softstair {softstair.__version__}\n", "")


def test_every_verb_has_a_file_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in cli.VERBS:
        code, out, err = run(capsys, verb, "--help")
        assert (code, err) == (0, "")
        assert f"softstair {verb}" in out


def test_an_unknown_verb_is_an_error_that_lists_the_verbs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sentence = refused(capsys, "chek")
    assert "'chek'" in sentence
    assert "check" in sentence


def test_a_closed_pipe_does_not_give_exit_code_1() -> None:
    program = "import sys; from softstair.cli import main; sys.exit(main(['check']))"
    command = f'{sys.executable} -c "{program}" | head -1; exit ${{PIPESTATUS[0]}}'
    source = str(Path(softstair.__file__).parents[1])
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert (done.returncode, done.stderr) in ((141, ""), (0, ""))
    assert done.stdout.startswith("uniform noise")


def test_an_internal_error_is_one_line(capsys, monkeypatch) -> None:
    def broken(self: check.Command) -> int:
        raise KeyError("gone")

    monkeypatch.setattr(check.Command, "run", broken)
    assert "KeyError: 'gone'" in refused(capsys, "check")
    monkeypatch.setenv("SOFTSTAIR_TRACEBACK", "1")
    with pytest.raises(KeyError):
        cli.main(["check"])


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(softstair.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": source, **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)


def test_without_the_extra_the_library_imports_and_the_command_names_the_extra() -> None:
    done = python(
        "import sys\n"
        "for name in ('tyro', 'rich', 'matplotlib', 'scipy'): sys.modules[name] = None\n"
        "import softstair, softstair.theory\n"
        "from softstair.cli import main; sys.exit(main(['check']))"
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "tyro is not installed: run pip install 'softstair[cli]'." in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_terminal_without_unicode_gets_the_tables() -> None:
    done = python(
        "import sys; from softstair.cli import main; sys.exit(main(['check', '--layers', '2']))",
        PYTHONIOENCODING="ascii",
    )
    assert done.returncode == 0, done.stderr
    assert "Theorem 2" in done.stdout


# Exit codes: the order of the layers


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--interval", "partition"], 0, "yes, strictly"),
        (["--interval", "overlapped"], 0, "yes, but only weakly"),
        (["--interval", "same_end"], 1, "layer 2 is ahead of layer 1"),
        (["--interval", "same_end", "--power", "progressive"], 1, "from t = 0 to t = 16.6667"),
        (["--interval", "same_end", "--static-std"], 0, "nothing moves"),
        (["--interval", "same_end", "--static-std", "--no-static-mean"], 1, "no: layer 2"),
    ],
)
def test_exit_code_is_whether_the_layers_are_in_order(capsys, flags, code, words) -> None:
    exit_code, out, err = run(capsys, "check", *SMALL, *flags)
    assert (exit_code, err) == (code, "")
    assert words in out


def test_the_defaults_are_the_papers_cifar_10_settings() -> None:
    command = check.Command()
    assert command.schedule() == softstair.Schedule(
        layers=7, period=50.0, interval="partition", power="homogeneous",
        std0=softstair.noise.Uniform().std_within(0.5),
    )  # fmt: skip
    assert command.target() == softstair.Stair.ternary()


# Errors


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--noise", "cauchy"], ["--noise", "'cauchy'", "uniform, triangular, normal, logistic"]),
        (["--nois", "uniform"], ["'--nois'", "--noise, --interval"]),
        (["stray"], ["'stray'", "--noise"]),
        (["--layers", "2.5"], ["--layers must be a whole number", "'2.5'"]),
        (["--layers"], ["--layers needs a whole number"]),
        (["--layers", "1000000"], ["between 1 and 200"]),
        (["--period", "0"], ["period", "above 0"]),
        (["--seed", "-1"], ["--seed", "-1 was given"]),
        (["--out", "nowhere/picture.png"], ["--out", "'nowhere/picture.png'", "does not exist"]),
        (["--out", "picture.xyz"], ["--out", ".png, .pdf, .svg"]),
        (["--json", "."], ["--json", "is a folder"]),
        (["--out", "same.svg", "--json", "same.svg"], ["--out and --json must differ"]),
    ],
)
def test_errors_are_one_sentence(capsys, monkeypatch, tmp_path, flags, words) -> None:
    monkeypatch.chdir(tmp_path)
    sentence = refused(capsys, "check", *flags)
    assert all(word in sentence for word in words), sentence
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_permission_is_an_error(capsys, monkeypatch, tmp_path) -> None:
    def forbidden(self: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    # Nothing is forbidden to root, who may be running this.
    monkeypatch.setattr(Path, "touch", forbidden)
    assert "Permission denied" in refused(capsys, "check", "--out", str(tmp_path / "picture.png"))


def test_files_are_checked_first_and_written_atomically(capsys, monkeypatch, tmp_path) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the work was begun")

    old = tmp_path / "picture.png"
    old.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(check, "examine", never)
        refused(capsys, "check", "--out", str(tmp_path / "no" / "picture.png"))

    def fails(report: object, path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_check_picture, "draw", fails)
    code, _, err = run(capsys, "check", *SMALL, "--out", str(old))
    assert code == 2
    assert "No space left" in err
    assert old.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]


# What is shown


def test_picture_and_json_are_written(capsys, tmp_path) -> None:
    picture, report = tmp_path / "a.png", tmp_path / "a.json"
    flags = ["--interval", "same_end", "--no-static-mean", "--out", str(picture)]
    code, _, err = run(capsys, "check", *SMALL, *flags, "--json", str(report))
    assert (code, err) == (1, "")
    assert picture.read_bytes().startswith(b"\x89PNG")
    data = json.loads(report.read_text())
    assert data["synchronised"] is False
    assert data["first_break"] == {"earlier": 1, "later": 2, "start": 0.0, "end": 30.0}
    assert len(data["verdicts"]) == 8 * 3 - 1
    assert {verdict["rate"] for verdict in data["verdicts"]} == {"", "λ^4"}
    assert list(data["propositions"][0]) == ["mean", "std", "found"]
    assert softstair.Schedule.from_json(data["schedule"]).layers == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.png"]


def test_no_line_is_wider_than_the_terminal(capsys, monkeypatch) -> None:
    schedule = softstair.Schedule(layers=12, period=7.0, interval="same_end", power="progressive")
    report = examine(schedule, "logistic", softstair.Stair.linear(4, quantum=0.07))
    for columns in (80, 100, 160):
        monkeypatch.setenv("COLUMNS", str(columns))
        _check_tables.show(report)
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= columns
        assert not any("…" in line for line in lines)


def test_the_same_seed_gives_the_same_report(capsys, tmp_path) -> None:
    texts = []
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        path = tmp_path / name
        run(capsys, "check", *SMALL, "--seed", seed, "--json", str(path))
        texts.append(path.read_text())
    assert texts[0] == texts[1] != texts[2]


def test_noise_of_std_0_has_no_proposition(capsys) -> None:
    code, out, _ = run(capsys, "check", *SMALL, "--std0", "0")
    assert code == 0
    assert "no density" in out
