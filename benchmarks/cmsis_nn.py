"""DSCNN as INT8 in CMSIS-NN, for the Cortex-M4 that `cortex.py` emulates.

The float twin of `deployed.py` is quantised as LiteRT does it: weights with a scale per channel
(the linear layer: one scale), features with a scale and a zero point from examples. CMSIS-NN is not
part of softstair: `git clone https://github.com/ARM-software/CMSIS-NN`.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

FILES = """
ConvolutionFunctions/arm_convolve_*s8*.c ConvolutionFunctions/arm_depthwise_conv_*s8*.c
ConvolutionFunctions/arm_nn_*s8*.c FullyConnectedFunctions/arm_fully_connected_s8.c
FullyConnectedFunctions/arm_fully_connected_get_buffer_sizes_s8.c PoolingFunctions/arm_avgpool_*s8.c
NNSupportFunctions/arm_nn_*_s8*.c NNSupportFunctions/arm_*_with_offset.c
"""
"""Of Source; the linker drops what is not called."""
FLAGS = "-O2 -DCMSIS_NN_USE_REQUANTIZE_INLINE_ASSEMBLY"
"""The fastest: -O3 and -Ofast take 3 % more instructions, and 7 % without the assembly."""
SCRATCH = 512  # bytes; the class is -1 if a layer needs more
PROGRAM = """#include "network.h"
#include "arm_nnfunctions.h"

static int8_t x0[{most}], x1[{most}];
static int32_t scratch[{scratch} / 4];
{constants}
int32_t network_run(const uint8_t input[NETWORK_INPUTS], int32_t scores[NETWORK_CLASSES]) {{
    const cmsis_nn_context context = {{scratch, sizeof scratch}};
    int32_t best = 0;
    for (int32_t i = 0; i < NETWORK_INPUTS; i++) x0[i] = (int8_t)(input[i] - 128);
{calls}
    for (int32_t i = 0; i < NETWORK_CLASSES; i++) {{
        scores[i] = {result}[i] - {zero};
        best = scores[i] > scores[best] ? i : best;
    }}
    return best;
}}
"""
CALL = """    {{
        const cmsis_nn_dims in = {{1, {x}}}, kernel = {{{kernel}}}, none = {{0}}, out = {{1, {y}}};
        const cmsis_nn_{kind}_params p = {{{parameters}}};
        (void)none;
        if (arm_{function}_get_buffer_size({needs}) > {scratch} ||
            arm_{function}(&context, &p, {scales}&in, {source}, &kernel, {data}&out, {to}))
            return -1;
    }}
"""


def program(model: nn.Sequential, examples: Tensor) -> tuple[str, tuple[float, int]]:
    """Return network.c and (scale, zero point) of its input, whose bytes are levels + 128."""
    x, levels, constants, calls = examples, _levels(examples), [], []
    start, most, buffers = levels, x[0].numel(), ("x0", "x1")
    chain = [module for module in model if not isinstance(module, nn.ReLU | nn.Flatten)]
    for number, module in enumerate(chain):
        before, (step, zero) = x, levels
        x = module(x.flatten(1) if isinstance(module, nn.Linear) else x).detach()
        x = x.relu() if isinstance(module, nn.Conv2d) else x
        levels = levels if isinstance(module, nn.AvgPool2d) else _levels(x)
        most = max(most, x[0].numel())
        shapes = ((*each.shape[1:], 1, 1)[:3] for each in (before, x))
        sizes = (f"{height}, {width}, {channels}" for channels, height, width in shapes)
        texts = dict(zip(("x", "y", "source", "to"), (*sizes, *buffers), strict=True))
        if isinstance(module, nn.AvgPool2d):
            high, wide = module.kernel_size
            texts |= {"kind": "pool", "function": "avgpool_s8", "scales": "", "data": ""}
            texts |= {"kernel": f"1, {high}, {wide}, 1", "needs": "out.w, in.c"}
            texts["parameters"] = f"{{{wide}, {high}}}, {{0, 0}}, {{-128, 127}}"
        else:
            layer = _Weights(f"layer{number}", module, step, levels[0])
            constants.append(layer.constants)
            texts |= layer.call(zero, levels[1])
        calls.append(CALL.format(scratch=SCRATCH, **texts))
        buffers = buffers[::-1]
    sizes = {"most": most, "scratch": SCRATCH, "zero": levels[1]}
    joined = {"constants": "".join(constants), "calls": "".join(calls), "result": buffers[0]}
    return PROGRAM.format(**sizes, **joined), start


def variables(path: Path) -> tuple[str, ...]:
    """Return variables of an exported Makefile that compile network.c with CMSIS-NN."""
    flags = f"{FLAGS} -mcpu=cortex-m4 -mthumb -ffunction-sections -fdata-sections"
    return (
        f"SOURCES=network.c {' '.join(map(str, _sources(path)))}",
        f"CORTEX_FLAGS={flags} -I{path / 'Include'}",
        "CORTEX_LINK=-nostartfiles -specs=nano.specs -Wl,--gc-sections -T cortex-m4/memory.ld",
        "LANGUAGE=-std=gnu11",
        "WARNINGS=",
    )


def _sources(path: Path) -> Iterator[Path]:
    """Yield the files of CMSIS-NN that such a program needs."""
    for pattern in FILES.split():
        files = sorted((path / "Source").glob(pattern))
        if not files:
            raise ValueError(f"{path} must be a folder of CMSIS-NN, but has no Source/{pattern}.")
        yield from files


def _levels(x: Tensor) -> tuple[float, int]:
    """Return the scale and the zero point of -128 ... 127."""
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    return (high - low) / 255, round(-128 - 255 * low / (high - low))


class _Weights:
    """The constants and the call of a layer with weights."""

    def __init__(self, name: str, module: Any, step: float, new_step: float) -> None:
        self.name, self.module = name, module
        weight = module.weight.detach().double().numpy()
        self.linear, self.each = weight.ndim == 2, weight.ndim == 4 and module.groups > 1
        scale = np.abs(weight.reshape(len(weight), -1)).max(1) / 127
        if self.linear:  # one scale for all outputs
            scale[:] = scale.max()
        levels = np.round(weight / scale.reshape(-1, *(1,) * (weight.ndim - 1)))
        if not self.linear:  # the channels last; the channels of depthwise weights, too
            levels = levels.transpose((1, 2, 3, 0) if self.each else (0, 2, 3, 1))
        bias = np.zeros(len(weight)) if module.bias is None else module.bias.detach().numpy()
        parts = [math.frexp(each) for each in step * scale / new_step]
        self.multiplier = [min(round(part * 2**31), 2**31 - 1) for part, _ in parts]
        self.shift = [exponent for _, exponent in parts]
        arrays = {"weights": levels, "bias": np.round(bias / (step * scale))}
        if not self.linear:
            arrays |= {"multiplier": np.array(self.multiplier), "shift": np.array(self.shift)}
        self.constants = "".join(
            f"static const int{8 if key == 'weights' else 32}_t {name}_{key}[] = {{"
            f"{', '.join(str(int(value)) for value in array.reshape(-1))}}};\n"
            for key, array in arrays.items()
        )

    def call(self, zero: int, new_zero: int) -> dict[str, str]:
        """Return the texts of CALL, given the zero points of its input and its result."""
        name, weight = self.name, self.module.weight
        data = {"data": f"{name}_weights, &none, {name}_bias, "}
        if self.linear:
            quant = f"{{{self.multiplier[0]}, {self.shift[0]}}}"
            data |= {"kind": "fc", "function": "fully_connected_s8", "needs": "&kernel"}
            data["scales"] = f"&(const cmsis_nn_per_tensor_quant_params){quant}, "
            data["kernel"] = f"{weight.shape[1]}, 1, 1, {weight.shape[0]}"
            data["parameters"] = f"{-zero}, 0, {new_zero}, {{-128, 127}}"
            return data
        sizes = (self.module.stride, self.module.padding, (1, 1))
        tiles = ", ".join(f"{{{wide}, {high}}}" for high, wide in sizes)
        multiplier = "1, " if self.each else ""
        quant = f"{{(int32_t *){name}_multiplier, (int32_t *){name}_shift}}"
        data["scales"] = f"&(const cmsis_nn_per_channel_quant_params){quant}, "
        data["kind"] = "dw_conv" if self.each else "conv"
        kind = "depthwise_conv" if self.each else "convolve"
        data |= {"function": f"{kind}_wrapper_s8", "needs": "&p, &in, &kernel, &out"}
        outputs, inputs, high, wide = weight.shape
        filters = (1, outputs) if self.each else (outputs, inputs)
        data["kernel"] = f"{filters[0]}, {high}, {wide}, {filters[1]}"
        data["parameters"] = f"{-zero}, {new_zero}, {multiplier}{tiles}, {{{new_zero}, 127}}"
        return data
