"""Line plots: accuracy over the epochs as in the paper's panels, and the noise schedules; and the
look of all figures: colours, axes, titles and labels."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from paper import studies
from paper.mean import FEWEST
from paper.studies import Curve, Study, counted, select
from paper.tables import Training
from softstair import Schedule
from softstair._errors import import_extra
from softstair.schedule import POWERS, Interval

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
STYLES: dict[str, Any] = {"homogeneous": "-", "progressive": (0, (1.1, 1.3))}
TICK_STEPS = [1, 2, 5, 10]
WARM_UP = 0.1
"""Fraction of the epochs at the start that may lie below the vertical range."""
BY_DEPTH: tuple[Interval, ...] = ("partition", "same_start", "overlapped", "same_end")
"""From the interval that anneals the layers near the input first to the one that does so last."""


@dataclass(frozen=True)
class Panel:
    """One of the paper's plots; ``noise`` is None for static noise, which shows all families."""

    forward: str
    noise: str | None = None

    @property
    def name(self) -> str:
        return f"dynamic-{self.forward}-{self.noise}" if self.noise else f"static-{self.forward}"

    @property
    def title(self) -> str:
        return f"{f'dynamic {self.noise}' if self.noise else 'static'} noise, {self.forward}"


PANELS: tuple[Panel, ...] = tuple(
    dict.fromkeys(
        [
            Panel("random"),
            Panel("mode"),
            *(Panel("expectation", noise) for noise in COLOURS["noise"]),
            Panel("random", "uniform"),
            Panel("mode", "uniform"),
            # Those that the paper does not have.
            *map(Panel, COLOURS["forward"]),
            *(Panel(*pair) for pair in product(COLOURS["forward"], COLOURS["noise"])),
        ]
    )
)
"""All panels, the paper's panels of CIFAR-10 first, in its order."""


def trainings_of(study: Study, panel: Panel) -> list[Training]:
    if panel.noise is None:
        return select(study.trainings, {**studies.STATIC, "forward": panel.forward})
    fixed = {**studies.DYNAMIC, "noise": panel.noise, "forward": panel.forward}
    chosen = select(study.trainings, fixed)
    return [training for training in chosen if training.settings["interval"] != "none"]


def draw_panel(study: Study, panel: Panel, caption: str = "") -> Any:
    """Draw a panel; ``caption`` tells its study from others of the same title."""
    figure = blank(5.6, 3.5)
    axes = figure.subplots()
    shown = trainings_of(study, panel)
    field = "interval" if panel.noise else "noise"
    # The folds of each line, in the order of the colours, homogeneous first.
    lines = [(value, power) for value in COLOURS[field] for power in (*STYLES, "none")]
    groups = {line: select(shown, {field: line[0], "power": line[1]}) for line in lines}
    groups = {line: folds for line, folds in groups.items() if folds}
    baseline: list[Training] = []
    curves: list[Curve] = []
    ends: dict[str, tuple[float, str, str]] = {}
    if panel.noise:
        # The expectation makes no sense under static noise, and is compared with the mode.
        forward = "mode" if panel.forward == "expectation" else panel.forward
        static = {**studies.STATIC, "noise": panel.noise, "forward": forward}
        if baseline := select(study.trainings, static):
            curves.append(studies.curve_of(baseline))
            _plot(axes, curves[0], color=GREY, linewidth=0.8, zorder=1.5)
            label = f"static {forward}"
            ends[label] = (100 * curves[0].mean[-1], label, GREY)
    for (value, power), folds in groups.items():
        colour, label = COLOURS[field][value], words(value)
        curves.append(studies.curve_of(folds))
        _plot_with_band(axes, curves[-1], colour, STYLES.get(power, "-"))
        ends.setdefault(label, (100 * curves[-1].mean[-1], label, colour))
    clean(axes)
    _set_limits(axes, curves)
    note(axes, "epoch")
    _mark_drop(axes, shown)
    _explain_styles(axes, {power for _, power in groups})
    label_ends(axes, list(ends.values()))
    # In grey under the title is what is shown, in place of a label of the vertical axis.
    below = [caption, _described(curves), _uneven([baseline, *groups.values()])]
    below = [line for line in below if line]
    heading = f"{study.title.split(',')[0]}: {panel.title}" + "\n" * len(below)
    axes.set_title(heading, loc="left", fontsize=11, fontweight="bold", color=INK)
    annotate(axes, "\n".join(below), (0, 1), "axes fraction", (0, 6))
    return figure


def draw_schedules(layers: int) -> Any:
    """Draw each layer's std over time, for four decay intervals and two power laws."""
    figure = blank(8.4, 3.7)
    grid = figure.subplots(len(POWERS), len(BY_DEPTH), sharex=True, sharey=True)
    times = np.linspace(0, layers, 40 * layers + 1)
    colours = import_extra("matplotlib").colormaps["viridis"](np.linspace(0, 0.88, layers))
    for row, power in zip(grid, POWERS, strict=True):
        for axes, interval in zip(row, BY_DEPTH, strict=True):
            schedule = Schedule(layers, period=1, interval=interval, power=power, std0=1.0)
            # Widths tell lines that coincide apart: the first layer's is the widest.
            for layer, colour in enumerate(colours):
                values = [schedule(layer, t)[1] for t in times]
                width = 1.2 + 2.4 * (layers - 1 - layer) / max(1, layers - 1)
                axes.plot(times, values, color=colour, linewidth=width)
            clean(axes)
            axes.set(xlim=(0, layers), ylim=(0, 1.04), xticks=range(layers + 1), yticks=(0, 0.5, 1))
        row[0].set_ylabel(power, fontsize=9, color=INK)
    for axes, interval in zip(grid[0], BY_DEPTH, strict=True):
        axes.set_title(words(interval), loc="left", fontsize=9, color=INK)
    for axes in grid[-1]:
        note(axes, "time in periods", loc=None)
    shown = "std as a share of its first, from the input to the output"
    title(figure, f"Each layer's noise over time: {shown}")
    line = partial(import_extra("matplotlib.lines").Line2D, [], [], linewidth=3)
    handles = [line(color=colour, label=str(n)) for n, colour in enumerate(colours, 1)]
    place = {"loc": "outside right center", "frameon": False, "handlelength": 1.0}
    figure.legend(handles=handles, title="layer", fontsize=9, title_fontsize=9, **place)
    return figure


def _plot_with_band(axes: Any, curve: Curve, colour: str, style: Any) -> None:
    caps = {"dash_capstyle": "round", "solid_capstyle": "round"}
    _plot(axes, curve, color=colour, linestyle=style, linewidth=1.5, **caps)
    if curve.margin is None:
        return
    # The outline of a band is not simplified as lines are: 250 points are as many as one sees.
    few = slice(None, None, max(1, len(curve.epochs) // 250))
    bounds = curve.mean - curve.margin, curve.mean + curve.margin
    low, high = (100 * np.clip(bound[few], 0, 1) for bound in bounds)
    axes.fill_between(curve.epochs[few], low, high, color=colour, alpha=0.16, linewidth=0)
    if len(curve.epochs) == 1:
        axes.vlines(curve.epochs, low, high, color=colour, alpha=0.4, linewidth=1.5)


def _plot(axes: Any, curve: Curve, **style: Any) -> None:
    """Plot a line, or a dot for a single epoch."""
    if len(curve.epochs) == 1:
        style |= {"marker": "o", "markersize": 5, "clip_on": False}
    axes.plot(curve.epochs, 100 * curve.mean, **style)


def _set_limits(axes: Any, curves: Sequence[Curve]) -> None:
    """Fit the axes to the means: the wide bands of few folds would flatten the lines."""
    locator = import_extra("matplotlib.ticker").MaxNLocator
    last = max(len(curve.epochs) for curve in curves)
    axes.set_xlim(*((1, last) if last > 1 else (0, 2)))
    start = int(WARM_UP * last)
    means = np.concatenate([c.mean[start:] for c in curves if len(c.mean) > start])
    low, high = 100 * float(means.min()), 100 * float(means.max())
    margin = max(0.12 * (high - low), 0.5)
    low, high = max(low - margin, 0), min(high + margin, 100)
    ticks = locator(6, steps=TICK_STEPS).tick_values(low, high)
    axes.set_yticks([tick for tick in ticks if low <= tick < high + ticks[1] - ticks[0]])
    axes.set_ylim(low, axes.get_yticks()[-1])
    axes.xaxis.set_major_locator(locator("auto", integer=True, steps=TICK_STEPS))
    if last == 1:
        axes.set_xticks([1])


def _mark_drop(axes: Any, trainings: Sequence[Training]) -> None:
    """Mark where the learning rate drops, if that is the same epoch for all."""
    done = [training for training in trainings if training.is_done]
    drops = {studies.drop_of(training) for training in done}
    if len(drops) != 1 or (drop := drops.pop()) is None:
        return
    axes.axvline(drop + 0.5, color=GREY, linewidth=0.7, linestyle=(0, (4, 3)), zorder=1)
    factor = done[0].curve[drop].learning_rate / done[0].curve[0].learning_rate
    place = {"xy": (drop + 0.5, 0), "xycoords": axes.get_xaxis_transform(), "offset": (-3, 4)}
    annotate(axes, f"learning rate × {factor:.2g}", **place, ha="right", fontsize=8)


def _explain_styles(axes: Any, powers: set[str]) -> None:
    line = partial(import_extra("matplotlib.lines").Line2D, [], [], color=INK, linewidth=1.5)
    shown = [power for power in STYLES if power in powers]
    handles = [line(linestyle=STYLES[power], label=power) for power in shown]
    if handles:
        place = {"loc": "upper right", "bbox_to_anchor": (1.01, -0.09), "borderaxespad": 0}
        look = {"frameon": False, "fontsize": 9, "labelcolor": GREY, "handlelength": 1.8}
        axes.legend(handles=handles, ncols=2, columnspacing=1.4, **place, **look)


def _uneven(lines: Sequence[Sequence[Training]]) -> str:
    """Say which epochs a mean covers, where the folds of a line differ in length."""
    lengths = [sorted(len(training.curve) for training in folds) for folds in lines if folds]
    uneven = sorted({(each[0], each[-1]) for each in lengths if each[0] < each[-1]})
    if not uneven:
        return ""
    shared = ", ".join(f"{least} of {most}" for least, most in uneven[:3])
    return f"folds have not come equally far: means of the epochs that all have ({shared})"


def _described(curves: Sequence[Curve]) -> str:
    most = max(len(curve.repetitions) for curve in curves)
    if most == 1:
        return "validation accuracy in %, one fold"
    mean = "mean and 95 % interval" if most >= FEWEST else "mean"
    return f"validation accuracy in %, {mean} of {counted(*(c.repetitions for c in curves))}"


# The look of figures


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
