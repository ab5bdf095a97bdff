"""Folds of cross-validation: every example is in the validation part of exactly one of them."""

import torch
from torch import Tensor

from softstair.data.dataset import Dataset

__all__ = ["split"]


def split(dataset: Dataset, fold: int, folds: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Indices (training, validation) of fold number ``fold``, from 0, out of ``folds``.

    The seed permutes the examples, whatever the fold; the validation part is every ``folds``-th of
    that permutation from ``fold`` on, and training has the rest, both in the permutation's order.

    With groups, whole groups are dealt: in a permuted order, the largest first, each to the fold
    with the fewest examples so far (the first of these). So no fold has more than the smallest one
    and the largest group together, and no group is on both sides.

    >>> x, y = torch.zeros(5, 1, 8, 8, dtype=torch.uint8), torch.zeros(5, dtype=torch.int64)
    >>> dataset = Dataset("blank", x, y, ("no",), mean=0.0, std=1.0)
    >>> [len(part) for part in split(dataset, 0, 2)], [len(part) for part in split(dataset, 1, 2)]
    ([2, 3], [3, 2])
    """
    _check(dataset, fold, folds, seed)
    generator = torch.Generator().manual_seed(seed)
    permutation = torch.randperm(len(dataset), generator=generator)
    if dataset.groups is None:
        dealt = torch.arange(len(dataset)) % folds
    else:
        dealt = _deal(dataset.groups.cpu(), folds, generator)[permutation]
    return permutation[dealt != fold], permutation[dealt == fold]


def _deal(groups: Tensor, folds: int, generator: torch.Generator) -> Tensor:
    """The fold of each example."""
    _, group_of, sizes = groups.unique(return_inverse=True, return_counts=True)
    order = torch.randperm(len(sizes), generator=generator)
    order = order[sizes[order].argsort(descending=True, stable=True)]
    fold_of = torch.empty_like(sizes)
    filled = [0] * folds
    for group in order.tolist():
        smallest = filled.index(min(filled))
        fold_of[group] = smallest
        filled[smallest] += int(sizes[group])
    return fold_of[group_of]


def _check(dataset: Dataset, fold: int, folds: int, seed: int) -> None:
    if dataset.groups is None:
        most, what = len(dataset), "examples"
    else:
        most, what = len(dataset.groups.unique()), "groups"
    if not isinstance(folds, int) or not 2 <= folds <= most:
        raise ValueError(
            f"folds must be an integer from 2 to the number of {what}, {most} in "
            f"{dataset.name!r}, but {folds!r} was given."
        )
    if not isinstance(fold, int) or not 0 <= fold < folds:
        raise ValueError(
            f"fold must be an integer between 0 and {folds - 1}, the folds being {folds}, but "
            f"{fold!r} was given."
        )
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"seed must be an integer from 0 to 2**63 - 1, but {seed!r} was given.")
