"""The command line in this process: exit code, output, and errors of one line."""

from collections.abc import Callable
from pathlib import Path

import pytest

from softstair.cli import main

__all__ = ["Run"]


class Run:
    """Run a program with some words; return its exit code, stdout and stderr."""

    def __init__(
        self,
        capsys: pytest.CaptureFixture[str],
        program: str = "softstair",
        main: Callable[[list[str]], int] = main,
    ) -> None:
        self._capsys, self._program, self._main = capsys, program, main

    def __call__(self, *words: object) -> tuple[int, str, str]:
        code = self._main([str(word) for word in words])
        out, err = self._capsys.readouterr()
        return code, out, err

    def rejected(self, *words: object) -> str:
        """Return the error of a command that must fail: one line on stderr, nothing written."""
        before = set(Path.cwd().rglob("*"))
        code, out, err = self(*words)
        assert (code, out) == (2, ""), (words, out, err)
        assert err.startswith((f"{self._program} {words[0]}: ", f"{self._program}: ")), err
        assert err.count("\n") == 1, err
        assert err.rstrip().isprintable(), err
        assert len(err) < 900, err
        assert "Traceback" not in err, err
        assert "internal error" not in err, err
        left = [path for path in Path.cwd().rglob("*") if path.is_file() and path.name != "lock"]
        assert [path for path in left if path not in before] == []
        return err
