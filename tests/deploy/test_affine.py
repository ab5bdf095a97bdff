"""Affine steps: equal to thresholds at every sum, and found wherever they exist."""

from __future__ import annotations

import numpy as np
from c_networks import affine_features

from softstair.deploy.c.affine import affine_steps
from softstair.deploy.c.program import sources


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
    for _ in range(25):
        thresholds = np.sort(random.integers(-8, 10, (1, 3)))
        equal = (values == reached(sums, thresholds[0])).all(-1)
        result = affine_steps(thresholds, np.array([-6]), np.array([6]))
        found.append(bool(equal.any()))
        if equal.any():
            assert result is not None
            assert result.shift[0] == s[equal].min()
        else:
            assert result is None or result.shift[0] >= 5
    assert 3 < sum(found) < 25


def test_thresholds_of_no_line_and_numbers_beyond_32_bits_have_no_steps() -> None:
    ends = (np.array([-100]), np.array([100]))
    assert affine_steps(np.array([[0, 1, 50]]), *ends) is None
    assert affine_steps(np.array([[0, 1, 2]]), *ends) is not None
    assert affine_steps(np.array([[0, 60, 500]]), *ends) is not None  # 500 is never reached
    far = (np.array([-(2**31)]), np.array([2**31 - 1]))
    doubled = np.repeat(np.arange(40) * 10**8 - 2 * 10**9, 2)[None]
    assert affine_steps(doubled, *far) is None  # two levels at a sum


def test_steps_beyond_32_bits_are_wide() -> None:
    gaps = np.cumsum(np.where(np.arange(255) % 2, 1000, 1001))[None]
    ends = np.array([2**30])
    steps = affine_steps(gaps, -ends, ends, low=-7)
    assert steps is not None
    assert steps.is_wide
    sums = np.concatenate([gaps[0], gaps[0] - 1, [-(2**30), 2**30]])
    levels = np.clip((sums * steps.multiplier + steps.offset) >> steps.shift, -7, 248)
    np.testing.assert_array_equal(levels + 7, reached(sums, gaps[0]))


def test_constants_of_affine_steps_are_nine_bytes_a_channel() -> None:
    texts, plan = sources(affine_features().network(), "network")
    rows = {row.names[-1]: row.flash[1] for row in plan.rows}
    assert rows["first.stair"] == 9 * 10 + 4 * 10  # and the offsets of biased bytes
    text = texts["network.c"]
    counts = [text.count(f"ss_store_{kind}") for kind in ("affine", "rescaled", "levels")]
    assert counts == [4, 3, 1]


def test_shifts_of_channels_differ_where_one_shift_needs_more_than_32_bits() -> None:
    ends = np.array([2**28, 2000])
    steps = affine_steps(np.array([[0, 1], [0, 1001]]), -ends, ends)
    assert steps is not None
    assert 0 <= steps.shift[0] <= 2
    assert steps.shift[1] >= 8
