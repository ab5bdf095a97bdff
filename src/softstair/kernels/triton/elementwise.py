"""The element-wise operator: its two kernels, and the functions that launch them.

A kernel walks through memory in storage order, whatever the order of the dimensions: the channel of
the element at offset p is (p // stride) % channels. A tile is ``UNROLL`` blocks of ``BLOCK``
elements; a program takes one tile after another. Element i of block j in a tile takes word j of the
i-th random quadruple, so that draws depend on seed and offset alone and not on how a kernel is
launched.

The stair (a :func:`table <softstair.kernels.triton.table>`) and the noise are tensors on the
device: nothing is read back, and changing the noise compiles nothing. ``KIND`` is one of those in
:mod:`softstair.kernels.triton.general`, or "native": a line that
:mod:`softstair.kernels.triton.line` computes exactly.
"""

from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from softstair.kernels.bound import Scalar, SoftStair
from softstair.kernels.triton import FAMILIES, evaluator, general, is_native, kind, table
from softstair.kernels.triton.distributions import (
    INTERPRETED,
    IS_CUDA,
    nan_else,
    philox_words,
    uniform,
    valid_mean,
)
from softstair.kernels.triton.evaluator import prepare

BLOCK = 1024
UNROLL = 4
WARPS = 4
PROGRAMS_PER_SM = 8
"""Programs for the mode of many levels, whose limits are expensive to prepare: each program does so
once and then takes many tiles. All must fit into the registers at once (half as many for four
bytes), or the last ones would start when the others end."""
FEW_THRESHOLDS = 3
"""Up to so many, preparing costs so little that every tile is a program, unless it draws. Otherwise
each program handles two tiles on large tensors."""


@triton.jit
def forward_kernel(
    x_ptr, y_ptr, saved_ptr, table, mean_ptr, std_ptr, seed_ptr, size, stride, channels,
    COUNT: tl.constexpr, FAMILY: tl.constexpr, FORWARD: tl.constexpr, KIND: tl.constexpr,
    COMPACT: tl.constexpr, PER_CHANNEL: tl.constexpr, MEAN: tl.constexpr, STD: tl.constexpr,
    INT64: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """y = the value of x; with COMPACT, saved = one byte per element that replaces x."""
    SCALAR: tl.constexpr = MEAN == "scalar" and STD == "scalar" and not PER_CHANNEL
    PREPARED: tl.constexpr = SCALAR and (KIND == "native" or COUNT <= general.FEW)
    LINE: tl.constexpr = "line" if KIND == "native" else KIND
    lane, zero = tl.arange(0, BLOCK), tl.full((), 0, tl.int64)
    seed = tl.load(seed_ptr) if FORWARD == "random" else 0
    if PREPARED:
        std = tl.load(std_ptr)
        mean = valid_mean(tl.load(mean_ptr), std)
        prepared = prepare(table, mean, std, COUNT, FAMILY, FORWARD)
    for tile in range(tl.program_id(0), tl.cdiv(size, UNROLL * BLOCK), tl.num_programs(0)):
        number = zero + tile
        first = number * (UNROLL * BLOCK)
        left = size - first
        blocks = _load(x_ptr + first, lane, left, BLOCK, UNROLL)
        words = blocks
        if FORWARD == "random":
            words = philox_words(seed, number, BLOCK)
        for j in tl.static_range(UNROLL):
            offsets = lane + j * BLOCK
            x = _widen(blocks[j])
            bits = x
            if PREPARED:
                y = evaluator.value(x, prepared, words[j], COUNT, FAMILY, FORWARD, False)
                if COMPACT:
                    bits = evaluator.support(x, prepared, COUNT)
            else:
                channel = _channel(first, offsets, stride, channels, INT64)
                row = channel * (3 * COUNT + 4) if PER_CHANNEL else 0
                std = _load_noise(std_ptr, first, offsets, left, channel, STD)
                mean = _load_noise(mean_ptr, first, offsets, left, channel, MEAN)
                mean = valid_mean(mean, std)
                u = uniform(words[j]) if FORWARD == "random" else words[j]
                y = general.value(x, table, row, mean, std, u, COUNT, FAMILY, FORWARD, LINE)
                if COMPACT:
                    bits = general.support(x, table, row, mean, std, COUNT, LINE)
            _store(y_ptr + first, offsets, left, y)
            if COMPACT:
                _store(saved_ptr + first, offsets, left, bits)


@triton.jit
def backward_kernel(
    dy_ptr, saved_ptr, dx_ptr, table, mean_ptr, std_ptr, size, stride, channels,
    COUNT: tl.constexpr, FAMILY: tl.constexpr, KIND: tl.constexpr,
    COMPACT: tl.constexpr, PER_CHANNEL: tl.constexpr, MEAN: tl.constexpr, STD: tl.constexpr,
    INT64: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """dx = dy·slope, the slope from x or from the byte that replaces it."""
    SCALAR: tl.constexpr = MEAN == "scalar" and STD == "scalar" and not PER_CHANNEL
    FEW: tl.constexpr = KIND == "native" or COUNT <= general.FEW
    LINE: tl.constexpr = "line" if KIND == "native" else KIND
    lane, first = tl.arange(0, BLOCK), tl.program_id(0).to(tl.int64) * (UNROLL * BLOCK)
    left = size - first
    gradients = _load(dy_ptr + first, lane, left, BLOCK, UNROLL)
    blocks = _load(saved_ptr + first, lane, left, BLOCK, UNROLL)
    if SCALAR and FEW and not COMPACT:
        std = tl.load(std_ptr)
        mean = valid_mean(tl.load(mean_ptr), std)
        prepared = prepare(table, mean, std, COUNT, FAMILY, "slope")
        for j in tl.static_range(UNROLL):
            x = _widen(blocks[j])
            dx = _widen(gradients[j]) * evaluator.slope(x, prepared, COUNT, FAMILY)
            if FAMILY == "uniform":
                dx += nan_else(x, mean - mean)  # which comparisons lose
            _store(dx_ptr + first, lane + j * BLOCK, left, dx)
    else:
        for j in tl.static_range(UNROLL):
            offsets = lane + j * BLOCK
            channel = _channel(first, offsets, stride, channels, INT64)
            row = channel * (3 * COUNT + 4) if PER_CHANNEL else 0
            std = _load_noise(std_ptr, first, offsets, left, channel, STD)
            if COMPACT:
                slope = general.slope_of(blocks[j].to(tl.int32), table, row, std, COUNT, LINE)
            else:
                mean = _load_noise(mean_ptr, first, offsets, left, channel, MEAN)
                mean = valid_mean(mean, std)
                x = _widen(blocks[j])
                slope = general.slope(x, table, row, mean, std, COUNT, FAMILY, LINE)
            dx = _widen(gradients[j]) * slope
            _store(dx_ptr + first, offsets, left, dx)


@triton.jit
def _load(pointer, lane, left, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    """UNROLL blocks, all requested before the first is used."""
    blocks = (tl.load(pointer + lane, mask=lane < left, other=0.0),)
    for j in tl.static_range(1, UNROLL):
        offsets = lane + j * BLOCK
        blocks = blocks + (tl.load(pointer + offsets, mask=offsets < left, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return blocks


@triton.jit
def _widen(block):
    """The block in float32; as late as possible, to save registers."""
    if IS_CUDA and block.dtype == tl.bfloat16:
        # One instruction per element, where the compiler emits three for two.
        wide = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [block],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        wide = block.to(tl.float32)
    return wide


@triton.jit
def _store(pointer, offsets, left, result):
    if INTERPRETED and pointer.dtype.element_ty == tl.bfloat16:
        # A GPU rounds; the interpreter truncates.
        bits = result.to(tl.uint32, bitcast=True)
        bits = (bits + (0x7FFF + ((bits >> 16) & 1))) & 0xFFFF0000
        result = tl.where(result == result, bits.to(tl.float32, bitcast=True), result)
    tl.store(pointer + offsets, result.to(pointer.dtype.element_ty), mask=offsets < left)


@triton.jit
def _channel(first, offsets, stride, channels, INT64: tl.constexpr):
    # In 32 bits where the size of the tensor allows it: division is expensive.
    position = first + offsets if INT64 else first.to(tl.int32) + offsets
    return position // stride % channels


@triton.jit
def _load_noise(pointer, first, offsets, left, channel, LAYOUT: tl.constexpr):
    """A mean or std: one for all, one per channel, or one per element."""
    if LAYOUT == "scalar":
        number = tl.load(pointer)
    elif LAYOUT == "channel":
        number = tl.load(pointer + channel)
    else:
        number = tl.load(pointer + first + offsets, mask=offsets < left, other=0.0)
    return number


def forward(
    x: Tensor, soft: SoftStair, strategy: str, generator: torch.Generator | None, compact: bool
) -> tuple[Tensor, Tensor]:
    """Return the values of x, in its memory layout, and with ``compact`` one byte per element that
    replaces x in the backward pass (else nothing)."""
    y = torch.empty_like(x)
    saved = torch.empty_like(x, dtype=torch.uint8) if compact else x.new_empty(0, dtype=torch.uint8)
    x = _dense(x, y)
    operands, channels, constants = _arguments(x, soft)
    tiles = triton.cdiv(x.numel(), UNROLL * BLOCK)
    is_cheap = strategy != "random" and constants["COUNT"] <= FEW_THRESHOLDS
    is_scalar = constants["STD"] == "scalar" and not constants["PER_CHANNEL"]
    if strategy == "mode" and is_scalar and not is_cheap:
        per_sm = PROGRAMS_PER_SM if x.element_size() == 2 else PROGRAMS_PER_SM // 2
        tiles = min(tiles, per_sm * _multiprocessors(x.device))
    elif not is_cheap and tiles >= 4 * PROGRAMS_PER_SM * _multiprocessors(x.device):
        tiles = triton.cdiv(tiles, 2)
    unroll = 1 if x.numel() <= BLOCK else UNROLL
    constants |= {"FORWARD": strategy, "COMPACT": compact, "UNROLL": unroll}
    seed = x  # any tensor: only random reads it
    if strategy == "random":
        # It stays on the device: a captured graph draws another at each replay.
        seed = torch.randint(2**63 - 1, (1,), device=x.device, generator=generator)
    _launch(forward_kernel, tiles, (x, y, saved, *operands, seed, x.numel(), *channels), constants)
    return y, saved


def backward(dy: Tensor, saved: Tensor, soft: SoftStair) -> Tensor:
    """Return dy·slope, in dy's dtype, which is x's; ``saved`` is x or the bytes that replace it."""
    dx = torch.empty_like(saved, dtype=dy.dtype)
    saved, dy = _dense(saved, dx), _dense(dy, dx)
    operands, channels, constants = _arguments(saved, soft)
    compact = saved.dtype == torch.uint8
    unroll = 1 if compact or saved.numel() <= BLOCK else UNROLL
    constants |= {"COMPACT": compact, "UNROLL": unroll}
    tiles = triton.cdiv(saved.numel(), unroll * BLOCK)
    _launch(backward_kernel, tiles, (dy, saved, dx, *operands, saved.numel(), *channels), constants)
    return dx


def _dense(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the tensor with the strides of the result; copied only if it has others."""
    if tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


def _arguments(
    x: Tensor, soft: SoftStair
) -> tuple[tuple[Tensor, ...], tuple[int, int], dict[str, Any]]:
    """Return a kernel's (table, mean, std), (stride, channels) and constants; ``x`` gives shape,
    strides and device."""
    stair, rows = soft.stair, table(soft.stair, x.device)
    mean, std = (_parameter(value, x.device) for value in (soft.mean, soft.std))
    axes = [] if stair.axis is None or len(rows) == 1 else [stair.axis % x.dim()]
    axes += [only for noise in (mean, std) if (only := _only_axis(noise, x)) is not None]
    axis = axes[0] if axes else None
    (mean, mean_layout), (std, std_layout) = (_laid_out(noise, x, axis) for noise in (mean, std))
    constants = {
        "COUNT": len(stair) - 1,
        "FAMILY": FAMILIES[type(soft.noise)],
        "KIND": "native" if is_native(stair) else kind(stair),
        "PER_CHANNEL": len(rows) > 1,
        "MEAN": mean_layout,
        "STD": std_layout,
        "INT64": x.numel() >= 2**31,
        "BLOCK": BLOCK,
    }
    channels = (1, 1) if axis is None else (x.stride(axis), x.shape[axis])
    return (rows, mean, std), channels, constants


def _parameter(value: Scalar, device: torch.device) -> Tensor:
    """Return a mean or std as a tensor on the device, without waiting for it."""
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float32, non_blocking=True)
    # A tensor made inside a capture belongs to that graph and has no value outside of it.
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return (_filled if capturing else _cached)(value, device)


def _filled(value: float, device: torch.device) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return torch.full((), value, dtype=torch.float32, device=device)


_cached = lru_cache(maxsize=256)(_filled)


def _only_axis(noise: Tensor, x: Tensor) -> int | None:
    """Return the dimension of x along which the noise varies, if there is just one."""
    axes = [d for d, size in enumerate(noise.shape, start=x.dim() - noise.dim()) if size > 1]
    return axes[0] if len(axes) == 1 and axes[0] >= 0 else None


def _laid_out(noise: Tensor, x: Tensor, axis: int | None) -> tuple[Tensor, str]:
    """Return a mean or std as a kernel reads it, and which layout that is."""
    if noise.numel() == 1:
        return noise, "scalar"
    if axis is not None and _only_axis(noise, x) == axis:
        return noise.reshape(-1).contiguous(), "channel"
    return torch.empty_like(x, dtype=noise.dtype).copy_(noise.expand_as(x)), "element"


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    # The interpreter runs one program after another, each with several tiles.
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _launch(kernel: Any, tiles: int, operands: tuple[Any, ...], constants: dict[str, Any]) -> None:
    x = operands[0]
    if x.numel() == 0:
        return
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        # Fused multiply-adds are requested explicitly: the default depends on Triton's version.
        kernel[(tiles,)](*operands, **constants, num_warps=WARPS, enable_fp_fusion=True)
