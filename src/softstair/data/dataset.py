"""A data set as training takes it: whole tensors of bytes, and how to make numbers of them."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["DataError", "Dataset"]


class DataError(ValueError):
    """A file that is not what it should be: one sentence that names it and says what to do."""

    def __init__(self, path: Path, wrong: str, remedy: str) -> None:
        super().__init__(f"{str(path)!r} {wrong}: {remedy}.")


@dataclass(frozen=True)
class Dataset:
    """The training partition, which folds are cut from, and the test set where there is one.

    x         (N, C, H, W) uint8
    y         (N,) int64, indices into ``classes``
    mean      what becomes 0 and
    std       what becomes 1, in the units of x: a network sees (x − mean)/std
    groups    (N,) int64 or None: examples of one group (one speaker) stay on one side of a fold
    test_x, test_y   as x and y, or None
    centred   (zero point, scale) for a centred input, (x − zero point)/scale, where mean and std
              do not centre x; None where they do
    version   which release or form of the data this is, in a few words for records; None if
              unknown

    >>> x, y = torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1])
    >>> len(Dataset("blank", x, y, ("no", "yes"), mean=0.0, std=1.0))
    2
    """

    name: str
    x: Tensor
    y: Tensor
    classes: tuple[str, ...]
    mean: float
    std: float
    groups: Tensor | None = None
    test_x: Tensor | None = None
    test_y: Tensor | None = None
    centred: tuple[float, float] | None = None
    version: str | None = None

    def __post_init__(self) -> None:
        self._check(self.x, self.y, "x", "y")
        if (self.test_x is None) != (self.test_y is None):
            raise ValueError("test_x and test_y go together, but only one of them was given.")
        if self.test_x is not None and self.test_y is not None:
            self._check(self.test_x, self.test_y, "test_x", "test_y")
            if self.test_x.shape[1:] != self.x.shape[1:]:
                raise ValueError(
                    f"test_x must have examples like those of x, {tuple(self.x.shape[1:])}, but "
                    f"{tuple(self.test_x.shape[1:])} was given."
                )
        if not (0 < self.std < math.inf and abs(self.mean) < math.inf):
            raise ValueError(
                "mean must be finite and std above 0, but "
                f"mean={self.mean!r} and std={self.std!r} were given."
            )
        if self.centred is not None:
            zero, scale = self.centred
            if not (0 < scale < math.inf and abs(zero) < math.inf):
                raise ValueError(
                    "centred must be a finite zero point and a finite scale above 0, or None, but "
                    f"{self.centred!r} was given."
                )
        if self.groups is not None and self.groups.shape != self.y.shape:
            raise ValueError(
                f"groups must have the shape of y, {tuple(self.y.shape)}, but "
                f"{tuple(self.groups.shape)} was given."
            )

    def _check(self, x: Tensor, y: Tensor, x_name: str, y_name: str) -> None:
        if x.dtype != torch.uint8 or x.dim() != 4:
            raise ValueError(
                f"{x_name} must be (N, C, H, W) of uint8, but {tuple(x.shape)} of {x.dtype} was "
                "given."
            )
        if y.dtype != torch.int64 or y.shape != x.shape[:1]:
            raise ValueError(
                f"{y_name} must be ({len(x)},) of int64, but {tuple(y.shape)} of {y.dtype} was "
                "given."
            )
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < len(self.classes):
            raise ValueError(
                f"{y_name} must lie between 0 and {len(self.classes) - 1}, the classes being "
                f"{len(self.classes)}, but {int(y.min())} to {int(y.max())} was given."
            )

    def __len__(self) -> int:
        return len(self.y)

    def numbers(self, integer: bool = False, centre: bool = False) -> tuple[float, float]:
        """Zero point and scale of the input: a network sees (x − zero point)/scale.

        They are ``mean`` and ``std``; with ``centre``, ``centred`` where the data set has it. With
        ``integer``, the nearest integer byte and the nearest power of two.

        >>> x, y = torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1])
        >>> Dataset("blank", x, y, ("no", "yes"), mean=120.7, std=63.8).numbers(integer=True)
        (121.0, 64.0)
        """
        zero, scale = self.mean, self.std
        if centre and self.centred is not None:
            zero, scale = self.centred
        if not integer:
            return zero, scale
        return float(min(max(round(zero), 0), 255)), 2.0 ** round(math.log2(scale))

    def sample(self, count: int, seed: int = 0) -> "Dataset":
        """So many examples, drawn at random, and as many of the test set; all, if there are fewer.

        >>> x, y = torch.zeros(9, 1, 8, 8, dtype=torch.uint8), torch.zeros(9, dtype=torch.int64)
        >>> len(Dataset("blank", x, y, ("no", "yes"), mean=0.0, std=1.0).sample(5))
        5
        """
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(self), generator=generator)[:count].sort().values
        smaller = replace(
            self,
            x=self.x[chosen],
            y=self.y[chosen],
            groups=None if self.groups is None else self.groups[chosen],
        )
        if self.test_x is None or self.test_y is None:
            return smaller
        chosen = torch.randperm(len(self.test_y), generator=generator)[:count].sort().values
        return replace(smaller, test_x=self.test_x[chosen], test_y=self.test_y[chosen])
