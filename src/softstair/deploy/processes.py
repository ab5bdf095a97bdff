"""Packages that do not go together, in environments of their own, and processes there.

Such an environment is a folder of ``.venv-runtimes`` or of what ``SOFTSTAIR_RUNTIMES`` names;
``make runtimes`` makes them. A package that is installed in this environment is used from here.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from softstair._errors import MissingExtraError, SoftstairError
from softstair.deploy import loaders
from softstair.deploy.loaders import Array

PACKAGES = dict.fromkeys(("litert", "litert-builtin", "litert-reference"), "ai_edge_litert")
"""Those that are not called as their runtime is."""


def absent(name: str) -> str | None:
    """Return how to install a runtime, or None if it is there."""
    if name == "c" or python_of(name):
        return None
    package = PACKAGES.get(name, name).replace("_", "-")
    return f"{name} is not installed; run pip install {package} or, in a clone, make runtimes"


def python_of(name: str) -> Path | None:
    """Return the Python that has a runtime."""
    if find_spec(PACKAGES.get(name, name)):
        return Path(sys.executable)
    folder = Path(os.environ.get("SOFTSTAIR_RUNTIMES", ".venv-runtimes"))
    python = folder.absolute() / name / "bin" / "python"
    return python if python.exists() else None


def python_with(name: str) -> Path:
    """Return the Python that has a runtime; raise MissingExtraError if there is none."""
    if python := python_of(name):
        return python
    raise MissingExtraError(f"{absent(name)}.", name=name)


class Process:
    """A process of loaders.py."""

    def __init__(self, python: Path, name: str, file: Path) -> None:
        self.name, self.folder = name, Path(tempfile.mkdtemp(prefix="softstair-"))
        self.errors = self.folder / "errors"
        command = [str(python), "-P", loaders.__file__, name, str(file), str(self.folder)]
        settings = {**os.environ, "OMP_NUM_THREADS": "1"}
        settings.pop("PYTHONPATH", None)  # packages of this environment are not of that one
        with self.errors.open("wb") as errors:
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            self.process = subprocess.Popen(command, text=True, env=settings, **pipes)
        weakref.finalize(self, _end, self.process, self.folder)
        self._answer()

    def run(self, x: Array) -> dict[str, Array]:
        """Return the outputs for a batch."""
        self._ask("run", x)
        with np.load(self.folder / "y.npz") as file:
            return dict(file)

    def time(self, x: Array) -> float:
        """Return the milliseconds of an example."""
        return float(self._ask("time", x))

    def _ask(self, word: str, x: Array) -> Any:
        assert self.process.stdin is not None
        np.save(self.folder / "x.npy", x)
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            said = self.errors.read_text("utf-8", "replace").split() or ["nothing"]
            raise SoftstairError(f"{self.name} ended and said: … {' '.join(said)[-600:]}")
        return json.loads(line)


def _end(process: "subprocess.Popen[str]", folder: Path) -> None:
    """End a process and remove its folder."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
    shutil.rmtree(folder, ignore_errors=True)
