"""The engine of one machine: struck by every signal, it ends with what undisturbed units give; and
the number of units at a time, by a clock that is made up."""

import contextlib
import io
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch

from softstair import cli
from softstair.cli._grid_progress import Progress
from softstair.experiments import Unit, load
from softstair.experiments.design_file import read
from softstair.experiments.engines import local, unfinished
from softstair.experiments.engines.pace import Pace
from softstair.train import Recipe, RunError, train
from softstair.train.progress import Event
from softstair.train.records import summary_of
from train.short import files, is_sentence, metrics_of, recipe

OWN = """
import torch
from torch import nn
from softstair.data import Dataset

def load():
    numbers = torch.Generator().manual_seed(1)
    y = torch.randint(4, (240,), generator=numbers)
    x = 20 * torch.randn(240, 1, 6, 6, generator=numbers) + 30 * y[:, None, None, None] + 50
    return Dataset("own", x.clamp(0, 200).byte(), y, tuple("abcd"), mean=100.0, std=40.0)

def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 32), nn.BatchNorm1d(32), nn.ReLU(),
                         nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
"""
DESIGN = """
folds = [0, 1]
[recipe]
data = "grid_own:load"
model = "grid_own:build"
batch = 48
epochs = 30
[vary]
forward = ["mode", "random"]
"""
GRID = ["grid", "mine.toml", "--device", "cpu"]
PAIR = [*GRID, "--together", "2"]


# ---- A grid that everybody strikes, stage by stage


@dataclass
class Stage:
    """What came of one command."""

    code: int
    out: str
    err: str
    heard: list[tuple[str, Event]] = field(default_factory=list)
    done: set[str] = field(default_factory=set)
    stamps: dict[str, dict[str, tuple[int, bytes]]] = field(default_factory=dict)
    status: str = ""

    def __post_init__(self) -> None:
        """Which units are done is said on stderr too, where no bar is drawn: not of interest."""
        lines = self.err.splitlines(keepends=True)
        self.ends = [line for line in lines if " is done, validation " in line]
        self.err = "".join(line for line in lines if line not in self.ends)


@dataclass
class Story:
    """The stages, in order, and the folder that they leave."""

    folder: Path
    units: list[Unit]
    interrupted: Stage
    killed: Stage
    told: Stage
    whole: Stage
    again: Stage


def stamps(path: Path) -> dict[str, tuple[int, bytes]]:
    """When each file was last written, and what it holds."""
    return {
        name: ((path / name).stat().st_mtime_ns, content) for name, content in files(path).items()
    }


def spoken(words: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(words)
    return code, out.getvalue(), err.getvalue()


def ended(stage: Stage, units: list[Unit], folder: Path) -> Stage:
    """Looks at the store as it is after a stage."""
    stage.done = {unit.name for unit in units if summary_of(unit.path(folder)) is not None}
    stage.stamps = {name: stamps(folder / name) for name in stage.done}
    code, stage.status, err = spoken([*GRID, "--status"])
    assert (code, err) == (0, "")
    return stage


def watched(words: list[str], act: Callable[[str, Event], None]) -> Stage:
    """Runs a command, and lets somebody act on what its units say."""
    heard: list[tuple[str, Event]] = []

    class Watching(Progress):
        def told(self, unit: Unit, news: Event) -> None:
            super().told(unit, news)
            heard.append((unit.name, news))
            act(unit.name, news)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("softstair.cli._grid_progress.Progress", Watching)
        return Stage(*spoken(words), heard=heard)


def interrupted(folder: Path) -> Stage:
    """Ctrl-C: SIGINT to every process of the group, once two units have epochs."""
    words = [sys.executable, "-m", "softstair", *PAIR]
    process = subprocess.Popen(
        words, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if sum(file.stat().st_size > 0 for file in folder.glob("*/*/metrics.jsonl")) >= 2:
            break
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):  # it ended by itself: what it said is shown
        os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return Stage(process.returncode, out, err)


def killed() -> Stage:
    """One of the processes is killed while it trains."""
    victims: dict[str, int] = {}

    def kill(label: str, news: Event) -> None:
        if news["kind"] == "begin" and not victims:
            victims[label] = news["process"]
        if news["kind"] in ("step", "epoch") and victims.get(label):
            os.kill(victims[label], signal.SIGKILL)
            victims[label] = 0

    return watched(PAIR, kill)


def told() -> Stage:
    """The driver alone hears SIGTERM, as from a scheduler."""
    struck: list[str] = []

    def strike(label: str, news: Event) -> None:
        if news["kind"] == "begin" and not struck:
            struck.append(label)
            os.kill(os.getpid(), signal.SIGTERM)

    return watched(PAIR, strike)


def undisturbed() -> Stage:
    """As many at a time as the engine likes."""
    return watched(GRID, lambda *_: None)


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    (tmp_path / "grid_own.py").write_text(OWN)
    (tmp_path / "mine.toml").write_text(DESIGN)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setenv("COLUMNS", "160")
        for name in ("SOFTSTAIR_TRACEBACK", "FORCE_COLOR"):
            patch.delenv(name, raising=False)
        folder = Path("runs/mine")
        units = list(read(Path("mine.toml")).units())
        stages = [ended(interrupted(folder), units, folder)]
        stages += [ended(act(), units, folder) for act in (killed, told, undisturbed)]
        # With everything done, no process is needed any more.
        patch.setattr("softstair.train.pool.Worker", None)
        stages += [ended(undisturbed(), units, folder)]
        yield Story(tmp_path / folder, units, *stages)
    sys.modules.pop("grid_own", None)


def interrupted_it_says_how_to_go_on(story: Story) -> None:
    stage = story.interrupted
    assert (stage.code, stage.out) == (130, ""), stage.err
    assert stage.err.count("\n") == 1, stage.err
    assert is_sentence(stage.err)
    assert stage.err.startswith("softstair grid: stopped by SIGINT, and kept: go on with ")
    assert shlex.split(stage.err.partition("go on with ")[2]) == ["softstair", *PAIR]
    assert len(stage.done) < 4


def a_killed_process_is_told_of_and_the_others_go_on(story: Story) -> None:
    stage = story.killed
    assert (stage.code, stage.out) == (2, ""), stage.err
    *told, last = stage.err.splitlines()
    (killed,) = (line for line in told if "killed" in line)
    assert is_sentence(killed)
    assert killed.startswith("softstair grid: ")
    assert "its process was killed by SIGKILL" in killed
    assert "give the same command again" in killed
    assert last == (
        "softstair grid: 1 of 4 units failed, as told above: once that is mended, give the same "
        "command again."
    )
    assert "Traceback" not in stage.err
    failed = {name for name, news in stage.heard if news["kind"] == "failed"}
    assert len(failed) == 1
    assert failed.isdisjoint(stage.done)
    assert killed.partition(": ")[2].partition(": ")[0] in failed
    assert stage.done == {unit.name for unit in story.units} - failed


def the_driver_told_to_stop_keeps_all(story: Story) -> None:
    stage = story.told
    assert (stage.code, stage.out) == (143, ""), stage.err
    assert is_sentence(stage.err)
    assert "stopped by SIGTERM, and kept: " in stage.err
    assert stage.done == story.killed.done, "only one was left, and it was struck"


def the_same_command_ends_it(story: Story) -> None:
    stage = story.whole
    assert (stage.code, stage.err) == (0, "")
    assert len(stage.ends) == len(stage.done - story.told.done) > 0
    counts = [line.partition(": ")[2].partition(" ")[0] for line in stage.ends]
    assert counts == [f"{number}/4" for number in range(len(story.told.done) + 1, 5)]
    assert stage.done == {unit.name for unit in story.units}
    assert "forward=mode" in stage.out
    assert "table.csv" in stage.out
    assert len(load(story.folder / "table.csv")) == 4


def what_is_done_is_not_touched_again(story: Story) -> None:
    stages = [story.interrupted, story.killed, story.told, story.whole, story.again]
    for earlier, later in pairwise(stages):
        for name, held in earlier.stamps.items():
            assert later.stamps[name] == held
            assert name not in {one for one, _ in later.heard}
    ends = [name for stage in stages for name, news in stage.heard if news["kind"] == "done"]
    assert len(ends) == len(set(ends)), "nothing is trained to its end twice"
    assert (story.again.code, story.again.err, story.again.heard) == (0, "", [])


def what_comes_of_it_is_what_nobody_disturbed(story: Story) -> None:
    """The same metrics to the last byte, the same accuracies, the same configuration."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    for unit in story.units:
        alone = train(unit.recipe, Path("alone", unit.name), device="cpu")
        assert metrics_of(unit.path(story.folder)) == metrics_of(Path("alone", unit.name))
        summary = summary_of(unit.path(story.folder))
        assert summary is not None
        for name in ("valid_accuracy", "best_valid_accuracy", "test_accuracy", "epochs", "config"):
            assert summary[name] == alone[name], name
    torch.set_num_threads(before)


def never_more_than_were_asked_for(story: Story) -> None:
    for stage in (story.killed, story.told, story.whole):
        going: set[str] = set()
        for name, news in stage.heard:
            if news["kind"] == "start":
                going.add(name)
            if news["kind"] in ("done", "failed"):
                going.discard(name)
            assert len(going) <= 2
    begins = [news["process"] for _, news in story.killed.heard if news["kind"] == "begin"]
    assert os.getpid() not in begins
    assert len(set(begins)) >= 2


def table(status: str) -> dict[str, list[str]]:
    """The rows of a table on the screen."""
    lines = [line for line in status.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    return {row[0]: row[1:] for row in cells}


def the_status_after_every_stage(story: Story) -> None:
    """done, begun, waiting, epochs, accuracy; nobody trains any more."""
    for stage in (story.interrupted, story.killed, story.told, story.whole, story.again):
        rows = table(stage.status)
        assert set(rows) == {"forward=mode", "forward=random", "all"}
        counts = {name: [int(cell or 0) for cell in row[:4]] for name, row in rows.items()}
        assert counts["all"][0] == len(stage.done)
        assert sum(counts["all"]) == 4
        assert counts["all"][1] == 0
        for name in ("forward=mode", "forward=random"):
            assert counts[name][0] == sum(one.startswith(name) for one in stage.done)
            assert sum(counts[name]) == 2
            epochs, total = map(int, rows[name][4].split("/"))
            assert total == 60
            assert 30 * counts[name][0] <= epochs <= total
    for stage in (story.whole, story.again):
        rows = table(stage.status)
        assert rows["all"][:5] == ["4", "", "", "", "120/120"]
        found = load(story.folder)
        for name in ("forward=mode", "forward=random"):
            scores = [one.valid_accuracy for one in found if one.configuration == name]
            assert rows[name][5] == f"{sum(scores) / 2:.2%}"


def nobody_holds_a_run_afterwards(story: Story) -> None:
    for unit in story.units:
        with filelock.FileLock(unit.path(story.folder) / "lock", timeout=0):
            pass


@pytest.mark.nightly
def test_a_grid_that_everybody_strikes(story: Story) -> None:
    """One test of many checks: what happened takes long, and is looked at from all sides."""
    for check in (
        interrupted_it_says_how_to_go_on,
        a_killed_process_is_told_of_and_the_others_go_on,
        the_driver_told_to_stop_keeps_all,
        the_same_command_ends_it,
        what_is_done_is_not_touched_again,
        what_comes_of_it_is_what_nobody_disturbed,
        never_more_than_were_asked_for,
        the_status_after_every_stage,
        nobody_holds_a_run_afterwards,
    ):
        check(story)


# ---- What is in the way


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Unit]:
    """Two units on the digits, one of them done; nothing may start a process."""
    monkeypatch.setattr("softstair.train.pool.Worker", None)
    units = [Unit("a", recipe(fold=fold)) for fold in (0, 1)]
    torch.set_num_threads(1)
    train(units[0].recipe, units[0].path(tmp_path))
    return units


def refused(units: list[Unit], folder: Path) -> str:
    before = files(folder)
    with pytest.raises(RunError) as caught:
        local.run(units, folder, lambda *_: None, device="cpu", jobs=2)
    assert is_sentence(str(caught.value))
    assert files(folder) == before
    return str(caught.value)


def test_another_recipe_in_the_directory_is_refused(few: list[Unit], tmp_path: Path) -> None:
    other = [replace(unit, recipe=replace(unit.recipe, seed=7)) for unit in few]
    said = refused(other, tmp_path)
    assert str(few[0].path(tmp_path)) in said
    assert "seed = 0" in said
    assert "7" in said
    assert "another `out`" in said
    longer = [replace(unit, recipe=unit.recipe.rescaled(9)) for unit in few]
    assert "epochs = 3, but 9" in refused(longer, tmp_path)
    # Not done, it is no other matter.
    (few[0].path(tmp_path) / "summary.json").unlink()
    assert "seed = 0" in refused(other, tmp_path)


def test_damage_is_found_before_anything_is_trained(few: list[Unit], tmp_path: Path) -> None:
    last = few[::-1]
    for name in ("config.json", "summary.json"):
        content = (few[0].path(tmp_path) / name).read_bytes()
        (few[0].path(tmp_path) / name).write_bytes(content[:100])
        assert name in refused(last, tmp_path)
        (few[0].path(tmp_path) / name).write_bytes(content)


def test_what_is_left_to_do(few: list[Unit], tmp_path: Path) -> None:
    assert list(unfinished(few, tmp_path)) == few[1:]
    shutil.copytree(few[0].path(tmp_path), tmp_path / "b" / "fold-0")
    assert list(unfinished([replace(few[0], configuration="b")], tmp_path)) == []
    (tmp_path / "b" / "fold-0" / "summary.json").unlink()
    begun = replace(few[0], configuration="b")
    assert list(unfinished([begun, *few], tmp_path)) == [begun, few[1]]
    assert local.run(few[:1], tmp_path, lambda *_: None, device="cpu") == 0
    assert local.run([], tmp_path, lambda *_: None, device="cpu") == 0


class Pretended:
    """A process that needs no time, and refuses batches that are too large as a real one does."""

    def __init__(self, said: Any) -> None:
        self.said, self.task, self.process = said, None, self
        self.is_free = True

    def give(self, task: Any, recipe: Recipe, out: Path, settings: dict[str, Any]) -> None:
        self.task, self.is_free = task, False
        if recipe.batch > 200:
            news: list[Event | None] = [
                {"kind": "failed", "why": "batch must be at most 160."},
                None,
            ]
        else:
            place = {"epoch": 0, "epochs": 1, "done": 0, "total": 1}
            news = [{"kind": "begin", "process": 1, "threads": 1, **place}, {"kind": "done"}]
        for one in news:
            self.said.put((self, one))

    def poll(self) -> int:
        return 0

    def dismiss(self) -> None:
        self.is_free = False

    def end(self, timeout: float) -> None:
        pass


def test_a_unit_that_is_refused_leaves_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units of a design differ: what one is refused for need not concern the next."""
    monkeypatch.setattr("softstair.train.pool.Worker", Pretended)
    heard: dict[str, list[str]] = {}
    tell = lambda unit, news: heard.setdefault(unit.name, []).append(news["kind"])
    units = [Unit(f"batch={batch}", recipe(batch=batch)) for batch in (32, 5000, 16, 8)]
    assert local.run(units, tmp_path, tell, device="cpu", jobs=1) == 1
    assert heard == {
        "batch=32/fold-0": ["start", "begin", "done"],
        "batch=5000/fold-0": ["start", "failed"],
        "batch=16/fold-0": ["start", "begin", "done"],
        "batch=8/fold-0": ["start", "begin", "done"],
    }


# ---- How many at a time

Speed = Callable[[int], float]
CURVES: dict[str, tuple[Speed, int]] = {
    # Steps a second of all together, by their number; and the best number of up to six.
    "each as fast as alone": (lambda number: 10.0 * number, 6),
    "no more than two": (lambda number: 10.0 if number == 1 else 18.0, 2),
    "fastest with three": (lambda number: {1: 10, 2: 15, 3: 19, 4: 18}.get(number, 10.0), 3),
    "in one another's way": (lambda number: 10.0 / number, 1),
    "one after another": (lambda number: 10.0, 1),
    "hardly a gain": (lambda number: 10.0 * 1.02**number, 1),
    "a gain to the end": (lambda number: 10.0 * number**0.5, 6),
}


@dataclass
class Simulated:
    """A machine that trains as many as :class:`Pace` says, by a curve of speeds."""

    speed: Speed
    first: int = 1
    most: int = 6
    unit: float = 1e9
    startup: float = 0.0
    begun: float = 0.0
    seconds: float = 500.0
    seed: int = 0

    def run(self) -> tuple[int, float]:
        """The number in the end, and the steps a second over all the time."""
        draw, tick, total, started = random.Random(self.seed), 0.1, 0.0, 0
        now = [0.0]
        pace = Pace(self.first, self.most, clock=lambda: now[0])
        running: dict[int, dict[str, Any]] = {}
        while now[0] < self.seconds:
            number = pace()
            assert 1 <= number <= self.most
            while len(running) < number:
                vary = [draw.uniform(0.8, 1.2) for _ in range(2)]
                ready = now[0] + self.startup * vary[0]
                left = self.unit * vary[1]
                running[started] = {"ready": ready, "left": left, "done": self.begun, "new": True}
                started += 1
            going = [name for name, one in running.items() if now[0] >= one["ready"]]
            for name in going:
                one, steps = running[name], self.speed(len(going)) / len(going) * tick
                if one["new"]:
                    pace.hear(name, {"kind": "begin", "done": one["done"], "threads": 1})
                one["new"] = False
                one["done"] += steps
                one["left"] -= steps
                total += steps
                pace.hear(name, {"kind": "step", "done": one["done"]})
                if one["left"] <= 0:
                    pace.hear(name, {"kind": draw.choice(("done", "failed", "stopped"))})
                    del running[name]
            now[0] += tick
        return pace(), total / self.seconds


@pytest.mark.parametrize("begun", [0.0, 1e6], ids=["new", "resumed"])
@pytest.mark.parametrize("name", CURVES)
def test_the_best_number_is_found(name: str, begun: float) -> None:
    speed, best = CURVES[name]
    assert Simulated(speed, begun=begun).run()[0] == best


@pytest.mark.parametrize("most", [1, 2, 4])
@pytest.mark.parametrize("first", [1, 3, 9])
@pytest.mark.parametrize("name", ["each as fast as alone", "in one another's way"])
def test_never_more_than_the_most(name: str, first: int, most: int) -> None:
    found, _ = Simulated(CURVES[name][0], first=first, most=most).run()
    assert found == (most if name.startswith("each") else min(first, most))


@pytest.mark.parametrize(("unit", "startup"), [(30.0, 1.0), (30.0, 3.0)])
@pytest.mark.parametrize("name", [*CURVES][:4])
def test_short_units_are_no_worse_than_any_number_by_much(
    name: str, unit: float, startup: float
) -> None:
    """With units of three seconds, of which starting takes one or three, more may be the best."""
    speed = CURVES[name][0]
    short = Simulated(speed, unit=unit, startup=startup, seconds=200.0)
    fixed = {
        number: replace(short, first=number, most=number).run()[1]
        for number in range(1, short.most + 1)
    }
    chosen, _ = short.run()
    assert fixed[chosen] > 0.75 * max(fixed.values()), (chosen, fixed)


def test_it_begins_where_it_is_told_to_but_once() -> None:
    pace = Pace(first=1, most=4, clock=lambda: 0.0)
    for asked, given in ((3, 3), (0, 1), (9, 4), (2, 2)):
        pace.begin(asked)
        assert pace() == given
    for unit in "ab":
        pace.hear(unit, {"kind": "begin", "done": 0})
    assert pace() == 2  # and now it measures
    pace.begin(4)
    assert pace() == 2


def test_what_loads_or_starts_is_not_counted() -> None:
    now = [0.0]
    pace = Pace(first=1, most=3, clock=lambda: now[0])
    for second in range(100):
        now[0] = float(second)
        pace.hear("a", {"kind": "start"})
        pace.hear("a", {"kind": "loading", "done": 1000 * second, "total": 10**6})
        assert pace() == 1
