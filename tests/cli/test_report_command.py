"""``softstair report``: a page of run directories or of a table, and errors of one sentence."""

import json
import os
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.browser import made_up
from softstair import cli
from softstair.experiments import results
from softstair.train.recipe import Recipe


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "grid.csv"
    results.write(made_up(folds=2, most=2, epochs=10), path)
    return path


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = cli.main(["report", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The sentence on stderr: one line, exit code 2, nothing on stdout, no traceback."""
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("softstair report: ")
    assert err.count("\n") == 1
    assert err.endswith(".\n")
    assert "Traceback" not in err
    return err


def data_of(page: Path) -> dict[str, Any]:
    text = page.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_a_page_of_a_table(capsys, tmp_path: Path, table: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, table)
    assert (code, err) == (0, "")
    assert re.fullmatch(r"report\.html: 4 units, \d\.\d\d MB; open it in a browser\.\n", out)
    assert [line["epochs"] for line in data_of(tmp_path / "report.html")["lines"]] == [10, 10]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["grid.csv", "report.html"]


def test_the_default_page_replaces_a_link(capsys, tmp_path: Path, table: Path, monkeypatch) -> None:
    """The current folder may be a grid from anybody."""
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "mine.html"
    mine.write_text("mine")
    (tmp_path / "report.html").symlink_to(mine)
    assert run(capsys, table)[0] == 0
    assert mine.read_text() == "mine"
    assert not (tmp_path / "report.html").is_symlink()


def test_a_page_of_run_directories(capsys, tmp_path: Path) -> None:
    path = _run_directory(tmp_path / "runs" / "a" / "fold-1")
    page = tmp_path / "pages" / "mine.html"
    page.parent.mkdir()
    page.write_text("an older one")
    assert run(capsys, tmp_path / "runs", "-o", page)[0] == 0
    data = data_of(page)
    unit = data["units"][0]
    assert unit["path"] == "../runs/a/fold-1/config.json"
    assert (page.parent / str(unit["href"])).resolve() == path / "config.json"
    recorded = "\n".join(data["texts"][at] for at in unit["lines"])
    assert json.loads(recorded) == json.loads((path / "config.json").read_text())
    assert str(tmp_path) not in page.read_text(encoding="utf-8")
    assert [one.name for one in page.parent.iterdir()] == ["mine.html"]


@pytest.mark.nightly
def test_several_grids_on_one_page(capsys, tmp_path: Path, table: Path) -> None:
    other = tmp_path / "speech.csv"
    results.write(made_up("paper-speech", folds=2, most=2, epochs=12), other)
    page = tmp_path / "both.html"
    assert run(capsys, table, other, "--out", page)[0] == 0
    data = data_of(page)
    assert [line["epochs"] for line in data["lines"]] == [10, 10, 12, 12]
    assert data["fields"][0]["values"] == ["svhn", "speech"]
    assert "SVHN and Speech Commands" in page.read_text(encoding="utf-8")
    folder = tmp_path / "tables"
    folder.mkdir()
    (folder / "a.csv").write_bytes(table.read_bytes())
    (folder / "b.csv").write_bytes(other.read_bytes())
    assert run(capsys, folder, "--out", page)[0] == 0
    assert data_of(page) == data


def test_what_cannot_be_read_is_a_sentence(capsys, tmp_path: Path, table: Path) -> None:
    page = tmp_path / "page.html"
    assert "DIR must be a folder" in refused(capsys, "-o", page)
    assert "'nowhere' must hold run directories" in refused(capsys, "nowhere", "-o", page)
    assert "it does not exist" in refused(capsys, "nowhere", "-o", page)
    assert "--figures must be a folder" in refused(capsys, table, "-o", page, "--figures", table)
    assert not page.exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "must hold run directories" in refused(capsys, empty, "-o", page)
    bad = tmp_path / "bad.csv"
    bad.write_text("configuration,epoch\na,0\n")
    assert "is no table of trainings" in refused(capsys, bad, "-o", page)
    run_directory = empty / "a" / "fold-0"
    run_directory.mkdir(parents=True)
    (run_directory / "config.json").write_text('{"recipe": {"data": "digits"}}')
    assert "the recipe in" in refused(capsys, empty, "-o", page)
    assert "was given twice" in refused(capsys, table, table, "-o", page)
    assert not page.exists()


def test_a_unit_in_two_places_names_both(capsys, tmp_path: Path, table: Path) -> None:
    page = tmp_path / "page.html"
    copy = tmp_path / "tables" / "copy.csv"
    copy.parent.mkdir()
    copy.write_bytes(table.read_bytes())
    said = refused(capsys, table, copy.parent, "-o", page)
    assert f"was given twice, by {str(table)!r} and by {str(copy)!r}: leave one" in said
    path = _run_directory(tmp_path / "runs" / "a" / "fold-1")
    results.write(results.load(tmp_path / "runs"), copy)
    said = refused(capsys, tmp_path / "runs", copy, "-o", page)
    assert f"fold 1 of 'a' was given twice, by {str(path)!r} and by {str(copy)!r}" in said
    assert not page.exists()


def test_tables_of_other_things_are_passed_over(capsys, tmp_path: Path, table: Path) -> None:
    page, folder = tmp_path / "page.html", tmp_path / "tables"
    folder.mkdir()
    foreign = folder / "foreign.csv"
    foreign.write_text("flags,epoch,valid_accuracy\n,0,0.5\n")
    said = refused(capsys, folder, "-o", page)
    assert f"{str(foreign)!r} is no table of trainings" in said
    good = folder / "deeper" / "grid.csv"
    good.parent.mkdir()
    good.write_bytes(table.read_bytes())
    code, out, err = run(capsys, folder, "-o", page)
    assert (code, err) == (0, "")
    notice, last = out.splitlines()
    assert notice == f"{str(foreign)!r} is no table of trainings: it was passed over."
    assert "4 units" in last
    good.rename(folder / "grid.csv")
    (folder / "same.csv").symlink_to("grid.csv")
    code, again, _ = run(capsys, folder, "-o", page)
    assert (code, again) == (0, out)
    (folder / "same.csv").unlink()
    assert "is no table of trainings" in refused(capsys, foreign, "-o", page)
    (folder / "grid.csv").write_text(table.read_text().replace(",seconds", ",minutes"))
    assert "grid.csv' is no table of trainings" in refused(capsys, folder, "-o", page)


def test_a_title_of_ones_own(capsys, tmp_path: Path, table: Path) -> None:
    page = tmp_path / "page.html"
    assert run(capsys, table, "-o", page, "--title", "Mine & <yours>")[0] == 0
    assert "<title>Mine &amp; &lt;yours&gt;</title>" in page.read_text(encoding="utf-8")


def test_where_it_cannot_be_written_is_a_sentence(capsys, tmp_path: Path, table: Path) -> None:
    assert "does not end in .html" in refused(capsys, table, "-o", tmp_path / "page.txt")
    assert "is a folder" in refused(capsys, table, "-o", _folder(tmp_path / "page.html"))
    assert "does not exist" in refused(capsys, table, "-o", tmp_path / "no" / "page.html")
    assert "--out needs a value" in refused(capsys, table, "-o")
    assert "after DIR, the flags are --out, --figures, --title, but '--json'" in refused(
        capsys, table, "--json"
    )
    inside = table / "figures"
    said = refused(capsys, table, "-o", tmp_path / "new.html", "--figures", inside)
    assert "--figures must be a folder that can be written" in said
    said = refused(capsys, "x" * 5000, "-o", tmp_path / "new.html")
    assert "…' cannot be used (File name too long): mend that, or give another path." in said
    assert len(said) < 400
    assert not (tmp_path / "new.html").exists()


def test_a_name_as_long_as_names_may_be(capsys, tmp_path: Path, table: Path) -> None:
    page = tmp_path / ("x" * 250 + ".html")
    assert run(capsys, table, "-o", page)[0] == 0
    assert page.stat().st_size > 0


def test_an_error_leaves_the_older_page(capsys, tmp_path: Path, table: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("before")
    refused(capsys, tmp_path / "nowhere", "-o", page)
    assert page.read_text() == "before"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["grid.csv", "page.html"]


def test_units_still_in_training_are_shown(capsys, tmp_path: Path) -> None:
    done, begun = made_up(folds=2, most=1, epochs=10)
    begun = replace(begun, curve=begun.curve[:3], seconds=None, best_valid_accuracy=None)
    table = tmp_path / "grid.csv"
    results.write([done, begun], table)
    page = tmp_path / "page.html"
    assert run(capsys, table, "-o", page)[0] == 0
    assert "1 of 2 done" in page.read_text(encoding="utf-8")
    assert "3 of 10" in page.read_text(encoding="utf-8")


def test_everybody_may_read_it_whom_the_system_lets(capsys, tmp_path: Path, table: Path) -> None:
    page = tmp_path / "page.html"
    before = os.umask(0o022)
    try:
        assert run(capsys, table, "-o", page)[0] == 0
    finally:
        os.umask(before)
    if os.name == "posix":
        assert stat.S_IMODE(page.stat().st_mode) == 0o644


def _run_directory(path: Path) -> Path:
    """Such as softstair train leaves, as far as it is read."""
    recipe = Recipe(fold=1, epochs=2)
    config = {"recipe": recipe.to_json(), "data": {"name": "digits"}, "device": "cpu"}
    lines = [vars(epoch) for epoch in made_up(most=1, epochs=2)[0].curve]
    accuracy = max(line["valid_accuracy"] for line in lines)
    summary = {
        "valid_accuracy": lines[-1]["valid_accuracy"], "best_valid_accuracy": accuracy,
        "test_accuracy": None, "epochs": 2, "images_per_second": 9.0, "seconds": 2.5,
        "config": config,
    }  # fmt: skip
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "summary.json").write_text(json.dumps(summary))
    return path


def _folder(path: Path) -> Path:
    path.mkdir()
    return path
