"""Winograd's algorithm in C: exact, within the memory that it is given, and only where it pays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from c_networks import BT
from random_networks import RandomBuilder

from softstair.deploy.c import PlanRow, winograd, write

G = np.array([[1, 0, 0], [1, 1, 1], [1, -1, 1], [1, 2, 4], [1, -2, 4], [0, 0, 1]])
AT = np.array(
    [[6, -4, -4, 1, 1, 0], [0, -2, 2, 1, -1, 0], [0, -1, -1, 1, 1, 0], [0, -1, 1, 2, -2, 6]]
)
FACTORS = (24, 12, 6, 6)
SMALL_BT = np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]])
SMALL_G = np.array([[2, 0, 0], [1, 1, 1], [1, -1, 1], [0, 0, 2]])
SMALL_AT = np.array([[1, 1, 1, 0], [0, 1, -1, -1]])


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


def layer(channels: int, size: int, kind: str = "ternary", **options: object) -> RandomBuilder:
    net = RandomBuilder(0, (1, size, size), zero=0, batch=1)
    net.layer("first", channels, "ternary", (-1, 0, 1), padding=(1, 1))
    net.sum("layer", channels, kind, padding=(1, 1), **options)
    net.steps("layer.stair", (-1, 0, 1))
    net.flatten("flat")
    net.scores("last", 2)
    return net


def test_fewer_products_where_they_pay_and_fit(tmp_path: Path) -> None:
    def row(net: RandomBuilder, scratch: int = winograd.SCRATCH) -> PlanRow:
        plan = write(net.network(), tmp_path, scratch=scratch, cpu="arm")
        row = next(row for row in plan.rows if row.names[0] == "layer")
        assert plan.ram >= row.memory[1] + row.scratch
        assert f"{row.scratch:>8,}  {row.how}" in str(plan)
        assert ("tiles need vector instructions" in str(plan)) == row.in_tiles
        assert f"{row.scratch:>8,}  {row.how}" in (tmp_path / "network.h").read_text()
        return row

    large = layer(64, 16)
    tiles, strips, counted = (row(large, scratch) for scratch in (winograd.SCRATCH, 100_000, 0))
    assert tiles.how.startswith("tiles multiplied, 2 bits")
    assert strips.in_tiles
    assert strips.scratch <= 100_000 < tiles.scratch
    assert counted.how.startswith("bits counted")
    assert counted.flash[0] == tiles.flash[0]  # 2 bits a weight in both
    assert row(layer(32, 16), 16384).how.startswith("bits counted")
    assert row(layer(64, 4)).how.startswith("bits counted")
    assert row(layer(64, 16, stride=(2, 2))).how.startswith("bits counted")
    with pytest.raises(ValueError, match="scratch must be an integer"):
        write(large.network(), tmp_path, scratch=-1)
