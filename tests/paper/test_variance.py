"""The analysis of variance against least squares, numbers by hand, scipy and a simulation."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from helpers.made import changed, made
from paper import variance
from paper.variance import BLOCKS, explained, shares, tabled

LEVELS = {"partition": 0.05, "same_start": 0.04, "overlapped": 0.0, "same_end": -0.09}


def additive(settings: Mapping[str, str], fold: int) -> float:
    """Effects that sum up to nought each: of interval, of power, of fold."""
    power = 0.01 if settings["power"] == "homogeneous" else -0.01
    return 0.6 + LEVELS[settings["interval"]] + power + 0.002 * (fold - 2)


def test_two_by_two_by_hand() -> None:
    """Cells of two folds each: 0, 2; 2, 4; 4, 6; 10, 16, whose mean is 5.5.

    SS: total 190, rows 8·3.5² = 98, columns 8·2.5² = 50, both 8·1.5² = 18, folds 8·1.5² = 18, and 6
    are left on 3 degrees of freedom. ω² of the rows: (98 − 2)/(190 + 2) = 1/2.
    """
    table = np.array([[[0.0, 2.0], [2.0, 4.0]], [[4.0, 6.0], [10.0, 16.0]]])
    by_name = {share.name: share for share in shares(table, ["a", "b"])}
    assert [190 * share.eta for share in by_name.values()] == pytest.approx([98, 50, 18, 18, 6])
    rows = by_name["a"]
    assert rows.omega == pytest.approx(0.5)
    assert rows.low is not None
    assert rows.high is not None
    assert 0 <= rows.low < 0.5 < rows.high <= 1


def test_three_factors_as_least_squares_has_them() -> None:
    """What each term adds to a regression, one after the other, in both orders."""
    random = np.random.default_rng(4)
    table = random.normal(size=(3, 4, 2, 5)) + np.arange(4)[:, None, None]
    places = np.indices(table.shape).reshape(4, -1)
    dummies = [np.eye(size)[place][:, 1:] for size, place in zip(table.shape, places, strict=True)]
    terms = [(0,), (1,), (2,), (3,), *combinations(range(3), 2)]
    for order in (terms, [*reversed(terms[:4]), *reversed(terms[4:])]):
        columns, left = np.ones((table.size, 1)), {}
        explained_so_far = 0.0
        centred = table.ravel() - table.mean()
        for term in order:
            products = dummies[term[0]]
            for axis in term[1:]:
                products = np.einsum("ni,nj->nij", products, dummies[axis]).reshape(table.size, -1)
            columns = np.hstack([columns, products])
            fitted = columns @ np.linalg.lstsq(columns, centred, rcond=None)[0]
            left[term] = (fitted**2).sum() - explained_so_far
            explained_so_far += left[term]
        names = ["a", "b", "c", "folds"]
        etas = {share.name: share.eta for share in shares(table, names[:3])}
        for term, square in left.items():
            name = " × ".join(names[axis] for axis in term)
            assert etas[name] == pytest.approx(square / (centred**2).sum(), abs=1e-9)


def test_an_additive_block_has_the_shares_that_were_put_in() -> None:
    """Variances of the effects: of interval 30.5e-4, of power 1e-4, of folds 0.08e-4."""
    units = made("paper-svhn", additive, where={"static_std": ["false"]})
    analysis = explained(BLOCKS["dynamic"], units)
    assert analysis is not None
    parts = {"interval": np.var(list(LEVELS.values())), "power": 1e-4, "folds": 8e-6}
    total = sum(parts.values())
    for share in analysis.shares:
        expected = parts.get(share.name, 0.0) / total
        assert share.eta == pytest.approx(expected, abs=1e-9)
        if share.term != ("rest",):
            assert (share.low, share.high) == pytest.approx((expected, expected), abs=1e-9)
    assert analysis.std == pytest.approx(total**0.5)


def test_a_factor_without_any_effect_explains_nothing() -> None:
    """scipy's quantile of a non-central χ² is nan at 0 for one degree of freedom."""
    share, *_ = shares(np.array([[0.25, 0.75, 0.5], [0.75, 0.25, 0.5]]), ["forward"])
    assert str(share) == "0.0 % (0.0 to 0.0)"


def test_the_folds_are_those_that_all_cells_share() -> None:
    """And a fold that is not done is not there."""
    units = made("paper-svhn", additive, where={"static_std": ["false"]})
    units[7] = replace(units[7], seconds=None)
    units = [unit for place, unit in enumerate(units) if place != 20]
    table = tabled(BLOCKS["dynamic"], units)
    assert table is not None
    assert table.repetitions == ((1, 0), (3, 0), (4, 0))
    assert table.values.shape == (3, 4, 2, 3)
    assert table.factors["forward"] == ("expectation", "mode", "random")
    same_end = table.factors["interval"].index("same_end")
    assert table.values[1, same_end, 0, 2] == pytest.approx(0.6 - 0.09 + 0.01 + 0.004)


def test_a_block_with_a_hole_is_refused() -> None:
    units = made("paper-svhn", additive, where={"static_std": ["false"]})
    name = "uniform-random-std-overlapped-progressive"
    holed = [unit for unit in units if unit.configuration != name]
    no_common_fold = [unit for unit in units if (unit.fold == 0) == (unit.configuration == name)]
    other_levels = [changed(unit, forward="hard") for unit in units]
    for incomplete in (holed, no_common_fold, other_levels):
        assert tabled(BLOCKS["dynamic"], incomplete) is None
        assert explained(BLOCKS["dynamic"], incomplete) is None
    assert tabled(BLOCKS["static"], units) is None
    flat = made("paper-svhn", lambda settings, fold: 0.1, where={"static_std": ["false"]})
    assert explained(BLOCKS["dynamic"], flat) is None


def test_fewer_levels_are_a_block() -> None:
    """A factor of one level explains nothing."""
    only = {"interval": ["partition", "same_end"], "power": ["homogeneous"]}
    units = made("paper-svhn", additive, where=only)
    analysis = explained(BLOCKS["dynamic"], units)
    assert analysis is not None
    names = [share.name for share in analysis.shares]
    assert names[:3] == ["forward", "interval", "forward × interval"]


def test_one_fold_leaves_the_interactions_of_three() -> None:
    """Two factors on one fold leave nothing to test against; three do."""
    random = np.random.default_rng(0)
    table = random.normal(size=(3, 4, 2, 1))
    results = shares(table, ["a", "b", "c"])
    assert [share.name for share in results][-1] == "rest"
    assert "folds" not in [share.name for share in results]
    assert results[-1].freedom == 2 * 3 * 1
    assert sum(share.eta for share in results) == pytest.approx(1)
    assert results[0].omega is not None
    pair = shares(table[..., 0, :], ["a", "b"])
    assert pair[-1].freedom == 0
    assert (pair[0].omega, pair[0].low) == (None, None)
    assert sum(share.eta for share in pair) == pytest.approx(1)


def test_far_non_centralities_are_those_of_scipy() -> None:
    """Where the normal approximation takes over."""
    chance = np.array([0.025, 0.5, 0.975])
    for freedom in (1, 3, 6):
        got = variance._centrality(np.full(3, 1100.0), freedom, chance)
        assert stats.ncx2.cdf(1100.0, freedom, got) == pytest.approx(chance, abs=3e-4)
        near = variance._centrality(np.full(3, 40.0), freedom, chance)
        assert stats.ncx2.cdf(40.0, freedom, near) == pytest.approx(chance, abs=1e-6)


@pytest.mark.nightly
def test_the_interval_covers_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    """In about 95 of 100 blocks: with errors, folds that differ, a strong and two weak terms."""
    monkeypatch.setattr(variance, "DRAWS", 250)
    random = np.random.default_rng(11)
    truth = np.array([-1.0, 0.0, 1.0])[:, None, None] + np.array([-0.2, 0.2])[None, :, None]
    total = truth.var() + 0.5**2 + 0.3**2
    put_in = {"a": 2 / 3 / total, "b": 0.04 / total, "a × b": 0.0}
    rounds, covered = 200, dict.fromkeys(put_in, 0)
    for _ in range(rounds):
        errors = 0.5 * random.normal(size=(3, 2, 5)) + 0.3 * random.normal(size=5)
        for share in shares(truth + errors, ["a", "b"]):
            if share.name in put_in and share.low is not None and share.high is not None:
                covered[share.name] += share.low - 1e-9 <= put_in[share.name] <= share.high
    # Of 200 at 95 %, 190 ± 3: by chance they are hardly ever fewer than 180.
    assert all(180 <= count <= 200 for count in covered.values()), covered
