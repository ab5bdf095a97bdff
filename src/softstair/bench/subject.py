"""What is trained: a network, the preset that it is the paper's network of, and random examples."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from softstair.data.batches import Examples
from softstair.models import build
from softstair.train.presets import PresetName, preset
from softstair.train.recipe import Recipe

__all__ = ["BATCH", "SUBJECTS", "Subject", "subject"]

BATCH = (2, 4096)
"""The smallest batch, which batch-norm needs, and the largest."""


@dataclass(frozen=True)
class Subject:
    """A network and its training.

    preset   recipe whose schedule and stairs it has
    shape    (channels, height, width) of an example
    images   training examples of a fold: so many are seen in an epoch
    """

    model: str
    preset: PresetName
    shape: tuple[int, int, int]
    classes: int
    images: int

    def network(self) -> nn.Module:
        """The float network, the same every time."""
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            return build(self.model, self.classes, self.shape)

    def recipe(self, batch: int, **settings: Any) -> Recipe:
        """The preset with this batch and settings."""
        low, high = BATCH
        if not low <= batch <= high:
            raise ValueError(
                f"batch must be a whole number from {low} to {high}, but {batch} was given."
            )
        return replace(preset(self.preset), model=self.model, batch=batch, **settings)

    def examples(self, batch: int, calls: int, device: torch.device) -> Examples:
        """Random bytes on the device; on CUDA as many as an epoch sees, else a few batches."""
        count = max(self.images, batch * calls) if device.type == "cuda" else 4 * batch
        draw = torch.Generator(device).manual_seed(0)
        shape = (count, *self.shape)
        x = torch.randint(256, shape, dtype=torch.uint8, generator=draw, device=device)
        y = torch.randint(self.classes, (count,), generator=draw, device=device)
        return Examples(x, y, mean=128.0, std=64.0, device=device)


SUBJECTS: dict[str, Subject] = {
    # Four fifths of what there is: CIFAR-10's 50,000, the 36,923 of Speech Commands v0.02 that are
    # drawn for twelve classes, and the digits' 1,797.
    "vgg8": Subject("vgg8", "paper-cifar10", (3, 32, 32), 10, images=40_000),
    "dscnn": Subject("dscnn", "paper-speech", (1, 49, 10), 12, images=29_538),
    "digits": Subject("digits", "digits", (1, 8, 8), 10, images=1_437),
}


def subject(name: str) -> Subject:
    """The subject of that name.

    >>> subject("vgg8").images
    40000
    """
    if name not in SUBJECTS:
        raise ValueError(f"model must be one of {', '.join(SUBJECTS)}, but {name!r} was given.")
    return SUBJECTS[name]
