"""Final accuracies as rows of points, and the shares of their variance as bars, by plotly."""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paper.design import FREEDOMS
from paper.look import BLUE, COLOURS, INK, blank, in_order, words
from paper.mean import Mean, mean_of
from paper.studies import Study, counted, repetitions_of, select
from paper.tables import Training
from paper.variance import BLOCKS, FOLDS, Variance, tabled
from softstair._errors import import_extra

FACETS = (
    ("static", "forward"),
    ("static", "noise"),
    ("dynamic", "forward"),
    ("dynamic", "interval"),
    ("dynamic", "power"),
    ("dynamic-expectation", "noise"),
)
"""Block and degree of freedom of each facet of a study."""
MAIN_EFFECT, OTHER_EFFECT = "#4c8cc4", "#a6a6a6"


@dataclass(frozen=True)
class Facet:
    """Trainings by the value of one field, and what they are in words."""

    field: str
    about: str
    values: Mapping[str, Sequence[Training]]
    means: Mapping[str, Mean]
    """Mean of each value over a balanced block; empty where there is none."""


def freedom_facets(study: Study) -> list[Facet]:
    """Return a facet for each degree of freedom that has at least two values in a study."""
    facets = []
    for name, field in FACETS:
        block = BLOCKS[name]
        done = [unit for unit in select(study.trainings, block.fixed) if unit.is_done]
        every = {value: select(done, {field: value}) for value in COLOURS[field]}
        values = {value: trainings for value, trainings in every.items() if trainings}
        if len(values) < 2:
            continue
        about, means = block.about, dict[str, Mean]()
        if (table := tabled(block, study.trainings)) is None:
            about += "; combinations are missing, so there are no means"
        elif field in table.factors:
            axis = list(table.factors).index(field)
            for index, value in enumerate(table.factors[field]):
                accuracies = table.values.take(index, axis)
                means[value] = mean_of(accuracies.reshape(-1, len(table.repetitions)).mean(0))
        facets.append(Facet(field, about, values, means))
    return facets


def setting_facets(studies: Sequence[Study], fields: Sequence[str]) -> list[Facet]:
    """Return a facet for each of the fields that tell studies apart, such as learning rates; and
    for each degree of freedom, if none has a facet in a study."""
    done = [training for study in studies for training in study.trainings if training.is_done]
    if not any(map(freedom_facets, studies)):
        fields = [*fields, *FREEDOMS]
    facets = []
    for field in fields:
        values = in_order(field, dict.fromkeys(training.settings[field] for training in done))
        if len(values) > 1:
            ordered = {value: select(done, {field: value}) for value in values}
            others = [name for name in dict.fromkeys((*FREEDOMS, *fields)) if name != field]
            means, about = _balanced_means(ordered, others)
            facets.append(Facet(field, about, ordered, means))
    return facets


def _balanced_means(
    values: Mapping[str, Sequence[Training]], others: Sequence[str]
) -> tuple[dict[str, Mean], str]:
    """Return the mean of each value over the combinations of other fields, and the repetitions,
    that all of them have; and how many those are."""
    tables = {
        value: {
            (tuple(unit.settings[name] for name in others), unit.repetition): unit.accuracy
            for unit in trainings
        }
        for value, trainings in values.items()
    }
    shared = set.intersection(*(set(table) for table in tables.values()))
    cells = {cell for cell, _ in shared}
    runs = [r for r in sorted({r for _, r in shared}) if all((c, r) in shared for c in cells)]
    if not runs:
        return {}, "no combination of the others has all of these, so there are no means"
    means = {
        value: mean_of(float(np.mean([table[cell, run] for cell in cells])) for run in runs)
        for value, table in tables.items()
    }
    plural = "" if len(cells) == 1 else "s"
    return means, f"{len(cells)} combination{plural} of the others, {counted(runs)}"


def draw_accuracies(heading: str, facets: Sequence[Facet]) -> Any:
    """Draw a small point for each configuration, and a large one for the mean of each value."""
    titles = [f"<b>{words(facet.field)}</b>: {facet.about}" for facet in facets]
    figure = blank(heading, len(facets), 1, titles, [len(facet.values) for facet in facets])
    for row, facet in enumerate(facets, 1):
        for value, trainings in facet.values.items():
            colour, label = COLOURS.get(facet.field, {}).get(value, BLUE), words(value)
            done = [(each.name, each.accuracy) for each in repetitions_of(trainings)]
            known = {name: 100 * mean.value for name, mean in done if mean}
            dots = {"size": 6, "color": colour, "opacity": 0.45}
            _add_points(figure, row, known.values(), label, dots, [*map(html.escape, known)])
            if mean := facet.means.get(value):
                dots = {"size": 11, "color": colour, "line": {"color": INK, "width": 1}}
                _add_points(figure, row, [100 * mean.value], label, dots, [str(mean)], mean.margin)
        figure.update_yaxes(autorange="reversed", type="category", row=row)
    is_tested = next(iter(facets[0].values.values()))[0].fold == "all"
    how = "small: a configuration; large: their mean, with its 95 % interval (from three runs on)"
    kind = "test" if is_tested else "validation"
    figure.update_xaxes(title=f"{kind} accuracy in the end, %; {how}", row=len(facets))
    return figure


def _add_points(
    figure: Any,
    row: int,
    values: Iterable[float],
    label: str,
    marker: Mapping[str, Any],
    texts: Sequence[str],
    margin: float | None = None,
) -> None:
    """Add points to a row of a category; texts are shown by the mouse."""
    graph, x = import_extra("plotly.graph_objects", "paper"), [*values]
    bar = None if margin is None else {"array": [100 * margin], "color": INK}
    look = {"mode": "markers", "marker": marker, "showlegend": False, "error_x": bar}
    shown = {"text": texts, "hovertemplate": "%{text}: %{x:.2f} %<extra></extra>"}
    figure.add_trace(graph.Scatter(x=x, y=[label] * len(x), **look, **shown), row=row, col=1)


def draw_variances(heading: str, variances: Sequence[Variance]) -> Any:
    """Draw the share of each term as a bar, with its interval."""
    graph = import_extra("plotly.graph_objects", "paper")
    titles = []
    for variance in variances:
        cells, rest = variance.table.values[..., 0].size, variance.shares[-1]
        left = f"{100 * rest.eta:.1f} % is none of these" if rest.freedom else "no rest, so η²"
        spread = f"their std is {100 * variance.std:.1f} points; {left}"
        count = f"{cells} combinations on {counted(variance.table.repetitions)}"
        factors = " × ".join(map(words, variance.table.factors))
        titles.append(f"<b>{factors}</b>, {variance.block.about}<br>{count}; {spread}")
    figure = blank(heading, len(variances), 1, titles, [len(v.shares) for v in variances])
    for row, variance in enumerate(variances, 1):
        size = lambda share: share.eta if share.omega is None else share.omega
        ordered = sorted(variance.shares[:-1], key=size)
        values = np.array([size(share) for share in ordered])
        ends = np.array([[share.low or 0.0, share.high or 0.0] for share in ordered])
        is_main = [len(share.term) == 1 and share.term != (FOLDS,) for share in ordered]
        bars = graph.Bar(
            x=100 * values,
            y=[" × ".join(map(words, share.term)) for share in ordered],
            orientation="h",
            marker={"color": [MAIN_EFFECT if main else OTHER_EFFECT for main in is_main]},
            text=[str(share) for share in ordered],
            textposition="outside",
            cliponaxis=False,
            showlegend=False,
            error_x={
                "array": 100 * (ends[:, 1] - values).clip(0),
                "arrayminus": 100 * (values - ends[:, 0]).clip(0),
                "symmetric": False,
                "color": INK,
                "visible": variance.shares[-1].freedom > 0,
            },
        )
        figure.add_trace(bars, row=row, col=1)
    about = "share of the variance of final accuracy, % (ω²; lines: 95 % interval)"
    figure.update_xaxes(range=[0, 125])
    figure.update_xaxes(title=about, row=len(variances))
    return figure
