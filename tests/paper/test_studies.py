"""Means, intervals and curves against scipy, and what becomes of folds that are not all there."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from helpers.made import changed, curve, made
from paper.mean import mean_of
from paper.studies import curve_of, drop_of, final_of, studies
from paper.tables import Training

pytestmark = pytest.mark.quick

VALUES = [0.81, 0.84, 0.79, 0.83, 0.86]


def folds(values: list[float], epochs: int = 10) -> list[Training]:
    """The folds of one configuration with these accuracies in the end."""
    only = {"noise": ["uniform"], "forward": ["mode"], "interval": ["none"]}
    count = tuple(range(len(values)))
    return made("paper-svhn", lambda settings, fold: values[fold], epochs, count, only)


def test_the_interval_is_students() -> None:
    mean = mean_of(VALUES)
    expected = stats.t.interval(0.95, 4, np.mean(VALUES), stats.sem(VALUES))
    assert mean.bounds == pytest.approx(expected)
    assert mean.value == pytest.approx(np.mean(VALUES))
    assert mean.folds == 5
    assert str(mean) == f"82.6 ± {100 * (expected[1] - expected[0]) / 2:.1f} %"


def test_fewer_than_three_folds_have_no_interval() -> None:
    """Student's t of two folds is 12.7: the interval would say nothing."""
    mean = mean_of([0.5106, 0.6031])
    assert mean.margin is None
    assert mean.bounds == (0.5106, 0.6031)
    assert str(mean) == "55.7 (51.1 to 60.3) %"
    assert mean_of([-0.15, 0.157]).in_hundredths() == "0.4 (−15.0 to 15.7)"
    assert curve_of(folds([0.5, 0.6])).margin is None
    assert curve_of(folds([0.5, 0.6, 0.7])).margin is not None
    mean = mean_of([0.8512])
    assert (mean.margin, mean.folds) == (None, 1)
    assert str(mean) == "85.1 %"
    assert mean_of([-0.0301]).in_hundredths() == "−3.0"
    assert mean_of([-0.0001]).in_hundredths() == "0.0"
    with pytest.raises(ValueError, match="at least one"):
        mean_of([])


def test_a_curve_is_the_same_at_every_epoch() -> None:
    """As the mean of that epoch's values is."""
    random = np.random.default_rng(0)
    ends, starts = random.uniform(0.7, 0.9, 5), random.uniform(0.2, 0.6, 5)
    units = [
        replace(unit, curve=curve(ends[unit.fold], 10, 8, starts[unit.fold]))
        for unit in folds(VALUES)
    ]
    means = curve_of(units)
    assert list(means.epochs) == list(range(1, 11))
    assert means.repetitions == tuple((fold, 0) for fold in range(5))
    assert means.margin is not None
    for place, values in ((0, starts), (7, starts), (8, ends), (9, ends)):
        expected = mean_of(values)
        got = (means.mean[place], means.margin[place])
        assert got == pytest.approx((expected.value, expected.margin))
    losses = curve_of(units, "valid_loss")
    assert losses.mean == pytest.approx(1 - means.mean)


def test_a_curve_ends_where_the_shortest_fold_does() -> None:
    """A fold that is not done has its epochs counted, and no final accuracy."""
    units = folds(VALUES)
    units[2] = replace(units[2], curve=units[2].curve[:4], seconds=None)
    assert list(curve_of(units).epochs) == [1, 2, 3, 4]
    assert len(curve_of(units).repetitions) == 5
    assert final_of(units) == mean_of([0.81, 0.84, 0.83, 0.86])
    assert final_of(units[2:3]) is None


def test_the_drop_is_found_in_the_curve() -> None:
    """A table has no column for it."""
    units = folds(VALUES, epochs=20)
    assert drop_of(units[0]) == 16
    assert drop_of(replace(units[0], curve=units[0].curve[:16])) is None
    cosine = units[0].recipe.replace(rate_shape="cosine")
    assert drop_of(replace(units[0], recipe=cosine)) is None


def test_studies_do_not_mix() -> None:
    """Other data, another length or another setting make another study; folds and seeds do not."""
    long, short = (made("paper-svhn", lambda *_: 0.5, epochs, (0,)) for epochs in (20, 10))
    other = made("paper-cifar10", lambda *_: 0.3, 10, (0,), {"forward": ["mode"]})
    parts = studies([*short, *long, *other])
    assert [part.name for part in parts] == ["cifar10", "svhn-epochs-20", "svhn-epochs-10"]
    assert [part.epochs for part in parts] == [10, 20, 10]
    assert [len(part.trainings) for part in parts] == [len(other), 32, 32]
    assert parts[1].title == "SVHN, 20 epochs"
    rates = [changed(unit, learning_rate="1.0") for unit in short]
    names = ["svhn-learning_rate-0.001", "svhn-learning_rate-1.0"]
    assert [part.name for part in studies([*short, *rates])] == names
    seeds = [changed(unit, seed="1") for unit in short]
    (both,) = studies([*short, *seeds])
    assert len(both.trainings) == 64
    how = [changed(unit, compile="never") for unit in short[:5]]
    assert [part.name for part in studies([*how, *short[5:]])] == ["svhn"]


def test_a_training_counts_once_and_a_float_twin_does_not() -> None:
    """Of two, the one that is done, under whatever name; no degree of freedom touches a twin."""
    units = folds(VALUES)
    half = [
        replace(unit, configuration="half", curve=unit.curve[:3], seconds=None) for unit in units
    ]
    (part,) = studies([*half, *units])
    assert [unit.configuration for unit in part.trainings] == [unit.configuration for unit in units]
    twins = [changed(unit, weights="float", features="float") for unit in units]
    assert studies(twins) == []
    assert len(studies([*twins, *units])) == 1
