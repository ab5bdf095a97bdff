"""The data inside the page: rounded, thinned out where it is long, and harmless as HTML."""

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from softstair.experiments.report import names, panels
from softstair.experiments.report.study import Folds, values_of, varied
from softstair.experiments.results import Training
from softstair.experiments.statistics import Numbers, curve_of, drop_of
from softstair.train.run import read

__all__ = ["Recorded", "clean", "data_of", "harmless", "recorded"]

METRICS = ("valid_accuracy", "train_accuracy", "valid_loss", "train_loss")
SCALE = 10_000
"""Whole numbers take half the room: an accuracy in hundredths of a percent, as the page has it."""
POINTS = 1000
"""Of a mean, at most."""
FOLD_POINTS, FOLD_NUMBERS = 100, 600_000
"""Of the curve of a fold, at most, and of all of them together."""


@dataclass(frozen=True)
class Recorded:
    """What units were trained with, and on, as far as they say so.

    values   the versions of each package, and the devices
    units    how many say so
    """

    values: dict[str, list[str]]
    units: int


def data_of(lines: Sequence[Folds], folder: Path) -> dict[str, Any]:
    """What the page's script draws from, as plain data."""
    count = sum(len(line.units) for line in lines)
    each = max(10, min(FOLD_POINTS, FOLD_NUMBERS // (count * len(METRICS))))
    freedoms = varied(lines)
    fields = [_field(name, values_of(lines, name)) for name in freedoms]
    drawn = [_line(line, freedoms, each) for line in lines]
    titles = [clean(title) for title in panels.titles(lines)]
    # Where every data set is one study, the data set tells.
    if len(set(titles)) > len({line.settings["data"] for line in lines}):
        fields.append(_field(panels.STUDY, panels.ordered(lines, titles)))
        for line, title in zip(drawn, titles, strict=True):
            line["values"].append(title)
    return {
        "scale": SCALE,
        "metrics": METRICS,
        "fields": fields,
        "lines": drawn,
        **_configurations([unit for line in lines for unit in line.units], folder),
    }


def harmless(data: Any) -> str:
    """JSON that can stand in a script element: nothing in it can end the element, or open one.

    >>> harmless("</script>")
    '"\\\\u003c/script\\\\u003e"'
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def clean(text: str) -> str:
    """A name that can be written as UTF-8; that of a file need not be."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def recorded(units: Iterable[Training]) -> Recorded:
    """What the run directories of units say; tables say nothing of it."""
    found: dict[str, set[str]] = {}
    count = 0
    for unit in units:
        config = (unit.path and read(unit.path, "config.json")) or {}
        said = config.get("versions")
        known = {**said} if isinstance(said, dict) else {}
        known["device"] = config.get("device")
        said_here = {name: value for name, value in known.items() if isinstance(value, str)}
        for name, value in said_here.items():
            found.setdefault(clean(name), set()).add(clean(value))
        count += bool(said_here)
    return Recorded({name: sorted(values) for name, values in found.items()}, count)


def _field(name: str, values: Sequence[str]) -> dict[str, Any]:
    """A degree of freedom; its values have labels where they are called otherwise."""
    labels = {clean(value): clean(names.value(name, value)) for value in values}
    return {
        "name": name,
        "label": names.field(name),
        "values": list(labels),
        "labels": {value: label for value, label in labels.items() if value != label},
    }


def _line(line: Folds, freedoms: Sequence[str], each: int) -> dict[str, Any]:
    units = line.shown
    curves = {metric: curve_of(units, metric) for metric in METRICS}
    length = len(curves[METRICS[0]].epochs)
    longest = max(len(unit.curve) for unit in units)
    kept, few = _thin(length, POINTS), _thin(longest, each)
    told: dict[str, Any] = {
        "name": clean(line.name),
        "values": [None if (one := line.value(name)) is None else clean(one) for name in freedoms],
        "epochs": length,
        "drop": drop_of(max(units, key=lambda unit: len(unit.curve))),
        "folds": [unit.fold for unit in units],
    }
    if len(kept) < length:
        told["at"] = kept
    if len(few) < longest:
        told["fold_at"] = few
    if longest > length:
        told["longest"] = longest
    if line.is_twin:
        told["float"] = True
    for metric, curve in curves.items():
        halves = None if curve.high is None else curve.high - curve.mean
        told[metric] = {
            "mean": _whole(curve.mean, kept),
            "half": halves if halves is None else _whole(halves, kept),
            "folds": [_whole([getattr(one, metric) for one in unit.curve], few) for unit in units],
        }
    return told


def _thin(length: int, most: int) -> list[int]:
    """Epochs at even steps, the last one among them."""
    step = math.ceil(length / most)
    return sorted({length - 1 - back for back in range(0, length, step)} | {0})


def _whole(values: Sequence[float] | Numbers, kept: Sequence[int]) -> list[int | None]:
    numbers = [float(values[at]) for at in kept if at < len(values)]
    return [round(number * SCALE) if math.isfinite(number) else None for number in numbers]


def _configurations(units: Sequence[Training], folder: Path) -> dict[str, Any]:
    """Every unit's configuration as it was recorded, line by line: they have most in common."""
    pool: dict[str, int] = {}
    told = []
    for unit in units:
        lines = [pool.setdefault(line, len(pool)) for line in _recorded(unit).split("\n")]
        name = f"{clean(unit.configuration)}, fold {unit.fold}"
        told.append({"name": name, **_place(unit, folder), "lines": lines})
    return {"units": told, "texts": list(pool)}


def _place(unit: Training, folder: Path) -> dict[str, str]:
    """Where its config.json is, as seen from the page, if it has one and a path leads there."""
    if unit.path is None:
        return {}
    try:
        where = Path(os.path.relpath(unit.path / "config.json", folder)).as_posix()
    except ValueError:  # another drive
        return {}
    # A folder may be named javascript: but "./" and a quoted colon make no such address.
    return {"path": clean(where), "href": "./" + quote(os.fsencode(where))}


def _recorded(unit: Training) -> str:
    if unit.path is not None and read(unit.path, "config.json") is not None:
        return (unit.path / "config.json").read_bytes().decode("utf-8", "replace").strip()
    return clean(json.dumps(dict(unit.settings), indent=2, ensure_ascii=False))
