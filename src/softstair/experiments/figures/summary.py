"""Final accuracy by degree of freedom, and how much of its variance each of them explains."""

from typing import Any

from softstair.experiments.figures.strips import (
    accuracy_axis,
    beside,
    head,
    label_rows,
    large,
    points,
    span,
    subtitle,
)
from softstair.experiments.figures.style import COLOURS, GREY, blank, words
from softstair.experiments.results import Training
from softstair.experiments.statistics import mean_of
from softstair.experiments.studies import Study, select
from softstair.experiments.variance import BLOCKS, FOLDS, Block, Share, Variance, explained, tabled

__all__ = ["facets_of", "final_accuracy", "variance"]

FACETS = (
    ("static", "forward"),
    ("static", "noise"),
    ("dynamic", "forward"),
    ("dynamic", "interval"),
    ("dynamic", "power"),
    ("dynamic-expectation", "noise"),
)
"""Which degree of freedom is shown, of which block."""
BARS = {True: "#4c8cc4", False: "#a6a6a6"}
"""Main effects, and the others."""


def facets_of(study: Study) -> list[tuple[Block, str, dict[str, list[Training]]]]:
    """The degrees of freedom that have two values at least: block, name, and units of each."""
    every = [(BLOCKS[name], factor) for name, factor in FACETS]
    found = [(block, factor, _by_value(block, factor, study)) for block, factor in every]
    return [(block, factor, values) for block, factor, values in found if len(values) > 1]


def final_accuracy(study: Study, said: str = "") -> Any:
    """Every configuration is a point, and each value's mean is over a balanced block alone."""
    facets = facets_of(study)
    rows = [len(found) for _, _, found in facets]
    figure = blank(7.0, 1.1 + sum(0.27 * count + 0.42 for count in rows))
    grid = figure.subplots(len(facets), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    for axes, (block, factor, found) in zip(grid, facets, strict=True):
        _strip(axes, block, factor, found, study)
    accuracy_axis(grid[-1])
    head(figure, f"{study.title}: final accuracy by degree of freedom", said)
    return figure


def variance(study: Study, said: str = "") -> Any:
    """The shares of each block, as bars with their intervals."""
    found = [one for block in BLOCKS.values() if (one := explained(block, study.trainings)[0])]
    rows = [len(one.shares) for one in found]
    figure = blank(7.0, 0.9 + sum(0.24 * count + 0.66 for count in rows))
    grid = figure.subplots(len(found), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    for axes, one in zip(grid, found, strict=True):
        _bars(axes, one)
    grid[-1].set_xlabel(
        "share of the variance of final accuracy, in % (ω²; lines: 95 % interval)",
        fontsize=9,
        color=GREY,
        loc="left",
    )
    head(figure, f"{study.title}: what explains the variance of accuracy", said)
    return figure


def _by_value(block: Block, factor: str, study: Study) -> dict[str, list[Training]]:
    inside = [one for one in select(study.trainings, block.fixed) if one.is_done]
    split = {value: select(inside, {factor: value}) for value in COLOURS[factor]}
    return {value: found for value, found in split.items() if found}


def _strip(
    axes: Any, block: Block, factor: str, found: dict[str, list[Training]], study: Study
) -> None:
    table, _ = tabled(block, study.trainings)
    for row, (value, trainings) in enumerate(found.items()):
        colour = COLOURS[factor][value]
        points(axes, row, trainings, colour)
        if table is not None and factor in table.factors:
            axis = list(table.factors).index(factor)
            values = table.values.take(table.factors[factor].index(value), axis)
            mean = mean_of(values.reshape(-1, len(table.folds)).mean(0))
            large(axes, row, mean, colour)
    label_rows(axes, [words(value) for value in found])
    partly = "" if table is not None else "; combinations are missing, so there are no means"
    subtitle(axes, words(factor), f"{block.about}{partly}")


def _bars(axes: Any, found: Variance) -> None:
    ordered = sorted(found.shares[:-1], key=_size, reverse=True)
    rest = found.shares[-1]
    for row, one in enumerate(ordered):
        main = len(one.term) == 1 and one.term != (FOLDS,)
        axes.barh(row, 100 * _size(one), height=0.6, color=BARS[main])
        if one.low is not None and one.high is not None:
            span(axes, row, one.low, one.high)
        beside(axes, row, str(one))
    label_rows(axes, [" × ".join(map(words, one.term)) for one in ordered])
    axes.set_xlim(0, 100)
    cells, folds = found.table.values[..., 0].size, len(found.table.folds)
    count = f"{cells} combinations on {folds} fold{'s' if folds > 1 else ''}"
    left = f"{100 * rest.eta:.1f} % is none of these" if rest.freedom else "no rest, so η² alone"
    told = f"{found.block.about}\n{count}; their std is {100 * found.std:.1f} points; {left}"
    subtitle(axes, " × ".join(map(words, found.table.factors)), told)


def _size(one: Share) -> float:
    return one.eta if one.omega is None else one.omega
