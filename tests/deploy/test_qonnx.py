"""QONNX files against the frozen network, under the executor of the qonnx package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from frozen_networks import WEIGHT_BITS, Builder, random_network
from random_networks import LEVELS, WEIGHTS

from softstair.deploy import nodes, qonnx as export
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.nodes import ExportError
from softstair.deploy.onnx_graph import OnnxGraph

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("qonnx", reason="qonnx is not installed")

from qonnx.core.datatype import DataType  # noqa: E402
from qonnx.core.modelwrapper import ModelWrapper  # noqa: E402
from qonnx.core.onnx_exec import execute_onnx  # noqa: E402
from qonnx.transformation.change_batchsize import ChangeBatchSize  # noqa: E402
from qonnx.transformation.infer_datatypes import InferDataTypes  # noqa: E402
from qonnx.transformation.infer_shapes import InferShapes  # noqa: E402
from qonnx.util.cleanup import cleanup_model  # noqa: E402


@pytest.fixture(autouse=True)
def older_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """qonnx has ONNX Runtime run a model of one node at a time, in onnx's newest format, which may
    be newer than the runtime reads."""
    monkeypatch.setattr(onnx, "IR_VERSION", 8)


def execute(model: Any, x: torch.Tensor, everything: bool = True) -> dict[str, np.ndarray]:
    name = model.graph.input[0].name
    return execute_onnx(model, {name: x.numpy().astype(np.float32)}, everything)


def assert_equal(network: FrozenNetwork, x: torch.Tensor, actual: dict[str, np.ndarray]) -> None:
    expected, names = network.features(x), OnnxGraph(network).identifiers
    for node in network.nodes[:-1]:
        result = actual[names[node.name]]
        np.testing.assert_array_equal(result, expected[node.name].numpy(), node.name)
    np.testing.assert_array_equal(actual["scores"], expected[network.last.name].numpy())


def assert_right(network: FrozenNetwork, x: torch.Tensor) -> Any:
    """Compare what a file gives for a batch; return the file."""
    model = ModelWrapper(export.model(network)).transform(ChangeBatchSize(len(x)))
    assert_equal(network, x, execute(model.transform(InferShapes()), x))
    return model


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("seed", range(12))
def test_random_networks_are_equal(tmp_path: Path, seed: int) -> None:
    builder = random_network(seed, widest=False)
    network, x = builder.network(), builder.bytes
    path = export.write(network, tmp_path / "network.onnx")
    # As written, with a batch of one.
    model = ModelWrapper(str(path))
    assert_equal(network, x[:1], execute(model, x[:1]))
    # After the package's own transformations, which infer shapes and types anew.
    model = model.transform(ChangeBatchSize(len(x))).transform(InferShapes())
    assert_equal(network, x, execute(model, x))
    typed = model.transform(InferDataTypes())
    assert_equal(network, x, execute(typed, x))
    clean = cleanup_model(typed)
    (scores,) = execute(clean, x, everything=False).values()
    np.testing.assert_array_equal(scores, network(x).numpy())
    kinds = {node.op_type for node in clean.graph.node}
    assert "MultiThreshold" in kinds
    assert kinds & {"Quant", "BipolarQuant"}


@pytest.mark.parametrize(
    ("kind", "stair"), [*zip([*WEIGHTS][:-1], LEVELS, strict=False), ("ternary", "uint6")]
)
def test_tensors_are_annotated_with_their_integer_type(kind: str, stair: str) -> None:
    net = Builder(1, (3, 5, 5), zero=121)
    net.sum("conv", 4, kind)
    net.steps("stair", LEVELS[stair])
    network = net.head(3)
    model = ModelWrapper(export.model(network))
    actual = execute(model, net.bytes[:1])
    assert_equal(network, net.bytes[:1], actual)
    datatypes = {name: model.get_tensor_datatype(name) for name in ("bytes", "conv", "stair")}
    for name, datatype in datatypes.items():
        assert datatype.is_integer()
        assert np.all(datatype.allowed(actual[name])), (name, datatype)
    weight = model.get_tensor_datatype("conv_weight")
    assert np.all(weight.allowed(np.array(WEIGHTS[kind], np.float32)))
    assert weight.bitwidth() == WEIGHT_BITS[kind]
    # qonnx infers the same types.
    inferred = model.transform(InferDataTypes())
    assert inferred.get_tensor_datatype("stair") == datatypes["stair"]
    assert inferred.get_tensor_datatype("conv_weight") == weight
    if stair == "sign":
        assert datatypes["stair"] == DataType["BIPOLAR"]


def test_weights_and_levels_of_minus_1_and_0_are_equal() -> None:
    """In 1 bit they would be -1 and 1."""
    net = Builder(0, (2, 5, 5), zero=121)
    net.weighted("conv", -torch.eye(4, 18).reshape(4, 2, 3, 3).char())
    net.steps("stair", (-1, 0))
    assert_right(net.head(), net.bytes)


@pytest.mark.parametrize("rounding", ["once", "double"])
def test_requantisations_of_one_input_are_thresholds(rounding: nodes.Rounding) -> None:
    net = Builder(0, (2, 6, 6), zero=121)
    for name, negative in (("first", False), ("second", True)):
        net.sum(f"{name}.sum", 4, "int8", padding=(1, 1))
        net.requantise(name, rounding=rounding, negative=negative)
    model = assert_right(net.head(), net.bytes)
    assert len(model.get_nodes_by_op_type("MultiThreshold")) == 2
    assert not model.get_nodes_by_op_type("Floor")


@pytest.mark.parametrize("rounding", ["once", "double"])
def test_shortcuts_and_many_levels_are_in_float64(rounding: nodes.Rounding) -> None:
    net = Builder(0, (2, 6, 6), zero=121)
    net.sum("first", 4, "int4", padding=(1, 1))
    start = net.requantise("start", -128, 127)
    net.sum("second", 4, "int4", padding=(1, 1))
    net.requantise("joined", -128, 127, beside=start)
    net.sum("third", 4, "int4", padding=(1, 1))
    net.requantise("many", -3000, 3000, rounding=rounding)
    model = assert_right(net.head(kind="ternary"), net.bytes)
    assert len(model.get_nodes_by_op_type("MultiThreshold")) == 1
    assert len(model.get_nodes_by_op_type("Floor")) == (2 if rounding == "once" else 3)


@pytest.mark.parametrize("table", ["int8", "int16"])
def test_inputs_are_looked_up(table: str) -> None:
    net = Builder(0, (3, 5, 5))
    net.look_up(table)
    net.layer("first", 4, "ternary", (-1, 0, 1))
    assert_right(net.head(), net.bytes)


def test_classes_and_values_follow_from_the_metadata() -> None:
    net = Builder(0, (2, 4, 4), batch=30)
    net.layer("first", 3, "ternary", (-1, 0, 1))
    network = net.head(3)
    written = {each.key: each.value for each in export.model(network).metadata_props}
    order, scales = (np.array(json.loads(written[key])) for key in ("order", "scales"))
    scores = network(net.bytes).numpy()
    assert len({*network.predict(net.bytes).tolist()}) > 1
    np.testing.assert_array_equal((scores * order).argmax(1), network.predict(net.bytes).numpy())
    np.testing.assert_array_equal(scores * scales, network.values(net.bytes).numpy())
    assert (written["digest"], written["zero"]) == (network.digest, "0")


def test_last_layers_are_in_float64_where_their_sums_are_wide() -> None:
    net = Builder(0, (64, 4, 4))
    network = net.head(3, "int12")
    assert max(-network.last.low, network.last.high) > 2**24
    assert_right(network, net.bytes)


def test_sums_that_float32_rounds_raise() -> None:
    net = Builder(0, (64, 4, 4))
    net.flatten("flat")
    net.sum("too.wide", 4, "int12")
    net.requantise("stair")
    net.sum("sum", 3, "ternary")
    net.scores("last")
    with pytest.raises(ExportError, match=r"'too\.wide': QONNX holds integers below"):
        export.model(net.network())
