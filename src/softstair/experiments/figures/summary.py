"""Final accuracy by degree of freedom, and how much of its variance each of them explains."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from softstair.experiments.figures.style import COLOURS, GREY, INK, LIGHT, blank, clean, words
from softstair.experiments.results import Training
from softstair.experiments.statistics import final_of, mean_of
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


def final_accuracy(study: Study) -> Any:
    """Every configuration is a point, and each value's mean is over a balanced block alone."""
    facets = facets_of(study)
    rows = [len(found) for _, _, found in facets]
    figure = blank(7.0, 0.9 + sum(0.27 * count + 0.42 for count in rows))
    grid = figure.subplots(len(facets), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    for axes, (block, factor, found) in zip(grid, facets, strict=True):
        _strip(axes, block, factor, found, study)
    grid[-1].set_xlabel("validation accuracy in the end, in %", fontsize=9, color=GREY, loc="left")
    title = f"{study.title}: final accuracy by degree of freedom"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK)
    return figure


def variance(study: Study) -> Any:
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
    title = f"{study.title}: what explains the variance of accuracy"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK)
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
        folds: dict[str, list[Training]] = {}
        for one in trainings:
            folds.setdefault(one.configuration, []).append(one)
        points = [100 * mean.value for group in folds.values() if (mean := final_of(group))]
        # Points of one row are moved apart a little, each time in the same way.
        heights = row + np.random.default_rng(0).uniform(-0.24, 0.24, len(points))
        axes.scatter(points, heights, s=15, color=colour, alpha=0.45, linewidth=0)
        if table is not None and factor in table.factors:
            axis = list(table.factors).index(factor)
            values = table.values.take(table.factors[factor].index(value), axis)
            mean = mean_of(values.reshape(-1, len(table.folds)).mean(0))
            if mean.low is not None and mean.high is not None:
                _span(axes, row, mean.low, mean.high)
            axes.scatter([100 * mean.value], [row], s=44, color=colour, edgecolor=INK, zorder=3)
            _beside(axes, row, str(mean))
    _rows(axes, [words(value) for value in found])
    partly = "" if table is not None else "; combinations are missing, so there are no means"
    _subtitle(axes, words(factor), f"{block.about}{partly}")


def _bars(axes: Any, found: Variance) -> None:
    ordered = sorted(found.shares[:-1], key=_size, reverse=True)
    rest = found.shares[-1]
    for row, one in enumerate(ordered):
        main = len(one.term) == 1 and one.term != (FOLDS,)
        axes.barh(row, 100 * _size(one), height=0.6, color=BARS[main])
        if one.low is not None and one.high is not None:
            _span(axes, row, one.low, one.high)
        _beside(axes, row, str(one))
    _rows(axes, [" × ".join(map(words, one.term)) for one in ordered])
    axes.set_xlim(0, 100)
    cells, folds = found.table.values[..., 0].size, len(found.table.folds)
    count = f"{cells} combinations on {folds} fold{'s' if folds > 1 else ''}"
    left = f"{100 * rest.eta:.1f} % is none of these" if rest.freedom else "no rest, so η² alone"
    told = f"{found.block.about}\n{count}; their std is {100 * found.std:.1f} points; {left}"
    _subtitle(axes, " × ".join(map(words, found.table.factors)), told)


def _size(one: Share) -> float:
    return one.eta if one.omega is None else one.omega


def _span(axes: Any, row: int, low: float, high: float) -> None:
    ends = (100 * low, 100 * high)
    axes.plot(ends, (row, row), color=INK, linewidth=1.3, solid_capstyle="butt", zorder=2.5)


def _beside(axes: Any, row: int, text: str) -> None:
    """Figures in a column at the right."""
    axes.annotate(
        text, (1, row), xycoords=("axes fraction", "data"), xytext=(8, 0),
        textcoords="offset points", va="center_baseline", fontsize=9, color=INK,
        annotation_clip=False,
    )  # fmt: skip


def _rows(axes: Any, names: Sequence[str]) -> None:
    clean(axes)
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color=LIGHT, linewidth=0.6)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.45, -0.55)


def _subtitle(axes: Any, name: str, about: str) -> None:
    """The name of what is shown, and in grey of what, from the figure's left edge on."""
    lines = about.split("\n")
    # An empty title holds the place: the layout does not know of what crosses the axes' edge.
    axes.set_title("\n".join(" " for _ in lines), fontsize=9.5)
    text = axes.annotate(
        name, (0.012, 1), xycoords=("figure fraction", "axes fraction"),
        xytext=(0, 4 + 12 * (len(lines) - 1)), textcoords="offset points",
        fontsize=9.5, fontweight="bold", color=INK, annotation_clip=False,
    )  # fmt: skip
    first = axes.annotate(
        lines[0], (1, 0), xycoords=text, xytext=(6, 0), textcoords="offset points",
        fontsize=9, color=GREY, va="bottom", annotation_clip=False,
    )  # fmt: skip
    texts = [text, first]
    for line in lines[1:]:
        below = axes.annotate(
            line, (0, 0), xycoords=text, xytext=(0, -3), textcoords="offset points",
            fontsize=9, color=GREY, va="top", annotation_clip=False,
        )  # fmt: skip
        texts.append(below)
    for one in texts:
        one.set_in_layout(False)
