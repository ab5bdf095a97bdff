"""Run directories: what is refused, and that no good file is ever lost."""

import errno
import json
import multiprocessing
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch
from short import (
    RECIPE,
    At,
    files,
    is_sentence,
    metrics_of,
    recipe,
    result,
    stopped,
    strike,
    uninterrupted,
)
from torch import Tensor, nn
from warm import Warm

from helpers import commands
from softstair.data import Dataset, load
from softstair.train import Run, RunError, checkpoint, fit, trained_network
from softstair.train.checkpoint import CheckpointError
from softstair.train.run import source_commit

pytestmark = pytest.mark.usefixtures("plain_terminal")

FLAGS = ["--epochs", "1", "--limit", "200", "--batch", "32"]

Result = tuple[bytes, list[Any]]


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Result:
    torch.set_num_threads(1)
    return uninterrupted(tmp_path_factory.mktemp("complete") / "run")


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped half-way; not to be changed."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("half") / "run"
    stopped(RECIPE, out, 1, 2)
    return out


@pytest.fixture
def out(half: Path, tmp_path: Path) -> Path:
    return shutil.copytree(half, tmp_path / "run")


def ends_well(out: Path, complete: Result) -> None:
    fit(RECIPE, out, resume=True)
    assert result(out) == complete


# Directories


def test_a_run_is_not_begun_twice(out: Path, run: commands.Run) -> None:
    before = files(out)
    with pytest.raises(RunError, match="holds a run already"):
        fit(RECIPE, out)
    assert "--resume" in run.rejected("train", *FLAGS, "--out", out)
    assert files(out) == before


def test_a_complete_run_returns_its_summary_and_trains_no_more(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = fit(RECIPE, out, resume=True)
    before = files(out)
    monkeypatch.setattr(import_module("softstair.train.fit"), "_train", None)
    assert fit(RECIPE, out, resume=True) == summary
    assert files(out) == before


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("name", ["file", "file/x", "x" * 300])
def test_directories_that_cannot_be_made(name: str, tmp_path: Path, run: commands.Run) -> None:
    (tmp_path / "file").write_text("precious")
    for more in ([], ["--resume"], ["--every-fold"]):
        run.rejected("train", *FLAGS, *more, "--out", tmp_path / name)
    assert files(tmp_path) == {"file": b"precious"}


def test_a_directory_that_cannot_be_written(
    tmp_path: Path, run: commands.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mkdir(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    text = run.rejected("train", *FLAGS, "--out", tmp_path / "x")
    assert "Permission denied" in text


@pytest.mark.parametrize(
    "name", ["thesis.tex", "summary.json", ".hidden", "fold-0/x", "checkpoint/state.pt"]
)
def test_other_files_are_kept(name: str, tmp_path: Path, run: commands.Run) -> None:
    path = tmp_path / "x" / name
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    for more in ([], ["--resume"]):
        text = run.rejected("train", *FLAGS, *more, "--out", tmp_path / "x")
        assert repr(name.partition("/")[0]) in text or "--every-fold" in text
    run.rejected("train", *FLAGS, "--every-fold", "--out", tmp_path / "x")
    assert files(tmp_path / "x") == {name: b"{}"}


def test_an_error_before_the_first_step_leaves_no_files(tmp_path: Path, run: commands.Run) -> None:
    for flag in ("--limit 3", "--batch 1000", "--data nothing", "--device meta", "--skip *"):
        run.rejected("train", *FLAGS, *flag.split(), "--out", tmp_path / "x")
        assert not files(tmp_path), flag


def test_a_directory_in_use(out: Path, run: commands.Run) -> None:
    before = files(out)
    with Run.hold(out):
        for more in ([], ["--resume"]):
            text = run.rejected("train", *FLAGS, *more, "--out", out)
            assert "in use by another process" in text
        assert files(out) == before


def test_a_folder_that_a_refused_run_removes_meanwhile_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, acquire, removed = tmp_path / "new" / "x", filelock.FileLock.acquire, []

    def late(lock: Any, *arguments: Any) -> Any:
        if not removed:
            removed.append(shutil.rmtree(out.parent))
            os.open(out / "lock", os.O_CREAT)  # as filelock does, once it has made the folder
        return acquire(lock, *arguments)

    monkeypatch.setattr(filelock.FileLock, "acquire", late)
    with Run.hold(out):
        assert (out / "lock").exists()
    assert removed
    assert not out.parent.exists()  # this run was not begun either


@pytest.mark.nightly
def test_processes_that_are_refused_together_all_had_the_lock(tmp_path: Path) -> None:
    forked = multiprocessing.get_context("fork")
    together, refused = forked.Barrier(8), forked.SimpleQueue()

    def race() -> None:
        for number in range(20):
            together.wait()
            try:
                with Run.hold(tmp_path / str(number)):
                    raise RunError("refused")
            except RunError as error:
                refused.put(str(error))

    processes = [forked.Process(target=race) for _ in range(8)]
    for process in processes:
        process.start()
    errors = {refused.get() for _ in range(8 * 20)}
    for process in processes:
        process.join()
    assert errors == {"refused"}
    assert not files(tmp_path)


def test_a_killed_process_holds_no_lock(warm: Warm, tmp_path: Path) -> None:
    out = tmp_path / "x"
    words = ["train", "--epochs", "1000", "--limit", "200", "--out", str(out)]
    child = warm.start(words, tmp_path / "errors")
    deadline = time.monotonic() + 60
    while not (out / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(RunError, match="in use by another process"), Run.hold(out):
        pass
    os.kill(child, signal.SIGKILL)
    assert warm.wait() == [-9]
    with Run.hold(out):
        pass


# Recipes and data


@pytest.mark.parametrize(
    ("name", "value"), [("seed", 1), ("epochs", 4), ("skip", ("x",)), ("limit", None)]
)
def test_another_recipe_is_refused(name: str, value: Any, out: Path, run: commands.Run) -> None:
    before = files(out)
    with pytest.raises(RunError, match=f"was begun with {name} = "):
        fit(RECIPE.replace(**{name: value}), out, resume=True)
    values = value if isinstance(value, tuple) else [str(value)]
    text = run.rejected("train", f"--{name}", *values, "--resume", "--out", out)
    assert f"use the same --{name} and the same preset" in text
    assert files(out) == before


def changed(digits: Dataset) -> Iterator[Dataset]:
    x = digits.x.clone()
    x[-1, 0, 0, 0] += 1
    yield replace(digits, x=x)
    yield replace(digits, y=digits.y.roll(1))
    yield replace(digits, x=digits.x[1:], y=digits.y[1:])
    yield replace(digits, mean=7.0)
    yield replace(digits, groups=torch.arange(len(digits)) // 3)
    yield replace(digits, test_x=digits.x[:50], test_y=digits.y[:50])


def test_changed_data_are_refused(out: Path) -> None:
    before = files(out)
    for dataset in changed(load("digits").sample(200)):
        with pytest.raises(RunError, match="data"):
            fit(RECIPE, out, resume=True, dataset=dataset)
        assert files(out) == before


def test_another_model_is_refused(out: Path) -> None:
    before = files(out)
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    with pytest.raises(CheckpointError, match="does not fit this network"):
        fit(RECIPE, out, resume=True, model=other)
    assert files(out) == before
    with pytest.raises(ValueError, match="model"):
        trained_network(out, load("digits"), other)


@pytest.mark.parametrize(
    ("name", "value"), [("device", "cuda:1"), ("processes", 2), ("threads", 7)]
)
def test_a_run_is_resumed_as_it_was_begun(
    name: str, value: Any, out: Path, run: commands.Run
) -> None:
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, name: value}))
    before = files(out)
    text = run.rejected("train", "--resume", "--device", "cpu", "--threads", 1, "--out", out)
    assert f"begun with {name} = {str(value).partition(':')[0]}" in text
    assert files(out) == before


# Damaged files


def forge(out: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the content of a checkpoint, with the right checksums."""
    state = checkpoint.load(out / "checkpoint")
    assert state is not None
    change(state)
    checkpoint.save(out / "checkpoint", state)


FORGERIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no network": lambda s: s.pop("network"),
    "another parameter": lambda s: s["network"].update(more=torch.zeros(1)),
    "no annealer": lambda s: s.update(annealer=None),
    "annealer elsewhere": lambda s: s["annealer"].update(steps=-5),
    "generator": lambda s: s["generators"][0].update(cpu=torch.zeros(3, dtype=torch.uint8)),
    "sums": lambda s: s.update(sums={"loss": 3.0}),
}


@pytest.mark.nightly(keep=6)
@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_checkpoint_is_refused(name: str, out: Path) -> None:
    forge(out, FORGERIES[name])
    before = files(out)
    with pytest.raises(CheckpointError) as caught:
        fit(RECIPE, out, resume=True)
    assert is_sentence(str(caught.value))
    assert files(out) == before


def test_a_checkpoint_with_another_stair_is_refused(out: Path) -> None:
    def other(state: dict[str, Any]) -> None:
        for key in state["network"]:
            if key.endswith("weight_stair._extra_state"):
                state["network"][key][1] -= 0.5

    forge(out, other)
    with pytest.raises(CheckpointError, match="does not fit this network"):
        fit(RECIPE, out, resume=True)
    with pytest.raises(RunError, match="shapes, types or stairs"):
        trained_network(out, load("digits"))


# Full disks


def test_a_limit_of_file_sizes(out: Path, complete: Result, run: commands.Run) -> None:
    before = files(out / "checkpoint")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        text = run.rejected("train", "--resume", "--out", out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in text
    assert files(out / "checkpoint") == before
    ends_well(out, complete)


# Losses that are not finite


class Poisoned(nn.Module):
    """A network whose loss, or whose gradient alone, is not finite after some calls."""

    def __init__(self, kind: str, calls: int) -> None:
        super().__init__()
        hidden = [nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU()]
        self.features, self.classifier = nn.Sequential(*hidden), nn.Linear(16, 10)
        self.shift = nn.Parameter(torch.zeros(1))
        self.kind = kind
        self.register_buffer("left", torch.tensor(calls))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.classifier(self.features(x))
        if self.training:
            self.left -= 1
        if self.left >= 0 or not self.training:
            return scores + self.shift * 0
        if self.kind == "gradient":
            return scores + self.shift.abs().sqrt() * 0  # finite; its slope at 0 is not
        return scores * float("nan")


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(
    ("kind", "calls", "stop"),
    [("loss", 0, True), ("loss", 7, False), ("gradient", 7, True), ("gradient", 9, False)],
)
def test_a_loss_that_is_not_finite_is_never_saved(
    kind: str, calls: int, stop: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of an epoch, and in its last step; also if a signal comes in that step."""
    monkeypatch.setattr("softstair.train.run.MIN_PAUSE", 0.0)
    monkeypatch.setattr("softstair.train.run.MAX_SHARE", float("inf"))
    float_recipe, out = recipe(weights="float", features="float"), tmp_path / "x"
    watchers = [At(calls // 5, calls % 5 + 1, strike(signal.SIGTERM))] if stop else []
    with pytest.raises(RunError, match=f"in epoch {calls // 5 + 1}"):
        fit(float_recipe, out, model=Poisoned(kind, calls), watchers=watchers)
    state = checkpoint.load(out / "checkpoint")
    assert (0 if state is None else state["epoch"] * 5 + state["step"]) == calls
    if state is not None:
        tensors = [*state["network"].values(), *state["sums"].values()]
        tensors += [x for values in state["optimiser"]["state"].values() for x in values.values()]
        assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
    assert metrics_of(out).count(b"\n") == calls // 5
    assert not (out / "summary.json").exists()
    with pytest.raises(RunError, match="in epoch"):
        fit(float_recipe, out, model=Poisoned(kind, calls), resume=True)


def test_commit_is_one_short_line_and_git_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFTSTAIR_COMMIT", "abc\n" + 1000 * "d")
    assert source_commit.__wrapped__() == "abc" + 97 * "d"
    monkeypatch.delenv("SOFTSTAIR_COMMIT")
    monkeypatch.setenv("PATH", "")
    assert source_commit.__wrapped__() is None
