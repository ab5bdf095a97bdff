"""Folds of cross-validation: every example is in the validation part of exactly one fold."""

from typing import Literal

import torch
from torch import Tensor

from softstair import _check
from softstair.data.dataset import Dataset


def split(
    dataset: Dataset, fold: int | Literal["all"], folds: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the indices (training, validation) of one fold.

    The seed determines a permutation of the examples. The validation part is every ``folds``-th
    example of it from number ``fold`` (0, 1, ...) on; the training part is the rest. With
    ``fold="all"`` the training part is all of them, and the validation part is empty.

    If the data set has groups, no group is in both parts: groups are assigned in order of
    decreasing size (random among equal sizes), each to the fold with the fewest examples so far.
    """
    if fold == "all":
        every = torch.arange(len(dataset))
        return every, every[:0]
    groups = dataset.groups
    count = len(dataset) if groups is None else len(groups.unique())
    _check.integer("folds", folds, 2)
    if folds > count:
        unit = "examples" if groups is None else "groups"
        allowed = f"at most the number of {unit}, {count} in {dataset.name!r}"
        raise _check.wrong("folds", folds, allowed)
    _check.integer("fold", fold, 0, folds - 1)
    _check.integer("seed", seed, 0, 2**63 - 1)
    generator = torch.Generator().manual_seed(seed)
    permutation = torch.randperm(len(dataset), generator=generator)
    if groups is None:
        fold_of = torch.arange(len(dataset)) % folds
    else:
        fold_of = _assign_groups(groups.cpu(), folds, generator)[permutation]
    return permutation[fold_of != fold], permutation[fold_of == fold]


def held_out(
    dataset: Dataset, fold: int | Literal["all"], folds: int, limit: int | None = None
) -> tuple[str, Tensor, Tensor]:
    """Return the name, examples and labels of the test set, or of the fold if there is none.

    With ``limit``, the data set is first cut to so many examples, as training does. Raises
    SoftstairError if there is no test set and ``fold`` is "all".
    """
    dataset = dataset.sample(limit)
    if dataset.test_x is not None and dataset.test_y is not None:
        return f"test set of {dataset.name}", dataset.test_x, dataset.test_y
    if fold == "all":
        raise _check.wrong("fold", fold, f"a number for {dataset.name!r}, which has no test set")
    chosen = split(dataset, fold, folds)[1]
    return f"fold {fold} of {dataset.name}", dataset.x[chosen], dataset.y[chosen]


def _assign_groups(groups: Tensor, folds: int, generator: torch.Generator) -> Tensor:
    """Return the fold of each example."""
    _, group_of, sizes = groups.unique(return_inverse=True, return_counts=True)
    order = torch.randperm(len(sizes), generator=generator)
    order = order[sizes[order].argsort(descending=True, stable=True)]
    fold_of_group = torch.empty_like(sizes)
    fold_sizes = [0] * folds
    for group in order.tolist():
        smallest = fold_sizes.index(min(fold_sizes))
        fold_of_group[group] = smallest
        fold_sizes[smallest] += int(sizes[group])
    return fold_of_group[group_of]
