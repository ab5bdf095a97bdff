"""The picture of a training: accuracy above, the noise of every layer below, over the epochs."""

from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from softstair.cli._files import reserved
from softstair.train.records import metrics_of

__all__ = ["draw"]


def draw(runs: list[Path], title: str, out: Path) -> Path:
    """Draws the runs, folds of one recipe, into one picture; returns where it lies."""
    metrics = [metrics_of(run) for run in runs]
    epochs = np.arange(1, len(metrics[0]) + 1)
    # A figure of its own, not pyplot's: no window system is asked for, and none is left open.
    figure = Figure(figsize=(8, 6.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    above.set_title(title, fontsize="medium")
    for name, label, colour in (
        ("train_accuracy", "training, with noise", "tab:orange"),
        ("valid_accuracy", "validation, without noise", "tab:blue"),
    ):
        values = np.array([[100 * line[name] for line in lines] for lines in metrics])
        above.plot(epochs, values.mean(0), color=colour, label=label)
        above.fill_between(epochs, values.min(0), values.max(0), color=colour, alpha=0.2, lw=0)
    folds = f", mean and range of {len(runs)} folds" if len(runs) > 1 else ""
    above.set_ylabel(f"accuracy in %{folds}")
    above.legend(loc="lower right")
    above.grid(alpha=0.3)
    layers = len(metrics[0][0].get("noise", ()))
    shades = colormaps["viridis"](np.linspace(0.0, 0.85, max(layers, 1)))
    for layer in range(layers):
        std = [line["noise"][layer][1] for line in metrics[0]]
        below.plot(epochs, std, color=shades[layer], label=f"layer {layer}")
    below.set_ylabel("noise, std in quanta")
    below.set_xlabel("epoch")
    below.grid(alpha=0.3)
    if layers:
        below.legend(loc="upper right", ncols=2 if layers > 5 else 1, fontsize="small")
    with reserved(out, "--out", (".png",), follow=False) as partial:
        assert partial is not None
        figure.savefig(partial, dpi=120)
    return out
