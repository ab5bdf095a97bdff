"""``softstair export``: a trained network as ONNX, as QONNX, or as C."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from softstair.cli._args import argument, flag
from softstair.cli._table import print_line, print_table
from softstair.deploy import IntegerNetwork, costs
from softstair.deploy.comparison import write
from softstair.deploy.nodes import Steps
from softstair.deploy.qlinear_conv import quantised_convs
from softstair.deploy.target import Cpu, Runtime, target_of
from softstair.train.trained import LastLayer, deployed


@dataclass(frozen=True, kw_only=True)
class NetworkFlags:
    """A trained network, and its model if that is code of the user's own."""

    trained: Path = argument(
        "RUN", "Run directory, network.safetensors, or name of a network (see softstair zoo)."
    )
    model: str | None = flag(None, "package.module:function of your own model.")


@dataclass(frozen=True, kw_only=True)
class Command(NetworkFlags):
    """Write a trained network as a network that computes in integers.

    onnx:  a file of standard operators, exact with ONNX Runtime
    qonnx: a file for FPGA tools
    c:     a folder of C99 without dependencies, with a Makefile and a program that classifies
           its input

    The features of every layer and the class are those of the trained network, or of the trained
    network with its last layer in INT8. `softstair verify` compares them. An own loop writes a
    network that can be exported with `softstair.zoo.save`.

    A network whose model is your own code needs --model, since a file may come from anybody.

    Exit code 0: written; 2: an error.
    """

    to: Literal["onnx", "qonnx", "c"] = flag("onnx", "Format.")
    out: Path | None = flag(
        None,
        "File, or folder for c, to write (default: network.onnx, network.qonnx or c/ in the run "
        "directory).",
    )
    last_layer: LastLayer = flag(
        "float", "Export a last layer that was trained in float as it is, or with INT8 weights."
    )
    scratch: int | None = flag(
        None,
        "Bytes of memory that a layer of C may use to be faster (default: 1048576, or 16384 for "
        "x86; 16384 for microcontrollers).",
    )
    fit_flash: int | None = flag(
        None, "Refuse to write C whose constants take more bytes; its code comes on top."
    )
    fit_ram: int | None = flag(
        None, "Refuse to write C that needs more bytes of memory; its stack comes on top."
    )
    threads: int = flag(
        1, "Threads of C: 1, or 2 for layers of 16 million products or more (POSIX threads)."
    )
    cpu: Cpu | None = flag(
        None, "Processor on which C or ONNX is to be fast (default: this machine's)."
    )
    runtime: Runtime = flag("onnxruntime", "What runs ONNX; OpenVINO needs a file of its own.")

    def run(self) -> int:
        target = target_of(self.to, self.cpu, self.runtime)
        source, run = deployed(self.trained, self.last_layer, self.model), self.trained
        name = "c" if self.to == "c" else f"network.{self.to}"
        out = self.out or (run / name if run.is_dir() else Path(f"{run.stem}-{name}"))
        limits = (self.scratch, self.fit_flash, self.fit_ram, self.threads, target)
        plan = write(source.integer, out, self.to, source.about.classes, *limits)
        _show_costs(source.integer)
        entry = source.integer.input
        print_line(f"input: (x - {entry.zero}) / {entry.scale:g}, x of {entry.type_name}")
        if plan is not None:
            print_line(f"{plan}\nfor cpu={target.cpu}")
        elif self.to == "onnx":
            print_line(f"for cpu={target.cpu}, runtime={target.runtime}")
            steps = [node.name for node in source.integer.nodes if isinstance(node, Steps)]
            convs = quantised_convs(source.integer, target)
            if others := [name for name in steps if name not in convs]:
                print_line(f"steps without a QLinearConv: {', '.join(others)}")
        print_line(f"written: {out}")
        return 0


def _show_costs(network: IntegerNetwork) -> None:
    """Print weights, products and the range of the sums of every layer."""
    layers, rows = costs(network), []
    for layer in layers:
        counts = (
            f"{layer.weights:,}",
            layer.weight_bits,
            f"{layer.bytes:,}",
            f"{layer.products:,}",
        )
        sums = (f"{layer.low:,}", f"{layer.high:,}", layer.sum_bits)
        rows.append((layer.name, *counts, *(sums if layer.sum_bits else ("float", "", ""))))
    sum_of = lambda name: f"{sum(getattr(layer, name) for layer in layers):,}"
    total = ("all", sum_of("weights"), "", sum_of("bytes"), sum_of("products"), "", "", "")
    names = ("weights", "bits", "bytes", "products", "least", "greatest", "bits")
    title = "weights, products, and the range of the sums"
    print_table(title, ("layer",), names, rows, total=total)
