"""A Cortex-M4, emulated, gives the bits that this machine gives."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from compiled import (
    bits,
    differing,
    emulated,
    emulated_features,
    needs_compiler,
    needs_cortex,
    numbers,
    shortcuts,
    whole_scores,
)

from softstair.deploy.c import build, write

NETWORKS = {"bits": bits, "numbers": numbers, "both": shortcuts, "scores": whole_scores}


@pytest.mark.nightly(keep=2)
@needs_cortex
@pytest.mark.parametrize("name", NETWORKS)
def test_every_node_is_equal(name: str, tmp_path: Path) -> None:
    grown = NETWORKS[name]()
    network, x = grown.network(), grown.bytes[:1]
    write(network, tmp_path)
    found = emulated_features(tmp_path, network, x)
    assert differing({name: one[:1] for name, one in grown.known.items()}, found) == {}


@pytest.mark.nightly(keep=1)
@needs_cortex
@needs_compiler
@pytest.mark.parametrize("name", ["numbers", "scores"])
def test_the_bits_of_the_scores_are_those_of_this_machine(name: str, tmp_path: Path) -> None:
    grown = NETWORKS[name](5)
    write(grown.network(), tmp_path)
    *lines, ticks = emulated(tmp_path, grown.bytes)
    program = build(tmp_path, flags=("-O3", "-march=native"))
    data = grown.bytes.numpy().tobytes()
    here = subprocess.run([program, "--bits"], input=data, capture_output=True, check=True)
    assert lines == here.stdout.decode().splitlines()
    assert len(lines) == len(grown.bytes)
    assert re.fullmatch(r"ticks [1-9]\d*", ticks)


@needs_cortex
def test_no_library_is_linked_but_that_of_the_compiler(tmp_path: Path) -> None:
    write(bits().network(), tmp_path)
    flags = "-std=c99 -O2 -fno-tree-loop-distribute-patterns -mcpu=cortex-m4 -mthumb".split()
    command = ["arm-none-eabi-gcc", *flags, "-ffreestanding", "-c", "network.c"]
    subprocess.run(command, cwd=tmp_path, check=True)
    command = ["arm-none-eabi-nm", "-u", "network.o"]
    shown = subprocess.check_output(command, cwd=tmp_path, text=True)
    unknown = [line.split()[-1] for line in shown.splitlines()]
    # Doubles and floats are the compiler's own functions where there is no unit for them.
    assert all(name.startswith("__aeabi_") for name in unknown), unknown
