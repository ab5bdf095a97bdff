"""A pool: folds in parallel equal folds one after another, and survive kills and signals."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import filelock
import pytest
import torch
from short import (
    OWN_DATA,
    OWN_MODEL,
    is_sentence,
    metrics_of,
    recipe,
    result,
    uninterrupted,
    without_export,
)

from softstair import cli
from softstair.cli._args import parse
from softstair.cli._output import Progress
from softstair.cli.train import Command
from softstair.train import RunError, fit
from softstair.train.parallel import Interrupted, StopRequest
from softstair.train.pool import Pool, Task, process_threads, worker_count
from softstair.train.progress import Event
from softstair.train.records import read_json, recipe_of

OWN = f"""{OWN_DATA}
from softstair.data import split

def marked():
    data = load()
    data.x[split(data, 1, 3)[1][5]] = 255  # it validates fold 1, and trains the others
    return data

{OWN_MODEL.replace("return", 'print("output of the model"); return')}
class Trap(nn.Module):
    def forward(self, x):
        return x if self.training else torch.where(x > 3, torch.nan, x)

def trapped():
    return nn.Sequential(Trap(), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
"""
FLAGS = "--batch 16 --forward random --device cpu --every-fold".split()
FLAGS += ["--data", "own:load", "--model", "own:build"]


@pytest.fixture(autouse=True)
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.setitem(sys.modules, "own", None)
    monkeypatch.delitem(sys.modules, "own")  # another test may have imported its own


def wait_for_epoch(run: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (run / "metrics.jsonl").exists() and metrics_of(run):
            return
        time.sleep(0.005)


# Processes


@pytest.mark.nightly
def test_one_fold_fails_one_is_killed_and_the_third_is_as_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(2)  # a network with convolutions uses them
    events: list[tuple[str, Event]] = []

    class Killer(Progress):
        def show(self, label: str, news: Event) -> None:
            events.append((label, news))
            if (label, news["kind"], news.get("epoch")) == ("fold 2", "epoch", 2):
                os.kill(processes()[label], signal.SIGKILL)
            super().show(label, news)

    def processes() -> dict[str, int]:
        return {name: event["process"] for name, event in events if event["kind"] == "begin"}

    monkeypatch.setattr("softstair.cli.train.Progress", Killer)
    words = ["train", *FLAGS, "--data", "own:marked", "--model", "own:trapped", "--epochs", "12"]
    words += ["--weights", "float", "--features", "float", "--folds", "3"]
    assert cli.main([*words, "--jobs", "3", "--out", "x"]) == 2
    stdout, stderr = capfd.readouterr()
    assert stdout == ""
    messages = {label: event["why"] for label, event in events if event["kind"] == "failed"}
    assert sorted(messages) == ["fold 1", "fold 2"]
    assert "loss became nan" in messages["fold 1"]
    assert "SIGKILL" in messages["fold 2"]
    assert all(is_sentence(message) for message in messages.values())
    last = stderr.splitlines()[-1]
    assert "softstair train --resume --out x" in last
    assert "--every-fold" in last
    assert len({*processes().values(), os.getpid()}) == 4
    # The first is complete, as it would be alone; the killed one is so once it is resumed.
    x = tmp_path / "x"
    complete = [(x / f"fold-{fold}" / "summary.json").exists() for fold in range(3)]
    assert complete == [True, False, False]
    kinds = [event["kind"] for label, event in events if label == "fold 0"]
    assert [kinds[0], kinds[1], kinds[-1]] == ["start", "begin", "done"]
    assert kinds.count("epoch") == 12
    for fold in (0, 2):
        begun = recipe_of(x / f"fold-{fold}")
        assert begun is not None
        expected = uninterrupted(tmp_path / f"alone-{fold}", begun)
        fit(begun, x / f"fold-{fold}", resume=True)
        assert result(x / f"fold-{fold}") == expected
        configs = [
            read_json(path, "config.json")
            for path in (x / f"fold-{fold}", tmp_path / f"alone-{fold}")
        ]
        assert configs[0] == configs[1]
        assert configs[0] is not None
        assert configs[0]["threads"] == 2


@pytest.mark.nightly
def test_a_signal_stops_all_folds_and_they_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my folds"  # a name that must be quoted
    words = ["train", *FLAGS, "--folds", "3", "--epochs", "60"]
    assert cli.main([*words, "--jobs", "1", "--out", "complete"]) == 0
    capsys.readouterr()

    def strike() -> None:
        wait_for_epoch(out / "fold-1")
        os.kill(os.getpid(), signal.SIGTERM)

    striking = threading.Thread(target=strike)
    striking.start()
    code = cli.main([*words, "--jobs", "2", "--out", str(out)])
    striking.join()
    stdout, stderr = capsys.readouterr()
    assert (code, stdout) == (143, ""), stderr
    assert is_sentence(without_export(stderr))
    assert read_json(out / "fold-1", "summary.json") is None
    begun = [fold for fold in range(3) if recipe_of(out / f"fold-{fold}") is not None]
    assert {0, 1} <= set(begun)
    assert all(any((out / f"fold-{fold}" / "checkpoint").iterdir()) for fold in begun)
    command = shlex.split(stderr[stderr.index("softstair train --resume") :])
    assert cli.main([*command[1:], "--jobs", "1"]) == 0
    for fold in range(3):
        assert result(out / f"fold-{fold}") == result(tmp_path / "complete" / f"fold-{fold}")


PARENT = """
import json, sys, time
from pathlib import Path
from softstair.train import Recipe
from softstair.train.pool import start_process
recipe = Recipe.from_flat(json.loads(sys.argv[1]))
started = start_process({"recipe": recipe, "out": Path(sys.argv[2]), "device": "cpu"}, 1)
time.sleep(600)
"""


@pytest.mark.nightly
def test_a_killed_parent_leaves_no_process(tmp_path: Path) -> None:
    begun = parse(Command, [*FLAGS, "--epochs", "14"], "softstair train").recipe
    out = tmp_path / "x"
    words = [json.dumps(begun.to_flat()), str(out)]
    with open("errors", "w") as errors:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, *words], stdout=subprocess.DEVNULL, stderr=errors
        )
        wait_for_epoch(out)
        parent.kill()
        parent.wait()
    with filelock.FileLock(out / "lock", timeout=30):
        assert read_json(out, "summary.json") is None  # stopped before its end
        assert any((out / "checkpoint").iterdir())
    assert "Traceback" not in Path("errors").read_text()
    fit(begun, out, resume=True)
    assert result(out) == uninterrupted(tmp_path / "complete", begun)


# The rules, without processes


class Script(Pool):
    """A pool whose tasks end as a script says: events for each name, or a reason of loss."""

    def __init__(self, script: dict[str, list[Event] | str]) -> None:
        self.events: list[tuple[str, str]] = []
        self.stopped = 0
        self._script = script
        tasks = (Task(name, recipe(), Path("runs") / name) for name in script)
        super().__init__(tasks, self._note)

    def _note(self, name: str, event: Event) -> None:
        self.events.append((name, event["kind"]))

    def capacity(self) -> int:
        return 2

    def start(self, task: Task) -> None:
        self.handle(task, {"kind": "start"})

    def poll(self, timeout: float) -> None:
        task = min(self.running, key=lambda task: task.name)
        end = self._script[task.name]
        if isinstance(end, str):
            self.fail(task, end, lost=True)
        else:
            for event in end:
                self.handle(task, event)

    def stop(self) -> None:
        self.stopped += 1
        self._script = {name: [{"kind": "stopped"}] for name in self._script}


DONE: list[Event] = [{"kind": "begin", "threads": 1}, {"kind": "done"}]
REFUSED: list[Event] = [{"kind": "failed", "why": "there are no data."}]
NAN: list[Event] = [{"kind": "begin", "threads": 1}, {"kind": "failed", "why": "nan."}]


def test_failures_after_the_first_step_leave_the_others_alone() -> None:
    pool = Script({"a": DONE, "b": NAN, "c": NAN, "d": "it was killed.", "e": DONE})
    assert pool.run(StopRequest()) == 3
    assert [name for name, kind in pool.events if kind == "start"] == list("abcde")
    assert [name for name, kind in pool.events if kind == "done"] == ["a", "e"]


def test_an_error_before_the_first_step_is_raised() -> None:
    with pytest.raises(RunError, match="no data"):
        Script({"a": REFUSED, "b": DONE}).run(StopRequest())
    with pytest.raises(RunError, match="a: it was killed"):
        Script({"a": "it was killed.", "b": DONE}).run(StopRequest())
    assert Script({"a": DONE, "b": REFUSED, "c": DONE}).run(StopRequest()) == 1


def test_a_repeated_error_before_the_first_step_starts_no_more_tasks() -> None:
    pool = Script({"a": DONE, "b": REFUSED, "c": REFUSED, "d": DONE, "e": DONE})
    assert pool.run(StopRequest()) == 2
    assert ("e", "start") not in pool.events


def test_a_signal_stops_the_pool_once() -> None:
    stop = StopRequest()
    stop.number = signal.SIGTERM
    pool = Script({"a": DONE, "b": DONE})
    with pytest.raises(Interrupted):
        pool.run(stop)
    assert pool.stopped == 1
    assert pool.events == [("a", "start"), ("a", "stopped")]


def test_worker_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, cpu, cuda in ((1, 1, 1), (2, 2, 1), (8, 5, 4), (64, 5, 5)):
        monkeypatch.setattr("softstair.train.pool.cores", lambda n=cores: n)
        assert worker_count("auto", "cpu", runs=5) == cpu
        assert worker_count("auto", "cuda:1", runs=5) == cuda
        assert worker_count("auto", "cpu", runs=5, threads=cores) == 1
        assert worker_count("auto", "cpu", runs=500, threads=2) == max(1, cores // 2)
        assert worker_count(3, "cuda", runs=5) == worker_count(7, "cpu", runs=3) == 3
        for available in (False, True):
            monkeypatch.setattr(torch.cuda, "is_available", lambda there=available: there)
            assert worker_count("auto", "auto", runs=5) == (cuda if available else cpu)


def test_processes_on_a_gpu_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.setattr("softstair.train.pool.cores", lambda: 16)
    assert [process_threads("cuda:1", workers) for workers in (1, 3, 11, 40)] == [16, 5, 1, 1]
    assert process_threads("cuda", 11, threads=4) == 4
    assert process_threads("cpu", 11, threads=4) == 16
    for available, threads in ((False, 16), (True, 1)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=available: there)
        assert process_threads("auto", 11) == threads
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert process_threads("cuda", 3) == 2
