"""``softstair export``: a trained network as ONNX, QONNX, C, .tflite or GGUF."""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from softstair._errors import first_line
from softstair.cli._args import argument, flag
from softstair.cli._output import print_line, print_table
from softstair.convert.options import parse_layers
from softstair.deploy import gguf
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.nodes import NeedsInt8, Rounding, Stair, Sum, bits
from softstair.deploy.qlinear_conv import quantised_convs
from softstair.deploy.target import Cpu, Runtime, Target, target_of
from softstair.deploy.tflite_graph import facts_of
from softstair.deploy.writing import EXAMPLES, Exported, Flavour, export
from softstair.train.network import frozen_network, is_frozen, language_network


@dataclass(frozen=True, kw_only=True)
class NetworkFlags:
    """A trained network, and its model if that is code of the user's own."""

    trained: Path = argument(
        "RUN",
        "Run directory, network.safetensors, frozen.safetensors, or name of a network (see "
        "softstair zoo).",
    )
    model: str | None = flag(None, "package.module:function of your own model.")


@dataclass(frozen=True, kw_only=True)
class Command(NetworkFlags):
    """Write a trained network as a network that computes in integers.

    onnx:  a file of standard operators, exact with ONNX Runtime
    qonnx: a file for FPGA tools: --flavour multithreshold for FINN, quant for hls4ml
    c:     a folder of C99 without dependencies, with a Makefile and a program that classifies
           its input
    tflite: a file for LiteRT and TensorFlow Lite Micro. Features of 8 bits need INT8 arithmetic:
           the trained network is then frozen again, and the output says so
    pte:   a file for ExecuTorch, whose kernels are XNNPACK's
    gguf:  a file for llama.cpp, of a Llama-shaped network or of a folder of Hugging Face

    The frozen network of the run is written, or the trained network is frozen now, without
    examples to compare on. What was written is run on 32 random inputs, and every number is
    compared with the frozen network's; `softstair verify` does so on the test set. An own loop
    writes a network that can be exported with `frozen.save` or `softstair.zoo.save`.

    A network that is frozen now and whose model is your own code needs --model, since a file may
    come from anybody.

    Exit code 0: written; 2: an error.
    """

    to: Literal["onnx", "qonnx", "c", "tflite", "pte", "gguf"] = flag("onnx", "Format.")
    out: Path | None = flag(
        None,
        "File, or folder for c, to write (default: c/ or network with the format's name, in the "
        "run directory).",
    )
    rounding: Rounding | None = flag(
        None,
        "Freeze the trained network again; its multiplications round once, or doubly as in "
        "TensorFlow Lite Micro and CMSIS-NN.",
    )
    scratch: int | None = flag(
        None,
        "Bytes of memory that a layer of C for ARM may use to be faster (default: 1048576; 16384 "
        "for microcontrollers).",
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
    flavour: Flavour = flag("multithreshold", "Of QONNX: for FINN, or quant for hls4ml.")
    check: bool = flag(True, "Run what was written; this needs a C compiler or a runtime.")
    tokenizer: str = flag(
        "bytes",
        "Of GGUF: bytes, a .txt file of all characters in order, or a folder with tokenizer.json.",
    )
    keep: str | None = flag(
        None,
        "Of GGUF: layers in float, such as 'blk.*.ffn_down=f16,output=f16'; others as trained.",
    )
    ternary: gguf.Ternary = flag("auto", "Of GGUF: the type of ternary weights.")

    def run(self) -> int:
        if self.to == "gguf":
            return self._run_gguf()
        target = target_of(self.to, self.cpu, self.runtime)
        run, frozen = self.trained, frozen_network(self.trained, self.model, self.rounding)
        name = "c" if self.to == "c" else f"network.{self.to}"
        out = self.out or (run / name if run.is_dir() else Path(f"{run.stem}-{name}"))
        options = (
            "scratch",
            "fit_flash",
            "fit_ram",
            "threads",
            "cpu",
            "runtime",
            "flavour",
            "check",
        )
        given: Any = {key: getattr(self, key) for key in options}
        try:
            exported = export(frozen, out, self.to, **given)
        except NeedsInt8 as error:
            if is_frozen(run):
                raise
            frozen = frozen_network(run, self.model, self.rounding or "once", "int8")
            exported = export(frozen, out, self.to, **given)
            print_line(f"frozen again in INT8 arithmetic: {first_line(error)}")
        _show_costs(frozen)
        _show_input(frozen)
        if frozen.report is not None:
            print_line(f"frozen now: {frozen.report}")
        _show_written(exported, frozen, self.to, target)
        return 0

    def _run_gguf(self) -> int:
        net, run = language_network(self.trained, self.model), self.trained
        out = self.out or (run / "network.gguf" if run.is_dir() else Path(f"{run.stem}.gguf"))
        keep = {} if self.keep is None else parse_layers(self.keep)
        settings: dict[str, Any] = {
            "tokenizer": self.tokenizer,
            "keep": keep,
            "ternary": self.ternary,
        }
        exported = export(net, out, "gguf", check=self.check, **settings)
        if self.check:
            print_line(str(gguf.verify(net, exported.path, run=False)))
        print_line(f"written: {exported.path}")
        return 0


def _show_written(exported: Exported, frozen: FrozenNetwork, to: str, target: Target) -> None:
    """Print the plan of C or what is slow in ONNX, the comparison, and the path."""
    if exported.plan is not None:
        print_line(f"{exported.plan}\nfor cpu={target.cpu}")
    elif to == "tflite":
        kernels = facts_of(exported.path.read_bytes())["kernels"]
        print_line(f"exact in LiteRT's kernels: {', '.join(kernels)}")
    elif to == "onnx":
        print_line(f"for cpu={target.cpu}, runtime={target.runtime}")
        stairs = [node.name for node in frozen.nodes if isinstance(node, Stair)]
        convs = quantised_convs(frozen, target)
        if others := [name for name in stairs if name not in convs]:
            print_line(f"stairs without a QLinearConv: {', '.join(others)}")
    print_line(f"compared on {EXAMPLES} random inputs: {exported.comparison or 'not run'}")
    print_line(f"written: {exported.path}")


def _show_input(frozen: FrozenNetwork) -> None:
    """Print what the first layer sees of the input x."""
    entry = frozen.input
    seen = f"(x - {entry.zero}) * {entry.unit:g}" if entry.table is None else "a table of x"
    print_line(f"input: {seen}, x of {entry.dtype}")


def _show_costs(frozen: FrozenNetwork) -> None:
    """Print weights, products and the range of the sums of every layer."""
    rows, totals = [], Counter[str]()
    for node in frozen.nodes:
        if isinstance(node, Sum):
            weights, values = node.weight.numel(), len(node.weight.unique())
            width = max(1, (values - 1).bit_length())
            products = weights * math.prod(frozen.sizes[node.name]) // len(node.weight)
            counts = {"weights": weights, "bytes": -(-weights * width // 8), "products": products}
            totals.update(counts)
            numbers = (weights, width, counts["bytes"], products, node.low, node.high)
            cells = (f"{number:,}" for number in (*numbers, bits(node.low, node.high)))
            rows.append((node.name, *cells))
    sums = [f"{totals[name]:,}" for name in ("weights", "bytes", "products")]
    total = ("all", sums[0], "", *sums[1:], "", "", "")
    names = ("weights", "bits", "bytes", "products", "least", "greatest", "bits")
    title = "weights, products, and the range of the sums"
    print_table(title, ("layer",), names, rows, total=total)
