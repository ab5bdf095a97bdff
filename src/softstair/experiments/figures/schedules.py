"""The noise schedules: each layer's std over time, for four decay intervals and two power laws."""

from typing import Any

import numpy as np

from softstair._errors import import_extra
from softstair.experiments.figures.style import GREY, INK, blank, clean, words
from softstair.schedule import INTERVALS, POWERS, Interval, Schedule

__all__ = ["LAYERS", "schedules"]

LAYERS = {"vgg8": 7, "dscnn": 9, "digits": 3}
"""How many layers of each network are quantised."""
ORDER: tuple[Interval, ...] = ("partition", "same_start", "overlapped", "same_end")
"""From the schedule that anneals the input side first to the one that does it last."""


def schedules(layers: int) -> Any:
    """The figure, for a network of so many quantised layers; time is in periods of one layer."""
    figure = blank(8.4, 3.7)
    grid = figure.subplots(len(POWERS), len(INTERVALS), sharex=True, sharey=True)
    times = np.linspace(0, layers, 40 * layers + 1)
    colours = import_extra("matplotlib").colormaps["viridis"](np.linspace(0, 0.88, layers))
    for row, power in zip(grid, POWERS, strict=True):
        for axes, interval in zip(row, ORDER, strict=True):
            schedule = Schedule(layers, period=1, interval=interval, power=power, std0=1.0)
            # Lines that lie on each other are told apart by width: the first layer's is the widest.
            for layer, colour in enumerate(colours):
                values = [schedule(layer, t)[1] for t in times]
                width = 1.2 + 2.4 * (layers - 1 - layer) / max(1, layers - 1)
                axes.plot(times, values, color=colour, linewidth=width)
            clean(axes)
            axes.set(xlim=(0, layers), ylim=(0, 1.04), xticks=range(layers + 1), yticks=(0, 0.5, 1))
        row[0].set_ylabel(power, fontsize=9, color=INK)
    for axes, interval in zip(grid[0], ORDER, strict=True):
        axes.set_title(words(interval), loc="left", fontsize=9, color=INK)
    for axes in grid[-1]:
        axes.set_xlabel("time in periods", fontsize=9, color=GREY)
    title = (
        "Each layer's noise over time: std as a share of its first, from the input to the output"
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK)
    _key(figure, grid, layers, colours)
    return figure


def _key(figure: Any, grid: Any, layers: int, colours: Any) -> None:
    """Which colour is which layer."""
    line = import_extra("matplotlib.lines").Line2D
    handles = [line([], [], color=colours[n], linewidth=3, label=str(n + 1)) for n in range(layers)]
    figure.legend(
        handles=handles,
        title="layer",
        loc="outside right center",
        frameon=False,
        fontsize=9,
        title_fontsize=9,
        handlelength=1.0,
    )
