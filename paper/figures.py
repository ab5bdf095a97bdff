"""Figures: the paper's panels, its schedules, final accuracies, and what explains their variance.

A figure is named after its study and what it shows, such as ``cifar10-static-random``.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from paper import panels
from paper.design import FREEDOMS
from paper.mean import Mean, mean_of
from paper.panels import PANELS
from paper.studies import (
    SHARED,
    Study,
    counted,
    distinguishing,
    repetitions_of,
    select,
    studies,
)
from paper.tables import Training
from paper.variance import BLOCKS, FOLDS, Share, Variance, explained, tabled
from softstair._errors import import_extra
from softstair.models import DEFAULTS

LAYERS = {"vgg8": 7, "dscnn": 9, "digits": 3}
"""Number of quantised layers of each network."""
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
TITLE_WIDTH = 74
"""Characters that fit into one line of a title."""


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
            varied[re.sub(r"[^\w.]+", "-", name)] = partial(draw_accuracies, heading, facets)
    for study in every:
        is_only = len(by_title[study.title]) == 1
        settings, names = study.trainings[0].settings, fields[study.title]
        caption = ", ".join(f"{panels.words(name)} {settings[name]}" for name in names)
        scales = {other.scale for other in every if other.data == study.data}
        full_caption = ", ".join(filter(None, [study.scale if len(scales) > 1 else "", caption]))
        # They show validation accuracy.
        for panel in PANELS if study.is_validated else ():
            # Where studies differ in a setting, a panel with one line says less than that figure.
            shown = panels.trainings_of(study, panel)
            if shown and (is_only or len(repetitions_of(shown)) > 1):
                name = f"{study.name}-{panel.name}"
                drawers[name] = partial(panels.draw_panel, study, panel, full_caption)
        if facets := freedom_facets(study):
            heading = f"{study.title}: final accuracy by degree of freedom"
            name = f"{study.name}-final-accuracy"
            order = varied if len(facets) == 1 else drawers
            order[name] = partial(draw_accuracies, heading, facets, caption)
        shares = [explained(block, study.trainings) for block in BLOCKS.values()]
        if variances := [variance for variance in shares if variance]:
            heading = f"{study.title}: what explains the variance of accuracy"
            drawers[f"{study.name}-variance"] = partial(draw_variances, heading, variances, caption)
    for layers in dict.fromkeys(_layers(study) for study in every):
        name = "schedules" if layers == LAYERS["vgg8"] else f"schedules-{layers}-layers"
        drawers[name] = partial(panels.draw_schedules, layers)
    return varied | drawers


def drawings(trainings: Iterable[Training]) -> dict[str, str]:
    """Return every figure as the text of an SVG."""
    return {name: rendered(make()) for name, make in figures(trainings).items()}


def rendered(figure: Any) -> str:
    """Return a figure as an SVG, the same text every time: no date and no random number."""
    file = io.StringIO()
    with (
        import_extra("matplotlib").rc_context({"svg.hashsalt": "softstair"}),
        warnings.catch_warnings(),
    ):
        # A figure of very few points may have no room to lay out: it is drawn all the same.
        warnings.filterwarnings("ignore", "constrained_layout not applied", UserWarning)
        figure.savefig(file, format="svg", metadata={"Date": None})
    # Paths in hundredths of a point take half the space, and look the same.
    shorter = lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0])
    return re.sub(r' d="[^"]*"', shorter, file.getvalue())


def _distinguishing(rivals: Sequence[Study]) -> list[str]:
    """Return as few fields of a recipe as tell studies of one title apart."""
    titled = ("epochs", "statistics", "data_version")
    settings = [study.trainings[0].settings for study in rivals]
    return distinguishing(settings, [name for name in SHARED if name not in titled])


def _layers(study: Study) -> int:
    """Return how many layers are annealed; a network of one's own is drawn as VGG8."""
    recipe = study.trainings[0].recipe
    name = DEFAULTS.get(recipe.data, "") if recipe.model == "auto" else recipe.model
    return LAYERS.get(name, LAYERS["vgg8"])


# Final accuracies as rows of points, and the shares of their variance as bars


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
        every = {value: select(done, {field: value}) for value in panels.COLOURS[field]}
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
        values = panels.in_order(
            field, dict.fromkeys(training.settings[field] for training in done)
        )
        if len(values) > 1:
            ordered = {value: select(done, {field: value}) for value in values}
            others = [name for name in dict.fromkeys((*FREEDOMS, *fields)) if name != field]
            means, about = _balanced_means(ordered, others)
            facets.append(Facet(field, about, ordered, means))
    return facets


def draw_accuracies(heading: str, facets: Sequence[Facet], caption: str = "") -> Any:
    """Draw a small point for each configuration, and a large one for the mean of each value."""
    rows = [len(facet.values) for facet in facets]
    height = 1.1 + sum(0.27 * count + 0.42 for count in rows)
    figure, grid = _stacked(heading, caption, rows, height)
    for axes, facet in zip(grid, facets, strict=True):
        for row, (value, trainings) in enumerate(facet.values.items()):
            colour = panels.COLOURS.get(facet.field, {}).get(value, panels.BLUE)
            _draw_points(axes, row, trainings, colour)
            if value in facet.means:
                _draw_mean(axes, row, facet.means[value], colour)
        _label_rows(axes, [panels.words(value) for value in facet.values])
        _subtitle(axes, panels.words(facet.field), facet.about)
    is_tested = next(iter(facets[0].values.values()))[0].fold == "all"
    low, high = grid[-1].get_xlim()
    grid[-1].set_xlim(max(low, 0), min(high, 100))
    panels.note(
        grid[-1],
        f"{'test' if is_tested else 'validation'} accuracy in the end, in %\n"
        "small: a configuration; large: their mean, with its 95 % interval (from three runs on)",
    )
    return figure


def draw_variances(heading: str, variances: Sequence[Variance], caption: str = "") -> Any:
    rows = [len(variance.shares) for variance in variances]
    height = 0.9 + sum(0.24 * count + 0.66 for count in rows)
    figure, grid = _stacked(heading, caption, rows, height)
    for axes, variance in zip(grid, variances, strict=True):
        _draw_bars(axes, variance)
    panels.note(
        grid[-1], "share of the variance of final accuracy, in % (ω²; lines: 95 % interval)"
    )
    return figure


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


def _stacked(heading: str, caption: str, rows: Sequence[int], height: float) -> tuple[Any, Any]:
    """Return a figure and its axes, one above the other, each with so many rows."""
    figure = panels.blank(7.0, height)
    first = heading if len(heading) <= TITLE_WIDTH else heading.replace(": ", ":\n", 1)
    panels.title(figure, "\n".join(filter(None, [first, caption])))
    grid = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=rows)
    return figure, grid[:, 0]


def _draw_points(axes: Any, row: int, trainings: Sequence[Training], colour: str) -> None:
    means = [each.accuracy for each in repetitions_of(trainings)]
    accuracies = [100 * mean.value for mean in means if mean]
    # The generator is seeded, so that a figure has the same bytes every time.
    heights = row + np.random.default_rng(0).uniform(-0.24, 0.24, len(accuracies))
    axes.scatter(accuracies, heights, s=15, color=colour, alpha=0.45, linewidth=0, clip_on=False)


def _draw_mean(axes: Any, row: int, mean: Mean, colour: str) -> None:
    if mean.margin is not None:
        _draw_interval(axes, row, *mean.bounds)
    place = [100 * mean.value], [row]
    axes.scatter(*place, s=44, color=colour, edgecolor=panels.INK, zorder=3, clip_on=False)
    _write_beside(axes, row, str(mean))


def _draw_interval(axes: Any, row: int, low: float | None, high: float | None) -> None:
    if low is not None and high is not None:
        ends = (100 * max(low, 0), 100 * min(high, 1))
        axes.plot(
            ends, (row, row), color=panels.INK, linewidth=1.3, solid_capstyle="butt", zorder=2.5
        )


def _write_beside(axes: Any, row: int, text: str) -> None:
    style = {"va": "center_baseline", "color": panels.INK, "annotation_clip": False}
    panels.annotate(axes, text, (1, row), ("axes fraction", "data"), (8, 0), **style)


def _draw_bars(axes: Any, variance: Variance) -> None:
    size = lambda share: share.eta if share.omega is None else share.omega
    ordered: list[Share] = sorted(variance.shares[:-1], key=size, reverse=True)
    rest = variance.shares[-1]
    for row, share in enumerate(ordered):
        is_main = len(share.term) == 1 and share.term != (FOLDS,)
        colour = MAIN_EFFECT if is_main else OTHER_EFFECT
        axes.barh(row, 100 * size(share), height=0.6, color=colour)
        _draw_interval(axes, row, share.low, share.high)
        _write_beside(axes, row, str(share))
    _label_rows(axes, [" × ".join(map(panels.words, share.term)) for share in ordered])
    axes.set_xlim(0, 100)
    cells = variance.table.values[..., 0].size
    count = f"{cells} combinations on {counted(variance.table.repetitions)}"
    left = f"{100 * rest.eta:.1f} % is none of these" if rest.freedom else "no rest, so η² alone"
    about = f"{count}; their std is {100 * variance.std:.1f} points; {left}"
    factors = " × ".join(map(panels.words, variance.table.factors))
    _subtitle(axes, factors, f"{variance.block.about}\n{about}")


def _label_rows(axes: Any, names: Sequence[str]) -> None:
    panels.clean(axes)
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color=panels.LIGHT, linewidth=0.6)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.45, -0.55)


def _subtitle(axes: Any, name: str, about: str) -> None:
    """Write a name, and in grey what is shown, from the left edge of the figure."""
    first, *rest = about.split("\n")
    # An empty title reserves the space: the layout ignores what crosses the edge of the axes.
    axes.set_title("\n".join(" " for _ in (first, *rest)), fontsize=9.5)
    place = ("figure fraction", "axes fraction")
    write = partial(panels.annotate, axes, annotation_clip=False)
    style = {"fontsize": 9.5, "fontweight": "bold", "color": panels.INK}
    bold = write(name, (0.012, 1), place, (0, 4 + 12 * len(rest)), **style)
    texts = [bold, write(first, (1, 0), bold, (6, 0), va="bottom")]
    if rest:
        texts.append(write("\n".join(rest), (0, 0), bold, (0, -3), va="top"))
    for text in texts:
        text.set_in_layout(False)
