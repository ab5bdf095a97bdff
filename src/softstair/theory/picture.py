"""A picture of an :class:`Examination <softstair.theory.Examination>`, by matplotlib."""

from pathlib import Path
from typing import Any

from softstair._errors import import_extra
from softstair.theory.examine import Examination

__all__ = ["draw"]


def draw(examination: Examination, path: Path) -> None:
    """Draw the noise of each layer and the distances over time.

    Args:
        examination: What :func:`softstair.theory.examine` returned.
        path: File to write; its ending is the format.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    matplotlib = import_extra("matplotlib")
    # Not by pyplot, which would ask for a window system.
    figures = import_extra("matplotlib.figure")
    static_mean = examination.schedule.static_mean
    panels = ["std", "distance"] if static_mean else ["std", "mean", "distance"]
    figure = figures.Figure(figsize=(9, 1 + 2.4 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    colours = matplotlib.colormaps["viridis"].resampled(examination.schedule.layers + 1)
    for axis, panel in zip(axes, panels, strict=True):
        if panel == "distance":
            _draw_distances(axis, examination, colours)
        else:
            _draw_noise(axis, examination, colours, panel)
        axis.grid(alpha=0.25)
    _shade_breaks(axes, examination)
    axes[-1].set_xlabel("t")
    handles, labels = axes[0].get_legend_handles_labels()
    step = max(1, -(-len(handles) // 10))  # at most ten layers in the legend
    figure.legend(handles[::step], labels[::step], title="layer", loc="outside right upper")
    figure.suptitle(_title(examination), fontsize=10)
    figure.savefig(path, dpi=130)


def _title(examination: Examination) -> str:
    schedule, family = examination.schedule, examination.noise.name
    order = {"strictly": "in order", "weakly": "in order, weakly", "broken": "out of order"}
    layers = order[examination.synchronisation.order]
    return f"{family}, {schedule.interval}, {schedule.power}: layers {layers}"


def _draw_noise(axis: Any, examination: Examination, colours: Any, panel: str) -> None:
    schedule = examination.schedule
    times = [schedule.end * index / 700 for index in range(701)]
    for layer in range(schedule.layers):
        values = [schedule(layer, t)[panel == "std"] for t in times]
        # Lines that coincide differ in width: the line of the first layer is the widest.
        width = 1.2 + 3.0 * (schedule.layers - 1 - layer) / max(1, schedule.layers - 1)
        axis.plot(times, values, color=colours(layer), linewidth=width, label=str(layer))
    axis.set_ylabel(f"{panel} (quanta)")


def _draw_distances(axis: Any, examination: Examination, colours: Any) -> None:
    for layer, values in enumerate(examination.distances.values):
        times = examination.distances.times
        axis.plot(times, values, color=colours(layer), marker=".", markersize=4)
    for layer, values in enumerate(examination.distances_at_ties.values):
        times = examination.distances_at_ties.times
        axis.plot(times, values, color=colours(layer), linestyle=":", linewidth=1)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("‖soft − hard features‖")
    axis.set_title("random Heaviside networks; dotted: with ties", fontsize=8, loc="right")


def _shade_breaks(axes: Any, examination: Examination) -> None:
    """Shade the times at which layers are out of order, and name the first pair."""
    order = examination.synchronisation
    if order.first is None:
        return
    alpha = min(0.05, 0.3 / len(order.breaks))
    for axis in axes:
        for pair in order.breaks:
            axis.axvspan(pair.start, pair.end, color="tab:red", alpha=alpha, linewidth=0)
    axes[0].annotate(
        f"layer {order.first.later} ahead of layer {order.first.earlier}, which feeds it",
        (order.first.start, 0.04),
        xycoords=axes[0].get_xaxis_transform(),
        xytext=(4, 0),
        textcoords="offset points",
        fontsize=8,
        color="tab:red",
    )
