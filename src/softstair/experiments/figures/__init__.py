"""Figures: the paper's panels, its schedules, final accuracies, and what explains their variance.

A figure is named after its study and what it shows, such as ``cifar10-static-random``.
:func:`missing` says which of the paper's panels cannot be drawn.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from softstair._check import choice
from softstair._errors import import_extra
from softstair._files import replacing
from softstair.experiments.figures.panels import (
    PANELS,
    Panel,
    draw_panel,
    draw_schedules,
    trainings_of,
)
from softstair.experiments.figures.strips import (
    draw_accuracies,
    draw_variances,
    freedom_facets,
    setting_facets,
)
from softstair.experiments.figures.style import COLOURS, words
from softstair.experiments.results import Training
from softstair.experiments.studies import SHARED, Study, distinguishing, studies
from softstair.experiments.variance import BLOCKS, explained
from softstair.models import DEFAULTS

__all__ = ["FORMATS", "PANELS", "draw", "drawings", "figures", "missing"]

FORMATS = ("svg", "png", "pdf")
PNG_DPI = 160
SMALL = ("svhn", "speech")
"""Data sets of which the paper shows dynamic noise for uniform noise only."""
LAYERS = {"vgg8": 7, "dscnn": 9, "digits": 3}
"""Number of quantised layers of each network."""


def figures(trainings: Iterable[Training]) -> dict[str, Callable[[], Any]]:
    """Return functions that draw the figures of these trainings, by name, in the paper's order."""
    drawers: dict[str, Callable[[], Any]] = {}
    every = studies(trainings)
    by_title: dict[str, list[Study]] = {}
    for study in every:
        by_title.setdefault(study.title, []).append(study)
    fields = {title: _distinguishing(rivals) for title, rivals in by_title.items()}
    for study in every:
        caption = _caption(study, fields[study.title])
        scales = {other.scale for other in every if other.data == study.data}
        full_caption = ", ".join(filter(None, [study.scale if len(scales) > 1 else "", caption]))
        for panel in (*_paper_panels(study), *_other_panels(study)):
            if trainings_of(study, panel):
                name = f"{study.name}-{panel.name}"
                drawers[name] = partial(draw_panel, study, panel, full_caption)
        if facets := freedom_facets(study):
            heading = f"{study.title}: final accuracy by degree of freedom"
            name = f"{study.name}-final-accuracy"
            drawers[name] = partial(draw_accuracies, heading, facets, caption)
        shares = [explained(block, study.trainings)[0] for block in BLOCKS.values()]
        if variances := [variance for variance in shares if variance]:
            heading = f"{study.title}: what explains the variance of accuracy"
            drawers[f"{study.name}-variance"] = partial(draw_variances, heading, variances, caption)
    for title, rivals in by_title.items():
        if facets := setting_facets(rivals, fields[title]):
            name = f"{rivals[0].data}-{rivals[0].scale}-final-accuracy-by-setting"
            heading = f"{title}: final accuracy by setting"
            drawers[re.sub(r"[^\w.]+", "-", name)] = partial(draw_accuracies, heading, facets)
    for layers in dict.fromkeys(_layers(study) for study in every):
        name = "schedules" if layers == LAYERS["vgg8"] else f"schedules-{layers}-layers"
        drawers[name] = partial(draw_schedules, layers)
    return drawers


def missing(trainings: Iterable[Training]) -> list[str]:
    """Return sentences that say what the paper shows and these studies cannot."""
    every = studies(trainings)
    sentences = []
    for study in every:
        fields = _distinguishing([other for other in every if other.title == study.title])
        name = ", ".join(filter(None, [study.title, _caption(study, fields)]))
        absent = [panel.name for panel in _paper_panels(study) if not trainings_of(study, panel)]
        if absent and study.data in ("cifar10", *SMALL):
            sentences.append(f"{name}: there is no training for {', '.join(absent)}.")
        blocks = [b for b in BLOCKS if study.data not in SMALL or b != "dynamic-expectation"]
        outcomes = [explained(BLOCKS[block], study.trainings) for block in blocks]
        sentences += [f"{name}, variance of {why}" for share, why in outcomes if share is None]
    return sentences


def draw(
    trainings: Iterable[Training], folder: Path | str, formats: Sequence[str] = ("svg",)
) -> list[Path]:
    """Write every figure into a folder, which is created if need be, and return their paths."""
    for ending in formats:
        choice("formats", ending, FORMATS)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, make in figures(trainings).items():
        figure = make()
        for ending in formats:
            path = folder / f"{name}.{ending}"
            with replacing(path) as partial_path:
                partial_path.write_bytes(_rendered(figure, ending))
            written.append(path)
    return written


def drawings(trainings: Iterable[Training]) -> dict[str, str]:
    """Return every figure as the text of an SVG."""
    return {name: _rendered(make(), "svg").decode() for name, make in figures(trainings).items()}


def _rendered(figure: Any, ending: str) -> bytes:
    """Return a figure as a file, with the same bytes every time: no date and no random number."""
    date = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[ending]
    file = io.BytesIO()
    with (
        import_extra("matplotlib").rc_context({"svg.hashsalt": "softstair"}),
        warnings.catch_warnings(),
    ):
        # A figure of very few points may have no room to lay out: it is drawn all the same.
        warnings.filterwarnings("ignore", "constrained_layout not applied", UserWarning)
        figure.savefig(file, format=ending, dpi=PNG_DPI, metadata=date)
    drawn = file.getvalue()
    if ending != "svg":
        return drawn
    # Paths in hundredths of a point take half the space, and look the same.
    shorter = lambda path: re.sub(rb"(\.\d\d)\d+", rb"\1", path[0])
    return re.sub(rb' d="[^"]*"', shorter, drawn)


def _distinguishing(rivals: Sequence[Study]) -> list[str]:
    """Return as few fields of a recipe as tell studies of one title apart."""
    titled = ("epochs", "statistics", "data_version")
    settings = [study.trainings[0].settings for study in rivals]
    return distinguishing(settings, [name for name in SHARED if name not in titled])


def _caption(study: Study, fields: Sequence[str]) -> str:
    settings = study.trainings[0].settings
    return ", ".join(f"{words(name)} {settings[name]}" for name in fields)


def _paper_panels(study: Study) -> list[Panel]:
    """Return the panels that the paper has of a data set; all of them for CIFAR-10 and others."""
    everything = study.data not in SMALL
    return [panel for panel in PANELS if everything or panel.noise in (None, "uniform")]


def _other_panels(study: Study) -> list[Panel]:
    """Return panels of the same kind that the paper does not have of this data set."""
    shown = _paper_panels(study)
    forwards, noises = COLOURS["forward"], COLOURS["noise"]
    dynamic = [Panel(forward, noise) for forward in forwards for noise in noises]
    return [panel for panel in (*map(Panel, forwards), *dynamic) if panel not in shown]


def _layers(study: Study) -> int:
    """Return how many layers are annealed; a network of one's own is drawn as VGG8."""
    recipe = study.trainings[0].recipe
    name = DEFAULTS.get(recipe.data, "") if recipe.model == "auto" else recipe.model
    return LAYERS.get(name, LAYERS["vgg8"])
