"""Generated C against the frozen network, node by node."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from c_networks import (
    NETWORKS,
    bit_features,
    byte_features,
    depthwise_features,
    hostile_names,
    lines_and_values,
    packed_features,
)
from compiled import (
    BUILDS,
    NATIVE,
    check_networks,
    differing,
    needs_compiler,
    program_of,
    run_in_program,
)
from hypothesis import given, strategies as st
from random_networks import RandomBuilder, random_network

from softstair._errors import SoftstairError
from softstair.deploy import nodes
from softstair.deploy.c import LANGUAGE, SCRATCH, build, runner, write
from softstair.deploy.c.packing import pack_fields
from softstair.deploy.c.program import Buffer, arrange, sources

STRIPS = 90_000  # bytes of scratch memory, so that tiles are computed in several strips


@pytest.mark.nightly(keep=3)
@needs_compiler
@pytest.mark.parametrize("kind", BUILDS)
def test_every_node_of_every_network_is_equal(kind: str, tmp_path: Path) -> None:
    scratch = SCRATCH if kind in ("plain", "fast") else STRIPS
    check_networks(tmp_path, "cc", *LANGUAGE, *BUILDS[kind], scratch=scratch)


@pytest.mark.nightly(keep=2)
@needs_compiler
@pytest.mark.parametrize("kind", [name for name in BUILDS if name != "packed"])
def test_every_node_of_every_network_for_x86_is_equal(kind: str, tmp_path: Path) -> None:
    check_networks(tmp_path, "cc", *LANGUAGE, *BUILDS[kind], cpu="x86")


def test_packed_products_are_used_where_sums_are_proven_to_fit() -> None:
    network = packed_features().network()
    text = sources(network, "network")[0]["network.c"]
    fields = re.findall(r"\.packed_channels = (\d+),\n    \.chunk = (\d+)", text)
    # 27 inputs of 8 bits; depthwise; depthwise; 24; 9 x 24 in two chunks; 8-bit weights; 64 inputs
    expected = [("24", "0"), ("1", "0"), ("1", "0"), ("48", "32"), ("16", "112"), ("64", "0")]
    assert fields == [*expected, ("8", "64"), ("0", "0")]  # a last layer
    text = sources(network, "network", scratch=0)[0]["network.c"]
    assert set(re.findall(r"\.packed_channels = (\d+)", text)) == {"0"}


def test_depthwise_sums_have_16_bits_only_where_they_are_proven_to_fit() -> None:
    text = sources(depthwise_features().network(), "network")[0]["network.c"]
    assert re.findall(r"\.narrow = (\d)", text) == ["0", "1", "0", "0"]


COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)] or ["cc"]


@pytest.mark.nightly(keep=1)
@needs_compiler
@pytest.mark.parametrize("first", range(0, 500, 20))
def test_every_node_of_random_networks_is_equal(first: int, tmp_path: Path) -> None:
    nets = {seed: random_network(seed) for seed in range(first, first + 20)}
    program = program_of({seed: net.network() for seed, net in nets.items()}, tmp_path)
    for seed, net in nets.items():
        results = run_in_program(program, seed, net.network(), net.bytes)
        assert differing(net.results, results) == {}, seed


@pytest.mark.nightly(keep=3)
@needs_compiler
@pytest.mark.parametrize(
    ("name", "threads"), [("scores", 1), ("lines", 1), ("bits", 2), ("units", 1)]
)
def test_runner_returns_features_scores_and_classes(
    name: str, threads: int, tmp_path: Path
) -> None:
    net = NETWORKS[name]()
    network = net.network("values" if name == "lines" else "classes")
    write(network, tmp_path / "out", "small", threads=threads)
    results = runner(network, tmp_path / "out", threads).results(net.bytes)
    expected = {**net.results, "scores": network(net.bytes)}
    if name != "lines":
        expected["class"] = network.predict(net.bytes)
    assert differing(expected, results) == {}
    assert {x.dtype for name, x in results.items() if name != "class"} == {torch.int32}


def test_runner_of_a_folder_without_c_raises(tmp_path: Path) -> None:
    with pytest.raises(SoftstairError, match="holds no network"):
        runner(bit_features().network(), tmp_path)


@needs_compiler
def test_program_of_a_network_without_classes_prints_values(tmp_path: Path) -> None:
    net = lines_and_values()
    network = net.network("values")
    write(network, tmp_path)
    text = "".join((tmp_path / name).read_text() for name in ("network.h", "network.c"))
    assert "void network_run(" in text
    assert "class" not in text.lower()
    build(tmp_path)
    printed = run(tmp_path, "./network", net.bytes)
    expected = network.values(net.bytes)
    assert torch.allclose(torch.tensor(printed, dtype=torch.float64), expected, rtol=1e-8)
    bits = torch.tensor(run(tmp_path, "./network --bits", net.bytes), dtype=torch.int32)
    assert torch.equal(bits, network(net.bytes))


def run(folder: Path, command: str, x: torch.Tensor) -> list[list[float]]:
    data = x.numpy().tobytes()
    done = subprocess.run(command.split(), cwd=folder, input=data, capture_output=True, check=True)
    return [[float(word) for word in line.split()] for line in done.stdout.splitlines()]


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
    network = builder.network()
    scores = network(builder.bytes)
    expected = torch.cat([network.predict(builder.bytes)[:, None], scores], 1)
    assert run(tmp_path, "./tiny_net --bits", builder.bytes) == expected.tolist()
    assert run(tmp_path, "./tiny_net", builder.bytes) == expected[:, :1].tolist()
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
    net.scores("linear", 128, "ternary")
    plan = write(net.network(), tmp_path, cpu="arm")
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
    plan = write(bit_features().network(), tmp_path, cpu="arm")
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


@given(st.integers(2, 9), st.integers(2, 9), st.integers(1, 9))
def test_class_is_that_of_the_largest_score_in_its_unit(a: int, b: int, reach: int) -> None:
    scores, order = torch.tensor([[reach * b, reach * a, 0]]), torch.tensor([a, b, 1])
    node = nodes.Scores("", ("",), 0, 9, torch.zeros(3), torch.ones(3), order.int())
    assert int(node.classes(scores.int())) == 0  # of equal ones the first
