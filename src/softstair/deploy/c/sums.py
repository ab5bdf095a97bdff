"""Convolutions and linear layers in C, each in one of five ways.

Features in bit planes are counted, and bytes are multiplied (depthwise convolutions have a function
of their own), or both become tiles of Winograd's algorithm. Otherwise words are multiplied. A
linear layer after a Flatten is a convolution whose window covers its input.
"""

import math
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from softstair.deploy import nodes
from softstair.deploy.c import panels, winograd
from softstair.deploy.c.affine import Integers
from softstair.deploy.c.layout import Constant, Features, Operation, structure, window_fields
from softstair.deploy.c.packing import PackedFields, pack_fields
from softstair.deploy.nodes import narrowest
from softstair.deploy.target import Cpu

POSITIONS, BLOCK, CHANNEL_BLOCK = 4, 64, 8  # SS_PLACES, SS_BLOCK and SS_EIGHT of softstair_vector.h
MAX_UNPACKED = 16 * 1024  # bytes of unpacked weights, and of the operands of packed products
MAX_FOUR, MAX_WEIGHT = 2**12 - 1, 31  # sums and weights of packed products, as in softstair_dsp.h
MIN_CHUNK = 32  # packed products are faster for so many inputs at a time
Stored = Literal["sums", "levels", "affine"]
"""What is stored of sums: they themselves, levels, or levels as bytes by affine steps."""


class _Packing(NamedTuple):
    """Packed products; the fields are those of ss_dot_sum, and the bytes of the operands."""

    channels: int = 0
    chunk: int = 0
    operands: int = 0


class _Kernel(NamedTuple):
    """A function of the runtime with the fields of its structure."""

    function: str
    how: str
    bits: int
    constants: dict[str, npt.NDArray[Any]]
    scratch: int
    fields: dict[str, object]


def weighted_sum(
    number: int,
    node: nodes.Sum,
    x: Features,
    output: Features,
    span: tuple[int, int],
    ends: dict[str, str],
    stored: Stored,
    scratch: int,
    cpu: Cpu,
) -> Operation:
    """Return the operation of a layer that reads features ``x`` between the ends of ``span``.

    ``ends`` are the fields of its structure that name what it reads and where its sums go. Tiles
    and packed products use at most ``scratch`` bytes.
    """
    if x.is_turned and node.weight.shape[1] == x.channels:  # at each place
        node = replace(node, weight=node.weight[:, :, None, None])
    weight = node.weight.cpu().numpy().astype(np.int64)
    if weight.ndim == 2 and x.is_turned:
        weight = weight.reshape(len(weight), x.height, x.width, x.channels).transpose(0, 3, 1, 2)
    elif weight.ndim == 2:
        weight = weight.reshape(len(weight), x.channels, x.height, x.width)
    elif weight.ndim == 3:
        weight = weight[:, :, None]
    kernel_size = weight.shape[2:]
    # (outputs, taps, channels of a group): the order in which windows are read.
    rows = weight.transpose(0, 2, 3, 1).reshape(len(weight), math.prod(kernel_size), -1)
    name = f"layer_{number}"
    bits = winograd.weight_bits(rows)
    is_x86 = cpu == "x86"
    tiling = None
    if bits <= 4 and not is_x86:
        tiling = winograd.tiling(node, x, output, span, bits, scratch)
    if x.planes:
        kernel = _planes(name, rows, x, output) if tiling is None else _tiles(name, rows, tiling)
    else:
        # Partial sums of bytes must fit into 32 bits; bytes are at most 128, or 255 for x86.
        fits = (255 if is_x86 else 128) * int(np.abs(rows).sum((1, 2)).max()) < nodes.INT32_LIMIT
        is_packed = x.kind == "SS_BYTES" and fits
        flat = rows.reshape(len(rows), -1)
        if is_x86 and (node.groups > 1 or rows.shape[2] % 4):
            flat = np.pad(flat, ((0, 0), (0, 1)))  # so that panels can be filled with 0
        packed = pack_fields(flat) if is_packed else None
        if packed is None:
            kernel = _words(name, node, rows)
        elif is_x86:
            kernel = _panels(name, node, rows, x, packed, span)
        elif tiling is not None and bits <= packed.bits:
            kernel = _tiles(name, rows, tiling)
        else:
            kernel = _bytes(name, node, rows, x, output, packed, span, stored, scratch)
    window = window_fields(x, output, kernel_size, node.stride, node.padding, node.dilation)
    kind = {"depthwise": "dot", "taps": "panels"}.get(kernel.function, kernel.function)
    initialiser = "{" + ", ".join(map(str, window.values())) + "}"
    text = structure(f"ss_{kind}_sum", f"{name}_sum", window=initialiser, **kernel.fields, **ends)
    constants = (
        Constant(f"{name}_{key}", values, "thresholds" if key == "offsets" else "weights")
        for key, values in kernel.constants.items()
    )
    return Operation(
        number,
        (number,),
        (),
        (f"ss_sum_{kernel.function}(&{name}_sum);",),
        f"{kernel.how}, {kernel.bits} bit{'s' * (kernel.bits > 1)} a weight",
        tuple(constants),
        (text,),
        kernel.scratch,
        node.weight.numel(),
    )


def _planes(name: str, rows: Integers, x: Features, output: Features) -> _Kernel:
    """Count bits."""
    packed, bits = pack_planes(rows, x.words)
    scratch = 4 * 2 * rows.shape[1] * x.words * min(POSITIONS, output.positions)
    fields = {
        "outputs": len(rows),
        "planes": bits,
        "weights": f"{name}_weights",
        "windows": f"{name.upper()}_SCRATCH",
    }
    return _Kernel("planes", "bits counted", bits, {"weights": packed}, scratch, fields)


def _tiles(name: str, rows: Integers, tiling: winograd.Tiling) -> _Kernel:
    """Multiply transformed tiles."""
    packed, bits = winograd.pack(rows)
    scratch = f"{name.upper()}_SCRATCH"
    filters = tiling.features // 4
    products = filters + tiling.filters // 4
    sums = products + tiling.products // 4
    fields = {
        "outputs": len(rows),
        "tile": tiling.tile,
        "bits": bits,
        "strip": tiling.strip,
        "weights": f"{name}_weights",
        "features": f"(int8_t *){scratch}",
        "filters": f"(int8_t *)({scratch} + {filters})",
        "products": f"(int32_t *)({scratch} + {products})",
        "sums": f"(int32_t *)({scratch} + {sums})",
    }
    constants = {"weights": packed}
    return _Kernel("winograd", "tiles multiplied", bits, constants, tiling.scratch, fields)


def _panels(
    name: str,
    node: nodes.Sum,
    rows: Integers,
    x: Features,
    packed: PackedFields,
    span: tuple[int, int],
) -> _Kernel:
    """Multiply bytes in panels, for x86."""
    made = panels.panels(node, rows, packed, x, span)
    place = f"(int8_t *){name.upper()}_SCRATCH"
    fields: dict[str, object] = {
        **made.fields,
        **{key: f"{name}_{key}" for key in made.constants},
        "unpacked": place,
        "padded": f"(uint8_t *){name.upper()}_SCRATCH + {made.unpacked}" if made.padded else None,
    }
    depthwise = node.groups == x.channels == len(rows) and node.groups > 1
    function, how = ("taps", "each channel") if depthwise else ("panels", "panels")
    size = -(-(made.unpacked + made.padded) // 16) * 16
    return _Kernel(function, f"{how} multiplied", packed.bits, made.constants, size, fields)


def _bytes(
    name: str,
    node: nodes.Sum,
    rows: Integers,
    x: Features,
    output: Features,
    packed: PackedFields,
    span: tuple[int, int],
    stored: Stored,
    scratch: int,
) -> _Kernel:
    """Multiply bytes."""
    length, outputs = rows[0].size, len(rows) // node.groups
    span, max_bytes = (span[0] - x.bias, span[1] - x.bias), min(scratch, MAX_UNPACKED)
    padded = -(-length // 16) * 16
    depthwise = node.groups == x.channels == len(rows) and node.groups > 1
    if depthwise:
        block = BLOCK
        unpacked, windows = length * block + max(padded, block), 4 * length
        is_plain = stored == "affine" and not x.bias and not packed.negated.any()
        is_plain &= _is_small(rows[:, :, 0], span)
        packing = _columns(node, x, output, max_bytes) if is_plain else _Packing()
    else:
        single = rows.shape[1] == 1 or (output.positions == 1 and rows.shape[1] == x.positions)
        unpadded = not any(node.padding) and node.groups == 1 and padded == length
        # A window that is contiguous in memory needs no copy.
        contiguous = single and unpadded
        # Windows that must be copied are copied again for each block of channels.
        block = 8 if output.positions == 1 else 16 if contiguous else BLOCK
        block = max(4, min(block, MAX_UNPACKED // padded // 4 * 4))
        if output.positions == 1 and stored == "sums":
            block = 1  # a sum that is stored needs no other channels
        windows = 0 if contiguous else padded * min(POSITIONS, output.positions)
        together = min(-(-outputs // 4) * 4, BLOCK)
        room = max_bytes - windows if output.positions >= POSITIONS else 0
        packing = _fours(rows.reshape(len(rows), -1), together, span, room)
        unpacked = padded * max(min(block, outputs), 2 * packing.channels)
    unpacked, windows = (-(-size // 16) * 16 for size in (unpacked, windows))
    constants: dict[str, npt.NDArray[Any]] = {"weights": packed.data}
    if packed.negated.any():
        constants["negated"] = np.packbits(packed.negated, bitorder="little")
    if x.bias:
        constants["offsets"] = (x.bias * rows.sum((1, 2))).astype(np.int32)
    place = f"(int8_t *){name.upper()}_SCRATCH"
    weight, feature = int(np.abs(rows).max(initial=0)), max(*map(abs, span), abs(x.bias))
    fields = {
        "groups": int(node.groups),
        "inputs": rows.shape[2],
        "outputs": outputs,
        "bits": packed.bits,
        "base": packed.base,
        "step": packed.step,
        "block": block,
        "direct": int(windows == 0),
        "packed_channels": packing.channels,
        "chunk": packing.chunk,
        "narrow": int(depthwise and length * weight * feature < 2**15),
        **{key: f"{name}_{key}" for key in constants},
        "unpacked": place,
        "windows": f"{place} + {unpacked}" if windows else None,
        "operands": f"{name.upper()}_SCRATCH + {(unpacked + windows) // 4}",
    }
    function, how = ("depthwise", "each channel") if depthwise else ("dot", "bytes")
    size = unpacked + windows + packing.operands
    return _Kernel(function, f"{how} multiplied", packed.bits, constants, size, fields)


def _columns(node: nodes.Sum, x: Features, output: Features, scratch: int) -> _Packing:
    """Return packed products of a depthwise layer with small sums; none if they do not fit."""
    window = (*node.weight.shape[2:], *node.stride, *node.dilation)
    height = -(-output.height // 4) * 4
    operands = 16 * height * (x.width + 2 * node.padding[-1])
    fits = window == (3, 3, 1, 1, 1, 1) and x.channels % 4 == 0 and height <= 4 * BLOCK
    return _Packing(1, operands=operands) if fits and operands <= scratch else _Packing()


def _fours(weight: Integers, channels: int, span: tuple[int, int], scratch: int) -> _Packing:
    """Return packed products: four in one where the sums of chunks fit, otherwise two."""
    padded = -(-weight.shape[1] // 16) * 16
    operands = 2 * POSITIONS * padded
    channels = min(channels, (scratch - operands) // (2 * padded) // 4 * 4)
    if channels <= 0:
        return _Packing()
    for parts in range(1, max(padded // MIN_CHUNK, 1) + 1):
        size = -(-padded // parts // 16) * 16
        if all(_is_small(weight[:, at : at + size], span) for at in range(0, padded, size)):
            return _Packing(channels, size, operands)
    return _Packing(channels, 0, operands)


def _is_small(weight: Integers, span: tuple[int, int]) -> bool:
    """Whether weights, and their sums with inputs in the span or 0, fit four products in one."""
    is_light = bool(np.abs(weight).max(initial=0) <= MAX_WEIGHT)
    return is_light and nodes.largest_sum(weight, *span) <= MAX_FOUR


def _words(name: str, node: nodes.Sum, rows: Integers) -> _Kernel:
    """Multiply words."""
    weights = narrowest(rows)
    fields = {
        "groups": int(node.groups),
        "inputs": rows.shape[2],
        "outputs": len(rows) // node.groups,
        "weights": f"{name}_weights",
        "width": weights.itemsize,
    }
    bits = 8 * weights.itemsize
    return _Kernel("wide", "words multiplied", bits, {"weights": weights}, 0, fields)


def pack_planes(weight: Integers, words: int) -> tuple[npt.NDArray[np.uint32], int]:
    """Pack weights of −1, 0 and 1, (outputs, taps, channels), for softstair_planes.h.

    Returns the words and the bits per weight: 2, or 1 where no weight is 0.
    """
    outputs, taps, channels = weight.shape
    binary = bool((weight != 0).all())
    planes = np.stack([weight > 0] if binary else [weight >= 0, weight > 0])
    bits = np.zeros((len(planes), outputs, taps, 32 * words), dtype=np.uint8)
    bits[..., :channels] = planes
    packed = np.packbits(bits, axis=-1, bitorder="little").reshape(len(planes), outputs, -1)
    rows = packed.view("<u4").astype(np.uint32)
    blocks = [
        _interleaved(rows[:, start : start + CHANNEL_BLOCK])
        for start in range(0, outputs, CHANNEL_BLOCK)
    ]
    return np.concatenate(blocks), len(planes)


def _interleaved(rows: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """(planes, channels, words) → four words of each channel in turn, then the rest."""
    planes, channels, words = rows.shape
    multiple = words // 4 * 4
    fours = rows[:, :, :multiple].reshape(planes, channels, -1, 4).transpose(2, 0, 1, 3)
    rest = rows[:, :, multiple:].transpose(2, 0, 1)
    return np.concatenate([fours.reshape(-1), rest.reshape(-1)])
