"""What the page says in words: what it is about, the paper's claims, and pictures."""

import base64
import datetime
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from softstair import __version__
from softstair.experiments.report import names
from softstair.experiments.report.embed import recorded
from softstair.experiments.report.study import Folds, values_of
from softstair.experiments.report.words import duration, element, listed, percent, text, unbroken
from softstair.experiments.results import DATA_VERSION, UNKNOWN, Training

__all__ = ["VERDICTS", "Row", "claims_of", "facts", "pictures", "title_of"]

IN_PART = (
    "Verdicts are of running statistics, as the paper evaluates, and of the longest trainings that "
    "can tell; what shorter ones and fresh statistics say is given behind them. In part: a "
    "difference may be chance, some of the claim holds and some does not, or not all that it "
    "speaks of was trained."
)
VERDICTS = {
    "holds": ("✓", "holds", "hold"),
    "holds in part": ("◐", "holds in part", "hold in part"),
    "does not hold": ("✗", "does not hold", "do not hold"),
    "not tested": ("–", "not tested", "not tested"),
}
"""A sign, and how one claim and how several are counted."""


class Row(Protocol):
    """A claim of the paper, and what was measured.

    claim      what it is about, in a few words
    says       what the paper says
    verdict    one of :data:`VERDICTS`
    measured   what was measured, in a sentence
    """

    @property
    def claim(self) -> str: ...
    @property
    def says(self) -> str: ...
    @property
    def verdict(self) -> str: ...
    @property
    def measured(self) -> str: ...


def title_of(lines: Sequence[Folds]) -> str:
    """Such as "Additive noise annealing on SVHN"."""
    return f"Additive noise annealing on {listed(_values(lines, 'data'))}"


def facts(lines: Sequence[Folds], made: datetime.datetime) -> str:
    """How much was trained, on what and with what."""
    units = [unit for line in lines for unit in line.units]
    done = sum(unit.is_done for unit in units)
    short = {
        "data" if len(_values(lines, "data")) == 1 else "data sets": listed(_values(lines, "data")),
        **_versions(lines),
        "configurations": str(len(lines)),
        "folds": ", ".join(map(str, sorted({unit.fold for unit in units}))),
        "units": str(done) if done == len(units) else f"{done} of {len(units)} done",
        "epochs": listed(_values(lines, "epochs")),
        "their time together": duration(sum(unit.seconds or 0.0 for unit in units)),
    }
    tiles = [
        element("div", [element("dt", text(name)), element("dd", unbroken(words))])
        for name, words in short.items()
    ]
    said = [*_best(lines), f"Network: {listed(_values(lines, 'model'))}.", *_trained_with(units)]
    said += [f"Page made on {made.day} {made:%B %Y at %H:%M %Z} by softstair {__version__}."]
    return element("dl", tiles, {"class": "facts"}) + element(
        "p", [element("span", unbroken(one)) + " " for one in said], {"class": "note"}
    )


def claims_of(claims: Iterable[Row]) -> str:
    """What the paper says beside what was measured; nothing where there is no claim."""
    rows = list(claims)
    if not rows:
        return ""
    for row in rows:
        if row.verdict not in VERDICTS:
            raise ValueError(
                f"a verdict must be one of {', '.join(VERDICTS)}, but {row.verdict!r} was given."
            )
    counts = Counter(row.verdict for row in rows)
    said = [
        f"{counts[one]} {VERDICTS[one][1 + (counts[one] > 1)]}" for one in VERDICTS if counts[one]
    ]
    return element(
        "section",
        [
            "<h2>What the paper says, and what was measured</h2>\n",
            element("p", text(f"Of {len(rows)} claims, {listed(said)}. {IN_PART}")),
            element("ol", ["\n", *map(_claim, rows)], {"class": "claims"}),
        ],
        {"id": "claims"},
    )


def pictures(figures: Mapping[str, str]) -> str:
    """Drawings in SVG, as images: whatever is in them cannot run."""
    if not figures:
        return ""
    drawn = [
        element(
            "figure",
            [
                f'<img alt="{text(name)}" src="data:image/svg+xml;base64,'
                f'{base64.b64encode(drawing.encode()).decode()}">',
                element("figcaption", text(name)),
            ],
        )
        for name, drawing in figures.items()
    ]
    return element(
        "section",
        ["<h2>Figures</h2>\n", element("div", drawn, {"class": "figures"})],
        {"id": "figures"},
    )


def _claim(row: Row) -> str:
    sign, words, _ = VERDICTS[row.verdict]
    kind = row.verdict.replace(" ", "-")
    badge = f'<span class="badge"><span aria-hidden="true">{sign}</span> {words}</span>'
    columns = [
        element("div", [element("h4", "the paper"), element("p", text(row.says))]),
        element("div", [element("h4", "measured"), element("p", text(row.measured))]),
    ]
    head = element("div", [element("h3", text(row.claim)), badge], {"class": "claim-head"})
    body = element("div", columns, {"class": "claim-body"})
    return element("li", [head, body], {"class": f"claim {kind}"}) + "\n"


def _values(lines: Sequence[Folds], name: str) -> list[str]:
    return [names.value(name, one) for one in values_of(lines, name)]


def _versions(lines: Sequence[Folds]) -> dict[str, str]:
    """Which versions of the data sets were trained on, if any is recorded."""
    known = [line for line in lines if DATA_VERSION in line.settings]
    values = values_of(known, DATA_VERSION)
    return {} if set(values) <= {UNKNOWN} else {"data version": "; ".join(values)}


def _best(lines: Sequence[Folds]) -> list[str]:
    """The best accuracy in the end of each data set; that of a float twin is another matter."""
    found: dict[bool, dict[str, str]] = {False: {}, True: {}}
    ranked = [(mean, line) for line in lines if (mean := line.outcome("valid_accuracy"))]
    for mean, line in sorted(ranked, key=lambda pair: -pair[0].value):
        data = names.value("data", line.settings["data"])
        alone = line.is_twin and sum(one.is_twin for one in lines) == 1
        by = "" if alone else f" by {line.name}"
        found[line.is_twin].setdefault(data, f"{percent(mean)} % on {data}{by}")
    heads = {False: "Best", True: "In float, for comparison"}
    return [f"{heads[one]}: {'; '.join(best.values())}." for one, best in found.items() if best]


def _trained_with(units: Sequence[Training]) -> list[str]:
    """Versions and devices, and of how many units they are."""
    found = recorded(units)
    used = {name: listed(values) for name, values in found.values.items()}
    device = f"on {used.pop('device')}" if "device" in used else ""
    packages = listed(f"{name} {one}" for name, one in used.items())
    told = ", ".join(filter(None, [packages and f"with {packages}", device]))
    if not told:
        return []
    if found.units == len(units):
        return [f"Trained {told}."]
    were = "was" if found.units == 1 else "were"
    rest = len(units) - found.units
    record = "one does not record it" if rest == 1 else f"{rest} do not record it"
    return [f"{found.units} of {len(units)} units {were} trained {told}; the other {record}."]
