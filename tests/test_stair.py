"""The hard quantiser against sums, searchsorted and the paper's closed forms."""

from __future__ import annotations

import copy
import json
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import oracle
from softstair import Stair

pytestmark = pytest.mark.quick

NAMED = {
    "heaviside": Stair.heaviside(),
    "sign": Stair.sign(quantum=0.3),
    "ternary": Stair.ternary(quantum=0.07),
    "int4 midpoint": Stair.linear(4, signed=True, quantum=0.07, thresholds="midpoint"),
    "uint4 floor": Stair.linear(4, quantum=0.07, thresholds="floor"),
    "uint8": Stair.linear(8, quantum=0.013, thresholds="midpoint"),
    "arbitrary": Stair([-3.0, 0.1, 0.2, 7.7], [-1.3, 0.35, 11.1]),
}


@given(oracle.stairs(), st.sampled_from(oracle.DTYPES), st.integers(0, 99))
def test_equals_the_sum_of_steps(shape, dtype, seed):
    """index counts thresholds at or below x, stair(x) is the level there, in every dtype."""
    levels, thresholds = shape
    stair = Stair(levels, thresholds)
    x = oracle.points(levels, thresholds, 0.0, 1.0, dtype, seed)
    q, t, v = oracle.rounded(levels, dtype), oracle.compared(thresholds, dtype), oracle.numpy(x)
    known = ~np.isnan(v)
    y, k = stair(x), stair.index(x)
    assert y.dtype == dtype
    assert k.dtype == torch.int64
    assert len(stair) == len(levels)
    np.testing.assert_array_equal(oracle.numpy(y), oracle.hard(v, q, t))
    np.testing.assert_array_equal(k.numpy()[known], oracle.index(v[known], t))
    np.testing.assert_array_equal(k.numpy()[known], np.searchsorted(t, v[known], side="right"))


def test_named_stairs_have_the_levels_of_the_paper():
    """Heaviside, sign, ternary and linear stairs, by their definition."""
    assert Stair.heaviside() == Stair((0.0, 1.0), (0.0,))
    assert Stair.sign() == Stair((-1.0, 1.0), (0.0,))
    assert Stair.ternary() == Stair((-1.0, 0.0, 1.0), (-0.5, 0.5))
    two = Stair.linear(2, signed=True, quantum=0.5, thresholds="floor")
    assert (two.levels, two.thresholds) == ((-1.0, -0.5, 0.0, 0.5), (-0.5, 0.0, 0.5))
    assert two.quantum == 0.5
    half = Stair.linear(2, quantum=2.0)
    assert half == Stair.linear(2, quantum=2.0, thresholds="midpoint")
    assert (half.levels, half.thresholds) == ((0.0, 2.0, 4.0, 6.0), (1.0, 3.0, 5.0))
    small = Stair.ternary(quantum=0.07)
    np.testing.assert_allclose(small.levels, (-0.07, 0, 0.07), rtol=1e-15)
    np.testing.assert_allclose(small.thresholds, (-0.035, 0.035), rtol=1e-15)
    assert Stair.heaviside(quantum=3.0).levels == (0.0, 3.0)
    assert Stair.sign(quantum=3.0).levels == (-3.0, 3.0)
    assert Stair((0, 5), (1,)).quantum == 1.0


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("bits", range(1, 9))
def test_linear_is_floor_and_clip(bits, signed):
    """eps clip(floor(x / eps), z, z + K - 1), and the same of x + eps / 2 for midpoints."""
    z = -(2 ** (bits - 1)) if signed else 0
    x = torch.arange(-600, 600) / 2 + torch.tensor([[0.0], [0.25]])
    for quantum in (1.0, 0.25):
        clip = lambda v: quantum * v.floor().clip(z, z + 2**bits - 1)  # noqa: B023
        floor = Stair.linear(bits, signed=signed, quantum=quantum, thresholds="floor")
        midpoint = Stair.linear(bits, signed=signed, quantum=quantum, thresholds="midpoint")
        assert len(floor) == len(midpoint) == 2**bits
        torch.testing.assert_close(floor(quantum * x), clip(x), rtol=0, atol=0)
        torch.testing.assert_close(midpoint(quantum * x), clip(x + 0.5), rtol=0, atol=0)


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_channels_have_their_own_quantum(axis, dtype):
    """Channel c is the stair of quantum[c], thresholds in the upper bin; the rest in quanta."""
    quantum = (0.07, 1.0, 2.5)
    stair = Stair.linear(3, signed=True, quantum=quantum, thresholds="midpoint", axis=axis)
    assert stair.quantum == quantum
    assert stair.axis == axis
    assert len(stair) == 8
    assert stair.levels == tuple(map(float, range(-4, 4)))
    assert stair.thresholds == tuple(k + 0.5 for k in range(-4, 3))
    rows = [torch.tensor([q * t for t in stair.thresholds], dtype=torch.float64) for q in quantum]
    noise = torch.randn(3, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    table = torch.cat([torch.stack(rows), 3 * noise], 1).to(dtype)
    layout = table if axis in (0, -2) else table.T
    y, k = stair(layout), stair.index(layout)
    y, k = (y, k) if axis in (0, -2) else (y.T, k.T)
    for c, q in enumerate(quantum):
        levels = oracle.rounded([q * v for v in stair.levels], dtype)
        thresholds = oracle.compared([q * v for v in stair.thresholds], dtype)
        v = oracle.numpy(table[c])
        np.testing.assert_array_equal(oracle.numpy(y[c]), oracle.hard(v, levels, thresholds))
        np.testing.assert_array_equal(k[c].numpy(), oracle.index(v, thresholds))
    image = torch.randn(2, 3, 4, 5).to(dtype)
    spatial = Stair.linear(3, signed=True, quantum=quantum, thresholds="midpoint", axis=1)
    for c, q in enumerate(quantum):
        one = Stair.linear(3, signed=True, quantum=q, thresholds="midpoint")
        torch.testing.assert_close(spatial(image)[:, c], one(image[:, c]), rtol=0, atol=0)


def test_shapes_layouts_and_extremes():
    """Empty, 0-d, strided and channels-last tensors; infinities go to the ends, NaN stays."""
    stair = NAMED["uint4 floor"]
    assert stair(torch.empty(0, 3)).shape == stair.index(torch.empty(0, 3)).shape == (0, 3)
    assert stair(torch.tensor(0.14)).shape == ()
    x = torch.randn(2, 3, 8, 8)
    for view in (x.to(memory_format=torch.channels_last), x.transpose(1, 3), x[..., ::2], x[0, 1]):
        expected = stair(view.contiguous())
        torch.testing.assert_close(stair(view), expected, rtol=0, atol=0)
    y = stair(torch.tensor([math.inf, -math.inf, 1e30, -1e30, math.nan]))
    assert y[:4].tolist() == [y.new_tensor(stair.levels[k]).item() for k in (15, 0, 15, 0)]
    assert y[4].isnan()


@pytest.mark.parametrize(
    "stair", [*NAMED.values(), Stair.ternary(quantum=(0.1, 0.2), axis=1)], ids=str
)
def test_is_a_value(stair):
    """Hashable, equal to its copies, through JSON and pickle."""
    text = json.dumps(stair.to_json(), allow_nan=False)
    for twin in (Stair.from_json(json.loads(text)), pickle.loads(pickle.dumps(stair))):
        assert twin == stair
        assert hash(twin) == hash(stair)
        assert (twin.levels, twin.quantum) == (stair.levels, stair.quantum)
    assert copy.deepcopy(stair) is stair
    assert all(isinstance(v, float) for v in (*stair.levels, *stair.thresholds))


def test_equality_tells_stairs_apart():
    """Levels, thresholds, quantum and axis all count; lists and tuples do not differ."""
    assert Stair([0, 1], [0]) == Stair((0.0, 1.0), (0.0,))
    assert Stair.sign(quantum=[1, 2]) == Stair.sign(quantum=(1.0, 2.0), axis=0)
    different = [
        Stair.heaviside(),
        Stair.sign(),
        Stair((0, 1), (0.5,)),
        Stair((0, 1), (0,), quantum=2.0),
        Stair.ternary(quantum=(1.0, 2.0), axis=0),
        Stair.ternary(quantum=(1.0, 2.0), axis=1),
        Stair.ternary(quantum=(1.0, 3.0), axis=1),
    ]
    assert len(set(different)) == len(different)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Stair((0, 1, 1), (0, 1)), ["levels", "1"]),
        (lambda: Stair((0, 1, 2), (1, 1)), ["thresholds"]),
        (lambda: Stair((0, 1, 2), (1,)), ["thresholds", "1"]),
        (lambda: Stair((0,), ()), ["levels"]),
        (lambda: Stair((0, math.nan), (0,)), ["levels", "nan"]),
        (lambda: Stair((0, 1), (math.inf,)), ["thresholds", "inf"]),
        (lambda: Stair((0, 1), (0,), quantum=0.0), ["quantum", "0"]),
        (lambda: Stair((0, 1), (0,), quantum=math.nan), ["quantum", "nan"]),
        (lambda: Stair((0, 1), (0,), quantum=(1.0, -2.0), axis=0), ["quantum", "-2"]),
        (lambda: Stair((0, 1), (0,), quantum=(), axis=0), ["quantum"]),
        (lambda: Stair((0, 1), (0,), quantum=1.0, axis=1), ["axis", "1"]),
        (lambda: Stair((0, 1), (0,), quantum=(1.0, 2.0), axis=0.5), ["axis", "0.5"]),
        (lambda: Stair.linear(0), ["bits", "0"]),
        (lambda: Stair.linear(2.5), ["bits", "2.5"]),
        (lambda: Stair.linear(4, "unsigned"), ["signed", "unsigned", "True or False"]),
        (lambda: Stair.linear(2, thresholds="round"), ["thresholds", "round", "floor", "midpoint"]),
        (lambda: Stair.from_json({"levels": [1, 0], "thresholds": [0]}), ["levels"]),
        (lambda: Stair.ternary(quantum=(1.0, 2.0), axis=1)(torch.zeros(2, 3)), ["2", "3"]),
    ],
)
def test_nonsense_is_refused_in_a_sentence(call, words):
    """Every bad stair names its parameter and what was given."""
    oracle.refuses(call, *words)


def test_levels_on_a_line_that_begins_with_a_fraction() -> None:
    """n + first is rounded as well: what comes out is a level, to the last bit."""
    stair = Stair((-8.30717215417489, -3.9789984411076684), (22.391573443165115,))
    x = torch.tensor([30.0, 10.0])
    assert stair(x).tolist() == list(reversed(stair.rounded(torch.float32).levels))
