"""ONNX files against the integer network, under ONNX Runtime and ONNX's own evaluator."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from c_networks import affine_features
from random_networks import WEIGHT_BITS, RandomBuilder, random_network
from test_affine import residual_network

import softstair as ss
from softstair.deploy import ExportError, IntegerNetwork, nodes, onnx as export
from softstair.deploy.onnx import digits

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

LEVELS = ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL", None]
QUIET = 3


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


def run(model: Any, x: torch.Tensor, **options: Any) -> dict[str, np.ndarray]:
    runner = session(model, **options)
    names = [output.name for output in runner.get_outputs()]
    return dict(zip(names, runner.run(None, {"bytes": x.numpy()}), strict=True))


def run_reference(model: Any, x: torch.Tensor) -> dict[str, np.ndarray]:
    """The outputs of ONNX's own evaluator."""
    from onnx.reference import ReferenceEvaluator

    names = [output.name for output in model.graph.output]
    values = ReferenceEvaluator(model).run(None, {"bytes": x.numpy()})
    return dict(zip(names, values, strict=True))


def assert_equal(network: IntegerNetwork, x: torch.Tensor, actual: dict[str, np.ndarray]) -> None:
    """Compare every feature exactly, and scores of float weights up to float32 rounding."""
    expected, outputs = network.features(x), export.feature_outputs(network)
    assert all(isinstance(node, nodes.Sum) for node in network.nodes if node.name not in outputs)
    for name in {*outputs} - {network.last.name}:
        np.testing.assert_array_equal(actual[outputs[name]], expected[name].numpy(), name)
    scores = expected[network.nodes[-1].name].numpy()
    if isinstance(network.nodes[-1], ss.deploy.nodes.Rescaled):
        np.testing.assert_array_equal(actual["scores"], scores)
    spread = float(np.abs(scores).max()) if scores.size else 0.0
    np.testing.assert_allclose(actual["scores"], scores, rtol=1e-5, atol=1e-5 * spread)
    np.testing.assert_array_equal(actual["class"], actual["scores"].argmax(1))


@pytest.mark.nightly(keep=5)  # of which one has sums of several digits
@pytest.mark.parametrize("seed", range(24))
def test_random_networks_are_equal_at_every_optimisation_level(seed: int) -> None:
    builder = random_network(seed)
    network, x = builder.network(), builder.bytes
    assert builder.sums_on_thresholds > 0  # some sums are thresholds
    with_features, plain = export.model(network, features=True), export.model(network)
    first = run(plain, x, level="ORT_DISABLE_ALL")
    for level in LEVELS:
        actual = run(with_features, x, level=level)
        assert_equal(network, x, actual)
        # Outputs in between could keep operators from being fused: the plain file has none.
        alone = run(plain, x, level=level)
        for name in ("scores", "class"):
            np.testing.assert_array_equal(alone[name], actual[name])
            np.testing.assert_array_equal(alone[name], first[name])


@pytest.mark.parametrize("seed", range(24, 30))
def test_random_networks_are_equal_under_the_reference_evaluator(seed: int) -> None:
    builder = random_network(seed)
    network, x = builder.network(), builder.bytes[:2]
    assert_equal(network, x, run_reference(export.model(network, features=True), x))


def byte_inputs(network: IntegerNetwork, count: int) -> torch.Tensor:
    """Random bytes, and bytes that are all 0, all 255, or either."""
    shape, generator = network.input.shape, torch.Generator().manual_seed(0)
    draws = [torch.randint(n, (count, *shape), generator=generator) for n in (256, 2)]
    ends = torch.tensor([0, 255]).reshape(2, 1, 1, 1).expand(2, *shape)
    return torch.cat([draws[0], ends, 255 * draws[1]]).to(torch.uint8)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(("quantum", "bits"), [(0.0235, 8), (1 / 32, 8), (0.2431, 4)])
def test_residual_networks_have_no_thresholds_at_shortcuts(quantum: float, bits: int) -> None:
    network = residual_network(quantum, bits)
    x = byte_inputs(network, 30)
    model, outputs = export.model(network, features=True), export.feature_outputs(network)
    stairs = [node.name for node in network.nodes if isinstance(node, nodes.Steps)]
    stairs = [name for name in stairs if len(network.node(name).inputs) == 2]
    prefixes = tuple(outputs[name].removesuffix("_value") for name in stairs)
    kinds = {node.op_type for node in model.graph.node if node.name.startswith(prefixes)}
    assert {"Max", "Less"} <= kinds  # of wide steps alone
    assert "GreaterOrEqual" not in kinds
    for level in LEVELS:
        assert_equal(network, x, run(model, x, level=level))
    assert model.ByteSize() < 40_000
    assert_equal(network, x[:5], run_reference(model, x[:5]))


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("seed", range(5))
def test_levels_of_affine_steps_are_equal(seed: int) -> None:
    builder = affine_features(seed)
    network, x = builder.network(), builder.bytes
    model = export.model(network, features=True)
    wide = {node.name for node in model.graph.node if node.op_type == "Less"}
    assert {"deep_stair_too_high", "biased_stair_too_high"} <= wide
    for level in LEVELS:
        assert_equal(network, x, run(model, x, level=level))


def test_results_do_not_depend_on_batch_size_or_threads() -> None:
    builder = random_network(3)
    model, x = export.model(builder.network(), features=True), builder.bytes
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
    net = RandomBuilder(0, (3, 9, 9), zero=7)
    net.flatten("flat")
    net.sum("linear", outputs, kind)
    net.rescaled("scores")
    network = net.network()
    model = export.model(network, features=True)
    assert_equal(network, net.bytes, run(model, net.bytes))
    stored = max(len(constant.raw_data) for constant in model.graph.initializer)
    assert stored == -(-outputs * 243 * WEIGHT_BITS[kind] // 8)
    # ONNX Runtime unpacks them once, when it loads the file.
    kept = tmp_path / "optimised.onnx"
    session(export.model(network), keep=kept)
    assert next(iter(onnx.load(kept).graph.node)).op_type == "Flatten"


def test_products_of_the_largest_bytes_do_not_saturate() -> None:
    """Older x86 processors add pairs of products in 16 bits, which 255·128 twice exceeds."""
    for weight in (-128, 127):
        net = RandomBuilder(0, (64, 4, 4), zero=0)
        net.bytes.fill_(255)
        net.add(net.nodes["input"])
        net.sum("conv", 8, "int8", padding=(1, 1))
        node = net.nodes["conv"]
        node.weight.fill_(weight)  # type: ignore[attr-defined]
        net.add(node)
        net.flatten("flat")
        net.rescaled("scores")
        assert_equal(net.network(), net.bytes, run(export.model(net.network(), True), net.bytes))


def test_file_has_standard_operators_and_every_shape(tmp_path: Path) -> None:
    network = random_network(1).network()
    model = onnx.load(export.write(network, tmp_path / "network.onnx", features=True))
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
    net = RandomBuilder(0, (3, 6, 6), zero=3)
    for layer, stair in zip(names[:8:2], names[1:8:2], strict=True):
        net.sum(layer, 4, "ternary", padding=(1, 1))
        net.steps(stair, (-1, 0, 1))
    net.flatten("a_b_value")
    net.scores("bytes", 3)
    model = export.model(net.network(), features=True)
    assert_equal(net.network(), net.bytes, run(model, net.bytes))
    graph = model.graph.node
    identifiers = [name for node in graph for name in (node.name, *node.input, *node.output)]
    assert all(name.isascii() and name.isidentifier() for name in identifiers)
    assert len({node.name for node in graph}) == len(model.graph.node)


def test_metadata_of_the_file(tmp_path: Path) -> None:
    network = random_network(1).network()
    (count,) = network.sizes[network.nodes[-1].name]
    classes = [f"class «{number}»" for number in range(count)]
    path = export.write(network, tmp_path / "network.onnx", classes=classes)
    metadata = ort.InferenceSession(path).get_modelmeta()
    assert metadata.producer_name == "softstair"
    properties = metadata.custom_metadata_map
    assert json.loads(properties["classes"]) == classes
    assert (properties["zero"], properties["scale"]) == (str(network.input.zero), "64.0")
    with pytest.raises(ValueError, match=f"classes must be {count} names"):
        export.model(network, classes=["one"])


@pytest.mark.parametrize("largest", [1, 15, 255, 4095, 70_000])
def test_digits_sum_to_the_weights(largest: int) -> None:
    weight = np.random.default_rng(largest).integers(-2000, 2000, (3, 40))
    parts = digits("conv", weight, -largest, largest)
    np.testing.assert_array_equal(sum(part << shift for shift, part in parts), weight)
    assert all(np.abs(part).sum(1).max() * largest < 2**24 for _, part in parts)


def test_sums_that_are_not_exact_raise_and_name_the_layer() -> None:
    with pytest.raises(ExportError, match=r"'my\.layer': its sums are not exact"):
        digits("my.layer", np.ones((1, 2**12), np.int64), 0, 2**12)
    net = RandomBuilder(0, (4, 20, 20), zero=0)
    net.layer("first", 64, "int8", tuple(range(0, 30_000, 1000)), padding=(1, 1))
    net.sum("deep.er", 4, "int12")
    net.flatten("flat")
    net.rescaled("scores")
    with pytest.raises(ExportError, match=r"'deep\.er': its partial sums do not fit"):
        export.model(net.network())


def test_missing_onnx_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[onnx\]'"):
        export.model(random_network(0).network())
