"""The data of the page: lines, each the mean of a configuration's folds, and their JSON."""

import contextlib
import json
import math
import os
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from softstair.experiments import panels
from softstair.experiments.design import FREEDOMS
from softstair.experiments.results import NAMES, SETTINGS, Training, located
from softstair.experiments.studies import TITLES, Mean, Numbers, curve_of, drop_of, mean_of
from softstair.train.records import RunError, read_json

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
learning rates, seeds or stairs are there to be compared, and do."""
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


@dataclass(frozen=True)
class ReportLine:
    """A configuration: the trainings that differ in their fold only, by fold."""

    name: str
    settings: Mapping[str, str]
    trainings: tuple[Training, ...]
    is_twin: bool
    """Whether it is a float network beside quantised ones: no degree of freedom matters to it."""

    @property
    def done(self) -> list[Training]:
        """The trainings that reached their last epoch."""
        return [training for training in self.trainings if training.is_done]

    @property
    def shown(self) -> list[Training]:
        """The trainings that its curve averages: those that are done, or all until one is."""
        return self.done or list(self.trainings)

    def mean(self, outcome: str) -> Mean | None:
        """Return the mean over the folds that are done, if any has this outcome."""
        values = [getattr(training, outcome) for training in self.done]
        known = [value for value in values if value is not None]
        return mean_of(known) if known else None

    def value(self, field: str) -> str | None:
        """Return the value of a field; None where it does not matter."""
        return None if self.is_twin and field in FREEDOMS else self.settings[field]


def gather(paths: Iterable[Path]) -> tuple[list[Training], list[Path]]:
    """Return the trainings in folders and tables, and the tables of something else beside them."""
    passed_over: list[Path] = []
    pairs = [pair for path in paths for pair in located(path, passed_over)]
    trainings = [training for training, _ in pairs]
    _refuse_repeated(trainings, [place for _, place in pairs])
    return trainings, passed_over


def arranged(trainings: Sequence[Training]) -> list[ReportLine]:
    """Return the lines, in the order of the trainings."""
    if not trainings:
        raise ValueError("a report needs at least one training, but none was given.")
    _refuse_repeated(trainings)
    groups: dict[Hashable, list[Training]] = {}
    for training in trainings:
        groups.setdefault(_identity(training), []).append(training)
    quantised = {each.recipe.data for each in trainings if not each.recipe.is_float}
    lines = []
    for group in groups.values():
        folds = tuple(sorted(group, key=lambda training: training.fold))
        recipe = folds[0].recipe
        is_twin = recipe.is_float and recipe.data in quantised
        lines.append(ReportLine(folds[0].configuration, folds[0].settings, folds, is_twin))
    return lines


def varied(lines: Sequence[ReportLine], strict: bool = False) -> list[str]:
    """Return the fields in which lines differ, without those that another one determines, such as
    the quanta of each data set; those of the paper's tables stay, unless ``strict``."""
    chosen: list[str] = []
    is_determined = lambda name: any(
        _determines(lines, other, name) for other in chosen if other != name
    )
    for name in dict.fromkeys((*SETTINGS, *NAMES)):
        if name == "fold" or len(values_of(lines, name)) < 2:
            continue
        if name in SETTINGS or not is_determined(name):
            chosen.append(name)
    if strict:
        for name in reversed(chosen[:]):
            if is_determined(name):
                chosen.remove(name)
    return chosen


def values_of(lines: Iterable[ReportLine], field: str) -> list[str]:
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


def study_titles(lines: Sequence[ReportLine]) -> tuple[list[str], list[str]]:
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


def _refuse_repeated(trainings: Sequence[Training], places: Sequence[Path] = ()) -> None:
    first: dict[Hashable, int] = {}
    for number, training in enumerate(trainings):
        before = first.setdefault((_identity(training), training.fold), number)
        if before != number:
            by = f", by {str(places[before])!r} and by {str(places[number])!r}" if places else ""
            raise RunError(
                f"each training must be given once, but fold {training.fold} of "
                f"{training.configuration!r} was given twice{by}: leave one of the two out."
            )


def _identity(training: Training) -> Hashable:
    """Return name and settings: grids of several data sets may use the same names."""
    settings = training.settings
    return training.configuration, *(settings[name] for name in NAMES if name != "fold")


def _determines(lines: Sequence[ReportLine], field: str, other: str) -> bool:
    """Return whether each value of a field comes with one value of the other."""
    pairs = {(line.settings[field], line.settings[other]) for line in lines}
    return len(pairs) == len({line.settings[field] for line in lines})


def data_of(lines: Sequence[ReportLine], folder: Path) -> dict[str, Any]:
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
    paper = {**panels.COLOURS[name], "none": panels.GREY} if name in ("noise", "interval") else {}
    names = {getattr(panels, colour.upper()): colour for colour in PAPER_COLOURS}
    return {
        "name": name,
        "label": in_words(name),
        "values": [clean(value) for value in values],
        "labels": [clean(in_words(name, value)) for value in values],
        "colours": [
            names.get(paper.get(value, ""), PALETTE[place % len(PALETTE)])
            for place, value in enumerate(values)
        ],
    }


def _curves(
    line: ReportLine, fold_points: int, epochs: dict[tuple[int, ...], int]
) -> dict[str, Any]:
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
                "half": None if curve.margin is None else _rounded(curve.margin, kept),
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
