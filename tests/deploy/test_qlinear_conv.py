"""Lines: sums and their stair as one QLinearConv, equal to the levels at every sum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from frozen_networks import Builder
from random_networks import LEVELS
from test_onnx import (
    OPENVINO,
    assert_answers_equal,
    assert_equal,
    assert_right,
    deep,
    operators,
    properties,
    run,
    run_reference,
)

from softstair.deploy import nodes, onnx as export
from softstair.deploy.nodes import ExportError, Requantise
from softstair.deploy.onnx_graph import OnnxGraph, StoredTensor
from softstair.deploy.onnx_levels import requantisation_line, scales, thresholds
from softstair.deploy.qlinear_conv import quantised_convs
from softstair.deploy.target import HERE, Target

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
        table = np.floor(line).astype(np.int64) + int(least.mean() + greatest.mean()) // 2
        bias, scale = scales(levels, table, least, greatest, np.full(20, factor))
        for c in np.flatnonzero(scale):
            sums = np.arange(least[c], greatest[c] + 1)
            expected = np.array(levels)[(sums[:, None] >= table[c]).sum(1)]
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
        table = np.sort(random.integers(-8, 10, (1, 3)))
        expected = np.array(levels)[(sums[:, None] >= table).sum(1)]
        exists.append(bool(((values == expected).all(-1) & is_clear).any()))
        _, scale = scales(levels, table, *np.array([[-6], [6], [3]]))
        assert bool(scale[0] > 0) or not exists[-1]
    assert 5 < sum(exists) < 30


@pytest.mark.parametrize("rounding", ["once", "double"])
def test_requantisations_have_a_line_only_where_it_is_right_at_every_sum(
    rounding: nodes.Rounding,
) -> None:
    random, found = np.random.default_rng(0), []
    for _ in range(150):
        half, bits = int(2 ** random.uniform(4, 15)), int(random.choice([6, 16, 24]))
        sign, whole = int(random.choice([-1, 1])), 2 ** (31 if rounding == "double" else bits)
        multiplier = sign * int(random.integers(whole // 2, whole))
        shift = round(np.log2(half * abs(multiplier) / 100))
        if rounding == "double" and (shift < 31 or sign < 0):
            continue
        numbers = (1, int(random.integers(-50, 50)), multiplier, shift)
        rows = (torch.tensor([number], dtype=torch.int32) for number in numbers)
        node = Requantise("a", ("x",), -128, 127, *rows, rounding=rounding)
        low, high = torch.tensor([-half]), torch.tensor([half + 3])
        sums = torch.arange(-half, half + 4)
        expected = node.run(sums[None, None])[0, 0]
        y = (sums + numbers[1]).float() * torch.tensor(multiplier * 2.0**-shift).float()
        is_right = torch.equal(y.round().clamp(-128, 127).int(), expected)
        found.append(is_right)
        assert (requantisation_line(node, low, high) is not None) == is_right
        direction, table = thresholds(node, low, high)
        reached = (direction[0] * sums[:, None] >= table[0]).sum(1) - 128
        assert torch.equal(reached.int(), expected)
    assert 5 < sum(found) < len(found) - 5


def network(seed: int, shape: tuple[int, ...], zero: int) -> Builder:
    """A network of which every stair has a scale: all kinds of layers, weights and features."""
    net = Builder(seed, shape, zero)
    kind = net.choose("ternary", "sign", "even")
    net.layer("first", 6, kind, LEVELS["ternary"], even=True, padding=(1, 1))
    net.max_pool("pool", 3, 2, 1)
    stair = net.choose(LEVELS["sign"], LEVELS["ternary"])
    net.layer("depthwise", 6, "int4", stair, even=True, padding=(1, 1), groups=6)
    windows = {"dilation": (1, 2), "padding": (0, 2), "stride": (2, 1)}
    net.layer("grouped", 8, "int4", LEVELS["ternary"], even=True, groups=2, **windows)
    if net.choose(True, False):
        net.sum_pool("average")
    net.flatten("flat")
    net.layer("linear", 7, "binary", LEVELS["ternary"], even=True)
    net.head()
    return net


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(("seed", "zero"), [(0, 0), (1, 121), (2, 255), (3, 8)])
def test_quantised_convolutions_are_equal_in_every_runtime(seed: int, zero: int) -> None:
    net = network(seed, (3, 8, 7), zero)
    model, plain = assert_right(net.network(), net.bytes), export.model(net.network())
    assert operators(plain).count("QLinearConv") == 4
    assert not {"ConvInteger", "GreaterOrEqual"} & {*operators(plain)}
    assert_answers_equal(net.network(), net.bytes, run(plain, net.bytes))
    assert_equal(net.network(), net.bytes[:2], model, run_reference(model, net.bytes[:2]))


@pytest.mark.parametrize(
    ("levels", "groups", "times", "copies"),
    [("uint4", 4, 17, 1), ("uint4", 1, 17, 1), ("uint6", 1, 1, 2), ("uint4 of -8", 1, 17, 1)],
)
def test_wide_weights_read_features_in_finer_units(
    levels: str, groups: int, times: int, copies: int
) -> None:
    """Multiplied by 17, or joined to themselves; else their layers have no QLinearConv."""
    seen = set()
    for seed in range(4):
        net = Builder(seed, (3, 6, 6), zero=121)
        features = tuple(range(-8, 8)) if levels.endswith("-8") else LEVELS[levels]
        net.layer("first", 4, "ternary", features, even=True, padding=(1, 1))
        stair = LEVELS["uint4"]
        net.layer("wide", 8, "int8", stair, even=True, padding=(1, 1), groups=groups)
        network = net.head()
        if conv := quantised_convs(network).get("wide.stair"):
            seen.add((conv.times, conv.copies))
        model = assert_right(network, net.bytes)
        assert_equal(network, net.bytes[:2], model, run_reference(model, net.bytes[:2]))
    assert (times, copies) in seen


def test_sequences_and_requantisations_are_quantised_convolutions() -> None:
    net = Builder(0, (2, 30))
    net.sum("first.sum", 4, "int4", kernel=5, padding=(2,))
    net.requantise("first", factor=2, significant=7)
    net.sum("second.sum", 4, "ternary", stride=(2,))
    net.requantise("second", 0, 15, factor=2, significant=7)
    model = assert_right(net.head(), net.bytes)
    assert operators(model).count("QLinearConv") == 2


def test_weights_neither_saturate_nor_reach_128() -> None:
    for zero, kind in ((0, "int4"), (121, "ternary"), (0, "even")):
        net = Builder(0, (4, 6, 6), zero)
        net.bytes.fill_(255)
        net.add(net.nodes["input"])
        net.sum("conv", 6, kind, padding=(1, 1))
        net.steps("stair", LEVELS["ternary"], even=True)
        net.layer("depthwise", 6, kind, LEVELS["ternary"], even=True, groups=6)
        net.head()
        convs = quantised_convs(net.network())
        assert [*convs] == ["stair", "depthwise.stair"]
        for conv, largest in zip(convs.values(), (255, 2), strict=True):
            assert conv.weight_kind == "INT8"
            weight = conv.node.weight.flatten(1).numpy().astype(int)
            weight = np.abs(weight).max(1) * conv.line.factor
            assert weight.max() <= 127
            assert 2 * largest * weight.max() < 2**15
        assert_right(net.network(), net.bytes)


def test_layers_without_an_exact_scale_keep_their_thresholds() -> None:
    net = Builder(0, (3, 6, 6))
    net.layer("even", 5, "ternary", LEVELS["uint4"], even=True, padding=(1, 1))
    net.layer("random", 5, "ternary", LEVELS["uint4"], padding=(1, 1))
    net.layer("after", 5, "ternary", LEVELS["ternary"], padding=(1, 1))
    net.sum_pool("average")
    net.head()
    assert [*quantised_convs(net.network())] == ["even.stair", "after.stair"]
    assert operators(assert_right(net.network(), net.bytes)).count("QLinearConv") == 2


def test_large_weights_on_bytes_are_unsigned() -> None:
    """As int8 they could saturate; the factor is 1, and the next layer is in int8 again."""
    net = Builder(0, (3, 8, 8), zero=121)
    net.layer("first", 6, "int8", LEVELS["ternary"], even=True, padding=(1, 1))
    net.max_pool("pool", 2, 2, 0)
    net.layer("second", 6, "ternary", LEVELS["ternary"], even=True, padding=(1, 1))
    net.head()
    convs = quantised_convs(net.network())
    assert {name: conv.weight_kind for name, conv in convs.items()} == {
        "first.stair": "UINT8",
        "second.stair": "INT8",
    }
    assert_right(net.network(), net.bytes)


@pytest.mark.parametrize("kind", ["ternary", "sign"])
def test_deep_layers_on_arm_read_int8_and_others_uint8(kind: str) -> None:
    """One cast changes the type of bytes, and ternary weights are unpacked without wider types."""
    net = Builder(0, (3, 8, 8), zero=121)
    net.layer("first", 64, kind, LEVELS["ternary"], even=True, padding=(1, 1))
    net.layer("deep", 16, kind, LEVELS["ternary"], even=True, padding=(1, 1))
    net.max_pool("pool", 2, 2, 0)
    net.flatten("flat")
    net.layer("linear", 8, kind, LEVELS["ternary"], even=True)
    net.head()
    convs = quantised_convs(net.network())
    assert [conv.kind for conv in convs.values()] == ["UINT8", "INT8", "UINT8"]
    assert {factor for conv in convs.values() for factor in conv.line.factor} == {64}
    plain = export.model(net.network(), Target("arm"))
    casts = [node for node in plain.graph.node if node.op_type == "Cast"]
    types = [node.attribute[0].i for node in casts if "last" not in node.name]
    assert onnx.TensorProto.INT32 not in types
    # Three casts of weights, two of features.
    assert sum(each in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8) for each in types) == 5
    model = assert_right(net.network(), net.bytes, Target("arm"))
    assert_equal(net.network(), net.bytes[:2], model, run_reference(model, net.bytes[:2]))


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
        graph = OnnxGraph(deep().network())
        tensor = StoredTensor("x", low, high, types[0], zero).as_type(graph, types[1], bits=bits)
        assert [node.op_type for node in graph.nodes] == operators_of
        assert (tensor.kind, tensor.zero) == (types[1], expected)


@pytest.mark.parametrize("even", [True, False])
def test_stairs_of_features_are_lines_or_comparisons(even: bool) -> None:
    """Bytes that a shortcut adds have a stair of their own before weights read them."""
    net = Builder(0, (3, 6, 6))
    net.sum("sum", 5, "ternary", padding=(1, 1))
    net.requantise("bytes", 0, 255)
    net.steps("stair", LEVELS["uint4"], even=even)
    model = assert_right(net.head(), net.bytes)
    assert ("GreaterOrEqual" in operators(model)) is not even


def openvino_results(model: Any, x: torch.Tensor) -> dict[str, np.ndarray]:
    openvino = pytest.importorskip("openvino", reason="openvino is not installed")
    read = openvino.Core().read_model(model.SerializeToString())
    compiled = openvino.Core().compile_model(read, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    results = compiled({"bytes": x.numpy()})
    return {name: results[port] for port in compiled.outputs for name in port.get_names()}


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(8))
def test_openvino_reads_its_own_files_right(seed: int) -> None:
    builder = network(seed, (3, 8, 7), 0) if seed else deep()
    model = export.model(builder.network(), OPENVINO, trace=True)
    assert_equal(builder.network(), builder.bytes, model, openvino_results(model, builder.bytes))


@pytest.mark.nightly
def test_openvino_reads_other_files_wrongly() -> None:
    """If this fails, OpenVINO has been mended and reads the file that is faster."""
    net = Builder(0, (64, 8, 8), batch=2)
    net.layer("square", 64, "ternary", LEVELS["ternary"], even=True, padding=(1, 1))
    model = export.model(net.head(), Target("x86"))
    scores = openvino_results(model, net.bytes)["scores"]
    assert (scores != net.network()(net.bytes).numpy()).any()


@pytest.mark.parametrize("what", ["beside", "features", "levels"])
def test_what_needs_64_bits_is_refused_for_openvino(what: str) -> None:
    net = Builder(0, (3, 6, 6), dtype="int16" if what == "features" else "uint8")
    net.sum("my.sum", 500, "int8", padding=(1, 1))
    start = net.requantise("first", *((-3000, 3000) if what == "levels" else (-128, 127)))
    if what == "beside":
        net.sum("second.sum", 500, "ternary", padding=(1, 1))
        net.requantise("second", beside=start)
    name = {"beside": "second", "features": r"my\.sum", "levels": "first"}[what]
    with pytest.raises(ExportError, match=f"'{name}': OpenVINO computes in 32 bits"):
        export.model(net.head(kind="ternary"), OPENVINO)


def test_requantisations_are_thresholds_for_openvino() -> None:
    net = Builder(0, (3, 6, 6))
    for name, high in (("first", 15), ("second", 127)):
        net.sum(f"{name}.sum", 5, "int4", padding=(1, 1))
        net.requantise(name, 0, high, negative=True)
    model = assert_right(net.head(), net.bytes, OPENVINO)
    assert not {"QuantizeLinear", "Floor", "Round"} & {*operators(model)}
    # It multiplies in 32 bits, so the class is left to order, in the metadata.
    assert [output.name for output in model.graph.output][:1] == ["scores"]
    assert "class" not in {output.name for output in model.graph.output}
    assert "order" in properties(model)
    same = nodes.Scores("last", ("last.sum",), 0, 0, *[torch.ones(4, dtype=torch.int32)] * 3)
    net.add(same)
    model = export.model(net.network(), OPENVINO)
    assert "class" in {output.name for output in model.graph.output}
    assert_answers_equal(net.network(), net.bytes, run(model, net.bytes))
    assert properties(export.model(net.network(), HERE))["runtime"] == "onnxruntime"
