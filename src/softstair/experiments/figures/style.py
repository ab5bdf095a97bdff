"""How figures look: the captions' colours, axes without clutter, labels at the lines' ends."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from softstair._errors import import_extra

__all__ = ["COLOURS", "GREY", "INK", "WORDS", "blank", "clean", "heading", "label_ends", "words"]

BLUE, GREEN, RED = "#1f6fb4", "#2b8a45", "#c9302c"
# The captions say yellow, which on white cannot be read: this is the yellow of old gold.
YELLOW = "#b98a00"
PURPLE, TEAL = "#7b4fa3", "#00807a"
INK, GREY, LIGHT = "#222222", "#6f6f6f", "#d9d9d9"

COLOURS: dict[str, dict[str, str]] = {
    "noise": {"uniform": BLUE, "triangular": GREEN, "normal": RED, "logistic": YELLOW},
    "interval": {"same_start": GREEN, "same_end": RED, "partition": YELLOW, "overlapped": BLUE},
    "forward": {"expectation": PURPLE, "mode": TEAL, "random": "#c2610c", "hard": GREY},
    "power": {"homogeneous": INK, "progressive": INK},
}
"""Of each value of each degree of freedom, in the order in which they are drawn."""
WORDS = {"power": "power law", "interval": "decay interval", "noise": "noise type"}


def words(name: str) -> str:
    """A name as it is read: same_start is same start."""
    return WORDS.get(name, name.replace("_", " "))


def blank(width: float, height: float) -> Any:
    """A figure of its own, not pyplot's: no window system is asked for, and none is left open."""
    return import_extra("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def clean(axes: Any) -> None:
    """Two thin spines, small ticks, pale lines across."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set(color=GREY, linewidth=0.7)
    axes.tick_params(colors=GREY, labelcolor=INK, width=0.7, length=3, labelsize=9)
    axes.grid(axis="y", color=LIGHT, linewidth=0.6)
    axes.set_axisbelow(True)


def heading(axes: Any, title: str, below: str) -> None:
    """A title, and under it in grey what is shown: in the place of a label along the axis."""
    room = "\n" * (1 + below.count("\n"))
    axes.set_title(f"{title}{room}", loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.annotate(
        below,
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 6),
        textcoords="offset points",
        fontsize=9,
        color=GREY,
    )


def label_ends(axes: Any, ends: Sequence[tuple[float, str, str]]) -> None:
    """Labels at the right of the axes, at these heights as far as they leave each other room.

    ends   (height in data, text, colour) of each
    """
    low, high = axes.get_ylim()
    # 9 points with some air, as a share of the axes' height; the axes are most of the figure's.
    room = 13 / 72 / (0.72 * axes.figure.get_figheight())
    heights = spread([(height - low) / (high - low) for height, _, _ in ends], room)
    for place, (height, text, colour) in zip(heights, ends, strict=True):
        axes.annotate(
            text,
            (1, (height - low) / (high - low)),
            xycoords="axes fraction",
            xytext=(1.035, place),
            textcoords="axes fraction",
            va="center",
            fontsize=9,
            color=colour,
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.6, "shrinkA": 1, "shrinkB": 1},
        )


def spread(heights: Sequence[float], room: float) -> list[float]:
    """Heights as near to the given ones as they can be with so much room between neighbours.

    Neighbours that are too near become a group around their mean, and so do groups.

    >>> [round(one, 3) for one in spread([0.5, 0.9, 0.52], 0.1)]
    [0.46, 0.9, 0.56]
    """
    order = np.argsort(heights, kind="stable")
    groups: list[list[int]] = []
    for index in order:
        groups.append([int(index)])
        while len(groups) > 1 and _top(groups[-2], heights, room) + room > _bottom(
            groups[-1], heights, room
        ):
            groups[-2:] = [groups[-2] + groups[-1]]
    found = [0.0] * len(heights)
    for group in groups:
        for place, index in enumerate(group):
            found[index] = _bottom(group, heights, room) + place * room
    return found


def _bottom(group: Sequence[int], heights: Sequence[float], room: float) -> float:
    middle = float(np.mean([heights[index] for index in group]))
    return middle - room * (len(group) - 1) / 2


def _top(group: Sequence[int], heights: Sequence[float], room: float) -> float:
    return _bottom(group, heights, room) + room * (len(group) - 1)
