"""Figures, by plotly: the paper's panels, its schedules, final accuracies, and what explains their
variance.

A figure is named after its study and what it shows, such as ``cifar10-static-random``.
"""

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import ceil, isfinite
from typing import Any

import numpy as np

from paper.accuracies import draw_accuracies, draw_variances, freedom_facets, setting_facets
from paper.look import COLOURS, GREY, blank, clean, words
from paper.mean import FEWEST
from paper.studies import (
    DYNAMIC,
    SHARED,
    STATIC,
    Study,
    counted,
    curve_of,
    distinguishing,
    drop_of,
    repetitions_of,
    select,
    studies,
)
from paper.tables import Training
from paper.variance import BLOCKS, explained
from softstair import Schedule
from softstair._errors import import_extra
from softstair.models import DEFAULTS
from softstair.schedule import POWERS, Interval

DASHES = {"homogeneous": "solid", "progressive": "dot", "none": "solid"}
LAYERS = {"vgg8": 7, "dscnn": 9, "digits": 3}
"""Number of quantised layers of each network."""
BY_DEPTH: tuple[Interval, ...] = ("partition", "same_start", "overlapped", "same_end")
"""From the interval that anneals the layers near the input first to the one that does so last."""
WARM_UP = 0.1
"""Fraction of the epochs at the start that may lie below the vertical range."""
MOST_POINTS = 200
"""Points of a line, of which a page has hundreds."""


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

    def trainings(self, study: Study) -> list[Training]:
        """Return those of a study that it shows."""
        if self.noise is None:
            return select(study.trainings, {**STATIC, "forward": self.forward})
        fixed = {**DYNAMIC, "noise": self.noise, "forward": self.forward}
        chosen = select(study.trainings, fixed)
        return [training for training in chosen if training.settings["interval"] != "none"]


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


def figures(trainings: Iterable[Training]) -> dict[str, Callable[[], Any]]:
    """Return functions that draw the figures of these trainings, by name.

    What was varied comes first where it is a setting, or the only degree of freedom; the others are
    in the paper's order.
    """
    varied: dict[str, Callable[[], Any]] = {}
    drawers: dict[str, Callable[[], Any]] = {}
    every = studies(trainings)
    by_title: dict[str, list[Study]] = {}
    for study in every:
        by_title.setdefault(study.title, []).append(study)
    fields = {title: _distinguishing(rivals) for title, rivals in by_title.items()}
    for title, rivals in by_title.items():
        if facets := setting_facets(rivals, fields[title]):
            name = f"{rivals[0].data}-{rivals[0].scale}-final-accuracy-by-setting"
            heading = f"{title}: final accuracy by setting"
            varied[_file_name(name)] = partial(draw_accuracies, heading, facets)
    for study in every:
        settings, names = study.trainings[0].settings, fields[study.title]
        caption = ", ".join([study.title, *(f"{words(name)} {settings[name]}" for name in names)])
        # They show validation accuracy.
        for panel in PANELS if study.is_validated else ():
            # Where studies differ in a setting, a panel with one line says less than that figure.
            shown = panel.trainings(study)
            if shown and (len(by_title[study.title]) == 1 or len(repetitions_of(shown)) > 1):
                drawers[f"{study.name}-{panel.name}"] = partial(draw_panel, study, panel, caption)
        if facets := freedom_facets(study):
            order = varied if len(facets) == 1 else drawers
            heading = f"{caption}: final accuracy by degree of freedom"
            order[f"{study.name}-final-accuracy"] = partial(draw_accuracies, heading, facets)
        shares = [explained(block, study.trainings) for block in BLOCKS.values()]
        if variances := [variance for variance in shares if variance]:
            heading = f"{caption}: what explains the variance of accuracy"
            drawers[f"{study.name}-variance"] = partial(draw_variances, heading, variances)
    for layers in dict.fromkeys(_layers(study) for study in every):
        name = "schedules" if layers == LAYERS["vgg8"] else f"schedules-{layers}-layers"
        drawers[name] = partial(draw_schedules, layers)
    return varied | drawers


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "_.-" else "-" for letter in name)


def _distinguishing(rivals: Sequence[Study]) -> list[str]:
    """Return as few fields of a recipe as tell studies of one title apart."""
    titled = ("epochs", "statistics", "data_version")
    settings = [study.trainings[0].settings for study in rivals]
    return distinguishing(settings, [name for name in SHARED if name not in titled])


def _layers(study: Study) -> int:
    """Return how many layers are annealed; a network of one's own is drawn as VGG8."""
    recipe = study.trainings[0].recipe
    name = (
        DEFAULTS.get(recipe.data.name, "")
        if recipe.network.model == "auto"
        else recipe.network.model
    )
    return LAYERS.get(name, LAYERS["vgg8"])


# Accuracy over the epochs


def draw_panel(study: Study, panel: Panel, caption: str) -> Any:
    """Draw a panel: validation accuracy by epoch, a line for each noise type or decay interval."""
    shown = panel.trainings(study)
    field = "interval" if panel.noise else "noise"
    figure = blank(f"{caption}: {panel.title}")
    # The folds of each line, in the order of the colours, homogeneous first.
    parts = [(value, power) for value in COLOURS[field] for power in DASHES]
    groups = {part: select(shown, {field: part[0], "power": part[1]}) for part in parts}
    groups = {part: folds for part, folds in groups.items() if folds}
    several = len({power for _, power in groups}) > 1
    for (value, power), folds in groups.items():
        name = words(value) + (f", {power}" if several else "")
        figure.add_traces(curve_traces(folds, name, COLOURS[field][value], DASHES[power]))
    if panel.noise:
        # The expectation makes no sense under static noise, and is compared with the mode.
        forward = "mode" if panel.forward == "expectation" else panel.forward
        static = {**STATIC, "noise": panel.noise, "forward": forward}
        if baseline := select(study.trainings, static):
            figure.add_traces(curve_traces(baseline, f"static {forward}", GREY))
    _fit_to_lines(figure)
    _mark_drop(figure, shown)
    counts = counted(*({run.repetition for run in folds} for folds in groups.values()))
    figure.update_xaxes(title=f"epoch ({counts}; bands: 95 % interval, from {FEWEST} runs on)")
    figure.update_yaxes(title="validation accuracy, %")
    return figure


def curve_traces(
    trainings: Sequence[Training],
    name: str,
    colour: str,
    dash: str = "solid",
    metric: str = "valid_accuracy",
    **look: Any,
) -> list[dict[str, Any]]:
    """Return the mean of repetitions over the epochs that all of them have, and its interval."""
    curve, scale = curve_of(trainings, metric), 100 if metric.endswith("accuracy") else 1
    kept = [*range(len(curve.epochs) - 1, -1, -ceil(len(curve.epochs) / MOST_POINTS))][::-1]
    epochs = [int(curve.epochs[at]) for at in kept]
    rounded = lambda values: [
        round(scale * float(values[at]), 4) if isfinite(values[at]) else None for at in kept
    ]
    name, counts = html.escape(clean(name)), counted({run.repetition for run in trainings})
    look = {"type": "scatter", "legendgroup": name, "name": name, **look}
    line = {
        **look,
        "x": epochs,
        "y": rounded(curve.mean),
        "mode": "lines" if len(kept) > 1 else "markers",
        "line": {"color": colour, "dash": dash, "width": 2},
        "hovertemplate": f"{name}, epoch %{{x}}: %{{y:.2f}} ({counts})<extra></extra>",
    }
    if curve.margin is None or len(kept) < 2:
        return [line]
    most = 1.0 if scale == 100 else np.inf
    ends = (curve.mean - curve.margin, curve.mean + curve.margin)
    low, high = (rounded(np.clip(end, 0, most)) for end in ends)
    band = {
        **look,
        "x": [*epochs, *epochs[::-1]],
        "y": [*high, *low[::-1]],
        "mode": "lines",
        "line": {"width": 0},
        "fill": "toself",
        "fillcolor": colour,
        "opacity": 0.15,
        "showlegend": False,
        "hoverinfo": "skip",
    }
    return [line, band]


def _fit_to_lines(figure: Any) -> None:
    """Fit the vertical axis to the means: the wide bands of few folds would flatten the lines."""
    lines = [trace for trace in figure.data if trace.fill is None]
    last = max(trace.x[-1] for trace in lines)
    seen = [
        y for trace in lines for x, y in zip(trace.x, trace.y, strict=True) if x > WARM_UP * last
    ]
    margin = max(0.12 * (max(seen) - min(seen)), 0.5)
    figure.update_yaxes(range=[max(min(seen) - margin, 0), min(max(seen) + margin, 100)])


def _mark_drop(figure: Any, trainings: Sequence[Training]) -> None:
    """Mark where the learning rate drops, if that is the same epoch for all."""
    done = [training for training in trainings if training.is_done]
    drops = {drop_of(training) for training in done}
    if len(drops) == 1 and (drop := drops.pop()) is not None:
        factor = done[0].curve[drop].learning_rate / done[0].curve[0].learning_rate
        note = {"annotation_text": f"learning rate × {factor:.2g}", "annotation_font_color": GREY}
        figure.add_vline(drop + 0.5, line={"color": GREY, "width": 1, "dash": "dash"}, **note)


def draw_schedules(layers: int) -> Any:
    """Draw each layer's std over time, for four decay intervals and two power laws."""
    graph = import_extra("plotly.graph_objects", "paper")
    scale = import_extra("plotly.colors", "paper").sample_colorscale
    colours = scale("Viridis", [0.88 * layer / max(1, layers - 1) for layer in range(layers)])
    places = [*product(POWERS, BY_DEPTH)]
    titles = [f"{words(interval)}, {power}" for power, interval in places]
    shown = "std as a share of its first, from the input to the output"
    figure = blank(f"Each layer's noise over time: {shown}", len(POWERS), len(BY_DEPTH), titles)
    times = np.linspace(0, layers, 40 * layers + 1)
    for number, (power, interval) in enumerate(places):
        schedule = Schedule(layers, period=1, interval=interval, power=power, std0=1.0)
        row, column = divmod(number, len(BY_DEPTH))
        for layer, colour in enumerate(colours):
            line = graph.Scatter(
                x=times,
                y=[schedule(layer, t)[1] for t in times],
                name=f"layer {layer + 1}",
                legendgroup=str(layer),
                showlegend=not number,
                # Widths tell lines that coincide apart: the first layer's is the widest.
                line={"color": colour, "width": 1.2 + 0.4 * (layers - layer)},
            )
            figure.add_trace(line, row=row + 1, col=column + 1)
    figure.update_xaxes(title="time in periods", row=len(POWERS))
    return figure
