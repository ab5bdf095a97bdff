"""MPS is started for processes that share a GPU, ended with them, and never required."""

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from short import recipe

from softstair.train import mps, pool
from softstair.train.pool import ProcessPool, Task

DAEMON = """#!/bin/sh
# Stands for nvidia-cuda-mps-control: it notes what it is told, and where.
if [ "$1" = -d ]; then echo "start $CUDA_MPS_PIPE_DIRECTORY ${CUDA_VISIBLE_DEVICES-all}"
else read word; echo "$word $CUDA_MPS_PIPE_DIRECTORY"; fi >> "$NOTES"
[ -z "$BROKEN" ]
"""
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install the stand-in; return the file with its notes."""

    def install(probe: str = "", **variables: str) -> Path:
        program, notes = tmp_path / mps.PROGRAM, tmp_path / "notes"
        program.write_text(DAEMON)
        program.chmod(0o755)
        settings = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NOTES": str(notes), **variables}
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(mps, "PROBE", probe)
        monkeypatch.setattr(mps, "DEFAULT", tmp_path / "none")
        return notes

    monkeypatch.delenv(mps.PIPES, raising=False)
    return install


def test_it_has_pipes_of_its_own_and_ends_with_the_block(install: Install) -> None:
    notes = install(CUDA_VISIBLE_DEVICES="1")
    with mps.service() as variables:
        folder = variables[mps.PIPES]
        assert Path(folder).is_dir()
        assert notes.read_text() == f"start {folder} all\n"
        assert mps.PIPES not in os.environ
    assert notes.read_text().splitlines()[1:] == [f"quit {folder}"]
    assert not Path(folder).exists()


def test_it_ends_if_its_parent_is_killed(install: Install) -> None:
    notes = install()
    if not (child := os.fork()):
        with mps.service():
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    deadline = time.monotonic() + 20
    while "quit" not in notes.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(notes.read_text().splitlines()) == 2


def test_where_it_cannot_be_used_a_warning_says_why(install: Install) -> None:
    install(BROKEN="1")
    with pytest.warns(UserWarning, match="-d failed"), mps.service() as variables:
        assert variables == {}
    notes = install("raise SystemExit('CUDA error 805')", BROKEN="")
    notes.unlink()
    with pytest.warns(UserWarning, match="CUDA error 805"), mps.service() as variables:
        assert variables == {}
    assert [line.split()[0] for line in notes.read_text().splitlines()] == ["start", "quit"]


def test_one_that_runs_is_used_as_it_is(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = install()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (tmp_path / "none").mkdir()
        (tmp_path / "none" / "control").touch()
        with mps.service() as variables:
            assert variables == {}
        (tmp_path / "none" / "control").unlink()
        monkeypatch.setenv(mps.PIPES, "elsewhere")
        with mps.service() as variables:
            assert variables == {}
        monkeypatch.delenv(mps.PIPES)
        monkeypatch.setenv("PATH", str(Path(sys.executable).parent / "nothing"))
        with mps.service() as variables:
            assert variables == {}
    assert not notes.exists()


@pytest.mark.parametrize("share", [False, True])
def test_workers_of_a_pool_use_it(
    share: bool, install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = install()
    given: list[Any] = []
    monkeypatch.setattr(pool.Worker, "__init__", lambda self, *rest: given.append(rest[1]))
    for name in ("dismiss", "end"):
        monkeypatch.setattr(pool.Worker, name, lambda self, *rest: None)
    monkeypatch.setattr(pool.Worker, "task", None, raising=False)
    tasks = [Task("a", recipe(), tmp_path / "a")]
    with ProcessPool(tasks, lambda *_: None, lambda _: 2, {}, share_gpu=share):
        assert len(given) == 2
        assert all((mps.PIPES in variables) is share for variables in given)
    assert notes.exists() is share
