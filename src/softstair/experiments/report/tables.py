"""The tables of the page, which need no script: it sorts them, and hides what is filtered out."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

from softstair.experiments.report import names
from softstair.experiments.report.study import Folds, telling
from softstair.experiments.report.words import duration, element, percent, text
from softstair.experiments.results import Training
from softstair.experiments.statistics import Mean

__all__ = ["configurations", "runs"]

MISSING = '<td class="number missing">–</td>'


def configurations(lines: Sequence[Folds]) -> str:
    """A row a configuration, the best first: what came of the folds that are done."""
    columns = telling(lines)
    tested = any(unit.test_accuracy is not None for line in lines for unit in line.units)
    heads = [
        _head("configuration"),
        _head("validation, %", number=True, sort="descending"),
        _head("best epoch, %", number=True),
        *([_head("test, %", number=True)] if tested else []),
        _head("folds", number=True),
        _head("time", number=True),
        *(_head(names.field(name)) for name in columns),
    ]
    scale = _scale(lines)
    order = sorted(range(len(lines)), key=lambda at: -_level(lines[at]))
    rows = [_configuration(at, lines[at], columns, tested, scale) for at in order]
    return _table("configurations-table", heads, rows)


def runs(lines: Sequence[Folds]) -> str:
    """A row a unit, with a link to its configuration."""
    tested = any(unit.test_accuracy is not None for line in lines for unit in line.units)
    several = len({line.settings.get("data") for line in lines}) > 1
    heads = [
        _head("configuration"),
        *([_head(names.field("data"))] if several else []),
        _head("fold", number=True),
        _head("epochs", number=True),
        _head("validation, %", number=True),
        _head("best epoch, %", number=True),
        *([_head("test, %", number=True)] if tested else []),
        _head("time", number=True),
        _head("images / s", number=True),
        '<th scope="col">trained with</th>',
    ]
    return _table("runs-table", heads, list(_units(lines, several, tested)))


def _configuration(
    at: int, line: Folds, columns: Sequence[str], tested: bool, scale: tuple[float, float]
) -> str:
    done, folds = len(line.done), len(line.units)
    with_dots = lambda mean: percent(mean) + _dots(mean, scale)
    cells = [
        element("th", text(line.name), {"scope": "row", "class": "name"}),
        _cell(line.outcome("valid_accuracy"), with_dots),
        _cell(line.outcome("best_valid_accuracy"), lambda mean: percent(mean.value)),
        *([_cell(line.outcome("test_accuracy"), percent)] if tested else []),
        _cell(done, lambda _: str(done) if done == folds else f"{done} of {folds}"),
        _cell(line.outcome("seconds"), lambda mean: duration(mean.value)),
        *(_word(name, line.value(name)) for name in columns),
    ]
    return element("tr", cells, {"data-line": at})


def _units(lines: Sequence[Folds], several: bool, tested: bool) -> Iterator[str]:
    number = count()
    for at, line in enumerate(lines):
        data = element("td", text(names.value("data", line.settings["data"])))
        for unit in line.units:
            this = next(number)
            cells = [
                element("th", text(line.name), {"scope": "row", "class": "name"}),
                *([data] if several else []),
                _cell(unit.fold, str),
                _cell(len(unit.curve), partial(_progress, unit)),
                _cell(unit.valid_accuracy, percent),
                _cell(unit.best_valid_accuracy, percent),
                *([_cell(unit.test_accuracy, percent)] if tested else []),
                _cell(unit.seconds, duration),
                _cell(unit.images_per_second, "{:,.0f}".format),
                element("td", f'<a href="#run-{this}">configuration</a>'),
            ]
            yield element("tr", cells, {"id": f"run-{this}", "data-line": at})


def _progress(unit: Training, epochs: int) -> str:
    return str(epochs) if unit.is_done else f"{epochs} of {text(unit.settings['epochs'])}"


def _table(name: str, heads: Sequence[str], rows: Sequence[str]) -> str:
    head = element("thead", element("tr", heads))
    table = element("table", [head, "\n<tbody>\n", "\n".join(rows), "\n</tbody>"], {"id": name})
    # A box that scrolls must be within reach of the keyboard.
    box = {"class": "box", "tabindex": "0", "role": "region", "aria-label": name.replace("-", " ")}
    return element("div", table, box)


def _head(words: str, number: bool = False, sort: str = "none") -> str:
    kind = "number" if number else None
    return element("th", text(words), {"scope": "col", "class": kind, "aria-sort": sort})


def _cell(of: Mean | float | None, words: Callable[[Any], str]) -> str:
    """A cell of a number, which sorts by its value."""
    if of is None:
        return MISSING
    value = of.value if isinstance(of, Mean) else of
    return element("td", words(of), {"class": "number", "data-value": f"{value:.6g}"})


def _word(field: str, value: str | None) -> str:
    if value is None:
        return '<td class="missing">–</td>'
    return element("td", text(names.value(field, value)))


def _level(line: Folds) -> float:
    accuracy = line.outcome("valid_accuracy")
    return -1.0 if accuracy is None else accuracy.value


def _scale(lines: Sequence[Folds]) -> tuple[float, float]:
    """From where to where the dots go: all the means fit, but not the widest interval."""
    means = [level for line in lines if (level := _level(line)) >= 0] or [0.0]
    room = 0.08 * (max(means) - min(means)) or 0.01
    return max(min(means) - room, 0.0), min(max(means) + room, 1.0)


def _dots(accuracy: Mean, scale: tuple[float, float]) -> str:
    """A mean as a dot and its interval, of two folds its range, as a line, on the scale of the
    column."""
    low, high = scale
    at = lambda value: round(100 * min(max((value - low) / (high - low), 0.0), 1.0), 1)
    left, right = map(at, accuracy.bounds)
    middle = at(accuracy.value)
    return (
        '<svg class="dots" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<path d="M{left} 4H{right}"/><path class="dot" d="M{middle} 4h0"/></svg>'
    )
