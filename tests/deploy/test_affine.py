"""Affine steps: equal to thresholds at every sum, and found wherever they exist."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from compiled import BUILDS, affine_features, differing, needs_compiler, traced
from random_networks import random_network
from torch import nn

import softstair as ss
from softstair.deploy.affine import affine_steps, wide_steps
from softstair.deploy.c import write
from softstair.deploy.thresholds import IntegerFeatures, _floats
from softstair.models.networks import ResidualBlock


def reached(sums: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    assert (np.diff(thresholds) >= 0).all()
    return np.searchsorted(thresholds, sums, side="right")


def test_steps_equal_thresholds_at_every_sum() -> None:
    random = np.random.default_rng(0)
    for trial in range(40):
        channels, steps = int(random.integers(1, 5)), int(random.integers(1, 20))
        least = -random.integers(0, 3000, channels)
        greatest = least + random.integers(0, 6000, channels)
        # Lines from flat to steep: levels that no sum reaches, that all reach, that are skipped.
        slope, start = (
            2.0 ** random.uniform(-3, 9, (channels, 1)),
            random.normal(size=(channels, 1)),
        )
        line = slope * (np.arange(steps) + steps * start)
        thresholds = np.floor(line).astype(np.int64) + int(least.mean() + greatest.mean()) // 2
        result = affine_steps(thresholds, least, greatest, low=trial % 7 - 3)
        assert result is not None
        for c in range(channels):
            sums = np.arange(least[c], greatest[c] + 1)
            values = sums * result.multiplier[c] + result.offset[c]
            assert np.abs(values).max() < 2**31
            level = np.clip(values >> result.shift[c], trial % 7 - 3, trial % 7 - 3 + steps)
            expected = reached(sums, thresholds[c]) + trial % 7 - 3
            np.testing.assert_array_equal(level, expected)


def test_steps_are_found_wherever_they_exist_and_with_the_smallest_shift() -> None:
    random = np.random.default_rng(1)
    sums = np.arange(-6, 7)
    m, b, s = np.meshgrid(np.arange(40), np.arange(-300, 301), np.arange(5), indexing="ij")
    values = np.clip((sums * m[..., None] + b[..., None]) >> s[..., None], 0, 3)
    found = []
    for _ in range(50):
        thresholds = np.sort(random.integers(-8, 10, (1, 3)))
        equal = (values == reached(sums, thresholds[0])).all(-1)
        result = affine_steps(thresholds, np.array([-6]), np.array([6]))
        found.append(bool(equal.any()))
        if equal.any():
            assert result is not None
            assert result.shift[0] == s[equal].min()
        else:
            assert result is None or result.shift[0] >= 5
    assert 5 < sum(found) < 50


def test_thresholds_of_no_line_and_numbers_beyond_32_bits_have_no_steps() -> None:
    ends = (np.array([-100]), np.array([100]))
    assert affine_steps(np.array([[0, 1, 50]]), *ends) is None
    assert affine_steps(np.array([[0, 1, 2]]), *ends) is not None
    assert affine_steps(np.array([[0, 60, 500]]), *ends) is not None  # 500 is never reached
    gaps = np.cumsum(np.where(np.arange(255) % 2, 1000, 1001))[None]
    far = (np.array([-(2**30)]), np.array([2**30]))
    assert affine_steps(gaps, *far) is None


@pytest.mark.parametrize("quantum", [0.03125, 0.0235])
def test_wide_steps_have_the_rounding_of_a_float_network_at_every_sum(quantum: float) -> None:
    """A normalisation, a shortcut and 60 levels in float32, for 20 values of the shortcut."""
    stair = ss.Stair.linear(6, signed=False, quantum=quantum)
    values = tuple((float(np.float32(v * quantum)),) * 2 for v in range(-7, 13))
    floats = _floats(stair, IntegerFeatures("", quantum, -7, 12, values))
    sums = np.arange(-60_000, 60_001)
    scale = np.float32(quantum) / np.array([[700.3], [1234.5]], dtype=np.float32)
    y = sums.astype(np.float32) * scale * np.float32(1.7) + np.float32(300)
    y = y - np.float32(299.877)  # with the rounding of 300
    tables = []
    for value, _ in values:
        index = stair.index(torch.from_numpy(y + np.float32(value))).numpy()
        reaches = index[:, None] >= np.arange(1, 64)[:, None]
        tables.append(np.where(reaches.any(2), sums[reaches.argmax(2)], sums[-1] + 1))
    thresholds, ends = np.stack(tables, 1), (np.array([-60_000] * 2), np.array([60_000] * 2))
    result = wide_steps(thresholds, *ends, *(numbers.numpy() for numbers in floats), low=-5)
    assert result is not None
    assert (quantum == 0.0235) <= len(result.exceptions) < 60
    for c in range(2):
        x = sums * result.multiplier[c] + result.offset[c]
        of_channel = slice(result.starts[c], result.starts[c + 1])
        x[result.exceptions[of_channel] + 60_000] += result.corrections[of_channel]
        assert (np.diff(x) >= 0).all()
        for v in range(20):
            begins = (np.arange(1, 64) - 5 << result.shift) + result.columns
            index = np.searchsorted(begins, x + v * result.row + result.rows[v], side="right")
            np.testing.assert_array_equal(index, reached(sums, thresholds[c, v]))


@needs_compiler
@pytest.mark.parametrize("kind", ["native", pytest.param("portable", marks=pytest.mark.nightly)])
def test_int8_residual_network_is_equal_in_c_and_small(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    body = nn.Sequential(ResidualBlock(1, 3, 1, True), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(nn.Conv2d(1, 1, 3), nn.BatchNorm2d(1), nn.ReLU(), body, nn.Linear(3, 2))
    model(torch.randn(64, 1, 8, 8) * 2)
    features = ss.Stair.linear(8, signed=False, quantum=0.0235)
    int8 = ss.Stair.linear(8, signed=True)
    net = ss.quantise(model, int8, features, skip="4", init="keep", fit="channel").eval()
    integer = ss.deploy.integerise(net, (1, 8, 8), 128, 64.0)
    x = torch.randint(256, (6, 1, 8, 8), dtype=torch.uint8)
    expected = {name: x for name, x in integer.features(x).items() if name != "4"}
    actual = traced(integer, x, tmp_path, kind)
    assert differing(expected, {name: actual[name] for name in expected}) == {}
    text = (tmp_path / "network.c").read_text()
    assert "ss_store_wide" in text
    assert ".exceptions" in text
    assert "ss_store_with_shortcut" not in text
    assert write(integer, tmp_path).flash < 6_000


@pytest.mark.nightly(keep=1)
@needs_compiler
@pytest.mark.parametrize("kind", ["native", "portable", "avx2"])
def test_levels_of_affine_steps_are_equal_in_c(kind: str, tmp_path: Path) -> None:
    assert kind in BUILDS
    builder = affine_features()
    network = builder.network()
    assert differing(builder.results, traced(network, builder.bytes, tmp_path, kind)) == {}
    text = (tmp_path / "network.c").read_text()
    assert text.count("ss_store_affine") == 5
    assert text.count("ss_store_wide") == 2
    assert text.count("ss_store_levels") == 1


def test_constants_of_affine_steps_are_nine_bytes_a_channel(tmp_path: Path) -> None:
    builder = affine_features()
    rows = {row.names[-1]: row.flash[1] for row in write(builder.network(), tmp_path).rows}
    assert rows["first.stair"] == 9 * 10 + 4 * 10  # and the offsets of biased bytes


def test_shifts_of_channels_that_differ_are_not_negative(tmp_path: Path) -> None:
    builder = random_network(57)  # a channel of its last stair needs no shift, another 26
    write(builder.network(), tmp_path)
    text = (tmp_path / "network_weights.h").read_text()
    shifts = re.findall(r"_shifts\[\d+\] = \{([^}]*)\}", text)
    assert shifts
    assert min(int(shift) for line in shifts for shift in re.findall(r"-?\d+", line)) >= 0
