"""``python -m paper grid``: what it lists, what is an error, where each unit of a grid stands."""

import errno
import fcntl
import json
import os
import re
import shutil
import statistics
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import filelock
import pytest
from test_design import GRIDS

from helpers.commands import Run
from helpers.terminal import Terminal, without_escapes
from paper import Training, load, tables
from paper.__main__ import main
from paper.cli.grid import conditions
from softstair.train import Recipe, fit
from softstair.train.records import recipe_of
from train.short import files

pytest_plugins = ["helpers.small_grid"]
pytestmark = pytest.mark.usefixtures("plain_terminal", "narrow_digits")


def listed(run: Run, words: str) -> tuple[list[Recipe], list[int]]:
    """Return the recipes and the folds that a dry run lists."""
    code, out, err = run("grid", *words.split(), "--dry-run", "--json")
    assert (code, err) == (0, ""), err
    data = json.loads(out)
    names = [configuration.pop("name") for configuration in data["configurations"]]
    assert len(names) == len(set(names))
    return [Recipe.from_flat(entry) for entry in data["configurations"]], data["folds"]


def rows(screen: str) -> dict[str, list[str]]:
    """Return the rows of a table by their first cell."""
    lines = [line for line in screen.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    return {row[0]: row[1:] for row in cells}


# Designs and flags


def test_dry_run_lists_units_and_writes_nothing(run: Run) -> None:
    """Without the data set, and without building networks."""
    code, out, err = run("grid", "paper-svhn", "--dry-run")
    assert (code, err) == (0, "")
    number = len(GRIDS["paper-svhn"][0])
    last = f"{number} configurations × 5 folds = {5 * number} units of 500 epochs"
    assert out.splitlines()[-1] == last
    assert not list(Path.cwd().iterdir())


def test_dry_run_counts_what_is_left(done: Path, run: Run) -> None:
    (done / "forward=mode" / "fold-1" / "summary.json").unlink()
    shutil.rmtree(done / "forward=random" / "fold-0")
    out = run("grid", "mine.toml", "--dry-run")[1]
    assert f"of these 2 done, 1 begun, 1 waiting; runs: {done}" in out


@pytest.mark.quick
def test_where_and_folds(run: Run) -> None:
    words = "--where interval=partition,same_end --where power=progressive"
    recipes, folds = listed(run, f"paper-cifar10 {words} --folds 4,0-2")
    assert (len(recipes), folds) == (64, [4, 0, 1, 2])


@pytest.mark.quick
def test_epochs_and_set(run: Run) -> None:
    words = "--epochs 100 --set precision=float32 seed=3 std0=0.3 --set truncate=false"
    for recipe in listed(run, f"paper-svhn {words} centre_input=True")[0]:
        assert (recipe.run.epochs, recipe.noise.period, recipe.optimiser.drop) == (100, 10.0, 80.0)
        assert (recipe.run.precision, recipe.run.seed, recipe.noise.std0) == ("float32", 3, 0.3)
        assert (recipe.noise.truncate, recipe.data.centre_input) == (False, True)
    words = '--where noise=normal forward=mode --set skip=["a","b"] epochs=50 period=7 drop=None'
    (recipe,), _ = listed(run, f"paper-svhn {words}")
    assert recipe.network.skip == ("a", "b")
    assert (recipe.run.epochs, recipe.noise.period, recipe.optimiser.drop) == (50, 7.0, None)


@pytest.mark.quick
def test_folds_of_a_design_stay_unless_it_names_none(design: str, run: Run) -> None:
    Path("every.toml").write_text(design.replace("folds = [0, 1]", ""))
    Path("five.toml").write_text(design.replace("[0, 1]", "[0, 1, 2, 3, 4]"))
    for name, expected in (("mine", [0, 1]), ("every", range(10)), ("five", range(5))):
        recipes, folds = listed(run, f"{name}.toml --set folds=10")
        assert folds == list(expected)
        assert {recipe.data.folds for recipe in recipes} == {10}
    assert listed(run, "mine.toml --set folds=10 --folds 7-9")[1] == [7, 8, 9]
    assert listed(run, "paper-svhn --set folds=3")[1] == [0, 1, 2]
    error = run.rejected("grid", "five.toml", "--set", "folds=3", "--dry-run")
    assert "from 0 to 2" in error


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "messages"),
    [
        ("--where fold=0", ["--folds"]),
        ("--folds 5", ["0 to 4", "[5]"]),
        ("--folds 0-2,1", ["different", "[0, 1, 2, 1]"]),
        ("--folds 0-99999", ["--folds", "from 0 to 4", "'0-99999'"]),
        ("--epochs 2 --set epochs=3", ["--epochs and --set epochs exclude each other"]),
        ("--set folds=1000000000", ["from 2 to 1000000", "1000000000", "--set folds"]),
        ("--set fold=3", ["--folds"]),
        ("--set mdoel=vgg8", ["grid: a field must be", "did you mean 'model'?"]),
        ("--set noise=uniform", ["noise", "--where"]),
        ("--bits int9", ["--bits must be float, ternary"]),
        ("--bits int4 int4", ["two configurations have the same name", "bits=int4"]),
        ("--bits int4 --set bits=int8", ["--bits and --set bits exclude each other"]),
        ("--bits int4 --set weights=int8", ["weights", "--bits"]),
        ("--set augment=shift", ["augment", "'shift'", "svhn"]),
        ("--json", ["--json needs --dry-run or --status"]),
        ("--dry-run --status", ["--dry-run and --status"]),
        ("--address x:1", ["--address", "--engine ray", "'x:1'"]),
        ("--partial", ["--partial needs --minutes"]),
        ("--minutes 0", ["--minutes"]),
        ("--minutes 1 --engine ray", ["--minutes needs --engine local"]),
        ("--done nowhere.csv", ["does not exist"]),
        ("--jobs 0", ["--jobs must be an integer from 1 to 1024"]),
        ("--table table.xlsx", ["--table", ".csv, .csv.gz or .parquet", "'table.xlsx'"]),
    ],
)
def test_errors(words: str, messages: list[str], run: Run) -> None:
    error = run.rejected("grid", "paper-svhn", *words.split())
    assert all(message in error for message in messages), error


@pytest.mark.quick
def test_bits_are_a_factor_of_the_grid(design: str, run: Run) -> None:
    bits = ["int4", "ternary/uint2", "features.1=int8,*=int4"]
    words = f"mine.toml --bits {' '.join(bits)} --set seed=3"
    recipes, _ = listed(run, words)
    names = json.loads(run("grid", *words.split(), "--dry-run", "--json")[1])["configurations"]
    assert [entry["name"] for entry in names[:3]] == [
        f"forward=random,bits={name}"
        for name in ("int4", "ternary_uint2", "features.1=int8,_=int4")
    ]
    assert [recipe.network.bits for recipe in recipes] == bits * 2
    base = recipes[0].replace(bits=None)
    assert {recipe.replace(bits=None, forward="random") for recipe in recipes} == {base}
    assert base.run.seed == 3
    Path("stairs.toml").write_text(design + 'weights = ["int4", "int8"]\n')
    error = run.rejected("grid", "stairs.toml", "--bits", "int4", "--dry-run")
    assert "need the same weights in all of stairs: choose configurations with --where" in error


def test_conditions_are_fields_with_their_values() -> None:
    given = ["static-mean=true", "interval=partition", "interval=none,same_end"]
    wanted = {"static_mean": ["true"], "interval": ["partition", "none", "same_end"]}
    assert conditions(given, "--where") == wanted
    for word in ("interval", "=x", "interval=", "a b=c", "\n=x", ""):
        with pytest.raises(ValueError, match="--set must be given as field=value"):
            conditions([word], "--set")


# A grid whose units are done, so that no process is needed


def keep_one_epoch(path: Path) -> list[str]:
    """Leave the first line of the metrics; return all lines."""
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text(lines[0])
    return lines


def accuracies(folder: Path, name: str) -> list[float]:
    paths = sorted(folder.glob(f"{name}/*/summary.json"))
    return [json.loads(path.read_text())["valid_accuracy"] for path in paths]


def test_outcome(done: Path, run: Run) -> None:
    before = files(done)
    code, out, err = run("grid", "mine.toml", "--device", "cpu")
    assert (code, err) == (0, "")
    shown = rows(out)
    assert set(shown) == {"forward=mode", "forward=random"}
    best = max(shown, key=lambda name: statistics.mean(accuracies(done, name)))
    assert f"\nbest: {best}, validation {shown[best][1]}\n" in out
    for name, (count, valid, test, _) in shown.items():
        values = accuracies(done, name)
        spread = f"{statistics.mean(values):.2%} ({min(values):.2%} to {max(values):.2%})"
        assert (count, valid, test) == ("2", spread, "none")
    assert f"table: {done / 'table.csv'}" in out
    assert "\ndata: scikit-learn digits\n" in out
    after = files(done)
    assert after.pop("table.csv")
    assert after == before
    assert len(load(done / "table.csv")) == 4


def test_grid_of_runs_without_validation(
    design: str, uninterrupted: list[Training], run: Run
) -> None:
    trainings = []
    for training in uninterrupted[::2]:
        curve = [replace(each, valid_loss=None, valid_accuracy=None) for each in training.curve]
        recipe, nothing = training.recipe.replace(fold="all"), {"best_valid_accuracy": None}
        trainings.append(
            replace(training, recipe=recipe, curve=tuple(curve), test_accuracy=0.75, **nothing)
        )
    tables.write(trainings, Path("all.csv"))
    words = ["grid", "mine.toml", "--folds", "all", "--done", "all.csv"]
    code, out, err = run(*words, "--table", "copy.csv")
    assert (code, err) == (0, "")
    assert [row[:3] for row in rows(out).values()] == [["1", "none", "75.00%"]] * 2
    assert re.search(r"\nbest: forward=\w+, test 75\.00%\n", out)
    assert rows(run(*words, "--status")[1])["all"][-1] == ""
    assert [training.fold for training in load("copy.csv")] == ["all"] * 2


def test_table_of_a_part(done: Path, run: Run) -> None:
    name = "runs/mine/x.csv"
    words = ["mine.toml", "--where", "forward=mode", "--folds", "1"]
    code, out, err = run("grid", *words, "--table", name)
    assert (code, err) == (0, "")
    assert f"table: {name}" in out
    assert not (done / "table.csv").exists()
    (training,) = load(name)
    assert (training.configuration, training.fold, len(training.curve)) == ("forward=mode", 1, 2)
    assert rows(out)["forward=mode"][:2] == ["1", f"{training.valid_accuracy:.2%}"]
    # Without --table, the folder's table has what other commands have trained, if it is readable.
    other = shutil.copytree(done / "forward=mode", done / "damaged")
    (other / "fold-0" / "config.json").write_text("{")
    assert run("grid", *words)[0] == 0
    table = load(done / "table.csv")
    assert len(table) > 1
    assert ("damaged", 0) not in {(training.configuration, training.fold) for training in table}


def test_folder_of_another_recipe_is_an_error(done: Path, run: Run) -> None:
    for words in (
        ["--epochs", "4"],
        ["--set", "seed=5", "--status"],
        ["--epochs", "4", "--dry-run"],
    ):
        assert "another --out" in run.rejected("grid", "mine.toml", *words)
    config = done / "forward=mode" / "fold-0" / "config.json"
    content = json.loads(config.read_text())
    content["versions"]["softstair"] = "0.7.3"
    content["recipe"]["wings"] = 2
    config.write_text(json.dumps(content))
    assert "0.7.3" in run.rejected("grid", "mine.toml")
    shutil.copy(config, done)
    assert "is a run directory: give another --out" in run.rejected("grid", "mine.toml")
    Path("file").write_text("")
    assert "'file' is a file" in run.rejected("grid", "paper-svhn", "--out", "file")


def test_data_versions_are_not_mixed(done: Path, run: Run) -> None:
    values = accuracies(done, "forward=mode")
    config = done / "forward=mode" / "fold-1" / "config.json"
    config.write_text(config.read_text().replace("scikit-learn digits", "other digits"))
    out = run("grid", "mine.toml")[1]
    shown = rows(out)
    assert shown["forward=mode (scikit-learn digits)"][:2] == ["1", f"{values[0]:.2%}"]
    assert shown["forward=mode (other digits)"][:2] == ["1", f"{values[1]:.2%}"]
    assert "\ndata: scikit-learn digits; other digits\n" in out
    out = run("grid", "mine.toml", "--status")[1]
    assert [rows(out)[name][-1] for name in ("forward=mode", "all")] == ["", ""]
    assert rows(out)["forward=random"][-1] != ""
    assert "several data versions" in out
    # Nothing is trained beside units of another version.
    (done / "table.csv").unlink()
    shutil.rmtree(done / "forward=random" / "fold-1")
    for words in ([], ["--where", "forward=random"]):
        assert "'other digits'" in run.rejected("grid", "mine.toml", *words)


def test_row_is_one_line_in_a_file(done: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    for words in (["--status"], []):
        shown = rows(run("grid", "mine.toml", *words)[1])
        assert {"forward=mode", "forward=random"} <= set(shown)
        assert all("" not in (cells[0], cells[-1]) for cells in shown.values())


def test_missing_packages_and_unwritable_tables_are_errors_before_the_work(
    done: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("folder.csv").mkdir()
    shutil.rmtree(done)  # there is work to do, and starting a process fails
    for path in ("nowhere/x.csv", "folder.csv", "mine.toml/x.csv"):
        error = run.rejected("grid", "mine.toml", "--table", path)
        assert "--table" in error
        assert repr(path) in error
    for name in ("pyarrow", "pyarrow.parquet", "ray"):
        monkeypatch.setitem(sys.modules, name, None)
    error = run.rejected("grid", "mine.toml", "--table", "x.parquet")
    assert "pip install '.[tables]'" in error
    error = run.rejected("grid", "mine.toml", "--engine", "ray")
    assert "pip install '.[ray]'" in error


# Where each unit stands


def status(run: pytest.CaptureFixture[str], *words: str) -> dict[str, list[str]]:
    before = files(Path.cwd())
    code, out, err = run("grid", "mine.toml", "--status", *words)
    assert (code, err) == (0, ""), err
    assert files(Path.cwd()) == before
    return rows(out)


def test_status_of_units_in_every_state(done: Path, run: Run) -> None:
    mode, random = accuracies(done, "forward=mode"), accuracies(done, "forward=random")
    mean = lambda *numbers: f"{statistics.mean(numbers):.2%}"
    # Columns: done, elsewhere, training, begun, waiting, folds left, epochs, accuracy.
    assert status(run)["all"] == ["4", *[""] * 5, "8/8", mean(*mode, *random)]
    half, begun = done / "forward=mode" / "fold-1", done / "forward=random" / "fold-0"
    for path in (half, begun):
        (path / "summary.json").unlink()
    lines = keep_one_epoch(half)
    (half / "metrics.jsonl").write_text(lines[0] + lines[1][:50])  # it is being written
    shutil.rmtree(done / "forward=random" / "fold-1")
    with filelock.FileLock(half / "lock"):
        shown = status(run)
    first = json.loads(lines[0])["valid_accuracy"]
    assert shown["forward=mode"] == ["1", "", "1", "", "", "1", "3/4", mean(mode[0], first)]
    assert shown["forward=random"] == ["", "", "", "1", "1", "0, 1", "2/4", mean(random[0])]
    # Folds are in order, and a part.
    assert status(run, "--set", "folds=12", "--folds", "2,10", "--out", "none")["all"][5] == "2, 10"
    assert set(status(run, "--where", "forward=mode", "--folds", "0")) == {"forward=mode", "all"}


def test_status_without_a_lock(done: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the lock cannot be read, a unit with recent files is taken to be training."""
    path = done / "forward=mode" / "fold-1"
    begun, training = ["1", "", "", "1", ""], ["1", "", "1", "", ""]

    def make_old() -> None:
        for file in (path, *path.rglob("*")):
            os.utime(file, (1e9, 1e9), follow_symlinks=False)

    (path / "summary.json").unlink()
    for file in path.iterdir():
        os.utime(file)  # the fixture may have run long ago
    with monkeypatch.context() as patch:

        def flock(*_: int) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        patch.setattr("fcntl.flock", flock)
        assert status(run)["forward=mode"][:5] == training
        make_old()
        assert status(run)["forward=mode"][:5] == begun
    (path / "lock").unlink()
    assert status(run)["forward=mode"][:5] == begun
    (path / "lock").symlink_to("lock")  # nobody can open it
    (path / "metrics.jsonl").touch()
    assert status(run)["forward=mode"][:5] == training
    (path / "lock").unlink()
    os.mkfifo(path / "lock")  # nobody ever writes there
    assert status(run)["forward=mode"][:5] == begun


def test_status_does_not_keep_a_unit_from_training(done: Path) -> None:
    path = done / "forward=mode" / "fold-1"
    (path / "summary.json").unlink()
    recipe = recipe_of(path)
    assert recipe is not None
    with open(path / "lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        release = threading.Timer(0.3, lambda: fcntl.flock(lock, fcntl.LOCK_UN))
        release.start()
        fit(recipe, path, device="cpu", resume=True)
        release.join()
    assert (path / "summary.json").exists()


def test_status_as_json(done: Path, run: Run) -> None:
    values = accuracies(done, "forward=mode")
    (done / "forward=mode" / "fold-1" / "summary.json").unlink()
    shutil.rmtree(done / "forward=random")
    code, out, err = run("grid", "mine.toml", "--status", "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    random, mode = data.pop("configurations")
    counts = {"done": 1, "training": 0, "begun": 1, "waiting": 2, "epochs": 4, "of_epochs": 8}
    mean, seconds = statistics.mean(values), mode["units"][0]["seconds"]
    # The two epochs of the unit that is done say how long the four that are left will take.
    counts |= {"elsewhere": 0, "seconds_used": seconds, "seconds_left": pytest.approx(2 * seconds)}
    counts |= {"unmeasured_units": 1}
    assert data == {"name": "mine", "folder": str(done), **counts, "valid_accuracy": mean}
    assert [mode["name"], mode["waiting"], mode["of_epochs"]] == ["forward=mode", 0, 4]
    assert mode["units"][1] == {
        "fold": 1,
        "state": "begun",
        "epochs": 2,
        "of_epochs": 2,
        "valid_accuracy": values[1],
        "data_version": "scikit-learn digits",
        "seconds": None,
        "device_seconds": None,
    }
    assert (random["waiting"], random["epochs"], random["valid_accuracy"]) == (2, 0, None)


def on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int, sleep: Callable[[float], None]
) -> list[str]:
    """The lines of --status on a terminal."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = Terminal(columns)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal.stream)
        patch.setattr("paper.cli._status.sleep", sleep)
        assert main(["grid", "mine.toml", "--status"]) == 0
    return without_escapes(terminal.close()).splitlines()


def test_status_on_a_terminal_refreshes_until_all_is_done(
    done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = done / "forward=random" / "fold-1" / "summary.json"
    content = late.read_bytes()
    late.unlink()
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            late.write_bytes(content)

    with filelock.FileLock(late.with_name("lock")):
        shown = on_a_terminal(monkeypatch, 120, sleep)
    assert len(pauses) == 2
    counts = [re.findall(r"\d+", line)[0] for line in shown if "│ all" in line]
    assert (counts[0], counts[-1]) == ("3", "4")
    # What matters is above the rows: a table that is longer than the terminal is cut below.
    first = [line.split() for line in shown[:4]]
    assert "3 of 4 units are done; Ctrl-C ends this view".split() in first
    assert "used, without the units that train now;" in " ".join(map(" ".join, first))


def test_status_on_a_terminal_ends_after_the_grid_was_killed(
    done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paper.cli._status.MOST_IDLE_LOOKS", 5)
    late = done / "forward=random" / "fold-1" / "summary.json"
    late.unlink()
    lock, pauses = filelock.FileLock(late.with_name("lock")), list[float]()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            lock.release()

    with lock:
        shown = on_a_terminal(monkeypatch, 120, sleep)
    assert len(pauses) == 2 + 5
    assert any("3 of 4 units are done" in line for line in shown)


def test_status_on_a_terminal_ends_at_once_if_nothing_trains(
    done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves out the columns that would be empty: the names keep their room."""
    (done / "forward=random" / "fold-1" / "summary.json").unlink()
    shown = on_a_terminal(monkeypatch, 80, lambda _: pytest.fail("It waits."))
    head = next(line for line in shown if "configuration" in line)
    assert re.findall(r"\w+(?: \w+)?", head)[:4] == ["configuration", "done", "begun", "folds left"]
    assert any(line.startswith("│ forward=random ") for line in shown)
