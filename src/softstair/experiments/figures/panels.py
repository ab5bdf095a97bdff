"""The paper's panels: accuracy over the epochs, a line for each noise type or each schedule."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from softstair._errors import import_extra
from softstair.experiments.figures.style import (
    COLOURS,
    GREY,
    INK,
    blank,
    clean,
    heading,
    label_ends,
    words,
)
from softstair.experiments.results import Training
from softstair.experiments.statistics import FEWEST, Curve, curve_of, drop_of
from softstair.experiments.studies import DYNAMIC, STATIC, Study, select

__all__ = ["PANELS", "Panel", "panel", "trainings_of"]

STYLES: dict[str, Any] = {"homogeneous": "-", "progressive": (0, (1.1, 1.3))}
STEPS = [1, 2, 5, 10]
SKIPPED = 0.1
"""The first share of the epochs, in which all curves come up from chance: it may lie below."""


@dataclass(frozen=True)
class Panel:
    """One of the paper's plots; ``noise`` is None where the noise is static and all are shown."""

    forward: str
    noise: str | None = None

    @property
    def name(self) -> str:
        """Such as dynamic-expectation-uniform."""
        return (
            f"static-{self.forward}" if not self.noise else f"dynamic-{self.forward}-{self.noise}"
        )

    @property
    def title(self) -> str:
        """Such as "dynamic uniform noise, expectation"."""
        return f"{f'dynamic {self.noise}' if self.noise else 'static'} noise, {self.forward}"


_NOISES = tuple(COLOURS["noise"])
PANELS: tuple[Panel, ...] = (
    Panel("random"),
    Panel("mode"),
    *(Panel("expectation", noise) for noise in _NOISES),
    Panel("random", "uniform"),
    Panel("mode", "uniform"),
)
"""Those of the paper, in its order; CIFAR-10 has all of them."""


def trainings_of(study: Study, panel: Panel) -> list[Training]:
    """What a panel shows."""
    fixed = {**DYNAMIC, "noise": panel.noise} if panel.noise else STATIC
    found = select(study.trainings, {**fixed, "forward": panel.forward})
    return [one for one in found if panel.noise is None or one.settings["interval"] != "none"]


def panel(study: Study, which: Panel, said: str = "") -> Any:
    """The figure of a panel; ``said`` is what tells its study from others, if any is like it."""
    figure = blank(5.6, 3.5)
    axes = figure.subplots()
    shown = trainings_of(study, which)
    baseline = _baseline(study, which)
    groups = _grouped(shown, "interval" if which.noise else "noise")
    curves: list[Curve] = []
    ends: list[tuple[float, str, str]] = []
    if baseline:
        curve = curve_of(baseline)
        _plot(axes, curve, color=GREY, linewidth=0.8, zorder=1.5)
        ends.append((100 * curve.mean[-1], f"static {baseline[0].settings['forward']}", GREY))
        curves.append(curve)
    for (value, power), folds in groups.items():
        colour = COLOURS["interval" if which.noise else "noise"][value]
        curve = curve_of(folds)
        _line(axes, curve, colour, STYLES.get(power, "-"))
        curves.append(curve)
        if not any(text == words(value) for _, text, _ in ends):
            ends.append((100 * curve.mean[-1], words(value), colour))
    clean(axes)
    _limits(axes, curves)
    axes.set_xlabel("epoch", fontsize=9, color=GREY, loc="left")
    _mark_drop(axes, shown)
    _explain_styles(axes, {power for _, power in groups})
    label_ends(axes, ends)
    below = [*filter(None, [said]), _below(curves), *_uneven([baseline, *groups.values()])]
    heading(axes, f"{study.title.split(',')[0]}: {which.title}", "\n".join(below))
    return figure


def _baseline(study: Study, which: Panel) -> list[Training]:
    """The folds of static noise to compare with: of the same forward, or of mode where a static
    expectation makes no sense."""
    if which.noise is None:
        return []
    forward = "mode" if which.forward == "expectation" else which.forward
    return select(study.trainings, {**STATIC, "noise": which.noise, "forward": forward})


def _grouped(trainings: Sequence[Training], name: str) -> dict[tuple[str, str], list[Training]]:
    """The folds of each line, in the order of the colours: homogeneous before progressive."""
    found: dict[tuple[str, str], list[Training]] = {}
    for value in COLOURS[name]:
        for power in (*STYLES, "none"):
            folds = select(trainings, {name: value, "power": power})
            if folds:
                found[value, power] = folds
    return found


def _line(axes: Any, curve: Curve, colour: str, style: Any) -> None:
    _plot(
        axes,
        curve,
        color=colour,
        linestyle=style,
        linewidth=1.5,
        dash_capstyle="round",
        solid_capstyle="round",
    )
    if curve.low is not None and curve.high is not None:
        # A band's outline is not simplified as lines are, and 250 points are as many as one sees.
        few = slice(None, None, max(1, len(curve.epochs) // 250))
        low, high = (100 * np.clip(one[few], 0, 1) for one in (curve.low, curve.high))
        axes.fill_between(curve.epochs[few], low, high, color=colour, alpha=0.16, linewidth=0)
        if len(curve.epochs) == 1:
            axes.vlines(curve.epochs, low, high, color=colour, alpha=0.4, linewidth=1.5)


def _plot(axes: Any, curve: Curve, **style: Any) -> None:
    """A line; of a single epoch, a dot."""
    if len(curve.epochs) == 1:
        style |= {"marker": "o", "markersize": 5, "clip_on": False}
    axes.plot(curve.epochs, 100 * curve.mean, **style)


def _limits(axes: Any, curves: Sequence[Curve]) -> None:
    last = max(len(curve.epochs) for curve in curves)
    axes.set_xlim(*((1, last) if last > 1 else (0, 2)))
    start = int(SKIPPED * last)
    lines = np.concatenate([one.mean[start:] for one in curves if len(one.mean) > start])
    low, high = 100 * float(lines.min()), 100 * float(lines.max())
    # Bands widen the view, but the wide ones of two or three folds do not flatten the lines.
    air = max(0.12 * (high - low), 0.5)
    low, high = max(low - air, 0), min(high + air, 100)
    ticks = import_extra("matplotlib.ticker").MaxNLocator(6, steps=STEPS).tick_values(low, high)
    axes.set_yticks([one for one in ticks if low <= one < high + ticks[1] - ticks[0]])
    axes.set_ylim(low, axes.get_yticks()[-1])
    axes.xaxis.set_major_locator(
        import_extra("matplotlib.ticker").MaxNLocator("auto", integer=True, steps=STEPS)
    )
    if last == 1:
        axes.set_xticks([1])


def _mark_drop(axes: Any, trainings: Sequence[Training]) -> None:
    """Where the learning rate becomes lower, if it does at one place."""
    drops = {drop_of(one) for one in trainings if one.is_done}
    if len(drops) != 1 or (drop := drops.pop()) is None:
        return
    axes.axvline(drop + 0.5, color=GREY, linewidth=0.7, linestyle=(0, (4, 3)), zorder=1)
    one = next(one for one in trainings if one.is_done).curve
    axes.annotate(
        f"learning rate × {one[drop].learning_rate / one[0].learning_rate:.2g}",
        (drop + 0.5, 0),
        xycoords=axes.get_xaxis_transform(),
        xytext=(-3, 4),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=GREY,
    )


def _explain_styles(axes: Any, powers: set[str]) -> None:
    line = import_extra("matplotlib.lines").Line2D
    handles = [
        line([], [], color=INK, linestyle=style, linewidth=1.5, label=power)
        for power, style in STYLES.items()
        if power in powers
    ]
    if handles:
        axes.legend(
            handles=handles,
            loc="upper right",
            bbox_to_anchor=(1.01, -0.09),
            ncols=2,
            frameon=False,
            fontsize=9,
            labelcolor=GREY,
            handlelength=1.8,
            columnspacing=1.4,
            borderaxespad=0,
        )


def _uneven(lines: Sequence[Sequence[Training]]) -> list[str]:
    """How far a mean goes, where the folds of a line have not come equally far."""
    found = {
        (min(lengths), max(lengths))
        for folds in lines
        if (lengths := [len(one.curve) for one in folds]) and min(lengths) < max(lengths)
    }
    if not found:
        return []
    shared = ", ".join(f"{least} of {most}" for least, most in sorted(found)[:3])
    return [f"folds have not come equally far: means of the epochs that all have ({shared})"]


def _below(curves: Sequence[Curve]) -> str:
    counts = sorted({len(one.folds) for one in curves})
    if counts == [1]:
        return "validation accuracy in %, one fold"
    folds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    what = "mean and 95 % interval" if counts[-1] >= FEWEST else "mean"
    return f"validation accuracy in %, {what} of {folds} folds"
