"""Data sets validate their tensors and normalisation; loading by name."""

import inspect
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest
import torch

from softstair import data
from softstair._errors import MissingExtraError, SoftstairError
from softstair.data import DataError, Dataset

X = torch.zeros(6, 1, 8, 8, dtype=torch.uint8)
Y = torch.tensor([0, 1, 0, 1, 0, 1])
PLAIN = Dataset("plain", X, Y, ("a", "b"), mean=120.7, std=63.8)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"x": X.float()}, "x"),
        ({"x": X[0]}, "x"),
        ({"y": Y.int()}, "y"),
        ({"y": Y[1:]}, "y"),
        ({"y": Y + 1}, "y"),
        ({"test_x": X}, "test_y"),
        ({"test_x": X[..., 1:], "test_y": Y}, "test_x"),
        ({"groups": Y[1:]}, "groups"),
        ({"mean": float("nan")}, "mean"),
        ({"std": 0.0}, "std"),
        ({"centred": (0.0, 0.0)}, "centred[1]"),
        ({"x": X.float().numpy()}, "x"),
        ({"y": Y.float().numpy()}, "y"),
        ({"groups": [0, 1] * 3}, "groups"),
        ({"mean": torch.ones(3)}, "mean"),
        ({"std": np.ones(3)}, "std"),
        ({"x": X + 100, "mean": 0.485, "std": 0.229}, "mean"),
    ],
)
def test_invalid_fields_are_named(changes, field):
    with pytest.raises(SoftstairError) as raised:
        replace(PLAIN, **changes)
    assert raised.value.field == field


def test_arrays_are_accepted():
    """Of bytes and of labels of any integer type, also if they are views or cannot be written."""
    x, y = np.arange(12, dtype=np.uint8).reshape(6, 2, 1, 1)[::-1], Y.numpy().astype(np.uint8)
    x.flags.writeable = False
    data = replace(PLAIN, x=x, y=y, groups=y.astype(">i4"), test_x=x, test_y=Y.numpy())
    assert torch.equal(data.x.flatten(), torch.arange(12).reshape(6, 2).flip(0).flatten())
    assert torch.equal(data.y, Y)
    assert torch.equal(data.groups, Y)
    assert data.y.dtype == data.groups.dtype == torch.int64
    assert data.x.dtype == data.test_x.dtype == torch.uint8


def test_centring_changes_only_data_that_have_their_own_zero_point():
    assert PLAIN.numbers(centre=True) == PLAIN.numbers() == (120.7, 63.8)
    assert PLAIN.numbers(integer=True, centre=True) == PLAIN.numbers(integer=True) == (121.0, 64.0)
    centred = replace(PLAIN, centred=(100.4, 30.0)).sample(1)
    assert centred.numbers() == (120.7, 63.8)
    assert centred.numbers(centre=True) == (100.4, 30.0)
    assert centred.numbers(integer=True, centre=True) == (100.0, 32.0)


def test_a_sample_keeps_examples_labels_and_groups_together():
    x = torch.arange(50, dtype=torch.uint8).reshape(50, 1, 1, 1)
    y, groups = torch.arange(50), torch.arange(50) * 3
    full = Dataset("n", x, y, tuple(map(str, y.tolist())), 0.0, 1.0, groups, x + 50, y)
    sample = full.sample(9, seed=1)
    assert len(sample) == 9
    assert torch.equal(sample.x.flatten(), sample.y)
    assert torch.equal(sample.groups, 3 * sample.y)
    assert torch.equal(sample.test_x.flatten(), sample.test_y + 50)
    assert torch.equal(sample.x, full.sample(9, seed=1).x)
    assert not torch.equal(sample.x, full.sample(9, seed=2).x)
    assert len(full.sample(99)) == 50
    assert full.sample(None) is full


def test_digits_have_their_numbers():
    """Without scikit-learn, whose description of the data has them."""
    digits = inspect.unwrap(data._digits)()
    assert (digits.x.shape, digits.x.dtype) == ((1797, 1, 8, 8), torch.uint8)
    assert (int(digits.x.max()), int(digits.x.sum())) == (16, 561_718)
    assert digits.y.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert digits.x[0, 0, 0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]


@pytest.mark.nightly  # scikit-learn takes seconds to import
@pytest.mark.parametrize("moved", [False, True])
def test_digits_are_those_of_scikit_learn(moved, monkeypatch):
    from sklearn.datasets import load_digits

    if moved:
        monkeypatch.setattr(data, "find_spec", lambda name: ModuleSpec(name, None, origin="a/b"))
    digits, expected = inspect.unwrap(data._digits)(), load_digits()
    assert digits.x.dtype == torch.uint8
    assert np.array_equal(digits.x[:, 0], expected.images)
    assert np.array_equal(digits.y, expected.target)


def test_a_missing_scikit_learn_names_the_extra(monkeypatch):
    for name in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"sklearn.*\[cli\]"):
        inspect.unwrap(data._digits)()


def test_an_unknown_name_is_an_error_that_lists_the_names():
    with pytest.raises(SoftstairError, match=r"digits, cifar10, svhn, speech.*'mnist' was given"):
        data.load("mnist")


def test_the_version_of_absent_data_is_unknown(tmp_path):
    for name in ("svhn", "speech", "mydata:load"):
        assert data.version(name, tmp_path) is None


def test_data_errors_are_printable_softstair_errors():
    error = DataError(Path("a\x1b[31m.npz"), "contains \x1b[2J", "remove it")
    assert isinstance(error, SoftstairError)
    assert str(error).isprintable()
