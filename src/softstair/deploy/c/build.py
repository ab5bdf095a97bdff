"""Compiles a written network with the compiler of this machine, and runs it."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from softstair.deploy.network import IntegerNetwork

__all__ = ["build", "classes", "features", "from_trace"]

FLAGS = ("-O2",)
LANGUAGE = ("-std=c99", "-Wall", "-Wextra", "-Wconversion", "-Wpedantic")


def build(
    folder: Path, name: str = "network", trace: bool = False, flags: Sequence[str] = FLAGS
) -> Path:
    """The program of a written network; a traced one writes what every node gives.

    The compiler is that of the variable CC, or cc.
    """
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    if shutil.which(compiler[0]) is None:
        raise ValueError(
            f"a C compiler is needed to build {name}, but {compiler[0]!r} is not installed: "
            "install gcc or clang, or name another in the variable CC."
        )
    program = Path(folder).resolve() / (f"{name}-trace" if trace else name)
    options = [*LANGUAGE, *flags, *(["-DSOFTSTAIR_TRACE"] if trace else [])]
    command = [*compiler, *options, "-o", str(program), "main.c", f"{name}.c"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(
            f"{compiler[0]} cannot build {name}: {' '.join(done.stderr.split())[:300]}"
        )
    return program


def classes(program: Path, x: Tensor) -> tuple[Tensor, Tensor]:
    """The classes of bytes (N, …) as a program gives them, and the scores, (N, classes)."""
    lines = _run(program, x, "--bits").decode("ascii").splitlines()
    rows = [line.split() for line in lines]
    bits = np.array([[int(word, 16) for word in row[1:]] for row in rows], dtype=np.uint32)
    scores = torch.from_numpy(bits.view(np.float32).copy())
    return torch.tensor([int(row[0]) for row in rows]), scores


def features(program: Path, network: IntegerNetwork, x: Tensor) -> dict[str, Tensor]:
    """What every node of a traced program gives, by its name, as
    :meth:`IntegerNetwork.features` has it."""
    words = np.frombuffer(_run(program, x), dtype=np.int32)
    return from_trace(words.reshape(len(x), -1), network)


def from_trace(words: npt.NDArray[np.int32], network: IntegerNetwork) -> dict[str, Tensor]:
    """The words that a traced build gives for each example, (N, words), by the names of nodes."""
    found: dict[str, Tensor] = {}
    at = 0
    while at < words.shape[1]:
        number, count = int(words[0, at]), int(words[0, at + 1])
        node = network.nodes[number]
        part = np.ascontiguousarray(words[:, at + 2 : at + 2 + count])
        whole = node is not network.nodes[-1]
        values = torch.from_numpy(part).long() if whole else torch.from_numpy(part.view(np.float32))
        found[node.name] = values.reshape(len(words), *network.sizes[node.name])
        at += 2 + count
    return {node.name: found[node.name] for node in network.nodes}


def _run(program: Path, x: Tensor, *arguments: str) -> bytes:
    data = x.contiguous().numpy().tobytes()
    command = [str(program), *arguments]
    done = subprocess.run(command, input=data, capture_output=True, check=False)
    if done.returncode:
        told = done.stderr.decode("utf-8", "replace").strip()[:2000]
        raise ValueError(f"{program.name} ended with {done.returncode}: {told}")
    return done.stdout
