"""The report: one HTML file that opens offline and makes no requests.

Text, tables and claims are HTML, so the page can be read without scripts. Its script draws the
curves, sorts the tables and filters both. The page's content security policy forbids every request
and every script but its own.
"""

import base64
import datetime
import hashlib
import html
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from paper.claims import Finding
from paper.mean import Mean
from paper.report.lines import clean, data_of, escaped, in_words, values_of, varied
from paper.studies import Repetitions, best_of, duration, repetitions_of
from paper.tables import DATA_VERSION, UNKNOWN, Training
from softstair import __version__
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


def write(trainings: Sequence[Training], file: Path | str, *args: Any, **options: Any) -> None:
    """Write the page, with the arguments of :func:`page`."""
    file = Path(file)
    # As bytes: the policy has the digest of the script, line endings included.
    file.write_bytes(page(trainings, file.parent, *args, **options).encode())


def page(
    trainings: Sequence[Training],
    folder: Path,
    claims: Sequence[Finding] = (),
    figures: Mapping[str, str] | None = None,
    title: str | None = None,
    made: datetime.datetime | None = None,
) -> str:
    """Return the page as HTML.

    Args:
        folder: Where the page will lie; links to run directories are relative to it.
        claims: The paper's claims, each with a verdict.
        figures: Drawings in SVG, by their captions.
        title: Title of the page; None names the data sets.
        made: Time to show; None is now.
    """
    lines = repetitions_of(trainings)
    if title is None:
        data = [in_words("data", value) for value in values_of(lines, "data")]
        title = f"Additive noise annealing on {_listed(data)}"
    style, script = _resource("report.css"), _resource("chart.js") + _resource("report.js")
    absent = {"claims": not claims, "figures": not figures}
    names = ("claims", "curves", "figures", "configurations", "runs")
    links = [f'<a href="#{name}">{name}</a>' for name in names if not absent.get(name)]
    return Template(_resource("report.html")).substitute(
        policy=(
            f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
            "img-src data:; base-uri 'none'; form-action 'none'"
        ),
        version=_text(__version__),
        title=_text(title),
        heading=_unbroken(title),
        links="\n".join(links),
        facts=_facts(lines, made or datetime.datetime.now(datetime.UTC)),
        claims=_claims_section(claims),
        figures=_figures_section(figures or {}),
        configurations=_configurations_table(lines),
        runs=_runs_table(lines),
        style=style,
        data=escaped(data_of(lines, folder)),
        script=script,
    )


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _text(words: object) -> str:
    """Return words as HTML; everything from outside passes through here."""
    return html.escape(clean(str(words)))


def _unbroken(words: str) -> str:
    """Return words as HTML in which a name such as CIFAR-10 stays on one line."""
    return re.sub(r"\b[A-Za-z]{1,9}-\d{1,4}\b", r'<span class="whole">\g<0></span>', _text(words))


def _listed(words: Iterable[str]) -> str:
    """Return such as "CIFAR-10, SVHN and digits"."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def _facts(lines: Sequence[Repetitions], made: datetime.datetime) -> str:
    trainings = [training for line in lines for training in line.trainings]
    done = sum(training.is_done for training in trainings)
    words_of = lambda field: [in_words(field, value) for value in values_of(lines, field)]
    data = words_of("data")
    versions = values_of(lines, DATA_VERSION)
    seeds = sorted({training.settings["seed"] for training in trainings}, key=_by_size)
    tiles = {
        "data" if len(data) == 1 else "data sets": _listed(data),
        **({} if versions == [UNKNOWN] else {"data version": "; ".join(versions)}),
        "configurations": str(len(lines)),
        "folds": ", ".join(sorted({str(training.fold) for training in trainings}, key=_by_size)),
        **({"seeds": ", ".join(seeds)} if len(seeds) > 1 else {}),
        "units": str(done) if done == len(trainings) else f"{done} of {len(trainings)} done",
        "epochs": _listed(words_of("epochs")),
        "their time together": duration(sum(training.seconds or 0.0 for training in trainings)),
    }
    shown = [
        f"<div><dt>{name}</dt><dd>{_unbroken(words)}</dd></div>" for name, words in tiles.items()
    ]
    sentences = [
        *_best(lines),
        f"Network: {_listed(words_of('model'))}.",
        *_trained_with(trainings),
        f"Page made on {made.day} {made:%B %Y at %H:%M %Z} by softstair {__version__}.",
    ]
    note = " ".join(f"<span>{_unbroken(sentence)}</span>" for sentence in sentences)
    return f'<dl class="facts">{"".join(shown)}</dl><p class="note">{note}</p>'


def _claims_section(claims: Sequence[Finding]) -> str:
    if not claims:
        return ""
    counts = Counter[str](row.verdict for row in claims)
    counted = [
        f"{counts[verdict]} {plural if counts[verdict] > 1 else verdict}"
        for verdict, (_, plural) in VERDICTS.items()
        if counts[verdict]
    ]
    summary = _text(f"Of {len(claims)} claims, {_listed(counted)}. {VERDICT_NOTE}")
    rows = [
        f'<li class="claim {row.verdict.replace(" ", "-")}"><div class="claim-head">'
        f'<h3>{_text(row.claim)}</h3><span class="badge"><span aria-hidden="true">'
        f"{VERDICTS[row.verdict][0]}</span> {row.verdict}</span></div>"
        f'<div class="claim-body"><div><h4>the paper</h4><p>{_text(row.says)}</p></div>'
        f"<div><h4>measured</h4><p>{_text(row.measured)}</p></div></div></li>\n"
        for row in claims
    ]
    return (
        '<section id="claims"><h2>What the paper says, and what was measured</h2>\n'
        f'<p>{summary}</p><ol class="claims">\n{"".join(rows)}</ol></section>'
    )


def _figures_section(figures: Mapping[str, str]) -> str:
    """Return drawings in SVG as images: whatever is in them cannot run."""
    if not figures:
        return ""
    drawn = [
        f'<figure><img alt="{_text(name)}" src="data:image/svg+xml;base64,'
        f'{base64.b64encode(drawing.encode()).decode()}"><figcaption>{_text(name)}</figcaption>'
        "</figure>"
        for name, drawing in figures.items()
    ]
    grid = f'<div class="figures">{"".join(drawn)}</div>'
    return f'<section id="figures"><h2>Figures</h2>\n{grid}</section>'


def _configurations_table(lines: Sequence[Repetitions]) -> str:
    """Return a row for each configuration, the best first, averaged over the repetitions done."""
    fields = varied(lines, strict=True)
    accuracy = lambda line: mean.value if (mean := line.accuracy) else -1.0
    is_validated = any(unit.fold != "all" for line in lines for unit in line.trainings)
    levels = [level for line in lines if (level := accuracy(line)) >= 0] or [0.0]
    room = 0.08 * (max(levels) - min(levels)) or 0.01
    scale = max(min(levels) - room, 0.0), min(max(levels) + room, 1.0)
    with_dots = lambda mean: _percent(mean) + _dots(mean, *scale)
    rows = []
    for index in sorted(range(len(lines)), key=lambda index: -accuracy(lines[index])):
        line = lines[index]
        done, runs = len(line.done), len(line.trainings)
        cells = {
            "validation, %": _cell(line.mean("valid_accuracy"), with_dots),
            "best epoch, %": _cell(line.mean("best_valid_accuracy"), lambda m: _percent(m.value)),
            "test, %": _cell(line.mean("test_accuracy"), _percent if is_validated else with_dots),
            "runs": _cell(done, str(done) if done == runs else f"{done} of {runs}"),
            "time": _cell(line.mean("seconds"), lambda mean: duration(mean.value)),
        }
        cells |= {in_words(name): _word(name, line.value(name)) for name in fields}
        rows.append((f'data-line="{index}"', line.name, cells))
    ranked_by = "validation, %" if is_validated else "test, %"
    return _table("configurations-table", rows, ranked_by)


def _runs_table(lines: Sequence[Repetitions]) -> str:
    """Return a row for each training, with a link to its configuration."""
    several = len(values_of(lines, "data")) > 1
    has_seeds = len({unit.recipe.seed for line in lines for unit in line.trainings}) > 1
    rows: list[tuple[str, str, dict[str, str]]] = []
    for index, line in enumerate(lines):
        for unit in line.trainings:
            epochs, number = len(unit.curve), len(rows)
            of = "" if unit.is_done else f" of {_text(unit.settings['epochs'])}"
            cells = {in_words("data"): _word("data", line.settings["data"])} if several else {}
            cells |= {
                "fold": _cell(-1 if unit.fold == "all" else unit.fold, str(unit.fold)),
                **({"seed": _cell(unit.recipe.seed, str)} if has_seeds else {}),
                "epochs": _cell(epochs, f"{epochs}{of}"),
                "validation, %": _cell(unit.valid_accuracy, _percent),
                "best epoch, %": _cell(unit.best_valid_accuracy, _percent),
                "test, %": _cell(unit.test_accuracy, _percent),
                "time": _cell(unit.seconds, duration),
                "images / s": _cell(unit.images_per_second, "{:,.0f}".format),
                "trained with": f'<td><a href="#run-{number}">configuration</a></td>',
            }
            rows.append((f'id="run-{number}" data-line="{index}"', line.name, cells))
    return _table("runs-table", rows)


def _table(
    name: str, rows: Sequence[tuple[str, str, Mapping[str, str]]], descending: str = ""
) -> str:
    """Return a table of rows (attributes, name, cells by their heads), sorted by a column.

    Accuracies that no training has are left out.
    """
    is_empty = lambda head: all(cells[head] == _cell(None, "") for _, _, cells in rows)
    heads = [head for head in rows[0][2] if "%" not in head or not is_empty(head)]
    head = '<th scope="col" aria-sort="none">configuration</th>'
    for words in heads:
        number = ' class="number"' if 'class="number' in rows[0][2][words] else ""
        sort = f' aria-sort="{"descending" if words == descending else "none"}"'
        head += f'<th scope="col"{number}{"" if words == "trained with" else sort}>{words}</th>'
    body = "\n".join(
        f'<tr {attributes}><th scope="row" class="name">{_text(row)}</th>'
        f"{''.join(cells[words] for words in heads)}</tr>"
        for attributes, row, cells in rows
    )
    # A box that scrolls must be reachable from the keyboard.
    return (
        f'<div class="box" tabindex="0" role="region" aria-label="{name.replace("-", " ")}">'
        f'<table id="{name}"><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>'
        "</div>"
    )


def _cell(value: Mean | float | None, words: str | Callable[[Any], str]) -> str:
    """Return a cell that sorts by its number; ``words`` are text or make it of the value."""
    if value is None:
        return '<td class="number missing">–</td>'
    number = value.value if isinstance(value, Mean) else value
    shown = words if isinstance(words, str) else words(value)
    return f'<td class="number" data-value="{number:.6g}">{shown}</td>'


def _word(field: str, value: str | None) -> str:
    missing = '<td class="missing">–</td>'
    return missing if value is None else f"<td>{_text(in_words(field, value))}</td>"


def _dots(accuracy: Mean, low: float, high: float) -> str:
    """Return a mean as a dot and its interval, or the range of two repetitions, as a line."""
    at = lambda value: round(100 * min(max((value - low) / (high - low), 0.0), 1.0), 1)
    left, right = map(at, accuracy.bounds)
    return (
        '<svg class="dots" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<path d="M{left} 4H{right}"/><path class="dot" d="M{at(accuracy.value)} 4h0"/></svg>'
    )


def _percent(accuracy: Mean | float) -> str:
    if isinstance(accuracy, Mean):
        return accuracy.in_hundredths(digits=2)
    return f"{100 * accuracy:.2f}"


def _best(lines: Sequence[Repetitions]) -> list[str]:
    twins = [replace(line, is_twin=False) for line in lines if line.is_twin]
    sentences = []
    for head, ranked in (("Best", lines), ("In float, for comparison", twins)):
        parts = []
        for line, mean in best_of(ranked):
            data = in_words("data", line.settings["data"])
            by = "" if len(ranked) == 1 and twins else f" by {line.name}"
            parts.append(f"{_percent(mean)} % on {data}{by}")
        if parts:
            sentences.append(f"{head}: {'; '.join(parts)}.")
    return sentences


def _by_size(text: str) -> tuple[int, str]:
    """Sort numbers by size."""
    return len(text), text


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
    words = [f"with {_listed(packages)}"] if packages else []
    words += [f"on {_listed(sorted(devices))}"] if devices else []
    some = "" if count == len(trainings) else f" (recorded by {count} of {len(trainings)} units)"
    return [f"Trained {', '.join(words)}{some}."]
