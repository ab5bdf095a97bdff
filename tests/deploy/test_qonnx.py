"""QONNX files against the integer network, under the executor of the qonnx package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_networks import KINDS, STAIRS, Growing, random_network

from softstair.deploy import ExportError, IntegerNetwork
from softstair.deploy import qonnx as export

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
def an_older_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """qonnx has ONNX Runtime run a model of one node at a time, in onnx's newest format, which may
    be newer than the runtime reads."""
    monkeypatch.setattr(onnx, "IR_VERSION", 8)


def execute(model: Any, x: torch.Tensor, everything: bool = True) -> dict[str, np.ndarray]:
    name = model.graph.input[0].name
    return execute_onnx(model, {name: x.numpy().astype(np.float32)}, everything)


def assert_equal(network: IntegerNetwork, x: torch.Tensor, got: dict[str, np.ndarray]) -> None:
    want, tensors = network.features(x), export.feature_tensors(network)
    for node in network.nodes[:-1]:
        np.testing.assert_array_equal(got[tensors[node.name]], want[node.name].numpy(), node.name)
    scores = want[network.nodes[-1].name].numpy()
    spread = float(np.abs(scores).max())
    np.testing.assert_allclose(got["scores"], scores, rtol=1e-5, atol=1e-5 * spread)


@pytest.mark.parametrize("seed", range(8))
def test_random_networks(tmp_path: Path, seed: int) -> None:
    grown = random_network(seed, shortcut=False, widest=False)
    network, x = grown.network(), grown.bytes
    assert grown.hits > 0
    path = export.write(network, tmp_path / "network.onnx")
    # As it is written, an image at a time.
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
    kinds = {one.op_type for one in clean.graph.node}
    assert "MultiThreshold" in kinds
    assert kinds & {"Quant", "BipolarQuant"}


@pytest.mark.parametrize(
    ("kind", "stair"), [*zip([*KINDS][:-1], STAIRS, strict=False), ("ternary", "uint6")]
)
def test_tensors_say_which_integers_they_hold(kind: str, stair: str) -> None:
    net = Growing(1, (3, 5, 5), zero=121)
    net.sum("conv", 4, kind)
    net.steps("stair", STAIRS[stair])
    net.flat("flat")
    net.scores("scores", 3)
    network = net.network()
    model = ModelWrapper(export.model(network))
    got = execute(model, net.bytes[:1])
    assert_equal(network, net.bytes[:1], got)
    said = {name: model.get_tensor_datatype(name) for name in ("bytes", "conv", "stair")}
    for name, integers in said.items():
        assert integers.is_integer()
        assert np.all(integers.allowed(got[name])), (name, integers)
    weight = model.get_tensor_datatype("conv_weight")
    assert np.all(weight.allowed(np.array(KINDS[kind], np.float32)))
    assert weight.bitwidth() == {"ternary": 2, "sign": 1, "switches": 1, "even": 4}.get(
        kind, int(kind[-1:] or 0, 36)
    )
    # qonnx comes to the same types by its own rules.
    inferred = model.transform(InferDataTypes())
    assert inferred.get_tensor_datatype("stair") == said["stair"]
    assert inferred.get_tensor_datatype("conv_weight") == weight
    if stair == "sign":
        assert said["stair"] == DataType["BIPOLAR"]


def test_a_shortcut_into_a_stair_is_refused_by_name() -> None:
    net = Growing(0, (3, 6, 6), zero=3)
    net.sum("first", 4, "ternary", padding=(1, 1))
    start = net.steps("first.stair", (-1, 0, 1))
    net.sum("deep", 4, "ternary", padding=(1, 1))
    net.steps("my.block", (-1, 0, 1), beside=start)
    net.flat("flat")
    net.scores("last", 3)
    with pytest.raises(ExportError, match=r"'my\.block': QONNX cannot add a shortcut"):
        export.model(net.network())


def test_sums_beyond_the_whole_numbers_of_float32_are_refused_by_name() -> None:
    net = Growing(0, (64, 4, 4), zero=0)
    net.flat("flat")
    net.sum("too.wide", 4, "int12")
    net.rescaled("scores")
    with pytest.raises(ExportError, match=r"'too\.wide': QONNX holds integers below"):
        export.model(net.network())
