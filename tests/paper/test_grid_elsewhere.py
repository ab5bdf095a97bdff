"""A grid over several machines, which exchange tables; a time limit; tables in several files."""

import gzip
import json
import math
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.commands import Run
from helpers.made import made
from helpers.worker import start_fork, start_here
from paper import Training, Unit, load
from paper.grid import Timer
from paper.tables import LARGEST_PART, Epoch, rows, write, write_parts
from softstair.cli._output import Progress
from softstair.train.progress import Event
from train.short import files, recipe

pytest_plugins = ["helpers.small_grid"]
pytestmark = pytest.mark.usefixtures("plain_terminal", "narrow_digits")

RESULTS = Path(__file__).parents[2] / "results"
TIMES = ("seconds", "images_per_second", "device_seconds")


def exact(trainings: list[Training]) -> list[dict[str, Any]]:
    """Return the rows of trainings, without measured times."""
    return [{n: v for n, v in row.items() if n not in TIMES} for row in rows(trainings, True)]


def on_events(monkeypatch: pytest.MonkeyPatch, act: Callable[[str, Event], None]) -> list[str]:
    """Call ``act`` with each event of a command; return the units that it starts."""
    started: list[str] = []
    show = Progress.show

    def heard(self: Progress, label: str, event: Event) -> None:
        show(self, label, event)
        started.extend([label] if event["kind"] == "start" else [])
        act(label, event)

    monkeypatch.setattr(Progress, "show", heard)
    return started


# Two machines


def test_a_second_machine_trains_exactly_what_the_first_did_not(
    design: str, uninterrupted: list[Training], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("softstair.train.run.source_commit", lambda: "abc1234")
    monkeypatch.setattr("softstair.train.pool.start_process", start_here)
    words = ["mine.toml", "--device", "cpu", "--jobs", "1", "--threads", "1"]
    done: list[str] = []

    def stop(label: str, event: Event) -> None:
        if event["kind"] == "done":
            done.append(label)
            if len(done) == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        on_events(patch, stop)
        Path("one").mkdir()
        code, _, err = run("grid", *words, "--out", "one/runs", "--table", "one/first.csv.gz")
    assert code == 128 + signal.SIGTERM, err
    # In the order in which the values are written; the signal met the third unit.
    assert done == ["forward=random/fold-0", "forward=random/fold-1", "forward=mode/fold-0"]
    first = load("one/first.csv.gz")
    assert [training.name for training in first] == done
    assert {training.commit for training in first} == {"abc1234"}
    assert all(training.device and training.device_seconds for training in first)

    # Nothing but the table goes to the second machine.
    Path("two").mkdir()
    shutil.copy("one/first.csv.gz", "two")
    words[0] = "../mine.toml"
    monkeypatch.chdir("two")
    with monkeypatch.context() as patch:
        started = on_events(patch, lambda *_: None)
        words += ["--out", "runs", "--done", "first.csv.gz"]
        code, out, err = run("grid", *words, "--table", "second.csv.gz")
    assert code == 0, err
    assert started == ["forward=mode/fold-1"]
    assert err.count(" is done") == 1
    assert "4/4 forward=mode/fold-1 is done" in err
    assert "table: second.csv.gz" in out
    assert exact(load("second.csv.gz")) == exact(uninterrupted)

    # A third one only joins tables, whichever overlap.
    monkeypatch.setattr("softstair.train.pool.start_process", None)
    tables = ["--done", "first.csv.gz", "second.csv.gz", "--table", "all.parquet"]
    code, out, err = run("grid", "../mine.toml", "--out", "none", *tables)
    assert (code, err) == (0, "")
    assert exact(load("all.parquet")) == exact(uninterrupted)
    assert not Path("none").exists()


# Tables that do not fit


@pytest.fixture
def table(design: str, uninterrupted: list[Training]) -> Path:
    """A table of the first three of four units."""
    write(uninterrupted[:3], Path("three.csv.gz"))
    return Path("three.csv.gz")


def test_a_unit_of_another_recipe_or_data_version_is_refused(table: Path, run: Run) -> None:
    for words, problem in (
        (["--epochs", "4"], "forward=random/fold-0 with epochs = 2, here 4"),
        (["--set", "seed=5"], "with seed = 0, here 5"),
    ):
        for more in ([], ["--status"], ["--dry-run"]):
            error = run.rejected("grid", "mine.toml", *words, *more, "--done", table)
            assert f"{str(table)!r} has" in error
            assert problem in error
            assert "--done" in error
    other = [replace(training, data_version="other digits") for training in load(table)]
    write(other, table)
    error = run.rejected("grid", "mine.toml", "--status", "--done", table)
    assert "data_version = other digits, here scikit-learn digits" in error
    # Units of other designs are ignored, with a line if there are no others.
    write([replace(training, configuration="third") for training in other], table)
    code, _, err = run("grid", "mine.toml", "--status", "--done", table)
    assert (code, err) == (0, f"python -m paper grid: no unit of mine is done in {table}\n")


def test_tables_beside_run_directories_are_read(
    table: Path, store: Path, uninterrupted: list[Training], run: Run
) -> None:
    last = uninterrupted[3]
    shutil.copytree(store / "runs" / "mine" / last.name, Path("both", last.name))
    table.rename(Path("both", table.name))
    Path("empty").mkdir()  # as it is before the first machine has written there
    words = ["grid", "mine.toml", "--status", "--json", "--done", "empty", "both"]
    assert json.loads(run(*words)[1])["elsewhere"] == 4
    # Without metrics, the epochs of a unit are not known.
    shutil.move(Path("both", last.name, "metrics.jsonl"), "metrics.jsonl")
    words = ["grid", "mine.toml", "--status", "--json", "--out", "both"]
    assert json.loads(run(*words)[1])["seconds_left"] is None


def test_a_unit_with_two_results_is_refused_and_rounding_is_not(table: Path, run: Run) -> None:
    trainings = load(table)
    write(trainings, Path("rounded.csv"))  # to seven digits
    assert load("rounded.csv") != trainings
    assert run("grid", "mine.toml", "--status", "--done", table, "rounded.csv")[0] == 0
    epoch = trainings[2].curve[0]
    other = replace(epoch, train_loss=epoch.train_loss * 1.0001)
    write([replace(trainings[2], curve=(other, trainings[2].curve[1]))], Path("again.csv"))
    error = run.rejected("grid", "mine.toml", "--status", "--done", table, "again.csv")
    assert "'again.csv' has forward=mode/fold-0 with other results" in error


def test_a_damaged_table_is_refused_before_anything_is_trained(
    table: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paper.tables.LARGEST_FILE", 2_000_000)
    content = gzip.decompress(table.read_bytes())
    for damaged in (
        table.read_bytes()[:-8],
        content,  # not compressed
        gzip.compress(bytes(3_000_000)),  # larger than allowed when it is decompressed
        gzip.compress(re.sub(rb"x86_64|aarch64", b"x\x1b[31m", content)),  # control characters
    ):
        table.write_bytes(damaged)
        error = run.rejected("grid", "mine.toml", "--done", table, "--minutes", "1")
        assert str(table) in error
        assert "damaged" in error


# What is done and how much is left


def test_status_says_what_is_done_elsewhere_and_how_much_time_is_left(
    table: Path, store: Path, run: Run
) -> None:
    first, second, third = load(table)
    write([first, replace(second, device_seconds=5.0), replace(third, device_seconds=7.0)], table)
    here_too = Path("runs/mine", first.name)
    shutil.copytree(store / here_too, here_too)
    code, out, err = run("grid", "mine.toml", "--status", "--json", "--done", table)
    assert (code, err) == (0, "")
    shown = json.loads(out)
    states = [unit["state"] for part in shown["configurations"] for unit in part["units"]]
    assert states == ["done", "elsewhere", "elsewhere", "waiting"]
    assert [shown[name] for name in ("done", "elsewhere", "waiting")] == [1, 2, 1]
    here = json.loads((here_too / "summary.json").read_text())["seconds"]
    # The unit that was not trained by a grid has no device time.
    assert shown["seconds_used"] == pytest.approx(12 + here)
    assert shown["seconds_left"] == pytest.approx((12 + here) / 3)
    assert shown["unmeasured_units"] == 1
    out = run("grid", "mine.toml", "--status", "--done", table)[1]
    words = " ".join(out.split())
    assert "left, estimated from 3 of 4 units" in words
    assert "units with only the time of training steps: 1" in words
    out = run("grid", "mine.toml", "--status", "--out", "none")[1]
    assert "time left unknown until a unit is done" in out


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(
    ("words", "done", "count"),
    [
        ("paper/most_claims.toml", "cifar10-500-epochs.parquet", 30),
        ("paper-cifar10 --epochs 50", "cifar10-50-epochs.parquet", 194),
        ("paper-svhn --epochs 25", "svhn-25-epochs.csv", 12),
        ("paper-speech", "speech-120-epochs.parquet", 160),
        ("paper-cifar10", "cifar10-500-epochs.parquet", 42),
    ],
)
def test_published_tables_are_units_of_the_designs(
    words: str, done: str, count: int, run: Run
) -> None:
    words = words.replace("paper/", f"{RESULTS.parent / 'paper'}/")
    path = RESULTS / "reproduction" / done
    code, out, err = run("grid", *words.split(), "--status", "--json", "--done", path)
    assert (code, err) == (0, "")
    assert json.loads(out)["elsewhere"] == count


# A time limit


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_the_time_limit_saves_what_is_done_and_keeps_the_checkpoint_of_the_rest(
    design: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = '[[rows]]\nname = "short"\n[[rows]]\nname = "long"\nepochs = 100000\n'
    Path("mine.toml").write_text(design.partition("[vary]")[0].replace("[0, 1]", "[0]") + rows)
    now = [0.0]

    def act(label: str, event: Event) -> None:
        if label == "long/fold-0" and event["kind"] == "epoch":
            now[0] = 1e12

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr("softstair.train.pool.time", clock)
    monkeypatch.setattr("softstair.train.pool.start_process", start_fork)
    started = on_events(monkeypatch, act)
    words = ["mine.toml", "--device", "cpu", "--jobs", "1", "--table", "part.csv.gz"]
    code, out, err = run("grid", *words, "--minutes", "5", "--partial")
    assert (code, out) == (1, ""), err
    assert "stopped by --minutes, 1 of 2 units are done; continue with" in err
    assert started == ["short/fold-0", "long/fold-0"]
    assert [training.name for training in load("part.csv.gz")] == started[:1]
    run_directory = Path("runs/mine/long/fold-0")
    assert list(run_directory.glob("checkpoint/*.pt"))
    assert json.loads((run_directory / "device.json").read_text())["seconds"] > 0

    # The finished unit shows that the other cannot finish: no process is started.
    monkeypatch.setattr("softstair.train.pool.start_process", None)
    before = files(Path("runs"))
    code, out, err = run("grid", *words, "--minutes", "0.02")
    assert (code, out) == (1, "")
    assert "no other can finish in 0.02 minutes: give more --minutes, or --partial" in err
    assert files(Path("runs")) == before


class Simulated:
    """A timer with a clock that is set by hand."""

    def __init__(self, deadline: float, **settings: Any) -> None:
        self.now = 0.0
        self.timer = Timer(deadline, clock=lambda: self.now, **settings)

    def hear(self, unit: Unit, folder: Path, **event: Any) -> None:
        self.timer.hear(unit, event, folder)


def test_a_unit_begins_only_if_it_can_finish(uninterrupted: list[Training], tmp_path: Path) -> None:
    short, long = (Unit(str(epochs), recipe(epochs=epochs)) for epochs in (10, 50))
    known = [replace(uninterrupted[0], seconds=seconds) for seconds in (8.0, 6.0)]  # of 2 epochs
    assert Simulated(0.1).timer.can_finish(long, tmp_path), "nothing is known"
    assert Simulated(math.inf, known=known).timer.can_finish(long, tmp_path)
    timer = Simulated(100.0, known=known).timer
    assert [timer.can_finish(unit, tmp_path) for unit in (short, long)] == [True, False]
    assert Simulated(100.0, known=known, is_partial=True).timer.can_finish(long, tmp_path)
    # Times that are measured here replace the known ones: 1 second an epoch, and 4 to begin.
    simulated = Simulated(100.0, known=known)
    simulated.hear(short, tmp_path, kind="start")
    for simulated.now, epoch in ((5.0, 1), (6.0, 2), (8.0, 4)):
        simulated.hear(short, tmp_path, kind="epoch", epoch=epoch)
    assert simulated.timer.can_finish(long, tmp_path)
    simulated.now = 44.5
    assert simulated.timer.can_finish(long, tmp_path)
    simulated.now = 45.5
    assert not simulated.timer.can_finish(long, tmp_path)
    # Only epochs that are left count.
    long.path(tmp_path).mkdir(parents=True)
    (long.path(tmp_path) / "metrics.jsonl").write_text('{"valid_accuracy": 0.5}\n' * 10)
    assert simulated.timer.can_finish(long, tmp_path)
    simulated.now = 100.0
    assert not simulated.timer.can_finish(short, tmp_path)


def test_units_that_train_at_a_time_share_the_time_of_the_device(tmp_path: Path) -> None:
    simulated = Simulated(math.inf)
    units = [Unit(name, recipe()) for name in "abc"]
    for unit in units:
        unit.path(tmp_path).mkdir(parents=True)
    a, b, c = units
    seconds = lambda unit: json.loads((unit.path(tmp_path) / "device.json").read_text())["seconds"]
    for simulated.now, unit, kind in (
        *((10.0, a, "start"), (20.0, b, "start"), (40.0, a, "done"), (45.0, c, "start")),
        *((50.0, c, "failed"), (60.0, b, "stopped"), (70.0, b, "start"), (80.0, b, "done")),
    ):
        simulated.hear(unit, tmp_path, kind=kind)
    assert [seconds(unit) for unit in units] == [20.0, 10.0 + 5 + 2.5 + 10 + 10, 2.5]


# Files of limited size


@pytest.mark.parametrize("ending", [".csv.gz", ".parquet"])
def test_large_tables_are_written_in_parts(ending: str) -> None:
    draw, many = random.Random(1).random, []
    for training in made("paper-speech", lambda *_: 0.5, epochs=20, folds=(0,)):
        curve = tuple(Epoch(n, 1e-3, draw(), draw(), draw(), draw()) for n in range(20))
        best = max(epoch.valid_accuracy for epoch in curve)
        many.append(replace(training, curve=curve, best_valid_accuracy=best))
    (one,) = write_parts(many, Path(f"one{ending}"))
    assert one.stat().st_size < LARGEST_PART == 16_000_000
    limit = int(0.8 * one.stat().st_size)
    parts = write_parts(many, Path(f"table{ending}"), limit)
    names = [f"table{ending}", *(f"table-{number}{ending}" for number in range(2, len(parts) + 1))]
    assert [part.name for part in parts] == names
    assert len(parts) > 1
    assert all(part.stat().st_size <= limit for part in parts)
    assert exact([training for part in parts for training in load(part)]) == exact(many)
    # A unit is never divided.
    assert len(write_parts(many[:2], Path(f"few{ending}"), 10)) == 2
