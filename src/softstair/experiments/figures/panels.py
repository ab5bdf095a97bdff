"""Line plots: accuracy over the epochs as in the paper's panels, and the noise schedules."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from softstair._errors import import_extra
from softstair.experiments.figures.style import (
    COLOURS,
    GREY,
    INK,
    annotate,
    blank,
    clean,
    label_ends,
    note,
    title,
    words,
)
from softstair.experiments.results import Training
from softstair.experiments.studies import (
    DYNAMIC,
    FEWEST,
    STATIC,
    Curve,
    Study,
    curve_of,
    drop_of,
    select,
)
from softstair.schedule import POWERS, Interval, Schedule

__all__ = ["PANELS", "Panel", "draw_panel", "draw_schedules", "trainings_of"]

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


PANELS: tuple[Panel, ...] = (
    Panel("random"),
    Panel("mode"),
    *(Panel("expectation", noise) for noise in COLOURS["noise"]),
    Panel("random", "uniform"),
    Panel("mode", "uniform"),
)
"""The paper's panels of CIFAR-10, in its order."""


def trainings_of(study: Study, panel: Panel) -> list[Training]:
    if panel.noise is None:
        return select(study.trainings, {**STATIC, "forward": panel.forward})
    fixed = {**DYNAMIC, "noise": panel.noise, "forward": panel.forward}
    chosen = select(study.trainings, fixed)
    return [training for training in chosen if training.settings["interval"] != "none"]


def draw_panel(study: Study, panel: Panel, caption: str = "") -> Any:
    """Draw a panel; ``caption`` tells its study from others of the same title."""
    figure = blank(5.6, 3.5)
    axes = figure.subplots()
    shown = trainings_of(study, panel)
    baseline = _baseline(study, panel)
    field = "interval" if panel.noise else "noise"
    groups = _grouped(shown, field)
    curves: list[Curve] = []
    ends: dict[str, tuple[float, str, str]] = {}
    if baseline:
        curves.append(curve_of(baseline))
        _plot(axes, curves[0], color=GREY, linewidth=0.8, zorder=1.5)
        label = f"static {baseline[0].settings['forward']}"
        ends[label] = (100 * curves[0].mean[-1], label, GREY)
    for (value, power), folds in groups.items():
        colour, label = COLOURS[field][value], words(value)
        curves.append(curve_of(folds))
        _plot_with_band(axes, curves[-1], colour, STYLES.get(power, "-"))
        ends.setdefault(label, (100 * curves[-1].mean[-1], label, colour))
    clean(axes)
    _set_limits(axes, curves)
    note(axes, "epoch")
    _mark_drop(axes, shown)
    _explain_styles(axes, {power for _, power in groups})
    label_ends(axes, list(ends.values()))
    below = [caption, _described(curves), _uneven([baseline, *groups.values()])]
    _set_heading(axes, f"{study.title.split(',')[0]}: {panel.title}", list(filter(None, below)))
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


def _baseline(study: Study, panel: Panel) -> list[Training]:
    """Return static noise to compare with: the same forward, or mode where that is expectation,
    which makes no sense under static noise."""
    if panel.noise is None:
        return []
    forward = "mode" if panel.forward == "expectation" else panel.forward
    return select(study.trainings, {**STATIC, "noise": panel.noise, "forward": forward})


def _grouped(trainings: Sequence[Training], field: str) -> dict[tuple[str, str], list[Training]]:
    """Return the folds of each line, in the order of the colours: homogeneous first."""
    lines = [(value, power) for value in COLOURS[field] for power in (*STYLES, "none")]
    groups = {line: select(trainings, {field: line[0], "power": line[1]}) for line in lines}
    return {line: folds for line, folds in groups.items() if folds}


def _plot_with_band(axes: Any, curve: Curve, colour: str, style: Any) -> None:
    caps = {"dash_capstyle": "round", "solid_capstyle": "round"}
    _plot(axes, curve, color=colour, linestyle=style, linewidth=1.5, **caps)
    if curve.low is None or curve.high is None:
        return
    # The outline of a band is not simplified as lines are: 250 points are as many as one sees.
    few = slice(None, None, max(1, len(curve.epochs) // 250))
    low, high = (100 * np.clip(bound[few], 0, 1) for bound in (curve.low, curve.high))
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
    drops = {drop_of(training) for training in done}
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


def _set_heading(axes: Any, heading: str, below: Sequence[str]) -> None:
    """Set a title, and in grey what is shown, in place of a label of the vertical axis."""
    text = heading + "\n" * len(below)
    axes.set_title(text, loc="left", fontsize=11, fontweight="bold", color=INK)
    annotate(axes, "\n".join(below), (0, 1), "axes fraction", (0, 6))


def _uneven(lines: Sequence[Sequence[Training]]) -> str:
    """Say which epochs a mean covers, where the folds of a line differ in length."""
    lengths = [sorted(len(training.curve) for training in folds) for folds in lines if folds]
    uneven = sorted({(each[0], each[-1]) for each in lengths if each[0] < each[-1]})
    if not uneven:
        return ""
    shared = ", ".join(f"{least} of {most}" for least, most in uneven[:3])
    return f"folds have not come equally far: means of the epochs that all have ({shared})"


def _described(curves: Sequence[Curve]) -> str:
    counts = sorted({len(curve.folds) for curve in curves})
    if counts == [1]:
        return "validation accuracy in %, one fold"
    folds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    mean = "mean and 95 % interval" if counts[-1] >= FEWEST else "mean"
    return f"validation accuracy in %, {mean} of {folds} folds"
