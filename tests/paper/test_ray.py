"""The engine of Ray: a grid that is killed and resumed has the results that it has without Ray."""

import importlib.util
import json
import os
import re
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import filelock
import pytest
import torch

import softstair
from benchmarks import ray_survives
from paper import _ray_cluster, ray_engine
from paper.design import Unit
from paper.ray_engine import choose_resources
from softstair.train import fit
from softstair.train.parallel import Interrupted
from softstair.train.records import RunError
from softstair.train.run import Run
from train.short import OWN_DATA, RECIPE, metrics_of

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs ray, which is not installed"
)
OWN = f"""{OWN_DATA}
def build():
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
                         nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
                         nn.Flatten(), nn.Linear(32, 4))
"""


# Whole grids, on a Ray of their own


@pytest.fixture
def survival(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark of survival; the data of its units leave nothing behind in this process."""
    monkeypatch.setattr(Run, "finish", Run.finish)
    monkeypatch.setitem(sys.modules, "marking", None)
    monkeypatch.delitem(sys.modules, "marking")
    return ray_survives


@pytest.mark.nightly
@needs_ray
def test_a_killed_worker_and_an_interrupted_driver(
    survival: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = survival.survive(tmp_path / "ray", 5, kills=1, strikes=[signal.SIGINT])
    assert counted["codes"] == [128 + signal.SIGINT, 0], counted
    assert counted["errors"] == ""
    assert counted["kills"] == 1
    assert counted["resumed"] >= 1  # from a checkpoint, not from the beginning
    units = survival.units(5)
    assert counted["completions"] == Counter({unit.name: 1 for unit in units})
    # The same one after another, in one process without interruption.
    monkeypatch.chdir(tmp_path)
    for unit in units:
        fit(unit.recipe, unit.path(tmp_path / "plain"), threads=1, device="cpu")
        name = unit.path(Path())
        assert metrics_of(tmp_path / "ray" / name) == metrics_of(tmp_path / "plain" / name)
    assert survival.table(tmp_path / "ray") == survival.table(tmp_path / "plain")
    left = {path.name for path in (tmp_path / "ray").iterdir() if not path.is_dir()}
    assert left == {"completed"}


@pytest.mark.nightly
@needs_ray
def test_threads_and_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ray gives a process one thread; a network with convolutions has as many as here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.setitem(sys.modules, "own", None)
    monkeypatch.delitem(sys.modules, "own")
    recipe = RECIPE.replace(data="own:load", model="own:build", limit=None)
    units = [Unit(name, recipe) for name in ("good", "full", "done")]
    strange = tmp_path / "grid" / "full" / "fold-0" / "holiday.jpg"
    strange.parent.mkdir(parents=True)
    strange.touch()
    fit(recipe, units[2].path(tmp_path / "grid"), device="cpu", threads=1)
    before = (tmp_path / "grid/done/fold-0/summary.json").stat().st_mtime_ns
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    environment, threads = dict(os.environ), torch.get_num_threads()
    events: dict[str, list[dict[str, Any]]] = {unit.configuration: [] for unit in units}
    record = lambda unit, event: events[unit.configuration].append(event)
    try:
        torch.set_num_threads(2)
        assert ray_engine.run(units, tmp_path / "grid", record, device="cpu") == 1
        fit(recipe, tmp_path / "alone", device="cpu")
    finally:
        torch.set_num_threads(threads)
    assert capfd.readouterr() == ("", "")
    kinds = [event["kind"] for event in events["good"]]
    assert (kinds[0], kinds[1], kinds[-1]) == ("start", "begin", "done")
    assert events["good"][1]["threads"] == 2
    assert [event["kind"] for event in events["full"]] == ["start", "failed"]
    assert "holiday.jpg" in events["full"][1]["why"]
    assert events["done"] == []
    assert (tmp_path / "grid/done/fold-0/summary.json").stat().st_mtime_ns == before
    grid, alone = tmp_path / "grid/good/fold-0", tmp_path / "alone"
    assert metrics_of(grid) == metrics_of(alone)
    configs = [json.loads((out / "config.json").read_text()) for out in (grid, alone)]
    assert configs[0] == configs[1]
    # Nothing of Ray's is left here.
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert dict(os.environ) == environment


# A task, without Ray


class FakeMailbox:
    """A mailbox in this process."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.put = SimpleNamespace(remote=lambda name, event: self.events.append((name, event)))


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    token = tmp_path / "token"
    token.touch()
    return {
        "name": "x/fold-0",
        "recipe": RECIPE.to_flat(),
        "out": str(tmp_path / "x"),
        "settings": {"data_dir": "data", "device": "cpu", "threads": 1},
        "threads": 1,
        "token": str(token),
        "versions": {"softstair": softstair.__version__, "torch": str(torch.__version__)},
        "path": list(sys.path),
        "folder": str(tmp_path),
        "environment": {},
    }


def test_a_task_trains_once(task: dict[str, Any], tmp_path: Path) -> None:
    mailbox = FakeMailbox()
    assert ray_engine.train_unit(task, mailbox) == {"kind": "done", "threads": 1}
    kinds = [event["kind"] for _, event in mailbox.events]
    assert kinds[:2] == ["start", "begin"]
    assert kinds.count("epoch") == 3
    fit(RECIPE, tmp_path / "alone", device="cpu")
    assert metrics_of(tmp_path / "x") == metrics_of(tmp_path / "alone")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "x").rglob("*.json*")}
    again = FakeMailbox()
    assert ray_engine.train_unit(task, again) == {"kind": "done", "threads": None}
    assert [event["kind"] for _, event in again.events] == ["start"]
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"token": "/nowhere/at/all/.seen"}, "'/nowhere/at/all'.*share"),
        ({"versions": {"softstair": "0.0.7"}}, "0.0.7"),
        ({"recipe": RECIPE.replace(batch=10_000).to_flat()}, "batch.*10000"),
    ],
)
def test_a_task_reports_why_it_cannot_train(
    change: dict[str, Any], match: str, task: dict[str, Any], tmp_path: Path
) -> None:
    outcome = ray_engine.train_unit(task | change, FakeMailbox())
    assert (outcome["kind"], outcome["threads"]) == ("failed", None)
    assert re.search(match, outcome["why"])
    assert not (tmp_path / "x").exists()


def test_a_machine_without_softstair(task: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "softstair", None)
    assert "softstair is not installed" in ray_engine.train_unit(task, FakeMailbox())["why"]


@pytest.mark.nightly
def test_a_directory_that_is_still_held_is_waited_for(
    task: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the task of a driver that has just been killed."""
    fit(RECIPE, tmp_path / "x", device="cpu")
    (tmp_path / "x" / "summary.json").unlink()
    lock = filelock.FileLock(tmp_path / "x" / "lock", thread_local=False)
    lock.acquire()
    release = threading.Timer(0.5, lock.release)
    release.start()
    assert ray_engine.train_unit(task, FakeMailbox())["kind"] == "done"
    release.join()
    # For some time, not for ever.
    monkeypatch.setattr(ray_engine, "LOCK_TIMEOUT", 0.2)
    with lock:
        outcome = ray_engine.train_unit(task, FakeMailbox())
    assert "in use by another process" in outcome["why"]


# The driver, with a fake of Ray


class Lost(Exception):
    pass


class Cancelled(Lost):
    pass


class Memory(Lost):
    pass


class FakeRay:
    """The part of Ray that the driver uses: tasks end one at a time, the oldest first.

    ``outcome_of`` returns the outcome of a unit by its name, or the exception that is raised.
    """

    exceptions = SimpleNamespace(
        RayError=Lost, TaskCancelledError=Cancelled, OutOfMemoryError=Memory
    )
    cloudpickle = SimpleNamespace(register_pickle_by_value=lambda module: None)

    def __init__(self, outcome_of: Callable[[str], Any], machines: list[dict[str, float]]) -> None:
        self.outcome_of, self.machines = outcome_of, machines
        self.running: list[str] = []
        self.most = 0
        self.resources: list[dict[str, Any]] = []
        self.cancelled: list[str] = []

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": machine} for machine in self.machines]

    def remote(self, what: Any = None, **settings: Any) -> Any:
        if what is ray_engine.Mailbox:
            mailbox = SimpleNamespace(take=SimpleNamespace(remote=lambda: "mail"))
            return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: mailbox))
        return lambda function: SimpleNamespace(options=self.options)

    def options(self, name: str, **resources: Any) -> Any:
        def submit(task: dict[str, Any], mailbox: Any) -> str:
            self.resources.append(resources)
            self.running.append(name)
            self.most = max(self.most, len(self.running))
            return name

        return SimpleNamespace(remote=submit)

    def wait(self, tasks: list[str], **_: Any) -> tuple[list[str], list[str]]:
        if tasks == ["mail"]:
            return [], tasks
        return tasks[:1], tasks[1:]

    def get(self, name: str) -> Any:
        self.running.remove(name)
        outcome = self.outcome_of(name)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def cancel(self, name: str, **_: Any) -> None:
        self.cancelled.append(name)


DONE = {"kind": "done", "threads": 2}


def drive(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    outcome_of: Callable[[str], Any],
    number: int = 30,
    machines: list[dict[str, float]] | None = None,
    **settings: Any,
) -> tuple[FakeRay, int, list[tuple[str, dict[str, Any]]]]:
    """Train so many units; return the fake of Ray, how many failed, and the events."""
    ray = FakeRay(outcome_of, machines or [{"CPU": 4.0}, {"CPU": 2.0}])
    monkeypatch.setitem(sys.modules, "ray", ray)
    ray.is_initialized = lambda: True  # type: ignore[attr-defined]
    units = [Unit(f"u{at}", RECIPE) for at in range(number)]
    events: list[tuple[str, dict[str, Any]]] = []
    failed = ray_engine.run(
        units, folder, lambda unit, event: events.append((unit.configuration, event)), **settings
    )
    return ray, failed, events


def test_as_many_tasks_wait_as_train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray, failed, events = drive(monkeypatch, tmp_path, lambda name: DONE, number=100)
    assert failed == 0
    # The first unit has two threads: (4 + 2) / 2 train at a time, and as many wait.
    assert ray.most == 6
    assert [task["num_cpus"] for task in ray.resources] == [1] + [2] * 99
    assert {task["num_gpus"] for task in ray.resources} == {0}
    assert len(events) == 200
    ray, _, _ = drive(monkeypatch, tmp_path, lambda name: DONE, jobs=3, threads=1)
    assert ray.most == 3


def test_a_failure_is_reported_and_the_others_continue(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nan = {"kind": "failed", "threads": 1, "why": "the loss became nan.", "trace": ""}
    outcomes = {"u3": Lost(), "u4": Memory(), "u5": nan, "u6": nan, "u7": nan, "u8": Lost()}
    names = lambda name: outcomes.get(name.partition("/")[0], DONE)
    _, failed, events = drive(monkeypatch, tmp_path, names)
    assert failed == 6
    why = {name: event["why"] for name, event in events if event["kind"] == "failed"}
    assert sorted(why) == sorted(outcomes)
    assert "lost 4 times" in why["u3"]
    assert "memory" in why["u4"]
    assert sum(event["kind"] == "done" for _, event in events) == 24


def test_a_failure_of_all_units_ends_the_grid(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refused = {"kind": "failed", "threads": None, "why": "there are no data.", "trace": ""}
    with pytest.raises(RunError, match=r"^there are no data\.$"):
        drive(monkeypatch, tmp_path, lambda name: refused)
    with pytest.raises(RunError, match=r"^u0/fold-0: its process was lost"):
        drive(monkeypatch, tmp_path, lambda name: Lost())
    later = lambda name: DONE if name == "u0/fold-0" else refused
    ray, failed, _ = drive(monkeypatch, tmp_path, later)
    assert failed <= 8  # what was in flight already
    assert len(ray.resources) <= 9


def test_an_error_of_the_caller_cancels_all_tasks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rays: list[FakeRay] = []

    def outcome_of(name: str) -> dict[str, Any]:
        if name == "u1/fold-0":
            rays.append(sys.modules["ray"])  # type: ignore[arg-type]
            raise OSError("no reader")
        return DONE

    with pytest.raises(OSError, match="no reader"):
        drive(monkeypatch, tmp_path, outcome_of)
    assert rays[0].cancelled == rays[0].running
    assert len(rays[0].running) > 1
    assert not list(tmp_path.glob(".seen-*"))


@pytest.mark.parametrize(
    ("machines", "settings", "wanted"),
    [
        # device, cpus, gpus, in flight
        ([{"CPU": 8.0}], {}, ("cpu", 1, 0.0, 16)),
        ([{"CPU": 8.0}], {"threads": 4}, ("cpu", 4, 0.0, 4)),
        ([{"CPU": 8.0}], {"threads": 8, "jobs": 4}, ("cpu", 2, 0.0, 4)),
        ([{"CPU": 32.0, "GPU": 2.0}], {}, ("cuda", 1, 0.2, 20)),
        ([{"CPU": 32.0, "GPU": 2.0}], {"jobs": 3}, ("cuda", 1, 0.3333, 12)),
        ([{"CPU": 32.0, "GPU": 2.0}], {"jobs": 1}, ("cuda", 1, 1.0, 4)),
        ([{"CPU": 32.0, "GPU": 2.0}], {"device": "cpu"}, ("cpu", 1, 0.0, 64)),
        ([{"CPU": 2.0}, {"CPU": 4.0, "GPU": 1.0}], {"device": "cuda"}, ("cuda", 1, 0.5, 4)),
    ],
)
def test_resources_of_a_task(
    machines: list[dict[str, float]], settings: dict[str, Any], wanted: tuple[Any, ...]
) -> None:
    share = choose_resources(machines, **settings)
    assert (share.device, share.cpus, share.gpus, share.at_once(machines)) == wanted


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"device": "cuda"}, "'cuda'.*no GPU"),
        ({"device": "cuda:1"}, "device must be one of auto, cpu, cuda"),
        ({"machines": [{"CPU": 0.5}]}, "1 CPUs and 0 GPUs"),
        ({"jobs": 0}, "jobs"),
    ],
)
def test_invalid_resources(
    settings: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=match):
        drive(monkeypatch, tmp_path, lambda name: DONE, **settings)


# Addresses


def closed_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


@needs_ray
@pytest.mark.parametrize("kind", ["closed", "client", "variable"])
def test_no_cluster_at_an_address(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    address = f"127.0.0.1:{closed_port()}"
    if kind == "variable":
        monkeypatch.setenv("RAY_ADDRESS", address)
    given = {"closed": address, "client": f"ray://{address}"}.get(kind, "auto")
    with pytest.raises(ValueError, match=f"{address}.*ray start"):
        ray_engine.run([Unit("u", RECIPE)], tmp_path, lambda *_: None, address=given)
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


@needs_ray
@pytest.mark.nightly
def test_a_server_that_is_no_cluster(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_ray_cluster, "TIMEOUT", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ValueError, match="no cluster answered within 2 seconds"):
            _ray_cluster.check_reachable(address)
    assert capfd.readouterr() == ("", "")


@needs_ray
@pytest.mark.nightly
def test_auto_without_a_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    # Ray looks for the processes of a cluster, of which another test may have one.
    patched = "import functools, ray._private.services as services\n"
    patched += "services._cached_find_gcs_addresses = functools.cache(set)\n"
    monkeypatch.setattr(_ray_cluster, "TRY", patched + _ray_cluster.TRY)
    with pytest.raises(ValueError, match="none runs on this machine"):
        _ray_cluster.check_reachable("auto")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("code", "kind", "match"),
    [
        (signal.SIGTERM, Interrupted, "SIGTERM"),
        (7, ValueError, r"Ray could not be started on this machine \(it ended with code 7\)"),
    ],
)
def test_ray_ends_the_process_while_it_starts(
    code: int, kind: type[Exception], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does after SIGTERM, and after errors of its own."""
    ray = pytest.importorskip("ray", reason="needs ray")
    monkeypatch.setattr(ray, "init", lambda *_, **__: sys.exit(code))
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(kind, match=match), _ray_cluster.joined(None, 1):
        pytest.fail("it is connected")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.parametrize("address", ["rubbish", "http://there:80", "there:70000"])
def test_invalid_addresses(address: str) -> None:
    with pytest.raises(ValueError, match="auto, host:port or ray://host:port"):
        _ray_cluster.check_reachable(address)


def test_without_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"\[ray\]"):
        ray_engine.run([Unit("u", RECIPE)], tmp_path, lambda *_: None)
