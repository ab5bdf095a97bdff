"""What C and ONNX are written for, and what files say of themselves."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from compiled import needs_compiler
from random_networks import LEVELS, RandomBuilder

import softstair as ss
from softstair.deploy import c
from softstair.deploy.target import HERE, Cpu, target_of

CPUS: tuple[Cpu, ...] = get_args(Cpu)


def deep() -> RandomBuilder:
    """A layer for tiles, and a linear layer."""
    net = RandomBuilder(0, (1, 16, 16), zero=0, batch=2)
    net.layer("first", 64, "ternary", LEVELS["ternary"], even=True, padding=(1, 1))
    net.layer("deep", 64, "ternary", LEVELS["ternary"], even=True, padding=(1, 1))
    net.max_pool("pool", 4, 4, 0)
    net.flatten("flat")
    net.layer("linear", 8, "ternary", LEVELS["ternary"], even=True)
    net.scores("last", 4)
    return net


def tiles_of(plan: c.MemoryPlan | None) -> list[str]:
    assert plan is not None
    return [row.names[0] for row in plan.rows if row.in_tiles]


def test_this_machine_is_the_default(tmp_path: Path) -> None:
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    assert ("x86" if is_x86 else "arm", "onnxruntime") == HERE
    assert target_of("onnx", None, "openvino") == (HERE.cpu, "openvino")
    network = deep().network()
    plans = [
        ss.deploy.export(network, tmp_path / "c", cpu=cpu, check=False).plan
        for cpu in (None, HERE.cpu)
    ]
    assert plans[0] == plans[1] == c.memory_plan(network, cpu=HERE.cpu)


def test_c_for_x86_has_no_tiles(tmp_path: Path) -> None:
    network = deep().network()
    write = lambda cpu, scratch=None: (
        ss.deploy.export(network, tmp_path / cpu, cpu=cpu, scratch=scratch, check=False).plan
    )
    x86, arm = (write(cpu) for cpu in CPUS)
    assert (tiles_of(x86), tiles_of(arm)) == ([], ["deep"])
    for cpu in CPUS:
        assert f" for {cpu}." in (tmp_path / cpu / "network.h").read_text().splitlines()[0]
    assert tiles_of(write("arm", 16384)) == []
    with pytest.raises(ss.SoftstairError, match="scratch is for ARM"):
        write("x86", 2**20)


@pytest.mark.nightly
@needs_compiler
@pytest.mark.parametrize("cpu", CPUS)
def test_c_of_either_cpu_is_right_on_this_one(cpu: Cpu, tmp_path: Path) -> None:
    net = deep()
    exported = ss.deploy.export(net.network(), tmp_path / "c", x=net.bytes, cpu=cpu)
    assert exported.mismatches == 0
    assert tiles_of(exported.plan) == (["deep"] if cpu == "arm" else [])


@pytest.mark.parametrize(
    ("to", "options", "message"),
    [
        ("qonnx", {"cpu": HERE.cpu}, "cpu must be left out for the format 'qonnx'"),
        ("qonnx", {"runtime": "openvino"}, "runtime must be left out for the format 'qonnx'"),
        ("c", {"runtime": "openvino"}, "runtime must be left out for the format 'c'"),
        ("c", {"cpu": "x68"}, "cpu must be x86 or arm, but 'x68' was given"),
        ("onnx", {"runtime": "tvm"}, "runtime must be onnxruntime or openvino, but 'tvm'"),
        ("onnx", {"threads": 2}, "threads is for C, but the format is 'onnx'"),
        ("onnx", {"scratch": 0}, "scratch is for C, but the format is 'onnx'"),
        ("qonnx", {"fit_ram": 1000}, "fit_ram is for C, but the format is 'qonnx'"),
        ("c", {"fit_flash": -1}, "fit_flash must be an integer of at least 0"),
        ("c", {"threads": 3}, "threads must be an integer from 1 to 2, but 3"),
        ("C", {}, "to must be one of onnx, qonnx, c"),
    ],
)
def test_options_of_other_formats_are_refused(
    to: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ss.SoftstairError, match=message):
        ss.deploy.export(deep().network(), tmp_path / "out", to, **options)
    assert not [*tmp_path.iterdir()]


def test_one_call_writes_for_cpu_and_runtime(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="needs onnx")
    pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    layers = torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()
    model = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(32, 3))
    net = ss.quantise(model, ss.Stair.ternary(), ss.Stair.ternary(), skip="4")
    frozen = ss.freeze(net, (1, 4, 4), zero=128, scale=64.0)
    path = tmp_path / "network.onnx"
    exported = ss.deploy.export(frozen, path, "onnx", cpu="arm", runtime="openvino")
    assert exported.mismatches == 0
    written = {each.key: each.value for each in onnx.load(path).metadata_props}
    assert (written["cpu"], written["runtime"]) == ("arm", "openvino")


def test_c_says_its_version_and_the_digest_of_its_network(tmp_path: Path) -> None:
    network = deep().network()
    first, second = (
        [file.read_bytes() for file in ss.deploy.export(network, folder, check=False).files]
        for folder in (tmp_path / "first", tmp_path / "second")
    )
    assert first == second
    header = (tmp_path / "first/network.h").read_text()
    assert f"softstair {ss.__version__} " in header
    assert network.digest in header
