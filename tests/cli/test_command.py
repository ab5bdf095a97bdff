"""The command before its verbs: help, exit codes, errors, and what it needs."""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import softstair
from helpers.commands import Run
from softstair import cli
from softstair.cli import zoo

pytestmark = pytest.mark.usefixtures("plain_terminal")

SOURCE = str(Path(softstair.__file__).parents[1])
INTERRUPTED = """
import builtins, sys
real = builtins.__import__

def interrupted(name, *rest, **more):
    if name.startswith("softstair"):
        raise KeyboardInterrupt
    return real(name, *rest, **more)

import softstair_command
builtins.__import__ = interrupted
sys.exit(softstair_command.main(['zoo', '--out', 'a b.png']))
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": SOURCE}
    env.pop("SOFTSTAIR_KERNELS", None)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)


def test_interrupt_during_the_import_is_one_line() -> None:
    done = python(INTERRUPTED)
    message = "softstair zoo: interrupted before anything was saved; begin again with"
    assert (done.returncode, done.stderr) == (130, f"{message} softstair zoo --out 'a b.png'\n")


def test_help_and_version_do_not_import_torch() -> None:
    words = ("--help", "-h", "--version", "-V", "no-verb")
    call = f"import softstair_command as c, sys; [c.main([word]) for word in {words}]"
    assert python(f"{call}; sys.exit('torch' in sys.modules)").returncode == 0


def test_installed_command_has_the_exit_codes_of_the_verbs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (installed,) = entry_points(group="console_scripts", name="softstair")
    assert installed.value == "softstair_command:main"
    monkeypatch.setattr(sys, "argv", ["softstair", "fly"])
    assert cli.main() == 2
    assert "'fly'" in capsys.readouterr().err


@pytest.mark.quick
def test_help_lists_the_verbs_and_each_verb_has_help(run: Run) -> None:
    for words in ([], ["--help"], ["-h"]):
        code, out, err = run(*words)
        assert (code, err) == (0, "")
        assert all(verb in out for verb in cli.VERBS)
    for verb in cli.VERBS:
        code, out, err = run(verb, "--help")
        assert (code, err) == (0, "")
        assert out.startswith(f"usage: softstair {verb}")
        assert "Exit code 0" in out
    assert run("--version") == (0, f"softstair {softstair.__version__}\n", "")
    code, out, err = run("zooo")
    assert (code, out) == (2, "")
    assert err.endswith("but 'zooo' was given; did you mean 'zoo'?\n")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("train --preset best-sppech", "'best-speech'"),
        ("train --noise unifrom", "'uniform'"),
        ("train --data cifar", "'cifar10'"),
        ("train --model vgg", "'vgg8'"),
        ("train --data digits --augment corp", "'crop'"),
        ("data fecth cifar10", "'fetch'"),
        ("data fetch shvn", "'svhn'"),
    ],
)
def test_misspelt_words_get_a_suggestion(words: str, meant: str, run: Run) -> None:
    assert f"was given; did you mean {meant}" in run.rejected(*words.split())


def test_closed_pipe_is_not_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:  # at the end it writes what is left, as Python does at exit
        monkeypatch.setattr(sys, "stdout", closed)
        assert cli.main(["zoo"]) == 141
    assert capsys.readouterr().err == ""


def test_internal_error_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: zoo.Command) -> int:
        raise KeyError("gone")

    monkeypatch.setattr(zoo.Command, "run", broken)
    code, out, err = run("zoo")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "internal error: KeyError: 'gone'" in err
    monkeypatch.setenv("SOFTSTAIR_TRACEBACK", "1")
    with pytest.raises(KeyError):
        cli.main(["zoo"])


def test_system_errors_name_the_file(run: Run) -> None:
    assert "xx': File name too long." in run.rejected("export", "x" * 300)


def test_packages_are_imported_when_needed_and_a_missing_one_names_the_extra() -> None:
    done = python(
        "import sys\n"
        "for name in ('rich', 'matplotlib', 'scipy'): sys.modules[name] = None\n"
        "import torch, softstair as s, softstair.integrations\n"
        "s.Stair.ternary()(torch.zeros(3))\n"
        "assert not {'triton', 'lightning', 'transformers'} & set(sys.modules)\n"
        "assert 'softstair.zoo' not in sys.modules; s.zoo.names(); assert not hasattr(s, 'no')\n"
        "from softstair.cli import main; sys.exit(main(['zoo']))"
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "rich, which is not installed: run pip install '.[cli]' in the clone" in done.stderr
    assert done.stderr.count("\n") == 1
