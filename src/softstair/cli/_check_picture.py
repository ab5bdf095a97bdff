"""The report of ``softstair check`` as a picture: the noise of each layer, and what it does."""

from pathlib import Path
from typing import Any

from softstair.theory import Examination

__all__ = ["draw"]


def draw(report: Examination, path: Path) -> None:
    """Writes the picture; its format is the path's ending."""
    import matplotlib

    # A figure of its own, not pyplot's: no window system is asked for, and none is left open.
    from matplotlib.figure import Figure

    panels = ["std", "mean", "distance"] if not report.schedule.static_mean else ["std", "distance"]
    figure = Figure(figsize=(9, 1 + 2.4 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    colours = matplotlib.colormaps["viridis"].resampled(report.schedule.layers + 1)
    for axis, panel in zip(axes, panels, strict=True):
        if panel == "distance":
            _distances(axis, report, colours)
        else:
            _noise(axis, report, colours, which=panel)
        axis.grid(alpha=0.25)
    _shade(axes, report)
    axes[-1].set_xlabel("t")
    _legend(figure, axes[0], report)
    figure.suptitle(_title(report), fontsize=10)
    figure.savefig(path, dpi=130)


def _title(report: Examination) -> str:
    schedule, found = report.schedule, report.synchronisation
    order = {"strictly": "in order", "weakly": "in order, weakly", "broken": "out of order"}
    return (
        f"{report.noise.name}, {schedule.interval}, {schedule.power}: layers {order[found.order]}"
    )


def _noise(axis: Any, report: Examination, colours: Any, which: str) -> None:
    schedule = report.schedule
    times = [schedule.end * index / 700 for index in range(701)]
    # Lines that lie on each other are told apart by width: the first layer's is the widest.
    for layer in range(schedule.layers):
        values = [schedule(layer, t)[which == "std"] for t in times]
        width = 1.2 + 3.0 * (schedule.layers - 1 - layer) / max(1, schedule.layers - 1)
        axis.plot(times, values, color=colours(layer), linewidth=width, label=str(layer))
    axis.set_ylabel(f"{which} (quanta)")


def _distances(axis: Any, report: Examination, colours: Any) -> None:
    for layer, values in enumerate(report.distances.values):
        axis.plot(report.distances.times, values, color=colours(layer), marker=".", markersize=4)
    ties = report.distances_at_ties
    for layer, values in enumerate(ties.values):
        axis.plot(ties.times, values, color=colours(layer), linestyle=":", linewidth=1)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("‖soft − hard features‖")
    axis.set_title("random Heaviside networks; dotted: with ties", fontsize=8, loc="right")


def _shade(axes: Any, report: Examination) -> None:
    """Where pairs are out of order, the darker the more of them; the first one by name."""
    if (first := report.synchronisation.first) is None:
        return
    alpha = min(0.05, 0.3 / len(report.synchronisation.breaks))
    for axis in axes:
        for pair in report.synchronisation.breaks:
            axis.axvspan(pair.start, pair.end, color="tab:red", alpha=alpha, linewidth=0)
    axes[0].annotate(
        f"layer {first.later} ahead of layer {first.earlier}, which feeds it",
        (first.start, 0.04),
        xycoords=axes[0].get_xaxis_transform(),
        xytext=(4, 0),
        textcoords="offset points",
        fontsize=8,
        color="tab:red",
    )


def _legend(figure: Any, axis: Any, report: Examination) -> None:
    handles, labels = axis.get_legend_handles_labels()
    # A legend of two hundred layers would be the picture; ten of them tell which way it goes.
    step = max(1, -(-len(handles) // 10))
    figure.legend(handles[::step], labels[::step], title="layer", loc="outside right upper")
