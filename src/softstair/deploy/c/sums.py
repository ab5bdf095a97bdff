"""Convolutions and linear layers, each by one of four ways: bits counted, bytes multiplied, each
channel by itself, or anything else.

A linear layer behind a flattening is a convolution whose window is the whole picture.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from softstair.deploy import nodes
from softstair.deploy.c.features import Features
from softstair.deploy.c.operation import Window
from softstair.deploy.c.pack import Fields, fields, narrowest, planes
from softstair.deploy.c.text import Constant, structure
from softstair.deploy.integer import ExportError

__all__ = ["Summed", "summed"]

PLACES, BLOCK = 4, 64
"""As softstair_vector.h has them."""
ROOM = 16 * 1024
"""Bytes that unpacked weights should not exceed."""
LIMIT = 2**31 - 1


@dataclass(frozen=True)
class Summed:
    """A layer's constants, the structure and the call that computes it, and its scratch bytes."""

    constants: tuple[Constant, ...]
    structure: str
    call: str
    scratch: int
    how: str


def summed(
    number: int, node: nodes.Sum, taken: Features, reach: int, source: int, sink: int
) -> Summed:
    """How a layer is computed that takes the features of node ``source``, none of which is further
    from 0 than ``reach``; its sums go to the sink of layer ``sink``."""
    weight = node.weight.numpy().astype(np.int64)
    if weight.ndim == 2:
        given = Features("SS_WORDS", len(weight), 1, 1)
        window = Window(taken, given, (taken.height, taken.width))
        weight = weight.reshape(len(weight), taken.channels, taken.height, taken.width)
    else:
        height, width = _places(node, taken)
        given = Features("SS_WORDS", len(weight), height, width)
        kernel = (weight.shape[2], weight.shape[3])
        window = Window(taken, given, kernel, node.stride, node.padding, node.dilation)
    # (outputs, taps, channels of a group), as windows are looked at.
    rows = weight.transpose(0, 2, 3, 1).reshape(len(weight), window.taps, -1)
    common = {"in": f"&layer_{source}", "sink": f"&layer_{sink}_sink"}
    if taken.planes:
        return _counted(number, rows, window, common)
    coded = fields(rows.reshape(len(rows), -1)) if taken.kind == "SS_BYTES" else None
    # No partial sum may leave 32 bits either; bytes are as large as 128.
    largest = int(np.abs(rows).sum((1, 2)).max())
    if largest * (reach if coded is None else 128) > LIMIT:
        raise _too_large(node)
    if coded is None:
        return _wide(number, node, rows, window, common)
    # What is for one place, and kept, needs no neighbours: a channel at a time, in little memory.
    alone = window.places == 1 and sink == number
    return _multiplied(number, node, coded, rows, window, common, alone)


def _places(node: nodes.Sum, taken: Features) -> tuple[int, int]:
    kernel = node.weight.shape[2:]
    sizes = []
    for i, size in enumerate((taken.height, taken.width)):
        seen = node.dilation[i] * (int(kernel[i]) - 1) + 1
        sizes.append((size + 2 * node.padding[i] - seen) // node.stride[i] + 1)
    return sizes[0], sizes[1]


def _counted(
    number: int, rows: npt.NDArray[np.int64], window: Window, common: dict[str, str]
) -> Summed:
    packed, bits = planes(rows, window.taken.words)
    name = f"layer_{number}"
    text = structure(
        "ss_planes_sum",
        f"{name}_sum",
        window=window.fields(),
        outputs=len(rows),
        planes=bits,
        weights=f"{name}_weights",
        windows=f"{name.upper()}_SCRATCH",
        **common,
    )
    scratch = 4 * 2 * window.taps * window.taken.words * min(PLACES, window.places)
    constant = Constant(f"{name}_weights", packed, "weights")
    how = f"bits counted, {_bits(bits)}"
    return Summed((constant,), text, f"ss_sum_planes(&{name}_sum);", scratch, how)


def _multiplied(
    number: int,
    node: nodes.Sum,
    coded: Fields,
    rows: npt.NDArray[np.int64],
    window: Window,
    common: dict[str, str],
    alone: bool,
) -> Summed:
    taken, name = window.taken, f"layer_{number}"
    outputs, row = len(rows) // node.groups, -(-rows[0].size // 16) * 16
    depthwise = node.groups == taken.channels == len(rows) and node.groups > 1
    if depthwise:
        block = BLOCK
        unpacked, windows = rows[0].size * block + max(row, block), 4 * rows[0].size
    else:
        direct = window.direct and node.groups == 1 and row == rows[0].size
        # Windows that must be copied are copied anew for each block of channels.
        most = 8 if window.places == 1 else 16 if direct else BLOCK
        block = 1 if alone else max(4, min(most, ROOM // row // 4 * 4))
        unpacked = row * min(block, outputs)
        windows = 0 if direct else row * min(PLACES, window.places)
    unpacked = -(-unpacked // 16) * 16
    constants = [Constant(f"{name}_weights", coded.data, "weights")]
    if coded.turned.any():
        turned = np.packbits(coded.turned, bitorder="little")
        constants.append(Constant(f"{name}_turned", turned, "weights"))
    if taken.bias:
        offsets = taken.bias * rows.sum((1, 2))
        constants.append(Constant(f"{name}_offsets", offsets.astype(np.int32), "thresholds"))
    scratch = f"(int8_t *){name.upper()}_SCRATCH"
    text = structure(
        "ss_dot_sum",
        f"{name}_sum",
        window=window.fields(),
        groups=int(node.groups),
        inputs=rows.shape[2],
        outputs=outputs,
        bits=coded.bits,
        base=coded.base,
        step=coded.step,
        block=block,
        direct=int(windows == 0),
        weights=f"{name}_weights",
        turned=f"{name}_turned" if coded.turned.any() else None,
        offsets=f"{name}_offsets" if taken.bias else None,
        unpacked=scratch,
        windows=f"{scratch} + {unpacked}" if windows else None,
        **common,
    )
    how = f"{'each channel' if depthwise else 'bytes'} multiplied, {_bits(coded.bits)}"
    call = f"ss_sum_{'depthwise' if depthwise else 'dot'}(&{name}_sum);"
    return Summed(tuple(constants), text, call, unpacked + windows, how)


def _wide(
    number: int,
    node: nodes.Sum,
    rows: npt.NDArray[np.int64],
    window: Window,
    common: dict[str, str],
) -> Summed:
    name = f"layer_{number}"
    weights = narrowest(rows)
    if weights is None:
        raise _too_large(node)
    text = structure(
        "ss_wide_sum",
        f"{name}_sum",
        window=window.fields(),
        groups=int(node.groups),
        inputs=rows.shape[2],
        outputs=len(rows) // node.groups,
        weights=f"{name}_weights",
        width=weights.itemsize,
        **common,
    )
    how = f"words multiplied, {_bits(8 * weights.itemsize)}"
    constant = Constant(f"{name}_weights", weights, "weights")
    return Summed((constant,), text, f"ss_sum_wide(&{name}_sum);", 0, how)


def _bits(count: int) -> str:
    return f"{count} bit{'s' * (count > 1)} a weight"


def _too_large(node: nodes.Sum) -> ExportError:
    return ExportError(
        f"the sums of {node.name} may leave 32 bits on their way: give it fewer inputs, or weights "
        "and features of fewer bits."
    )
