"""VGG8 with ternary weights and features in C and ONNX, compared with float and INT8 networks.

    python benchmarks/deployed.py [--repeats 200] [--json figures.json]

ONNX Runtime runs our ONNX file, the float twin, and the twin after ONNX Runtime's own static
quantisation to INT8. One image at a time, one thread; all take turns on one core. Shows the median
of the elapsed time and of the CPU time of the thread. Needs a C compiler, onnx and onnxruntime.
"""

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import nn

import softstair as ss
from sentence import tell
from softstair.deploy import IntegerNetwork, integerise
from softstair.deploy.c import MemoryPlan, write
from softstair.deploy.onnx import model as onnx_model
from softstair.models import last_layer, vgg8

SHAPE = (3, 32, 32)
FLAGS = ("-std=c99", "-O3", "-march=native", "-fno-tree-loop-distribute-patterns")


def float_graph(model: nn.Module) -> bytes:
    """Return a chain of float modules in eval mode as an ONNX file."""
    nodes, weights, last = [], [], "input"

    def constant(name: str, value: torch.Tensor) -> str:
        weights.append(numpy_helper.from_array(value.detach().numpy(), name))
        return name

    leaves = [(name, module) for name, module in model.named_modules() if not [*module.children()]]
    for name, module in leaves:
        inputs, attributes = [last], {}
        if isinstance(module, nn.Conv2d):
            kind, attributes = "Conv", {"pads": [*module.padding, *module.padding]}
            inputs.append(constant(f"{name}.weight", module.weight))
        elif isinstance(module, nn.Linear):
            kind, attributes = "Gemm", {"transB": 1}
            inputs.append(constant(f"{name}.weight", module.weight))
            if module.bias is not None:
                inputs.append(constant(f"{name}.bias", module.bias))
        elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            kind, attributes = "BatchNormalization", {"epsilon": module.eps}
            parts = (module.weight, module.bias, module.running_mean, module.running_var)
            inputs += [constant(f"{name}.{i}", part) for i, part in enumerate(parts)]
        elif isinstance(module, nn.MaxPool2d):
            size = module.kernel_size
            kind, attributes = "MaxPool", {"kernel_shape": [size, size], "strides": [size, size]}
        else:
            kind = {nn.ReLU: "Relu", nn.Flatten: "Flatten"}[type(module)]
        last = name
        nodes.append(helper.make_node(kind, inputs, [last], **attributes))
    value = lambda name, *shape: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
    graph = helper.make_graph(
        nodes, "float", [value("input", 1, *SHAPE)], [value(last, 1, 10)], weights
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    proto.ir_version = 8
    onnx.checker.check_model(proto)
    return proto.SerializeToString()


def session_of(file: bytes | str) -> onnxruntime.InferenceSession:
    """Return a session with one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def runtime(model: nn.Module) -> Callable[[], Any]:
    """Return a call of ONNX Runtime on the float network."""
    session = session_of(float_graph(model))
    x = torch.randn(1, *SHAPE)
    (scores,) = session.run(None, {"input": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(scores), model(x).detach(), rtol=1e-3, atol=1e-3)
    given = {"input": x.numpy()}
    return lambda: session.run(None, given)


class RandomImages(CalibrationDataReader):
    """Images for the ranges of the features."""

    def __init__(self, count: int = 8) -> None:
        self.images = iter(torch.randn(count, 1, *SHAPE).numpy())

    def get_next(self) -> dict[str, Any] | None:
        image = next(self.images, None)
        return None if image is None else {"input": image}


def int8(model: nn.Module, folder: Path) -> Callable[[], Any]:
    """Return a call of ONNX Runtime on its own INT8 of the float network."""
    (folder / "float.onnx").write_bytes(float_graph(model))
    files = [str(folder / name) for name in ("float.onnx", "fused.onnx", "int8.onnx")]
    quant_pre_process(*files[:2], skip_symbolic_shape=True)
    types = {"activation_type": QuantType.QInt8, "weight_type": QuantType.QInt8}
    quantize_static(*files[1:], RandomImages(), per_channel=True, **types)
    session, given = session_of(files[2]), {"input": torch.randn(1, *SHAPE).numpy()}
    return lambda: session.run(None, given)


def ternary_network(model: nn.Module) -> IntegerNetwork:
    """Return the same network with ternary weights and features."""
    net = ss.quantise(model, ss.Stair.ternary(), ss.Stair.ternary(), skip=last_layer(model)).eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            # So that all three levels occur.
            module.running_var = torch.full_like(module.running_var, 400.0)
            module.bias.data.normal_()
    return integerise(net, SHAPE, zero=121, scale=64.0)


def exported(network: IntegerNetwork) -> Callable[[], Any]:
    """Return a call of ONNX Runtime on our ONNX file."""
    session = session_of(onnx_model(network).SerializeToString())
    x = torch.randint(256, (1, *SHAPE), dtype=torch.uint8)
    scores, _ = session.run(None, {"bytes": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(scores), network(x), rtol=1e-4, atol=1e-4)
    given = {"bytes": x.numpy()}
    return lambda: session.run(None, given)


def compiled(network: IntegerNetwork, folder: Path) -> tuple[Callable[[], Any], MemoryPlan]:
    """Return a call of our C."""
    plan = write(network, folder)
    command = ["cc", *FLAGS, "-shared", "-fPIC", "-o", "network.so", "network.c"]
    subprocess.run(command, cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "network.so"))
    image = np.random.default_rng(0).integers(0, 256, SHAPE, dtype=np.uint8)
    scores = np.zeros(10, dtype=np.float32)
    places = (ctypes.c_void_p(image.ctypes.data), ctypes.c_void_p(scores.ctypes.data))
    library.network_run(*places)
    expected = network(torch.from_numpy(image)[None])[0]
    torch.testing.assert_close(torch.from_numpy(scores), expected, rtol=1e-4, atol=1e-4)
    return lambda: library.network_run(*places), plan


def measure(contestants: dict[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds of each contestant; they take turns."""
    times: dict[str, list[tuple[int, int]]] = {name: [] for name in contestants}
    for turn in range(repeats + 5):
        for name, run in contestants.items():
            before = time.perf_counter_ns(), time.thread_time_ns()
            run()
            after = time.perf_counter_ns(), time.thread_time_ns()
            if turn >= 5:
                times[name].append((after[0] - before[0], after[1] - before[1]))
    return {
        name: {
            "clock_ms": statistics.median(clock for clock, _ in pairs) / 1e6,
            "thread_ms": statistics.median(thread for _, thread in pairs) / 1e6,
        }
        for name, pairs in times.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    model = vgg8().eval()
    with tempfile.TemporaryDirectory() as folder:
        network = ternary_network(model)
        run, plan = compiled(network, Path(folder) / "c")
        contestants = {
            f"float, ONNX Runtime {onnxruntime.__version__}": runtime(model),
            "INT8 by ONNX Runtime": int8(model, Path(folder)),
            "ternary, our ONNX in ONNX Runtime": exported(network),
            "ternary, C": run,
        }
        figures = measure(contestants, arguments.repeats)
    ternary = [row for row in plan.rows if row.weights and row.how != "floats"]
    bits = 8 * plan.flash / sum(row.weights for row in ternary)
    print(f"{'VGG8, one image, one core':36} {'ms by the clock':>16} {'ms of the thread':>17}")
    for name, times in figures.items():
        print(f"{name:36} {times['clock_ms']:16.2f} {times['thread_ms']:17.2f}")
    slow, *_, fast = figures.values()
    ratios = {kind: slow[kind] / fast[kind] for kind in slow}
    print(
        f"{'C: times as fast as float':36} {ratios['clock_ms']:16.2f} {ratios['thread_ms']:17.2f}"
    )
    print(f"{bits:.3f} bits of constants for each ternary weight, {plan.ram:,} bytes of memory")
    if arguments.json:
        machine = {"processor": platform.machine(), "system": platform.system()}
        result = {
            "machine": machine,
            "figures": figures,
            "ratios": ratios,
            "repeats": arguments.repeats,
        }
        result |= {"bits_per_weight": bits, "flash": plan.flash, "ram": plan.ram}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if ratios["clock_ms"] >= 2.0 else 1


if __name__ == "__main__":
    tell(main)
