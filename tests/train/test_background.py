"""Checkpoints are written while the training goes on, and stay complete or absent."""

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from short import At, recipe, result, uninterrupted

from softstair.train import RunError, checkpoint, train
from softstair.train.state import State

RANDOM = recipe(forward="random")


class Writer:
    """Stands for the thread's work: it waits until it is ``released``, then writes or fails."""

    def __init__(self) -> None:
        self.released, self.error = threading.Event(), cast(OSError | None, None)
        self.positions: list[tuple[int, int]] = []
        self.active = self.most = 0
        self._write = checkpoint._write

    def __call__(self, folder: Path, plain: dict[str, Any], *given: Any) -> Path:
        self.active += 1
        self.most = max(self.most, self.active)
        assert threading.current_thread() is not threading.main_thread()
        assert self.released.wait(30)
        try:
            if self.error is not None:
                raise self.error
            return self._write(folder, plain, *given)
        finally:
            self.positions.append((plain["epoch"], plain["step"]))
            self.active -= 1


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Writer]:
    """Checkpoints are due at every step for which :func:`due` asks, and at no other."""
    monkeypatch.setattr("softstair.train.run.MIN_PAUSE", 1e9)
    writer = Writer()
    monkeypatch.setattr(checkpoint, "_write", writer)
    yield writer
    writer.released.set()


def due(epoch: int, step: int, monkeypatch: pytest.MonkeyPatch) -> list[At]:
    """Return watchers that let a checkpoint be due after this step alone."""
    wait = lambda seconds: monkeypatch.setattr("softstair.train.run.MIN_PAUSE", seconds)
    return [At(epoch, step, lambda state: wait(0.0)), At(epoch, step + 1, lambda state: wait(1e9))]


class Crash(Exception):
    """Nobody catches it."""


def test_a_checkpoint_is_of_its_own_step_although_others_follow_before_it_is_written(
    writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.released.set()
    wanted = uninterrupted(tmp_path / "whole", RANDOM)
    writer.released.clear()
    writer.positions.clear()

    def crash(state: State) -> None:
        assert writer.positions == []
        threading.Timer(0.2, writer.released.set).start()
        raise Crash

    out = tmp_path / "parts"
    with pytest.raises(Crash):
        train(RANDOM, out, watchers=[*due(1, 1, monkeypatch), At(1, 4, crash)])
    assert writer.positions == [(1, 1)]  # the end of the run waited for it, under the lock
    saved = checkpoint.load(out / "checkpoint")
    assert saved is not None
    assert (saved["epoch"], saved["step"]) == (1, 1)
    train(RANDOM, out, resume=True)
    assert result(out) == wanted


def test_steps_do_not_wait_for_a_slow_disk_and_one_checkpoint_is_written_at_a_time(
    writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("softstair.train.run.MIN_PAUSE", 0.0)

    def release(state: State) -> None:
        assert (writer.positions, writer.active) == ([], 1)  # the first is being written
        writer.released.set()

    train(RANDOM, tmp_path / "x", watchers=[At(2, 1, release)])
    assert writer.most == 1
    first, *later, last = writer.positions
    assert (first[0], last) == (0, (3, 0))
    assert all(position >= (2, 1) for position in later)


@pytest.mark.parametrize("last", [False, True])
def test_an_error_of_the_thread_ends_the_run(
    last: bool, writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.error = OSError(errno.ENOSPC, "No space left on device")
    writer.released.set()
    begun: list[int] = []
    watchers = [At(1, 1, lambda state: begun.append(state.epoch))]
    if not last:
        watchers += [*due(0, 2, monkeypatch), At(0, 4, lambda state: time.sleep(0.2))]
    with pytest.raises(RunError, match="No space left"):
        train(RANDOM, tmp_path / "x", watchers=watchers)
    assert writer.positions == [(3, 0) if last else (0, 2)]
    assert begun == ([1] if last else [])
    assert not (tmp_path / "x" / "summary.json").exists()
