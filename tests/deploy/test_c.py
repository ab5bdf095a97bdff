"""The C of integer networks gives, node by node, what the networks give."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from compiled import (
    BUILDS,
    bits,
    differing,
    expansions,
    needs_compiler,
    numbers,
    shortcuts,
    traced,
    whole_scores,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from random_networks import Growing, random_network

from softstair.deploy import ExportError, IntegerNetwork, nodes
from softstair.deploy.c import classes, write
from softstair.deploy.c.program import Buffer, arrange
from softstair.deploy.c.sums import pack_fields

NETWORKS: dict[str, Callable[[], Growing]] = {
    "bits": bits,
    "numbers": numbers,
    "both": shortcuts,
    "expansions": expansions,
    "scores": whole_scores,
}


@pytest.mark.nightly(keep=6)
@needs_compiler
@pytest.mark.parametrize("kind", BUILDS)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_node_is_equal_in_every_build(name: str, kind: str, tmp_path: Path) -> None:
    grown = NETWORKS[name]()
    network = grown.network()
    assert differing(grown.known, traced(network, grown.bytes, tmp_path, kind)) == {}


@needs_compiler
@pytest.mark.parametrize("seed", range(4))
def test_random_networks_are_equal(seed: int, tmp_path: Path) -> None:
    grown = random_network(seed)
    kind = [*BUILDS][seed % len(BUILDS)]
    assert differing(grown.known, traced(grown.network(), grown.bytes, tmp_path, kind)) == {}


OPTIONS = {
    "GNU C": ("-O2",),  # without -std=c99, GCC contracts a product and a sum by default
    "native": ("-O3", "-march=native"),
    "contracted": ("-std=gnu11", "-O3", "-ffp-contract=fast"),
    "fast math": ("-Ofast", "-march=native"),
    "C99": ("-std=c99", "-O2"),
}
COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)] or ["cc"]


def few_classes(classes: int) -> Growing:
    """A float last layer with so few classes that a compiler may unroll the loop over them."""
    net = Growing(3, (1, 6, 6), zero=7, batch=60)
    net.flat("flat")
    net.sum("linear", 300, "int4")
    net.steps("linear.stair", tuple(range(-8, 8)))
    net.scores("scores", classes)
    return net


def int8_scores(unbiased: bool) -> Growing:
    """An INT8 last layer; some sums are 0, and some scales negative."""
    net = Growing(3, (1, 6, 6), zero=7, batch=60)
    net.flat("flat")
    net.sum("linear", 40, "ternary")
    net.steps("linear.stair", (-1, 0, 1))
    net.sum("last", 11, "ternary" if unbiased else "int8")
    name = net.rescaled("scores")
    if unbiased:
        node = net.nodes[name]
        assert isinstance(node, nodes.Rescaled)
        net.add(replace(node, bias=torch.zeros_like(node.bias)))
    return net


def exact_scores(net: Growing) -> torch.Tensor:
    """The scores as documented: in double precision, class by class, rounded to float once."""
    last = net.nodes["scores"]
    if isinstance(last, nodes.Rescaled):
        return net.known["scores"]
    assert isinstance(last, nodes.Scores)
    features = (net.known[last.inputs[0]].float() * last.unit).double().numpy()
    weight = last.weight.double().numpy()
    totals = np.zeros((len(features), len(weight)))
    for i in range(features.shape[1]):
        totals += features[:, i, None] * weight[None, :, i]
    if last.bias is not None:
        totals += last.bias.double().numpy()
    return torch.from_numpy(totals.astype(np.float32))


SCORED: dict[str, Callable[[], Growing]] = {
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


HOSTILE = 'a */ int x; /* b\n#error "c" \\\n??/\n" %s é 💥'


@needs_compiler
def test_names_from_a_file_stay_in_comments(tmp_path: Path) -> None:
    grown = numbers()
    renamed = {name: f"{HOSTILE} {i}" for i, name in enumerate(grown.nodes)}
    made = tuple(
        replace(node, name=renamed[node.name], inputs=tuple(renamed[one] for one in node.inputs))
        for node in grown.nodes.values()
    )
    sizes = {renamed[name]: tuple(x.shape[1:]) for name, x in grown.known.items()}
    network = IntegerNetwork(made, sizes)
    expected = {renamed[name]: x for name, x in grown.known.items()}
    assert differing(expected, traced(network, grown.bytes, tmp_path, "portable")) == {}
    texts = [path.read_bytes() for path in tmp_path.glob("network*.[ch]")]
    assert not any(b"??" in text or b"#error" in text or b"int x;" in text for text in texts)


@pytest.mark.parametrize("name", ["", "1st", "../up", "a\n", "int", "ss_x", "a" * 90])
def test_a_name_that_is_no_identifier_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name must be a C identifier"):
        write(numbers().network(), tmp_path / "out", name)
    assert not (tmp_path / "out").exists()


@needs_compiler
def test_another_name_and_the_makefile(tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed, so its file cannot be tried.")
    grown = bits()
    write(grown.network(), tmp_path, "tiny_net")
    strict = "WARNINGS=-Wall -Wextra -Wconversion -Wpedantic -Werror"
    subprocess.run(["make", "-s", strict, "CFLAGS=-O1"], cwd=tmp_path, check=True)
    found, scores = classes(tmp_path / "tiny_net", grown.bytes)
    assert torch.equal(found, grown.known["last"].argmax(1))
    last = grown.nodes["last"]
    assert isinstance(last, nodes.Scores)
    exact = grown.known["switches.stair"].double() @ last.weight.double().T
    exact = exact if last.bias is None else exact + last.bias.double()
    torch.testing.assert_close(scores, exact.float(), rtol=2e-7, atol=0.0)  # rounded once
    short = subprocess.run(
        ["./tiny_net"], cwd=tmp_path, input=b"abc", capture_output=True, check=False
    )
    assert short.returncode == 2
    assert b"3 bytes and should have 144" in short.stderr


@needs_compiler
def test_nothing_is_asked_of_a_library_and_weights_take_their_bits(tmp_path: Path) -> None:
    if shutil.which("nm") is None or shutil.which("size") is None:
        pytest.skip("nm and size are not installed, so object files cannot be looked into.")
    net = Growing(0, (1, 4, 4), zero=0, batch=1)
    net.sum("first", 256, "ternary", padding=(1, 1))
    net.steps("first.stair", (-1, 0, 1))
    net.sum("large", 256, "ternary", padding=(1, 1))
    net.steps("large.stair", (-1, 0, 1))
    net.flat("flat")
    net.sum("linear", 256, "ternary")
    net.rescaled("scores")
    plan = write(net.network(), tmp_path)
    flags = ("-std=c99", "-O3", "-fno-tree-loop-distribute-patterns", "-c", "network.c")
    subprocess.run(["cc", *flags], cwd=tmp_path, check=True)
    unknown = subprocess.check_output(["nm", "-u", "network.o"], cwd=tmp_path, text=True)
    assert [line for line in unknown.splitlines() if "GLOBAL_OFFSET" not in line] == []
    sizes = subprocess.check_output(["size", "-A", "network.o"], cwd=tmp_path, text=True)
    constant = sum(int(n) for n in re.findall(r"^\.rodata\S*\s+(\d+)", sizes, re.MULTILINE))
    count = sum(row.weights for row in plan.rows)
    assert count == 9 * 256 * 257 + 256 * 4096
    assert 8 * constant / count < 2.1
    (memory,) = re.findall(r"^\.bss\s+(\d+)", sizes, re.MULTILINE)
    assert int(memory) <= plan.ram + 256 * 4 + 64  # and the scores of network_class


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 9), st.integers(0, 4)), max_size=12))
@settings(max_examples=60, deadline=None)
def test_what_lives_together_shares_no_byte(given_buffers: list[tuple[int, int, int]]) -> None:
    buffers = [Buffer(str(i), s, f, f + n) for i, (s, f, n) in enumerate(given_buffers)]
    placed, total = arrange(buffers)
    for step in range(14):
        used = np.zeros(total, dtype=int)
        for one in buffers:
            if one.first <= step <= one.last:
                used[placed[one.name] : placed[one.name] + one.size] += 1
                assert placed[one.name] + one.size <= total
        assert used.max(initial=0) <= 1


def test_a_chain_of_layers_needs_two_of_them_at_a_time(tmp_path: Path) -> None:
    plan = write(bits().network(), tmp_path)
    rows = plan.rows
    most = max(a.memory[1] + b.memory[1] + b.scratch for a, b in pairwise(rows))
    assert plan.ram <= most + 16 * 4 + 8 * 5
    assert str(plan.ram) in (tmp_path / "network.h").read_text()
    assert f"{plan.flash:,}" in str(plan)


@pytest.mark.parametrize(
    ("values", "turned", "bits_each"),
    [((-1, 1), False, 1), ((-1, 0, 1), True, 2), (tuple(range(-8, 8)), True, 4),
     ((-5, 3), False, 4), (tuple(range(-128, 128)), True, 8)],
)  # fmt: skip
def test_weights_take_the_fewest_bits(
    values: tuple[int, ...], turned: bool, bits_each: int
) -> None:
    random = np.random.default_rng(1)
    weight = random.choice(values, (9, 37))
    if turned:
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


def test_what_cannot_be_exact_is_refused_by_name(tmp_path: Path) -> None:
    grown = numbers()
    cut = IntegerNetwork(tuple(grown.nodes.values())[:-1], grown.network().sizes)
    with pytest.raises(ExportError, match="'flat': the network must end in scores"):
        write(cut, tmp_path)
    last = grown.nodes["last"]
    assert isinstance(last, nodes.Scores)
    broken = replace(last, weight=last.weight * float("nan"))
    made = (*tuple(grown.nodes.values())[:-1], broken)
    with pytest.raises(ExportError, match="'last': its weights are not finite"):
        write(IntegerNetwork(made, grown.network().sizes), tmp_path)
    large = Growing(0, (1, 1, 2), zero=0)
    large.flat("flat")
    large.sum("huge", 2, "int12")
    huge = large.nodes["huge"]
    assert isinstance(huge, nodes.Sum)
    large.nodes["huge"] = replace(huge, weight=huge.weight * 2**20)
    large.rescaled("scores")
    with pytest.raises(ExportError, match="'huge': its partial sums do not fit"):
        write(large.network(), tmp_path)
