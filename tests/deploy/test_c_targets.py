"""Generated C with other compilers and for other processors: no warning, and the same bits."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from compiled import (
    NATIVE,
    SANITIZED,
    check_networks,
    compile_together,
    differing,
    run_in_program,
)

import softstair as ss
from softstair import zoo
from softstair.deploy.c import LANGUAGE, THREADS
from softstair.deploy.c.program import sources
from softstair.deploy.freezing import freeze
from softstair.deploy.frozen import FrozenNetwork

pytestmark = pytest.mark.nightly
STRICT = (*LANGUAGE[1:], "-Werror")
OPTIONS = [*product(("-O2", "-O3", "-Ofast"), ("-std=gnu11", "-std=c99"))]
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


def frozen_network(name: str) -> FrozenNetwork:
    """Return a network of the zoo, or ResNet-8 in INT8."""
    if name != "resnet8":
        about = zoo.about(name)
        zero, classes = int(about.mean), about.classes
        net = zoo.load(name).eval()
        return freeze(net, about.shape, zero=zero, scale=about.std, classes=classes)
    torch.manual_seed(0)
    model = ss.models.resnet8()
    model(torch.randn(64, 3, 32, 32) * 2)
    features = ss.Stair.linear(8, signed=False, quantum=1 / 32)
    int8 = ss.Stair.linear(8, signed=True)
    last = ss.models.last_layer(model)
    options = ss.QuantiseOptions(init="keep", fit="channel")
    net = ss.quantise(model, int8, features, skip=last, options=options).eval()
    return freeze(net, (3, 32, 32), mean=(0.49, 0.48, 0.45), std=(0.25, 0.24, 0.26))


def check(
    network: FrozenNetwork,
    folder: Path,
    *commands: tuple[str, ...],
    run_with: tuple[str, ...] = (),
) -> str:
    """Compile a network by each command without a warning and compare every node; return its C."""
    x = torch.randint(256, (2, *network.sizes[network.input.name]), dtype=torch.uint8)
    expected, (texts, _) = network.features(x), sources(network, "net0")
    for command in commands:
        program = compile_together({0: texts}, folder, *command, *STRICT)
        results = run_in_program(program, 0, network, x, run_with)
        assert differing(expected, results) == {}, command
    return texts["net0.c"]


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize("name", [*zoo.names(), "resnet8"])
def test_networks_in_use_have_no_warning_and_equal_nodes_with_every_option(
    name: str, compiler: str, tmp_path: Path
) -> None:
    require(compiler)
    network = frozen_network(name)
    assert name != "resnet8" or sources(network, "net")[1].flash <= 85_000
    sanitized = (compiler, NATIVE, *SANITIZED, "-O1")
    optimised = ((compiler, NATIVE, *options) for options in OPTIONS)
    check(network, tmp_path, *optimised, sanitized, (*sanitized, *THREADS[2]))


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_no_warning_and_equal_nodes_with_every_option(
    compiler: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    require(compiler)
    check_networks(tmp_path, compiler, NATIVE, *options, *STRICT)


@pytest.mark.parametrize("target", TARGETS)
def test_every_node_is_equal_on_emulated_processors(target: str, tmp_path: Path) -> None:
    compiler, *flags = TARGETS[target]
    emulator = EMULATORS[compiler]
    require(compiler, emulator)
    command, run_with = (compiler, "-std=c99", "-O3", "-static", *flags), (emulator, "-cpu", "max")
    check_networks(tmp_path, *command, *STRICT, run_with=run_with)
    text = check(frozen_network("resnet8"), tmp_path, command, run_with=run_with)
    assert "ss_store_rescaled" in text
