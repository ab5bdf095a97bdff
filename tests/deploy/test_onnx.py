"""ONNX files against the frozen network, under ONNX Runtime and ONNX's own evaluator."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from frozen_networks import RANGES, WEIGHT_BITS, Builder, random_network
from random_networks import LEVELS as STAIRS

import softstair as ss
from softstair.deploy import nodes, onnx as export
from softstair.deploy.frozen import FrozenNetwork, leaves
from softstair.deploy.loaders import onnxruntime
from softstair.deploy.nodes import ExportError
from softstair.deploy.target import HERE, Target

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

LEVELS = ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", None]
ENDS = LEVELS[::3]
OPENVINO = Target(runtime="openvino")
QUIET = 3
Outputs = dict[str, np.ndarray]


def session(
    model: Any, level: str | None = None, threads: int = 0, keep: Path | None = None
) -> Any:
    """A session with ONNX Runtime's default options, but for what is given."""
    options = ort.SessionOptions()
    options.log_severity_level = QUIET
    options.intra_op_num_threads = threads
    if level is not None:
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    if keep is not None:
        options.optimized_model_filepath = str(keep)
    return ort.InferenceSession(model.SerializeToString(), options)


def run(model: Any, x: torch.Tensor, **options: Any) -> Outputs:
    runner = session(model, **options)
    names = [output.name for output in runner.get_outputs()]
    return dict(zip(names, runner.run(None, {"bytes": x.numpy()}), strict=True))


def run_reference(model: Any, x: torch.Tensor) -> Outputs:
    """The outputs of ONNX's own evaluator."""
    from onnx.reference import ReferenceEvaluator

    names = [output.name for output in model.graph.output]
    values = ReferenceEvaluator(model).run(None, {"bytes": x.numpy()})
    return dict(zip(names, values, strict=True))


def properties(model: Any) -> dict[str, str]:
    return {each.key: each.value for each in model.metadata_props}


def operators(model: Any) -> list[str]:
    return [node.op_type for node in model.graph.node]


def assert_equal(network: FrozenNetwork, x: torch.Tensor, model: Any, actual: Outputs) -> None:
    """Compare everything that a file gives, exactly; only sums may be missing in it."""
    expected, outputs = network.features(x), json.loads(properties(model)["features"])
    inner = [node for node in network.nodes if not isinstance(node, nodes.Scores)]
    missing = [node for node in inner if node.name not in outputs]
    assert all(isinstance(node, nodes.Sum) for node in missing)
    for name, output in outputs.items():
        np.testing.assert_array_equal(actual[output], expected[name].numpy(), name)
    assert_answers_equal(network, x, actual)


def assert_answers_equal(network: FrozenNetwork, x: torch.Tensor, actual: Outputs) -> None:
    ends = {"scores": network, "class": network.predict, "values": network.values}
    for kind, end in ends.items():
        for name, expected in zip(network.heads, leaves(end(x)), strict=True):
            if kind == "scores" or kind + name in actual:
                np.testing.assert_array_equal(actual[kind + name], expected.numpy())
                assert kind != "scores" or actual[kind + name].dtype == np.int32


def assert_right(
    network: FrozenNetwork, x: torch.Tensor, target: Target = HERE, levels: Any = ENDS
) -> Any:
    """Compare what a file gives, without and with all optimisations; return the file."""
    model = export.model(network, target, trace=True)
    answer = {"classes": "class", "values": "values"}[network.outputs]
    ends = {output.name for output in model.graph.output}
    assert target == OPENVINO or {answer + name for name in network.heads} <= ends
    for level in levels:
        assert_equal(network, x, model, run(model, x, level=level))
    return model


@pytest.mark.nightly(keep=6)
@pytest.mark.parametrize("seed", range(40))
def test_random_networks_are_equal_at_every_optimisation_level(seed: int) -> None:
    builder = random_network(seed)
    network, x = builder.network(), builder.bytes
    assert_right(network, x, levels=LEVELS)
    # Outputs in between could keep operators from being fused: the plain file has none.
    plain = export.model(network)
    for level in LEVELS:
        assert_answers_equal(network, x, run(plain, x, level=level))


def test_random_networks_have_every_form() -> None:
    """Whatever the seeds above draw: no form goes untested."""
    builders = [random_network(seed) for seed in range(20)]
    drawn = {type(node) for builder in builders for node in builder.nodes.values()}
    assert drawn >= {nodes.Requantise, nodes.Steps, nodes.SumPool, nodes.Add, nodes.MaxPool}
    kinds = {kind for builder in builders for kind in operators(export.model(builder.network()))}
    wide = {"Conv", "MatMul", "QuantizeLinear", "Floor", "Sign", "Gather"}
    assert kinds >= {"QLinearConv", "ConvInteger", "MatMulInteger", "GreaterOrEqual", *wide}


@pytest.mark.parametrize("seed", range(40, 46))
def test_random_networks_are_equal_under_the_reference_evaluator(seed: int) -> None:
    builder = random_network(seed)
    network, x, model = (
        builder.network(),
        builder.bytes[:2],
        export.model(builder.network(), HERE, True),
    )
    assert_equal(network, x, model, run_reference(model, x))


@pytest.mark.parametrize("rounding", ["once", "double"])
@pytest.mark.parametrize("ends", RANGES)
def test_requantisations_are_equal(ends: tuple[int, int], rounding: nodes.Rounding) -> None:
    """Of sums, of averages, with factors, in both directions and on vectors."""
    net = Builder(0, (3, 8, 8), zero=121)
    for name, options in {
        "plain": {},
        "coarse": {"significant": 9},
        "turned": {"negative": True},
        "larger": {"factor": 25, "negative": True},
    }.items():
        net.sum(f"{name}.sum", 6, "int8", padding=(1, 1))
        net.requantise(name, *ends, rounding=rounding, **options)
    net.sum_pool("average")
    net.requantise("average.stair", *ends, rounding=rounding)
    net.flatten("flat")
    net.sum("linear", 5, "ternary")
    net.requantise("linear.stair", rounding=rounding)
    assert_right(net.head(), net.bytes)


def halves(count: int) -> tuple[Builder, FrozenNetwork]:
    """Sums of which each is a half, up or down, or next to one: x/2, (2x + 1)/4 and others."""
    net = Builder(0, (1, 16, 32), batch=1)
    net.bytes = torch.arange(512).remainder(256).reshape(1, 1, 16, 32).to(torch.uint8)
    net.add(net.nodes["input"])
    weight = torch.tensor([1, -1, 2, 3]).repeat(count)[:count].reshape(-1, 1, 1, 1).to(torch.int8)
    net.weighted("sum", weight, "input")
    for rounding, shift in (("once", [1, 2, 0, 3]), ("double", [31, 32, 33, 34])):
        shifts = torch.tensor(shift).repeat(count)[:count].int()
        multiplier = torch.full((count,), 1 if rounding == "once" else 2**30).int()
        bias = torch.arange(count).int() - 1
        numbers = (torch.ones_like(bias), bias, multiplier, shifts)
        net.add(nodes.Requantise(rounding, ("sum",), -128, 127, *numbers, None, rounding=rounding))
    net.add(nodes.Concat("both", ("once", "double"), -128, 127, 1))
    return net, net.head()


def test_halves_are_rounded_as_the_definition_does() -> None:
    net, network = halves(8)
    assert_right(network, net.bytes)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("table", ["int8", "int16"])
def test_inputs_are_looked_up(dtype: str, table: str) -> None:
    net = Builder(0, (3, 8, 8), dtype=dtype)
    net.look_up(table)
    net.sum("sum", 6, "int4", padding=(1, 1))
    net.requantise("stair")
    model = assert_right(net.head(), net.bytes)
    assert "table" in properties(model)
    sound = Builder(0, (2, 12), dtype=dtype)
    sound.look_up(table)
    sound.layer("first", 3, "int4", (-1, 0, 1))
    assert_right(sound.head(), sound.bytes)


def test_sums_near_the_ends_of_32_bits_are_equal() -> None:
    for kind, dtype, inputs in (("int8", "int16", 500), ("int12", "uint8", 4000)):
        net = Builder(0, (inputs // 4, 2, 2), dtype=dtype)
        weight = {"int8": (-128, 127), "int12": (-2048, 2047)}[kind]
        ends = torch.iinfo(net.bytes.dtype)
        rows = torch.tensor(weight).repeat_interleave(2)[:, None].expand(-1, inputs)
        rows = rows.to(torch.int8 if kind == "int8" else torch.int16).contiguous()
        net.bytes[0], net.bytes[1] = ends.min, ends.max
        net.add(net.nodes["input"])
        net.weighted("conv", rows.reshape(4, -1, 2, 2), "input")
        assert max(-net.nodes["conv"].low, net.nodes["conv"].high) > 2**30.9
        net.requantise("stair", -128, 127)
        net.flatten("flat")
        net.last = "input"
        net.flatten("flat input")
        net.weighted("linear", rows, "flat input")
        net.requantise("linear.stair", -128, 127)
        net.add(nodes.Concat("both", ("flat", "linear.stair"), -128, 127, 1))
        model = assert_right(net.head(), net.bytes)
        assert len({"ConvInteger", "MatMul"} & {*operators(model)}) == 2


def test_the_class_is_that_of_scores_in_64_bits() -> None:
    net = Builder(0, (4, 2, 2), batch=30)
    net.flatten("flat")
    net.sum("sum", 5, "int8")
    net.scores("last", shift=10)
    last = net.nodes["last"]
    order = torch.tensor([2**30, 2**30 - 1, 2**30 - 2, 2**29, 3], dtype=torch.int32)
    for same, kinds in ((False, True), (True, False)):
        rows = torch.full_like(order, 7) if same else order
        own = (last.bias, order.double(), rows, last.shift)
        net.add(nodes.Scores("last", ("sum",), last.low, last.high, *own))
        network = net.network()
        assert len({*network.predict(net.bytes).tolist()}) > 1
        model = assert_right(network, net.bytes)
        assert (
            "Mul" in {node.op_type for node in model.graph.node if "ranked" in node.name}
        ) is kinds
    # Of equal scores the first is taken.
    net.bytes.zero_()
    net.nodes["last"].bias.zero_()
    assert network.predict(net.bytes).tolist() == [0] * 30
    assert_right(network, net.bytes)


def test_outputs_that_are_values() -> None:
    net = Builder(0, (2, 4, 4))
    net.layer("first", 3, "ternary", (-1, 0, 1))
    net.head(3)
    network = net.network(outputs="values", classes=("x", "y", "z"))
    model = assert_right(network, net.bytes)
    assert {"scores", "values"} <= {output.name for output in model.graph.output}
    assert json.loads(properties(model)["classes"]) == ["x", "y", "z"]
    assert json.loads(properties(model)["scales"]) == network.last.scale.tolist()


def test_scores_of_positions_and_layers_applied_to_each(tmp_path: Path) -> None:
    """Channels are the last axis: a linear layer on (N, T, C)."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-8, 8, (6, 5), generator=generator).to(torch.int8)
    x = torch.randint(256, (7, 4, 5), generator=generator).to(torch.uint8)
    table = torch.tensor([[-100, 0, 100]]).repeat(6, 1).int() + torch.arange(6)[:, None].int()
    ones = torch.ones(6, dtype=torch.int32)
    last = torch.randint(-8, 8, (3, 6), generator=generator).to(torch.int8)
    order = torch.tensor([2**30, 2**29, 2**28], dtype=torch.int32)
    rows = (
        nodes.Input("input", (), 0, 255, (4, 5), 1.0),
        nodes.Sum("sum", ("input",), -20_000, 20_000, weight),
        nodes.Steps("stair", ("sum",), 0, 3, table, (0, 1, 2, 3), axis=2),
        nodes.Requantise("other", ("sum",), -128, 127, ones, ones, 3 * ones, 8 * ones, axis=2),
        nodes.Add("both", ("stair", "other"), -128, 130),
        nodes.Sum("scores", ("both",), -10_000, 10_000, last),
        nodes.Scores(
            "last", ("scores",), -10_000, 10_000, order[:3], order.double(), order, axis=2
        ),
    )
    sizes = {name: (4, 6) for name in ("sum", "stair", "other", "both")}
    sizes |= {"input": (4, 5), "scores": (4, 3), "last": (4, 3)}
    network = FrozenNetwork(rows, sizes)
    assert_right(network, x)
    assert network.predict(x).shape == (7, 4)


def test_results_do_not_depend_on_batch_size_or_threads() -> None:
    builder = random_network(3)
    model, x = export.model(builder.network(), HERE, True), builder.bytes
    together = run(model, x)
    for threads in (1, 2, 5):
        for start, count in ((0, 1), (1, 1), (2, 5)):
            part = run(model, x[start : start + count], threads=threads)
            for name, value in part.items():
                np.testing.assert_array_equal(value, together[name][start : start + count])
    assert run(model, x[:0])["scores"].shape == (0, *together["scores"].shape[1:])


@pytest.mark.parametrize(
    ("kind", "outputs"),
    [("ternary", 5), ("sign", 64), ("binary", 5), ("int4", 64), ("int8", 5), ("even", 64)],
)
def test_weights_are_stored_in_the_fewest_bits(tmp_path: Path, kind: str, outputs: int) -> None:
    net = Builder(0, (3, 9, 9), zero=7)
    network = net.head(outputs, kind)
    model = assert_right(network, net.bytes)
    stored = max(len(constant.raw_data) for constant in model.graph.initializer)
    assert stored == -(-outputs * 243 * WEIGHT_BITS[kind] // 8)
    # ONNX Runtime unpacks them once, when it loads the file.
    kept = tmp_path / "optimised.onnx"
    session(export.model(network), keep=kept)
    assert next(iter(onnx.load(kept).graph.node)).op_type == "Flatten"


def test_products_of_the_largest_bytes_do_not_saturate() -> None:
    """Older x86 processors add pairs of products in 16 bits, which 255·128 twice exceeds."""
    for weight in (-128, 127):
        net = Builder(0, (64, 4, 4))
        net.bytes.fill_(255)
        net.add(net.nodes["input"])
        weights = torch.full((8, 64, 3, 3), weight).to(torch.int8)
        net.weighted("conv", weights, "input")
        net.requantise("stair", significant=9)
        net.weighted("other", weights, "input")
        net.flatten("flat")
        net.scores("last")
        model = assert_right(net.network(), net.bytes)
        assert {"QLinearConv", "ConvInteger"} <= {*operators(model)}


def test_file_has_standard_operators_and_every_shape(tmp_path: Path) -> None:
    model = onnx.load(export.write(random_network(1).network(), tmp_path / "a.onnx", trace=True))
    onnx.checker.check_model(model, full_check=True)
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 18)]
    assert all(node.domain == "" for node in model.graph.node)
    described = {tensor.name: tensor for tensor in (*model.graph.value_info, *model.graph.output)}
    for node in model.graph.node:
        for name in node.output:
            dims = described[name].type.tensor_type.shape.dim
            assert all(dim.dim_value > 0 or dim.dim_param == "N" for dim in dims), name
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "N"


def test_names_in_the_file_are_identifiers() -> None:
    names = ["scores", "class", "a.b", "a_b", 'x"; DROP', "ü\n", "", "7", "a_b_value", "bytes"]
    net = Builder(0, (3, 6, 6), zero=3)
    for layer, stair in zip(names[:8:2], names[1:8:2], strict=True):
        net.sum(layer, 4, "ternary", padding=(1, 1))
        net.steps(stair, (-1, 0, 1))
    net.flatten("a_b_value")
    net.sum("values", 3, "int8")
    net.scores("bytes")
    model = assert_right(net.network(), net.bytes)
    graph = model.graph.node
    identifiers = [name for node in graph for name in (node.name, *node.input, *node.output)]
    assert all(name.isascii() and name.isidentifier() for name in identifiers)
    assert len({node.name for node in graph}) == len(model.graph.node)


def test_runner_gives_what_a_file_has(tmp_path: Path) -> None:
    builder = random_network(2)
    network, x = builder.network(), builder.bytes
    for trace in (False, True):
        file = export.write(network, tmp_path / "a.onnx", trace=trace)
        actual = export.decoder(network, file)(onnxruntime(str(file))(x.numpy()))
        assert torch.equal(actual.pop("scores"), network(x))
        assert torch.equal(actual.pop("class"), network.predict(x))
        assert {*network.stairs} <= {*actual} if trace else not actual
        expected = network.features(x)
        assert all(torch.equal(value, expected[name]) for name, value in actual.items())


def test_metadata_of_the_file(tmp_path: Path) -> None:
    builder = random_network(1)
    count = builder.results[builder.last].shape[1]
    classes = [f"class «{number}»" for number in range(count)]
    network = builder.network(classes=classes)
    path = export.write(network, tmp_path / "network.onnx", cpu="arm")
    metadata = ort.InferenceSession(path).get_modelmeta()
    assert metadata.producer_name == "softstair"
    written = metadata.custom_metadata_map
    assert json.loads(written["classes"]) == classes
    assert (written["zero"], written["unit"]) == (str(network.input.zero), "0.015625")
    assert (written["cpu"], written["runtime"]) == ("arm", "onnxruntime")
    assert (written["softstair"], written["digest"]) == (ss.__version__, network.digest)
    assert metadata.version >= 0
    again = export.write(network, tmp_path / "again.onnx", cpu="arm")
    assert again.read_bytes() == path.read_bytes()


def test_sums_that_do_not_fit_raise_and_name_the_layer() -> None:
    weight = torch.full((4, 2**15, 1, 1), 127).to(torch.int8)
    rows = (
        nodes.Input("input", (), 0, 2**15 - 1, (2**15, 1, 1), 1.0, dtype="int16"),
        nodes.Sum("deep.er", ("input",), 0, 2**31 - 1, weight),
        nodes.Flatten("flat", ("deep.er",), 0, 2**31 - 1),
        nodes.Scores("last", ("flat",), 0, 2**31 - 1, *[torch.ones(4).int()] * 3),
    )
    sizes = {"input": (2**15, 1, 1), "deep.er": (4, 1, 1), "flat": (4,), "last": (4,)}
    with pytest.raises(ExportError, match=r"'deep\.er': its partial sums do not fit"):
        export.model(FrozenNetwork(rows, sizes))


def test_pooling_without_channels_is_refused() -> None:
    net = Builder(0, (3, 8))
    net.add(nodes.MaxPool("my.pool", ("input",), 0, 255, (2, 2), (2, 2), (0, 0)))
    with pytest.raises(ExportError, match=r"'my\.pool': ONNX cannot pool without channels"):
        export.model(net.head())


def test_missing_onnx_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[onnx\]'"):
        export.model(random_network(0).network())


def deep(seed: int = 0) -> Builder:
    """A layer whose inputs are int8 on ARM, and a linear layer."""
    net = Builder(seed, (1, 16, 16), batch=2)
    net.layer("first", 64, "ternary", STAIRS["ternary"], even=True, padding=(1, 1))
    net.layer("deep", 64, "ternary", STAIRS["ternary"], even=True, padding=(1, 1))
    net.max_pool("pool", 4, 4, 0)
    net.flatten("flat")
    net.layer("linear", 8, "ternary", STAIRS["ternary"], even=True)
    net.head()
    return net


@pytest.mark.parametrize("cpu", ["x86", "arm"])
def test_onnx_for_x86_has_no_int8_features(cpu: Any) -> None:
    net = deep()
    model = assert_right(net.network(), net.bytes, Target(cpu))
    stored = {each.name: onnx.numpy_helper.to_array(each).dtype for each in model.graph.initializer}
    convs = [node for node in model.graph.node if node.op_type == "QLinearConv"]
    assert sum(stored[node.input[2]] == np.int8 for node in convs) == (cpu == "arm")
    assert properties(model)["cpu"] == cpu


def test_onnx_for_openvino_has_none_of_what_it_reads_wrongly() -> None:
    net = deep()
    plain, model = export.model(net.network()), assert_right(net.network(), net.bytes, OPENVINO)
    assert "QLinearConv" not in operators(model)
    assert {"ConvInteger", "MatMulInteger"} <= {*operators(model)}
    stored = {tensor.name for tensor in model.graph.initializer}
    assert all(n.input[1] in stored for n in model.graph.node if n.op_type == "MatMulInteger")
    assert "runtime=openvino" in properties(plain)["note"]
    assert "INFERENCE_PRECISION_HINT" in properties(model)["note"]
    assert properties(model)["runtime"] == "openvino"
