"""``softstair grid``: what it lists, what it refuses, how far it says that a grid is."""

import errno
import fcntl
import json
import os
import re
import shutil
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from io import StringIO
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch

from experiments.test_design import GRIDS, TABLE, point
from softstair import cli
from softstair.cli import _grid_progress, _grid_status
from softstair.cli._console import Console
from softstair.cli._grid_progress import Progress
from softstair.cli.grid import Command
from softstair.experiments import load
from softstair.experiments.design_file import read
from softstair.experiments.estimate import Estimate
from softstair.train import Recipe, train
from softstair.train.records import recipe_of
from train.short import files, is_sentence

DESIGN = """
folds = [0, 1]
[recipe]
limit = 120
batch = 32
epochs = 2
period = 0.5
[vary]
forward = ["mode", "random"]
"""


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty directory, a wide screen without colours, one thread."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "SOFTSTAIR_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(["grid", *words])
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one sentence, and nothing else anywhere."""
    before = sorted(Path.cwd().rglob("*"))
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, ""), (words, out, err)
    assert err.count("\n") == 1, err
    assert is_sentence(err), err
    assert err.startswith("softstair grid: ")
    assert sorted(Path.cwd().rglob("*")) == before
    return err


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What --json prints."""
    code, out, err = run(capsys, *words, "--dry-run", "--json")
    assert (code, err) == (0, ""), err
    return json.loads(out)


def recipes(plain: dict[str, Any]) -> dict[str, Recipe]:
    found = {}
    for one in plain["configurations"]:
        assert one["name"] not in found
        found[one["name"]] = Recipe.from_json({k: v for k, v in one.items() if k != "name"})
    return found


def rows(screen: str) -> dict[str, list[str]]:
    """The rows of a table on the screen, by their first cell."""
    lines = [line for line in screen.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    return {row[0]: row[1:] for row in cells}


# ---- What there is


def test_help_has_every_flag_with_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--help")
    assert (code, err) == (0, "")
    plain = re.sub(r"[│╭╮╰╯─]", " ", out)
    for one in fields(Command):
        if one.name != "design":
            assert f"--{one.name.replace('_', '-')}" in plain
    for word in ("DESIGN", "paper-cifar10", "TOML", "fold-<k>", "130", "143", "FIELD=VALUE"):
        assert word in plain


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("name", GRIDS)
def test_a_dry_run_lists_the_papers_grid_each_once(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = listed(capsys, name)
    assert (plain["name"], plain["folds"]) == (name, [0, 1, 2, 3, 4])
    found = recipes(plain)
    assert Counter(map(point, found.values())) == Counter(GRIDS[name][0])
    for recipe in found.values():
        assert {field: getattr(recipe, field) for field in TABLE[name]} == TABLE[name]
    assert not list(Path.cwd().iterdir())


@pytest.mark.nightly
def test_a_dry_run_says_how_much_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Without the data there is no estimate, and the reason is a sentence."""
    code, out, err = run(capsys, "paper-cifar10", "--dry-run")
    assert (code, err) == (0, "")
    assert "264 configurations × 5 folds = 1320 units of 500 epochs" in out
    intervals = {"none", "same_start", "same_end", "partition", "overlapped"}
    assert {*rows(out)["interval"][0].split(", ")} == intervals
    last = out.splitlines()[-1]
    assert last.startswith("no estimate of the time: ")
    assert is_sentence(last)
    assert not list(Path.cwd().iterdir())


def test_a_dry_run_estimates_and_keeps_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("softstair.experiments.estimate.MOST", 5)
    Path("mine.toml").write_text(DESIGN)
    code, out, err = run(capsys, "mine.toml", "--dry-run", "--device", "cpu")
    assert (code, err) == (0, "")
    assert "2 configurations × 2 folds = 4 units of 2 epochs" in out
    assert re.search(r"a step of forward=mode takes [\d.]+ ms on cpu", out)
    assert re.search(r"and [\d.]+ \w+ for all, one after another", out)
    assert "[[without]]" not in out
    assert [path.name for path in Path.cwd().iterdir()] == ["mine.toml"]


def test_a_dry_run_says_what_without_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the whole design, whichever part is asked for."""
    Path("mine.toml").write_text(
        DESIGN + 'seed = [0, 1, 2]\n[[without]]\nforward = "random"\nseed = [0, 2]\n'
    )
    for words in ([], ["--where", "forward=mode"]):
        out = run(capsys, "mine.toml", "--dry-run", "--device", "nowhere", *words)[1]
        assert "[[without]] leaves out 2 of the combinations of mine\n" in out


# ---- Flags that choose and change


@pytest.mark.parametrize(
    ("words", "number", "units"),
    [
        ("--where interval=partition", 64, 320),
        ("--where interval=none", 8, 40),
        ("--where interval=partition,same_end power=progressive --folds 0", 64, 64),
        ("--where static-mean=true static_std=false forward=mode --folds 4,2", 32, 64),
        ("--where interval=none --folds 0-2", 8, 24),
        ("--where interval=none --folds 4,0-2", 8, 32),
    ],
)
def test_where_and_folds(
    words: str, number: int, units: int, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = listed(capsys, "paper-cifar10", *words.split())
    assert len(recipes(plain)) == number
    assert number * len(plain["folds"]) == units


def test_epochs_and_set(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--epochs 100 --set precision=float32 seed=3 std0=0.3 truncate=false"
    words += " centre_input=true"
    for recipe in recipes(listed(capsys, "paper-svhn", *words.split())).values():
        assert (recipe.epochs, recipe.period, recipe.drop) == (100, 10.0, 80.0)
        assert (recipe.precision, recipe.seed, recipe.std0) == ("float32", 3, 0.3)
        assert (recipe.truncate, recipe.centre_input) == (False, True)
    (one,) = recipes(
        listed(capsys, "paper-svhn", "--where", "noise=normal", "forward=mode",
               "--set", 'skip=["features.0","features.3"]', "epochs=50", "period=7")
    ).values()  # fmt: skip
    assert one.skip == ("features.0", "features.3")
    assert (one.epochs, one.period, one.drop) == (50, 7.0, 40.0)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("paper-svhn --where interval", ["--where", "field=value", "'interval'"]),
        ("paper-svhn --where interval=", ["--where", "'interval='"]),
        ("paper-svhn --where =x", ["--where", "'=x'"]),
        ("paper-svhn --where intervall=partition", ["'intervall'", "did you mean 'interval'"]),
        ("paper-svhn --where interval=sideways", ["'sideways'", "partition", "paper-svhn"]),
        ("paper-svhn --where forward=hard", ["'hard'", "expectation"]),
        ("paper-svhn --where static_mean=false", ["static_mean must be one of true", "'false'"]),
        (
            "paper-svhn --where noise=normal interval=partition",
            ["no configuration", "noise=normal"],
        ),
        ("paper-svhn --folds 5", ["0 to 4", "[5]"]),
        ("paper-svhn --folds 0,0", ["different", "[0, 0]"]),
        ("paper-svhn --folds=-1", ["--folds", "from 0 to 4", "0-1", "'-1'"]),
        ("paper-svhn --folds 2-0", ["--folds", "'2-0'"]),
        ("paper-svhn --folds 0-5", ["--folds", "from 0 to 4", "'0-5'"]),
        ("paper-svhn --folds 0-99999", ["--folds", "from 0 to 4", "'0-99999'"]),
        ("paper-svhn --folds 0-2,1", ["different", "[0, 1, 2, 1]"]),
        ("paper-svhn --set folds=1000000000", ["at most 10,000", "1000000000", "--folds"]),
        ("paper-svhn --folds 0-", ["--folds", "'0-'"]),
        ("paper-svhn --where fold=0", ["--folds", "fold was given"]),
        ("paper-svhn --where fold=1", ["--folds", "fold was given"]),
        ("paper-svhn --where noise=unifrom", ["did you mean 'uniform'", "'unifrom'"]),
        ("paper-svhn --folds 1.0", ["--folds", "'1.0'"]),
        ("paper-svhn --folds ,", ["--folds", "','"]),
        ("paper-svhn --folds=", ["--folds", "''"]),
        ("paper-svhn --folds 999999", ["--folds", "'999999'"]),
        ("paper-svhn --epochs 0", ["epochs", "but 0"]),
        ("paper-svhn --epochs=-3", ["epochs", "-3"]),
        ("paper-svhn --epochs 1.5", ["--epochs", "'1.5'"]),
        ("paper-svhn --epochs many", ["--epochs", "'many'"]),
        ("paper-svhn --set seed", ["--set", "field=value", "'seed'"]),
        ("paper-svhn --set sed=1", ["'sed'", "seed"]),
        ("paper-svhn --set seed=x", ["seed", "'x'"]),
        ("paper-svhn --set seed=1,2", ["seed", "'1,2'"]),
        ("paper-svhn --set batch=1", ["batch", "but 1"]),
        ("paper-svhn --set precision=float64", ["precision", "'float64'", "bfloat16"]),
        ("paper-svhn --set augment=shift", ["augment", "'shift'", "svhn"]),
        ("paper-svhn --json", ["--json", "--dry-run", "--status"]),
        ("paper-svhn --dry-run --status", ["--dry-run", "--status"]),
        ("paper-svhn --address x:1", ["--address", "--engine ray", "'x:1'"]),
        ("paper-svhn --engine slurm", ["--engine", "local", "ray", "'slurm'"]),
        ("paper-svhn --where", ["--where needs one FIELD=VALUE or more, but none was given"]),
        ("paper-svhn --set --json", ["--set needs one FIELD=VALUE or more, but none was given"]),
        ("paper-svhn --epochs 2 --set epochs=3", ["--epochs and --set epochs exclude each other"]),
        ("paper-svhn --threads 0", ["--threads must be from 1 to 1024, but 0 was given"]),
        ("paper-svhn --threads -1 --dry-run", ["--threads must be from 1 to 1024, but -1"]),
        ("paper-svhn --threads 100000", ["--threads must be from 1 to 1024, but 100000"]),
        ("paper-svhn --together 0", ["--together", "'0'"]),
        ("paper-svhn --together many", ["--together", "'many'"]),
        ("paper-svhn --table table.xlsx", ["--table", ".csv or .parquet", "'table.xlsx'"]),
        ("paper-svhn --flag", ["'--flag'", "after DESIGN, the flags are --out, --where"]),
        ("paper-svhn extra", ["'extra'"]),
        ("", ["DESIGN", "paper-cifar10", "TOML"]),
    ],
)
def test_refused(words: str, told: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, *words.split())
    for word in told:
        assert word in said


# ---- Flags that say one thing, and do another


@pytest.mark.parametrize("flag", ["--set", "--where"])
def test_a_flag_given_twice_is_heard_twice_or_refused(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = {"--set": ("seed=3", "batch=64"), "--where": ("forward=mode", "power=none")}[
        flag
    ]
    code, out, err = run(capsys, "paper-svhn", flag, first, flag, second, "--dry-run", "--json")
    if code == 2:
        assert is_sentence(err)
        return
    for recipe in recipes(json.loads(out)).values():
        both = (recipe.seed, recipe.batch) == (3, 64)
        assert both if flag == "--set" else (recipe.forward, recipe.static_std) == ("mode", True)


@pytest.mark.parametrize("word", ["drop=None", "static_mean=True", "truncate=False"])
def test_set_takes_what_its_own_sentence_says(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """None and False are the words of the refusal, of --where's values and of --help."""
    name, _, value = word.partition("=")
    for recipe in recipes(listed(capsys, "paper-svhn", "--set", word)).values():
        assert getattr(recipe, name) == {"None": None, "True": True, "False": False}[value]


@pytest.mark.parametrize("word", ["noise=uniform", "forward=mode", "interval=partition"])
def test_set_does_not_make_two_of_one(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "paper-svhn", "--set", word, "--dry-run", "--json")
    if code == 2:
        assert word.partition("=")[0] in err
        return
    found = [point(recipe) for recipe in recipes(json.loads(out)).values()]
    assert len(found) == len(set(found))


def test_fewer_folds(capsys: pytest.CaptureFixture[str]) -> None:
    plain = listed(capsys, "paper-svhn", "--set", "folds=3", "--folds", "0,1,2")
    assert plain["folds"] == [0, 1, 2]
    assert {recipe.folds for recipe in recipes(plain).values()} == {3}


def test_more_folds_are_those_of_the_design_where_it_names_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """0 and 1 of ten; a design that names none takes all."""
    Path("mine.toml").write_text(DESIGN)
    Path("every.toml").write_text(DESIGN.replace("folds = [0, 1]", ""))
    Path("five.toml").write_text(DESIGN.replace("[0, 1]", "[0, 1, 2, 3, 4]"))
    for name, folds in (("mine", [0, 1]), ("every", range(10)), ("five", range(5))):
        plain = listed(capsys, f"{name}.toml", "--set", "folds=10")
        assert plain["folds"] == list(folds)
        assert {recipe.folds for recipe in recipes(plain).values()} == {10}
    assert listed(capsys, "mine.toml", "--set", "folds=10", "--folds", "7-9")["folds"] == [7, 8, 9]
    assert listed(capsys, "paper-svhn", "--set", "folds=3")["folds"] == [0, 1, 2]
    said = refused(capsys, "five.toml", "--set", "folds=3", "--dry-run")
    assert "more than 4" in said
    assert "3 was given: choose others with --folds" in said


def test_set_fold_is_not_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "paper-svhn", "--set", "fold=3", "--dry-run", "--json")
    assert "--folds" in err if code == 2 else json.loads(out)["folds"] == [3]


# ---- A grid whose units are done, so that nothing needs a process


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """runs/mine as the engine leaves it, made by plain training."""
    folder = tmp_path_factory.mktemp("done")
    (folder / "mine.toml").write_text(DESIGN)
    for unit in read(folder / "mine.toml").units():
        train(unit.recipe, unit.path(folder / "runs" / "mine"), device="cpu")
    return folder


@pytest.fixture
def done(store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same here; whoever starts a process fails."""
    shutil.copytree(store, Path.cwd(), dirs_exist_ok=True)
    monkeypatch.setattr("softstair.train.pool.Worker", None)
    return Path("runs/mine")


def keep_an_epoch(path: Path) -> list[str]:
    """Leaves the first line of the metrics, and returns all."""
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text(lines[0])
    return lines


def accuracies(folder: Path, name: str) -> list[float]:
    found = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}/*/summary.json"))]
    return [one["valid_accuracy"] for one in found]


def test_what_came_of_it(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(done)
    code, out, err = run(capsys, "mine.toml", "--device", "cpu")
    assert (code, err) == (0, "")
    assert f"table: {done / 'table.csv'}" in out
    found = rows(out)
    assert set(found) == {"forward=mode", "forward=random"}
    best = max(found, key=lambda name: statistics.mean(accuracies(done, name)))
    assert f"\nbest: {best}, validation {found[best][1]}\n" in out
    for name, (folds, valid, test, _) in found.items():
        values = accuracies(done, name)
        spread = f"{statistics.mean(values):.2%} ± {statistics.stdev(values):.2%}"
        assert (folds, valid, test) == ("2", spread, "none")
    after = files(done)
    assert after.pop("table.csv")
    assert after == before
    assert len(load(done / "table.csv")) == 4


@pytest.mark.parametrize("name", ["x.parquet", "x.csv", "runs/mine/x.csv"])
def test_the_table_where_it_was_asked_for(
    name: str, done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="needs pyarrow")
    code, out, err = run(capsys, "mine.toml", "--table", name)
    assert (code, err) == (0, "")
    assert f"table: {name}" in out
    assert not (done / "table.csv").exists()
    found = load(name)
    assert [len(one.curve) for one in found] == [2, 2, 2, 2]
    assert [one.fold for one in found] == [0, 1, 0, 1]


def test_a_part_of_a_grid_has_a_table_of_its_own(
    done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--where", "forward=mode", "--folds", "1", "--table", "part.csv"]
    code, out, err = run(capsys, "mine.toml", *words)
    assert (code, err) == (0, "")
    (only,) = load("part.csv")
    assert (only.configuration, only.fold) == ("forward=mode", 1)
    assert run(capsys, "mine.toml", *words[:4])[0] == 0
    assert len(load(done / "table.csv")) > 1, "what other commands have trained is in it"
    assert rows(out)["forward=mode"][:2] == ["1", f"{only.valid_accuracy:.2%}"]


def test_another_recipe_in_the_folder_is_refused(
    done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run(capsys, "mine.toml", "--dry-run", "--device", "cpu")[1]
    assert f"of these 4 done in {done}, none waiting" in out
    others = ["--status"], ["--dry-run"], []
    for words in (
        ["--set", "seed=5"],
        ["--epochs", "4"],
        *(["--set", "batch=16", *o] for o in others),
    ):
        said = refused(capsys, "mine.toml", *words)
        assert "was begun with" in said
        assert "another --out" in said
    assert "seed = 0" in refused(capsys, "mine.toml", "--set", "seed=5", "--where", "forward=mode")


def put_version(path: Path, version: str) -> None:
    """Lets a run directory record another data version."""
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(text.replace("scikit-learn digits", version))


def test_a_grid_does_not_go_on_with_another_version_of_its_data(
    done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even if the unit that is left has not begun, or is of another part of the design."""
    put_version(done / "forward=mode" / "fold-0", "other digits")
    assert run(capsys, "mine.toml")[0] == 0, "nothing is left to train"
    (done / "table.csv").unlink()
    shutil.rmtree(done / "forward=random" / "fold-1")
    for words in ([], ["--where", "forward=random"]):
        said = refused(capsys, "mine.toml", *words)
        assert "was begun with the data 'other digits'" in said
        assert "'data' holds 'scikit-learn digits'" in said


def test_data_versions_are_not_averaged(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = accuracies(done, "forward=mode")
    out = run(capsys, "mine.toml")[1]
    assert "\ndata: scikit-learn digits\n" in out
    put_version(done / "forward=mode" / "fold-1", "other digits")
    out = run(capsys, "mine.toml")[1]
    found = rows(out)
    assert found["forward=mode (scikit-learn digits)"][:2] == ["1", f"{values[0]:.2%}"]
    assert found["forward=mode (other digits)"][:2] == ["1", f"{values[1]:.2%}"]
    assert "\ndata: scikit-learn digits; other digits\n" in out
    code, out, _ = run(capsys, "mine.toml", "--status")
    assert code == 0
    found = rows(out)
    assert [found[name][-1] for name in ("forward=mode", "all")] == ["", ""]
    assert found["forward=random"][-1] != ""
    assert "several data versions, no mean over them: scikit-learn digits; other digits" in out


def test_a_dry_run_says_what_is_left(
    done: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of units and epochs that are not done; what is done and begun is counted apart."""
    measured: list[Recipe] = []

    def estimate(recipe: Recipe, *_: Any) -> Estimate:
        measured.append(recipe)
        return Estimate(step=0.001, evaluation=0.1, unit=20.0, device="cpu")

    monkeypatch.setattr("softstair.experiments.estimate.estimate", estimate)
    code, out, err = run(capsys, "mine.toml", "--dry-run")
    assert (code, err) == (0, "")
    assert f"of these 4 done in {done}, none waiting" in out
    assert not measured, "there is nothing to estimate"
    (done / "forward=mode" / "fold-1" / "summary.json").unlink()
    keep_an_epoch(done / "forward=mode" / "fold-1")
    shutil.rmtree(done / "forward=random" / "fold-0")
    out = run(capsys, "mine.toml", "--dry-run")[1]
    assert f"of these 2 done, 1 begun in {done}, 1 waiting" in out
    assert "about 20 s a unit, and 30 s for what is left of 2 units, one after another" in out
    shutil.rmtree(done)
    out = run(capsys, "mine.toml", "--dry-run")[1]
    assert "about 20 s a unit, and 80 s for all, one after another" in out
    assert "waiting" not in out


@pytest.mark.parametrize("words", [["--status"], [], ["--dry-run", "--device", "nowhere"]])
def test_a_row_is_a_line_where_there_is_no_terminal(
    words: list[str],
    done: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However narrow, so that grep finds it; on a terminal it is folded."""
    monkeypatch.setenv("COLUMNS", "30")
    out = run(capsys, "mine.toml", *words)[1]
    if "--dry-run" in words:
        assert rows(out)["forward"] == ["mode, random"]
        return
    found = rows(out)
    assert {"forward=mode", "forward=random"} <= set(found)
    assert all("" not in (found[name][0], found[name][-1]) for name in found)


@pytest.mark.parametrize("path", ["nowhere/x.csv", "folder.csv", "mine.toml/x.csv"])
def test_a_table_that_cannot_be_written_is_refused_before_the_work(
    path: str, done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("folder.csv").mkdir()
    shutil.rmtree(done)  # so that there is work: a process would be started, and fail
    said = refused(capsys, "mine.toml", "--table", path)
    assert "--table" in said
    assert repr(path) in said


def test_parquet_without_pyarrow_is_refused_before_the_work(
    done: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    shutil.rmtree(done)
    assert "pip install 'softstair[tables]'" in refused(capsys, "mine.toml", "--table", "x.parquet")


def test_a_run_directory_is_no_folder_for_a_grid(
    done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(done / "forward=mode" / "fold-0" / "config.json", done)
    said = refused(capsys, "mine.toml")
    assert "another --out" in said


def test_damage_beside_the_grid_does_not_spoil_its_table(
    done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(done / "forward=mode", done / "another")
    (other / "fold-0" / "config.json").write_text("{")
    code, _, err = run(capsys, "mine.toml")
    assert (code, err) == (0, "")
    assert "another" not in {one.configuration for one in load(done / "table.csv") if one.fold == 0}


def test_an_out_that_is_a_file_is_refused_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").write_text("")
    for words in ([], ["--status"], ["--dry-run"]):
        said = refused(capsys, "paper-svhn", "--out", "there", *words)
        assert "'there' is a file" in said


def test_what_was_refused_before_it_began_leaves_no_folder(tmp_path: Path) -> None:
    """As softstair grid paper-cifar10 does without the data."""
    with pytest.raises(ValueError, match="softstair data fetch"):
        train(Recipe(data="cifar10"), tmp_path / "runs" / "paper" / "a" / "fold-0", data_dir="data")
    assert not list(tmp_path.iterdir())


# ---- --status, at every stage


def status(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, list[str]]:
    before = files(Path.cwd())
    code, out, err = run(capsys, "mine.toml", "--status", *words)
    assert (code, err) == (0, ""), err
    assert files(Path.cwd()) == before
    return rows(out)


def long_ago(path: Path) -> None:
    for one in (path, *path.rglob("*")):
        os.utime(one, (1e9, 1e9), follow_symlinks=False)


def test_status_from_nothing_to_done(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mode, random = done / "forward=mode", done / "forward=random"
    values = {name: accuracies(done, name) for name in ("forward=mode", "forward=random")}
    mean = lambda numbers: f"{statistics.mean(numbers):.2%}"
    every = [*values["forward=mode"], *values["forward=random"]]
    # All done: done, training, begun, waiting, epochs, accuracy.
    found = status(capsys)
    assert found["forward=mode"] == ["2", "", "", "", "4/4", mean(values["forward=mode"])]
    assert found["forward=random"] == ["2", "", "", "", "4/4", mean(values["forward=random"])]
    assert found["all"] == ["4", "", "", "", "8/8", mean(every)]
    # One not, and somebody trains it; how long ago it wrote something does not matter.
    (mode / "fold-1" / "summary.json").unlink()
    lines = keep_an_epoch(mode / "fold-1")
    first = json.loads(lines[0])["valid_accuracy"]
    half = ["1", "1", "", "", "3/4", mean([values["forward=mode"][0], first])]
    with filelock.FileLock(mode / "fold-1" / "lock"):
        assert status(capsys)["forward=mode"] == half
        # With half a line more: somebody is writing.
        (mode / "fold-1" / "metrics.jsonl").write_text(lines[0] + lines[1][:50])
        assert status(capsys)["forward=mode"] == half
        long_ago(mode / "fold-1")
        assert status(capsys)["forward=mode"] == half
    # And nobody does, though it was written just now.
    (mode / "fold-1" / "metrics.jsonl").write_text(lines[0])
    assert status(capsys)["forward=mode"] == ["1", "", "1", *half[3:]]
    # Begun, and no epoch yet.
    (mode / "fold-1" / "metrics.jsonl").write_text("")
    assert status(capsys)["forward=mode"][4] == "2/4"
    (mode / "fold-1" / "metrics.jsonl").unlink()
    assert sum(int(cell or 0) for cell in status(capsys)["forward=mode"][:4]) == 2
    # Not begun.
    shutil.rmtree(mode / "fold-1")
    shutil.rmtree(random)
    found = status(capsys)
    assert found["forward=mode"] == ["1", "", "", "1", "2/4", mean(values["forward=mode"][:1])]
    assert found["forward=random"] == ["", "", "", "2", "0/4", ""]
    assert found["all"][:5] == ["1", "", "", "3", "2/8"]
    # Nothing at all; and it makes nothing.
    shutil.rmtree("runs")
    assert status(capsys)["all"] == ["", "", "", "4", "0/8", ""]
    assert not Path("runs").exists()


def test_status_makes_no_lock_and_does_without(
    done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the lock cannot be looked at, what was written lately is taken to be training."""
    path = done / "forward=mode" / "fold-1"
    (path / "summary.json").unlink()
    (path / "lock").unlink()
    assert status(capsys)["forward=mode"][:4] == ["1", "", "1", ""]
    assert not (path / "lock").exists()
    (path / "lock").symlink_to("lock")  # nobody can open it
    assert status(capsys)["forward=mode"][:4] == ["1", "1", "", ""]
    (path / "lock").unlink()
    os.mkfifo(path / "lock")  # nobody ever writes there
    assert status(capsys)["forward=mode"][:4] == ["1", "", "1", ""]
    (path / "lock").unlink()
    (path / "lock").symlink_to("lock")
    long_ago(path)
    assert status(capsys)["forward=mode"][:4] == ["1", "", "1", ""]


def test_status_where_files_cannot_be_locked(
    done: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    (done / "forward=mode" / "fold-1" / "summary.json").unlink()
    assert status(capsys)["forward=mode"][:4] == ["1", "1", "", ""]
    long_ago(done / "forward=mode" / "fold-1")
    assert status(capsys)["forward=mode"][:4] == ["1", "", "1", ""]


def test_a_trainer_that_starts_while_somebody_looks_is_not_refused(done: Path) -> None:
    path = done / "forward=mode" / "fold-1"
    (path / "summary.json").unlink()
    recipe = recipe_of(path)
    assert recipe is not None
    with open(path / "lock", "rb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        away = threading.Timer(0.3, lambda: fcntl.flock(looking, fcntl.LOCK_UN))
        away.start()
        train(recipe, path, device="cpu", resume=True)
        away.join()
    assert (path / "summary.json").exists()


def test_status_as_data(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = accuracies(done, "forward=mode")
    (done / "forward=mode" / "fold-1" / "summary.json").unlink()
    shutil.rmtree(done / "forward=random")
    code, out, err = run(capsys, "mine.toml", "--status", "--json")
    assert (code, err) == (0, "")
    plain = json.loads(out)
    mode, random = plain.pop("configurations")
    counts = {"done": 1, "training": 0, "begun": 1, "waiting": 2, "epochs": 4, "of_epochs": 8}
    mean = statistics.mean(values)
    assert plain == {"name": "mine", "folder": str(done), **counts, "valid_accuracy": mean}
    assert [mode["name"], mode["waiting"], mode["of_epochs"]] == ["forward=mode", 0, 4]
    assert mode["units"] == [
        {
            "fold": fold,
            "state": ("done", "begun")[fold],
            "epochs": 2,
            "of_epochs": 2,
            "valid_accuracy": values[fold],
            "data_version": "scikit-learn digits",
        }
        for fold in (0, 1)
    ]
    assert (random["waiting"], random["epochs"], random["valid_accuracy"]) == (2, 0, None)


def test_what_is_done_is_counted_whatever_its_place(
    done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second of four comes last; a unit that had but its summary to write has an accuracy."""
    units = list(read(Path("mine.toml")).units())
    late = units[1].path(done) / "summary.json"
    kept = late.read_bytes()
    late.unlink()
    with Progress(units, done) as progress:
        progress.told(units[1], {"kind": "start"})
        late.write_bytes(kept)
        progress.told(units[1], {"kind": "done"})
    accuracy = json.loads(kept)["valid_accuracy"]
    assert capsys.readouterr().err == (
        f"softstair grid: 4/4 {units[1].name} is done, validation {accuracy:.2%}\n"
    )


def test_on_a_terminal_a_bar_has_the_number_of_those_done_or_begun(
    done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = StringIO()
    console = lambda **given: Console(file=screen, force_terminal=True, width=160, **given)
    monkeypatch.setattr(_grid_progress, "Console", console)
    units = list(read(Path("mine.toml")).units())
    for unit in units[:2]:
        (unit.path(done) / "summary.json").unlink()
    with Progress(units, done) as progress:
        for unit in (units[1], units[0]):
            progress.told(unit, {"kind": "start"})
            progress.told(unit, {"kind": "done"})
    for label in (f"3/4 {units[1].name} getting ready", f"4/4 {units[0].name} getting ready"):
        assert label in screen.getvalue()


def test_status_of_a_part_and_elsewhere(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = status(capsys, "--where", "forward=random", "--folds", "1")
    assert set(found) == {"forward=random", "all"}
    assert found["all"][:5] == ["1", "", "", "", "2/2"]
    done.rename("elsewhere")
    assert status(capsys)["all"][3] == "4"
    assert status(capsys, "--out", "elsewhere")["all"][0] == "4"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", "{}\n"),
        ("metrics.jsonl", "half\n"),
        ("metrics.jsonl", "3\n"),
        ("config.json", "{"),
        ("config.json", "{}"),
        ("summary.json", "{}"),
        ("metrics.jsonl", "[" * 100_000 + "\n"),
        ("metrics.jsonl", '{"valid_accuracy": NaN}\n'),
        ("metrics.jsonl", '{"valid_accuracy": 7}\n'),
    ],
    ids=lambda content: content[:30],
)
def test_status_of_damage_is_one_sentence(
    name: str, content: str, done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = done / "forward=mode" / "fold-0" / name
    file.write_text(content)
    assert str(file) in refused(capsys, "mine.toml", "--status")


@pytest.mark.parametrize("words", [[], ["--status"]], ids=["train", "status"])
def test_a_run_of_another_version_is_said_to_be_one(
    words: list[str], done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = done / "forward=mode" / "fold-0" / "config.json"
    config = json.loads(file.read_text())
    config["versions"]["softstair"] = "0.7.3"
    config["recipe"]["wings"] = 2
    file.write_text(json.dumps(config))
    said = refused(capsys, "mine.toml", *words)
    assert "version" in said
    assert "0.7.3" in said


def test_on_a_terminal_it_looks_until_all_is_done(
    done: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit that is done between two looks is seen in the second, which is then the last."""
    screen, looks = StringIO(), []
    console = lambda **given: Console(file=screen, force_terminal=True, width=120, **given)
    monkeypatch.setattr(_grid_status, "Console", console)
    late = done / "forward=random" / "fold-1" / "summary.json"
    kept = late.read_bytes()
    late.unlink()

    class Clock:
        time = staticmethod(lambda: late.parent.stat().st_mtime)

        @staticmethod
        def sleep(seconds: float) -> None:
            looks.append(seconds)
            if len(looks) == 2:
                late.write_bytes(kept)

    monkeypatch.setattr(_grid_status, "time", Clock)
    assert run(capsys, "mine.toml", "--status") == (0, "", "")
    assert len(looks) == 2
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    found = [line for line in plain.splitlines() if "all" in line]
    assert [re.findall(r"\d+", line)[0] for line in found][-1] == "4"
    assert re.findall(r"\d+", found[0])[0] == "3"


def test_ray_that_is_not_installed_is_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    Path("one.toml").write_text("folds = [0]\n[recipe]\nlimit = 200\nepochs = 1\n")
    assert "pip install 'softstair[ray]'" in refused(capsys, "one.toml", "--engine", "ray")
