"""``python -m paper report``: a page of run directories or of a table, and errors of one line."""

import re
import stat
from pathlib import Path
from urllib.parse import unquote

import pytest

from helpers.browser import made_up
from helpers.commands import Run
from paper import tables

pytest_plugins = ["helpers.small_grid"]
pytestmark = pytest.mark.usefixtures("plain_terminal")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "grid.csv"
    tables.write(made_up(folds=2, most=2, epochs=10), path)
    return path


@pytest.mark.nightly
def test_page_of_a_table(run: Run, tmp_path: Path, table: Path) -> None:
    code, out, err = run("report", table)
    assert (code, err) == (0, "")
    assert re.fullmatch(r"report\.html: 4 units, \d\.\d\d MB; open it in a browser\.\n", out)
    page = tmp_path / "report.html"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["grid.csv", "report.html"]
    assert stat.S_IMODE(page.stat().st_mode) & 0o400
    assert run("report", table, "--title", "Mine & <yours>")[0] == 0
    assert "<title>Mine &amp; &lt;yours&gt;</title>" in page.read_text(encoding="utf-8")
    assert run("report", table, "--figures", "drawn")[0] == 0
    drawn = {path.name for path in (tmp_path / "drawn").iterdir()}
    assert {"plotly.min.js", "schedules.html"} < drawn


def test_page_of_run_directories(run: Run, done: Path, tmp_path: Path) -> None:
    path = tmp_path / done / "forward=mode" / "fold-1"
    page = tmp_path / "pages" / "mine.html"
    page.parent.mkdir()
    page.write_text("an older one")
    assert run("report", done / "forward=mode", "--out", page)[0] == 0
    text = page.read_text(encoding="utf-8")
    _, link = re.findall(r'href="(\./[^"]*)"', text)
    assert (page.parent / unquote(link)).resolve() == path / "config.json"
    assert str(tmp_path) not in text
    assert [path.name for path in page.parent.iterdir()] == ["mine.html"]


def test_errors_leave_the_older_page(run: Run, tmp_path: Path, table: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("before")
    (tmp_path / "empty").mkdir()
    (tmp_path / "grid.toml").write_text("")
    (tmp_path / "bad.csv").write_text("configuration,epoch\na,0\n")
    config = tmp_path / "damaged" / "a" / "fold-0" / "config.json"
    config.parent.mkdir(parents=True)
    config.write_text('{"recipe": {"data": "digits"}}')
    for words, message in (
        ("--out page.html", "DIR is missing"),
        ("nowhere --out page.html", "does not exist"),
        ("empty --out page.html", "must hold run directories"),
        ("grid.toml --out page.html", "but it is neither a folder nor such a table"),
        ("damaged --out page.html", "recipe"),
        ("bad.csv --out page.html", "bad.csv"),
        ("grid.csv grid.csv --out page.html", "twice"),
        ("grid.csv --out page.html --figures grid.csv", "cannot use 'grid.csv'"),
        ("grid.csv --out page.txt", "does not end in .html"),
    ):
        assert message in run.rejected("report", *words.split())
    assert page.read_text() == "before"
    assert not list(tmp_path.glob(".*"))


def test_other_tables_are_skipped_and_units_in_two_places_are_named(
    run: Run, tmp_path: Path, table: Path
) -> None:
    folder = tmp_path / "tables"
    folder.mkdir()
    foreign, copy = folder / "foreign.csv", folder / "copy.csv"
    foreign.write_text("flags,epoch,valid_accuracy\n,0,0.5\n")
    assert repr(str(foreign)) in run.rejected("report", folder)
    copy.write_bytes(table.read_bytes())
    error = run.rejected("report", table, copy)
    assert repr(str(table)) in error
    assert repr(str(copy)) in error
    code, out, err = run("report", folder)
    assert (code, err) == (0, "")
    notice, last = out.splitlines()
    assert notice == f"{str(foreign)!r} is not a table of trainings; skipped."
    assert "4 units" in last
