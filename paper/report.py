"""The report: one HTML file that opens offline and makes no requests.

Claims and tables are HTML and need no script; plotly, which the file contains, draws the curves and
figures. The page's content security policy forbids every request.
"""

import contextlib
import datetime
import html
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import product
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

from paper.claims import Finding
from paper.figures import DASHES, curve_traces, figures
from paper.look import COLOURS, GREY, PALETTE, blank, clean, in_order, words
from paper.mean import Mean
from paper.results import located
from paper.studies import TITLES, Repetitions, best_of, duration, refuse_repeated, repetitions_of
from paper.tables import DATA_VERSION, NAMES, SETTINGS, UNKNOWN, Training
from softstair import __version__
from softstair._errors import import_extra
from softstair.train.records import read_json

VERDICTS = {
    "holds": ("✓", "hold"),
    "holds in part": ("◐", "hold in part"),
    "does not hold": ("✗", "do not hold"),
    "not tested": ("–", "not tested"),
}
"""Sign of each verdict, and how several are counted."""
VERDICT_NOTE = (
    "Verdicts are of running statistics, as the paper evaluates, and of the longest trainings that "
    "can tell; what shorter ones and fresh statistics say is given behind them. In part: a "
    "difference may be chance, some of the claim holds and some does not, or not all that it "
    "speaks of was trained."
)
VALUE_WORDS = {"data": TITLES, "interval": {"none": "static"}, "power": {"none": "static"}}
SEPARATING = ("epochs", "statistics", "precision", "model", DATA_VERSION)
"""Fields that separate the studies of a data set. Lines that differ in them never share a chart;
learning rates or stairs are there to be compared, and do."""
METRICS = {
    "valid_accuracy": "validation accuracy, %",
    "train_accuracy": "training accuracy, %",
    "valid_loss": "validation loss",
    "train_loss": "training loss",
}


def gather(paths: Iterable[Path]) -> tuple[list[Training], list[Path]]:
    """Return the trainings in folders and tables, and the tables of something else beside them."""
    passed_over: list[Path] = []
    pairs = [pair for path in paths for pair in located(path, passed_over)]
    trainings = [training for training, _ in pairs]
    refuse_repeated(trainings, [place for _, place in pairs])
    return trainings, passed_over


def write(trainings: Sequence[Training], file: Path | str, *args: Any, **options: Any) -> None:
    """Write the page, with the arguments of :func:`page`."""
    file = Path(file)
    file.write_text(page(trainings, file.parent, *args, **options), encoding="utf-8")


def page(
    trainings: Sequence[Training],
    folder: Path,
    claims: Sequence[Finding] = (),
    title: str | None = None,
    made: datetime.datetime | None = None,
) -> str:
    """Return the page as HTML.

    Args:
        folder: Where the page will lie; links to run directories are relative to it.
        claims: The paper's claims, each with a verdict.
        title: Title of the page; None names the data sets.
        made: Time to show; None is now.
    """
    lines = repetitions_of(trainings)
    if title is None:
        title = f"Additive noise annealing on {_listed(_words_of(lines, 'data'))}"
    made = made or datetime.datetime.now(datetime.UTC)
    curves = [draw_curves(name, group) for name, group in studies_of(lines).items()]
    drawn = [make() for make in figures(trainings).values()]
    # The first figure brings plotly.
    divs = [_div(figure, number == 0) for number, figure in enumerate([*curves, *drawn])]
    template = files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    return Template(template).substitute(
        version=__version__,
        title=_text(title),
        made=f"{made.day} {made:%B %Y at %H:%M %Z}",
        facts=_facts(lines),
        claims=_claims(claims),
        curves="\n".join(divs[: len(curves)]),
        figures="\n".join(divs[len(curves) :]),
        configurations=_configurations(lines),
        runs=_runs(lines, folder),
    )


def _div(figure: Any, with_script: bool) -> str:
    write_html = import_extra("plotly.io", "paper").to_html
    look = {"displaylogo": False, "responsive": True}
    return write_html(
        figure, full_html=False, include_plotlyjs=with_script, config=look, validate=False
    )


def _text(words: object) -> str:
    """Return words as HTML; everything from outside passes through here."""
    return html.escape(clean(str(words)))


def _listed(parts: Iterable[str]) -> str:
    """Return such as "CIFAR-10, SVHN and digits"."""
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last


def in_words(field: str, value: str) -> str:
    """Return a value of a field as the page has it.

    >>> in_words("interval", "same_end"), in_words("power", "none"), in_words("data", "svhn")
    ('same end', 'static', 'SVHN')
    """
    plain = value.replace("_", " ") if field == "interval" else value
    return VALUE_WORDS.get(field, {}).get(value, plain)


def values_of(lines: Iterable[Repetitions], field: str) -> list[str]:
    every = dict.fromkeys(line.value(field) for line in lines)
    return in_order(field, [value for value in every if value is not None])


def _words_of(lines: Iterable[Repetitions], field: str) -> list[str]:
    return [in_words(field, value) for value in values_of(lines, field)]


def varied(lines: Sequence[Repetitions]) -> list[str]:
    """Return the fields in which lines differ, without those that another one determines, such as
    the quanta of each data set; those of the paper's tables are preferred."""
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
    for name in chosen[::-1]:
        if is_determined(name):
            chosen.remove(name)
    return chosen


def studies_of(lines: Sequence[Repetitions]) -> dict[str, list[Repetitions]]:
    """Return the lines that may share a chart by title, such as "CIFAR-10, 500 epochs": those of
    one data set follow each other, that of most lines first."""
    fields: dict[str, list[str]] = {}
    for data in dict.fromkeys(line.settings["data"] for line in lines):
        rivals = [line.settings for line in lines if line.settings["data"] == data]
        fields[data] = [name for name in SEPARATING if len({row[name] for row in rivals}) > 1]
    groups: dict[str, list[Repetitions]] = {}
    for line in lines:
        parts = [in_words("data", line.settings["data"])]
        for name in fields[line.settings["data"]]:
            pair = [words(name), in_words(name, line.settings[name])]
            parts.append(" ".join(pair if name in ("model", DATA_VERSION) else reversed(pair)))
        groups.setdefault(", ".join(parts), []).append(line)
    place = {name: list(fields).index(each[0].settings["data"]) for name, each in groups.items()}
    order = sorted(groups, key=lambda name: (place[name], -len(groups[name])))
    return {name: groups[name] for name in order}


def draw_curves(title: str, lines: Sequence[Repetitions]) -> dict[str, Any]:
    """Draw all lines of a study, a plot for each forward, coloured by what else was varied."""
    fields = varied(lines)
    columns: list[Any] = values_of(lines, "forward") if "forward" in fields else [None]
    others = [name for name in fields if name not in ("forward", "power")]
    field = "interval" if "interval" in others else next(iter(others), "")
    colours = _colours(lines, field) if field else {}
    figure = blank(title, 1, len(columns), [words(name) for name in columns if name])
    last = [unit.curve[-1] for line in lines for unit in line.trainings]
    metrics = [name for name in METRICS if any(getattr(each, name) is not None for each in last)]
    traces: dict[str, list[dict[str, Any]]] = {metric: [] for metric in metrics}
    for metric, line in product(metrics, lines):
        value = line.value(field) if field else None
        group = "float" if line.is_twin else in_words(field, value) if value else line.name
        colour = GREY if line.is_twin else colours.get(value or "", PALETTE[0])
        dash = "dash" if line.is_twin else DASHES.get(line.value("power") or "", "solid")
        column = columns.index(line.value("forward")) if line.value("forward") in columns else 0
        look = {
            "legendgroup": (label := _text(group)),
            "showlegend": all(trace["legendgroup"] != label for trace in traces[metric]),
            "visible": metric == metrics[0],
            "xaxis": f"x{column + 1}",
            "yaxis": f"y{column + 1}",
        }
        trainings = line.done or line.trainings  # until one is done, all of them
        first, *band = curve_traces(trainings, line.name, colour, dash, metric, **look)
        traces[metric] += [{**first, "name": label}, *band]
    buttons = [
        {
            "label": METRICS[name],
            "method": "update",
            "args": [{"visible": [other == name for other in metrics for _ in traces[other]]}],
        }
        for name in metrics
    ]
    figure.update_layout(updatemenus=[{"buttons": buttons, "x": 1, "y": 1.2, "xanchor": "right"}])
    figure.update_xaxes(title="epoch")
    # A Figure would check each of thousands of traces, for seconds.
    return {**figure.to_dict(), "data": [trace for part in traces.values() for trace in part]}


def _colours(lines: Sequence[Repetitions], field: str) -> dict[str, str]:
    """Return a colour for each value of a field: the paper's, or the next of the palette."""
    known = {**COLOURS.get(field, {}), "none": GREY}
    free = [colour for colour in PALETTE if colour not in COLOURS.get(field, {}).values()]
    values = values_of(lines, field)
    others = [value for value in values if value not in known]
    given = {value: (free or PALETTE)[at % len(free or PALETTE)] for at, value in enumerate(others)}
    return {value: known.get(value) or given[value] for value in values}


# Facts and claims


def _facts(lines: Sequence[Repetitions]) -> str:
    trainings = [training for line in lines for training in line.trainings]
    done, data = sum(training.is_done for training in trainings), _words_of(lines, "data")
    versions = values_of(lines, DATA_VERSION)
    by_size = lambda values: sorted(values, key=lambda text: (len(text), text))
    seeds = by_size({training.settings["seed"] for training in trainings})
    facts = {
        "data" if len(data) == 1 else "data sets": _listed(data),
        **({} if versions == [UNKNOWN] else {"data version": "; ".join(versions)}),
        "configurations": str(len(lines)),
        "folds": ", ".join(by_size({str(training.fold) for training in trainings})),
        **({"seeds": ", ".join(seeds)} if len(seeds) > 1 else {}),
        "units": str(done) if done == len(trainings) else f"{done} of {len(trainings)} done",
        "epochs": _listed(_words_of(lines, "epochs")),
        "their time together": duration(sum(training.seconds or 0.0 for training in trainings)),
    }
    shown = [f"<div><dt>{name}</dt><dd>{_text(value)}</dd></div>" for name, value in facts.items()]
    network = f"Network: {_listed(_words_of(lines, 'model'))}."
    sentences = [*_best(lines), network, *_trained_with(trainings)]
    return f'<dl>{"".join(shown)}</dl><p class="note">{_text(" ".join(sentences))}</p>'


def _best(lines: Sequence[Repetitions]) -> list[str]:
    twins = [replace(line, is_twin=False) for line in lines if line.is_twin]
    sentences = []
    for head, ranked in (("Best", lines), ("In float, for comparison", twins)):
        parts = []
        for line, mean in best_of(ranked):
            data = in_words("data", line.settings["data"])
            by = "" if len(ranked) == 1 and twins else f" by {line.name}"
            parts.append(f"{mean.in_hundredths(digits=2)} % on {data}{by}")
        if parts:
            sentences.append(f"{head}: {'; '.join(parts)}.")
    return sentences


def _trained_with(trainings: Sequence[Training]) -> list[str]:
    """Return versions and devices that run directories record, and how many do; tables do not."""
    recorded: dict[str, set[str]] = {}
    count = 0
    for training in trainings:
        config = (training.path and read_json(training.path, "config.json")) or {}
        versions = config.get("versions")
        known = {**(versions if isinstance(versions, dict) else {}), "": config.get("device")}
        known = {name: value for name, value in known.items() if isinstance(value, str)}
        for name, value in known.items():
            recorded.setdefault(name, set()).add(value)
        count += bool(known)
    if not count:
        return []
    devices = recorded.pop("", set())
    packages = [f"{name} {_listed(sorted(values))}" for name, values in recorded.items()]
    parts = [f"with {_listed(packages)}"] if packages else []
    parts += [f"on {_listed(sorted(devices))}"] if devices else []
    some = "" if count == len(trainings) else f" (recorded by {count} of {len(trainings)} units)"
    return [f"Trained {', '.join(parts)}{some}."]


def _claims(claims: Sequence[Finding]) -> str:
    if not claims:
        return ""
    counts = Counter[str](row.verdict for row in claims)
    counted = [
        f"{counts[verdict]} {plural if counts[verdict] > 1 else verdict}"
        for verdict, (_, plural) in VERDICTS.items()
        if counts[verdict]
    ]
    rows = [
        f'<li><b>{_text(row.claim)}</b> <span class="{row.verdict.replace(" ", "-")}">'
        f"{VERDICTS[row.verdict][0]} {row.verdict}</span><p>The paper: {_text(row.says)}</p>"
        f"<p>Measured: {_text(row.measured)}</p></li>"
        for row in claims
    ]
    summary = f"Of {len(claims)} claims, {_listed(counted)}. {VERDICT_NOTE}"
    return (
        '<h2 id="claims">What the paper says, and what was measured</h2>\n'
        f'<p>{_text(summary)}</p><ol class="claims">{"".join(rows)}</ol>'
    )


# Tables

Cell = tuple[float | None, str]
"""The number that a column is sorted by, None for a word, and what is shown as HTML."""


def _configurations(lines: Sequence[Repetitions]) -> str:
    """Return a row for each configuration, the best first, averaged over the repetitions done."""
    accuracy = lambda line: mean.value if (mean := line.accuracy) else -1.0
    rows, fields = list[dict[str, Cell]](), varied(lines)
    for line in sorted(lines, key=accuracy, reverse=True):
        done, runs = len(line.done), len(line.trainings)
        seconds, best = line.mean("seconds"), line.mean("best_valid_accuracy")
        time = None if seconds is None else seconds.value
        rows.append(
            {
                "configuration": (None, _text(line.name)),
                "validation, %": _percent(line.mean("valid_accuracy")),
                "best epoch, %": _percent(best and best.value),
                "test, %": _percent(line.mean("test_accuracy")),
                "runs": (done, str(done) if done == runs else f"{done} of {runs}"),
                "time": _duration(time),
                **{words(name): _word(name, line.value(name)) for name in fields},
            }
        )
    return _table("configurations", rows)


def _runs(lines: Sequence[Repetitions], folder: Path) -> str:
    """Return a row for each training, with a link to what was recorded of it."""
    rows = []
    for line in lines:
        for unit in line.trainings:
            epochs, rate = len(unit.curve), unit.images_per_second
            of = "" if unit.is_done else f" of {_text(unit.settings['epochs'])}"
            rows.append(
                {
                    "configuration": (None, _config(unit, folder)),
                    "data set": _word("data", line.settings["data"]),
                    "fold": (-1 if unit.fold == "all" else unit.fold, str(unit.fold)),
                    "seed": (unit.recipe.run.seed, str(unit.recipe.run.seed)),
                    "epochs": (epochs, f"{epochs}{of}"),
                    "validation, %": _percent(unit.valid_accuracy),
                    "best epoch, %": _percent(unit.best_valid_accuracy),
                    "test, %": _percent(unit.test_accuracy),
                    "time": _duration(unit.seconds),
                    "images / s": (rate, f"{rate:,.0f}" if rate is not None else "–"),
                }
            )
    return _table("runs", rows)


def _table(name: str, rows: Sequence[Mapping[str, Cell]]) -> str:
    """Return a table; columns of accuracies that no training has are left out."""
    is_empty = lambda head: "%" in head and all(row[head][1] == "–" for row in rows)
    heads = [head for head in rows[0] if not is_empty(head)]
    sort_by = lambda number: "" if number is None else f' data-value="{number:.6g}"'
    body = "\n".join(
        f"<tr>{''.join(f'<td{sort_by(row[head][0])}>{row[head][1]}</td>' for head in heads)}</tr>"
        for row in rows
    )
    top = "".join(f"<th>{head}</th>" for head in heads)
    return (
        f'<div class="box"><table id="{name}-table"><thead><tr>{top}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _percent(accuracy: Mean | float | None) -> Cell:
    if accuracy is None:
        return -1.0, "–"
    if isinstance(accuracy, Mean):
        return accuracy.value, accuracy.in_hundredths(digits=2)
    return accuracy, f"{100 * accuracy:.2f}"


def _duration(seconds: float | None) -> Cell:
    return seconds, "–" if seconds is None else duration(seconds)


def _word(field: str, value: str | None) -> Cell:
    return None, "–" if value is None else _text(in_words(field, value))


def _config(unit: Training, folder: Path) -> str:
    """Return the name of a training, with a link to its config.json if there is one."""
    name = _text(unit.configuration)
    if unit.path is not None and read_json(unit.path, "config.json") is not None:
        with contextlib.suppress(ValueError):  # there is no path to another drive
            relative = Path(os.path.relpath(unit.path / "config.json", folder)).as_posix()
            # A folder may be named javascript: but "./" and a quoted colon make no such address.
            return f'<a href="./{quote(os.fsencode(relative))}">{name}</a>'
    return name
