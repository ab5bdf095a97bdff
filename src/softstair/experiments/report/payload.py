"""The data inside the page, as JSON: rounded, and thinned out where it is long."""

import contextlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from softstair.experiments.figures import style
from softstair.experiments.report.lines import (
    ReportLine,
    in_words,
    study_titles,
    values_of,
    varied,
)
from softstair.experiments.results import Training
from softstair.experiments.studies import Numbers, curve_of, drop_of
from softstair.train.records import read_json

__all__ = ["clean", "data_of", "escaped"]

METRICS = {
    "valid_accuracy": "validation accuracy",
    "train_accuracy": "training accuracy",
    "valid_loss": "validation loss",
    "train_loss": "training loss",
}
SCALE = 10_000
"""Values are stored as integers, which are shorter: accuracies in hundredths of a percent."""
MEAN_POINTS, FOLD_POINTS, ALL_FOLD_POINTS = 1000, 100, 600_000
"""Largest number of points of a mean, of a fold, and of all folds together."""
PAPER_COLOURS = {
    style.BLUE: "blue",
    style.GREEN: "green",
    style.RED: "red",
    style.YELLOW: "yellow",
    style.GREY: "grey",
}
PALETTE = ("blue", "yellow", "green", "red", "purple", "teal", "pink", "brown")


def data_of(lines: Sequence[ReportLine], folder: Path) -> dict[str, Any]:
    """Return what the script of the page draws, as plain data.

    Epochs count from 1. Lines share most of their epochs and configurations most of their text, so
    both refer to pools: ``epochs`` and ``texts``.
    """
    names = varied(lines)
    fields = [_field(name, values_of(lines, name)) for name in names]
    values = [[line.value(name) for name in names] for line in lines]
    titles, every = study_titles(lines)
    if len(every) > len(values_of(lines, "data")):
        fields.append(_field("study", every))
        values = [[*own, title] for own, title in zip(values, titles, strict=True)]
    places = [{value: at for at, value in enumerate(field["values"])} for field in fields]
    count = sum(len(line.trainings) for line in lines)
    fold_points = max(10, min(FOLD_POINTS, ALL_FOLD_POINTS // (count * len(METRICS))))
    epochs: dict[tuple[int, ...], int] = {}
    texts: dict[str, int] = {}
    return {
        "scale": SCALE,
        "metrics": METRICS,
        "fields": fields,
        "lines": [
            {
                "name": clean(line.name),
                "values": [
                    None if value is None else place[clean(value)]
                    for place, value in zip(places, own, strict=True)
                ],
                **_curves(line, fold_points, epochs),
            }
            for line, own in zip(lines, values, strict=True)
        ],
        "units": [_unit(unit, folder, texts) for line in lines for unit in line.trainings],
        "epochs": list(epochs),
        "texts": list(texts),
    }


def escaped(data: Any) -> str:
    """Return JSON that can neither end the script element that it is in nor open another.

    >>> escaped("</script>")
    '"\\\\u003c/script\\\\u003e"'
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def clean(text: str) -> str:
    """Return text that can be written as UTF-8; the name of a file need not be."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _field(name: str, values: Sequence[str]) -> dict[str, Any]:
    paper = {**style.COLOURS[name], "none": style.GREY} if name in ("noise", "interval") else {}
    return {
        "name": name,
        "label": in_words(name),
        "values": [clean(value) for value in values],
        "labels": [clean(in_words(name, value)) for value in values],
        "colours": [
            PAPER_COLOURS.get(paper.get(value, ""), PALETTE[place % len(PALETTE)])
            for place, value in enumerate(values)
        ],
    }


def _curves(
    line: ReportLine, fold_points: int, epochs: dict[tuple[int, ...], int]
) -> dict[str, Any]:
    """Return the curves of a line; ``epochs`` is a pool of the epochs that are kept."""
    trainings = line.shown
    curves = {metric: curve_of(trainings, metric) for metric in METRICS}
    longest = max(trainings, key=lambda training: len(training.curve))
    length = len(curves["valid_accuracy"].epochs)
    kept, few = _thinned(length, MEAN_POINTS), _thinned(len(longest.curve), fold_points)
    return {
        "epochs": length,
        "longest": len(longest.curve),
        "drop": drop_of(longest),
        "folds": [training.fold for training in trainings],
        "float": line.is_twin,
        "at": epochs.setdefault(kept, len(epochs)),
        "fold_at": epochs.setdefault(few, len(epochs)),
        **{
            metric: {
                "mean": _rounded(curve.mean, kept),
                "half": None if curve.high is None else _rounded(curve.high - curve.mean, kept),
                "folds": [
                    _rounded([getattr(epoch, metric) for epoch in training.curve], few)
                    for training in trainings
                ],
            }
            for metric, curve in curves.items()
        },
    }


def _thinned(length: int, most: int) -> tuple[int, ...]:
    """Return epochs from 1 to ``length`` at even steps, both ends among them."""
    step = math.ceil(length / most)
    return tuple(sorted({*range(length, 0, -step), 1}))


def _rounded(values: Sequence[float] | Numbers, kept: Sequence[int]) -> list[int | None]:
    numbers = [float(values[epoch - 1]) for epoch in kept if epoch <= len(values)]
    return [round(number * SCALE) if math.isfinite(number) else None for number in numbers]


def _unit(training: Training, folder: Path, texts: dict[str, int]) -> dict[str, Any]:
    """Return a training's configuration as recorded; ``texts`` is a pool of its lines."""
    recorded = json.dumps(dict(training.settings), indent=2, ensure_ascii=False)
    place = {}
    if training.path is not None:
        config = training.path / "config.json"
        if read_json(training.path, "config.json") is not None:
            recorded = config.read_bytes().decode("utf-8", "replace").strip()
        with contextlib.suppress(ValueError):  # there is no path to another drive
            relative = Path(os.path.relpath(config, folder)).as_posix()
            # A folder may be named javascript: but "./" and a quoted colon make no such address.
            place = {"path": clean(relative), "href": "./" + quote(os.fsencode(relative))}
    lines = [texts.setdefault(line, len(texts)) for line in clean(recorded).split("\n")]
    return {
        "name": f"{clean(training.configuration)}, fold {training.fold}",
        **place,
        "lines": lines,
    }
