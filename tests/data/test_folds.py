"""Folds are partitions; groups are not divided; the seed determines them."""

from collections import Counter

import pytest
import torch
from hypothesis import given, strategies as st

from softstair._errors import SoftstairError
from softstair.data import Dataset
from softstair.data.dataset import held_out, split

pytestmark = pytest.mark.quick


def dataset(count: int, groups: list[int] | None = None) -> Dataset:
    x, y = torch.zeros(count, 1, 1, 1, dtype=torch.uint8), torch.zeros(count, dtype=torch.int64)
    tensor = None if groups is None else torch.tensor(groups)
    return Dataset("blank", x, y, ("only",), mean=0.0, std=1.0, groups=tensor)


def parts(data: Dataset, folds: int, seed: int) -> list[tuple[list[int], list[int]]]:
    both = (split(data, fold, folds, seed) for fold in range(folds))
    return [(training.tolist(), validation.tolist()) for training, validation in both]


@given(st.integers(2, 60), st.integers(2, 12), st.integers(0, 2**63 - 1))
def test_validation_parts_are_strides_of_one_permutation(count, folds, seed):
    folds = min(folds, count)
    permutation = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    for fold, (training, validation) in enumerate(parts(dataset(count), folds, seed)):
        assert validation == permutation[fold::folds]
        rest = set(permutation[fold::folds])
        assert training == [index for index in permutation if index not in rest]


@given(st.lists(st.integers(-3, 12), min_size=2, max_size=60), st.data())
def test_groups_are_not_divided_and_folds_are_even(groups, data):
    if len(set(groups)) < 2:
        groups = [*groups, 99]
    folds = data.draw(st.integers(2, len(set(groups))))
    all_parts = parts(dataset(len(groups), groups), folds, data.draw(st.integers(0, 1000)))
    assert sorted(i for _, validation in all_parts for i in validation) == list(range(len(groups)))
    for training, validation in all_parts:
        assert sorted(training + validation) == list(range(len(groups)))
        assert not {groups[i] for i in training} & {groups[i] for i in validation}
        assert validation
        assert training
    sizes = [len(validation) for _, validation in all_parts]
    assert max(sizes) - min(sizes) <= max(Counter(groups).values())


def test_large_groups_are_assigned_first():
    # 6 | 3 + 3 is the only even split: in another order a fold would get 9.
    groups = [0] * 3 + [1] * 3 + [2] * 6
    for seed in range(20):
        assert [len(valid) for _, valid in parts(dataset(12, groups), 2, seed)] == [6, 6]


def test_folds_depend_on_the_seed_alone():
    for groups in (None, [index // 2 for index in range(40)]):
        data = dataset(40, groups)
        torch.manual_seed(1)
        before = torch.get_rng_state()
        assert parts(data, 4, 7) == parts(data, 4, 7)
        assert torch.equal(before, torch.get_rng_state())
        assert sorted(parts(data, 4, 7)) != sorted(parts(data, 4, 8))


def test_invalid_arguments_are_named():
    wrong = {"folds": (0, 1, 0), "fold": (2, 2, 0), "seed": (0, 2, -1)}
    for field, (fold, folds, seed) in wrong.items():
        with pytest.raises(SoftstairError) as raised:
            split(dataset(6), fold, folds, seed)
        assert raised.value.field == field
    with pytest.raises(SoftstairError, match="number of groups, 2 in 'blank', but 3 was given"):
        split(dataset(6, [0, 0, 0, 1, 1, 1]), 0, 3)


def test_without_a_test_set_a_fold_has_to_be_held_out() -> None:
    assert len(held_out(dataset(10), 0, 5)[2]) == 2
    with pytest.raises(SoftstairError, match="no test set") as caught:
        held_out(dataset(10), "all", 5)
    assert caught.value.field == "fold"
