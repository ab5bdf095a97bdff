"""A batch in one Triton kernel: examples are gathered, augmented, normalised and mixed.

It computes what ``Augmentation`` of the training program does, from the same random numbers, which
takes some 25 small kernels there. Constants of the kernel are its fields and those of its module.
"""

from collections.abc import Mapping
from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512
DOWN, RIGHT, FLIP, SHIFT, CUTOUT_2, CUTOUT_3 = map(tl.constexpr, range(6))
LENGTH_2, MASK_2, LENGTH_3, MASK_3 = map(tl.constexpr, range(6, 10))
SHARE, MIX_2, MIX_3 = map(tl.constexpr, range(10, 13))  # the rows of random numbers
PAD, MOST_FRAMES = map(tl.constexpr, (4, 5))


@triton.jit
def _integer(uniform, count):
    return tl.floor(uniform * count).to(tl.int32)


@triton.jit
def _is_somewhere(place, uniform, length, SIZE: tl.constexpr):
    """Whether a place is among ``length`` ones from a begin on, which the uniform number gives."""
    offset = place - tl.floor(uniform * (SIZE - length + 1))
    return (offset >= 0) & (offset < length)


@triton.jit
def _box(middle, root, SIZE: tl.constexpr):
    """Return the begin and the length of a side around ``middle``, as far as it is inside."""
    half = root * SIZE / 2
    begin = tl.maximum(tl.floor(middle * SIZE - half - 0.5) + 1, 0.0)
    return begin, tl.maximum(tl.minimum(tl.ceil(middle * SIZE + half - 0.5), SIZE) - begin, 0.0)


@triton.jit
def _augmented(
    example, channel, row, column, x_ptr, indices_ptr, random_ptr, n, mean, std,
    AUGMENT: tl.constexpr, CUTOUT: tl.constexpr, TIME_MASK: tl.constexpr,
    COEFFICIENT_MASK: tl.constexpr, CHANNELS: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Return elements of an example of the batch, before it is mixed."""
    random = random_ptr + example
    source_row, source_column = row, column
    inside = row < HEIGHT
    if AUGMENT == "crop-flip":
        is_flipped = _integer(tl.load(random + FLIP * n), 2) == 1
        source_column = tl.where(is_flipped, WIDTH - 1 - column, column)
    if AUGMENT == "crop" or AUGMENT == "crop-flip":
        source_row += _integer(tl.load(random + DOWN * n), 2 * PAD + 1) - PAD
        source_column += _integer(tl.load(random + RIGHT * n), 2 * PAD + 1) - PAD
        inside &= (source_row >= 0) & (source_row < HEIGHT)
        inside &= (source_column >= 0) & (source_column < WIDTH)
    if AUGMENT == "shift":
        frames = _integer(tl.load(random + SHIFT * n), 2 * MOST_FRAMES + 1) - MOST_FRAMES
        source_row = tl.minimum(tl.maximum(row + frames, 0), HEIGHT - 1)
    first = tl.load(indices_ptr + example) * (CHANNELS * HEIGHT * WIDTH)
    place = (channel * HEIGHT + source_row) * WIDTH + source_column
    value = tl.load(x_ptr + first + place, mask=inside, other=0)
    number = tl.div_rn(value.to(tl.float32) - mean, std)
    if CUTOUT > 0:
        down = row + CUTOUT // 2 - _integer(tl.load(random + CUTOUT_2 * n), HEIGHT)
        right = column + CUTOUT // 2 - _integer(tl.load(random + CUTOUT_3 * n), WIDTH)
        is_cut = (down >= 0) & (down < CUTOUT) & (right >= 0) & (right < CUTOUT)
        number = tl.where(is_cut, 0.0, number)
    if TIME_MASK > 0:
        length = _integer(tl.load(random + LENGTH_2 * n), TIME_MASK + 1)
        hidden = _is_somewhere(row, tl.load(random + MASK_2 * n), length, HEIGHT)
        number = tl.where(hidden, 0.0, number)
    if COEFFICIENT_MASK > 0:
        length = _integer(tl.load(random + LENGTH_3 * n), COEFFICIENT_MASK + 1)
        hidden = _is_somewhere(column, tl.load(random + MASK_3 * n), length, WIDTH)
        number = tl.where(hidden, 0.0, number)
    return number


@triton.jit
def batch_kernel(
    x_ptr, y_ptr, indices_ptr, random_ptr, inputs_ptr, labels_ptr, share_ptr, n, mean, std,
    AUGMENT: tl.constexpr, CUTOUT: tl.constexpr, MIXUP: tl.constexpr, CUTMIX: tl.constexpr,
    TIME_MASK: tl.constexpr, COEFFICIENT_MASK: tl.constexpr, CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute ``BLOCK`` elements of an example in the order (height, width, channels)."""
    example, block = tl.program_id(0), tl.program_id(1)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    channel, column = offsets % CHANNELS, offsets // CHANNELS % WIDTH
    row = offsets // (CHANNELS * WIDTH)
    number = _augmented(
        example, channel, row, column, x_ptr, indices_ptr, random_ptr, n, mean, std, AUGMENT,
        CUTOUT, TIME_MASK, COEFFICIENT_MASK, CHANNELS, HEIGHT, WIDTH,
    )  # fmt: skip
    if MIXUP + CUTMIX > 0:
        share = (MIXUP + CUTMIX) * tl.load(random_ptr + SHARE * n)
        other = _augmented(
            n - 1 - example, channel, row, column, x_ptr, indices_ptr, random_ptr, n, mean, std,
            AUGMENT, CUTOUT, TIME_MASK, COEFFICIENT_MASK, CHANNELS, HEIGHT, WIDTH,
        )  # fmt: skip
        if MIXUP > 0:
            near, far = number + share * (other - number), other - (other - number) * (1 - share)
            number = tl.where(share < 0.5, near, far)
        else:
            root = tl.sqrt_rn(share)
            top, rows = _box(tl.load(random_ptr + MIX_2 * n), root, HEIGHT)
            left, columns = _box(tl.load(random_ptr + MIX_3 * n), root, WIDTH)
            replaced = (row >= top) & (row < top + rows)
            replaced &= (column >= left) & (column < left + columns)
            number = tl.where(replaced, other, number)
            share = tl.div_rn(rows * columns, 1.0 * HEIGHT * WIDTH)
        tl.store(share_ptr, share, mask=(example == 0) & (block == 0))
    first = example.to(tl.int64) * (CHANNELS * HEIGHT * WIDTH)
    tl.store(inputs_ptr + first + offsets, number, mask=row < HEIGHT)
    label = tl.load(y_ptr + tl.load(indices_ptr + example))
    tl.store(labels_ptr + example, label, mask=block == 0)


def batch(
    x: Tensor, y: Tensor, indices: Tensor, uniform: Tensor, mean: float, std: float,
    options: Mapping[str, float | str],
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return inputs, labels and the share of a mixture for the bytes x at ``indices``.

    ``uniform`` has 13 random numbers of each example; ``options`` are the fields of an
    ``Augmentation``.
    """
    count, (channels, height, width) = len(indices), x.shape[1:]
    inputs = torch.empty((count, *x.shape[1:]), device=x.device, memory_format=torch.channels_last)
    labels, share = y.new_empty(count), inputs.new_empty(())
    tensors = (x, y, indices.contiguous(), uniform, inputs, labels, share)
    constants = {name.upper(): value for name, value in options.items()}
    constants["TIME_MASK"] = min(options["time_mask"], height)
    constants["COEFFICIENT_MASK"] = min(options["coefficient_mask"], width)
    constants |= dict(CHANNELS=channels, HEIGHT=height, WIDTH=width, BLOCK=BLOCK)
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        batch_kernel[count, triton.cdiv(channels * height * width, BLOCK)](
            *tensors, count, float(mean), float(std), **constants, enable_fp_fusion=False
        )
    return inputs, labels, share if options["mixup"] or options["cutmix"] else None
