"""The engine of one machine: after every signal, it ends with what undisturbed units give; how far
units are; and the number of units at a time, by a simulated clock."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch

from paper import Design, Unit, grid, results
from paper.design import Configuration, read_design
from paper.grid import Pace, unfinished
from paper.results import statuses, summarise
from softstair.train import Interrupted, RunError, fit
from softstair.train.progress import Event
from train.short import OWN_DATA, OWN_MODEL, files, metrics_of, recipe

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


# ---- A grid that is interrupted in every way


class Stages:
    """Runs the grid in stages, and checks after each that what was done is unchanged."""

    def __init__(self, design: Design, folder: Path) -> None:
        self.design, self.folder = design, folder
        self.events: list[tuple[str, Event]] = []
        self.done: dict[str, dict[str, tuple[int, bytes]]] = {}

    def run(self, act: Callable[[str, Event], None] = lambda *_: None, **settings: Any) -> int:
        def on_event(unit: Unit, event: Event) -> None:
            self.events.append((unit.name, event))
            act(unit.name, event)

        self.events = []
        return grid.run(self.design.units(), self.folder, on_event, device="cpu", **settings)

    def check(self) -> dict[str, int]:
        """Return how many units are in each state."""
        units = statuses(self.design, self.folder)
        for status in units:
            path = status.unit.path(self.folder)
            name = status.unit.name
            stamps = {n: ((path / n).stat().st_mtime_ns, text) for n, text in files(path).items()}
            if name in self.done:
                assert stamps == self.done[name]
            if status.is_done:
                self.done[name] = stamps
            if path.exists():  # no process holds it any more
                with filelock.FileLock(path / "lock", timeout=0):
                    pass
        return {state: summarise(units)[state] for state in results.STATES}


def interrupt(folder: Path) -> int:
    """Send SIGINT to every process of the group, as Ctrl-C does, once two units have epochs."""
    words = ["grid", "mine.toml", "--device", "cpu", "--jobs", "2", "--out", str(folder)]
    process = subprocess.Popen(
        [sys.executable, "-m", "paper", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None:
        if sum(file.stat().st_size > 0 for file in folder.glob("*/*/metrics.jsonl")) >= 2:
            os.killpg(process.pid, signal.SIGINT)
            break
        time.sleep(0.01)
    return process.wait(timeout=60)


@pytest.mark.nightly
def test_an_interrupted_grid_equals_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "grid_own.py").write_text(OWN_DATA + OWN_MODEL)
    (tmp_path / "mine.toml").write_text(DESIGN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    stages = Stages(read_design(Path("mine.toml")), Path("runs"))
    assert interrupt(stages.folder) == 128 + signal.SIGINT
    assert stages.check()["done"] < 4

    victims: dict[str, int] = {}

    def kill(name: str, event: Event) -> None:
        if event["kind"] == "begin" and not victims:
            victims[name] = event["process"]
        if event["kind"] in ("step", "epoch") and victims.get(name):
            os.kill(victims[name], signal.SIGKILL)
            victims[name] = 0

    assert stages.run(kill, jobs=2) == 1
    (failure,) = (event["why"] for _, event in stages.events if event["kind"] == "failed")
    assert "its process was killed by SIGKILL" in failure
    assert stages.check() == {"done": 3, "elsewhere": 0, "training": 0, "begun": 1, "waiting": 0}
    processes = {event["process"] for _, event in stages.events if event["kind"] == "begin"}
    assert os.getpid() not in processes

    def terminate(name: str, event: Event) -> None:
        if event["kind"] == "begin":
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        stages.run(terminate, jobs=2)
    assert stages.check()["done"] == 3
    assert stages.run() == 0
    assert stages.check() == {"done": 4, "elsewhere": 0, "training": 0, "begun": 0, "waiting": 0}
    monkeypatch.setattr("softstair.train.pool.start_process", None)
    assert stages.run() == 0  # with everything done, no process is needed
    assert stages.events == []
    torch.set_num_threads(1)
    for unit in stages.design.units():
        fit(unit.recipe, Path("alone", unit.name), device="cpu")
        assert metrics_of(unit.path(stages.folder)) == metrics_of(Path("alone", unit.name))
    sys.modules.pop("grid_own", None)


# ---- What is in the way


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Unit]:
    """Two units on the digits, one of them done; nothing may start a process."""
    monkeypatch.setattr("softstair.train.pool.start_process", None)
    units = [Unit("a", recipe(fold=fold)) for fold in (0, 1)]
    fit(units[0].recipe, units[0].path(tmp_path), threads=1)
    return units


def test_what_is_left_to_do(few: list[Unit], tmp_path: Path) -> None:
    assert list(unfinished(few, tmp_path)) == few[1:]
    begun = replace(few[0], configuration="b")
    path = Path(shutil.copytree(few[0].path(tmp_path), begun.path(tmp_path)))
    assert list(unfinished([begun], tmp_path)) == []
    (path / "summary.json").unlink()
    assert list(unfinished([begun, *few], tmp_path)) == [begun, few[1]]
    for units in (few[:1], []):
        assert grid.run(units, tmp_path, lambda *_: None, device="cpu") == 0
    (path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(RunError, match="damaged"):
        statuses(Design("x", (Configuration("b", begun.recipe),), (0,)), tmp_path)
    # Damage is found before anything is trained.
    for name in ("config.json", "summary.json"):
        content = (few[0].path(tmp_path) / name).read_bytes()
        (few[0].path(tmp_path) / name).write_bytes(content[:100])
        before = files(tmp_path)
        with pytest.raises(RunError, match=name):
            grid.run(few[::-1], tmp_path, lambda *_: None, device="cpu", jobs=2)
        assert files(tmp_path) == before
        (few[0].path(tmp_path) / name).write_bytes(content)


# ---- How many at a time

Speed = Callable[[int], float]
CURVES: dict[str, tuple[Speed, int]] = {
    # Steps a second of all together, by their number; and the best number of up to six.
    "each as fast as alone": (lambda number: 10.0 * number, 6),
    "no more than two": (lambda number: 10.0 if number == 1 else 18.0, 2),
    "fastest with three": (lambda number: {1: 10, 2: 15, 3: 19, 4: 18}.get(number, 10.0), 3),
    "in one another's way": (lambda number: 10.0 / number, 1),
    "hardly a gain": (lambda number: 10.0 * 1.02**number, 1),
}


def settled(speed: Speed, first: int = 1, most: int = 6, done: float = 0.0) -> int:
    """The number that Pace settles on, if so many steps are done in a second."""
    now = [0.0]
    pace = Pace(first, most, clock=lambda: now[0])
    steps: dict[int, float] = {}
    while now[0] < 300:
        number = pace()
        assert 1 <= number <= most
        for unit in range(number):
            if unit not in steps:
                steps[unit] = done
                pace.hear(unit, {"kind": "begin", "done": done, "threads": 1})
            steps[unit] += 0.1 * speed(number) / number
            pace.hear(unit, {"kind": "step", "done": steps[unit]})
        for unit in [unit for unit in steps if unit >= number]:
            pace.hear(unit, {"kind": "done"})
            del steps[unit]
        now[0] += 0.1
    return pace()


@pytest.mark.parametrize("name", CURVES)
def test_the_fastest_number_is_found_and_never_exceeds_the_most(name: str) -> None:
    speed, best = CURVES[name]
    assert settled(speed, done=1e6) == best
    assert settled(speed, first=9, most=2) == 2


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
