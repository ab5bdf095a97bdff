"""The look of figures: colours, words, and an empty figure of plotly."""

import html
from collections.abc import Iterable, Sequence
from typing import Any

from softstair._errors import import_extra

BLUE, GREEN, RED = "#1f6fb4", "#2b8a45", "#c9302c"
YELLOW = "#b98a00"  # The paper's captions say yellow; a lighter one cannot be read on white.
PURPLE, TEAL, ORANGE = "#7b4fa3", "#00807a", "#c2610c"
INK, GREY = "#222222", "#6f6f6f"
COLOURS: dict[str, dict[str, str]] = {
    "noise": {"uniform": BLUE, "triangular": GREEN, "normal": RED, "logistic": YELLOW},
    "interval": {"same_start": GREEN, "same_end": RED, "partition": YELLOW, "overlapped": BLUE},
    "forward": {"expectation": PURPLE, "mode": TEAL, "random": ORANGE, "hard": GREY},
    "power": {"homogeneous": INK, "progressive": INK},
}
"""Colour of each value of each degree of freedom, in drawing order."""
PALETTE = (BLUE, YELLOW, GREEN, RED, PURPLE, TEAL, "#b5407f", "#7a5230")
"""Colours of the values of any other field, in turn."""
WORDS = {"power": "power law", "interval": "decay interval", "noise": "noise type"}


def words(name: str) -> str:
    """Return the name of a field or value as text: ``same_start`` becomes "same start"."""
    return WORDS.get(name, html.escape(clean(name)).replace("_", " "))


def clean(text: str) -> str:
    """Return text that can be written as UTF-8; the name of a file need not be."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def in_order(field: str, values: Iterable[str]) -> list[str]:
    """Return values of a field in the paper's order, else by size, else as they come."""
    order = {value: float(place) for place, value in enumerate((*COLOURS.get(field, ()), "none"))}
    values = list(values)
    try:
        return sorted(values, key=lambda value: order[value] if field in COLOURS else float(value))
    except (KeyError, ValueError):
        return values


def blank(
    title: str,
    rows: int = 1,
    columns: int = 1,
    titles: Sequence[str] = (),
    heights: Sequence[int] = (),
) -> Any:
    """Return an empty figure of so many plots, as high as ``heights`` rows of text need."""
    subplots = import_extra("plotly.subplots", "paper")
    height = 420 + 120 * (rows > 1) if not heights else 130 + sum(28 * n + 60 for n in heights)
    figure = subplots.make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=titles or None,
        shared_xaxes=rows > 1,
        shared_yaxes=columns > 1,
        row_heights=heights or None,
        vertical_spacing=50 / height if heights else 0.12 / rows,
    )
    margin = {"l": 60, "r": 20, "t": 70, "b": 60}
    heading = {"text": f"<b>{html.escape(clean(title))}</b>", "x": 0.01, "font": {"size": 15}}
    font = {"color": INK, "size": 12}
    figure.update_layout(
        template="simple_white", title=heading, height=height, margin=margin, font=font
    )
    figure.update_annotations(font_size=11)
    figure.update_yaxes(showgrid=True)
    return figure
