"""What C and ONNX are written for, and what files say of themselves."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from compiled import needs_compiler
from random_networks import LEVELS, RandomBuilder, random_network
from test_onnx import assert_equal, run

import softstair as ss
from softstair.deploy import IntegerNetwork, c, nodes, onnx as export, qonnx
from softstair.deploy.c.program import memory_plan, sources
from softstair.deploy.comparison import c_runner, write
from softstair.deploy.target import HERE, Cpu, Target, target_of

onnx = pytest.importorskip("onnx", reason="onnx is not installed")

OPENVINO = Target(runtime="openvino")
CPUS: tuple[Cpu, ...] = get_args(Cpu)


def deep(seed: int = 0, outputs: int = 64) -> RandomBuilder:
    """A layer for tiles, whose inputs are int8 on ARM, and a linear layer."""
    net = RandomBuilder(seed, (1, 16, 16), zero=0, batch=2)
    net.layer("first", 64, "ternary", LEVELS["ternary"], even=True, padding=(1, 1))
    net.layer("deep", outputs, "ternary", LEVELS["ternary"], even=True, padding=(1, 1))
    net.max_pool("pool", 4, 4, 0)
    net.flatten("flat")
    net.layer("linear", 8, "ternary", LEVELS["ternary"], even=True)
    net.scores("last", 4)
    return net


def properties(model: Any) -> dict[str, str]:
    return {each.key: each.value for each in model.metadata_props}


def int8_inputs(model: Any) -> int:
    """Return how many QLinearConv read int8."""
    types = {
        tensor.name: onnx.numpy_helper.to_array(tensor).dtype for tensor in model.graph.initializer
    }
    convs = [node for node in model.graph.node if node.op_type == "QLinearConv"]
    return sum(types[node.input[2]] == np.int8 for node in convs)


def test_this_machine_is_the_default() -> None:
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    assert ("x86" if is_x86 else "arm", "onnxruntime") == HERE
    assert target_of("onnx", None, "openvino") == (HERE.cpu, "openvino")
    model = export.model(deep().network())
    assert (properties(model)["cpu"], properties(model)["runtime"]) == HERE
    assert int8_inputs(model) == (HERE.cpu == "arm")


@pytest.mark.parametrize("cpu", CPUS)
def test_onnx_for_x86_has_no_int8_features(cpu: Cpu) -> None:
    net = deep()
    model = export.model(net.network(), features=True, target=Target(cpu))
    assert int8_inputs(model) == (cpu == "arm")
    assert properties(model)["cpu"] == cpu
    assert_equal(net.network(), net.bytes, run(model, net.bytes))


def test_c_for_x86_has_no_tiles(tmp_path: Path) -> None:
    network = deep().network()
    plans = {cpu: c.write(network, tmp_path / cpu, cpu=cpu) for cpu in CPUS}
    assert {cpu: any(row.in_tiles for row in plan.rows) for cpu, plan in plans.items()} == {
        "x86": False,
        "arm": True,
    }
    assert plans["x86"] == c.write(network, tmp_path / "small", scratch=16384, cpu="arm")
    assert plans["arm"] == c.write(network, tmp_path / "tiles", scratch=2**20, cpu="x86")
    assert memory_plan(network).ram == plans[HERE.cpu].ram  # as in report
    for cpu in CPUS:
        assert f" for {cpu}." in (tmp_path / cpu / "network.h").read_text().splitlines()[0]
        assert write(network, tmp_path / f"command-{cpu}", "c", target=Target(cpu)) == plans[cpu]


@pytest.mark.nightly
@needs_compiler
@pytest.mark.parametrize("cpu", CPUS)
def test_c_of_either_cpu_is_right_on_this_one(cpu: Cpu, tmp_path: Path) -> None:
    net, scratch = deep(), c.SCRATCH_OF[cpu]
    assert any(row.in_tiles for row in memory_plan(net.network(), scratch).rows) == (cpu == "arm")
    actual = c_runner(net.network(), tmp_path, scratch)(net.bytes)
    expected = net.network().features(net.bytes)
    for name in ("first.stair", "deep.stair", "linear.stair"):
        assert torch.equal(actual[name], expected[name])


def test_options_of_other_formats_are_refused(tmp_path: Path) -> None:
    net = ss.quantise(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2)), "int4")
    refuse = lambda to, **given: ss.deploy.export(net, (1, 2, 2), 0, 1.0, tmp_path, to, **given)
    for to, given, message in (
        ("qonnx", {"cpu": HERE.cpu}, "cpu must be left out for the format 'qonnx'"),
        ("qonnx", {"runtime": "openvino"}, "runtime must be left out for the format 'qonnx'"),
        ("c", {"runtime": "openvino"}, "runtime must be left out for the format 'c'"),
        ("c", {"cpu": "x68"}, "cpu must be x86 or arm, but 'x68' was given"),
        ("onnx", {"runtime": "tvm"}, "runtime must be onnxruntime or openvino, but 'tvm'"),
    ):
        with pytest.raises(ValueError, match=message):
            refuse(to, **given)
    assert not [*tmp_path.iterdir()]


def test_onnx_for_openvino_has_none_of_what_it_reads_wrongly() -> None:
    net = deep()
    plain, model = (export.model(net.network(), True, target=each) for each in (HERE, OPENVINO))
    kinds = [node.op_type for node in model.graph.node]
    assert "QLinearConv" not in kinds
    assert {"ConvInteger", "MatMulInteger"} <= {*kinds}
    stored = {tensor.name for tensor in model.graph.initializer}
    assert all(n.input[1] in stored for n in model.graph.node if n.op_type == "MatMulInteger")
    assert "runtime=openvino" in properties(plain)["note"]
    assert "INFERENCE_PRECISION_HINT" in properties(model)["note"]
    assert properties(model)["runtime"] == "openvino"
    actual, outputs = run(model, net.bytes), export.feature_outputs(net.network(), OPENVINO)
    for name, expected in net.network().features(net.bytes).items():
        if name != "last":
            np.testing.assert_array_equal(actual[outputs[name]], expected.numpy(), name)


def test_one_call_writes_for_cpu_and_runtime(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    layers = torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()
    model = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(32, 3))
    net = ss.quantise(model, ss.Stair.ternary(), ss.Stair.ternary(), skip="4")
    given = (net, (1, 4, 4), 128, 64.0, tmp_path, "onnx")
    exported = ss.deploy.export(*given, cpu="arm", runtime="openvino")
    assert exported.mismatches == 0
    written = properties(onnx.load(exported.path))
    assert (written["cpu"], written["runtime"]) == ("arm", "openvino")


def wrong_in_openvino(network: IntegerNetwork, x: torch.Tensor, target: Target) -> int:
    """Return how many features differ if OpenVINO runs the file for a target."""
    openvino = pytest.importorskip("openvino", reason="openvino is not installed")
    data = export.model(network, features=True, target=target).SerializeToString()
    read = openvino.Core().read_model(data)
    network_of = openvino.Core().compile_model(read, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    results = network_of({"bytes": x.numpy()})
    actual = {name: results[port] for port in network_of.outputs for name in port.get_names()}
    outputs, expected = export.feature_outputs(network, target), network.features(x)
    features = [name for name in outputs if name != network.last.name]
    given = {name: torch.tensor(actual[outputs[name]]).view_as(expected[name]) for name in features}
    return sum(int((given[name] != expected[name]).sum()) for name in features)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(12))
def test_openvino_reads_its_own_files_right(seed: int) -> None:
    builder = random_network(seed) if seed else deep()
    assert wrong_in_openvino(builder.network(), builder.bytes, OPENVINO) == 0


@pytest.mark.nightly
def test_openvino_reads_other_files_wrongly() -> None:
    """If this fails, OpenVINO has been mended and reads the file that is faster."""
    builder = RandomBuilder(0, (64, 8, 8), zero=0, batch=2)
    builder.layer("square", 64, "ternary", LEVELS["ternary"], even=True, padding=(1, 1))
    builder.flatten("flat")
    builder.scores("last", 4)
    assert wrong_in_openvino(builder.network(), builder.bytes, OPENVINO) == 0
    assert wrong_in_openvino(builder.network(), builder.bytes, Target("x86")) > 0


def test_files_say_their_version_and_the_digest_of_their_weights(tmp_path: Path) -> None:
    network, same, other = (deep(seed).network() for seed in (0, 0, 1))
    assert network.digest == same.digest != other.digest
    sums = [node.weight for node in network.nodes if isinstance(node, nodes.Sum | nodes.Scores)]
    sums[1][0, 0, 0, 0] ^= 1
    assert network.digest != same.digest
    tables = next(node.thresholds for node in same.nodes if isinstance(node, nodes.Steps))
    before = same.digest
    tables[0, 0] += 1
    assert same.digest != before
    for model in (export.model(same), qonnx.model(same)):
        written = properties(model)
        assert written["softstair"] == model.producer_version == ss.__version__
        assert written["digest"] == same.digest
    assert len(bytes.fromhex(same.digest)) == hashlib.sha256().digest_size
    header = sources(same, "network")[0]["network.h"]
    assert f"softstair {ss.__version__} " in header
    assert same.digest in header
    for folder in ("first", "second"):
        c.write(same, tmp_path / folder)
        export.write(same, tmp_path / folder / "network.onnx")
    first, second = ({f.name: f.read_bytes() for f in path.iterdir() if f.is_file()}
                     for path in (tmp_path / "first", tmp_path / "second"))  # fmt: skip
    assert first == second
