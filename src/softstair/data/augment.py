"""Augmentation of whole batches where they lie: random crops, mirrored images, words moved in time.

Each image has a draw of its own, yet nothing here loops over images or waits for the device.
Rows are picked with ``index_select``, which copies runs of bytes; indexing element by element
takes several times as long.
"""

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from softstair import _check

__all__ = ["crop", "cut", "flip", "shift"]


def crop(x: Tensor, padding: int = 4, generator: Generator | None = None) -> Tensor:
    """Each image cut, in its own size, at random from itself with a black border around it.

    x           (N, C, H, W), of any dtype and on any device
    padding     how many black (0) pixels the border has on every side: the corner of the cut is
                drawn uniformly among (2·padding + 1)²
    generator   where the draws come from, on the device of x; None for torch's own

    >>> x = torch.arange(1, 10, dtype=torch.uint8).reshape(1, 1, 3, 3)
    >>> crop(x, padding=1, generator=Generator().manual_seed(1)).squeeze()
    tensor([[2, 3, 0],
            [5, 6, 0],
            [8, 9, 0]], dtype=torch.uint8)
    """
    _check_images(x, generator)
    _check.integer("padding", padding, 0)
    down, right = torch.randint(
        2 * padding + 1, (2, len(x)), generator=generator, device=x.device
    ).unbind()
    return cut(x, down, right, padding)


def cut(x: Tensor, down: Tensor, right: Tensor, padding: int) -> Tensor:
    """What :func:`crop` does, at corners that are given.

    down, right   (N,) int64 between 0 and 2·padding: where each cut begins in the image with its
                  border; ``padding`` and ``padding`` give the image itself
    """
    if x.numel() == 0:
        return x.clone()
    images, channels, height, width = x.shape
    bordered = F.pad(x, (padding,) * 4)
    # Every run of `width` neighbouring bytes is a row of this view, by the place where it begins.
    runs = bordered.reshape(-1).unfold(0, width, 1)
    planes = torch.arange(images * channels, device=x.device).reshape(images, channels, 1)
    lines = down.reshape(-1, 1, 1) + torch.arange(height, device=x.device)
    lines = lines + planes * bordered.shape[2]
    begins = lines * bordered.shape[3] + right.reshape(-1, 1, 1)
    return runs.index_select(0, begins.reshape(-1)).reshape(x.shape)


def flip(x: Tensor, generator: Generator | None = None) -> Tensor:
    """Each image mirrored left to right with probability ½; arguments as for :func:`crop`.

    >>> x = torch.tensor([1, 2], dtype=torch.uint8).expand(4, 1, 1, 2)
    >>> flip(x, generator=Generator().manual_seed(0)).flatten(1).tolist()
    [[1, 2], [2, 1], [2, 1], [1, 2]]
    """
    _check_images(x, generator)
    mirrored = torch.randint(2, (len(x),), generator=generator, device=x.device)
    both = torch.cat([x, x.flip(3)])
    return both.index_select(0, mirrored * len(x) + torch.arange(len(x), device=x.device))


def shift(x: Tensor, frames: int = 5, generator: Generator | None = None) -> Tensor:
    """Each recording moved in time by up to so many frames, either way, its first or last frame
    standing in for what was not recorded: 5 frames of 20 ms are the customary tenth of a second.

    x   (N, C, time, coefficients); the rest as for :func:`crop`

    >>> x = torch.arange(4, dtype=torch.uint8).reshape(1, 1, 4, 1)
    >>> shift(x, frames=2, generator=Generator().manual_seed(1)).flatten().tolist()
    [0, 0, 0, 1]
    """
    _check_images(x, generator)
    _check.integer("frames", frames, 0)
    moved = torch.randint(2 * frames + 1, (len(x), 1), generator=generator, device=x.device)
    times = torch.arange(x.shape[2], device=x.device) + moved - frames
    places = times.clamp(0, x.shape[2] - 1).reshape(len(x), 1, -1, 1)
    return x.gather(2, places.expand(x.shape))


def _check_images(x: Tensor, generator: Generator | None) -> None:
    if x.dim() != 4:
        raise ValueError(f"x must be (N, C, H, W), but {tuple(x.shape)} was given.")
    if generator is not None and generator.device.type != x.device.type:
        raise ValueError(
            f"generator must be on the device of x, {x.device}, but it is on {generator.device}; "
            "make it with torch.Generator(device=x.device)."
        )
