"""Networks as C: written, compiled, run, and compared node by node."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from c_networks import NETWORKS, TILED
from random_networks import RandomBuilder
from torch import Tensor

from softstair.deploy.c import LANGUAGE, SCRATCH, from_trace, winograd, write
from softstair.deploy.c.program import sources
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.target import Cpu

HERE = Path(__file__).parent
# Nothing is allocated, and the search for leaks takes seconds.
os.environ.setdefault("ASAN_OPTIONS", "detect_leaks=0")
# Clang for 64-bit ARM has no -march=native.
NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
SANITIZED = ("-Werror", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# Every layer that can be is computed on two threads.
TWO_THREADS = ("-pthread", "-DSOFTSTAIR_THREADS=2", "-DSS_MIN_PRODUCTS=0")
BUILDS = {
    "portable": (*SANITIZED, "-DSOFTSTAIR_PORTABLE"),
    "plain": SANITIZED,
    "native": (*SANITIZED, NATIVE),
    "threads": (*SANITIZED, *TWO_THREADS),
    # The products of a Cortex-M4 with plain multiplications.
    "packed": (*SANITIZED, *TWO_THREADS, "-DSOFTSTAIR_PACKED"),
    "fast": ("-Werror", "-O3", NATIVE),
}
CORTEX = ("arm-none-eabi-gcc", "qemu-system-arm", "make")

needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None, reason="cc is not installed, so nothing can be compiled."
)
needs_cortex = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in CORTEX),
    reason=f"one of {', '.join(CORTEX)} is not installed, so no Cortex-M4 can be emulated.",
)


def differing(expected: dict[str, Tensor], given: dict[str, Tensor]) -> dict[str, int]:
    """Return how many values of each node differ."""
    assert given.keys() == expected.keys()
    counts = {name: int((expected[name] != given[name]).sum()) for name in expected}
    return {name: count for name, count in counts.items() if count}


@cache
def networks_in_c(
    scratch: int, cpu: Cpu
) -> tuple[dict[str, RandomBuilder], dict[int, dict[str, str]]]:
    """Return all of :data:`NETWORKS`, and their files.

    Those in tiles use Winograd's algorithm wherever it is exact and fits, however slow.
    """
    nets, texts = {name: build() for name, build in NETWORKS.items()}, {}
    for number, (name, net) in enumerate(nets.items()):
        is_faster = (lambda *_: True) if name in TILED else winograd.is_faster
        with mock.patch.object(winograd, "is_faster", is_faster):
            texts[number], plan = sources(net.network(), f"net{number}", scratch, cpu=cpu)
        tiled = tuple(row.names[0] for row in plan.rows if row.in_tiles)
        if cpu == "x86":
            assert not tiled
            continue
        assert tiled == TILED.get(name, tiled)
        assert max(row.scratch for row in plan.rows) <= scratch
    return nets, texts


def check_networks(
    folder: Path,
    *command: str,
    scratch: int = SCRATCH,
    run_with: Sequence[str] = (),
    cpu: Cpu = "arm",
) -> None:
    """Compile all of :data:`NETWORKS` without a warning, and compare every node of them."""
    nets, texts = networks_in_c(scratch, cpu)
    program = compile_together(texts, folder, *command)
    for number, (name, net) in enumerate(nets.items()):
        results = run_in_program(program, number, net.network(), net.bytes, run_with)
        assert differing(net.results, results) == {}, (name, command)


MAIN = """
#include <stdio.h>
#include <stdlib.h>
{includes}
void softstair_trace(int32_t value);
void softstair_trace(int32_t value) {{ fwrite(&value, sizeof value, 1, stdout); }}
int main(int count, char **arguments) {{
    static int32_t input[4096];
    static int32_t results[4096];
    switch (count > 1 ? atoi(arguments[1]) : -1) {{
{cases}
    }}
    return 0;
}}
"""
INCLUDE = """#define thread_memory net{0}_thread_memory
#include "net{0}.c"
#undef thread_memory"""


def program_of(
    networks: dict[int, FrozenNetwork], folder: Path, flags: Sequence[str] = SANITIZED
) -> Path:
    """Compile many networks into one traced program; its argument selects one."""
    texts = {number: sources(network, f"net{number}")[0] for number, network in networks.items()}
    return compile_together(texts, folder, "cc", *LANGUAGE, *flags)


def compile_together(texts: dict[int, dict[str, str]], folder: Path, *command: str) -> Path:
    """Compile the files of many networks, net<number>.c and so on, without a warning."""
    write(NETWORKS["scores"]().network(), folder)  # with the runtime
    cases = []
    for number, files in texts.items():
        for file, text in files.items():
            # All are compiled as one file, so that static names must differ.
            static = r"(?<![.\w])(?=(?:layer|LAYER)_\d|memory\b)"
            (folder / file).write_text(re.sub(static, f"n{number}_", text), encoding="ascii")
        size, kind = f"NET{number}_INPUTS", f"NET{number}_TYPE"
        read = f"fread(input, sizeof({kind}), {size}, stdin) == {size}"
        run = f"net{number}_run((const {kind} *)input, results)"
        cases.append(f"    case {number}: while ({read}) {run}; break;")
    includes = "\n".join(INCLUDE.format(number) for number in texts)
    text = MAIN.format(includes=includes, cases="\n".join(cases))
    (folder / "all.c").write_text(text, encoding="ascii")
    command = (*command, "-DSOFTSTAIR_TRACE", "-o", "all", "all.c")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), command
    return folder / "all"


def run_in_program(
    program: Path, number: int, network: FrozenNetwork, x: Tensor, run_with: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Return the result of every node of a network; raises ValueError if the program fails."""
    command, data = [*run_with, str(program), str(number)], x.numpy().tobytes()
    done = subprocess.run(command, input=data, capture_output=True, check=False)
    if done.returncode:
        raise ValueError(done.stderr.decode()[:600])
    words = np.frombuffer(done.stdout, dtype=np.int32).reshape(len(x), -1)
    return from_trace(words, network)


def emulated(folder: Path, x: Tensor, trace: bool = False) -> list[str]:
    """Return the lines that a written network prints on an emulated Cortex-M4."""
    (folder / "examples.bin").write_bytes(x.numpy().tobytes())
    strict = "WARNINGS=-Wall -Wextra -Wconversion -Wpedantic -Werror"
    more = ["LANGUAGE=-std=c99 -DSOFTSTAIR_TRACE"] if trace else []
    command = ["make", "-s", "emulated", strict, *more]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
