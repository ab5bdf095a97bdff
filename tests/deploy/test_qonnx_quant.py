"""QONNX of Quant nodes against the frozen network: in qonnx's executor and hls4ml's simulation."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from random_modules import SCALE, ZERO, generate, inputs
from random_networks import LEVELS, RandomBuilder
from torch import nn

import softstair as ss
from softstair.data import load
from softstair.deploy import ExportError, FrozenNetwork, processes, qonnx_quant
from softstair.deploy.onnx_graph import OnnxGraph

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("qonnx", reason="qonnx is not installed")

from qonnx.core.modelwrapper import ModelWrapper  # noqa: E402
from test_qonnx import execute, older_format  # noqa: E402, F401


def assert_right(network: FrozenNetwork, x: torch.Tensor) -> Any:
    """Compare every node of a file, an example at a time; return the file."""
    model, names = ModelWrapper(qonnx_quant.model(network)), OnnxGraph(network).identifiers
    for example in x.split(1):
        actual, expected = execute(model, example), network.features(example)
        for node in network.nodes[:-1]:
            result = actual[names[node.name]]
            np.testing.assert_array_equal(result, expected[node.name].numpy(), node.name)
    return model


@pytest.mark.parametrize(
    "levels",
    [(0, 1), (-1, 0), (-1, 1), (-1, 0, 1), (-2, -1, 0, 1), (1, 2), (0, 1, 2, 3), (-3, 0, 3)],
)
def test_levels_that_fill_bits_are_equal(levels: tuple[int, ...]) -> None:
    for shape in ((2, 5, 5), (7,)):
        net = RandomBuilder(1, shape, zero=9)
        net.layer("first", 4, "int4", levels, even=True)
        net.flatten("flat") if len(shape) > 1 else None
        net.scores("last", 3)
        model = assert_right(net.network(), net.bytes[:3])
        kinds = Counter(node.op_type for node in model.graph.node)
        assert not {"MultiThreshold", "Cast", "BipolarQuant"} & {*kinds}
        assert kinds["BatchNormalization"] == (len(shape) > 1)


@pytest.mark.parametrize(
    ("levels", "reason"),
    [((0, 1, 2, 3, 4), "5 levels fill no number of bits"), (None, "no affine steps")],
)
def test_what_has_no_quant_is_refused_by_name(levels: Any, reason: str) -> None:
    net = RandomBuilder(0, (2, 5, 5), zero=9)
    net.layer("first", 4, "int4", levels or LEVELS["uint4"], even=levels is not None)
    net.flatten("flat")
    net.scores("last", 3)
    with pytest.raises(ExportError, match=f"'first.stair'.*{reason}"):
        qonnx_quant.model(net.network())


@pytest.mark.parametrize(
    "seeds",
    [
        range(3),
        pytest.param(range(100, 600), marks=pytest.mark.nightly),
        pytest.param(range(5000, 5500), marks=pytest.mark.nightly),
    ],
)
@pytest.mark.filterwarnings("ignore:all weights of")
def test_random_networks_are_equal_or_refused(seeds: range) -> None:
    done = Counter[str]()
    for seed in seeds:
        generated = generate(seed)
        with torch.no_grad():
            net = generated.quantised(inputs(generated))
        try:
            frozen = ss.freeze(net, generated.shape, zero=ZERO, scale=SCALE)
        except ExportError:
            done["not frozen"] += 1
            continue
        try:
            assert_right(frozen, inputs(generated)[:2])
            done["equal"] += 1
        except ExportError:
            done["refused"] += 1
    assert done["equal"] > 0.15 * len(seeds), done


def model_of(kind: str) -> nn.Module:
    stage = lambda width: (nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2))
    if kind == "cnn":
        return nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1, bias=False), *stage(6),
            nn.Conv2d(6, 8, 3, padding=1, bias=False), *stage(8),
            nn.Flatten(), nn.Linear(32, 10),
        )  # fmt: skip
    parts = [nn.Flatten(), nn.Linear(64, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU()]
    parts += [nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10)]
    return nn.Sequential(*parts)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("stair", ["ternary", "int4"])
def test_sums_are_equal_in_the_simulation_of_hls4ml(kind: str, stair: str) -> None:
    if reason := processes.absent("hls4ml"):
        pytest.skip(reason)
    torch.manual_seed(0)
    model, x = model_of(kind), load("digits").x
    model.train()((x - 8.0) / 4)  # statistics
    net = ss.quantise(model.eval(), stair, skip=str(len(model) - 1))
    ss.calibrate(net, [(x[:300] - 8.0) / 4])
    frozen = ss.freeze(net, (1, 8, 8), zero=8, scale=4.0)
    assert len(frozen.features(x)[frozen.stairs[-1]].unique()) > 2
    found = ss.deploy.verify(frozen, None, x[:500], runtime="hls4ml", timed=False)
    assert found.wrong == {"scores": 0, "class": 0}
    assert found.compared["scores"] == 5000
