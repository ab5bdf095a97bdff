"""Generated C against the integer network, node by node."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from c_networks import (
    bit_features,
    byte_features,
    depthwise_features,
    hostile_names,
    packed_features,
)
from compiled import BUILDS, NATIVE, check_networks, exact_scores, needs_compiler
from hypothesis import given, strategies as st
from random_networks import RandomBuilder

from softstair.deploy import ExportError, IntegerNetwork
from softstair.deploy.c import LANGUAGE, SCRATCH, classes, write
from softstair.deploy.c.program import Buffer, arrange, sources
from softstair.deploy.c.sums import pack_fields

STRIPS = 90_000  # bytes of scratch memory, so that tiles are computed in several strips


@pytest.mark.nightly(keep=3)
@needs_compiler
@pytest.mark.parametrize("kind", BUILDS)
def test_every_node_of_every_network_is_equal(kind: str, tmp_path: Path) -> None:
    scratch = SCRATCH if kind in ("plain", "fast", "avx2") else STRIPS
    check_networks(tmp_path, "cc", *LANGUAGE, *BUILDS[kind], scratch=scratch)


def test_packed_products_are_used_where_sums_are_proven_to_fit() -> None:
    network = packed_features().network()
    text = sources(network, "network")[0]["network.c"]
    fields = re.findall(r"\.packed_channels = (\d+),\n    \.chunk = (\d+)", text)
    # 27 inputs of 8 bits; depthwise; depthwise; 24; 9 x 24 in two chunks; 8-bit weights; 64 inputs
    expected = [("24", "0"), ("1", "0"), ("1", "0"), ("48", "32"), ("16", "112"), ("64", "0")]
    assert fields == [*expected, ("8", "64")]
    text = sources(network, "network", scratch=0)[0]["network.c"]
    assert set(re.findall(r"\.packed_channels = (\d+)", text)) == {"0"}


def test_depthwise_sums_have_16_bits_only_where_they_are_proven_to_fit() -> None:
    text = sources(depthwise_features().network(), "network")[0]["network.c"]
    assert re.findall(r"\.narrow = (\d)", text) == ["0", "1", "0", "0"]


OPTIONS = {
    "GNU C": ("-O2",),  # without -std=c99, GCC contracts a product and a sum by default
    "native": ("-O3", NATIVE),
    "contracted": ("-std=gnu11", "-O3", "-ffp-contract=fast"),
    "fast math": ("-Ofast", NATIVE),
    "C99": ("-std=c99", "-O2"),
}
COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)] or ["cc"]


def few_classes(classes: int) -> RandomBuilder:
    """A float last layer with so few classes that a compiler may unroll the loop over them."""
    net = RandomBuilder(3, (1, 6, 6), zero=7, batch=60)
    net.flatten("flat")
    net.layer("linear", 300, "int4", tuple(range(-8, 8)))
    net.scores("scores", classes)
    return net


def int8_scores(unbiased: bool) -> RandomBuilder:
    """An INT8 last layer; some sums are 0, and some scales negative."""
    net = RandomBuilder(3, (1, 6, 6), zero=7, batch=60)
    net.flatten("flat")
    net.layer("linear", 40, "ternary", (-1, 0, 1))
    net.sum("last", 11, "ternary" if unbiased else "int8")
    name = net.rescaled("scores")
    if unbiased:
        net.change(name, bias=torch.zeros(11))
    return net


SCORED: dict[str, Callable[[], RandomBuilder]] = {
    "INT8": lambda: int8_scores(unbiased=False),
    "INT8 without bias": lambda: int8_scores(unbiased=True),
    "float": lambda: few_classes(2),
}
COMPILED = [
    *((options, "INT8") for options in OPTIONS),
    ("fast math", "INT8 without bias"),
    ("native", "float"),
    ("fast math", "float"),
]


@pytest.mark.nightly(keep=3)
@needs_compiler
@pytest.mark.parametrize(("options", "name"), COMPILED)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_score_bits_do_not_depend_on_the_compiler_options(
    compiler: str, options: str, name: str, tmp_path: Path
) -> None:
    net = SCORED[name]()
    write(net.network(), tmp_path)
    command = [compiler, *OPTIONS[options], "-o", "network", "main.c", "network.c"]
    subprocess.run(command, cwd=tmp_path, check=True)
    _, scores = classes(tmp_path / "network", net.bytes)
    expected = exact_scores(net)
    assert torch.equal(scores.view(torch.int32), expected.view(torch.int32))


def test_hostile_layer_names_do_not_leave_comments() -> None:
    texts = sources(hostile_names().network(), "network")[0].values()
    assert not any(word in text for text in texts for word in ("??", "#error", "int x;"))


@pytest.mark.parametrize("name", ["", "1st", "../up", "a\n", "int", "ss_x", "a" * 90])
def test_name_that_is_no_c_identifier_raises(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name must be a C identifier"):
        write(byte_features().network(), tmp_path / "out", name)
    assert not (tmp_path / "out").exists()


@needs_compiler
def test_makefile_builds_a_network_of_another_name(tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed, so the Makefile cannot be tested.")
    builder = bit_features()
    write(builder.network(), tmp_path, "tiny_net")
    strict = "WARNINGS=-Wall -Wextra -Wconversion -Wpedantic -Werror"
    subprocess.run(["make", "-s", strict, "CFLAGS=-O0"], cwd=tmp_path, check=True)
    predicted, scores = classes(tmp_path / "tiny_net", builder.bytes)
    assert torch.equal(predicted, builder.results["last"].argmax(1))
    assert torch.equal(scores, exact_scores(builder))
    short = subprocess.run(
        ["./tiny_net"], cwd=tmp_path, input=b"abc", capture_output=True, check=False
    )
    assert short.returncode == 2
    assert b"3 bytes and should have 144" in short.stderr


@pytest.mark.nightly(keep=1)
@needs_compiler
@pytest.mark.parametrize("command", [("cc",), *((name, NATIVE) for name in COMPILERS)])
def test_object_file_needs_no_library_and_packs_weights(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    if shutil.which("nm") is None or shutil.which("size") is None:
        pytest.skip("nm and size are not installed, so object files cannot be inspected.")
    net = RandomBuilder(0, (1, 4, 4), zero=0, batch=1)
    net.layer("first", 128, "ternary", (-1, 0, 1), padding=(1, 1))
    net.layer("large", 128, "ternary", (-1, 0, 1), padding=(1, 1))
    net.flatten("flat")
    net.sum("linear", 128, "ternary")
    net.rescaled("scores")
    plan = write(net.network(), tmp_path)
    flags = ("-std=c99", "-O3", "-fno-builtin", "-c", "network.c")
    subprocess.run([*command, *flags], cwd=tmp_path, check=True)
    unknown = subprocess.check_output(["nm", "-u", "network.o"], cwd=tmp_path, text=True)
    assert [line for line in unknown.splitlines() if "GLOBAL_OFFSET" not in line] == []
    sizes = subprocess.check_output(["size", "-A", "network.o"], cwd=tmp_path, text=True)
    constant = sum(int(n) for n in re.findall(r"^\.rodata\S*\s+(\d+)", sizes, re.MULTILINE))
    count = sum(row.weights for row in plan.rows)
    assert count == 9 * 128 * 129 + 128 * 2048
    assert 8 * constant / count < 2.1
    (memory,) = re.findall(r"^\.bss\s+(\d+)", sizes, re.MULTILINE)
    assert int(memory) <= plan.ram + 128 * 4 + 64  # and the scores of network_class


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 9), st.integers(0, 4)), max_size=12))
def test_buffers_in_use_at_once_share_no_byte(given_buffers: list[tuple[int, int, int]]) -> None:
    buffers = [Buffer(str(i), s, f, f + n) for i, (s, f, n) in enumerate(given_buffers)]
    placed, total = arrange(buffers)
    for step in range(14):
        used = np.zeros(total, dtype=int)
        for buffer in buffers:
            if buffer.first <= step <= buffer.last:
                start = placed[buffer.name]
                used[start : start + buffer.size] += 1
                assert start + buffer.size <= total
        assert used.max(initial=0) <= 1


def test_memory_of_a_chain_is_that_of_two_layers(tmp_path: Path) -> None:
    plan = write(bit_features().network(), tmp_path)
    rows = plan.rows
    most = max(a.memory[1] + b.memory[1] + b.scratch for a, b in pairwise(rows))
    assert plan.ram <= most + 16 * 4 + 8 * 5
    assert str(plan.ram) in (tmp_path / "network.h").read_text()
    assert f"{plan.flash:,}" in str(plan)


@pytest.mark.parametrize(
    ("values", "negated", "bits_each"),
    [((-1, 1), False, 1), ((-1, 0, 1), True, 2), (tuple(range(-8, 8)), True, 4),
     ((-5, 3), False, 4), (tuple(range(-128, 128)), True, 8)],
)  # fmt: skip
def test_weights_are_packed_into_the_fewest_bits(
    values: tuple[int, ...], negated: bool, bits_each: int
) -> None:
    random = np.random.default_rng(1)
    weight = random.choice(values, (9, 37))
    if negated:
        weight[::2] *= -1
    packed = pack_fields(weight)
    assert packed is not None
    assert packed.bits == bits_each
    assert packed.data.nbytes == 9 * -(-37 * bits_each // 8)
    for output in range(9):
        number = int.from_bytes(packed.data[output].tobytes(), "little")
        for i in range(37):
            code = number >> (i * bits_each) & (2**bits_each - 1)
            value = packed.base + packed.step * code
            assert (-value if packed.negated[output] else value) == weight[output, i]


def test_network_without_exact_c_raises_and_names_the_layer(tmp_path: Path) -> None:
    builder = byte_features()
    cut = IntegerNetwork(tuple(builder.nodes.values())[:-1], builder.network().sizes)
    with pytest.raises(ExportError, match="'flat': the network must end in scores"):
        write(cut, tmp_path)
    large = RandomBuilder(0, (1, 1, 2), zero=0)
    large.flatten("flat")
    large.sum("huge", 2, "int12")
    large.nodes["huge"].weight.mul_(2**20)  # type: ignore[attr-defined]
    large.rescaled("scores")
    with pytest.raises(ExportError, match="'huge': its partial sums do not fit"):
        write(large.network(), tmp_path)
