"""Examples stored as bytes on a device, and batches of normalised floats made from them there.

Augmentation has a random draw for each example, without a loop and without synchronisation.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

__all__ = ["Examples", "crop", "cut", "flip", "shift"]


class Examples:
    """Examples of a data set on a device; a network gets (x − mean)/std of their bytes.

    >>> x, y = torch.full((4, 1, 2, 2), 10, dtype=torch.uint8), torch.arange(4)
    >>> examples = Examples(x, y, mean=6.0, std=2.0)
    >>> inputs, labels = examples.batch(torch.tensor([3, 1]))
    >>> inputs.shape, float(inputs[0, 0, 0, 0]), labels.tolist()
    (torch.Size([2, 1, 2, 2]), 2.0, [3, 1])
    """

    def __init__(
        self, x: Tensor, y: Tensor, mean: float, std: float, device: torch.device | str = "cpu"
    ) -> None:
        self.x, self.y = x.to(device), y.to(device)
        self.mean, self.std = mean, std

    def __len__(self) -> int:
        return len(self.y)

    def batch(
        self, indices: Tensor, augment: str = "none", generator: Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return inputs, augmented by "crop", "crop-flip" or "shift", and labels."""
        x = self.x[indices]
        if augment in ("crop", "crop-flip"):
            x = crop(x, generator=generator)
        if augment == "crop-flip":
            x = flip(x, generator=generator)
        if augment == "shift":
            x = shift(x, generator=generator)
        return self._normalised(x), self.y[indices]

    def chunks(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all examples in order, ``size`` at a time, without augmentation."""
        for x, y in zip(self.x.split(size), self.y.split(size), strict=True):
            yield self._normalised(x), y

    def _normalised(self, x: Tensor) -> Tensor:
        inputs = x.to(torch.float32).sub_(self.mean).div_(self.std)
        if x.is_cuda and x.dim() == 4:  # cuDNN's convolutions are fastest in this layout
            return inputs.contiguous(memory_format=torch.channels_last)
        return inputs


def crop(x: Tensor, padding: int = 4, generator: Generator | None = None) -> Tensor:
    """Pad each image of x (N, C, H, W) with zeros and return a random crop of the original size.

    The corner is uniform among (2·padding + 1)² positions. The generator is on the device of x.

    >>> x = torch.arange(1, 10, dtype=torch.uint8).reshape(1, 1, 3, 3)
    >>> crop(x, padding=1, generator=Generator().manual_seed(1)).squeeze()
    tensor([[2, 3, 0],
            [5, 6, 0],
            [8, 9, 0]], dtype=torch.uint8)
    """
    corners = torch.randint(2 * padding + 1, (2, len(x)), generator=generator, device=x.device)
    return cut(x, corners[0], corners[1], padding)


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


def flip(x: Tensor, generator: Generator | None = None) -> Tensor:
    """Flip each image left to right with probability ½; arguments as for :func:`crop`.

    >>> x = torch.tensor([1, 2], dtype=torch.uint8).expand(4, 1, 1, 2)
    >>> flip(x, generator=Generator().manual_seed(0)).flatten(1).tolist()
    [[1, 2], [2, 1], [2, 1], [1, 2]]
    """
    flipped = torch.randint(2, (len(x),), generator=generator, device=x.device)
    both = torch.cat([x, x.flip(3)])
    return both.index_select(0, flipped * len(x) + torch.arange(len(x), device=x.device))


def shift(x: Tensor, frames: int = 5, generator: Generator | None = None) -> Tensor:
    """Shift each recording (C, time, coefficients) in time, repeating its first or last frame.

    The shift is at most ``frames`` in either direction; 5 frames of 20 ms are the usual 100 ms.

    >>> x = torch.arange(4, dtype=torch.uint8).reshape(1, 1, 4, 1)
    >>> shift(x, frames=2, generator=Generator().manual_seed(1)).flatten().tolist()
    [0, 0, 0, 1]
    """
    shifts = torch.randint(2 * frames + 1, (len(x), 1), generator=generator, device=x.device)
    times = torch.arange(x.shape[2], device=x.device) + shifts - frames
    indices = times.clamp(0, x.shape[2] - 1).reshape(len(x), 1, -1, 1)
    return x.gather(2, indices.expand(x.shape))
