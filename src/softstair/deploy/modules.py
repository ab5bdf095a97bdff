"""What is read of float modules and stairs, and whether it has an integer form."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from softstair.deploy.nodes import ExportError, Shape
from softstair.stair import Stair

TABLE, GRID = 256, 2**16
"""Entries of a table, and inputs at which is asked where a function gives more than one level."""
ADVICE = {
    "amax": "Use nn.AdaptiveMaxPool2d(1) instead",
    "mean": "Use x.mean([2, 3]) instead",
    "pad_with_a_number": "Pad with zeros",
}
"""What to do about functions that are not exported."""


def not_supported(name: str, kind: str, function: str = "") -> ExportError:
    """Return the error for an operation, or a use of it, that is not exported."""
    advice = ADVICE.get(function or kind, "Remove or replace it")
    return ExportError.of(name, f"{kind} is not supported", advice)


def window(size: Any, axes: int) -> Shape:
    """Return a size along each axis."""
    return (size,) * axes if isinstance(size, int) else tuple(map(int, size))


def zero_padding(name: str, layer: nn.Conv1d | nn.Conv2d) -> Shape:
    """Return the zeros before and after each axis of a convolution's input."""
    # Last axis first, before and after.
    padding = layer._reversed_padding_repeated_twice[::-1]
    if layer.padding_mode != "zeros" or padding[::2] != padding[1::2]:
        reason = f"it pads with {layer.padding_mode!r} ({layer.padding!r})"
        raise ExportError.of(name, reason, "Pad by as many zeros on both sides")
    return tuple(padding[::2])


def pooling_windows(name: str, module: Any, axes: int, shape: Shape) -> tuple[Shape, Shape, Shape]:
    """Return the kernel, stride and padding of a pooling over features of that shape."""
    if len(shape) not in (axes + 1, 2):  # for PyTorch, (H, W) is one image per channel
        raise ExportError.of(name, f"it pools features of shape {shape}", "Give it (C, H, W)")
    if not hasattr(module, "output_size"):
        windows = (module.kernel_size, module.stride, module.padding)
        kernel, stride, padding = (window(size, axes) for size in windows)
        return kernel, stride, padding
    sizes, outputs = shape[-axes:], module.output_size
    outputs = (outputs,) * axes if isinstance(outputs, int) else outputs
    outputs = [output or size for output, size in zip(outputs, sizes, strict=True)]
    if any(size % output for size, output in zip(sizes, outputs, strict=True)):
        reason = f"its windows over {sizes} differ in size"
        raise ExportError.of(name, reason, "Choose an output size that divides it")
    kernel = tuple(size // output for size, output in zip(sizes, outputs, strict=True))
    return kernel, kernel, (0,) * axes


def linear_of(weight: Tensor, bias: Tensor | None = None) -> nn.Module:
    """Return the layer that F.linear computes."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    layer.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
    return layer


def beyond_padding(module: Any, windows: tuple[Shape, Shape, Shape], shape: Shape) -> Shape:
    """Return how far the last windows of a pooling with ceil_mode reach beyond the padding."""
    if not getattr(module, "ceil_mode", False):
        return ()
    beyond = []
    for kernel, stride, padding, size in zip(*windows, shape[-len(windows[0]) :], strict=True):
        last = -(-(size + 2 * padding - kernel) // stride) * stride
        last -= stride * (last >= size + padding)  # it would begin after the features
        beyond.append(max(0, last + kernel - size - 2 * padding))
    return tuple(beyond) if any(beyond) else ()


def window_counts(module: Any, windows: tuple[Shape, Shape, Shape], shape: Shape) -> list[Tensor]:
    """Return for each axis by how many elements an average divides the sums of its windows."""
    beyond = beyond_padding(module, windows, shape) or (0,) * len(windows[0])
    is_padded = getattr(module, "count_include_pad", True)
    counts = []
    axes = zip(*windows, beyond, shape[-len(beyond) :], strict=True)
    for kernel, stride, padding, more, size in axes:
        first = torch.arange(0, size + 2 * padding + more - kernel + 1, stride) - padding
        last = (first + kernel).clamp(max=size + padding * is_padded)
        counts.append(last - (first if is_padded else first.clamp(min=0)))
    return counts


def check_finite(name: str, module: nn.Module) -> None:
    """Raise ExportError for a parameter or a buffer that has NaN or infinity."""
    for key, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not bool(tensor.isfinite().all()):
            reason = f"its {key} has NaN or infinity, so training diverged"
            raise ExportError.of(name, reason, "Train again with a lower learning rate")


def has_table(name: str, function: nn.Module) -> bool:
    """Return whether an activation needs a table, because it decreases somewhere.

    Raise ExportError if it does in some channels alone.
    """
    if never_decreases(function):
        return False
    if any(parameter.numel() > 1 for parameter in function.parameters()):
        reason = f"it keeps {type(function).__name__}, which decreases in some channels"
        raise ExportError.of(name, reason, "Use one parameter for all channels")
    return True


@torch.no_grad()
def table_of(
    function: nn.Module, stair: Stair, low: float, high: float
) -> tuple[float, int, Tensor]:
    """Return the levels of a stair after a function of equal steps over an interval.

    Step i is at (first + i)·unit, so that one is at 0. Parts with a single level are left out.

    Returns:
        The unit, ``first``, and the levels in quanta, (256,).
    """
    grid = torch.linspace(low, high, GRID)
    changes = stair.index(function(grid)).diff().nonzero().flatten().tolist() or [0]
    low, high = float(grid[changes[0]]), float(grid[changes[-1] + 1])
    # Where there is a single input, steps are still larger than its last bits.
    unit = max((high - low) / (TABLE - 3), abs(high) * 2.0**-20, 1e-30)
    first = math.floor(low / unit)
    levels = torch.tensor(quantum_and_levels(stair)[1])
    steps = (torch.arange(first, first + TABLE) * unit).float()
    return unit, first, levels[stair.index(function(steps)).long()]


@torch.no_grad()
def never_decreases(activation: nn.Module) -> bool:
    """Return whether an activation never decreases, in any channel."""
    channels = sum(parameter.numel() for parameter in activation.parameters())
    x = torch.linspace(-64, 64, 2**14)[:, None].expand(-1, max(channels, 1))
    return not bool((activation.eval()(x).diff(dim=0) < 0).any())


def quantum_and_levels(stair: Stair) -> tuple[float, tuple[int, ...]]:
    """Return the quantum of a stair that has one, and the levels in it."""
    assert isinstance(stair.quantum, float)
    assert stair.integers is not None
    return stair.quantum, stair.integers


def has_gaps(stair: Stair) -> bool:
    """Return whether a stair is other than equal steps, one level each."""
    levels, quantum = np.array(stair.integers), stair.quantum
    steps = np.diff(np.array(stair.thresholds))
    even = bool(np.allclose(steps, quantum, rtol=1e-6, atol=0))
    return not even or not bool((np.diff(levels) == 1).all())
