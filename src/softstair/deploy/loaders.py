"""What runs a file of one of the formats, by the name of the runtime.

It needs numpy and the runtime alone, and is also a program, for a Python that has no softstair:

    python loaders.py RUNTIME FILE FOLDER

answers each line on stdin with one of JSON, after it has read ``FOLDER/x.npy``: after "run" it has
written ``FOLDER/y.npz``, "time" says the milliseconds of the first example.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Run = Callable[[Array], dict[str, Array]]
"""A batch -> the outputs of a file by name, or by number where they have no names."""


class Running(NamedTuple):
    """What runs a file of a network."""

    results: Callable[[Any], Mapping[str, Any]]
    """A batch of integers of the input's type -> results of nodes by name, scores and class."""
    milliseconds: Callable[[Any], float]
    """The least time of the first example of a batch."""


def onnxruntime(file: str) -> Run:
    """ONNX Runtime, in one thread."""
    import onnxruntime as runtime

    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names, entry = [each.name for each in session.get_outputs()], session.get_inputs()[0].name
    return lambda x: dict(zip(names, session.run(names, {entry: x}), strict=True))


def openvino(file: str) -> Run:
    """OpenVINO in float32, in one thread."""
    import openvino as runtime

    settings = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    model = runtime.Core().read_model(file)
    names = [output.get_any_name() for output in model.outputs]  # compiled ones have other names
    compiled = runtime.compile_model(model, "CPU", settings)
    return lambda x: dict(zip(names, map(np.array, compiled(x).values()), strict=True))


def litert(file: str, kernels: str = "AUTO") -> Run:
    """LiteRT in one thread, an example at a time; its default kernels are XNNPACK's."""
    from ai_edge_litert import interpreter as runtime

    resolver = getattr(runtime.OpResolverType, kernels)
    options = {"num_threads": 1, "experimental_op_resolver_type": resolver}
    network = runtime.Interpreter(file, **options)
    network.allocate_tensors()
    entry = network.get_input_details()[0]["index"]
    ends = [end["index"] for end in network.get_output_details()]

    def execute(x: Array) -> list[Array]:
        network.set_tensor(entry, x)
        network.invoke()
        return [network.get_tensor(end)[None] for end in ends]

    return by_example(execute)


def executorch(file: str) -> Run:
    """ExecuTorch, an example at a time."""
    import torch
    from executorch.runtime import Runtime

    torch.set_num_threads(1)
    method = Runtime.get().load_program(Path(file)).load_method("forward")
    # It overwrites its outputs when it runs again.
    return by_example(lambda x: [y.numpy().copy() for y in method.execute([torch.from_numpy(x)])])


def qonnx(file: str) -> Run:
    """The executor of the qonnx package, an operator and an example at a time."""
    import onnx
    from qonnx.core.modelwrapper import ModelWrapper
    from qonnx.core.onnx_exec import execute_onnx

    package: Any = onnx
    package.IR_VERSION = 8  # of models of one operator; ONNX Runtime may not read onnx's newest
    model = ModelWrapper(file)
    names = [node.output[0] for node in model.graph.node]
    entry = model.graph.input[0].name

    def run(x: Array) -> dict[str, Array]:
        parts = [execute_onnx(model, {entry: x[i : i + 1]}, True) for i in range(len(x))]
        return {name: np.concatenate([part[name] for part in parts]) for name in names}

    return run


def hls4ml(file: str) -> Run:
    """hls4ml's C simulation, in ``fixed<64,36>``; channels are last there."""
    import hls4ml as runtime
    from qonnx.core.modelwrapper import ModelWrapper
    from qonnx.transformation.channels_last import ConvertToChannelsLastAndClean
    from qonnx.transformation.gemm_to_matmul import GemmToMatMul
    from qonnx.transformation.general import GiveUniqueNodeNames
    from qonnx.util.cleanup import cleanup_model

    model = cleanup_model(ModelWrapper(file)).transform(GemmToMatMul())
    is_moved = bool(model.get_nodes_by_op_type("Conv"))
    if is_moved:
        model = model.transform(ConvertToChannelsLastAndClean()).transform(GiveUniqueNodeNames())
    settings = {"granularity": "name", "backend": "Vitis", "default_precision": "fixed<64,36>"}
    config = runtime.utils.config.config_from_onnx_model(model, **settings)
    folder = tempfile.mkdtemp()
    project = runtime.converters.convert_from_onnx_model(
        model, output_dir=folder, backend="Vitis", io_type="io_parallel", hls_config=config
    )
    project.compile()

    def run(x: Array) -> dict[str, Array]:
        x = np.moveaxis(x, 1, -1) if is_moved else x
        return {"0": np.asarray(project.predict(np.ascontiguousarray(x, np.float32)))}

    return run


def by_example(execute: Callable[[Array], list[Array]]) -> Run:
    """Return what runs a batch, one example after the other; outputs are numbered."""

    def run(x: Array) -> dict[str, Array]:
        parts = [execute(x[i : i + 1]) for i in range(len(x))]
        columns = enumerate(zip(*parts, strict=True))
        return {str(number): np.concatenate(rows) for number, rows in columns}

    return run


LOADERS: dict[str, Callable[[str], Run]] = {
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "litert": litert,
    "litert-builtin": partial(litert, kernels="BUILTIN_WITHOUT_DEFAULT_DELEGATES"),
    "litert-reference": partial(litert, kernels="BUILTIN_REF"),
    "executorch": executorch,
    "qonnx": qonnx,
    "hls4ml": hls4ml,
}


def milliseconds(
    run: Callable[[Any], object], x: Any, calls: int = 10, least: float = 100
) -> float:
    """Return the time of the fastest of so many calls or more, after one that is not timed.

    They take the least time, or a hundred times as long.
    """
    run(x)
    times: list[float] = []
    while len(times) < calls or sum(times) < least:
        start = time.perf_counter()
        run(x)
        times.append(1e3 * (time.perf_counter() - start))
        if sum(times) > 100 * least > 0:
            break
    return min(times)


def main() -> None:
    """Serve one file."""
    name, file, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a runtime prints is no answer
    tempfile.tempdir = str(folder)
    run = LOADERS[name](file)
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        x, answer = np.load(folder / "x.npy"), 0.0
        if line.strip() == "time":
            answer = milliseconds(run, x[:1])
        else:
            results: Any = run(x)
            np.savez(folder / "y.npz", **results)
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
