"""Affine steps: equal to thresholds at every sum, and found wherever they exist."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from c_networks import affine_features, wide_features
from random_networks import random_network
from torch import nn

import softstair as ss
from softstair.deploy import IntegerNetwork, nodes
from softstair.deploy.affine import affine_steps, small_wide_steps
from softstair.deploy.c.program import sources
from softstair.deploy.onnx_graph import OnnxGraph, wide_levels
from softstair.models import ResidualBlock


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
    gaps = np.cumsum(np.where(np.arange(255) % 2, 1000, 1001))[None]
    far = (np.array([-(2**30)]), np.array([2**30]))
    assert affine_steps(gaps, *far) is None


def rounded(
    quantum: float, first: int = -7, is_fused: bool = False, far: int = 60_000
) -> tuple[nodes.Steps, nodes.Sum, np.ndarray]:
    """A bias, a normalisation, a shortcut and 63 thresholds in float32, for 10 shortcuts.

    Returns the stair of two channels, their layer, and its sums, from -``far`` to ``far``. The
    shortcut has another quantum than the levels.
    """
    stair = ss.Stair.linear(6, signed=False, quantum=quantum)
    values = (np.arange(first, first + 10) * 0.83 * quantum).astype(np.float32)
    sums = np.arange(-far, far + 1)
    scale = np.float32(quantum) / np.array([[700.3], [1234.5]], dtype=np.float32)
    bias, factor, addend = np.float32(300), np.float32(1.7), np.float32(-509.877)
    z = sums.astype(np.float32) * scale + bias  # with the rounding of 300
    kind = np.float64 if is_fused else np.float32
    y = (z.astype(kind) * factor.astype(kind) + addend.astype(kind)).astype(np.float32)
    tables = []
    for value in values:
        index = stair.index(torch.from_numpy(y + value)).numpy()
        reaches = index[:, None] >= np.arange(1, 64)[:, None]
        tables.append(np.where(reaches.any(2), sums[reaches.argmax(2)], sums[-1] + 1))
    table, ends = torch.from_numpy(np.stack(tables, 1)), (sums[[0, 0]], sums[[-1, -1]])
    factors = torch.tensor(np.stack([scale[:, 0], [factor] * 2]))
    addends = torch.tensor([[300.0] * 2, [float(addend)] * 2])
    limits = torch.tensor(stair.rounded(torch.float32).thresholds)
    stages = (factors, addends, is_fused)
    floats = nodes.FloatSteps(*stages, torch.from_numpy(values), limits, quantum)
    levels = tuple(range(64))
    steps = nodes.Steps("", ("", ""), 0, 63, table, levels, first, floats=floats)
    layer = nodes.Sum("", ("",), -far, far, torch.ones(2, 1), *map(torch.from_numpy, ends))
    return steps, layer, sums


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("quantum", [0.03125, 0.0235])
def test_wide_steps_have_the_rounding_of_a_float_network_at_every_sum(
    quantum: float, is_fused: bool
) -> None:
    steps, layer, sums = rounded(quantum, is_fused=is_fused)
    result, thresholds = small_wide_steps(steps, layer, low=-5), steps.thresholds.numpy()
    assert result is not None
    for c in range(2):
        y = result.rescaled(sums, c) + result.origin
        assert (np.diff(y) >= 0).all()
        for v in range(10):
            levels = result.levels(y + v * result.row + result.rows[v])
            np.testing.assert_array_equal(levels + 5, reached(sums, thresholds[c, v]))


def test_sums_beyond_24_bits_are_rounded_as_floats() -> None:
    steps, layer, _ = rounded(0.03125)
    result = small_wide_steps(steps, layer, low=0)
    assert result is not None
    alone = replace(result, factors=np.array([[1]]), shifts=0 * result.shifts[:1, :1])
    alone = replace(alone, addends=np.array([[0]]), is_fused=True)
    x = np.random.default_rng(0).integers(-(2**31), 2**31, 10_000)
    np.testing.assert_array_equal(alone.rescaled(x, 0), x.astype(np.float32).astype(np.int64))


def test_stages_that_are_not_those_of_the_thresholds_are_refused() -> None:
    steps, layer, _ = rounded(0.0235, is_fused=True)
    assert steps.floats is not None
    for change in (
        replace(steps.floats, is_fused=False),
        replace(steps.floats, factors=-steps.floats.factors),
        replace(steps.floats, addends=torch.nextafter(steps.floats.addends, torch.tensor(0.0))),
    ):
        assert small_wide_steps(replace(steps, floats=change), layer, low=0) is None
    table = steps.thresholds.clone()
    table[1, 3, 20] += 1  # one threshold of 1,260
    assert small_wide_steps(replace(steps, thresholds=table), layer, low=0) is None


def test_one_of_several_levels_that_begin_at_the_same_sum_is_tested() -> None:
    sums, values, limits = np.arange(-9, 10), torch.arange(0.0, 40, 2), torch.arange(1.0, 40)
    stages = (torch.full((1, 2), 2.0), torch.zeros(1, 2), False)  # each sum skips a level
    floats = nodes.FloatSteps(*stages, values, limits, 1.0)
    row = np.ceil((limits - values[:, None]).numpy() / 2).clip(-9, 10).astype(np.int64)
    levels = tuple(range(40))
    table = torch.from_numpy(row).expand(2, -1, -1)
    steps = nodes.Steps("", ("", ""), 0, 39, table, levels, floats=floats)
    ends = (torch.tensor([end, end]) for end in (-9, 9))
    layer = nodes.Sum("", ("",), -9, 9, torch.ones(2, 1), *ends)
    for v, thresholds in enumerate(row):
        np.testing.assert_array_equal(reached(sums, thresholds), (2 * (sums + v)).clip(0, 39))
    assert small_wide_steps(steps, layer, low=0) is not None
    for value, level in ((0, 3), (10, 31), (19, 37)):
        assert (row[:, level - 1] == row[:, level]).all()
        changed = table.clone()
        changed[1, value, level] += 1
        assert small_wide_steps(replace(steps, thresholds=changed), layer, low=0) is None


@pytest.mark.parametrize(("quantum", "first", "low"), [(0.03125, 2, 0), (0.0235, -7, 3)])
def test_wide_steps_in_onnx_equal_thresholds_at_every_sum(
    quantum: float, first: int, low: int
) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    steps, layer, sums = rounded(quantum, first, is_fused=low > 0)
    graph = OnnxGraph({"sums", "beside", "levels"})
    assert steps.floats is not None
    assert small_wide_steps(steps, layer, low) is not None
    total = wide_levels(graph, steps.floats, "sums", "beside", first, low, (-1, 1))
    graph.apply("Cast", [total], name="levels", to=onnx.TensorProto.UINT8)
    kinds, info = onnx.TensorProto, onnx.helper.make_tensor_value_info
    inputs = [info(name, kinds.INT32, ["N", 2, "S"]) for name in ("sums", "beside")]
    outputs = [info("levels", kinds.UINT8, ["N", 2, "S"])]
    body = onnx.helper.make_graph(graph.nodes, "steps", inputs, outputs, graph.constants)
    opsets = [onnx.helper.make_opsetid("", 18)]
    model = onnx.helper.make_model(body, opset_imports=opsets, ir_version=8)
    runner = ort.InferenceSession(model.SerializeToString())
    for v, row in enumerate(steps.thresholds.numpy().swapaxes(0, 1)):
        x = np.broadcast_to(sums.astype(np.int32), (1, 2, len(sums)))
        (levels,) = runner.run(None, {"sums": x, "beside": np.full_like(x, first + v)})
        for channel, thresholds in zip(levels[0], row, strict=True):
            np.testing.assert_array_equal(channel, low + reached(sums, thresholds))


def test_levels_that_begin_more_than_a_quantum_late_keep_their_thresholds() -> None:
    net = wide_features()
    kept = {
        node.name: small_wide_steps(node, net.nodes["deep"], 0)
        for node in net.nodes.values()
        if isinstance(node, nodes.Steps) and len(node.inputs) == 2
    }
    assert [name for name, steps in kept.items() if steps is None] == ["too late"]


def residual_network(quantum: float, bits: int = 8) -> IntegerNetwork:
    """A residual block of three channels, as of ResNet-8."""
    torch.manual_seed(0)
    body = nn.Sequential(ResidualBlock(1, 3, 1, True), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(nn.Conv2d(1, 1, 3), nn.BatchNorm2d(1), nn.ReLU(), body, nn.Linear(3, 2))
    model(torch.randn(64, 1, 8, 8) * 2)
    features = ss.Stair.linear(bits, signed=False, quantum=quantum)
    weights = ss.Stair.linear(bits, signed=True)
    net = ss.quantise(
        model, weights, features, skip="4", options=ss.QuantiseOptions(init="keep", fit="channel")
    ).eval()
    return ss.deploy.integerise(net, (1, 8, 8), 128, 64.0)


def test_constants_of_affine_steps_are_nine_bytes_a_channel() -> None:
    texts, plan = sources(affine_features().network(), "network")
    rows = {row.names[-1]: row.flash[1] for row in plan.rows}
    assert rows["first.stair"] == 9 * 10 + 4 * 10  # and the offsets of biased bytes
    text = texts["network.c"]
    counts = [text.count(f"ss_store_{kind}") for kind in ("affine", "wide", "levels")]
    assert counts == [5, 2, 1]


def test_shifts_of_channels_that_differ_are_not_negative() -> None:
    builder = random_network(57)  # a channel of its last stair needs no shift, another 26
    text = sources(builder.network(), "network")[0]["network_weights.h"]
    shifts = re.findall(r"_shifts\[\d+\] = \{([^}]*)\}", text)
    assert shifts
    assert min(int(shift) for line in shifts for shift in re.findall(r"-?\d+", line)) >= 0
