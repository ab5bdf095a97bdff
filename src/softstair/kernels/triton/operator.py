"""The operator's two kernels, and the operators of torch that launch them.

A kernel walks through memory as it lies, whatever the order of the dimensions: the channel of the
element at place p is (p // stride) % channels. A block is four runs of ``SPAN`` elements, or the
one that there is, and a program takes one block after another; element i of run j takes word j of
the i-th random quadruple (of 16 bits, with a neighbour: of the i/2-th), so that draws depend on the
seed and the place alone and not on how a kernel is launched.

``softstair::climb`` gives the values and what the backward pass needs of x, ``softstair::descend``
is that backward pass. Both take the stair as the table of :func:`softstair.kernels.triton.table`
and the noise as tensors on the device, so nothing is read back from it and nothing is baked in.
"""

from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from softstair.kernels.triton import alike, climbing, memory, shapes

SPAN = 1024
RUNS = 4
WARPS = 4
SHARES = 8
"""Programs that a multiprocessor is given for a mode of many levels, whose limits are dear to find:
each settles them once, and goes on. So many must have room in its registers at once (half of them
for four bytes), or the last would begin when the others end."""
FEW_THRESHOLDS = 3
"""So many need so little settling that every block may be a program, unless it draws. Of all else,
two blocks are one where there are many."""


@triton.jit
def climbing_kernel(
    x,
    y,
    trace,
    table,
    mean,
    std,
    seed,
    size,
    stride,
    channels,
    COUNT: tl.constexpr,
    FAMILY: tl.constexpr,
    FORWARD: tl.constexpr,
    KIND: tl.constexpr,
    TRACED: tl.constexpr,
    ROWS: tl.constexpr,
    MEAN: tl.constexpr,
    STD: tl.constexpr,
    WORKING: tl.constexpr,
    WIDE: tl.constexpr,
    SPAN: tl.constexpr,
    RUNS: tl.constexpr,
):
    """y = the value of x, and trace = a byte of its support under uniform noise, if asked for."""
    DOUBLE: tl.constexpr = mean.dtype.element_ty == tl.float64
    ONE: tl.constexpr = MEAN == "scalar" and STD == "scalar" and not DOUBLE and not ROWS
    MOVED: tl.constexpr = FORWARD != "mode" or KIND != "uneven" or COUNT == 1
    ALIKE: tl.constexpr = ONE and (KIND == "native" or (COUNT <= climbing.FEW and MOVED))
    HALF: tl.constexpr = x.dtype.element_ty.primitive_bitwidth == 16
    LAST: tl.constexpr = (65536 if x.dtype.element_ty == tl.bfloat16 else 8192) if HALF else 1
    LINE: tl.constexpr = "line" if KIND == "native" else KIND
    BRIEF: tl.constexpr = HALF and KIND == "native" and (FORWARD != "hard" or TRACED)
    lane, nought = tl.arange(0, SPAN), tl.full((), 0, tl.int64)
    key = tl.load(seed) if FORWARD == "random" else 0
    if ALIKE:
        settled = alike.settle(table, tl.load(mean), tl.load(std), COUNT, FAMILY, FORWARD, HALF)
        it = (x, y, trace, key, size)
        # A loop for each way: one for both would need the registers of both.
        if BRIEF:
            if alike.is_short(settled):
                alike.climb_all(it, settled, COUNT, FAMILY, FORWARD, TRACED, LAST, True, SPAN, RUNS)
            else:
                alike.climb_all(
                    it, settled, COUNT, FAMILY, FORWARD, TRACED, LAST, False, SPAN, RUNS
                )
        else:
            alike.climb_all(it, settled, COUNT, FAMILY, FORWARD, TRACED, LAST, False, SPAN, RUNS)
    else:
        for block in range(tl.program_id(0), tl.cdiv(size, RUNS * SPAN), tl.num_programs(0)):
            number = nought + block
            first = number * (RUNS * SPAN)
            left = size - first
            runs = memory.read(x + first, lane, left, SPAN, RUNS)
            words, more = runs, runs
            if FORWARD == "random":
                words = shapes.four(key, number, SPAN, HALF)
                if DOUBLE:
                    more = shapes.words(key, number, SPAN, 1)
            for run in tl.static_range(RUNS):
                at = lane + run * SPAN
                channel = memory.channel_of(first, at, stride, channels, WIDE)
                row = channel * (3 * COUNT + 4) if ROWS else 0
                alpha = memory.noise(mean, first, at, left, channel, MEAN)
                beta = memory.noise(std, first, at, left, channel, STD)
                wide = memory.widened(runs[run], WORKING)
                u = words[run]
                if FORWARD == "random":
                    u = shapes.uniform_double(u, more[run]) if DOUBLE else shapes.uniform(u)
                result = climbing.value(
                    wide, table, row, alpha, beta, u, COUNT, FAMILY, FORWARD, LINE
                )
                memory.write(y + first, at, left, result)
                if TRACED:
                    bits = climbing.support(wide, table, row, alpha, beta, COUNT, LINE)
                    memory.write(trace + first, at, left, bits)


@triton.jit
def descending_kernel(
    grad,
    trace,
    out,
    table,
    mean,
    std,
    size,
    stride,
    channels,
    COUNT: tl.constexpr,
    FAMILY: tl.constexpr,
    KIND: tl.constexpr,
    TRACED: tl.constexpr,
    ROWS: tl.constexpr,
    MEAN: tl.constexpr,
    STD: tl.constexpr,
    WORKING: tl.constexpr,
    WIDE: tl.constexpr,
    SPAN: tl.constexpr,
    RUNS: tl.constexpr,
):
    """out = grad·slope, the slope from x or from the byte that stands for it."""
    DOUBLE: tl.constexpr = mean.dtype.element_ty == tl.float64
    ONE: tl.constexpr = MEAN == "scalar" and STD == "scalar" and not DOUBLE and not ROWS
    FEW: tl.constexpr = KIND == "native" or COUNT <= climbing.FEW
    HALF: tl.constexpr = out.dtype.element_ty.primitive_bitwidth == 16
    LAST: tl.constexpr = (65536 if out.dtype.element_ty == tl.bfloat16 else 8192) if HALF else 1
    LINE: tl.constexpr = "line" if KIND == "native" else KIND
    lane, first = tl.arange(0, SPAN), tl.program_id(0).to(tl.int64) * (RUNS * SPAN)
    left = size - first
    grads = memory.read(grad + first, lane, left, SPAN, RUNS)
    runs = memory.read(trace + first, lane, left, SPAN, RUNS)
    if ONE and FEW and FAMILY != "uniform":
        settled = alike.settle(table, tl.load(mean), tl.load(std), COUNT, FAMILY, "slope", HALF)
        it = (runs, grads, out + first, left)
        if HALF and COUNT > climbing.FEW:
            if alike.is_short(settled):
                alike.descend(it, settled, COUNT, FAMILY, LAST, True)
            else:
                alike.descend(it, settled, COUNT, FAMILY, LAST, False)
        else:
            alike.descend(it, settled, COUNT, FAMILY, LAST, False)
    else:
        for run in tl.static_range(RUNS):
            at = lane + run * SPAN
            channel = memory.channel_of(first, at, stride, channels, WIDE)
            row = channel * (3 * COUNT + 4) if ROWS else 0
            beta = memory.noise(std, first, at, left, channel, STD)
            if TRACED:
                slope = climbing.slope_of(runs[run].to(tl.int32), table, row, beta, COUNT, LINE)
            else:
                alpha = memory.noise(mean, first, at, left, channel, MEAN)
                x = memory.widened(runs[run], WORKING)
                slope = climbing.slope(x, table, row, alpha, beta, COUNT, FAMILY, LINE)
            result = memory.widened(grads[run], WORKING) * slope
            memory.write(out + first, at, left, result)


IS_INTERPRETED = not isinstance(climbing_kernel, triton.JITFunction)
"""TRITON_INTERPRET=1 was set when this was imported: kernels run on the CPU, and slowly."""


def climb(
    x: Tensor,
    table: Tensor,
    mean: Tensor,
    std: Tensor,
    seed: Tensor | None,
    family: str,
    forward: str,
    kind: str,
    axis: int,
    traced: bool,
) -> tuple[Tensor, Tensor]:
    """The values of x, laid out as x is, and the bytes of its support where ``traced``.

    ``axis`` is the dimension of the table's rows where there are several.
    """
    y, trace = _outputs(x, traced)
    x = _dense(x, y)
    settings, pointers = _settings(x, table, mean, std, kind, axis)
    seed = table if seed is None else seed
    operands = (x, y, trace, table, *pointers, seed, x.numel(), *settings.pop("channels"))
    constants = {"FAMILY": family, "FORWARD": forward, "TRACED": traced, "SPAN": SPAN}
    constants["RUNS"] = 1 if x.numel() <= SPAN else RUNS
    programs = triton.cdiv(x.numel(), RUNS * SPAN)
    is_light = forward != "random" and settings["COUNT"] <= FEW_THRESHOLDS
    is_alike = settings["STD"] == "scalar" and not settings["ROWS"]
    if forward == "mode" and is_alike and not is_light:
        shares = SHARES if x.element_size() == 2 else SHARES // 2
        programs = min(programs, shares * _multiprocessors(x.device))
    elif not is_light and programs >= 4 * SHARES * _multiprocessors(x.device):
        programs = triton.cdiv(programs, 2)
    _launch(climbing_kernel, x, programs, operands, {**constants, **settings})
    return y, trace


def descend(
    grad: Tensor,
    trace: Tensor,
    table: Tensor,
    mean: Tensor,
    std: Tensor,
    family: str,
    kind: str,
    axis: int,
) -> Tensor:
    """grad·slope, in grad's dtype; ``trace`` is x, or the bytes that :func:`climb` gave for it."""
    out = torch.empty_like(trace, dtype=grad.dtype)
    traced = trace.dtype == torch.uint8
    trace, grad = _dense(trace, out), _dense(grad, out)
    settings, pointers = _settings(trace, table, mean, std, kind, axis)
    operands = (grad, trace, out, table, *pointers, trace.numel(), *settings.pop("channels"))
    runs = 1 if traced or trace.numel() <= SPAN else RUNS
    constants = {"FAMILY": family, "TRACED": traced, "SPAN": SPAN, "RUNS": runs}
    programs = triton.cdiv(trace.numel(), runs * SPAN)
    _launch(descending_kernel, trace, programs, operands, {**constants, **settings})
    return out


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, table, mean, std, _, family, _, kind, axis, traced = inputs
    ctx.save_for_backward(output[1] if traced else x, table, mean, std)
    ctx.settings = (family, kind, axis)


def _pull(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return DESCEND(grad, *ctx.saved_tensors, *ctx.settings), *[None] * 9


def _keep_again(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:5])
    ctx.settings = inputs[5:]


def _pull_again(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.needs_input_grad[1]:
        raise RuntimeError(
            "torch.ops.softstair.climb has no second derivative; softstair.regularise has one."
        )
    return DESCEND(grad, *ctx.saved_tensors, *ctx.settings), *[None] * 7


# What is registered is for others to call and trace. The eager operator has its gradient elsewhere
# and calls the functions themselves: the dispatcher would cost the host as much again.
CLIMB = torch.library.custom_op("softstair::climb", climb, mutates_args=())
CLIMB.register_fake(lambda x, *operands: _outputs(x, operands[-1]))
CLIMB.register_autograd(_pull, setup_context=_keep)
DESCEND = torch.library.custom_op("softstair::descend", descend, mutates_args=())
DESCEND.register_fake(lambda grad, trace, *_: torch.empty_like(trace, dtype=grad.dtype))
DESCEND.register_autograd(_pull_again, setup_context=_keep_again)


def _outputs(x: Tensor, traced: bool) -> tuple[Tensor, Tensor]:
    trace = torch.empty_like(x, dtype=torch.uint8) if traced else x.new_empty(0, dtype=torch.uint8)
    return torch.empty_like(x), trace


def _dense(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor laid out as the result is, without holes; copied only where it is not."""
    if tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


def _settings(
    x: Tensor, table: Tensor, mean: Tensor, std: Tensor, kind: str, axis: int
) -> tuple[dict[str, Any], tuple[Tensor, Tensor]]:
    """What a kernel is compiled for, and the noise as it reads it."""
    axes = [axis % x.dim()] if table.shape[0] > 1 else []
    axes += [only for one in (mean, std) if (only := _only_axis(one, x)) is not None]
    along = axes[0] if axes else None
    (mean, how_mean), (std, how_std) = (_spread(one, x, along) for one in (mean, std))
    place = (1, 1) if along is None else (x.stride(along), x.shape[along])
    return {
        "channels": place,
        "COUNT": (table.shape[1] - 4) // 3,
        "KIND": kind,
        "ROWS": table.shape[0] > 1,
        "MEAN": how_mean,
        "STD": how_std,
        "WORKING": tl.float64 if table.dtype == torch.float64 else tl.float32,
        "WIDE": x.numel() >= 2**31,
    }, (mean, std)


def _only_axis(noise: Tensor, x: Tensor) -> int | None:
    """The one dimension of x along which the noise varies, if it is one."""
    wide = [d for d, size in enumerate(noise.shape, start=x.dim() - noise.dim()) if size > 1]
    return wide[0] if len(wide) == 1 and wide[0] >= 0 else None


def _spread(noise: Tensor, x: Tensor, along: int | None) -> tuple[Tensor, str]:
    """The noise as a kernel reads it, and how."""
    if noise.numel() == 1:
        return noise, "scalar"
    sizes = zip(reversed(noise.shape), reversed(x.shape), strict=False)
    if noise.dim() > x.dim() or any(one not in (1, size) for one, size in sizes):
        raise ValueError(
            f"mean and std must broadcast against x, of shape {tuple(x.shape)}, "
            f"but one of shape {tuple(noise.shape)} was given."
        )
    if along is not None and _only_axis(noise, x) == along:
        return noise.reshape(-1).contiguous(), "channel"
    return torch.empty_like(x, dtype=noise.dtype).copy_(noise.expand_as(x)), "element"


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    # The interpreter has one program after another, and may as well have several of its blocks.
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _launch(
    kernel: Any, x: Tensor, programs: int, operands: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    if x.numel() == 0:
        return
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        # Fused multiply-adds are asked for by name: releases of Triton differ in what they assume.
        kernel[(programs,)](*operands, **constants, num_warps=WARPS, enable_fp_fusion=True)
