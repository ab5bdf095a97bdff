"""Flags from dataclasses: what is accepted and what is an error."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from softstair.cli._args import argument, flag, parse

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("plain_terminal")]


@dataclass(frozen=True)
class Inner:
    learning_rate: float = flag(0.5, "Learning rate.")
    drop: float | None = flag(None, "Epoch of the drop.")

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def replace(self, **values: Any) -> "Inner":
        return replace(self, **values)


@dataclass(frozen=True)
class Command:
    """Do something.

    Exit code 0: done.
    """

    source: Path = argument("SOURCE", "Where from.", default=Path("here"))
    mode: Literal["fast", "exact"] = flag("fast", "How.")
    jobs: Literal["auto"] | int = flag("auto", "How many, 100% sure.")
    limit: int | None = flag(None, "At most.")
    skip: tuple[str, ...] = flag((), "Which not.")
    dry_run: bool = flag(False, "Do nothing.")
    out: Path = flag(Path("out"), "Where to.")
    inner: Inner = field(default_factory=Inner)

    @classmethod
    def defaults(cls, given: dict[str, Any]) -> "Command":
        return cls(inner=Inner(0.25 if given.get("mode") == "exact" else 0.5))


def parsed(words: str) -> Command:
    return parse(Command, words.split(), "do")


def test_words_become_typed_values() -> None:
    assert parsed("") == Command()
    words = "there --mode=exact --jobs 3 --limit -2 --skip a b --dry-run --out x --skip c"
    expected = Command(Path("there"), "exact", 3, -2, ("a", "b", "c"), True, Path("x"), Inner(0.25))
    assert parsed(words) == expected
    assert parsed("--limit 3 --limit None --no-dry-run") == Command()
    assert parsed("--dry_run --dry-run --learning_rate 1e-3").inner.learning_rate == 1e-3
    assert parsed("--learning-rate -1e-3").inner.learning_rate == -1e-3
    assert parsed("--out a there --limit 5").source == Path("there")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--limits 3", "unknown flag '--limits'; did you mean '--limit'?"),
        ("--lr 3", "unknown flag '--lr'; did you mean '--learning-rate'?"),
        ("--zzz=3", "unknown flag '--zzz'; see do --help."),
        ("a b", "unexpected argument 'b'; see do --help."),
        (f"--mode {'x' * 5000}", "but 'xxx"),
        (f"--{'x' * 5000}", "unknown flag '--xxx"),
        (f"a {'x' * 5000}", "unexpected argument 'xxx"),
        ("--mode exat", "but 'exat' was given; did you mean 'exact'?"),
        ("--mode slow", "--mode must be fast or exact, but 'slow' was given."),
        ("--jobs many", "--jobs must be auto or an integer, but 'many' was given."),
        ("--learning-rate x", "--learning-rate must be a number, but 'x' was given."),
        ("--limit", "--limit: expected one argument; see do --help."),
        ("--dry-run=7", "ignored explicit argument '7'; see do --help."),
    ],
)
def test_errors_name_the_flag(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        parsed(words)
    assert len(str(error.value)) < 200


def test_help_has_every_flag_and_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("--help --mode exact", "--mode exact x y -h"):
        with pytest.raises(SystemExit) as stop:
            parsed(words)
        assert stop.value.code == 0
        out = " ".join(capsys.readouterr().out.split())
        assert out.startswith("usage: do SOURCE [FLAGS] Do something. Exit code 0: done.")
        for text in ("How. (default: fast)", "100% sure.", "--learning-rate FLOAT", "--out PATH"):
            assert text in out
        assert "Learning rate. (default: 0.25)" in out
