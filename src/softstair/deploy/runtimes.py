"""The runtimes that a frozen network is compared in: the format of each, and where its package is.

A runtime runs as a process, for packages fight: in this environment if its package is installed
here, or else in one of its own, a folder of ``.venv-runtimes`` or of what ``SOFTSTAIR_RUNTIMES``
names. ``make runtimes`` makes them.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from softstair._errors import MissingExtraError, SoftstairError
from softstair.deploy import c, loaders, onnx, qonnx_quant, tflite
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.loaders import Array, Running
from softstair.deploy.tflite_graph import facts_of

Decode = Callable[[Mapping[str, Array]], dict[str, Tensor]]


class FileRuntime(NamedTuple):
    """A runtime that reads files."""

    suffix: str
    write: Callable[[FrozenNetwork, Path], object]
    trace: Callable[[FrozenNetwork, Path, Path], object] | None
    """Writes a file that differs from the first path's in having results of nodes as outputs."""
    decoder: Callable[[FrozenNetwork, Path], Decode]  # of the outputs of a file
    encode: Callable[[FrozenNetwork, Tensor], Array] = lambda _, x: x.cpu().numpy()
    shows_stairs: bool = True


def _as_floats(frozen: FrozenNetwork, x: Tensor) -> Array:
    return x.cpu().float().numpy()


LITERT = {"litert": "xnnpack", "litert-builtin": "builtin", "litert-reference": "reference"}
"""The kernels of LiteRT."""
PACKAGES = dict.fromkeys(LITERT, "ai_edge_litert")
"""Those that are not called as their runtime is."""


def _litert(kernels: str) -> FileRuntime:
    write = partial(tflite.write, kernels=kernels)
    return FileRuntime(".tflite", write, tflite.traced, tflite.decoder, tflite.encode)


QUANT: Any = {
    "suffix": ".qonnx",
    "write": qonnx_quant.write,
    "trace": None,  # the executor gives every tensor anyway, and hls4ml the output alone
    "decoder": qonnx_quant.decoder,
    "encode": _as_floats,
}
FILES: dict[str, FileRuntime] = {
    "onnxruntime": FileRuntime(".onnx", onnx.write, onnx.trace, onnx.decoder),
    "openvino": FileRuntime(
        ".onnx", partial(onnx.write, runtime="openvino"), onnx.trace, onnx.decoder
    ),
    **{name: _litert(kernels) for name, kernels in LITERT.items()},
    "qonnx": FileRuntime(**QUANT),
    "hls4ml": FileRuntime(**QUANT, shows_stairs=False),
}
RUNTIMES = ("c", *FILES)
"""What a frozen network can be compared in."""


def write(name: str, frozen: FrozenNetwork, folder: Path) -> Path:
    """Write a network for a runtime; return the path."""
    path = folder / (name if name == "c" else f"{name}{FILES[name].suffix}")
    if name == "c":
        c.write(frozen, path)
    else:
        FILES[name].write(frozen, path)
    return path


def start(name: str, frozen: FrozenNetwork, path: Path, threads: int = 1) -> Running:
    """Return what runs the file of a network, or its folder of C.

    Raises:
        MissingExtraError: If the runtime is not installed.
    """
    if name == "c":
        return c.runner(frozen, path, threads)
    kind, (plain, time) = FILES[name], _load(name, path)
    decode, encode = kind.decoder(frozen, path), partial(kind.encode, frozen)
    timed = lambda x: time(encode(x[:1]))
    if kind.trace is None:
        return Running(lambda x: decode(plain(encode(x))), timed)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"traced{kind.suffix}"
        kind.trace(frozen, path, file)
        decode_traced, (traced, _) = kind.decoder(frozen, file), _load(name, file)

    def run(x: Tensor) -> dict[str, Tensor]:
        # The outputs are those of the file itself; the rest is of the same graph with more outputs.
        given = encode(x)
        return {**decode_traced(traced(given)), **decode(plain(given))}

    return Running(run, timed)


def reading(path: Path) -> str | None:
    """Return the first runtime that reads what is at a path; a .tflite has its exact ones."""
    if path.suffix == ".tflite" and path.is_file():
        exact = facts_of(path.read_bytes()).get("kernels", tflite.KERNELS)
        return next(name for name, kernels in LITERT.items() if kernels in exact)
    first = {kind.suffix: name for name, kind in reversed(FILES.items())}
    return "c" if path.is_dir() else first.get(path.suffix)


def absent(name: str) -> str | None:
    """Return how to install a runtime, or None if it is there."""
    if name == "c" or _python_of(name):
        return None
    package = PACKAGES.get(name, name).replace("_", "-")
    return f"{name} is not installed; run pip install {package} or, in a clone, make runtimes"


def _python_of(name: str) -> Path | None:
    """Return the Python that has a runtime."""
    if find_spec(PACKAGES.get(name, name)):
        return Path(sys.executable)
    folder = Path(os.environ.get("SOFTSTAIR_RUNTIMES", ".venv-runtimes"))
    python = folder.absolute() / name / "bin" / "python"
    return python if python.exists() else None


def _load(name: str, file: Path) -> tuple[loaders.Run, Callable[[Array], float]]:
    """Return what runs a file on a batch, and what times it on an example."""
    python = _python_of(name)
    if python is None:
        raise MissingExtraError(f"{absent(name)}.", name=name)
    if name in ("onnxruntime", *LITERT):  # they fight with nobody, and begin sooner here
        run = loaders.LOADERS[name](str(file))
        return run, partial(loaders.milliseconds, run)
    process = _Process(python, name, file)
    return process.run, process.time


class _Process:
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
