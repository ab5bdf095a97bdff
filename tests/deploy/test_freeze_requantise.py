"""Multipliers and shifts of random lines, against fractions and against float32."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from evaluator import gemmlowp
from hypothesis import given, strategies as st

from softstair.deploy.nodes import Requantise, Rounding
from softstair.deploy.requantise import Line, _agreeing, requantise

CHANNELS = 12
RANGES = [(0, 255), (-128, 127), (-7, 7), (0, 15)]
MOVED = 2.0**-9
Array = np.ndarray[Any, Any]


def requantised(
    slope: Any,
    offset: Any,
    reach: int,
    ends: tuple[int, int],
    rounding: Rounding = "once",
    beside: Any = None,
    other: int = 0,
) -> Requantise:
    """The node of a line, for sums from -reach to reach, and of a second input up to ``other``."""
    slope, offset = torch.as_tensor(slope).double(), torch.as_tensor(offset).double()
    empty = torch.zeros(len(slope), dtype=torch.int32)
    inputs = ("x",) if beside is None else ("x", "y")
    node = Requantise("n", inputs, *ends, empty, empty, empty, empty, None, None, 1, rounding)
    bound = torch.full((len(slope),), reach)
    second = None if beside is None else torch.as_tensor(beside).double()
    return requantise(node, Line(slope, offset), -bound, bound, second, other)


def lines(seed: int, reach: int, ends: tuple[int, int]) -> tuple[Array, Array]:
    """Slopes of either sign from 1e-6 to 100, or such that most levels are reached; offsets."""
    random = np.random.default_rng(seed)
    span = ends[1] - ends[0]
    free, fitting = 10 ** random.uniform(-6, 2, CHANNELS), 2 ** random.uniform(-3, 2, CHANNELS)
    slope = np.where(random.integers(4, size=CHANNELS) > 0, fitting * span / reach, free)
    slope = slope * np.where(random.integers(4, size=CHANNELS) > 0, 1, -1)
    offset = random.uniform(ends[0] - 20, ends[1] + 20, CHANNELS)
    return slope, np.where(random.integers(3, size=CHANNELS) > 0, offset, 0.0)


def sums(node: Requantise, reach: int, seed: int) -> Array:
    """Sums (N, CHANNELS) at which levels change, some more, and both ends."""
    random = np.random.default_rng(seed)
    multiplier = node.multiplier.numpy().astype(float)
    unit = np.where(multiplier == 0, 1, multiplier) * 2.0 ** -node.shift.numpy()
    levels = random.integers(node.low, node.high + 1, (30, CHANNELS)) - 0.5
    factor = np.where(node.factor.numpy() == 0, 1, node.factor.numpy())
    steps = (levels / unit - node.bias.numpy()) / factor
    some = random.integers(-reach, reach + 1, (8, CHANNELS))
    ends = np.array([[-reach] * CHANNELS, [reach] * CHANNELS])
    near = [np.rint(steps + d).clip(-reach, reach) for d in (-1, 0, 1)]
    return np.concatenate([*near, some, ends]).astype(np.int64)


def constants(node: Requantise, slope: Array, offset: Array, reach: int) -> Array:
    """What is neglected of channels that are constants, since 30 bits cannot hold their offset in
    units of the sum."""
    is_constant = node.factor.numpy() == 0
    assert (np.abs(offset / slope)[is_constant] >= 2.0**29).all()
    return np.where(is_constant, np.abs(slope) * reach, 0)


SETTINGS = dict(seed=st.integers(0, 10**6), bits=st.floats(4, 28), ends=st.sampled_from(RANGES))


@given(**SETTINGS)
def test_levels_are_the_exact_rounding_of_a_line_near_the_one_asked_for(
    seed: int, bits: float, ends: tuple[int, int]
) -> None:
    reach = int(2**bits)
    slope, offset = lines(seed, reach, ends)
    node = requantised(slope, offset, reach, ends)
    x = sums(node, reach, seed)
    found = node.run(torch.tensor(x).int()).numpy()
    for c in range(CHANNELS):
        factor, bias, multiplier, shift = (
            int(t[c]) for t in (node.factor, node.bias, node.multiplier, node.shift)
        )
        if factor:
            own = factor * multiplier / 2.0**shift
            assert abs(own - slope[c]) <= abs(slope[c]) * (MOVED + 2.0**-20)
        for s, y in zip(x[:, c].tolist(), found[:, c].tolist(), strict=True):
            exact = Fraction((s * factor + bias) * multiplier, 2**shift) + Fraction(1, 2)
            assert y == min(max(exact.__floor__(), ends[0]), ends[1])
        # The offset is off by half a unit of the bias, and by what the multiplier was moved.
        real = (x[:, c] * slope[c] + offset[c]).clip(*ends)
        unit = abs(slope[c]) / max(factor, 1)
        room = 0.5 + 0.51 * unit + MOVED * np.maximum(np.abs(real), abs(offset[c]))
        constant = constants(node, slope, offset, reach)[c]
        assert (np.abs(found[:, c] - real) <= room + constant).all()


@given(**SETTINGS)
def test_double_is_the_arithmetic_of_gemmlowp(
    seed: int, bits: float, ends: tuple[int, int]
) -> None:
    reach = int(2**bits)
    slope, offset = lines(seed, reach, ends)
    slope = np.sign(slope) * np.minimum(np.abs(slope), 2.0**29 / (reach + np.abs(offset / slope)))
    node = requantised(slope, offset, reach, ends, "double")
    assert (node.multiplier.abs() >= 2**30).all()
    assert (node.shift >= 31).all()
    x = sums(node, reach, seed)
    found = node.run(torch.tensor(x).int()).numpy()
    v = x * node.factor.numpy() + node.bias.numpy()
    exponent = node.shift.numpy().astype(np.int64) - 31
    expected = gemmlowp(v, node.multiplier.numpy().astype(np.int64), exponent)
    np.testing.assert_array_equal(found, expected.clip(*ends))
    real = (x * slope + offset).clip(*ends)
    # Half a level, half a unit of the bias, and half a step of what is rounded first.
    unit = np.abs(slope) / node.factor.numpy().clip(1)
    room = 0.501 + 0.51 * unit + np.where(exponent > 0, 0.5 ** (exponent + 1.0), 0)
    assert (np.abs(found - real) <= room + constants(node, slope, offset, reach)).all()
    # Units are finer than an eighth where 30 bits hold the sums in them.
    fits = np.maximum(np.abs(slope) * 2**4, 1) * (reach + np.abs(offset / slope)) < 2**30
    assert (unit[fits] <= 2.0**-3).all()


@given(seed=st.integers(0, 10**6), bits=st.floats(4, 15), ends=st.sampled_from(RANGES))
def test_float32_gives_the_same_level_at_every_sum(
    seed: int, bits: float, ends: tuple[int, int]
) -> None:
    """clamp(rint(float32(v)·float32(multiplier/2^shift))), exhaustively."""
    reach = int(2**bits)
    slope, offset = lines(seed, reach, ends)
    node = requantised(slope, offset, reach, ends)
    own = _agreeing(node, *(torch.full((CHANNELS,), end) for end in (-reach, reach)))
    assert own.tolist() == agree_in_float32(node, reach).tolist()


def agree_in_float32(node: Requantise, reach: int) -> Array:
    """Whether a float32 product gives the same levels at every sum of a channel, (C,)."""
    x = np.arange(-reach, reach + 1)[:, None].repeat(len(node.factor), 1)
    v = x * node.factor.numpy().astype(np.int64) + node.bias.numpy()
    scale = (node.multiplier.numpy() * 2.0 ** -node.shift.numpy()).astype(np.float32)
    levels = np.rint(v.astype(np.float32) * scale).clip(node.low, node.high)
    return (levels == node.run(torch.tensor(x).int()).numpy()).all(0)


@pytest.mark.parametrize("bits", [12, pytest.param(17, marks=pytest.mark.nightly)])
def test_multipliers_are_found_for_nearly_every_channel(bits: int) -> None:
    """Channels as training leaves them: sums that spread over all levels of 8 bits."""
    random, found, reach = np.random.default_rng(0), [], 2**bits
    for _ in range(10):
        slope = 255 / reach * 2 ** random.uniform(-2, 2, CHANNELS)
        node = requantised(slope, random.uniform(-40, 200, CHANNELS), reach, (0, 255))
        found += agree_in_float32(node, reach).tolist()
    assert sum(found) >= 0.97 * len(found)


@given(
    seed=st.integers(0, 10**6),
    bits=st.floats(4, 22),
    small=st.sampled_from([1.0, 1e-3, 1e-7, 0.0]),
    ends=st.sampled_from([*RANGES, (-(2**15), 2**15 - 1)]),
)
def test_a_second_input_and_the_offset_keep_their_size(
    seed: int, bits: float, small: float, ends: tuple[int, int]
) -> None:
    """Also in channels that hardly depend on their sum, as after a norm with a weight of 1e-6."""
    random, reach = np.random.default_rng(seed), int(2**bits)
    slope = 255 / reach * 2 ** random.uniform(-3, 2, CHANNELS)
    slope = slope * np.where(random.integers(2, size=CHANNELS), small, 1.0)
    slope = slope * np.where(random.integers(2, size=CHANNELS), 1, -1)
    offset, other = random.uniform(-300, 300, CHANNELS), int(random.choice([1, 15, 255, 30000]))
    beside = 10 ** random.uniform(-2, 1, CHANNELS) * np.where(random.integers(2), 1, -1)
    node = requantised(slope, offset, reach, ends, "once", beside, other)
    x = random.integers(-reach, reach + 1, (200, CHANNELS))
    x[100:] = (-offset / np.where(slope == 0, 1e-9, slope)).clip(-reach, reach)
    y = random.integers(-other, other + 1, (200, CHANNELS))
    found = node.run(torch.tensor(x).int(), torch.tensor(y).int()).numpy()
    real = x * slope + y * beside + offset
    error = np.abs(found - real.clip(*ends)) - 0.5
    shift = node.shift.numpy()
    assert (error <= 2.0**-shift * (reach + other + 1)).all()
    # The largest term has 20 bits behind the point, or as many as 2⁵¹ and multipliers of 30 leave.
    size = np.maximum(np.abs(slope) * reach, np.maximum(np.abs(beside) * other, np.abs(offset)))
    scale = np.maximum(np.abs(slope), np.abs(beside))
    assert (
        shift >= np.minimum(49 - np.log2(size), 28 - np.log2(scale)).clip(0, 50).astype(int)
    ).all()


def test_lines_without_a_form_raise() -> None:
    for slope, offset in ((np.nan, 0.0), (1.0, np.inf)):
        with pytest.raises(ArithmeticError, match="not finite"):
            requantised([slope], [offset], 100, (0, 255))
    with pytest.raises(ArithmeticError, match="too large"):
        requantised([2.0**8], [0.0], 2**29, (0, 255), "double")
