"""The first layer: a convolution of few channels, whose products are too short for the tensor cores
of a library, and whose input needs no gradient.

All taps of all channels are one row of a matrix X, gathered as it is needed: the picture is small
and stays in the cache. The sums c = X·W leave with their moments and with XᵀX, a few numbers; a
column of ones in X adds Xᵀ1 to them. Since dc = s·dz + a·c + b by channel (see
:mod:`softstair.kernels.triton.pulled`), the weights' gradient is

    Xᵀdc = s·Xᵀdz + a·(XᵀX)·W + b·Xᵀ1

of which Xᵀdz alone needs a pass over memory, the one that makes the sums of dz: c is read once on
the way back, and dc never written.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from softstair.kernels.triton.moments import turn
from softstair.kernels.triton.normalised import Steps, row_of
from softstair.kernels.triton.pulled import risen

__all__ = ["convolve", "fits", "pull_weights"]

LONGEST = 63
"""Products of a sum; the column of ones comes to them."""
FORWARD_ROWS, FORWARD_PROGRAMS = 32, 528
BACKWARD_ROWS, BACKWARD_PROGRAMS = 16, 264


@triton.jit
def _taps(
    x,
    row,
    rows,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
    TAPS: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """What meets the weights at each pixel of the output, and 1: (rows, products + 1 and more)."""
    k = tl.arange(0, LENGTH)
    tap, channel = k // INPUTS, k % INPUTS
    image, y, across = row // (HEIGHT * WIDTH), row // WIDTH % HEIGHT, row % WIDTH
    down = y[:, None] + (tap // TAPS - TAPS // 2)[None, :]
    right = across[:, None] + (tap % TAPS - TAPS // 2)[None, :]
    inside = (down >= 0) & (down < HEIGHT) & (right >= 0) & (right < WIDTH)
    there = (row < rows)[:, None]
    mask = inside & there & (k < TAPS * TAPS * INPUTS)[None, :]
    at = ((image.to(tl.int64)[:, None] * HEIGHT + down) * WIDTH + right) * INPUTS + channel[None, :]
    taps = tl.load(x + at, mask=mask, other=0)
    one = there & (k == TAPS * TAPS * INPUTS)[None, :]
    return tl.where(one, 1.0, taps.to(tl.float32))


@triton.jit
def _convolve_narrow(
    x,
    weight,
    running_mean,
    c,
    partial,
    squares,
    rows,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TAPS: tl.constexpr,
    LENGTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = outputs < OUTPUTS
    k = tl.arange(0, LENGTH)
    products: tl.constexpr = TAPS * TAPS * INPUTS
    columns = tl.load(
        weight + outputs[None, :] * products + k[:, None],
        mask=there[None, :] & (k < products)[:, None],
        other=0,
    )
    shift = tl.load(running_mean + outputs, mask=there, other=0)[None, :]
    first = tl.zeros((BLOCK,), dtype=tl.float32)
    second = tl.zeros((BLOCK,), dtype=tl.float32)
    square = tl.zeros((LENGTH, LENGTH), dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        taps = _taps(x, row, rows, HEIGHT, WIDTH, INPUTS, TAPS, LENGTH).to(columns.dtype)
        # The moments are those of the sums as they are kept.
        kept = tl.dot(taps, columns, input_precision=PRECISION).to(c.dtype.element_ty)
        mask = (row < rows)[:, None] & there[None, :]
        tl.store(c + row.to(tl.int64)[:, None] * OUTPUTS + outputs[None, :], kept, mask=mask)
        value = tl.where(mask, kept.to(tl.float32) - shift, 0.0)
        first += tl.sum(value, 0)
        second += tl.sum(value * value, 0)
        if tl.program_id(1) == 0:
            square = tl.dot(tl.trans(taps), taps, square, input_precision=PRECISION)
    at = partial + tl.program_id(0) * 2 * OUTPUTS + outputs
    tl.store(at, first, mask=there)
    tl.store(at + OUTPUTS, second, mask=there)
    if tl.program_id(1) == 0:
        corner = (tl.program_id(0) * LENGTH + k[:, None]) * LENGTH + k[None, :]
        tl.store(squares + corner, square)


@triton.jit
def _pull_narrow(
    x,
    gradient,
    place,
    c,
    statistics,
    table,
    ready,
    partial,
    products,
    rows,
    count,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    LENGTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    FAMILY: tl.constexpr,
    KIND: tl.constexpr,
    POOL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = channel < CHANNELS
    centre = tl.load(statistics + channel, mask=there, other=0)[None, :]
    slope = tl.load(statistics + 2 * CHANNELS + channel, mask=there, other=0)[None, :]
    offset = tl.load(statistics + 3 * CHANNELS + channel, mask=there, other=0)[None, :]
    first = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    second = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    total = tl.zeros((LENGTH, BLOCK), dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & there[None, :]
        dz, value, winner = risen(
            gradient, place, c, row, channel, mask, slope, offset, table, ready,
            HEIGHT, WIDTH, CHANNELS, ROWS, COUNT, FAMILY, KIND, POOL,
        )  # fmt: skip
        first += dz
        second += dz * (value - centre)
        kept = dz.to(gradient.dtype.element_ty)
        if POOL:
            for j in tl.static_range(4):
                source = row_of(row, j, HEIGHT, WIDTH, ROWS, 4, POOL)
                taps = _taps(x, source, count, HEIGHT, WIDTH, INPUTS, TAPS, LENGTH)
                part = tl.where(winner == j, kept, 0.0).to(kept.dtype)
                taps = tl.trans(taps.to(kept.dtype))
                total = tl.dot(taps, part, total, input_precision=PRECISION)
        else:
            taps = _taps(x, row, count, HEIGHT, WIDTH, INPUTS, TAPS, LENGTH)
            taps = tl.trans(taps.to(kept.dtype))
            total = tl.dot(taps, kept, total, input_precision=PRECISION)
    at = partial + tl.program_id(0) * 2 * CHANNELS + channel
    tl.store(at, tl.sum(first, 0), mask=there)
    tl.store(at + CHANNELS, tl.sum(second, 0), mask=there)
    k = tl.arange(0, LENGTH)
    at = (tl.program_id(0) * LENGTH + k[:, None]) * CHANNELS + channel[None, :]
    tl.store(products + at, total, mask=there[None, :])


def fits(weight: Tensor, stride: object, padding: object, dilation: object, groups: int) -> bool:
    """Whether a convolution is computed here: short sums, and pictures that keep their size."""
    outputs, inputs, down, across = weight.shape
    side = (down - 1) // 2
    same = down == across and down % 2 == 1 and padding == (side, side)
    plain = all(value == (1, 1) for value in (stride, dilation)) and groups == 1
    return same and plain and inputs * down * across <= LONGEST and outputs >= 16


def convolve(x: Tensor, weight: Tensor, running_mean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sums in the weights' dtype, channels-last as x is; their moments by tile; and XᵀX."""
    images, inputs, height, width = x.shape
    outputs, _, taps, _ = weight.shape
    block = min(128, triton.next_power_of_2(outputs))
    rows, length = images * height * width, _length(weight)
    tiles = min(triton.cdiv(rows, FORWARD_ROWS), FORWARD_PROGRAMS)
    c = torch.empty(
        (images, outputs, height, width),
        dtype=weight.dtype,
        device=x.device,
        memory_format=torch.channels_last,
    )
    partial = torch.empty((tiles, 2, outputs), dtype=torch.float32, device=x.device)
    squares = torch.empty((tiles, length, length), dtype=torch.float32, device=x.device)
    _convolve_narrow[(tiles, triton.cdiv(outputs, block))](
        x,
        weight,
        running_mean,
        c,
        partial,
        squares,
        rows,
        height,
        width,
        inputs,
        outputs,
        taps,
        length,
        FORWARD_ROWS,
        block,
        _precision(),
        num_warps=4,
        enable_fp_fusion=True,
    )
    return c, partial, squares.sum(0)


def pull_weights(
    x: Tensor,
    gradient: Tensor,
    c: Tensor,
    weight: Tensor,
    statistics: Tensor,
    steps: Steps,
    place: Tensor | None,
    squares: Tensor,
) -> tuple[Tensor, Tensor]:
    """(dβ, dγ, …) as of :func:`pull_sums <softstair.kernels.triton.pulled.pull_sums>`, and the
    gradient of the weights that multiplied, in float32, laid out as they are."""
    images, inputs, height, width = x.shape
    outputs, _, taps, _ = weight.shape
    block = min(128, triton.next_power_of_2(outputs))
    count, length = images * height * width, _length(weight)
    rows = count if place is None else count // 4
    tiles = min(triton.cdiv(rows, BACKWARD_ROWS), BACKWARD_PROGRAMS)
    partial = torch.empty((tiles, 2, outputs), dtype=torch.float32, device=x.device)
    products = torch.empty((tiles, length, outputs), dtype=torch.float32, device=x.device)
    _pull_narrow[(tiles, triton.cdiv(outputs, block))](
        x,
        gradient,
        gradient if place is None else place,
        c,
        statistics,
        steps.table,
        steps.ready,
        partial,
        products,
        rows,
        count,
        height,
        width,
        inputs,
        outputs,
        taps,
        length,
        BACKWARD_ROWS,
        block,
        steps.number,
        steps.family,
        steps.kind,
        place is not None,
        _precision(),
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=True,
    )
    turned = turn(partial, statistics, count, 1.0)
    share, by_sums, constant = turned[2:]
    long = weight[0].numel()
    rows_of_weights = weight.permute(2, 3, 1, 0).reshape(long, outputs).float()
    pulled = share * products.sum(0)[:long]
    with torch.autocast(x.device.type, enabled=False):
        pulled += by_sums * (squares[:long, :long] @ rows_of_weights)
    pulled += constant * squares[:long, long, None]
    laid = pulled.t().contiguous().reshape(outputs, taps, taps, inputs)
    return turned, laid.permute(0, 3, 1, 2)


def _length(weight: Tensor) -> int:
    return max(16, triton.next_power_of_2(weight[0].numel() + 1))


def _precision() -> str:
    """Of products in float32, as torch has it for its own convolutions."""
    cudnn: Any = torch.backends.cudnn
    try:
        rounds = cudnn.allow_tf32
    except RuntimeError:  # torch was told by operation
        rounds = cudnn.conv.fp32_precision == "tf32"
    return "tf32" if rounds else "ieee"
