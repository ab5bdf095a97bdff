"""Frozen networks as C99: write a folder that needs no library, compile it and run it."""

import contextlib
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from softstair import _check, _files
from softstair._errors import SoftstairError
from softstair.deploy.c.program import (
    MemoryPlan,
    PlanRow,
    check_fit,
    check_options,
    class_counts,
    count_of,
    memory_plan,
    sources,
)
from softstair.deploy.c.winograd import SCRATCH, SCRATCH_OF
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.loaders import Running, milliseconds
from softstair.deploy.target import HERE, Cpu

__all__ = [
    "SCRATCH",
    "SCRATCH_OF",
    "THREADS",
    "MemoryPlan",
    "PlanRow",
    "build",
    "check_fit",
    "check_options",
    "from_trace",
    "memory_plan",
    "runner",
    "write",
]

RESERVED = frozenset(
    "auto break case char const continue default do double else enum extern float for goto if "
    "inline int long register restrict return short signed sizeof static struct switch typedef "
    "union unsigned void volatile while asm class main memory board softstair trace cortex clean "
    "emulated input scores results outputs".split()
)
MAX_NAME = 40
TIMED, MOST_TIMED = 20.0, 2**13
"""Milliseconds of a program that is timed, and how many examples it gets at most."""
THREADS = {1: (), 2: ("-pthread", "-DSOFTSTAIR_THREADS=2")}  # flags of the compiler
NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
FLAGS = ("-O3", NATIVE)
"""Those of the Makefile."""
LANGUAGE = ("-std=c99", "-Wall", "-Wextra", "-Wconversion", "-Wpedantic")


def write(
    network: FrozenNetwork,
    folder: Path,
    name: str = "network",
    scratch: int | None = None,
    threads: int = 1,
    cpu: Cpu = HERE.cpu,
) -> MemoryPlan:
    """Write a network as C: <name>.h, <name>.c, its constants, the runtime, a main.c, a Makefile.

    Files that are there are replaced only when all new ones are written. A layer uses up to
    ``scratch`` bytes of memory to be faster, by default as many as is best for ``cpu``; with 0,
    each uses as few as it can. With two ``threads``, the Makefile computes large layers on two, and
    the plan has the memory of the second.
    """
    _check_name(name)
    check_options("c", scratch, threads)
    scratch = SCRATCH_OF[cpu] if scratch is None else scratch
    texts, plan = sources(network, name, scratch, threads, cpu)
    words = {"@name@": name, "@NAME@": name.upper(), "@threads@": " ".join(THREADS[threads])}
    words["@COUNT@"] = count_of(network, name)
    # No program can be built without the header.
    with _files.replacing_folder(Path(folder), last=f"{name}.h") as partial:
        for file, text in texts.items():
            _files.write(partial / file, text)
        _copy(files(__name__) / "runtime", partial, words)
    return plan


def _check_name(name: str) -> None:
    identifier = re.fullmatch(r"[a-z][a-z0-9_]*", name) and len(name) <= MAX_NAME
    if not identifier or name in RESERVED or name.startswith(("ss_", "softstair", "layer_")):
        letters = f"at most {MAX_NAME} lower-case letters, digits and underscores"
        allowed = f"a C identifier of {letters} that C and the runtime do not use"
        raise _check.wrong("name", name, allowed)


def _copy(source: Traversable, folder: Path, words: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    for entry in source.iterdir():
        if entry.is_dir():
            _copy(entry, folder / entry.name, words)
        else:
            text = entry.read_text(encoding="ascii")
            for word, replacement in words.items():
                text = text.replace(word, replacement)
            _files.write(folder / entry.name, text)


def build(
    folder: Path, name: str = "network", trace: bool = False, flags: Sequence[str] = FLAGS
) -> Path:
    """Compile a written network with the compiler of the variable CC, or cc.

    With ``trace`` the program writes the result of every node, for :func:`runner`.
    """
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    if shutil.which(compiler[0]) is None:
        raise SoftstairError(
            f"the C compiler {compiler[0]!r} is not installed: install gcc or clang, or set the "
            "variable CC."
        )
    program = Path(folder).resolve() / (f"{name}-trace" if trace else name)
    options = [*LANGUAGE, *flags, *(["-DSOFTSTAIR_TRACE"] if trace else [])]
    command = [*compiler, *options, "-o", str(program), "main.c", f"{name}.c"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        error = " ".join(done.stderr.split())[:300]
        raise SoftstairError(f"{compiler[0]} cannot build {name}: {error}")
    return program


def runner(
    network: FrozenNetwork, folder: Path, threads: int = 1, flags: Sequence[str] = FLAGS
) -> Running:
    """Compile a copy of the folder of a network, and return what runs it on a batch.

    It returns the result of every node by its name, as :meth:`FrozenNetwork.features`, and
    those of the program: "scores", int32, and "class", int64, of a network with classes.
    """
    names = [file.name.removesuffix("_weights.h") for file in Path(folder).glob("*_weights.h")]
    headers = [header for name in names if (header := Path(folder) / f"{name}.h").is_file()]
    if len(headers) != 1:
        raise SoftstairError(f"{str(folder)!r} holds no network that was written as C.")
    if network.digest not in headers[0].read_text(encoding="ascii", errors="replace"):
        raise SoftstairError(f"{str(folder)!r} is of another network.", field="path")
    name, options = headers[0].stem, (*flags, *THREADS[threads])
    with contextlib.ExitStack() as work:
        place = Path(work.enter_context(tempfile.TemporaryDirectory()))
        copy = shutil.copytree(folder, place / "c")
        program, traced = (build(copy, name, trace, options) for trace in (False, True))
        kept = work.pop_all()

    def run(x: Tensor) -> dict[str, Tensor]:
        words = np.frombuffer(_run(traced, x), dtype=np.int32)
        results = from_trace(words.reshape(len(x), -1), network)
        rows = np.array([line.split() for line in _run(program, x, "--bits").splitlines()], int)
        for head, count in class_counts(network).items():
            size = network.sizes[network.heads[head].name][1:]
            classes = torch.from_numpy(rows[:, :count].astype(np.int64))
            results[f"class{head}"] = classes.reshape(len(x), *size)
            rows = rows[:, count:]
        for name, node in network.heads.items():
            shape = network.sizes[node.name]
            part, rows = np.split(rows, [math.prod(shape)], axis=1)
            results[f"scores{name}"] = torch.from_numpy(part.astype(np.int32)).reshape(-1, *shape)
        return results

    def time(x: Tensor) -> float:
        """Return what an example adds to a program's time."""
        some = lambda count: x[:1].repeat(count, *[1] * (x.dim() - 1))
        elapsed = lambda count: milliseconds(lambda x: _run(program, x), some(count), 5, 0)
        count, shortest = 8, elapsed(1)
        while (longer := elapsed(count)) < TIMED + 2 * shortest and count < MOST_TIMED:
            count *= 4
        return (longer - shortest) / (count - 1)

    weakref.finalize(run, kept.close)
    return Running(run, time)


def from_trace(words: npt.NDArray[np.int32], network: FrozenNetwork) -> dict[str, Tensor]:
    """Return the result of every node from the words of a traced program, (N, words)."""
    results: dict[str, Tensor] = {}
    at = 0
    while at < words.shape[1]:
        number, count = int(words[0, at]), int(words[0, at + 1])
        name = network.nodes[number].name
        part = words[:, at + 2 : at + 2 + count].copy()  # torch takes no read-only array
        results[name] = torch.from_numpy(part).reshape(len(words), *network.sizes[name])
        at += 2 + count
    return {node.name: results[node.name] for node in network.nodes}


def _run(program: Path, x: Tensor, *arguments: str) -> bytes:
    data = x.cpu().contiguous().numpy().tobytes()
    command = [str(program), *arguments]
    done = subprocess.run(command, input=data, capture_output=True, check=False)
    if done.returncode:
        error = done.stderr.decode("utf-8", "replace").strip()[:2000]
        raise SoftstairError(f"{program.name} ended with {done.returncode}: {error}")
    return done.stdout
