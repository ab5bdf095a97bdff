"""Other runtimes for `deployed.py`: they convert a float network, and run it in a process each.

    python -m benchmarks.runtimes write RUNTIME NETWORK.pt FOLDER   # float, and INT8 if it can
    python -m benchmarks.runtimes run RUNTIME FILE INPUT.npy        # see `serve`

NETWORK.pt is a float network without batch normalisation and its examples, by `torch.save`. INT8 is
the runtime's own static quantisation with these examples. Everything runs on one thread. What a
runtime needs is imported where it is used; none is a dependency of softstair:

    pip install torch==2.13.0 ai-edge-litert tensorflow executorch ncnn pnnx openvino nncf

TensorFlow writes the files of LiteRT (litert-torch needs a package that ARM lacks), pnnx those of
ncnn (it has no INT8). On ARM, ncnn and OpenVINO compute float networks in 16 bits by default.
"""

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Calls = tuple[Callable[[], Any], Callable[[], Array]]  # runs the network, reads its scores


def write_onnxruntime(model: Any, examples: Sequence[Any], folder: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    files = [folder / name for name in ("float.onnx", "fused.onnx", "int8.onnx")]
    _write_onnx(model, examples, files[0])
    quant_pre_process(*files[:2], skip_symbolic_shape=True)
    types = {"activation_type": QuantType.QInt8, "weight_type": QuantType.QInt8}
    rows = iter([{"input": example.numpy()} for example in examples])
    reader = SimpleNamespace(get_next=lambda: next(rows, None))
    quantize_static(*files[1:], reader, per_channel=True, **types)


def load_onnxruntime(file: Path, x: Array) -> Calls:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    run = partial(session.run, None, {session.get_inputs()[0].name: x})
    return run, lambda: run()[0]


def write_litert(model: Any, examples: Sequence[Any], folder: Path) -> None:
    import ai_edge_litert  # noqa: F401
    import tensorflow as tf
    from torch import nn

    leaves = [module for module in model.modules() if not [*module.children()]]

    def forward(x: Any) -> Any:
        for module in leaves:
            if isinstance(module, nn.Conv2d):
                weight, padding = module.weight.detach(), "SAME"
                if module.stride != (1, 1):
                    x = tf.pad(x, [[0, 0], *([size, size] for size in module.padding), [0, 0]])
                    padding = "VALID"
                order, convolve = (2, 3, 1, 0), tf.nn.conv2d
                if module.groups > 1:
                    order, convolve = (2, 3, 0, 1), tf.nn.depthwise_conv2d
                x = convolve(x, weight.permute(order).numpy(), [1, *module.stride, 1], padding)
                x = tf.nn.bias_add(x, module.bias.detach().numpy())
            elif isinstance(module, nn.Linear):
                weight = module.weight.detach()
                if x.ndim == 4:  # channels are last here, and first in PyTorch
                    _, height, width, channels = x.shape
                    weight = weight.reshape(-1, channels, height, width).permute(0, 2, 3, 1)
                    x = tf.reshape(x, [1, -1])
                x = tf.matmul(x, weight.reshape(len(weight), -1).T.numpy())
                x = x if module.bias is None else x + module.bias.detach().numpy()
            elif isinstance(module, nn.MaxPool2d | nn.AvgPool2d):
                pool = tf.nn.max_pool2d if isinstance(module, nn.MaxPool2d) else tf.nn.avg_pool2d
                x = pool(x, module.kernel_size, module.kernel_size, "VALID")
            elif isinstance(module, nn.ReLU):
                x = tf.nn.relu(x)
        return x

    images = [example.permute(0, 2, 3, 1).numpy() for example in examples]
    graph = tf.function(forward).get_concrete_function(tf.TensorSpec(images[0].shape, tf.float32))
    converter = tf.lite.TFLiteConverter.from_concrete_functions([graph], tf.Module())
    (folder / "float.tflite").write_bytes(converter.convert())
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: ([image] for image in images)
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    converter.inference_input_type = converter.inference_output_type = tf.int8
    (folder / "int8.tflite").write_bytes(converter.convert())


def load_litert(file: Path, x: Array) -> Calls:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(file), num_threads=1)
    interpreter.allocate_tensors()
    source, target = interpreter.get_input_details()[0], interpreter.get_output_details()[0]
    image, (scale, zero) = x.transpose(0, 2, 3, 1), source["quantization"]
    if x.dtype == np.uint8:  # bytes of ours, whatever they stand for
        image = image.astype(np.int16) - 128
    elif scale:
        image = np.clip(np.rint(image / scale) + zero, -128, 127)
    interpreter.set_tensor(source["index"], image.astype(source["dtype"]))
    return interpreter.invoke, lambda: interpreter.get_tensor(target["index"])


def write_executorch(model: Any, examples: Sequence[Any], folder: Path) -> None:
    import torch
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as xnnpack
    from executorch.exir import to_edge_transform_and_lower
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    def lower(network: Any, file: Path) -> None:
        program = torch.export.export(network, (examples[0],))
        edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
        file.write_bytes(edge.to_executorch().buffer)

    lower(model, folder / "float.pte")
    config = xnnpack.get_symmetric_quantization_config(is_per_channel=True)
    quantizer = xnnpack.XNNPACKQuantizer().set_global(config)
    prepared = prepare_pt2e(torch.export.export(model, (examples[0],)).module(), quantizer)
    for example in examples:
        prepared(example)
    lower(convert_pt2e(prepared), folder / "int8.pte")


def load_executorch(file: Path, x: Array) -> Calls:
    import torch
    from executorch.runtime import Runtime

    method = Runtime.get().load_program(file).load_method("forward")
    run = partial(method.execute, (torch.from_numpy(x),))
    return run, lambda: run()[0].numpy()


def write_ncnn(model: Any, examples: Sequence[Any], folder: Path) -> None:
    import ncnn  # noqa: F401
    import pnnx

    pnnx.export(model, str(folder / "float.pt"), (examples[0],))


def load_ncnn(file: Path, x: Array) -> Calls:
    import ncnn

    network = ncnn.Net()
    network.opt.num_threads = 1
    network.load_param(str(file.with_suffix(".param")))
    network.load_model(str(file))
    image = ncnn.Mat(x[0])

    def run() -> Array:
        extractor = network.create_extractor()
        extractor.input("in0", image)
        return np.array(extractor.extract("out0")[1])

    return run, run


def write_openvino(model: Any, examples: Sequence[Any], folder: Path) -> None:
    import nncf
    import openvino

    _write_onnx(model, examples, folder / "network.onnx")
    network = openvino.convert_model(folder / "network.onnx")
    openvino.save_model(network, folder / "float.xml", compress_to_fp16=False)
    images = nncf.Dataset([example.numpy() for example in examples])
    openvino.save_model(nncf.quantize(network, images), folder / "int8.xml")


def load_openvino(file: Path, x: Array) -> Calls:
    import openvino

    threads = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False}
    compiled = openvino.Core().compile_model(file.with_suffix(".xml"), "CPU", threads)
    request = compiled.create_infer_request()
    request.set_input_tensor(openvino.Tensor(x))
    return request.infer, lambda: request.get_output_tensor().data


def load_c(file: Path, x: Array) -> Calls:
    scores = np.zeros(64, dtype=np.int32)  # the network writes as many as it has classes
    pointers = ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(scores.ctypes.data)
    return partial(ctypes.CDLL(str(file)).network_run, *pointers), lambda: scores


RUNTIMES: dict[str, tuple[Callable[[Any, Sequence[Any], Path], None], Any]] = {
    "ONNX Runtime": (write_onnxruntime, load_onnxruntime),
    "LiteRT": (write_litert, load_litert),
    "ExecuTorch": (write_executorch, load_executorch),
    "ncnn": (write_ncnn, load_ncnn),
    "OpenVINO": (write_openvino, load_openvino),
}


def serve(runtime: str, file: Path, x: Array) -> None:
    """Answer requests on stdin with lines of JSON on stdout.

    The first line has the scores, and the bytes that the runtime and the network add to the peak
    memory. A request is a number n of calls; its answer is n pairs of nanoseconds: elapsed, and CPU
    time of the process. A call that is not timed precedes them.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a runtime prints is no answer
    if runtime == "ExecuTorch":
        import torch  # noqa: F401  Its Python package needs torch, its runtime does not.
    before = _peak_memory()
    run, read = (load_c if runtime == "C" else RUNTIMES[runtime][1])(file, x)
    run()
    first = {"scores": read().ravel().tolist(), "memory": _peak_memory() - before}
    print(json.dumps(first), file=answers)
    for line in sys.stdin:
        times = []
        run()
        for _ in range(int(line)):
            start = time.perf_counter_ns(), time.process_time_ns()
            run()
            end = time.perf_counter_ns(), time.process_time_ns()
            times.append((end[0] - start[0], end[1] - start[1]))
        print(json.dumps(times), file=answers)


def _peak_memory() -> int:
    """Return the largest resident set of this process so far, in bytes (Linux)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def _write_onnx(model: Any, examples: Sequence[Any], file: Path) -> None:
    import torch

    torch.onnx.export(model, (examples[0],), file, dynamo=False, input_names=["input"])


def main() -> None:
    verb, runtime, source, target = sys.argv[1:]
    if verb == "run":
        serve(runtime, Path(source), np.load(target))
    else:
        import torch

        model, examples = torch.load(source, weights_only=False)
        RUNTIMES[runtime][0](model, examples, Path(target))


if __name__ == "__main__":
    main()
