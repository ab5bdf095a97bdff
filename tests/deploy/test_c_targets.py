"""Generated C with other compilers and for other processors: no warning, and the same bits."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from compiled import NATIVE, SANITIZED, byte_features, differing, shared_features
from random_networks import RandomBuilder
from torch import Tensor

import softstair as ss
from softstair import zoo
from softstair.deploy import IntegerNetwork
from softstair.deploy.c import LANGUAGE, THREADS, features, write
from softstair.train.trained import deployed

WARNINGS = LANGUAGE[1:]


def ternary_vgg(seed: int = 0) -> RandomBuilder:
    """Ternary convolutions in tiles and by counting bits, with poolings, then linear layers."""
    net = RandomBuilder(seed, (3, 18, 17), zero=121, batch=2)
    net.sum("first", 64, "ternary", padding=(1, 1))
    net.steps("first.stair", (-1, 0, 1))
    net.sum("tiles", 64, "ternary", padding=(1, 1))
    net.steps("tiles.stair", (-1, 0, 1))
    net.max_pool("pool", 2, 2, 0)
    net.sum("bits", 32, "sign", padding=(1, 1), stride=(2, 2))
    net.steps("bits.stair", (-1, 0, 1))
    net.flatten("flat")
    net.sum("linear", 33, "ternary")
    net.steps("linear.stair", (-1, 1))
    net.scores("last", 10, unit=1.0)
    return net


def int4_dscnn(seed: int = 0) -> RandomBuilder:
    """INT4: depthwise, pointwise and dense layers, by affine steps and by thresholds."""
    net = RandomBuilder(seed, (1, 13, 9), zero=128, batch=2)
    net.sum("first", 48, "int4", padding=(1, 1), stride=(2, 1))
    net.steps("first.stair", tuple(range(16)), even=True)
    for block in ("a", "b"):
        net.sum(f"{block}.each", 48, "int4", padding=(1, 1), groups=48)
        net.steps(f"{block}.each.stair", tuple(range(16)), even=block == "a")
        net.sum(f"{block}.point", 48, "int4", kernel=1)
        net.steps(f"{block}.point.stair", tuple(range(16)), even=block == "a")
    net.sum("tiles", 48, "int4", padding=(1, 1))
    net.steps("tiles.stair", tuple(range(16)), even=True)
    net.sum_pool("average")
    net.flatten("flat")
    net.scores("last", 12)
    return net


def int8(seed: int = 0) -> RandomBuilder:
    """INT8 weights and features of 8 bits, up to the last layer."""
    net = RandomBuilder(seed, (3, 7, 7), zero=0, batch=2)
    net.sum("first", 20, "int8", padding=(1, 1))
    net.steps("first.stair", tuple(range(256)), even=True)
    net.sum("second", 35, "int8", padding=(1, 1))
    net.steps("second.stair", tuple(range(-128, 128)), even=True)
    net.flatten("flat")
    net.sum("last", 10, "int8")
    net.rescaled("scores")
    return net


NETWORKS: dict[str, Callable[[], RandomBuilder]] = {
    "ternary VGG": ternary_vgg,
    "INT4 DSCNN": int4_dscnn,
    "residual": shared_features,
    "INT8": int8,
    "bytes": byte_features,
}


def check(net: RandomBuilder, folder: Path, *command: str, run_with: tuple[str, ...] = ()) -> None:
    """Compile a network without a warning and compare every node of it."""
    check_results(net.network(), net.bytes, net.results, folder, *command, run_with=run_with)


def check_results(
    network: IntegerNetwork,
    x: Tensor,
    results: dict[str, Tensor],
    folder: Path,
    *command: str,
    run_with: tuple[str, ...] = (),
) -> None:
    """Compile a network without a warning and compare every node with its result."""
    program = folder / "network"
    command = (*command, *WARNINGS, "-Werror", "-DSOFTSTAIR_TRACE", "-o", str(program), "main.c")
    done = subprocess.run(
        [*command, "network.c"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), command
    if run_with:
        emulator = folder / "emulated"
        emulator.write_text(f'#!/bin/sh\nexec {" ".join(run_with)} {program} "$@"\n')
        emulator.chmod(0o755)
        program = emulator
    assert differing(results, features(program, network, x)) == {}, command


def int8_resnet8() -> IntegerNetwork:
    torch.manual_seed(0)
    model = ss.models.resnet8()
    model(torch.randn(64, 3, 32, 32) * 2)
    features = ss.Stair.linear(8, signed=False, quantum=1 / 32)
    int8 = ss.Stair.linear(8, signed=True)
    last = ss.models.last_layer(model)
    net = ss.quantise(model, int8, features, skip=last, init="keep", fit="channel").eval()
    return ss.deploy.integerise(net, (3, 32, 32), 121, 64.0)


@pytest.mark.nightly
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize("name", [*zoo.names(), "resnet8"])
def test_networks_in_use_have_no_warning_and_equal_nodes_with_every_option(
    name: str, compiler: str, tmp_path: Path
) -> None:
    require(compiler)
    network = int8_resnet8() if name == "resnet8" else deployed(zoo.path_of(name)).integer
    plan = write(network, tmp_path)
    assert name != "resnet8" or plan.flash <= 120_000
    x = torch.randint(256, (2, *network.sizes[network.input.name]), dtype=torch.uint8)
    expected = (network, x, network.features(x), tmp_path, compiler, NATIVE)
    for level, standard in product(("-O2", "-O3", "-Ofast"), ((), ("-std=c99",))):
        check_results(*expected, level, *standard)
    check_results(*expected, *SANITIZED, "-O1")
    check_results(*expected, *SANITIZED, "-O1", *THREADS[2])


@pytest.mark.nightly
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize("name", NETWORKS)
def test_no_warning_and_equal_nodes_with_every_option(
    name: str, compiler: str, tmp_path: Path
) -> None:
    require(compiler)
    net = NETWORKS[name]()
    write(net.network(), tmp_path)
    for level, standard in product(("-O2", "-O3", "-Ofast"), ((), ("-std=c99",))):
        check(net, tmp_path, compiler, NATIVE, level, *standard)
    command = [compiler, "-std=c99", "-O3", NATIVE, "-fno-builtin", "-c", "network.c"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert subprocess.check_output(["nm", "-u", "network.o"], cwd=tmp_path) == b""


ARM, X86 = "aarch64-linux-gnu-gcc", "x86_64-linux-gnu-gcc"
TARGETS = {
    "64-bit ARM": (ARM, "-march=armv8-a"),
    "dot products": (ARM, "-march=armv8.2-a+dotprod"),
    "8-bit matrices": (ARM, "-march=armv8.2-a+dotprod+i8mm"),
    "x86": (X86,),
    "AVX2": (X86, "-mavx2", "-mpopcnt"),
}
EMULATORS = {ARM: "qemu-aarch64", X86: "qemu-x86_64"}


def require(*tools: str) -> None:
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed, so nothing is compiled or run with it.")


@pytest.mark.nightly
@pytest.mark.parametrize("target", TARGETS)
def test_every_node_is_equal_on_emulated_processors(target: str, tmp_path: Path) -> None:
    compiler, *flags = TARGETS[target]
    emulator = EMULATORS[compiler]
    require(compiler, emulator)
    for name, network in NETWORKS.items():
        net, folder = network(), tmp_path / name.replace(" ", "-")
        write(net.network(), folder)
        command = (compiler, "-std=c99", "-O3", "-static", *flags)
        check(net, folder, *command, run_with=(emulator, "-cpu", "max"))
    resnet8, x = int8_resnet8(), torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    write(resnet8, folder := tmp_path / "resnet8")
    assert "wide" in (folder / "network.c").read_text()  # steps that repeat float32 in 64 bits
    expected = (resnet8, x, resnet8.features(x), folder)
    check_results(*expected, *command, run_with=(emulator, "-cpu", "max"))


@pytest.mark.nightly
@pytest.mark.parametrize("flags", [("-mavx512vnni", "-mavx512vl"), ("-mavx2", "-mavxvnni")])
def test_vnni_compiles_without_a_warning(flags: tuple[str, ...], tmp_path: Path) -> None:
    require(X86)
    write(int8().network(), tmp_path)
    command = [X86, "-std=c99", *WARNINGS, "-Werror", "-O3", *flags, "-S", "network.c"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert "vpdpwssd" in (tmp_path / "network.s").read_text()
