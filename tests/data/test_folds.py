"""Folds: a partition, of whole groups, as even as can be, the same for the same seed."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from softstair.data import Dataset
from softstair.data.folds import split

pytestmark = pytest.mark.quick


def dataset(count: int, groups: list[int] | None = None) -> Dataset:
    return Dataset(
        "blank",
        torch.zeros(count, 1, 1, 1, dtype=torch.uint8),
        torch.zeros(count, dtype=torch.int64),
        ("only",),
        mean=0.0,
        std=1.0,
        groups=None if groups is None else torch.tensor(groups),
    )


def parts(data: Dataset, folds: int, seed: int) -> list[tuple[list[int], list[int]]]:
    both = (split(data, fold, folds, seed) for fold in range(folds))
    return [(training.tolist(), validation.tolist()) for training, validation in both]


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 60), st.integers(2, 12), st.integers(0, 2**63 - 1))
def test_validation_parts_are_strides_of_one_permutation(count: int, folds: int, seed: int) -> None:
    folds = min(folds, count)
    permutation = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    for fold, (training, validation) in enumerate(parts(dataset(count), folds, seed)):
        assert validation == permutation[fold::folds]
        rest = set(permutation[fold::folds])
        assert training == [index for index in permutation if index not in rest]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-3, 12), min_size=2, max_size=60), st.data())
def test_groups_stay_whole_and_folds_even(groups: list[int], data: st.DataObject) -> None:
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


def test_groups_of_one_size_are_dealt_evenly() -> None:
    groups = [index // 4 for index in range(120)]
    assert {len(validation) for _, validation in parts(dataset(120, groups), 10, 0)} == {12}


def test_large_groups_come_first() -> None:
    # 6 | 3 + 3 is the only even split: in another order a fold would get 9.
    groups = [0] * 3 + [1] * 3 + [2] * 6
    for seed in range(20):
        assert [len(valid) for _, valid in parts(dataset(12, groups), 2, seed)] == [6, 6]


def test_the_seed_decides_and_nothing_else() -> None:
    for groups in (None, [index // 2 for index in range(40)]):
        data = dataset(40, groups)
        torch.manual_seed(1)
        before = torch.get_rng_state()
        assert parts(data, 4, 7) == parts(data, 4, 7)
        assert torch.equal(before, torch.get_rng_state())
        assert {frozenset(v) for _, v in parts(data, 4, 7)} != {
            frozenset(v) for _, v in parts(data, 4, 8)
        }


@pytest.mark.parametrize(
    ("fold", "folds", "seed", "sentence"),
    [
        (0, 1, 0, "folds must be an integer from 2 to the number of examples, 6 in 'blank', but 1"),
        (0, 7, 0, "folds must be .* but 7 was"),
        (0, 2.0, 0, "folds must be an integer .* but 2.0 was"),
        (2, 2, 0, "fold must be an integer between 0 and 1, the folds being 2, but 2 was"),
        (-1, 2, 0, "fold must be .* but -1 was"),
        (0, 2, -1, "seed must be .* but -1 was"),
        (0, 2, 2**64, "seed must be"),
    ],
)
def test_refused(fold: int, folds: int, seed: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        split(dataset(6), fold, folds, seed)


def test_too_few_groups() -> None:
    with pytest.raises(ValueError, match="number of groups, 2 in 'blank', but 3 was given"):
        split(dataset(6, [0, 0, 0, 1, 1, 1]), 0, 3)
