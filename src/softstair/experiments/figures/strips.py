"""Rows of points and bars: what figures of final accuracies and of variances are made of."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from softstair.experiments.figures.style import GREY, INK, LIGHT, clean
from softstair.experiments.results import Training
from softstair.experiments.statistics import Mean, final_of

__all__ = [
    "accuracy_axis",
    "beside",
    "head",
    "label_rows",
    "large",
    "points",
    "span",
    "subtitle",
]

WIDEST = 74
"""As many letters of a title as a line has room for."""


def head(figure: Any, title: str, said: str) -> None:
    """A title, and under it what tells the study from others, if any is like it."""
    first = title if len(title) <= WIDEST else title.replace(": ", ":\n", 1)
    figure.suptitle(
        "\n".join(filter(None, [first, said])),
        x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK,
    )  # fmt: skip


def points(axes: Any, row: int, trainings: Iterable[Training], colour: str) -> None:
    """A small point for each configuration."""
    folds: dict[str, list[Training]] = {}
    for one in trainings:
        folds.setdefault(one.configuration, []).append(one)
    found = [100 * mean.value for group in folds.values() if (mean := final_of(group))]
    # Points of one row are moved apart a little, each time in the same way.
    heights = row + np.random.default_rng(0).uniform(-0.24, 0.24, len(found))
    axes.scatter(found, heights, s=15, color=colour, alpha=0.45, linewidth=0, clip_on=False)


def large(axes: Any, row: int, mean: Mean, colour: str) -> None:
    """A large point for a mean, with its interval, and in words."""
    if mean.low is not None and mean.high is not None:
        span(axes, row, mean.low, mean.high)
    at = [100 * mean.value], [row]
    axes.scatter(*at, s=44, color=colour, edgecolor=INK, zorder=3, clip_on=False)
    beside(axes, row, str(mean))


def accuracy_axis(axes: Any) -> None:
    """From 0 to 100 at most, and what the points are."""
    low, high = axes.get_xlim()
    axes.set_xlim(max(low, 0), min(high, 100))
    axes.set_xlabel(
        "validation accuracy in the end, in %\n"
        "small: a configuration; large: their mean, with its 95 % interval (from three folds on)",
        fontsize=9,
        color=GREY,
        loc="left",
    )


def span(axes: Any, row: int, low: float, high: float) -> None:
    """An interval, as far as a share can be."""
    ends = (100 * max(low, 0), 100 * min(high, 1))
    axes.plot(ends, (row, row), color=INK, linewidth=1.3, solid_capstyle="butt", zorder=2.5)


def beside(axes: Any, row: int, text: str) -> None:
    """Figures in a column at the right."""
    axes.annotate(
        text, (1, row), xycoords=("axes fraction", "data"), xytext=(8, 0),
        textcoords="offset points", va="center_baseline", fontsize=9, color=INK,
        annotation_clip=False,
    )  # fmt: skip


def label_rows(axes: Any, names: Sequence[str]) -> None:
    """Names at the left, the first at the top."""
    clean(axes)
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color=LIGHT, linewidth=0.6)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.45, -0.55)


def subtitle(axes: Any, name: str, about: str) -> None:
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
