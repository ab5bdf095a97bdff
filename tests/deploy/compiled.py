"""Networks as C: written, compiled, run, and compared node by node."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from random_networks import RandomBuilder
from torch import Tensor

from softstair.deploy import IntegerNetwork, nodes
from softstair.deploy.c import LANGUAGE, build, features, from_trace, write
from softstair.deploy.c.program import sources

HERE = Path(__file__).parent
# Nothing is allocated, and the search for leaks takes seconds.
os.environ.setdefault("ASAN_OPTIONS", "detect_leaks=0")
# Clang for 64-bit ARM has no -march=native.
NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
SANITIZED = ("-Werror", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
BUILDS = {
    "portable": (*SANITIZED, "-DSOFTSTAIR_PORTABLE"),
    "plain": SANITIZED,
    "native": (*SANITIZED, NATIVE),
    "fast": ("-Werror", "-O3", NATIVE),
    # The products of a Cortex-M4 with plain multiplications.
    "packed": (*SANITIZED, "-DSOFTSTAIR_PACKED"),
    # Every layer that can be is computed on two threads.
    "threads": (*SANITIZED, "-pthread", "-DSOFTSTAIR_THREADS=2", "-DSS_MIN_PRODUCTS=0"),
    # The code for AVX2, with its instructions by hand; the native build has the real ones.
    "avx2": (*SANITIZED, "-D__AVX2__", "-D__POPCNT__", "-isystem", str(HERE / "avx2_by_hand")),
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
    """Return how many values of each node differ; of the scores, by more than rounding."""
    *names, last = expected
    counts = {name: int((expected[name] != given[name]).sum()) for name in names}
    largest = float(expected[last].abs().max())
    near = torch.allclose(expected[last], given[last], rtol=1e-5, atol=1e-5 * (1 + largest))
    counts[last] = 0 if near else expected[last].numel()
    return {name: count for name, count in counts.items() if count}


def traced(network: IntegerNetwork, x: Tensor, folder: Path, kind: str) -> dict[str, Tensor]:
    """Return the result of every node from a program of one of the builds above."""
    write(network, folder)
    return features(build(folder, trace=True, flags=BUILDS[kind]), network, x)


MAIN = """
#include <stdio.h>
#include <stdlib.h>
{includes}
void softstair_trace(int32_t value);
void softstair_trace(int32_t value) {{ fwrite(&value, sizeof value, 1, stdout); }}
int main(int count, char **arguments) {{
    static int32_t input[4096];
    static float scores[4096];
    switch (count > 1 ? atoi(arguments[1]) : -1) {{
{cases}
    }}
    return 0;
}}
"""


def program_of(networks: dict[int, IntegerNetwork], folder: Path, *flags: str) -> Path:
    """Compile many networks into one sanitised, traced program; its argument selects one."""
    write(next(iter(networks.values())), folder)
    cases = []
    for number, network in networks.items():
        for file, text in sources(network, f"net{number}")[0].items():
            # All are compiled as one file, so that static names must differ.
            static = r"(?<![.\w])(?=(?:layer|LAYER)_\d|memory\b|totals\b)"
            (folder / file).write_text(re.sub(static, f"n{number}_", text), encoding="ascii")
        size, kind = f"NET{number}_INPUTS", f"NET{number}_TYPE"
        read = f"fread(input, sizeof({kind}), {size}, stdin) == {size}"
        run = f"net{number}_run((const {kind} *)input, scores)"
        cases.append(f"    case {number}: while ({read}) {run}; break;")
    includes = "\n".join(f'#include "net{number}.c"' for number in networks)
    text = MAIN.format(includes=includes, cases="\n".join(cases))
    (folder / "all.c").write_text(text, encoding="ascii")
    command = ["cc", *LANGUAGE, *SANITIZED, *flags, "-DSOFTSTAIR_TRACE", "-o", "all", "all.c"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "all"


def run_in_program(
    program: Path, number: int, network: IntegerNetwork, x: Tensor
) -> dict[str, Tensor]:
    """Return the result of every node of a network; raises ValueError if the program fails."""
    done = subprocess.run(
        [str(program), str(number)], input=x.numpy().tobytes(), capture_output=True, check=False
    )
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


def emulated_features(folder: Path, network: IntegerNetwork, x: Tensor) -> dict[str, Tensor]:
    """Return the result of every node: its words precede the class of each example."""
    words = [line for line in emulated(folder, x, trace=True) if " " not in line]
    values = np.array([int(word, 16) for word in words], dtype=np.uint32).view(np.int32)
    return from_trace(values.reshape(len(x), -1), network)


def bit_features(seed: int = 0) -> RandomBuilder:
    """Ternary and binary features in bit planes whose last words are not full."""
    net = RandomBuilder(seed, (2, 9, 8), zero=121, batch=3)
    net.sum("first", 45, "ternary", padding=(1, 1))
    net.steps("first.stair", (-1, 0, 1))
    net.max_pool("pool", 3, 2, 1)
    net.sum("signs", 70, "sign", padding=(1, 1))
    net.steps("signs.stair", (-1, 1))
    net.sum("dilated", 130, "ternary", padding=(2, 2), dilation=(2, 2), stride=(1, 2))
    net.steps("dilated.stair", (0, 1))
    net.max_pool("largest", 2, 1, 0)
    net.flatten("flat")
    net.sum("linear", 22, "ternary")
    net.steps("linear.stair", (-1, 0))
    net.sum("binary", 100, "sign")
    net.steps("binary.stair", (-1, 0, 1))
    net.scores("last", 5, unit=1.0)
    return net


def byte_features(seed: int = 0) -> RandomBuilder:
    """Features in bytes: with a bias, depthwise, grouped and pointwise convolutions."""
    net = RandomBuilder(seed, (3, 8, 7), zero=0, batch=3)
    net.sum("first", 36, "int8", padding=(2, 1), stride=(2, 1))
    net.steps("first.stair", tuple(range(200)))
    net.sum("depthwise", 36, "int4", padding=(1, 1), groups=36)
    net.steps("depthwise.stair", (-5, -1, 0, 4, 100))
    net.sum("groups", 48, "sign", padding=(1, 1), groups=4)
    net.steps("groups.stair", tuple(range(-8, 8)))
    net.sum("pointwise", 34, "int4", kernel=1)
    net.steps("pointwise.stair", (-1, 0, 1))
    net.sum("many", 68, "int4", padding=(1, 1), groups=34)
    net.steps("many.stair", (3, 4, 9))
    net.sum_pool("average")
    net.flatten("flat")
    net.scores("last", 3)
    return net


def affine_features(seed: int = 0) -> RandomBuilder:
    """Levels as bytes, with and without a bias, and as words, from thresholds on a line."""
    net = RandomBuilder(seed, (2, 6, 6), zero=121, batch=3)
    net.sum("first", 10, "int4", padding=(1, 1))
    start = net.steps("first.stair", tuple(range(16)), even=True)
    net.sum("each", 10, "int4", padding=(1, 1), groups=10)
    net.steps("each.stair", tuple(range(-8, 8)), even=True)
    net.add_features("added", start, net.last)
    net.steps("added.stair", tuple(range(-3, 9)), even=True)
    net.sum("deep", 10, "int4", padding=(1, 1))
    net.steps("deep.stair", tuple(range(-8, 8)), shortcut=start, even=True)
    net.sum("bits", 10, "int4", padding=(1, 1))
    net.steps("bits.stair", (-1, 0, 1), shortcut=start, even=True)
    net.sum("biased", 35, "int4")
    net.steps("biased.stair", tuple(range(40, 170)), even=True)
    net.sum("wide", 9, "ternary", kernel=1)
    net.steps("wide.stair", tuple(range(-150, 151)), even=True)
    net.sum("uneven", 7, "int4", kernel=1)
    net.steps("uneven.stair", (-5, -1, 0, 4, 100), even=True)
    net.flatten("flat")
    net.scores("last", 3)
    return net


def packed_features(seed: int = 0) -> RandomBuilder:
    """INT4 layers with several products in one multiplication; sums reach the bounds."""
    net = RandomBuilder(seed, (3, 11, 6), zero=121, batch=3)
    net.sum("first", 24, "int4", padding=(2, 1))
    net.steps("first.stair", tuple(range(16)), even=True)
    net.sum("each", 24, "int4", padding=(1, 1), groups=24)
    net.steps("each.stair", tuple(range(-8, 8)), even=True)
    net.sum("unpadded", 24, "int4", groups=24)
    net.steps("unpadded.stair", tuple(range(16)), even=True)
    net.sum("point", 48, "int4", kernel=1)
    net.steps("point.stair", (3, 4, 9))
    net.sum("groups", 26, "int4", padding=(1, 1), groups=2)
    net.steps("groups.stair", tuple(range(40, 170)), even=True)
    net.sum("bytes", 64, "int8", kernel=1)
    stair = nodes.Steps("full", ("bytes",), 0, 15, torch.full((64, 15), -(2**30)), tuple(range(16)))
    net.add(stair)
    weight = torch.full((7, 64, 1, 1), 4)
    weight[:, :17] = 5  # 15 times the sum of each row is 4,095
    weight[1] *= -1
    weight[2, 0] = -3
    weight[3:, :32] = -8
    bounds = torch.full((7,), 10**5)
    net.add(nodes.Sum("most", ("full",), -(10**5), 10**5, weight, -bounds, bounds))
    net.steps("most.stair", tuple(range(16)), even=True)
    net.flatten("flat")
    net.scores("last", 3)
    return net


def shared_features(seed: int = 0) -> RandomBuilder:
    """Features that several nodes read, in memory that is used again."""
    net = RandomBuilder(seed, (1, 6, 6), zero=255, batch=3)
    net.sum("first", 48, "ternary", padding=(1, 1))
    start = net.steps("first.stair", (-1, 0, 1))
    net.sum("deep", 48, "ternary", padding=(1, 1))
    deep = net.steps("deep.stair", (-1, 0, 1), shortcut=start)
    net.last = "deep"
    net.steps("deep.other", (-1, 1))
    net.sum("third", 48, "ternary", padding=(1, 1))
    net.steps("third.stair", tuple(range(16)), shortcut=deep)
    net.add_features("added", net.last, start)
    net.max_pool("pool", 3, 3, 0)
    flat = net.flatten("flat")
    net.sum("linear", net.results[flat].shape[1], "ternary")
    net.steps("linear.stair", (-900, 0, 900))
    net.add_features("summed", net.last, flat)
    net.sum("last", 4, "int12")
    net.rescaled("scores")
    return net


def expanded_features(seed: int = 0) -> RandomBuilder:
    """Bit planes, bytes and sums that are repeated along axes of length 1."""
    net = RandomBuilder(seed, (1, 6, 6), zero=100, batch=3)
    net.sum("first", 48, "ternary", padding=(1, 1))
    start = net.steps("first.stair", (-1, 0, 1))
    net.sum("all positions", 48, "ternary", kernel=6)
    small = net.steps("all positions.stair", (-1, 0, 1))
    wide = net.expand("wide", (48, 6, 6))
    net.last = start
    net.sum("deep", 48, "ternary", padding=(1, 1))
    net.steps("deep.stair", tuple(range(16)), shortcut=wide)
    deep = net.add_features("deep.added", net.last, wide)
    net.last = small  # counted as bits, too
    net.sum("again", 48, "ternary", kernel=1)
    net.expand("again.sums", (48, 6, 6))
    again = net.steps("again.stair", (-1, 0, 1), shortcut=start)
    net.sum("single", 1, "int4", kernel=1)
    net.steps("single.stair", tuple(range(200)))
    single = net.expand("single.channel", (48, 6, 6))
    net.last = start
    net.sum("row", 1, "int4", kernel=1)
    net.expand("row.sums", (48, 6, 6))
    net.steps("row.stair", (-5, -1, 0, 4, 100))
    net.add_features(
        "summed", net.add_features("sum", net.add_features("more", net.last, single), deep), again
    )
    net.flatten("flat")
    net.scores("last", 4)
    return net


def int8_last_layer(seed: int = 0) -> RandomBuilder:
    """An INT8 last layer over features with a bias; their number is no multiple of 16."""
    net = RandomBuilder(seed, (2, 5, 6), zero=7, batch=3)
    net.sum("first", 9, "ternary", padding=(1, 1), stride=(2, 2))
    net.steps("first.stair", tuple(range(200)))
    net.flatten("flat")
    net.sum("last", 11, "int8")
    net.rescaled("scores")
    return net
