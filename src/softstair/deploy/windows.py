"""Windows of convolutions and poolings: their kernel, stride and padding along each axis."""

from typing import Any

from torch import nn

from softstair.deploy.nodes import ExportError, Shape


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
