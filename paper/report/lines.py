"""The data of the page: lines, each the mean of a configuration's repetitions, and their JSON."""

import contextlib
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from paper import panels
from paper.results import located
from paper.studies import TITLES, Repetitions, curve_of, drop_of, refuse_repeated
from paper.tables import NAMES, SETTINGS, Training
from softstair.train.records import read_json

FIELD_WORDS = {"power": "power law", "data": "data set"}
VALUE_WORDS = {
    "data": TITLES,
    "model": {"auto": "the data’s own"},
    "static_mean": {"true": "yes", "false": "no"},
    "static_std": {"true": "yes", "false": "no"},
    "interval": {"none": "static"},
    "power": {"none": "static"},
}
SEPARATING = ("epochs", "statistics", "precision", "model", "data_version")
"""Fields that separate the studies of a data set. Lines that differ in them never share a chart;
learning rates or stairs are there to be compared, and do."""
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
PAPER_COLOURS = ("blue", "green", "red", "yellow", "grey")
PALETTE = ("blue", "yellow", "green", "red", "purple", "teal", "pink", "brown")


def gather(paths: Iterable[Path]) -> tuple[list[Training], list[Path]]:
    """Return the trainings in folders and tables, and the tables of something else beside them."""
    passed_over: list[Path] = []
    pairs = [pair for path in paths for pair in located(path, passed_over)]
    trainings = [training for training, _ in pairs]
    refuse_repeated(trainings, [place for _, place in pairs])
    return trainings, passed_over


def varied(lines: Sequence[Repetitions], strict: bool = False) -> list[str]:
    """Return the fields in which lines differ, without those that another one determines, such as
    the quanta of each data set; those of the paper's tables stay, unless ``strict``."""
    chosen: list[str] = []
    count = lambda *names: len({tuple(line.settings[name] for name in names) for line in lines})
    # Each value of the other field comes with one value of this one.
    is_determined = lambda name: any(
        count(other, name) == count(other) for other in chosen if other != name
    )
    for name in dict.fromkeys((*SETTINGS, *NAMES)):
        if name in ("fold", "seed") or len(values_of(lines, name)) < 2:
            continue
        if name in SETTINGS or not is_determined(name):
            chosen.append(name)
    for name in reversed(chosen[:] if strict else []):
        if is_determined(name):
            chosen.remove(name)
    return chosen


def values_of(lines: Iterable[Repetitions], field: str) -> list[str]:
    every = dict.fromkeys(line.value(field) for line in lines)
    return panels.in_order(field, [value for value in every if value is not None])


def in_words(field: str, value: str | None = None) -> str:
    """Return a field, or one of its values, as the page has it.

    >>> in_words("static_mean"), in_words("interval", "same_end"), in_words("power", "none")
    ('static mean', 'same end', 'static')
    """
    if value is None:
        return FIELD_WORDS.get(field, field.replace("_", " "))
    plain = value.replace("_", " ") if field == "interval" else value
    return VALUE_WORDS.get(field, {}).get(value, plain)


def study_titles(lines: Sequence[Repetitions]) -> tuple[list[str], list[str]]:
    """Return the study of each line, such as "CIFAR-10, 500 epochs", and all studies: those of one
    data set follow each other, that of most lines first."""
    fields: dict[str, list[str]] = {}
    for data in dict.fromkeys(line.settings["data"] for line in lines):
        rivals = [line.settings for line in lines if line.settings["data"] == data]
        fields[data] = [name for name in SEPARATING if len({row[name] for row in rivals}) > 1]
    titles, place = [], {}
    for settings in (line.settings for line in lines):
        data = settings["data"]
        parts = [in_words("data", data)]
        for name in fields[data]:
            words = [in_words(name), in_words(name, settings[name])]
            is_first = name in ("model", "data_version")
            parts.append(" ".join(words if is_first else reversed(words)))
        titles.append(", ".join(parts))
        place[titles[-1]] = list(fields).index(data)
    count = Counter(titles)
    return titles, sorted(count, key=lambda title: (place[title], -count[title]))


def data_of(lines: Sequence[Repetitions], folder: Path) -> dict[str, Any]:
    """Return what the script of the page draws, as plain data. Epochs count from 1.

    Lines share most epochs, and configurations most of their text: both refer to pools.
    """
    names = varied(lines)
    fields = [_field(name, values_of(lines, name)) for name in names]
    values = [[line.value(name) for name in names] for line in lines]
    titles, every = study_titles(lines)
    if len(every) > len(values_of(lines, "data")):
        fields.append(_field("study", every))
        values = [[*own, title] for own, title in zip(values, titles, strict=True)]
    count = sum(len(line.trainings) for line in lines)
    fold_points = max(10, min(FOLD_POINTS, ALL_FOLD_POINTS // (count * len(METRICS))))
    last = [unit.curve[-1] for line in lines for unit in line.trainings]
    measured = {name for name in METRICS if any(getattr(each, name) is not None for each in last)}
    epochs: dict[tuple[int, ...], int] = {}
    texts: dict[str, int] = {}
    return {
        "scale": SCALE,
        "metrics": {name: label for name, label in METRICS.items() if name in measured},
        "fields": fields,
        "lines": [
            {
                "name": clean(line.name),
                "values": [
                    None if value is None else field["values"].index(clean(value))
                    for field, value in zip(fields, own, strict=True)
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
    """Return JSON that can neither end the script element that it is in nor open another."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def clean(text: str) -> str:
    """Return text that can be written as UTF-8; the name of a file need not be."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _field(name: str, values: Sequence[str]) -> dict[str, Any]:
    paper = {**panels.COLOURS[name], "none": panels.GREY} if name in ("noise", "interval") else {}
    names = {getattr(panels, colour.upper()): colour for colour in PAPER_COLOURS}
    known = {value: names[paper[value]] for value in values if paper.get(value) in names}
    free = itertools.cycle(colour for colour in PALETTE if colour not in known.values())
    return {
        "name": name,
        "label": in_words(name),
        "values": [clean(value) for value in values],
        "labels": [clean(in_words(name, value)) for value in values],
        "colours": [known.get(value) or next(free) for value in values],
    }


def _curves(
    line: Repetitions, fold_points: int, epochs: dict[tuple[int, ...], int]
) -> dict[str, Any]:
    trainings = line.done or line.trainings  # until one is done, all of them
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
                "mean": _rounded(curve.mean.tolist(), kept),
                "half": None if curve.margin is None else _rounded(curve.margin.tolist(), kept),
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


def _rounded(values: Sequence[float | None], kept: Sequence[int]) -> list[int | None]:
    chosen = [values[epoch - 1] for epoch in kept if epoch <= len(values)]
    return [
        round(value * SCALE) if value is not None and math.isfinite(value) else None
        for value in chosen
    ]


def _unit(training: Training, folder: Path, texts: dict[str, int]) -> dict[str, Any]:
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
    name = f"{clean(training.configuration)}, fold {training.fold}"
    return {"name": name, **place, "lines": lines}
