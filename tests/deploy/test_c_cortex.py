"""Generated C on an emulated Cortex-M4: the same bits as on this machine."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from compiled import (
    bit_features,
    byte_features,
    differing,
    emulated,
    emulated_features,
    int8_last_layer,
    needs_compiler,
    needs_cortex,
    shared_features,
)

from softstair.deploy.c import build, write

NETWORKS = {
    "bits": bit_features,
    "bytes": byte_features,
    "shared": shared_features,
    "scores": int8_last_layer,
}


@pytest.mark.nightly(keep=2)
@needs_cortex
@pytest.mark.parametrize("name", NETWORKS)
def test_every_node_is_equal(name: str, tmp_path: Path) -> None:
    builder = NETWORKS[name]()
    network, x = builder.network(), builder.bytes[:1]
    write(network, tmp_path)
    actual = emulated_features(tmp_path, network, x)
    expected = {name: result[:1] for name, result in builder.results.items()}
    assert differing(expected, actual) == {}


@pytest.mark.nightly(keep=1)
@needs_cortex
@needs_compiler
@pytest.mark.parametrize("name", ["bytes", "scores"])
def test_scores_have_the_bits_of_this_machine(name: str, tmp_path: Path) -> None:
    builder = NETWORKS[name](5)
    write(builder.network(), tmp_path)
    *lines, ticks = emulated(tmp_path, builder.bytes)
    program = build(tmp_path, flags=("-O3", "-march=native"))
    data = builder.bytes.numpy().tobytes()
    here = subprocess.run([program, "--bits"], input=data, capture_output=True, check=True)
    assert lines == here.stdout.decode().splitlines()
    assert len(lines) == len(builder.bytes)
    assert re.fullmatch(r"ticks [1-9]\d*", ticks)


@needs_cortex
def test_object_file_needs_only_the_library_of_the_compiler(tmp_path: Path) -> None:
    write(bit_features().network(), tmp_path)
    flags = "-std=c99 -O2 -fno-tree-loop-distribute-patterns -mcpu=cortex-m4 -mthumb".split()
    command = ["arm-none-eabi-gcc", *flags, "-ffreestanding", "-c", "network.c"]
    subprocess.run(command, cwd=tmp_path, check=True)
    command = ["arm-none-eabi-nm", "-u", "network.o"]
    symbols = subprocess.check_output(command, cwd=tmp_path, text=True)
    unknown = [line.split()[-1] for line in symbols.splitlines()]
    # Doubles and floats are the compiler's own functions where there is no unit for them.
    assert all(name.startswith("__aeabi_") for name in unknown), unknown
