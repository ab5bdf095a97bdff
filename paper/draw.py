"""Draws the pictures in docs/ from softstair's own functions: ``python -m paper.draw``.

``python -m paper.draw stair order`` draws those two alone. The same machine draws the same bytes
every time; ``training`` is a real training on the digits, and takes a minute.
"""

import csv
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import softstair as ss
from paper import load
from paper.theory import distances_on_random_networks
from softstair.schedule import INTERVALS, POWERS

ROOT = Path(__file__).parents[1]
HERE, RESULTS = ROOT / "docs" / "pictures", ROOT / "results"
RATES = ("0.0003", "0.003", "0.01", "0.03", "0.1")
BEGINS = {
    0: "period=6",
    22: "anneal_from=22 period=5",
    30: "anneal_from=30 period=4",
    44: "anneal_from=44 period=2",
    52: "anneal_from=52 period=1",
}
"""Trials of latent rates and of the epoch at which annealing begins."""
INK, SOFT = "#2d3748", "#a0aec0"
FAMILIES = {
    "uniform": "#2b6cb0",
    "triangular": "#dd6b20",
    "normal": "#2f855a",
    "logistic": "#97266d",
}
STYLE = {
    "svg.hashsalt": "softstair",
    "path.simplify_threshold": 0.3,
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "grid.color": "#e2e8f0",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
}
TERNARY = ss.Stair.ternary()


def soft(x: torch.Tensor, family: str, std: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The expectation of the ternary stair under noise, and its derivative by autograd."""
    x = x.clone().requires_grad_()
    y = ss.regularise(x, TERNARY, family, 0.0, std, forward="expectation")
    y.sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def hard(axes: Axes, stair: ss.Stair, low: float, high: float, **how: object) -> None:
    """A stair as it is: treads, dots where a threshold belongs to, and no risers."""
    ends = [low, *stair.thresholds, high]
    for level, (left, right) in zip(stair.levels, pairwise(ends), strict=True):
        axes.plot([left, right], [level, level], solid_capstyle="butt", **how)
    how = {**how, "label": None}
    axes.plot(stair.thresholds, stair.levels[1:], "o", ms=4, **how)


def legend(figure: Figure, axes: Axes) -> None:
    """One legend above all panels."""
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names))


def stair(figure: Figure) -> None:
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    x = torch.linspace(-1.6, 1.6, 401, dtype=torch.float64)
    hard(above, TERNARY, -1.6, 1.6, color=INK, lw=2.4, zorder=3)
    above.annotate("the stair σ", (1.0, 1.0), (1.08, 0.68), color=INK)
    for family, colour in FAMILIES.items():
        std = ss.noise.get(family).std_within(0.5)
        y, slope = soft(x, family, std)
        above.plot(x, y, color=colour, label=f"{family}, std {std:.3f}")
        below.plot(x, slope, color=colour)
    above.legend(loc="upper left", title="expectation under noise", alignment="left")
    above.set_yticks([-1, 0, 1])
    above.set_ylabel("value")
    below.set_ylabel("derivative of\nthe expectation")
    below.set_xlabel("x, in quanta; thresholds at ±½")


def forwards(figure: Figure) -> None:
    panels = figure.subplots(1, 3, sharey=True)
    x = torch.linspace(-1.6, 1.6, 401, dtype=torch.float64)
    std = ss.noise.get("normal").std_within(0.5)
    expected, _ = soft(x, "normal", std)
    few = torch.linspace(-1.6, 1.6, 161, dtype=torch.float64)
    drawn = ss.regularise(
        few, TERNARY, "normal", 0.0, std, "random", torch.Generator().manual_seed(1)
    )
    for axes, name in zip(panels, ("expectation", "mode", "random"), strict=True):
        axes.plot(x, expected, color=SOFT, lw=1.2, zorder=1)
        axes.set_title(name)
        axes.set_yticks([-1, 0, 1])
    panels[0].plot(x, expected, color=FAMILIES["normal"], lw=2.4)
    likeliest = ss.regularise(x, TERNARY, "normal", 0.0, std, "mode")
    for level in TERNARY.levels:
        there = x[likeliest == level]
        panels[1].plot([there[0], there[-1]], [level, level], color=FAMILIES["normal"], lw=2.4)
    panels[2].plot(few, drawn, "o", ms=3.2, mew=0, alpha=0.75, color=FAMILIES["normal"])
    panels[0].set_ylabel("value in the forward pass")
    panels[1].set_xlabel("x, in quanta; normal noise of std 0.255 (grey: its expectation)")


def annealing(figure: Figure) -> None:
    value, slope = figure.subplots(1, 2)
    x = torch.linspace(-1.4, 1.4, 561, dtype=torch.float64)
    first = ss.noise.get("normal").std_within(0.5)
    shades = colormaps["viridis"]([0.85, 0.6, 0.35])
    for share, name, colour in zip(
        (1.0, 0.5, 0.25), ("std0", "½·std0", "¼·std0"), shades, strict=True
    ):
        y, gradient = soft(x, "normal", share * first)
        value.plot(x, y, color=colour, label=name)
        slope.plot(x, gradient, color=colour)
    hard(value, TERNARY, -1.4, 1.4, color=INK, lw=2.4, zorder=3)
    value.plot([], [], color=INK, lw=2.4, label="0: the stair")
    slope.axhline(0, color=INK, lw=2.4, zorder=3)
    value.legend(loc="lower right", title="noise", alignment="left")
    value.set_yticks([-1, 0, 1])
    value.set_title("expectation")
    slope.set_title("its derivative")
    for axes in (value, slope):
        axes.set_xlabel("x, in quanta")
        axes.set_xlim(-1.4, 1.4)


ESTIMATORS = {
    "clipped_relu": FAMILIES["uniform"],
    "hard_sigmoid": FAMILIES["uniform"],
    "piecewise_polynomial": FAMILIES["triangular"],
    "error_function": FAMILIES["normal"],
    "sigmoid": FAMILIES["logistic"],
    "identity": SOFT,
    "relu": SOFT,
}


def estimators(figure: Figure) -> None:
    """What each named estimator lets through at the Heaviside, by autograd."""
    panels = figure.subplots(2, 4, sharex=True, sharey=True).flatten()
    x = torch.linspace(-2.5, 2.5, 161, dtype=torch.float64)
    hard(panels[0], ss.Stair.heaviside(), -2.5, 2.5, color=INK, lw=2.2)
    panels[0].set_title("forward: the Heaviside")
    for axes, (name, colour) in zip(panels[1:], ESTIMATORS.items(), strict=True):
        z = x.clone().requires_grad_()
        getattr(ss.ste, name)()(z, ss.Stair.heaviside()).sum().backward()
        assert z.grad is not None
        axes.fill_between(x, z.grad, color=colour, alpha=0.2, lw=0)
        axes.plot(x, z.grad, color=colour)
        axes.set_title(name)
        axes.set_ylim(-0.06, 1.15)
        axes.set_yticks([0, 0.5, 1])
    figure.supxlabel("x, in quanta", fontsize=10)
    figure.supylabel("derivative in the backward pass", fontsize=10)


def schedules(figure: Figure) -> None:
    layers, period = 5, 10
    panels = figure.subplots(2, 4, sharex=True, sharey=True)
    shades = colormaps["viridis"]([i / layers for i in range(layers)])
    times = [0.25 * i for i in range(4 * layers * period + 1)]
    for row, power in zip(panels, POWERS, strict=True):
        for axes, interval in zip(row, INTERVALS, strict=True):
            path = ss.Schedule(layers, period, interval, power)
            for layer in range(layers):
                std = [path(layer, t)[1] / path.std0 for t in times]
                axes.plot(times, std, color=shades[layer], label=f"layer {layer}")
            axes.set_xticks([period * i for i in range(layers + 1)])
            axes.set_yticks([0, 0.5, 1])
        row[0].set_ylabel(f"{power}\nstd / std0")
    for axes, interval in zip(panels[0], INTERVALS, strict=True):
        axes.set_title(interval)
    figure.supxlabel("t in epochs; 5 layers, period 10", fontsize=10)
    legend(figure, panels[0, 0])


def order(figure: Figure) -> None:
    layers, period = 5, 10
    panels = figure.subplots(1, 2, sharey=True)
    shades = colormaps["viridis"]([i / layers for i in range(layers)])
    for axes, interval in zip(panels, ("partition", "same_end"), strict=True):
        path = ss.Schedule(layers, period, interval)
        times = [0.5 * i for i in range(2 * layers * period + 1)]
        found = distances_on_random_networks(path, "uniform", times=times)
        for layer, values in enumerate(found.values):
            axes.plot(found.times, values, color=shades[layer], label=f"layer {layer}")
        axes.set_title(interval)
        axes.set_xticks([period * i for i in range(layers + 1)])
        axes.set_xlabel("t in epochs")
    panels[0].set_ylabel("distance of soft features\nfrom the hard ones")
    panels[0].set_ylim(bottom=0)
    legend(figure, panels[0])


def beyond(figure: Figure) -> None:
    """The gap of partition, from the page of results, and the accuracy by latent rate and
    by the beginning of annealing, from the trials."""
    gaps, rates, begins = figure.subplots(1, 3)
    page = (ROOT / "paper" / "RESULTS.md").read_text(encoding="utf-8")
    table = page.split("<!-- steps per layer -->")[1].split("<!--")[0]
    rows = [row.strip("| ").split(" | ") for row in table.strip().splitlines()[2:]]
    for data, shade in zip(("Speech", "SVHN", "CIFAR-10"), FAMILIES.values(), strict=False):
        statistics = "fresh" if data == "Speech" else "running"  # running ones fail there
        for kind, column, style, label in (
            (statistics, 5, "o-", data),
            ("running", 7, "o--", None),
        ):
            own = [row for row in rows if row[0].startswith(data) and row[2] == kind]
            steps = [int(row[4].replace(",", "")) for row in own]
            points = [float(row[column].replace("−", "-")) for row in own]
            face = "white" if column == 7 else shade
            gaps.plot(steps, points, style, color=shade, mfc=face, label=label)
    gaps.plot([], [], "o-", color=SOFT, label="validation")
    gaps.plot([], [], "o--", color=SOFT, mfc="white", label="training")
    gaps.set(xscale="log", xlabel="steps per layer", ylabel="partition less static, points")
    gaps.set_xticks([100, 1000, 10000], ["100", "1,000", "10,000"])
    gaps.set_xticks([], minor=True)
    gaps.set_yticks([-20, -10, 0])
    gaps.legend(loc="lower right", ncols=2, columnspacing=1, handlelength=1.6, fontsize=8)
    trials = csv.DictReader((RESULTS / "accuracy-trials.csv").read_text("utf-8").splitlines())
    valid = {trial["options"]: 100 * float(trial["valid_accuracy"]) for trial in trials}
    plain = "cutmix=0 integer_input=false {} init_from=None teacher=None"
    accuracies = [
        valid[f"{plain.format('cutout=0')} norm_rate=1 learning_rate={rate} latent_rate={rate}"]
        for rate in RATES
    ]
    rates.plot([*map(float, RATES)], accuracies, "o-", color=INK)
    rates.set(xscale="log", xlabel="rate in quanta", ylabel="validation, %")
    rates.set_xticks([0.001, 0.01, 0.1], ["0.001", "0.01", "0.1"])
    rates.set_xticks([], minor=True)
    late = f"{plain.format('cutout=8')} static_std=false interval=partition"
    accuracies = [valid[f"{late} {options}"] for options in BEGINS.values()]
    begins.plot([*BEGINS], accuracies, "o-", color=INK)
    begins.set(xlabel="first annealed epoch", xticks=[*BEGINS])
    begins.sharey(rates)
    begins.set(ylim=(76, 89), yticks=[76, 80, 84, 88])
    begins.tick_params(labelleft=False)
    for axes in (gaps, rates, begins):
        axes.grid(visible=False, axis="x")


def same_end(figure: Figure) -> None:
    """Validation accuracy by epoch under same end with each forward, on fold 0; the dotted line is
    the epoch from which no layer has noise, dashed lines are the last accuracy of partition."""
    panels = figure.subplots(1, 2, sharey=True)
    titles = {"cifar10-500": "CIFAR-10", "svhn-100": "SVHN"}
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        table = load(RESULTS / "reproduction" / f"{name}-epochs.parquet")
        for forward, shade in zip(
            ("expectation", "mode", "random"), FAMILIES.values(), strict=False
        ):
            unit, partition = (
                next(
                    unit for unit in table if unit.fold == 0 and unit.configuration == configuration
                )
                for configuration in (
                    f"uniform-{forward}-std-{interval}-homogeneous"
                    for interval in ("same_end", "partition")
                )
            )
            step = len(unit.curve) // 100
            shown = unit.curve[step - 1 :: step]
            accuracies = [100 * (epoch.valid_accuracy or 0) for epoch in shown]
            axes.plot(
                [1 + epoch.epoch for epoch in shown],
                accuracies,
                color=shade,
                label=forward,
                linewidth=1.3,
            )
            level = 100 * (partition.valid_accuracy or 0)
            axes.axhline(level, color=shade, linestyle="--", linewidth=0.9)
        axes.axvline(unit.recipe.noise.period * 7, color=SOFT, linestyle=":")
        axes.set(title=title, xlabel="epoch", xlim=(0, len(unit.curve)), ylim=(0, 100))
    panels[0].set_ylabel("validation, %")
    legend(figure, panels[0])


DRAWINGS: dict[str, tuple[Callable[[Figure], None], tuple[float, float]]] = {
    "stair": (stair, (7.2, 5.6)),
    "forwards": (forwards, (8.4, 2.9)),
    "annealing": (annealing, (8.4, 3.3)),
    "estimators": (estimators, (9.6, 4.2)),
    "schedules": (schedules, (9.6, 4.6)),
    "order": (order, (8.4, 3.7)),
    "beyond": (beyond, (9.6, 2.9)),
    "same_end": (same_end, (8.4, 2.9)),
}


def draw(name: str, folder: Path = HERE) -> Path:
    """Draws one picture into a folder; returns where it lies."""
    make, size = DRAWINGS[name]
    out = folder / f"{name}.svg"
    with rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        make(figure)
        # No date: the same picture is the same file.
        figure.savefig(out, metadata={"Date": None})
    # Two decimals of a coordinate are enough, and make the files smaller.
    text = out.read_text(encoding="utf-8")
    text = re.sub(r'(?<= d=")[^"]+', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)
    out.write_text(text, encoding="utf-8")
    return out


def training(folder: Path = HERE) -> Path:
    """The picture that ``make demo`` ends with."""
    from softstair.cli import main

    # Sums over several threads are rounded in another order on another machine.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        if main(["train", "--every-fold", "--device", "cpu", "--out", f"{place}/run"]):
            raise SystemExit("the training failed.")
        return Path(shutil.copy(f"{place}/run/picture.png", folder / "training.png"))


if __name__ == "__main__":
    asked = sys.argv[1:] or [*DRAWINGS, "training"]
    for one in asked:
        print(training() if one == "training" else draw(one))
