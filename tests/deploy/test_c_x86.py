"""C for x86: instructions that this machine may lack, pairs of weights beyond 16 bits, batches."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from compiled import (
    check_networks,
    compile_together,
    differing,
    needs_compiler,
    run_in_program,
)
from random_networks import RandomBuilder

from softstair.deploy.c import LANGUAGE, write
from softstair.deploy.c.program import sources

IS_X86 = platform.machine() in ("x86_64", "AMD64")
CPUINFO = Path("/proc/cpuinfo")
FLAGS = set(CPUINFO.read_text().split()) if IS_X86 and CPUINFO.is_file() else set()
BY_HAND = ("-include", str(Path(__file__).parent / "x86_by_hand/dots.h"))
AVX512 = ("-mavx2", "-mavx512bw", "-mavx512vl", "-mavx512dq", *BY_HAND)
LEVELS = {
    "AVX2": ("avx2", ("-mavx2",)),
    "AVX-512": ("avx512bw", ("-mavx2", "-mavx512bw", "-mavx512vl", "-mavx512dq")),
    "VNNI of 256 bits": ("avx2", ("-mavx2", *BY_HAND)),
    "VNNI": ("avx512bw", AVX512),
    "AMX": ("avx512bw", (*AVX512, "-DTILES=1", "-DWRONG=0")),
    "AMX refused": ("avx512bw", (*AVX512, "-DTILES=0", "-DWRONG=0")),
}


def flags_of(level: str) -> tuple[str, ...]:
    needed, flags = LEVELS[level]
    if needed not in FLAGS or shutil.which("gcc") is None:
        pytest.skip(f"this machine has no {needed} or no gcc, so {level} is not run.")
    return (*LANGUAGE, "-Werror", "-O2", *flags)


def wide_layers(seed: int = 0) -> RandomBuilder:
    """Runs of 64 bytes, with and without padding; 48 channels; rows of 16 places and of fewer."""
    net = RandomBuilder(seed, (1, 9, 16), zero=121, batch=2)
    net.layer("first", 64, "int4", tuple(range(16)), padding=(1, 1))
    net.layer("pointwise", 48, "int8", tuple(range(16)), kernel=1)
    net.layer("third", 64, "int4", tuple(range(16)), kernel=1)
    net.layer("deep", 64, "ternary", (-1, 0, 1), padding=(1, 1), stride=(2, 2))
    net.layer("last layer", 40, "int4", tuple(range(16)), padding=(1, 1))
    net.flatten("flat")
    net.scores("last", 5)
    return net


def differences(net: RandomBuilder, folder: Path, *flags: str) -> dict[str, int]:
    """Return how many values of each node differ in C for x86 by these flags."""
    network = net.network()
    text = sources(network, "net0", cpu="x86")[0]
    program = compile_together({0: text}, folder, "gcc", *flags)
    return differing(net.results, run_in_program(program, 0, network, net.bytes))


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("level", [*LEVELS][::-1])
def test_layers_of_many_channels_are_equal_at_every_level(level: str, tmp_path: Path) -> None:
    assert differences(wide_layers(), tmp_path, *flags_of(level)) == {}


@needs_compiler
def test_padding_of_lines_does_not_reach_other_features(tmp_path: Path) -> None:
    net = RandomBuilder(0, (3, 12), zero=0, batch=2)
    start = net.layer("first", 128, "int4", tuple(range(16)), padding=(1,))
    deep = net.layer("deep", 128, "int4", tuple(range(16)), padding=(2,), dilation=(2,))
    net.layer("third", 128, "int4", tuple(range(16)), padding=(1,))
    net.add_features("added", net.add_features("sum", net.last, deep), start)
    net.flatten("flat")
    net.scores("last", 3, "ternary")
    assert differences(net, tmp_path, *LANGUAGE, "-Werror", "-O1") == {}


@pytest.mark.nightly
@pytest.mark.parametrize("level", LEVELS)
def test_every_network_is_equal_at_every_level(level: str, tmp_path: Path) -> None:
    check_networks(tmp_path, "gcc", *flags_of(level), cpu="x86")


@pytest.mark.nightly
def test_tiles_are_used_and_not_without_permission(tmp_path: Path) -> None:
    for permitted, expected in ((1, {"pointwise", "third"}), (0, set())):
        flags = (*flags_of("AMX")[:-2], f"-DTILES={permitted}", "-DWRONG=10000")
        wrong = differences(wide_layers(), tmp_path, *flags)
        assert expected <= wrong.keys()
        assert bool(wrong) == bool(permitted)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
    ("cpu", "present", "absent"),
    [
        ("haswell", ("vpmaddubsw",), ("vpdpbusd", "zmm")),
        ("skylake-avx512", ("vpmaddubsw", "zmm"), ("vpdpbusd", "tdpbusd")),
        ("alderlake", ("{vex} vpdpbusd",), ("zmm",)),
        ("sapphirerapids", ("vpdpbusd", "tdpbusd", "ldtilecfg"), ()),
    ],
)
def test_object_has_the_instructions_of_its_processor(
    cpu: str, present: tuple[str, ...], absent: tuple[str, ...], tmp_path: Path
) -> None:
    if not IS_X86 or shutil.which("gcc") is None or shutil.which("objdump") is None:
        pytest.skip("gcc for x86 or objdump is not installed.")
    write(wide_layers().network(), tmp_path, cpu="x86")
    command = ["gcc", *LANGUAGE, "-Werror", "-O1", f"-march={cpu}", "-c", "network.c"]
    subprocess.run(command, cwd=tmp_path, check=True)
    code = subprocess.check_output(["objdump", "-d", "network.o"], cwd=tmp_path, text=True)
    assert [word for word in present if word not in code] == []
    assert [word for word in absent if word in code] == []


@needs_compiler
def test_pairs_beyond_16_bits_are_read_twice_and_negated_weights_reach_128(tmp_path: Path) -> None:
    net = RandomBuilder(3, (4, 5, 6), zero=0, batch=3)
    net.bytes[0] = 255
    net.change("input")
    weight = torch.from_numpy(np.random.default_rng(0).integers(-128, 128, (70, 4, 3, 3)))
    weight[0], weight[1], weight[2] = -128, 127, 128  # 128 is stored with the sign of -128
    weight[2, 0], weight[3:40] = 1, weight[3:40] // 4
    net.weighted("sums", weight, padding=(1, 1))
    net.sum_pool("average")
    net.flatten("flat")
    net.scores("last", 3, "ternary")
    text = sources(net.network(), "net0", cpu="x86")[0]["net0.c"]
    assert ".special = 1" in text
    assert ".negated" in text
    for flags in (("-mavx2",), ()):
        if not flags or "avx2" in FLAGS:
            assert differences(net, tmp_path, *LANGUAGE, "-Werror", "-O2", *flags) == {}
