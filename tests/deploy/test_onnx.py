"""ONNX files against the integer network, under ONNX Runtime and ONNX's own evaluator."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_networks import Growing, random_network

import softstair as ss
from softstair.deploy import ExportError, IntegerNetwork
from softstair.deploy import onnx as export
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


def run(model: Any, x: torch.Tensor, **how: Any) -> dict[str, np.ndarray]:
    made = session(model, **how)
    names = [one.name for one in made.get_outputs()]
    return dict(zip(names, made.run(None, {"bytes": x.numpy()}), strict=True))


def assert_equal(network: IntegerNetwork, x: torch.Tensor, got: dict[str, np.ndarray]) -> None:
    """Every feature to the bit; the scores as near as one rounding of float32 after another."""
    want, outputs = network.features(x), export.feature_outputs(network)
    for node in network.nodes[:-1]:
        np.testing.assert_array_equal(got[outputs[node.name]], want[node.name].numpy(), node.name)
    scores = want[network.nodes[-1].name].numpy()
    if isinstance(network.nodes[-1], ss.deploy.nodes.Rescaled):
        np.testing.assert_array_equal(got["scores"], scores)
    spread = float(np.abs(scores).max()) if scores.size else 0.0
    np.testing.assert_allclose(got["scores"], scores, rtol=1e-5, atol=1e-5 * spread)
    np.testing.assert_array_equal(got["class"], got["scores"].argmax(1))


@pytest.mark.nightly(keep=8)
@pytest.mark.parametrize("seed", range(24))
def test_random_networks_at_every_level_of_optimisation(seed: int) -> None:
    grown = random_network(seed)
    network, x = grown.network(), grown.bytes
    assert grown.hits > 0  # some sums are thresholds
    with_features, plain = export.model(network, features=True), export.model(network)
    first = run(plain, x, level="ORT_DISABLE_ALL")
    for level in LEVELS:
        got = run(with_features, x, level=level)
        assert_equal(network, x, got)
        # Outputs in between could keep operators from being fused: the plain file has none.
        alone = run(plain, x, level=level)
        for name in ("scores", "class"):
            np.testing.assert_array_equal(alone[name], got[name])
            np.testing.assert_array_equal(alone[name], first[name])


@pytest.mark.parametrize("seed", range(24, 30))
def test_random_networks_under_the_evaluator_of_onnx(seed: int) -> None:
    from onnx.reference import ReferenceEvaluator

    grown = random_network(seed)
    network, x = grown.network(), grown.bytes[:2]
    model = export.model(network, features=True)
    names = [one.name for one in model.graph.output]
    made = ReferenceEvaluator(model).run(None, {"bytes": x.numpy()})
    assert_equal(network, x, dict(zip(names, made, strict=True)))


def test_the_batch_and_the_threads_change_nothing() -> None:
    grown = random_network(3)
    model, x = export.model(grown.network(), features=True), grown.bytes
    whole = run(model, x)
    for threads in (1, 2, 5):
        for start, count in ((0, 1), (1, 1), (2, 5)):
            part = run(model, x[start : start + count], threads=threads)
            for name, value in part.items():
                np.testing.assert_array_equal(value, whole[name][start : start + count])
    assert run(model, x[:0])["scores"].shape == (0, *whole["scores"].shape[1:])


@pytest.mark.parametrize(
    ("kind", "outputs"),
    [("ternary", 5), ("sign", 64), ("switches", 5), ("int4", 64), ("int8", 5), ("even", 64)],
)
def test_weights_take_their_bits_in_the_file(tmp_path: Path, kind: str, outputs: int) -> None:
    net = Growing(0, (3, 9, 9), zero=7)
    net.flat("flat")
    net.sum("linear", outputs, kind)
    net.rescaled("scores")
    network = net.network()
    model = export.model(network, features=True)
    assert_equal(network, net.bytes, run(model, net.bytes))
    bits = {"ternary": 2, "sign": 1, "switches": 1, "even": 4}.get(kind, int(kind[-1:] or 0, 36))
    stored = max(len(one.raw_data) for one in model.graph.initializer)
    assert stored == -(-outputs * 243 * bits // 8)
    # ONNX Runtime spreads them out once, when it loads the file.
    kept = tmp_path / "optimised.onnx"
    session(export.model(network), keep=kept)
    assert next(iter(onnx.load(kept).graph.node)).op_type == "Flatten"


def test_products_of_the_largest_bytes_do_not_saturate() -> None:
    """Where a processor adds pairs of products in 16 bits, sums of 255·±128 are the ones to go."""
    for weight in (-128, 127):
        net = Growing(0, (64, 4, 4), zero=0)
        net.bytes.fill_(255)
        net.add(net.nodes["input"])
        net.sum("conv", 8, "int8", padding=(1, 1))
        node = net.nodes["conv"]
        node.weight.fill_(weight)  # type: ignore[attr-defined]
        net.add(node)
        net.flat("flat")
        net.rescaled("scores")
        assert_equal(net.network(), net.bytes, run(export.model(net.network(), True), net.bytes))


def test_only_standard_operators_and_shapes_that_are_all_known(tmp_path: Path) -> None:
    for seed in range(3):
        network = random_network(seed).network()
        model = onnx.load(export.write(network, tmp_path / "network.onnx", features=True))
        onnx.checker.check_model(model, full_check=True)
        assert [(one.domain, one.version) for one in model.opset_import] == [("", 18)]
        assert all(node.domain == "" for node in model.graph.node)
        described = {one.name: one for one in (*model.graph.value_info, *model.graph.output)}
        for node in model.graph.node:
            for name in node.output:
                dims = described[name].type.tensor_type.shape.dim
                assert all(one.dim_value > 0 or one.dim_param == "N" for one in dims), name
        assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "N"


def test_names_are_plain_whatever_layers_are_called() -> None:
    names = ["scores", "class", "a.b", "a_b", 'x"; DROP', "ü\n", "", "7", "a_b_value", "bytes"]
    net = Growing(0, (3, 6, 6), zero=3)
    for one in names[:8:2]:
        net.sum(one, 4, "ternary", padding=(1, 1))
        net.steps(names[names.index(one) + 1], (-1, 0, 1))
    net.flat("a_b_value")
    net.scores("bytes", 3)
    model = export.model(net.network(), features=True)
    assert_equal(net.network(), net.bytes, run(model, net.bytes))
    found = [one.name for one in model.graph.node]
    found += [name for one in model.graph.node for name in (*one.input, *one.output)]
    assert all(name.isascii() and name.isidentifier() for name in found)
    assert len({one.name for one in model.graph.node}) == len(model.graph.node)


def test_what_the_file_says_about_itself(tmp_path: Path) -> None:
    network = random_network(1).network()
    (count,) = network.sizes[network.nodes[-1].name]
    classes = [f"class «{one}»" for one in range(count)]
    path = export.write(network, tmp_path / "network.onnx", classes=classes)
    made = ort.InferenceSession(path).get_modelmeta()
    assert made.producer_name == "softstair"
    said = made.custom_metadata_map
    assert json.loads(said["classes"]) == classes
    assert (said["zero"], said["scale"]) == (str(network.input.zero), "64.0")
    with pytest.raises(ValueError, match=f"classes must be {count} names"):
        export.model(network, classes=["one"])


@pytest.mark.parametrize("largest", [1, 15, 255, 4095, 70_000])
def test_digits_come_to_the_weights_again(largest: int) -> None:
    weight = np.random.default_rng(largest).integers(-2000, 2000, (3, 40))
    parts = digits("conv", weight, -largest, largest)
    np.testing.assert_array_equal(sum(part << place for place, part in parts), weight)
    assert all(np.abs(part).sum(1).max() * largest < 2**24 for _, part in parts)


def test_sums_that_are_not_exact_are_refused_by_name() -> None:
    with pytest.raises(ExportError, match=r"'my\.layer': its sums are not exact"):
        digits("my.layer", np.ones((1, 2**12), np.int64), 0, 2**12)
    net = Growing(0, (4, 20, 20), zero=0)
    net.sum("first", 64, "int8", padding=(1, 1))
    net.steps("first.stair", tuple(range(0, 30_000, 1000)))
    net.sum("deep.er", 4, "int12")
    net.flat("flat")
    net.rescaled("scores")
    with pytest.raises(ExportError, match=r"'deep\.er': its partial sums do not fit"):
        export.model(net.network())


def test_without_onnx_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'softstair\[onnx\]'"):
        export.model(random_network(0).network())
