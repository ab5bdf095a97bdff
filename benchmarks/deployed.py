"""VGG8 in ternary and DSCNN in INT4, in C, ONNX and .tflite, beside others in float and INT8.

    python -m benchmarks.deployed [--repeats 60] [--networks VGG8 DSCNN] [--json figures.json]
                                  [--cmsis-nn PATH]

The other runtimes run the float twin and their own INT8 of it; `runtimes.py` says what to install.
One that cannot be imported is left out, and the output says so. VGG8 and the twins have random
weights, DSCNN is `speech-dscnn-int4` of the zoo. One input at a time, one thread; each runs in a
process of its own, and all take turns on one core. Shows medians of the CPU time and the elapsed
time, the size of the file, and the memory that the runtime and the network add to a Python process.
--cmsis-nn also counts the instructions of DSCNN on an emulated Cortex-M4, ours and as INT8 in
CMSIS-NN; PATH is a clone of it (see `cmsis_nn.py` and `cortex.py`). Exits with 1 if a goal is
missed. Needs Linux, a C compiler, onnx, onnxruntime and ai-edge-litert.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections import OrderedDict
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

import softstair as ss
from benchmarks import cmsis_nn
from benchmarks.cortex import emulate
from benchmarks.runtimes import RUNTIMES
from benchmarks.sentence import tell
from softstair.deploy import tflite
from softstair.deploy.c import write
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.onnx import model as onnx_model
from softstair.models import dscnn, last_layer, vgg8
from softstair.train.network import deployed

FLAGS = ("-std=c99", "-O3", "-march=native", "-fno-builtin")
SCRIPT = Path(__file__).with_name("runtimes.py")
PACKAGES = {"LiteRT": "ai-edge-litert"}
CALLS = {"VGG8": 1, "DSCNN": 5}  # timed calls a turn
ONNX, TFLITE = "ours, ONNX in ONNX Runtime", "ours, .tflite in LiteRT"
GOALS = {
    "VGG8": (
        ("ours, C", 2, "INT8"),
        ("ours, C", 9, "ONNX float"),
        (ONNX, 1, "ONNX INT8"),
        (TFLITE, 0.95, "LiteRT INT8"),
    ),
    "DSCNN": (
        ("ours, C", 1, "LiteRT INT8"),
        (ONNX, 1, "ONNX INT8"),
        (TFLITE, 0.85, "LiteRT INT8"),
    ),
}
"""(ours, how many times as fast at least, words in the names of the peers)."""


class Contestant:
    """A network in a process of its own: see ``runtimes.serve``."""

    def __init__(self, runtime: str, file: Path, x: Tensor, expected: Tensor, least: float) -> None:
        np.save(file.with_suffix(".npy"), x.numpy())
        command = [sys.executable, SCRIPT, "run", runtime, file, file.with_suffix(".npy")]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL, **pipes)
        first = json.loads(self._process.stdout.readline() or "null")
        if first is None:
            raise ValueError(f"{runtime} cannot run {file.name}.")
        self.memory, self.file_bytes = first["memory"], _size(file)
        scores = torch.tensor(first["scores"]).double()[: expected.numel()]  # or levels, of LiteRT
        both = torch.stack([scores, expected.flatten().double()])
        similarity = float(torch.corrcoef(both)[0, 1])
        if not similarity >= least:
            raise ValueError(f"{runtime}, {file.name}: other scores (correlation {similarity}).")
        self.times: list[tuple[int, int]] = []

    def turn(self, calls: int) -> None:
        """Add the times of so many calls."""
        print(calls, file=self._process.stdin, flush=True)
        self.times += json.loads(self._process.stdout.readline())

    def figures(self) -> dict[str, float]:
        """End the process, and return the medians and sizes."""
        self._process.stdin.close()
        self._process.wait()
        clock, cpu = (statistics.median(times) / 1e6 for times in zip(*self.times, strict=True))
        sizes = {"file_bytes": self.file_bytes, "memory_bytes": self.memory}
        return {"cpu_ms": cpu, "clock_ms": clock, **sizes}


def _size(file: Path) -> int:
    """Return the bytes of a file, and of the description of the graph beside it."""
    beside = (file.with_suffix(suffix) for suffix in (".param", ".xml"))
    return sum(path.stat().st_size for path in (file, *beside) if path.is_file())


def float_twin(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """Return a chain of modules in eval mode, with the batch normalisations in their weights."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.momentum = None  # the statistics are those of the next batch
    with torch.no_grad():
        model.train()(torch.randn(64, *shape))
    chain: list[Any] = []
    for module in model.eval().modules():
        if isinstance(module, nn.BatchNorm2d):
            chain[-1] = fuse_conv_bn_eval(chain[-1], module)
        elif isinstance(module, nn.BatchNorm1d):
            chain[-1] = fuse_linear_bn_eval(chain[-1], module)
        elif not [*module.children()]:
            chain.append(module)
    names = (f"layer{number}" for number in range(len(chain)))
    return nn.Sequential(OrderedDict(zip(names, chain, strict=True))).eval()


def ternary_network(model: nn.Module, shape: tuple[int, ...]) -> FrozenNetwork:
    """Return the same network with ternary weights and features."""
    net = ss.quantise(model, ss.Stair.ternary(), ss.Stair.ternary(), skip=last_layer(model)).eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            # So that all three levels occur.
            module.running_var = torch.full_like(module.running_var, 400.0)
            module.bias.data.normal_()
    return ss.freeze(net, shape, zero=121, scale=64.0)


def ours(network: FrozenNetwork, shape: tuple[int, ...], folder: Path) -> tuple[Any, ...]:
    """Return our contestants and the memory plan of the C program."""
    plan = write(network, folder / "c")
    command = ["cc", *FLAGS, "-shared", "-fPIC", "-o", "network.so", "network.c"]
    subprocess.run(command, cwd=folder / "c", check=True)
    (folder / "ours.onnx").write_bytes(onnx_model(network).SerializeToString())
    x = torch.randint(256, (1, *shape), dtype=torch.uint8)
    contestant = partial(Contestant, x=x, expected=network(x), least=0.999999)
    program = contestant("C", folder / "c" / "network.so")
    tflite.write(network, folder / "ours.tflite")
    files = {ONNX: ("ONNX Runtime", "ours.onnx"), TFLITE: ("LiteRT", "ours.tflite")}
    others = {row: contestant(name, folder / file) for row, (name, file) in files.items()}
    return {"ours, C": program, **others}, plan


def others(model: nn.Module, shape: tuple[int, ...], folder: Path) -> tuple[Any, dict[str, str]]:
    """Return the other contestants, and why runtimes are left out."""
    examples = [torch.randn(1, *shape) for _ in range(8)]
    torch.save((model, examples), folder / "network.pt")
    contestants, left_out = dict[str, Contestant](), dict[str, str]()
    for runtime in RUNTIMES:
        place = folder / runtime.replace(" ", "")
        place.mkdir()
        command = [sys.executable, SCRIPT, "write", runtime, folder / "network.pt", place]
        writing = subprocess.run(command, capture_output=True, text=True, check=False)
        if writing.returncode:
            left_out[runtime] = (writing.stderr.strip() or "no message").splitlines()[-1]
            continue
        number = version(PACKAGES.get(runtime, runtime.replace(" ", "").lower()))
        for kind, least in {"float": 0.99, "int8": 0.97}.items():
            for suffix in ("onnx", "tflite", "pte", "bin", "ncnn.bin"):
                file = place / f"{kind}.{suffix}"
                if file.is_file():
                    name = f"{runtime} {number}, {kind.replace('int', 'INT')}"
                    args = (runtime, file, examples[0], model(examples[0]).detach(), least)
                    contestants[name] = Contestant(*args)
    return contestants, left_out


def on_cortex(path: Path, model: Any) -> dict[str, Any]:
    """Return the figures of DSCNN on a Cortex-M4: ours, and the float network in CMSIS-NN."""
    figures = dict[str, Any]()
    variables = cmsis_nn.variables(path.resolve())
    x = torch.randn(8, 1, 49, 10)
    text, (step, zero) = cmsis_nn.program(model, x)
    levels = (x / step + zero).round().clamp(-128, 127)
    with tempfile.TemporaryDirectory() as name:
        write(deployed("speech-dscnn-int4").frozen, Path(name), scratch=2**14, cpu="arm")
        figures["ours, INT4"] = emulate(Path(name), (levels + 128).to(torch.uint8))[1]
        (Path(name) / "network.c").write_text(text, encoding="ascii")
        printed, counts = emulate(Path(name), (levels + 128).to(torch.uint8), *variables)
    words = [int(word) for line in printed.splitlines() for word in line.split()[1:]]
    scores = torch.tensor(words, dtype=torch.float32)
    similarity = float(torch.corrcoef(torch.stack([scores, model(x).detach().flatten()]))[0, 1])
    if not similarity >= 0.97:
        raise ValueError(f"CMSIS-NN: other scores (correlation {similarity}).")
    return {**figures, f"CMSIS-NN {_commit(path)}, INT8": counts}


def _commit(path: Path) -> str:
    revision = ["git", "-C", path, "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(revision, capture_output=True, text=True, check=False).stdout.strip()


def goals(network: str, figures: dict[str, Any]) -> list[tuple[str, float, float | None]]:
    """Return (what, at least, measured): how many times as fast ours is."""
    lines = []
    for mine, least, words in GOALS[network]:
        named = (name for name in figures if all(word in name for word in words.split()))
        peer = min((figures[name]["cpu_ms"] for name in named), default=None)
        what = f"{network}, {mine}: times as fast as {words}"
        lines.append((what, least, peer and peer / figures[mine]["cpu_ms"]))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--networks", nargs="*", choices=GOALS, default=[*GOALS])
    parser.add_argument("--cmsis-nn", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    networks, lines = dict[str, Any](), []
    for name in arguments.networks:
        if name == "VGG8":
            model, shape = vgg8().eval(), (3, 32, 32)
            frozen = ternary_network(model, shape)
        else:
            model, shape, frozen = dscnn(), (1, 49, 10), deployed("speech-dscnn-int4").frozen
        with tempfile.TemporaryDirectory() as folder:
            mine, plan = ours(frozen, shape, Path(folder))
            peers, left_out = others(float_twin(model, shape), shape, Path(folder))
            for _, contestant in product(range(arguments.repeats), (mine | peers).values()):
                contestant.turn(CALLS[name])
            figures = {row: each.figures() for row, each in (mine | peers).items()}
        title = f"{name}, one input, one core"
        print(f"{title:32} {'CPU ms':>9} {'clock ms':>9} {'file, kB':>9} {'memory, MB':>11}")
        for row, value in figures.items():
            sizes = f"{value['file_bytes'] / 1e3:9.0f} {value['memory_bytes'] / 1e6:11.1f}"
            print(f"{row:32} {value['cpu_ms']:9.3f} {value['clock_ms']:9.3f} {sizes}")
        for runtime, why in left_out.items():
            print(f"{runtime} is left out: {why}")
        weights = sum(row.weights for row in plan.rows)
        sizes = {"flash": plan.flash, "ram": plan.ram, "bits": 8 * plan.flash / weights}
        print(f"C: {plan.flash:,} bytes of constants, {plan.ram:,} of memory\n")
        networks[name] = {"figures": figures, "left_out": left_out, **sizes}
        lines += goals(name, figures)
    cortex = {}
    if arguments.cmsis_nn:
        cortex = on_cortex(arguments.cmsis_nn, float_twin(dscnn(), (1, 49, 10)))
        for row, value in cortex.items():
            print(f"{row:32} {'  '.join(f'{name}: {number:,}' for name, number in value.items())}")
        mine, theirs = (value["instructions"] for value in cortex.values())
        what = "DSCNN, Cortex-M4, instructions of"
        lines += [
            (f"{what} CMSIS-NN by ours", 1, theirs / mine),
            (f"{what} the goal, 3 million, by ours", 1, 3e6 / mine),
        ]
    for what, least, ratio in lines:
        shown = "not measured" if ratio is None else f"{ratio:.2f}"
        print(f"{what:62} at least {least}  {shown:>12}")
    if arguments.json:
        machine = {"processor": platform.machine(), "system": platform.system()}
        commit = _commit(SCRIPT.parent)
        result = {"machine": machine, "commit": commit, "repeats": arguments.repeats}
        result |= {"networks": networks, "cortex": cortex}
        result["ratios"] = {what: ratio for what, _, ratio in lines}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(any(ratio is None or ratio < least for _, least, ratio in lines))


if __name__ == "__main__":
    tell(main)
