"""QONNX files against the integer network, under the executor of the qonnx package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_networks import LEVELS, WEIGHT_BITS, WEIGHTS, RandomBuilder, random_network
from test_affine import residual_network
from torch import nn

import softstair as ss
from softstair.deploy import ExportError, IntegerNetwork, integerise, nodes, qonnx as export
from softstair.models import ResidualBlock

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


def assert_equal(network: IntegerNetwork, x: torch.Tensor, actual: dict[str, np.ndarray]) -> None:
    expected, tensors = network.features(x), export.feature_tensors(network)
    for node in network.nodes[:-1]:
        result = actual[tensors[node.name]]
        np.testing.assert_array_equal(result, expected[node.name].numpy(), node.name)
    scores = expected[network.nodes[-1].name].numpy()
    if isinstance(network.last, nodes.Rescaled):
        np.testing.assert_array_equal(actual["scores"], scores)
    spread = float(np.abs(scores).max())
    np.testing.assert_allclose(actual["scores"], scores, rtol=1e-5, atol=1e-5 * spread)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("seed", range(8))
def test_random_networks_are_equal(tmp_path: Path, seed: int) -> None:
    builder = random_network(seed, monotone=True, widest=False)
    network, x = builder.network(), builder.bytes
    assert builder.sums_on_thresholds > 0
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
    np.testing.assert_array_equal(scores, execute(model, x)["scores"])
    kinds = {node.op_type for node in clean.graph.node}
    assert "MultiThreshold" in kinds
    assert kinds & {"Quant", "BipolarQuant"}


@pytest.mark.parametrize(
    ("kind", "stair"), [*zip([*WEIGHTS][:-1], LEVELS, strict=False), ("ternary", "uint6")]
)
def test_tensors_are_annotated_with_their_integer_type(kind: str, stair: str) -> None:
    net = RandomBuilder(1, (3, 5, 5), zero=121)
    net.sum("conv", 4, kind)
    net.steps("stair", LEVELS[stair])
    net.flatten("flat")
    net.scores("scores", 3)
    network = net.network()
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


def test_residual_networks_are_equal() -> None:
    torch.manual_seed(2)
    stem = (nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), ResidualBlock(5, 5, 1))
    model = nn.Sequential(*stem, nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(80, 3))
    model[3].activation = nn.Identity()  # the stair follows another normalisation
    net = ss.quantise(model, ss.Stair.ternary(), ss.Stair.linear(2, quantum=0.25), skip="7")
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)  # some are negative
            nn.init.normal_(module.bias)
    x = torch.randint(256, (6, 2, 4, 4), dtype=torch.uint8)
    net((x.float() - 128) / 64)
    network = integerise(net.eval(), (2, 4, 4), zero=128, scale=64.0)
    assert sum(isinstance(node, nodes.Steps) and len(node.inputs) == 2 for node in network.nodes)
    model = ModelWrapper(export.model(network)).transform(ChangeBatchSize(len(x)))
    assert_equal(network, x, execute(model.transform(InferShapes()), x))


def test_shortcuts_of_many_levels_are_equal_and_small() -> None:
    network = residual_network(0.0235, bits=6)
    x = torch.randint(256, (4, 1, 8, 8), dtype=torch.uint8)
    model = ModelWrapper(export.model(network)).transform(ChangeBatchSize(len(x)))
    assert len(model.get_nodes_by_op_type("MultiThreshold")) == 4  # one per stair
    actual = execute(model.transform(InferShapes()), x)
    assert_equal(network, x, actual)
    (scores,) = execute(cleanup_model(model), x, everything=False).values()
    np.testing.assert_array_equal(scores, actual["scores"])


def test_thresholds_without_order_in_the_shortcut_raise() -> None:
    """Those of a trained network have one; :func:`test_residual_networks_are_equal` has such."""
    net = RandomBuilder(0, (3, 6, 6), zero=3)
    start = net.layer("first", 4, "ternary", (-1, 0, 1), padding=(1, 1))
    net.sum("deep", 4, "ternary", padding=(1, 1))
    net.steps("my.block", (-1, 0, 1), shortcut=start)
    net.flatten("flat")
    net.scores("last", 3)
    with pytest.raises(ExportError, match=r"'my\.block': .* neither fall nor rise"):
        export.model(net.network())


def test_sums_that_float32_rounds_raise() -> None:
    net = RandomBuilder(0, (64, 4, 4), zero=0)
    net.flatten("flat")
    net.sum("too.wide", 4, "int12")
    net.rescaled("scores")
    with pytest.raises(ExportError, match=r"'too\.wide': QONNX holds integers below"):
        export.model(net.network())
