"""Sums and their stair as one QLinearConv: equal to the thresholds at every sum, in any runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from random_networks import LEVELS, RandomBuilder
from test_onnx import LEVELS as OPTIMISATIONS, assert_equal, run, run_reference

from softstair.deploy import onnx as export
from softstair.deploy.onnx_graph import OnnxGraph, StoredTensor
from softstair.deploy.qlinear_conv import quantised_convs, scales
from softstair.deploy.target import Target

onnx = pytest.importorskip("onnx", reason="onnx is not installed")


def levels_of(sums: np.ndarray, bias: int, scale: float, levels: tuple[int, ...]) -> np.ndarray:
    """What runtimes compute, which round differently; all must agree."""
    wide, narrow = (sums + bias) * scale, (sums + bias).astype(np.float32) * np.float32(scale)
    rounded = [np.rint(wide), np.rint(narrow), np.floor(wide + 0.5), np.ceil(narrow - 0.5)]
    first, *others = (np.clip(result, 0, levels[-1] - levels[0]) + levels[0] for result in rounded)
    for result in others:
        np.testing.assert_array_equal(result, first)
    return first


@pytest.mark.parametrize("name", ["ternary", "sign", "uint4", "uint6"])
def test_scales_equal_thresholds_at_every_sum(name: str) -> None:
    random, levels = np.random.default_rng(0), LEVELS[name]
    solved = 0
    for factor in (1, 8, 15, 64, 127):
        least = -random.integers(0, 3000, 20)
        greatest = least + random.integers(0, 6000, 20)
        # Lines from flat to steep: levels that no sum reaches, that all reach, that are skipped.
        slope, start = 2.0 ** random.uniform(-3, 9, (20, 1)), random.normal(size=(20, 1))
        line = slope * (np.arange(len(levels) - 1) + len(levels) * start)
        thresholds = np.floor(line).astype(np.int64) + int(least.mean() + greatest.mean()) // 2
        bias, scale = scales(levels, thresholds, least, greatest, np.full(20, factor))
        for c in np.flatnonzero(scale):
            sums = np.arange(least[c], greatest[c] + 1)
            expected = np.array(levels)[(sums[:, None] >= thresholds[c]).sum(1)]
            actual = levels_of(factor * sums, bias[c], scale[c], levels)
            np.testing.assert_array_equal(actual, expected)
        solved += np.count_nonzero(scale)
    assert solved > 80


def test_scales_are_found_wherever_they_exist() -> None:
    random, sums, levels = np.random.default_rng(1), np.arange(-6, 7), (-1, 0, 1, 2)
    bias, inverse = np.meshgrid(np.arange(-90, 91), np.arange(0.05, 40, 0.05), indexing="ij")
    values = (3 * sums + bias[..., None]) / inverse[..., None]
    is_clear = (np.abs(values % 1 - 0.5) > 1e-4).all(-1)
    values = np.clip(np.rint(values), 0, 3) - 1
    exists = []
    for _ in range(30):
        thresholds = np.sort(random.integers(-8, 10, (1, 3)))
        expected = np.array(levels)[(sums[:, None] >= thresholds).sum(1)]
        exists.append(bool(((values == expected).all(-1) & is_clear).any()))
        _, scale = scales(levels, thresholds, *np.array([[-6], [6], [3]]))
        assert bool(scale[0] > 0) or not exists[-1]
    assert 5 < sum(exists) < 30


def network(seed: int, shape: tuple[int, ...], zero: int) -> RandomBuilder:
    """A network of which every stair has a scale: all kinds of layers, weights and features."""
    net = RandomBuilder(seed, shape, zero)
    net.layer(
        "first",
        6,
        net.choose("ternary", "sign", "even"),
        LEVELS["ternary"],
        even=True,
        padding=(1, 1),
    )
    net.max_pool("pool", 3, 2, 1)
    net.layer(
        "depthwise",
        6,
        "int4",
        net.choose(LEVELS["sign"], LEVELS["ternary"]),
        even=True,
        padding=(1, 1),
        groups=6,
    )
    net.layer(
        "grouped",
        8,
        "int4",
        LEVELS["ternary"],
        even=True,
        groups=2,
        dilation=(1, 2),
        padding=(0, 2),
        stride=(2, 1),
    )
    if net.choose(True, False):
        net.sum_pool("average")
    net.flatten("flat")
    net.layer("linear", 7, "binary", LEVELS["ternary"], even=True)
    net.scores("last", 4)
    return net


def operators(model: Any) -> list[str]:
    return [node.op_type for node in model.graph.node]


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(("seed", "zero"), [(0, 0), (1, 121), (2, 255), (3, 8)])
def test_quantised_convolutions_are_equal_in_every_runtime(seed: int, zero: int) -> None:
    net = network(seed, (3, 8, 7), zero)
    model, plain = export.model(net.network(), features=True), export.model(net.network())
    assert operators(plain).count("QLinearConv") == 4
    assert not {"ConvInteger", "GreaterOrEqual"} & {*operators(plain)}
    assert operators(plain).count("MatMulInteger") == ("average" in net.nodes)  # its sums alone
    for level in OPTIMISATIONS:
        actual = run(model, net.bytes, level=level)
        assert_equal(net.network(), net.bytes, actual)
        np.testing.assert_array_equal(run(plain, net.bytes, level=level)["class"], actual["class"])
    assert_equal(net.network(), net.bytes[:2], run_reference(model, net.bytes[:2]))


def test_weights_neither_saturate_nor_reach_128() -> None:
    for zero, kind in ((0, "int4"), (121, "ternary"), (0, "even")):
        net = RandomBuilder(0, (4, 6, 6), zero)
        net.bytes.fill_(255)
        net.add(net.nodes["input"])
        net.sum("conv", 6, kind, padding=(1, 1))
        net.steps("stair", LEVELS["ternary"], even=True)
        net.layer("depthwise", 6, kind, LEVELS["ternary"], even=True, groups=6)
        net.flatten("flat")
        net.scores("last", 4)
        convs = quantised_convs(net.network())
        assert [*convs] == ["stair", "depthwise.stair"]
        for conv, largest in zip(convs.values(), (255, 2), strict=True):
            assert conv.weight_kind == "INT8"
            weight = np.abs(conv.node.weight.flatten(1).numpy()).max(1) * conv.factor
            assert weight.max() <= 127
            assert 2 * largest * weight.max() < 2**15
        assert_equal(net.network(), net.bytes, run(export.model(net.network(), True), net.bytes))


def test_layers_without_an_exact_scale_keep_their_thresholds() -> None:
    net = RandomBuilder(0, (3, 6, 6), zero=0)
    net.layer("even", 5, "ternary", LEVELS["uint4"], even=True, padding=(1, 1))
    net.layer("random", 5, "ternary", LEVELS["uint4"], padding=(1, 1))
    net.layer("after", 5, "ternary", LEVELS["ternary"], padding=(1, 1))
    net.sum_pool("average")
    net.flatten("flat")
    net.scores("last", 4)
    assert [*quantised_convs(net.network())] == ["even.stair", "after.stair"]
    model = export.model(net.network(), features=True)
    assert operators(model).count("QLinearConv") == 2
    assert_equal(net.network(), net.bytes, run(model, net.bytes))


def test_large_weights_on_bytes_are_unsigned() -> None:
    """As int8 they could saturate; the factor is 1, and the next layer is in int8 again."""
    net = RandomBuilder(0, (3, 8, 8), zero=121)
    net.layer("first", 6, "int8", LEVELS["ternary"], even=True, padding=(1, 1))
    net.max_pool("pool", 2, 2, 0)
    net.layer("second", 6, "ternary", LEVELS["ternary"], even=True, padding=(1, 1))
    net.flatten("flat")
    net.scores("last", 4)
    convs = quantised_convs(net.network())
    assert {name: conv.weight_kind for name, conv in convs.items()} == {
        "first.stair": "UINT8",
        "second.stair": "INT8",
    }
    model = export.model(net.network(), features=True)
    for level in OPTIMISATIONS:
        assert_equal(net.network(), net.bytes, run(model, net.bytes, level=level))


@pytest.mark.parametrize("kind", ["ternary", "sign"])
def test_deep_layers_on_arm_read_int8_and_others_uint8(kind: str) -> None:
    """One cast changes the type of bytes, and ternary weights are unpacked without wider types."""
    net = RandomBuilder(0, (3, 8, 8), zero=121)
    net.layer("first", 64, kind, LEVELS["ternary"], even=True, padding=(1, 1))
    net.layer("deep", 16, kind, LEVELS["ternary"], even=True, padding=(1, 1))
    net.max_pool("pool", 2, 2, 0)
    net.flatten("flat")
    net.layer("linear", 8, kind, LEVELS["ternary"], even=True)
    net.scores("last", 4)
    convs = quantised_convs(net.network())
    assert [conv.kind for conv in convs.values()] == ["UINT8", "INT8", "UINT8"]
    assert {factor for conv in convs.values() for factor in conv.factor} == {64}
    plain, model = (
        export.model(net.network(), features, target=Target("arm")) for features in (False, True)
    )
    types = [node.attribute[0].i for node in plain.graph.node if node.op_type == "Cast"]
    assert onnx.TensorProto.INT32 not in types
    # Three casts of weights, two of features.
    assert sum(kind in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8) for kind in types) == 5
    for level in OPTIMISATIONS:
        assert_equal(net.network(), net.bytes, run(model, net.bytes, level=level))
    assert_equal(net.network(), net.bytes[:2], run_reference(model, net.bytes[:2]))


@pytest.mark.parametrize(("low", "high", "zero", "moved"), [(0, 2, -128, 128), (-1, 5, 1, 1)])
def test_bytes_keep_their_bits_only_where_products_cannot_saturate(
    low: int, high: int, zero: int, moved: int
) -> None:
    """A processor multiplies the stored byte: 130 in place of 2 is too much for weights of 127."""
    types = ("INT8", "UINT8") if zero < 0 else ("UINT8", "INT8")
    for bits, operators_of, expected in (
        (True, ["Cast"], moved),
        (False, ["Cast", "Add", "Cast"], -low - 128 * (types[1] == "INT8")),
    ):
        graph = OnnxGraph({"x"})
        tensor = StoredTensor("x", low, high, types[0], zero).as_type(graph, types[1], bits=bits)
        assert [node.op_type for node in graph.nodes] == operators_of
        assert (tensor.kind, tensor.zero) == (types[1], expected)


def test_sum_over_all_positions_is_one_product_of_bytes() -> None:
    for flat in (True, False):
        net = RandomBuilder(0, (3, 6, 6), zero=0)
        net.sum("conv", 5, "ternary", padding=(1, 1))
        net.steps("stair", LEVELS["uint4"], even=True)
        net.sum_pool("average")
        if not flat:
            net.layer("pointwise", 4, "ternary", LEVELS["ternary"], padding=(1, 1))
        net.flatten("flat")
        net.scores("last", 4)
        model = export.model(net.network(), features=True)
        plain = operators(export.model(net.network()))
        assert plain.count("MatMulInteger") == 1
        assert "ReduceSum" not in plain
        assert ("Flatten" in plain) is not flat
        assert_equal(net.network(), net.bytes, run(model, net.bytes))
