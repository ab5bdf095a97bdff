"""Where a kernel's elements lie: runs of x, and the mean and std that belong to them."""

import triton
import triton.language as tl

from softstair.kernels.triton.shapes import IS_CUDA


@triton.jit
def read(pointer, lane, left, SPAN: tl.constexpr, RUNS: tl.constexpr):
    """Runs of SPAN elements, all on their way before the first is worked on."""
    runs = (tl.load(pointer + lane, mask=lane < left, other=0.0),)
    for run in tl.static_range(1, RUNS):
        at = lane + run * SPAN
        runs = runs + (tl.load(pointer + at, mask=at < left, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return runs


@triton.jit
def widened(run, WORKING: tl.constexpr):
    """In the working dtype: when it is worked on, not before, since registers are few."""
    if IS_CUDA and run.dtype == tl.bfloat16:
        # An instruction for each of two, where the compiler has three.
        wide = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [run],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        wide = run.to(WORKING)
    return wide


@triton.jit
def write(pointer, at, left, result):
    tl.store(pointer + at, result.to(pointer.dtype.element_ty), mask=at < left)


@triton.jit
def channel_of(first, at, stride, channels, WIDE: tl.constexpr):
    # In 32 bits where the tensor's size allows: dividing is dear.
    place = first + at if WIDE else first.to(tl.int32) + at
    return place // stride % channels


@triton.jit
def noise(pointer, first, at, left, channel, HOW: tl.constexpr):
    """A mean or std: one for all, one a channel, or one an element."""
    if HOW == "scalar":
        number = tl.load(pointer)
    elif HOW == "channel":
        number = tl.load(pointer + channel)
    else:
        number = tl.load(pointer + first + at, mask=at < left, other=0.0)
    return number
