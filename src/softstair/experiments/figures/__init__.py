"""Figures: the paper's panels, its schedules, final accuracies, and what explains their variance.

Each panel has the name of what it shows (static-random, dynamic-expectation-uniform, …) behind that
of its study; a data set that is not there has none, and :func:`missing` says which panels of the
paper cannot be drawn.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from softstair._errors import import_extra
from softstair._files import replacing
from softstair.experiments.figures import panels, settings, summary
from softstair.experiments.figures.apart import apart, telling
from softstair.experiments.figures.panels import PANELS, Panel
from softstair.experiments.figures.schedules import LAYERS, schedules
from softstair.experiments.figures.style import COLOURS
from softstair.experiments.results import Training
from softstair.experiments.studies import Study, studies
from softstair.experiments.variance import BLOCKS, explained

__all__ = ["FORMATS", "PANELS", "draw", "drawings", "figures", "missing"]

FORMATS = ("svg", "png", "pdf")
DOTS = 160
"""Of a PNG, to the inch."""
SMALL = ("svhn", "speech")
"""Data sets on which the paper shows dynamic noise under uniform noise alone."""


def figures(trainings: Iterable[Training]) -> dict[str, Callable[[], Any]]:
    """What can be drawn, by name: functions that make the figures, in the paper's order."""
    found: dict[str, Callable[[], Any]] = {}
    every = studies(trainings)
    fields = {title: telling(title, every) for title in {study.title for study in every}}
    for study in every:
        said = apart(study, fields[study.title])
        whole = ", ".join(filter(None, [_scale(study, every), said]))
        for one in [*_of_the_paper(study), *_others(study)]:
            if panels.trainings_of(study, one):
                found[f"{study.name}-{one.name}"] = partial(panels.panel, study, one, whole)
        if summary.facets_of(study):
            found[f"{study.name}-final-accuracy"] = partial(summary.final_accuracy, study, said)
        if any(explained(block, study.trainings)[0] for block in BLOCKS.values()):
            found[f"{study.name}-variance"] = partial(summary.variance, study, said)
    for title, study in {study.title: study for study in every}.items():
        if settings.settings_of(title, every):
            name = re.sub(r"[^\w.]+", "-", f"{study.data}-{study.scale}-final-accuracy-by-setting")
            found[name] = partial(settings.by_setting, title, every)
    for layers in dict.fromkeys(_layers(study) for study in every):
        name = "schedules" if layers == LAYERS["vgg8"] else f"schedules-{layers}-layers"
        found[name] = partial(schedules, layers)
    return found


def missing(trainings: Iterable[Training]) -> list[str]:
    """What the paper shows and these trainings cannot, in a sentence for each study.

    Studies of one title that lack the same are told of together; a data set of which nothing was
    trained is not missed.
    """
    every = studies(trainings)
    found: dict[tuple[str, str], list[Study]] = {}
    for tell in (_absent, _unexplained):
        for study in every:
            for sentence in tell(study):
                found.setdefault((study.title, sentence), []).append(study)
    said = []
    for (title, sentence), own in found.items():
        alike = sum(one.title == title for one in every)
        if len(own) == alike > 1:
            said.append(f"{title}, each of {alike} studies{sentence}")
            continue
        fields = telling(title, every)
        said += [", ".join(filter(None, [title, apart(one, fields)])) + sentence for one in own]
    return said


def _absent(study: Study) -> list[str]:
    """Which panels of the paper have nothing to show."""
    if study.data not in ("cifar10", *SMALL):
        return []
    absent = [one.name for one in _of_the_paper(study) if not panels.trainings_of(study, one)]
    return [f": there is no training for {', '.join(absent)}."] if absent else []


def _unexplained(study: Study) -> list[str]:
    """Of which blocks the variance is not known, and why."""
    whole = study.data not in SMALL
    blocks = [one for name, one in BLOCKS.items() if whole or name != "dynamic-expectation"]
    tried = [explained(block, study.trainings) for block in blocks]
    return [f", variance of {why}" for shares, why in tried if shares is None]


def _scale(study: Study, every: Sequence[Study]) -> str:
    """How long it was, where others of its data set were not."""
    scales = {one.scale for one in every if one.data == study.data}
    return study.scale if len(scales) > 1 else ""


def draw(
    trainings: Iterable[Training], folder: Path | str, formats: Sequence[str] = ("svg",)
) -> list[Path]:
    """Writes every figure into the folder, which is made if need be; returns where they lie."""
    for ending in formats:
        if ending not in FORMATS:
            raise ValueError(f"formats must be of {', '.join(FORMATS)}, but {ending!r} was given.")
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
    """Every figure as the text of an SVG."""
    return {name: _rendered(make(), "svg").decode() for name, make in figures(trainings).items()}


def _rendered(figure: Any, ending: str) -> bytes:
    """The same bytes each time: no date is in them, and no number drawn at random."""
    date = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[ending]
    file = io.BytesIO()
    with (
        import_extra("matplotlib").rc_context({"svg.hashsalt": "softstair"}),
        warnings.catch_warnings(),
    ):
        # A figure of very few points may have no room to lay out: it is drawn all the same.
        warnings.filterwarnings("ignore", "constrained_layout not applied", UserWarning)
        figure.savefig(file, format=ending, dpi=DOTS, metadata=date)
    # Paths in hundredths of a point take half the room, and look the same.
    shorter = lambda found: re.sub(rb"(\.\d\d)\d+", rb"\1", found[0])
    drawn = file.getvalue()
    return re.sub(rb' d="[^"]*"', shorter, drawn) if ending == "svg" else drawn


def _of_the_paper(study: Study) -> list[Panel]:
    """The panels that the paper has of this data set; of CIFAR-10, all."""
    if study.data not in SMALL:
        return list(PANELS)
    return [one for one in PANELS if one.noise in (None, "uniform")]


def _others(study: Study) -> list[Panel]:
    """Panels of the same kind that the paper left out, or that it has of CIFAR-10 alone."""
    every = [Panel(forward) for forward in COLOURS["forward"]]
    every += [Panel(forward, noise) for forward in COLOURS["forward"] for noise in COLOURS["noise"]]
    shown = _of_the_paper(study)
    return [one for one in every if one not in shown]


def _layers(study: Study) -> int:
    """How many layers are annealed; a network of one's own is shown as the paper's."""
    own = study.trainings[0].settings
    model = {"speech": "dscnn", "digits": "digits"}.get(own["data"], "vgg8")
    return LAYERS.get(own["model"] if own["model"] != "auto" else model, LAYERS["vgg8"])
