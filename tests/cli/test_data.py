"""``softstair data``: fetch and status."""

from pathlib import Path
from typing import Any

import pytest

from helpers.commands import Run
from softstair.cli import data
from softstair.data.fetch import SOURCES

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("plain_terminal")]


def test_help_names_the_actions_and_data_sets(run: Run) -> None:
    code, out, err = run("data")
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert all(name in text for name in ("fetch NAME", "status", "--data-dir", *SOURCES))


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        ("fetsch", ["fetch or status", "'fetsch'"]),
        ("fetch", ["NAME must be one or more of digits, cifar10", "none was given"]),
        ("fetch svhn mnist", ["NAME must be", "'mnist'"]),
        ("status svhn", ["status takes no NAME", "'svhn'"]),
    ],
)
def test_errors(words: str, messages: list[str], run: Run) -> None:
    error = run.rejected("data", *words.split())
    assert all(message in error for message in messages), error


def test_fetch_loads_each_name_once(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fetched: list[tuple[str, Path]] = []

    def fetch(name: str, root: Path, *, log: Any, **_: object) -> None:
        fetched.append((name, root))
        log(f"{name}: here.")

    monkeypatch.setattr(data, "fetch", fetch)
    words = ["data", "fetch", "svhn", "--data-dir", tmp_path, "cifar10", "svhn"]
    assert run(*words) == (0, "svhn: here.\ncifar10: here.\n", "")
    assert fetched == [("svhn", tmp_path), ("cifar10", tmp_path)]


def test_interrupted_fetch_can_be_continued(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "fetch", fetch)
    code, out, err = run("data", "fetch", "svhn")
    assert (code, out, err.count("\n")) == (130, "", 1)
    assert "the same command again" in err


def test_status_shows_everything_and_fits_its_width(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = tmp_path / "with [bold]brackets[/] and room"
    (root / "cifar-10-batches-bin").mkdir(parents=True)
    (root / "cifar-10-batches-bin" / "data_batch_1.bin").write_text("x")
    for columns in (60, 250):
        monkeypatch.setenv("COLUMNS", str(columns))
        code, out, err = run("data", "status", "--data-dir", root)
        assert (code, err) == (0, "")
        assert max(map(len, out.splitlines())) <= columns
        assert "[bold]brackets[/]" in "".join(out.split())
    for text in (
        "cifar-10-batches-bin",
        *("no licence is stated", "Krizhevsky", "non-commercial", "Creative Commons BY 4.0"),
        *(f"data fetch {name} --data-dir '{root}'" for name in SOURCES if name != "digits"),
    ):
        assert text in out
    assert "data fetch svhn (246.3 MB)" in " ".join(run("data", "status")[1].split())
