"""The command line in this process: exit code, output, and errors of one line."""

from pathlib import Path

import pytest

from softstair.cli import main

__all__ = ["rejected", "run"]


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Run ``softstair`` with these words; return its exit code, stdout and stderr."""
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def rejected(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Return the error of a command that must fail: one line on stderr, nothing written."""
    before = sorted(Path.cwd().rglob("*"))
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, ""), (words, out, err)
    assert err.startswith(f"softstair {words[0]}: "), err
    assert err.count("\n") == 1, err
    assert err.rstrip().isprintable(), err
    assert len(err) < 900, err
    assert "Traceback" not in err, err
    assert "internal error" not in err, err
    left = [path for path in Path.cwd().rglob("*") if path.is_file() and path.name != "lock"]
    assert [path for path in left if path not in before] == []
    return err
