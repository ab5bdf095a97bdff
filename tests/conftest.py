"""Kernels run here under Triton's interpreter, in a process of its own.

Whether functions are compiled or interpreted is settled when Triton is imported, for everybody. So
a test file with ``NEEDS_INTERPRETER = True`` has its tests run by another pytest, which sets
TRITON_INTERPRET; of them only those that say ``without_the_interpreter`` run in this one, and
``test_under_the_interpreter``, which starts the other and fails as it does. The first of these
starts one for all files that were collected, and the others are left out; in the nightly lane,
which is longer, each starts one for the files of its folder.
"""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INTERPRETED_FILES = pytest.StashKey[list[Path]]()
HERE = Path(__file__).parent

# What tests share lies here, and pytest looks only beside the file that it runs.
sys.path.append(str(HERE))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each process keeps its own share."""
    flag = "NEEDS_INTERPRETER"
    both = [item for item in items if getattr(getattr(item, "module", None), flag, False)]
    starters = [item for item in both if item.name == "test_under_the_interpreter"]
    stay = [*starters, *(item for item in both if "without_the_interpreter" in item.name)]
    elsewhere = [item for item in both if (item in stay) is INTERPRETED]
    if config.getoption("lane") != "nightly" and not INTERPRETED:
        elsewhere += starters[1:]
    config.stash[INTERPRETED_FILES] = list(dict.fromkeys(item.path for item in both))
    if elsewhere:
        items[:] = [item for item in items if item not in elsewhere]
        config.hook.pytest_deselected(items=elsewhere)


def pytest_collection_finish() -> None:
    """Collect garbage less often than Python does: that took a twentieth of the time."""
    gc.set_threshold(20_000)


@pytest.fixture(autouse=True, scope="session")
def _quick_files_and_digits() -> Iterator[None]:
    """Do not wait for the disk, and read the digits once: both took a twentieth of the time."""
    from softstair import data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        patch.setattr(data, "_digits", cache(data._digits))
        yield


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> Iterator[None]:
    """Make Triton's interpreter faster in three places.

    It patches its language again for each launch and each function that a kernel calls; what it
    patches depends on nothing but whether a function sees the modules ``tl`` and ``tl.core``. It
    makes a table of all types to look up one. It computes whether integers overflow, and does
    not use the answer outside of its debug mode.
    """
    if not INTERPRETED:
        yield
        return
    from triton import language as tl
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    patch_lang, done = interpreter._patch_lang, set[tuple[bool, bool]]()
    dtype_of, known = interpreter._get_np_dtype, dict[str, Any]()

    @cache
    def visible(function: Callable[..., Any]) -> tuple[bool, bool]:
        modules = [
            value for value in function.__globals__.values() if isinstance(value, ModuleType)
        ]
        return tl in modules, tl.core in modules

    def patch_once(function: Callable[..., Any]) -> Any:
        if visible(function) not in done:
            done.add(visible(function))
            patch_lang(function)
        return SimpleNamespace(restore=lambda: None)  # nothing else runs in this process

    def known_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = dtype_of(kind)
        return known[name]

    with pytest.MonkeyPatch.context() as patch:
        if hasattr(interpreter, "_LangPatchScope"):
            patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter, "_get_np_dtype", known_dtype)
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield


@pytest.fixture
def run_interpreted(request: pytest.FixtureRequest) -> Callable[[], None]:
    """Run the tests that need the interpreter, of the same lane, with TRITON_INTERPRET=1."""
    lane, files = request.config.getoption("lane"), request.config.stash[INTERPRETED_FILES]
    if lane == "nightly":
        files = [file for file in files if file.parent == request.path.parent]

    def run() -> None:
        pytest.importorskip("triton", reason="needs triton")
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        environment.pop("PYTEST_ADDOPTS", None)
        options = ["-q", "-x", "-p", "no:cacheprovider", "--lane", lane]
        command = [sys.executable, "-m", "pytest", *map(str, files), *options]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, cwd=HERE.parent
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]

    return run


@pytest.fixture(scope="module")
def narrow_digits() -> Iterator[None]:
    """Make layers of 48 in the network for digits, not of 256: a run takes two thirds as long."""
    from helpers.narrow import narrow_entry
    from softstair.models import NETWORKS

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(NETWORKS, "digits", narrow_entry())
        yield


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Any:
    """The command line, as helpers.commands.Run; in tests/paper that of ``python -m paper``."""
    from helpers.commands import Run
    from paper.__main__ import main

    return (
        Run(capsys, "python -m paper", main) if request.path.parent.name == "paper" else Run(capsys)
    )


@pytest.fixture
def blank_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """`softstair train` with an empty picture: to draw it takes as long as a short training."""
    monkeypatch.setattr("softstair.cli.train._draw", lambda metrics, title, out: out.touch())


@pytest.fixture
def plain_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty current directory, an environment without colours, one thread."""
    import torch

    monkeypatch.chdir(tmp_path)
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "TTY_COMPATIBLE", "SOFTSTAIR_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
