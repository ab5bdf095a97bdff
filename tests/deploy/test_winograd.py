"""Winograd's algorithm in C: exact, within the memory that it is given, and only where it pays."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from compiled import BUILDS, NATIVE, differing, needs_compiler, traced
from random_networks import RandomBuilder

import softstair as ss
from softstair.deploy import nodes
from softstair.deploy.c import PlanRow, build, features, winograd, write

BT = np.array(
    [[4, 0, -5, 0, 1, 0], [0, -4, -4, 1, 1, 0], [0, 4, -4, -1, 1, 0],
     [0, -2, -1, 2, 1, 0], [0, 2, -1, -2, 1, 0], [0, 4, 0, -5, 0, 1]]
)  # fmt: skip
G = np.array([[1, 0, 0], [1, 1, 1], [1, -1, 1], [1, 2, 4], [1, -2, 4], [0, 0, 1]])
AT = np.array(
    [[6, -4, -4, 1, 1, 0], [0, -2, 2, 1, -1, 0], [0, -1, -1, 1, 1, 0], [0, -1, 1, 2, -2, 6]]
)
FACTORS = (24, 12, 6, 6)
SMALL_BT = np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]])
SMALL_G = np.array([[2, 0, 0], [1, 1, 1], [1, -1, 1], [0, 0, 2]])
SMALL_AT = np.array([[1, 1, 1, 0], [0, 1, -1, -1]])


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose Winograd wherever it is exact and fits, however slow."""
    monkeypatch.setattr(winograd, "is_faster", lambda *_: True)


@pytest.mark.parametrize(
    ("scheme", "bt", "g_matrix", "at", "factors"),
    [
        (winograd.LARGE, BT, G, AT, FACTORS),
        (winograd.SMALL, SMALL_BT, SMALL_G, SMALL_AT, (2, 2)),
    ],
    ids=["4x4", "2x2"],
)
def test_algorithm_is_exact_and_its_bounds_hold(
    scheme: winograd.Scheme,
    bt: np.ndarray,
    g_matrix: np.ndarray,
    at: np.ndarray,
    factors: tuple[int, ...],
) -> None:
    random = np.random.default_rng(0)
    d = random.integers(-1, 2, (50, scheme.tile + 2, scheme.tile + 2))
    g = random.integers(-1, 2, (50, 3, 3))
    tiles = at @ ((g_matrix @ g @ g_matrix.T) * (bt @ d @ bt.T)) @ at.T
    windows = np.lib.stride_tricks.sliding_window_view(d, (3, 3), (1, 2))
    sums = (windows * g[:, None, None]).sum((-1, -2))
    assert (tiles == np.outer(factors, factors) * sums).all()
    assert tuple(abs(bt).sum(1)) == scheme.features
    assert tuple(abs(g_matrix).sum(1)) == scheme.filters
    assert (abs(at) == scheme.outputs).all()


def edges(seed: int = 0) -> RandomBuilder:
    """Sizes that are no multiple of a tile, paddings of 0 to 2, words that are not full."""
    net = RandomBuilder(seed, (2, 9, 7), zero=121, batch=3)
    net.sum("first", 45, "ternary", padding=(1, 1))
    net.steps("first.stair", (-1, 0, 1))
    net.sum("ternary", 43, "ternary", padding=(1, 1))
    start = net.steps("ternary.stair", (-1, 0, 1))
    net.sum("signs", 70, "sign", padding=(1, 1))
    net.steps("signs.stair", (-1, 1))
    net.sum("narrow", 24, "ternary", padding=(1, 0))
    net.steps("narrow.stair", (0, 1))
    net.sum("wide", 48, "sign", padding=(2, 2))
    net.steps("wide.stair", (-1, 0))
    net.max_pool("pool", 2, 2, 0)
    net.sum("small", 46, "ternary", padding=(0, 1))
    net.steps("small.stair", (-1, 0, 1))
    net.max_pool("single", 2, 2, 0)
    net.sum("one", 33, "ternary", padding=(1, 1))
    net.steps("one.stair", (-1, 0, 1))
    net.flatten("flat")
    net.sum("linear", 9, "ternary")
    net.steps("linear.stair", tuple(range(16)))
    other = net.last
    net.last = start
    net.sum("stored", 43, "ternary", padding=(1, 1))
    stored = net.last
    net.steps("stored.stair", (-1, 0, 1))
    net.last = stored
    net.steps("levels", tuple(range(16)), shortcut=start)
    net.sum_pool("sums")
    net.flatten("flat sums")
    net.sum("last sums", 9, "int4")
    net.steps("last sums.stair", tuple(range(16)))
    net.add_features("added", net.last, other)
    net.scores("last", 4)
    return net


def byte_edges(seed: int = 0) -> RandomBuilder:
    """Bytes with weights of 4, 2 and 1 bits; the largest of them, and of all sums, occur."""
    net = RandomBuilder(seed, (2, 9, 7), zero=121, batch=3)
    net.sum("first", 32, "int4", padding=(1, 1))
    start = net.steps("first.stair", tuple(range(16)), even=True)
    net.sum("int4", 48, "int4", padding=(1, 1))
    net.steps("int4.stair", tuple(range(-8, 8)))
    net.sum("ternary", 16, "ternary", padding=(2, 0))
    net.steps("ternary.stair", tuple(range(16)), even=True)
    net.sum("signs", 21, "sign", padding=(0, 1))
    net.steps("signs.stair", tuple(range(16)))
    net.sum("ragged", 16, "int4", padding=(1, 1))  # 21 channels are not read 16 at a time
    net.steps("ragged.stair", tuple(range(32)))
    net.sum("wide", 16, "int4", padding=(1, 1))  # 4 times 31 is a byte
    net.steps("wide.stair", tuple(range(33)))
    net.sum("too wide", 5, "int4", padding=(1, 1))
    net.steps("too wide.stair", (0, 1, 2))
    net.flatten("flat")
    other = net.sum("linear", 9, "int4")
    net.last = start
    net.sum("full", 32, "int4", kernel=1)
    full = net.nodes["full"]
    assert isinstance(full, nodes.Sum)
    net.add(nodes.Sum(**{**vars(full), "weight": torch.zeros_like(full.weight)}))
    stair = nodes.Steps(
        "full.stair", ("full",), 0, 15, torch.zeros(32, 15).long(), tuple(range(16))
    )
    net.add(stair)
    net.sum("large", 16, "int4", padding=(1, 1))
    large = net.nodes["large"]
    assert isinstance(large, nodes.Sum)
    large.weight[0] = -8
    net.add(large)
    assert int(net.results["large"].min()) == -8 * 15 * 9 * 32
    net.sum_pool("sums")
    net.flatten("flat sums")
    net.sum("last sums", 9, "ternary")
    net.add_features("added", net.last, other)
    net.scores("last", 4)
    return net


TILED = {
    edges: ("ternary", "signs", "narrow", "wide", "small", "one", "stored"),
    byte_edges: ("int4", "ternary", "signs", "wide", "large"),
}


@pytest.mark.nightly(keep=4)
@needs_compiler
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("network_of", TILED)
@pytest.mark.parametrize(
    ("kind", "scratch"),
    [
        ("portable", 2**20),
        ("native", 80_000),
        ("plain", 2**20),
        ("threads", 80_000),
        ("avx2", 2**20),
        ("fast", 2**20),  # which takes gcc half a minute: in the nightly lane
    ],
)
def test_every_node_is_equal_at_every_edge(
    network_of: Callable[[], RandomBuilder], kind: str, scratch: int, tmp_path: Path
) -> None:
    net = network_of()
    network = net.network()
    plan = write(network, tmp_path, scratch=scratch)
    tiled = {row.names[0]: row for row in plan.rows if row.in_tiles}
    assert tuple(tiled) == TILED[network_of]
    assert max(row.scratch for row in tiled.values()) <= scratch
    results = features(build(tmp_path, trace=True, flags=BUILDS[kind]), network, net.bytes)
    assert differing(net.results, results) == {}


@needs_compiler
@pytest.mark.usefixtures("always")
def test_largest_intermediate_results_are_exact(tmp_path: Path) -> None:
    net = RandomBuilder(0, (1, 6, 6), zero=128, batch=36)
    signs = np.where(BT >= 0, 1, -1)
    images = np.einsum("iy,jx->ijyx", signs, signs).reshape(36, 1, 6, 6)
    net.bytes = torch.from_numpy(128 + 100 * images).to(torch.uint8)
    net.results["input"] = net.nodes["input"].run(net.bytes)
    net.sum("same", 96, "sign", kernel=1)
    same = net.nodes["same"]
    assert isinstance(same, nodes.Sum)
    net.nodes["same"] = nodes.Sum(**{**vars(same), "weight": torch.ones_like(same.weight)})
    net.results["same"] = net.nodes["same"].run(net.results["input"])
    net.steps("same.stair", (-1, 1))
    stair = net.nodes["same.stair"]
    assert isinstance(stair, nodes.Steps)
    zeros = torch.zeros_like(stair.thresholds)
    net.add(nodes.Steps(**{**vars(stair), "thresholds": zeros}))
    assert set(net.results["same.stair"].unique().tolist()) == {-1, 1}
    net.sum("large", 64, "sign")
    large = net.nodes["large"]
    assert isinstance(large, nodes.Sum)
    weight = large.weight[:, :1].expand_as(large.weight).contiguous()
    net.add(nodes.Sum(**{**vars(large), "weight": weight}))
    net.steps("large.stair", (-1, 0, 1))
    net.flatten("flat")
    net.scores("last", 3)
    assert int(net.results["large"].abs().max()) == 9 * 96
    assert differing(net.results, traced(net.network(), net.bytes, tmp_path, "native")) == {}


OPTIONS = {
    "GNU C": ("-O2",),
    "fast math": ("-Ofast", NATIVE),
    "C99": ("-std=c99", "-O3"),
}


@pytest.mark.nightly(keep=0)
@needs_compiler
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("compiler", [name for name in ("gcc", "clang") if shutil.which(name)])
def test_results_do_not_depend_on_the_compiler(compiler: str, options: str, tmp_path: Path) -> None:
    net = edges(1)
    write(net.network(), tmp_path)
    command = [compiler, *OPTIONS[options], "-DSOFTSTAIR_TRACE", "-o", "network", "main.c"]
    subprocess.run([*command, "network.c"], cwd=tmp_path, check=True)
    results = features(tmp_path / "network", net.network(), net.bytes)
    assert differing(net.results, results) == {}


def layer(channels: int, size: int, kind: str = "ternary", **options: object) -> RandomBuilder:
    net = RandomBuilder(0, (1, size, size), zero=0, batch=1)
    net.sum("first", channels, "ternary", padding=(1, 1))
    net.steps("first.stair", (-1, 0, 1))
    net.sum("layer", channels, kind, padding=(1, 1), **options)
    net.steps("layer.stair", (-1, 0, 1))
    net.flatten("flat")
    net.scores("last", 2)
    return net


def test_fewer_products_where_they_pay_and_fit(tmp_path: Path) -> None:
    def row(net: RandomBuilder, scratch: int = winograd.SCRATCH) -> PlanRow:
        plan = write(net.network(), tmp_path, scratch=scratch)
        row = next(row for row in plan.rows if row.names[0] == "layer")
        assert plan.ram >= row.memory[1] + row.scratch
        assert f"{row.scratch:>8,}  {row.how}" in str(plan)
        assert ("for a microcontroller" in str(plan)) == row.in_tiles
        assert f"{row.scratch:>8}  {row.how}" in (tmp_path / "network.h").read_text()
        return row

    large = layer(64, 16)
    assert row(large).how.startswith("tiles multiplied, 2 bits")
    small = row(large, 100_000)
    assert small.in_tiles
    assert small.scratch <= 100_000 < row(large).scratch
    assert row(large, 0).how.startswith("bits counted")
    assert row(layer(32, 16), 16384).how.startswith("bits counted")
    assert row(layer(64, 4)).how.startswith("bits counted")
    assert row(layer(64, 16, stride=(2, 2))).how.startswith("bits counted")
    assert row(large).flash[0] == row(large, 0).flash[0]  # 2 bits a weight in both
    with pytest.raises(ValueError, match="scratch must be an integer"):
        write(large.network(), tmp_path, scratch=-1)


@needs_compiler
def test_export_bounds_scratch_and_refuses_it_for_other_formats(tmp_path: Path) -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 64, 3, padding=1, bias=False), torch.nn.BatchNorm2d(64), torch.nn.ReLU(),
        torch.nn.Conv2d(64, 64, 3, padding=1, bias=False), torch.nn.BatchNorm2d(64),
        torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 2),
    )  # fmt: skip
    net = ss.quantise(model, ss.Stair.ternary(), ss.Stair.ternary(), skip="8")
    export = lambda **more: ss.deploy.export(net, (1, 16, 16), 128, 64.0, tmp_path / "c", **more)
    exported = export(scratch=100_000)
    assert exported.mismatches == 0
    assert exported.plan is not None
    assert 50_000 < max(row.scratch for row in exported.plan.rows) <= 100_000
    with pytest.raises(ValueError, match="scratch is for C, but the format is 'onnx'"):
        export(to="onnx", scratch=0)
