"""The runtimes that a frozen network is compared in, and the format of each."""

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from softstair.deploy import c, loaders, onnx, pte, qonnx_quant, tflite
from softstair.deploy.frozen import FrozenNetwork
from softstair.deploy.loaders import Array, Running
from softstair.deploy.processes import Process, python_with
from softstair.deploy.tflite_graph import facts_of

Decode = Callable[[Mapping[str, Array]], dict[str, Tensor]]


class FileRuntime(NamedTuple):
    """A runtime that reads files."""

    suffix: str
    write: Callable[[FrozenNetwork, Path], object]
    trace: Callable[[FrozenNetwork, Path, Path], object] | None
    """Writes a file that differs from the first path's in having results of nodes as outputs."""
    decoder: Callable[[FrozenNetwork, Path], Decode]  # of the outputs of a file
    encode: Callable[[FrozenNetwork, Tensor], Array] = lambda _, x: x.cpu().numpy()
    shows_stairs: bool = True


def _as_floats(frozen: FrozenNetwork, x: Tensor) -> Array:
    return x.cpu().float().numpy()


LITERT = {"litert": "xnnpack", "litert-builtin": "builtin", "litert-reference": "reference"}
"""The kernels of LiteRT."""


def _litert(kernels: str) -> FileRuntime:
    write = partial(tflite.write, kernels=kernels)
    return FileRuntime(".tflite", write, tflite.traced, tflite.decoder, tflite.encode)


QUANT: Any = {
    "suffix": ".qonnx",
    "write": qonnx_quant.write,
    "trace": None,  # the executor gives every tensor anyway, and hls4ml the output alone
    "decoder": qonnx_quant.decoder,
    "encode": _as_floats,
}
FILES: dict[str, FileRuntime] = {
    "onnxruntime": FileRuntime(".onnx", onnx.write, onnx.trace, onnx.decoder),
    "openvino": FileRuntime(
        ".onnx", partial(onnx.write, runtime="openvino"), onnx.trace, onnx.decoder
    ),
    **{name: _litert(kernels) for name, kernels in LITERT.items()},
    "executorch": FileRuntime(".pte", pte.write, pte.trace, pte.decoder, pte.encode),
    "qonnx": FileRuntime(**QUANT),
    "hls4ml": FileRuntime(**QUANT, shows_stairs=False),
}
RUNTIMES = ("c", *FILES)
"""What a frozen network can be compared in."""


def write(name: str, frozen: FrozenNetwork, folder: Path) -> Path:
    """Write a network for a runtime; return the path."""
    path = folder / (name if name == "c" else f"{name}{FILES[name].suffix}")
    if name == "c":
        c.write(frozen, path)
    else:
        FILES[name].write(frozen, path)
    return path


def start(name: str, frozen: FrozenNetwork, path: Path, threads: int = 1) -> Running:
    """Return what runs the file of a network, or its folder of C.

    Raises:
        MissingExtraError: If the runtime is not installed.
    """
    if name == "c":
        return c.runner(frozen, path, threads)
    kind, (plain, time) = FILES[name], _load(name, path)
    decode, encode = kind.decoder(frozen, path), partial(kind.encode, frozen)
    timed = lambda x: time(encode(x[:1]))
    if kind.trace is None:
        return Running(lambda x: decode(plain(encode(x))), timed)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"traced{kind.suffix}"
        kind.trace(frozen, path, file)
        decode_traced, (traced, _) = kind.decoder(frozen, file), _load(name, file)

    def run(x: Tensor) -> dict[str, Tensor]:
        # The outputs are those of the file itself; the rest is of the same graph with more outputs.
        given = encode(x)
        return {**decode_traced(traced(given)), **decode(plain(given))}

    return Running(run, timed)


def reading(path: Path) -> str | None:
    """Return the first runtime that reads what is at a path; a .tflite has its exact ones."""
    if path.suffix == ".tflite" and path.is_file():
        exact = facts_of(path.read_bytes()).get("kernels", tflite.KERNELS)
        return next(name for name, kernels in LITERT.items() if kernels in exact)
    first = {kind.suffix: name for name, kind in reversed(FILES.items())}
    return "c" if path.is_dir() else first.get(path.suffix)


def _load(name: str, file: Path) -> tuple[loaders.Run, Callable[[Array], float]]:
    """Return what runs a file on a batch, and what times it on an example."""
    python = python_with(name)
    if name in ("onnxruntime", *LITERT):  # they fight with nobody, and begin sooner here
        run = loaders.LOADERS[name](str(file))
        return run, partial(loaders.milliseconds, run)
    process = Process(python, name, file)
    return process.run, process.time
