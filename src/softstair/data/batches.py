"""Examples stored as bytes on a device, and batches of normalised floats made from them there."""

from collections.abc import Callable, Iterator

import torch
from torch import Generator, Tensor

from softstair.data.augment import Augmentation, draw

PLAIN = Augmentation()


class Examples:
    """Examples of a data set on a device; a network gets (x − mean)/std of their bytes.

    >>> x, y = torch.full((4, 1, 2, 2), 10, dtype=torch.uint8), torch.arange(4)
    >>> examples = Examples(x, y, mean=6.0, std=2.0)
    >>> inputs, labels, _ = examples.batch(torch.tensor([3, 1]))
    >>> inputs.shape, float(inputs[0, 0, 0, 0]), labels.tolist()
    (torch.Size([2, 1, 2, 2]), 2.0, [3, 1])
    """

    kernel: Callable[..., tuple[Tensor, Tensor, Tensor | None]] | None = None
    """What makes batches in one kernel, from tensors and the fields of an augmentation."""

    def __init__(
        self, x: Tensor, y: Tensor, mean: float, std: float, device: torch.device | str = "cpu"
    ) -> None:
        self.x, self.y = x.to(device).contiguous(), y.to(device).contiguous()
        self.mean, self.std = mean, std

    def __len__(self) -> int:
        return len(self.y)

    def batch(
        self,
        indices: Tensor,
        augmentation: Augmentation = PLAIN,
        generator: Generator | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return augmented inputs, labels, and the share of ``inputs.flip(0)`` in a mixture.

        The share is None without ``mixup`` and ``cutmix``.
        """
        if self.kernel is not None:
            tensors = self.x, self.y, indices, draw(len(indices), generator, self.x.device)
            return self.kernel(*tensors, self.mean, self.std, vars(augmentation))
        x = augmentation.move(self.x[indices], generator)
        inputs = augmentation.mask(self.normalised(x), generator)
        inputs, share = augmentation.mix(inputs, generator)
        return inputs, self.y[indices], share

    def chunks(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all examples in order, ``size`` at a time, without augmentation."""
        for x, y in zip(self.x.split(size), self.y.split(size), strict=True):
            yield self.normalised(x), y

    def normalised(self, x: Tensor) -> Tensor:
        """Return (x − mean)/std of bytes, in float32."""
        inputs = x.to(torch.float32).sub_(self.mean).div_(self.std)
        if x.is_cuda and x.dim() == 4:  # cuDNN's convolutions are fastest in this layout
            return inputs.contiguous(memory_format=torch.channels_last)
        return inputs
