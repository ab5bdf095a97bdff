"""Augmentation of a batch: random crops, flips, shifts, masks and mixtures.

Every example has random numbers of its own, except for the share of a mixture, which the batch has
in common. Nothing is read back from the device, so that a training step can be captured.

The functions draw their numbers from a generator, or take them from :func:`draw`, as a kernel that
makes whole batches does (``Examples.kernel``). With the same draws, it gives the same.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

PADDING = 4
"""Width of the black frame of :func:`crop`."""
FRAMES = 5
"""Largest shift of :func:`shift`: 5 frames of 20 ms are the usual 100 ms."""

ROWS = (
    "down", "right", "flip", "shift", "cutout_2", "cutout_3", "length_2", "mask_2", "length_3",
    "mask_3", "share", "mix_2", "mix_3",
)  # fmt: skip
"""The random numbers of an example; 2 and 3 are the axes of height (time) and width."""


Moves = Literal["none", "crop", "crop-flip", "shift"]
"""How examples are moved."""
Source = Generator | Tensor | None
"""Random numbers, or where they come from; None is torch's default generator."""


def draw(count: int, generator: Generator | None, device: torch.device) -> Tensor:
    """Return uniform numbers in [0, 1): a row for each name in ``ROWS``, a column per example."""
    return torch.rand((len(ROWS), count), generator=generator, device=device)


@dataclass(frozen=True)
class Augmentation:
    """What is done to the examples of a batch. The defaults do nothing.

    Attributes:
        augment: "crop", "crop-flip" or "shift": see :func:`crop`, :func:`flip`, :func:`shift`.
        cutout: Side of the square of :func:`cutout`.
        mixup, cutmix: Largest share of the second example in :func:`mixup` or :func:`cutmix`.
        time_mask, coefficient_mask: Largest length of :func:`mask` along the two axes.
    """

    augment: Moves = "none"
    cutout: int = 0
    mixup: float = 0.0
    cutmix: float = 0.0
    time_mask: int = 0
    coefficient_mask: int = 0

    def move(self, x: Tensor, generator: Source = None) -> Tensor:
        """Return bytes after what keeps them bytes: crops, flips and shifts."""
        if self.augment in ("crop", "crop-flip"):
            x = crop(x, generator=generator)
        if self.augment == "crop-flip":
            x = flip(x, generator=generator)
        if self.augment == "shift":
            x = shift(x, generator=generator)
        return x

    def mask(self, inputs: Tensor, generator: Source = None) -> Tensor:
        """Return normalised inputs with parts of each set to 0, which is the zero point."""
        if self.cutout:
            inputs = cutout(inputs, self.cutout, generator)
        if self.time_mask:
            inputs = mask(inputs, 2, self.time_mask, generator)
        if self.coefficient_mask:
            inputs = mask(inputs, 3, self.coefficient_mask, generator)
        return inputs

    def mix(self, inputs: Tensor, generator: Source = None) -> tuple[Tensor, Tensor | None]:
        """Return normalised inputs mixed in pairs, and the share of the second of each pair.

        The share is None without ``mixup`` and ``cutmix``. The second of example i is example
        n − 1 − i of the n, so the labels of the seconds are ``y.flip(0)``.
        """
        if self.mixup:
            return mixup(inputs, self.mixup, generator)
        return cutmix(inputs, self.cutmix, generator) if self.cutmix else (inputs, None)


def crop(x: Tensor, padding: int = PADDING, generator: Source = None) -> Tensor:
    """Pad each image of x (N, C, H, W) with zeros and return a random crop of the original size.

    The corner is uniform among (2·padding + 1)² positions. ``generator`` is one on the device of x,
    or the draws of a batch.

    >>> x = torch.arange(1, 10, dtype=torch.uint8).reshape(1, 1, 3, 3)
    >>> crop(x, padding=1, generator=Generator().manual_seed(1)).squeeze()
    tensor([[2, 3, 0],
            [5, 6, 0],
            [8, 9, 0]], dtype=torch.uint8)
    """
    down, right = _integers(x, 2 * padding + 1, generator, "down", "right")
    return cut(x, down, right, padding)


def cut(x: Tensor, down: Tensor, right: Tensor, padding: int) -> Tensor:
    """Crop at given corners: first rows ``down`` and columns ``right`` of the padded images."""
    images, channels, height, width = x.shape
    padded = F.pad(x, (padding,) * 4)
    # Row i of this view is the run of `width` elements that begins at element i.
    runs = padded.reshape(-1).unfold(0, width, 1)
    planes = torch.arange(images * channels, device=x.device).reshape(images, channels, 1)
    rows = down.reshape(-1, 1, 1) + torch.arange(height, device=x.device)
    rows = rows + planes * padded.shape[2]
    begins = rows * padded.shape[3] + right.reshape(-1, 1, 1)
    # It copies runs of bytes: several times as fast as indexing element by element.
    return runs.index_select(0, begins.reshape(-1)).reshape(x.shape)


def flip(x: Tensor, generator: Source = None) -> Tensor:
    """Flip each image left to right with probability ½; arguments as for :func:`crop`."""
    (flipped,) = _integers(x, 2, generator, "flip")
    both = torch.cat([x, x.flip(3)])
    return both.index_select(0, flipped * len(x) + torch.arange(len(x), device=x.device))


def shift(x: Tensor, frames: int = FRAMES, generator: Source = None) -> Tensor:
    """Shift each recording (C, time, coefficients) in time, repeating its first or last frame.

    The shift is at most ``frames`` in either direction.
    """
    (shifts,) = _integers(x, 2 * frames + 1, generator, "shift")
    times = torch.arange(x.shape[2], device=x.device) + shifts[:, None] - frames
    indices = times.clamp(0, x.shape[2] - 1).reshape(len(x), 1, -1, 1)
    return x.gather(2, indices.expand(x.shape))


def cutout(x: Tensor, side: int, generator: Source = None) -> Tensor:
    """Set a square of each image of x (N, C, H, W) to 0; arguments as for :func:`crop`.

    The centre is a uniform pixel, so part of the square may be outside the image.
    """
    height, width = x.shape[2:]
    (centre_row,) = _integers(x, height, generator, "cutout_2")
    (centre_column,) = _integers(x, width, generator, "cutout_3")
    rows = _between(x, 2, centre_row - side // 2, side)
    columns = _between(x, 3, centre_column - side // 2, side)
    return x.masked_fill(rows & columns, 0)


def mask(x: Tensor, axis: int, longest: int, generator: Source = None) -> Tensor:
    """Set consecutive frames (axis 2) or coefficients (axis 3) of each recording to 0.

    Their number is uniform from 0 to ``longest``, or to all there are; the position is uniform.
    """
    longest = min(longest, x.shape[axis])
    (lengths,) = _integers(x, longest + 1, generator, f"length_{axis}")
    return x.masked_fill(_somewhere(x, axis, lengths, generator, "mask"), 0)


def mixup(x: Tensor, largest: float, generator: Source = None) -> tuple[Tensor, Tensor]:
    """Return (1 − s)·x + s·x.flip(0) and s, which is uniform from 0 to ``largest``."""
    (share,) = largest * _common(x, generator, "share")
    return torch.lerp(x, x.flip(0), share), share


def cutmix(x: Tensor, largest: float, generator: Source = None) -> tuple[Tensor, Tensor]:
    """Replace a rectangle of all examples by that of x.flip(0); also return its share of the area.

    The sides are those of the examples times the root of a share that is uniform from 0 to
    ``largest``. The centre is uniform, and what is outside of the examples is left out, as in
    CutMix (Yun et al., 2019).
    """
    share, *centre = _common(x, generator, "share", "mix_2", "mix_3")
    root, area = (largest * share).sqrt(), torch.ones_like(share)
    inside = torch.ones_like(share, dtype=torch.bool)
    for axis, middle in zip((2, 3), centre, strict=True):
        size = x.shape[axis]
        half = root * size / 2
        begin = ((middle * size - half - 0.5).floor() + 1).clamp_min(0)
        length = ((middle * size + half - 0.5).ceil().clamp_max(size) - begin).clamp_min(0)
        inside = inside & _between(x, axis, begin, length)
        area = area * length
    return torch.where(inside, x.flip(0), x), area / (x.shape[2] * x.shape[3])


def _uniform(x: Tensor, source: Source, *names: str) -> Tensor:
    """Return a row of uniform numbers in [0, 1) for each name, with one for each example of x."""
    if isinstance(source, Tensor):
        return torch.stack([source[ROWS.index(name)] for name in names])
    return torch.rand((len(names), len(x)), generator=source, device=x.device)


def _integers(x: Tensor, count: int, source: Source, *names: str) -> Tensor:
    """Return a row for each name of uniform integers from 0 to ``count`` − 1."""
    if isinstance(source, Tensor):
        return (_uniform(x, source, *names) * count).long()
    return torch.randint(count, (len(names), len(x)), generator=source, device=x.device)


def _common(x: Tensor, source: Source, *names: str) -> Tensor:
    """Return uniform numbers that the examples of a batch have in common."""
    return _uniform(x[:1], source, *names)[:, 0]


def _somewhere(x: Tensor, axis: int, length: Tensor, source: Source, name: str) -> Tensor:
    """Return :func:`_between` with a uniform begin for each example, at which the length fits."""
    (random,) = _uniform(x, source, f"{name}_{axis}")
    return _between(x, axis, (random * (x.shape[axis] - length + 1)).floor(), length)


def _between(x: Tensor, axis: int, begin: Tensor, length: Tensor | int) -> Tensor:
    """Return which rows (axis 2) or columns (axis 3) are the ``length`` ones from ``begin`` on.

    ``begin`` and ``length`` have a value for each example or one for all. The result has the shape
    (N, 1, H, 1) or (N, 1, 1, W), with N = 1 for all.
    """
    offsets = torch.arange(x.shape[axis], device=x.device) - begin.reshape(-1, 1)
    if isinstance(length, Tensor):
        length = length.reshape(-1, 1)
    inside = (offsets >= 0) & (offsets < length)
    return inside[:, None, :, None] if axis == 2 else inside[:, None, None, :]
