"""The look of the figures: colours, axes, titles and labels."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from softstair._errors import import_extra

__all__ = ["COLOURS", "annotate", "blank", "clean", "in_order", "label_ends", "note", "words"]

BLUE, GREEN, RED = "#1f6fb4", "#2b8a45", "#c9302c"
YELLOW = "#b98a00"  # The paper's captions say yellow; a lighter one cannot be read on white.
PURPLE, TEAL, ORANGE = "#7b4fa3", "#00807a", "#c2610c"
INK, GREY, LIGHT = "#222222", "#6f6f6f", "#d9d9d9"

COLOURS: dict[str, dict[str, str]] = {
    "noise": {"uniform": BLUE, "triangular": GREEN, "normal": RED, "logistic": YELLOW},
    "interval": {"same_start": GREEN, "same_end": RED, "partition": YELLOW, "overlapped": BLUE},
    "forward": {"expectation": PURPLE, "mode": TEAL, "random": ORANGE, "hard": GREY},
    "power": {"homogeneous": INK, "progressive": INK},
}
"""Colour of each value of each degree of freedom, in drawing order."""
WORDS = {"power": "power law", "interval": "decay interval", "noise": "noise type"}


def words(name: str) -> str:
    """Return the name of a field or value as text: ``same_start`` becomes "same start"."""
    return WORDS.get(name, name.replace("_", " "))


def in_order(field: str, values: Iterable[str]) -> list[str]:
    """Return values of a field in the paper's order, else by size, else as they come."""
    order = {value: float(place) for place, value in enumerate((*COLOURS.get(field, ()), "none"))}
    try:
        return sorted(values, key=lambda value: order[value] if field in COLOURS else float(value))
    except (KeyError, ValueError):
        return list(values)


def blank(width: float, height: float) -> Any:
    """Return an empty figure in inches, outside pyplot: it needs no display and no closing."""
    return import_extra("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def clean(axes: Any) -> None:
    """Leave two thin spines, small ticks and pale horizontal grid lines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set(color=GREY, linewidth=0.7)
    axes.tick_params(colors=GREY, labelcolor=INK, width=0.7, length=3, labelsize=9)
    axes.grid(axis="y", color=LIGHT, linewidth=0.6)
    axes.set_axisbelow(True)


def title(figure: Any, text: str) -> None:
    figure.suptitle(text, x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK)


def note(axes: Any, text: str, loc: str | None = "left") -> None:
    axes.set_xlabel(text, fontsize=9, color=GREY, loc=loc)


def annotate(axes: Any, text: str, xy: Any, xycoords: Any, offset: Any, **style: Any) -> Any:
    """Write small grey text at an offset in points."""
    return axes.annotate(
        text,
        xy,
        xycoords=xycoords,
        xytext=offset,
        textcoords="offset points",
        **{"fontsize": 9, "color": GREY, **style},
    )


def label_ends(axes: Any, ends: Sequence[tuple[float, str, str]]) -> None:
    """Label lines at the right of the axes: (height in data units, text, colour) of each."""
    low, high = axes.get_ylim()
    # 9 points and a gap as a fraction of the axes' height, which is most of the figure's.
    gap = 13 / 72 / (0.72 * axes.figure.get_figheight())
    places = [(height - low) / (high - low) for height, _, _ in ends]
    for place, moved, (_, text, colour) in zip(places, spread(places, gap), ends, strict=True):
        axes.annotate(
            text,
            (1, place),
            xycoords="axes fraction",
            xytext=(1.035, moved),
            textcoords="axes fraction",
            va="center",
            fontsize=9,
            color=colour,
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.6, "shrinkA": 1, "shrinkB": 1},
        )


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Return the heights nearest to the given ones, by least squares, that are ``gap`` apart.

    >>> [round(height, 3) for height in spread([0.5, 0.9, 0.52], 0.1)]
    [0.46, 0.9, 0.56]
    """
    order = np.argsort(heights, kind="stable")
    gaps = gap * np.arange(len(order))
    moved = np.empty(len(order))
    # Apart by at least a gap is increasing once the gaps are subtracted.
    isotonic = import_extra("scipy.optimize").isotonic_regression
    moved[order] = isotonic(np.asarray(heights)[order] - gaps).x + gaps
    return [float(height) for height in moved]
